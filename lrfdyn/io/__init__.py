"""Weight files, model folders and repositories, model cards, checkpoint files."""

from lrfdyn.io.hub import HubMixin, from_pretrained
from lrfdyn.io.weights import load_tensors, load_weights, save_tensors, save_weights

__all__ = ["HubMixin", "from_pretrained", "load_tensors", "load_weights", "save_tensors", "save_weights"]
