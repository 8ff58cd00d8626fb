"""One pass over the images for all measurements that only look: hooks on a model, removed when the pass is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lrfdyn.attention import Attention
from lrfdyn.attention.base import Spikes
from lrfdyn.ops.dispatch import plain_operations

ImageTensors = Tensor | Iterable[Tensor]  # images `[n, C, H, W]` or batches of them
OnBatch = Callable[[int], None]  # called with the number of images of every batch


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


def as_batches(images: ImageTensors, batch_size: int = 64) -> Iterable[Tensor]:
    """Split images `[n, C, H, W]`; an iterable of batches is returned as it is."""
    return images.split(batch_size) if isinstance(images, Tensor) else images
