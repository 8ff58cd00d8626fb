"""Effective receptive field: how much every input pixel moves the output at the centre."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lrfdyn.analysis.measure.observe import ImageTensors, OnBatch, as_batches, hooked
from lrfdyn.attention import Attention
from lrfdyn.errors import require
from lrfdyn.models.base import SpikingModel

DIGITS = 6  # of the map: more would only make files larger
LARGEST_MAP = 64  # cells a side; larger images are averaged in blocks


class EvenTies(TorchFunctionMode):
    """While it is open, the gradient of a max pool is shared by all inputs that reach the maximum. Among spikes many
    do, and PyTorch gives all of it to the first in raster order, which moves the field up and to the left."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in (F.max_pool2d, torch.max_pool2d) and not given.pop("return_indices", False):
            return even_max_pool(*args, **given)
        return func(*args, **(kwargs or {}))


def even_max_pool(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    """Compute `F.max_pool2d` along one axis and then the other: `amax` shares its gradient among equals."""
    size = F.max_pool2d(x.detach(), kernel_size, stride, padding, dilation, ceil_mode).shape[-2:]
    for axis in (-2, -1):
        kernel, step, pad, gap = (
            value if isinstance(value, int) else value[axis]
            for value in (kernel_size, stride or kernel_size, padding, dilation)
        )
        window = (kernel - 1) * gap + 1
        after = max(0, (size[axis] - 1) * step + window - pad - x.shape[axis])
        x = F.pad(x, (pad, after) if axis == -1 else (0, 0, pad, after), value=-torch.inf)
        x = x.unfold(axis, window, step)[..., ::gap].amax(-1)
    return x


def receptive_field(
    model: SpikingModel, images: ImageTensors, on_batch: OnBatch = lambda _: None, through_attention: bool = True
) -> Tensor:
    """|d centre output / d input| `[H, W]` of images `[n, C, H, W]` or batches of them, summed over channels, averaged
    over images. Spikes pass their surrogate gradient, max pools share theirs among equals. Without `through_attention`,
    no gradient passes q, k and v: only that of the convolutions and shortcuts is left."""
    attentions = [] if through_attention else [m for m in model.modules() if isinstance(m, Attention)]
    layers = [getattr(attention, name) for attention in attentions for name in attention.projections]
    handles = [layer.register_forward_hook(lambda _module, _args, spikes: spikes.detach()) for layer in layers]
    total, count = torch.zeros(()), 0
    with hooked(model, handles), EvenTies():
        for batch in as_batches(images):
            x = batch.detach().clone().requires_grad_()
            features = model.forward_features(x)
            row, column = features.shape[-2] // 2, features.shape[-1] // 2
            (gradient,) = torch.autograd.grad(features[..., row, column].sum(), x)
            total = total.to(x.device) + gradient.abs().sum(-3).flatten(0, -3).sum(0)
            count += batch.shape[-4]
            on_batch(batch.shape[-4])
    require(count > 0, "images: expected at least one batch")
    return total / count


def share_inside(field: Tensor, centre: tuple[int, int]) -> list[dict[str, Any]]:
    """The share of `field` `[H, W]` inside squares of side 1, 3, 5, ... around the pixel `centre`."""
    row, column = ((torch.arange(size) - at).abs() for size, at in zip(field.shape, centre, strict=True))
    ring = torch.maximum(row.unsqueeze(1), column)
    sums = torch.zeros(int(ring.max()) + 1, dtype=field.dtype).index_add_(0, ring.flatten(), field.flatten())
    total = field.sum()
    shares = sums.cumsum(0) / total if total > 0 else torch.zeros_like(sums)
    return [{"side": 2 * r + 1, "share": float(share)} for r, share in enumerate(shares)]


def receptive_field_record(
    model: SpikingModel, images: ImageTensors, on_batch: OnBatch = lambda _: None
) -> dict[str, Any]:
    """Measure the receptive field of a model on images `[n, C, H, W]` or batches of them.

    The record has the map in cells of `pixels_per_cell`, scaled to a maximum of 1, the pixel `centre` that the output
    looks at, the share inside growing squares around it, and the side of the square that holds half.
    `without_attention` has the same shares with the gradient of attention cut, and how much of all gradient is left.
    """
    batches = list(as_batches(images))
    field = receptive_field(model, batches, on_batch).double().cpu()
    stride = model.feature_info[-1].stride
    grid = (-(-field.shape[0] // stride), -(-field.shape[1] // stride))
    # All hosts shrink with odd kernels and a padding of half of one: output i looks straight at pixel i * stride.
    centre = (grid[0] // 2 * stride, grid[1] // 2 * stride)
    shares = share_inside(field, centre)
    block = -(-max(field.shape) // LARGEST_MAP)
    cells = F.avg_pool2d(field[None, None], block, ceil_mode=True)[0, 0]
    scaled = cells / cells.max() if cells.max() > 0 else cells
    record: dict[str, Any] = {
        "pixels_per_cell": block,
        "centre": list(centre),
        "map": [[round(value, DIGITS) for value in row] for row in scaled.tolist()],
        "share_inside": shares,
        "half_side": next((s["side"] for s in shares if s["share"] >= 0.5), None),
    }
    if any(isinstance(module, Attention) for module in model.modules()):
        rest = receptive_field(model, batches, on_batch, through_attention=False).double().cpu()
        left = float(rest.sum() / field.sum()) if field.sum() > 0 else None
        record["without_attention"] = {"gradient": left, "share_inside": share_inside(rest, centre)}
    return record
