"""A whole network as a list of integer operations, and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from lrfdyn.checks import checked, fits, hints_of
from lrfdyn.deploy.integer.operations import OPERATIONS, Head, Operation, Value
from lrfdyn.deploy.integer.reference import run
from lrfdyn.errors import LrfdynError, first_line, require, require_integer, shown
from lrfdyn.files import expanded
from lrfdyn.io.weights import checksum, load_tensors, save_tensors
from lrfdyn.models.base import LIMITS

FORMAT = 1
BATCH_NUMBERS = 2**22  # of the largest value, for images that are computed together: more leave the caches


class IntegerModel:
    """A network in integers: pixels in, logits in int32 out, the same bits on every machine; made by `quantize`.

    - `shape`: Channels, height and width of a picture.
    - `time_steps`: How often it is shown.
    - `scale`: What a logit of 1 stands for. No class is ranked by it.
    - `operations`: What is computed, one after the other; the last gives the logits.
    - `facts`: What the model says about itself: its name, classes and preprocessing.
    - `values`: The shape and interval of the pixels, then of what every operation gives.

    Called with levels from 0 to 255, uint8 `[B, C, H, W]`, it gives `[B, classes]`:

        logits = integer(images)
        probabilities = (logits * integer.scale).softmax(1)
    """

    @checked
    def __init__(
        self,
        shape: Sequence[int],
        time_steps: int,
        scale: float,
        operations: Sequence[Operation],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.shape, self.time_steps, self.scale, self.facts = tuple(shape), time_steps, scale, dict(facts or {})
        known = len(self.shape) == 3 and min(self.shape) >= 1 and max(self.shape) <= LIMITS["image_size"][1]
        require(known, f"shape: expected [C, H, W], got {shown(shape)}")
        require_integer("time_steps", time_steps, *LIMITS["time_steps"])
        require(scale > 0, f"scale: expected a positive number, got {scale}")
        self.operations = tuple(operations)
        self.values = infer_values(self.shape, time_steps, self.operations)
        last = self.operations[-1] if self.operations else None
        require(isinstance(last, Head), "operations: expected a head as the last")

    @property
    def bytes(self) -> int:
        """Those of all weights."""
        return sum(t.numel() * t.itemsize for operation in self.operations for t in tensors_of(operation).values())

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits `[B, classes]` in int32 of pictures `[B, C, H, W]` in uint8, on the CPU."""
        known = isinstance(images, Tensor) and images.dim() == 4 and tuple(images.shape[1:]) == self.shape
        what = list(images.shape) if isinstance(images, Tensor) else shown(images)
        require(known, f"images: expected [B, {', '.join(map(str, self.shape))}], got {what}")
        require(images.dtype == torch.uint8, f"images: expected levels in uint8, got {images.dtype}")
        require(len(images) >= 1, "images: expected at least one")
        largest = self.time_steps * max(value.channels * value.tokens for value in self.values)
        batch = max(1, min(64, BATCH_NUMBERS // largest))
        parts = [self.run(part)[-1].reshape(len(part), -1) for part in images.cpu().split(batch)]
        return torch.cat(parts).int()

    def run(self, images: Tensor, keep: Sequence[int] = ()) -> list[Tensor]:
        """All values of `keep` (0: the pixels) and the logits, in order: int64 `[T, B, C, H, W]`."""
        held: dict[int, Tensor] = {0: images.long().unsqueeze(0)}
        last = {i: n for n, operation in enumerate(self.operations) for i in operation.inputs}
        for n, operation in enumerate(self.operations):
            held[n + 1] = run(operation, *(held[i] for i in operation.inputs), time_steps=self.time_steps)
            for i in set(operation.inputs):
                if last[i] == n and i not in keep:
                    del held[i]
        return [held[i] for i in sorted({*keep, len(self.operations)})]

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file, which `load_integer` reads."""
        tensors = {
            f"{n}.{name}": tensor
            for n, operation in enumerate(self.operations)
            for name, tensor in tensors_of(operation).items()
        }
        meta: dict[str, Any] = {
            "integer": FORMAT,
            "shape": list(self.shape),
            "time_steps": self.time_steps,
            "scale": self.scale,
            "facts": self.facts,
            "operations": [
                {"kind": type(operation).__name__}
                | {k: v for k, v in vars(operation).items() if not isinstance(v, Tensor) and v is not None}
                for operation in self.operations
            ],
        }
        target = expanded(path, "path")
        try:
            save_tensors(target, tensors, {**meta, "checksum": checksum(tensors, _as_json(meta))})
        except OSError as error:
            raise LrfdynError(f"path: cannot write {target} ({error.strerror or first_line(error)})") from None

    def __repr__(self) -> str:
        return f"IntegerModel({len(self.operations)} operations, shape={list(self.shape)}, bytes={self.bytes})"


def random_pictures(model: IntegerModel, count: int = 2) -> Tensor:
    """Levels `[count, C, H, W]`, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, *model.shape), generator=generator, dtype=torch.uint8)


def _as_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from a file: tuples are lists."""
    return json.loads(json.dumps(meta))


def tensors_of(operation: Operation) -> dict[str, Tensor]:
    """The weights of an operation by name."""
    return {name: value for name, value in vars(operation).items() if isinstance(value, Tensor)}


def infer_values(shape: Sequence[int], time_steps: int, operations: Sequence[Operation]) -> tuple[Value, ...]:
    """The shapes and intervals of the pixels and of what every operation gives."""
    zero = torch.zeros(shape[0], dtype=torch.int64)
    values = [Value(zero, zero + 255, shape[1], shape[2], timed=False)]
    for operation in operations:
        known = len(operation.inputs) == operation.arity and all(0 <= i < len(values) for i in operation.inputs)
        operation.check(known, f"{operation.arity} of the values before it, got {list(operation.inputs)}")
        values.append(operation.infer([values[i] for i in operation.inputs], time_steps))
    return tuple(values)


@checked
def load_integer(path: str | os.PathLike[str]) -> IntegerModel:
    """The model in a file of `IntegerModel.save`. A file that is cut off or was changed is an error."""
    source = expanded(path, "path")
    tensors, meta = load_tensors(source)
    expected = meta.pop("checksum", None)
    require(meta.get("integer") == FORMAT, f"path: {source} is not the file of an integer model")
    require(checksum(tensors, meta) == expected, f"path: {source} is damaged (its checksum does not fit)")
    try:
        operations = [_read_operation(n, dict(entry), tensors) for n, entry in enumerate(meta["operations"])]
        return IntegerModel(meta["shape"], meta["time_steps"], meta["scale"], operations, meta["facts"])
    except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise LrfdynError(f"path: {source} is not the file of an integer model ({first_line(error)})") from None


def _read_operation(n: int, entry: dict[str, Any], tensors: Mapping[str, Tensor]) -> Operation:
    kind: Any = OPERATIONS[entry.pop("kind")]
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    given |= {f.name: tensors[f"{n}.{f.name}"] for f in fields(kind) if f"{n}.{f.name}" in tensors}
    operation: Operation = kind(**given)
    hints = hints_of(kind)
    for f in fields(kind):
        value = getattr(operation, f.name)
        operation.check(fits(value, hints[f.name]), f"another {f.name}")
    return operation
