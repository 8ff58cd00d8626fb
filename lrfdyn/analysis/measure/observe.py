"""One pass over the images for all measurements that only look: hooks on a model, removed when the pass is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lrfdyn.attention import Attention
from lrfdyn.attention.base import Spikes
from lrfdyn.nn.neurons import Neuron
from lrfdyn.ops.dispatch import plain_operations

AttentionNote = Callable[[str, Attention, Tensor, Spikes], None]


class Observer(Protocol):
    """Something that hooks itself into a model."""

    def watch(self, model: nn.Module) -> list[RemovableHandle]: ...


def watch_neurons(model: nn.Module, note: Callable[[str, Tensor], None]) -> list[RemovableHandle]:
    """Call `note(name, spikes)` for every neuron output `[T, B, ...]`."""

    def hook(name: str) -> Callable[..., None]:
        return lambda _module, _args, spikes: note(name, spikes.detach())

    return [m.register_forward_hook(hook(name)) for name, m in model.named_modules() if isinstance(m, Neuron)]


def watch_attentions(model: nn.Module, note: AttentionNote) -> list[RemovableHandle]:
    """Call `note(name, layer, input, projected)` after every attention layer, with the spikes of its projections."""
    handles: list[RemovableHandle] = []

    def keep(held: dict[str, Tensor], name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, spikes: Tensor) -> None:
            held[name] = spikes.detach()

        return hook

    def done(held: dict[str, Tensor], name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], _out: Tensor) -> None:
            assert isinstance(module, Attention)
            note(name, module, args[0].detach(), dict(held))
            held.clear()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, Attention):
            held: dict[str, Tensor] = {}
            handles += [getattr(module, p).register_forward_hook(keep(held, p)) for p in module.projections]
            handles.append(module.register_forward_hook(done(held, name)))
    return handles


def observe(
    model: nn.Module,
    batches: Iterable[Tensor],
    observers: Sequence[Observer],
    on_batch: Callable[[int], None] = lambda _: None,
) -> int:
    """Run the model over `batches` `[B, C, H, W]` with all observers and return the number of images. `on_batch` is
    called with every batch's size. The plain operations run, on a GPU too: a fused one hides its parts."""
    training = model.training
    handles = [handle for observer in observers for handle in observer.watch(model)]
    images = 0
    try:
        model.eval()
        with torch.no_grad(), plain_operations():
            for batch in batches:
                model(batch)
                size = batch.shape[-4] if batch.dim() >= 4 else len(batch)
                images += size
                on_batch(size)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    return images


def as_batches(images: Tensor | Iterable[Tensor], batch_size: int = 64) -> Iterable[Tensor]:
    """Split images `[n, C, H, W]`; an iterable of batches is returned as it is."""
    return images.split(batch_size) if isinstance(images, Tensor) else images
