"""Changes to a model that is already built: another attention, SpikingJelly's modules, folded norms."""

from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.convert.swap import SwapReport, swap_attention

__all__ = ["SwapReport", "fold_batch_norm", "swap_attention"]
