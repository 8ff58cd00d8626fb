"""Changes to a model that is already built: another attention, SpikingJelly's modules, folded norms."""
