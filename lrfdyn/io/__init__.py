"""Weight files, model folders and repositories, model cards, checkpoint files."""

from lrfdyn.io.hub import HubMixin, from_pretrained
from lrfdyn.io.weights import load_tensors, save_tensors

__all__ = ["HubMixin", "from_pretrained", "load_tensors", "save_tensors"]
