"""Neurons, norms and the layers that hosts share."""
