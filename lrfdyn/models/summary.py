"""What a model is made of: its layers, what they give and how many parameters they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lrfdyn.checks import checked
from lrfdyn.models.base import SpikingModel
from lrfdyn.models.registry import create_model


@dataclass(frozen=True)
class Layer:
    """A layer of a summary. `output` is the shape for one image and time step: `[C, H, W]`, or features alone."""

    path: str
    kind: str
    output: tuple[int, ...] | None
    parameters: int


@checked
def count_parameters(model: nn.Module) -> int:
    """The number of parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def meta_model(name: str, **options: Any) -> SpikingModel:
    """Builds a model on the meta device, without memory, for counting."""
    with torch.device("meta"):
        return create_model(name, **options)


def parts(model: nn.Module, depth: int, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules `depth` levels down (those that end earlier too): together they hold every parameter once."""
    for name, child in model.named_children():
        path = prefix + name
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # it holds layers and is not called itself
            yield from parts(child, depth, f"{path}.")
        elif depth == 1 or not list(child.children()) or list(child.parameters(recurse=False)):
            yield path, child
        else:
            yield from parts(child, depth - 1, f"{path}.")


def summarize(model: SpikingModel, depth: int = 2) -> list[Layer]:
    """The layers that hold parameters, `depth` levels down, with their outputs for an image of `model.input_size`."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(path: str, _module: nn.Module, _arguments: Any, output: Any) -> None:
        last = output[-1] if isinstance(output, (list, tuple)) else output
        if isinstance(last, Tensor):
            shapes[path] = tuple(last.shape[-3:] if last.dim() >= 4 else last.shape[-1:])

    with torch.device("meta"):
        twin = type(model)(**model.config).eval()
    # Fake tensors have shapes and no memory. They say to be on a CPU: operations ask the device whether autocast is
    # on, which the meta device cannot answer.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        chosen = {path: part for path, part in parts(twin.to_empty(device="cpu"), depth) if count_parameters(part)}
        for path, part in chosen.items():
            part.register_forward_hook(partial(note, path))
        twin(torch.zeros(1, *model.input_size))
    return [Layer(path, type(part).__name__, shapes.get(path), count_parameters(part)) for path, part in chosen.items()]
