"""NIR files: how they are written, and how they are run, one time step after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.deploy.export.formats import METADATA_KEY, importing
from lrfdyn.deploy.export.nir_graph import nir_graph
from lrfdyn.errors import LrfdynError, first_line, require, require_integer, shown
from lrfdyn.files import json_object, plain_file
from lrfdyn.models.base import LIMITS, SpikingModel


def write_nir(model: SpikingModel, sample: Tensor, path: Path, facts: Mapping[str, Any]) -> None:
    """Writes the graph of `model` for images like `sample` `[2, C, H, W]`. `facts` go into its metadata; with
    `facts["dense"]` no convolution has groups."""
    with importing("format: nir", "nir"):
        import nir
    height, width = sample.shape[2:]
    graph = nir_graph(model, (height, width), facts["dense"])
    graph.metadata = {METADATA_KEY: json.dumps(dict(facts))}
    nir.write(path, graph)


class NirRunner:
    """An exported file in PyTorch, node by node: images `[B, C, H, W]` or films `[B, T, C, H, W]` to logits
    `[B, classes]`, the mean over the time steps of what the graph gives."""

    def __init__(self, path: Path) -> None:
        with importing("runtime: nir", "nir"):
            import nir
        self.path = path
        try:
            # nir 1.0.8 takes the channels of a group for those of the whole input, and would refuse what it wrote.
            graph = nir.read(plain_file(path), type_check=False)
            self.nodes = dict(graph.nodes)
            self.inputs = {name: [source for source, to in graph.edges if to == name] for name in self.nodes}
            self.order = list(TopologicalSorter(self.inputs).static_order())
        except Exception as error:  # HDF5 and the nodes have many kinds
            raise LrfdynError(f"model: {path} is not a NIR file that can be run ({first_line(error)})") from None
        described: Any = graph.metadata.get(METADATA_KEY)
        require(described is not None, f"model: {path} was not exported by lrfdyn: it has no metadata {METADATA_KEY!r}")
        try:
            self.facts: Any = json_object(described)
            self.seconds: Any = self.facts.get("time_step_s")
            require_integer("time_steps", self.facts.get("time_steps"), *LIMITS["time_steps"])
            positive = isinstance(self.seconds, float) and self.seconds > 0
            require(positive, f"time_step_s: expected a positive number, got {shown(self.seconds)}")
        except (TypeError, ValueError) as error:
            raise LrfdynError(f"model: {path}: its metadata {METADATA_KEY!r} cannot be used ({error})") from None

    @torch.inference_mode()
    def __call__(self, images: np.ndarray) -> np.ndarray:
        try:
            outputs = [values["output"] for values in self.steps(torch.from_numpy(images))]
        except LrfdynError:
            raise
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise LrfdynError(f"model: {self.path} cannot be run ({first_line(error)})") from None
        return torch.stack(outputs).mean(0).numpy()

    def steps(self, images: Tensor) -> Iterator[dict[str, Tensor]]:
        """What every node sends, by its name, in one time step after the other."""
        operations = {name: self.operation(node) for name, node in self.nodes.items()}
        for frame in images.unbind(1) if images.dim() == 5 else [images] * self.facts["time_steps"]:
            values: dict[str, Tensor] = {}
            for name in self.order:
                given = [values[source] for source in self.inputs[name]] or [frame]
                values[name] = operations[name](sum(given[1:], given[0]))
            yield values

    def operation(self, node: Any) -> Callable[[Tensor], Tensor]:
        """What a node makes of the sum of its inputs; that of a neuron holds a potential."""

        def pairs(*names: str) -> dict[str, Any]:
            return {name: tuple(map(int, getattr(node, name))) for name in names}

        kind = type(node).__name__
        if kind in ("Input", "Output"):
            return lambda x: x
        if kind == "Flatten":
            return lambda x: x.flatten(1)
        if kind == "Affine":
            return lambda x: F.linear(x, torch.from_numpy(node.weight), torch.from_numpy(node.bias))
        if kind == "AvgPool2d":
            return lambda x: F.avg_pool2d(x, **pairs("kernel_size", "stride", "padding"))
        if kind == "Conv2d":
            weight, bias = torch.from_numpy(node.weight), torch.from_numpy(node.bias)
            how = pairs("stride", "padding", "dilation")
            return lambda x: F.conv2d(x, weight, bias, groups=int(node.groups), **how)
        if kind in ("LIF", "IF"):
            return NirNeuron(node, self.seconds)
        raise LrfdynError(f"model: {self.path} has a node of the kind {kind}, which lrfdyn does not write")


class NirNeuron:
    """A LIF or IF node in steps of so many `seconds`, by Euler's rule: v is kept v + gain x, and fires above the
    threshold."""

    def __init__(self, node: Any, seconds: float) -> None:
        leaks = type(node).__name__ == "LIF"
        rate = seconds / node.tau if leaks else np.full_like(node.r, seconds)
        kept = 1 - rate if leaks else np.ones_like(rate)
        self.numbers = [torch.from_numpy(x) for x in (kept, rate * node.r, node.v_threshold, node.v_reset)]
        self.v: Tensor | float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        kept, gain, threshold, reset = (number.to(x.dtype) for number in self.numbers)
        v = kept * self.v + gain * x
        fired = v > threshold
        self.v = torch.where(fired, reset, v)
        return fired.to(x.dtype)
