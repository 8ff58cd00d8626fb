"""The images that an analysis looks at, and one pass over them for all measurements that only look: hooks on a model,
removed when the pass is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lrfdyn.attention import Attention
from lrfdyn.attention.base import Spikes
from lrfdyn.checks import checked
from lrfdyn.data import Augmentation, create_data
from lrfdyn.data.base import DATA
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.errors import require, shown, unknown_name
from lrfdyn.models import SpikingModel
from lrfdyn.ops.dispatch import plain_operations

RANDOM = "random"
ImageTensors = Tensor | Iterable[Tensor]  # images `[n, C, H, W]` or batches of them
OnBatch = Callable[[int], None]  # called with the number of images of every batch


@dataclass
class Images:
    """Test images of a data set, in batches on the device, or noise of the size that a model wants."""

    name: str
    count: int
    batch_size: int
    device: torch.device
    facts: dict[str, int]  # options of a model for them: classes, size and channels; for noise the size, if asked for
    batches: list[Tensor]
    labels: list[Tensor]
    train: int | None = None  # training images of the data set
    preprocessing: Preprocessing | None = None  # what was done to the images; None for noise and recordings

    @property
    def noun(self) -> str:
        """What one of them is."""
        return "recording" if "time_steps" in self.facts else "image"

    def of(self, model: SpikingModel) -> list[Tensor]:
        """Return the batches `[B, C, H, W]` (of recordings `[T, B, C, H, W]`) for a model, which must be made for their
        channels, size and frames."""
        takes, made_for, _ = model.input_size
        channels, size = self.facts.get("in_channels", takes), self.facts.get("image_size", made_for)
        require(channels == takes, f"data: {self.name} has {channels} channels, the model takes {takes}")
        sizes = f"{self.name} has {self.noun}s of {size} pixels, the model was made for {made_for}; pass --image-size"
        require("image_size" not in model.config or size == made_for, f"data: {sizes}")
        frames = self.facts.get("time_steps", model.time_steps)
        steps = f"{self.name} has {frames} frames a recording, the model has {model.time_steps} time steps"
        require(frames == model.time_steps, f"data: {steps}; pass --frames")
        if self.name != RANDOM:
            return self.batches
        noise = torch.randn(self.count, channels, size, size, generator=torch.Generator().manual_seed(0))
        return list(noise.to(self.device).split(self.batch_size))

    def accuracy(self, model: SpikingModel) -> float | None:
        """Return the top-1 accuracy on these images; None for noise and for a model with other classes."""
        if not self.labels or model.num_classes != self.facts["num_classes"]:
            return None
        model.eval()
        with torch.inference_mode():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(self.batches, self.labels, strict=True))
        return right / self.count


@checked
def load_images(
    name: str,
    root: Path | None,
    count: int,
    batch_size: int,
    device: torch.device,
    image_size: int | None = None,
    frames: int | None = None,
) -> Images:
    """Load `count` test images of the data set `name` in the folder `root`, spread evenly as sorted sets begin with one
    class, or noise for "random". `image_size` is that of the data set (for noise, of each model) without one, `frames`
    the number of frames of a recording, for data sets of recordings."""
    given = {"image_size": image_size, "frames": frames}
    for argument, value in {"images": count, "batch_size": batch_size, **given}.items():
        require(value is None or value >= 1, f"{argument}: expected an integer >= 1, got {value}")
    size = {key: value for key, value in given.items() if value is not None}
    if name.lower() == RANDOM:
        require(root is None, f"data-root: {RANDOM} images are read from no folder, got {root}")
        require(frames is None, f"frames: {RANDOM} images have none, got {frames}")
        return Images(RANDOM, count, batch_size, device, size, [], [])
    if name.lower() not in map(str.lower, DATA):
        raise unknown_name("data", name, [*DATA, RANDOM])
    source = create_data(name, root, Augmentation(), **size)
    require(count <= source.test_images, f"images: {name} has {source.test_images} test images, got {count}")
    batch = source.pick_test_images(np.linspace(0, source.test_images - 1, count).round().astype(np.int64), device)
    require(batch.count > 0, f"data: no test image of {name} could be read")
    facts = {"num_classes": source.num_classes, "image_size": source.image_size, "in_channels": source.in_channels}
    facts |= {} if source.framing is None else {"time_steps": source.framing.steps}
    images = list(batch.images.narrow(-4, 0, batch.count).contiguous().split(batch_size, -4))
    labels = list(batch.labels[: batch.count].split(batch_size))
    how = None if source.framed else Preprocessing.of_data(source)
    return Images(DATA.name_of(name), batch.count, batch_size, device, facts, images, labels, source.train_images, how)


class Observer(Protocol):
    """Something that hooks itself into a model and then knows what was measured."""

    def watch(self, model: nn.Module) -> list[RemovableHandle]: ...

    def record(self) -> dict[str, Any]: ...


def watch_attentions(model: nn.Module, note: Callable[[str, Attention, Tensor, Spikes], None]) -> list[RemovableHandle]:
    """Call `note(name, layer, input, projected)` after every attention layer, with the spikes of its projections."""

    def keep(held: dict[str, Tensor], projection: str, _module: nn.Module, _args: Any, spikes: Tensor) -> None:
        held[projection] = spikes.detach()

    def done(held: dict[str, Tensor], name: str, module: Any, args: tuple[Tensor, ...], _out: Tensor) -> None:
        note(name, module, args[0].detach(), dict(held))
        held.clear()

    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            held: dict[str, Tensor] = {}
            handles += [getattr(module, p).register_forward_hook(partial(keep, held, p)) for p in module.projections]
            handles.append(module.register_forward_hook(partial(done, held, name)))
    return handles


@contextmanager
def hooked(model: nn.Module, handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Evaluation with the plain operations, on a GPU too: a fused one hides its parts. At the end the hooks go."""
    training = model.training
    model.eval()
    try:
        with plain_operations():
            yield
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)


def observe(
    model: nn.Module, images: ImageTensors, *observers: Observer, on_batch: OnBatch = lambda _: None
) -> list[dict[str, Any]]:
    """Run the model over images with all observers and return their records."""
    with torch.no_grad(), hooked(model, [handle for observer in observers for handle in observer.watch(model)]):
        for batch in as_batches(images):
            model(batch)
            on_batch(images_in(batch))
    return [observer.record() for observer in observers]


def images_in(batch: Tensor) -> int:
    """How many images `[B, C, H, W]`, event frames `[T, B, C, H, W]` or vectors `[B, C]` are."""
    return batch.shape[-4] if batch.dim() >= 4 else len(batch)


def as_batches(images: ImageTensors, batch_size: int = 64) -> Iterator[Tensor]:
    """Split images `[n, C, H, W]` or event frames `[T, n, C, H, W]`, or yield batches as they are; none at all and
    empty ones are an error."""
    shape: list[int] | None = None
    if isinstance(images, Tensor) and images.dim():
        images = images.split(batch_size, max(images.dim() - 4, 0))
    for batch in images:
        require(isinstance(batch, Tensor), f"images: expected a tensor or batches of them, got {shown(batch)}")
        shape = list(batch.shape)
        require(0 not in shape, f"images: expected no empty dimension, got {shape}")
        yield batch
    require(shape is not None, "images: expected at least one batch, got none")
