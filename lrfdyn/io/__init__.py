"""Weight files, model folders and repositories, the zoo, model cards, checkpoint files."""

from lrfdyn.io.hub import HubMixin, from_pretrained
from lrfdyn.io.weights import load_tensors, save_tensors
from lrfdyn.io.zoo import Pretrained, list_pretrained

__all__ = ["HubMixin", "Pretrained", "from_pretrained", "list_pretrained", "load_tensors", "save_tensors"]
