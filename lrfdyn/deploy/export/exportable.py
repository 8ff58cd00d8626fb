"""Models in the operations that exchange formats have: the same function, in few and plain ones.

Norms are folded into convolutions, neurons are unrolled over their time steps in units that need no gain, and the
dendrites of LRF-Dyn are constant matrices over rows of tokens instead of complex numbers or a Fourier transform, which
exchange formats do not have.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lrfdyn.attention.lrf_dyn import Dendrites
from lrfdyn.convert.fold import fold_batch_norm, fold_into
from lrfdyn.errors import require
from lrfdyn.models.base import SpikingModel
from lrfdyn.models.sdt_v2 import RepConvBN
from lrfdyn.nn.layers import fold_time, is_repeated
from lrfdyn.nn.neurons import SpikingNeuron
from lrfdyn.ops.dendrite.modes import mode_kernel, mode_powers
from lrfdyn.ops.lif import Dynamics


class UnrolledNeuron(nn.Module):
    """The neuron of `dynamics` on currents `[T, ...]`: charge, fire, reset, one operation each.

    Potentials are divided by the gain, so that currents enter as they are; the gains of the hosts are powers of two,
    for which this changes no rounding."""

    def __init__(self, dynamics: Dynamics) -> None:
        super().__init__()
        self.threshold = dynamics.threshold / dynamics.gain
        self.reset = dynamics.leak * dynamics.v_reset / dynamics.gain
        self.kept = dynamics.leak * dynamics.decay
        self.strict = dynamics.strict

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[0]
        currents = [x[:1]] * steps if is_repeated(x) else x.split(1)
        u, fired = currents[0], self.fires(currents[0])
        spikes = [fired.to(x.dtype)]
        for current in currents[1:]:
            rest = u if self.kept == 1 else u * self.kept
            u = torch.where(fired, self.reset, rest) + current
            fired = self.fires(u)
            spikes.append(fired.to(x.dtype))
        return torch.cat(spikes) if steps > 1 else spikes[0]

    def fires(self, u: Tensor) -> Tensor:
        return u > self.threshold if self.strict else u >= self.threshold


class RowDendrites(nn.Module):
    """The dendrites on a fixed grid, `[T, B, C, H, W]` to the same shape, in real matrix products.

    Toeplitz matrices are used inside a row of tokens, and from row to row the 2M numbers of a channel's modes, whose
    recurrence takes log2(H) products instead of H."""

    within: Tensor
    enter: Tensor
    leave: Tensor

    def __init__(self, dendrites: Dendrites, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = height, width = grid
        decay, frequency, weight = (value.detach().double() for value in dendrites.modes(width))
        channels, modes = decay.shape
        kernel = mode_kernel(decay, frequency, weight, width)
        lag = torch.arange(width)
        lag = lag.unsqueeze(0) - lag.unsqueeze(1)  # [in, out]
        within = (kernel[lag.clamp(min=0)] * (lag >= 0).unsqueeze(-1)).permute(2, 0, 1)
        powers = torch.view_as_real(mode_powers(decay, frequency, torch.arange(width + 1)))  # [W + 1, C, M, 2]
        enter = powers[:width].flip(0).permute(1, 0, 2, 3)
        re, im = powers[1:].unbind(-1)
        leave = 2 * torch.stack(
            (weight[..., 0] * re - weight[..., 1] * im, -weight[..., 0] * im - weight[..., 1] * re), -1
        )
        dtype = dendrites.weight.dtype
        self.register_buffer("within", within.to(dtype))
        self.register_buffer("enter", enter.flatten(2).to(dtype))
        self.register_buffer("leave", leave.permute(1, 2, 3, 0).flatten(1, 2).to(dtype))
        self.strides = [2**i for i in range(max(height - 2, 0).bit_length())]
        for stride in self.strides:
            re, im = torch.view_as_real(mode_powers(decay, frequency, torch.tensor([width * stride])))[0].unbind(-1)
            turn = torch.stack((torch.stack((re, im), -1), torch.stack((-im, re), -1)), -2)  # row vector times matrix
            blocks = torch.zeros(channels, modes, 2, modes, 2, dtype=torch.float64)
            blocks[:, torch.arange(modes), :, torch.arange(modes)] = turn.transpose(0, 1)
            self.register_buffer(f"carry{stride}", blocks.flatten(3).flatten(1, 2).to(dtype))

    def forward(self, u: Tensor) -> Tensor:
        height, width = self.grid
        time, batch, channels = u.shape[:3]
        # Channels first: every product is one matrix per channel.
        rows = u.flatten(0, 1).transpose(0, 1).contiguous().view(channels, -1, width)
        soma = rows @ self.within
        if height > 1:
            state = (rows @ self.enter).view(channels, -1, height, self.enter.shape[-1])[:, :, :-1]
            for stride in self.strides:
                carry = getattr(self, f"carry{stride}").unsqueeze(1)
                before = state[:, :, :-stride] @ carry
                state = state + nn.functional.pad(before, (0, 0, stride, 0))
            above = nn.functional.pad(state, (0, 0, 1, 0))
            soma = soma + above.flatten(1, 2) @ self.leave
        y = soma.view(channels, -1, height, width).transpose(0, 1).contiguous()
        return y.unflatten(0, (time, batch))


class PlainRepConv(nn.Module):
    """The chain of convolutions of SDT-V2 on `[T, B, C, H, W]`, without its norms: what the first norm makes of 0 is
    what its folded convolution makes of a padded pixel."""

    def __init__(self, layer: RepConvBN) -> None:
        super().__init__()
        chain = layer.conv
        self.conv1 = fold_into(chain.conv1, chain.bn1)
        self.conv1.padding = (1, 1)
        self.depthwise = chain.depthwise
        self.conv2 = fold_into(chain.conv2, chain.bn2, layer.bn)
        self.neuron = getattr(layer, "neuron", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(fold_time(lambda y: self.conv2(self.depthwise(self.conv1(y))), x))


class ExportableModel(nn.Module):
    """A classifier of static images `[B, C, H, W]`; returns logits `[B, classes]`.

    Memory stays as it comes: exchange formats have one order of their own, and ExecuTorch computes wrong numbers of
    channels-last memory behind a change of shape."""

    def __init__(self, model: SpikingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        x = images.unsqueeze(0).expand(self.model.time_steps, -1, -1, -1, -1)
        return self.model.forward_head(self.model.forward_stages(x, only_last=True)[-1])


@torch.no_grad()
def exportable_model(model: SpikingModel, size: tuple[int, int]) -> ExportableModel:
    """A copy of `model` for images of `size` (height, width), in the operations of exchange formats."""
    grids = _dendrite_grids(model, size)
    folded = fold_batch_norm(model)
    for path, module in list(folded.named_modules(remove_duplicate=False)):
        replacement: nn.Module | None = None
        if isinstance(module, SpikingNeuron):
            require(
                type(module).forward is SpikingNeuron.forward,
                f"model: {path} is a {type(module).__name__}, which mixes the images of a batch; it cannot be exported",
            )
            replacement = UnrolledNeuron(module.dynamics)
        elif isinstance(module, Dendrites):
            replacement = RowDendrites(module, grids[path])
        elif isinstance(module, RepConvBN):
            replacement = PlainRepConv(module)
        if replacement is not None:
            folded.set_submodule(path, replacement)
    return ExportableModel(folded).eval()


def _dendrite_grids(model: SpikingModel, size: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """The grids on which the dendrites run, by the paths of their modules."""
    grids: dict[str, tuple[int, int]] = {}
    hooks = []
    for path, module in model.named_modules():
        if isinstance(module, Dendrites):

            def note(_: nn.Module, inputs: tuple[Tensor, ...], path: str = path) -> None:
                grids[path] = (inputs[0].shape[-2], inputs[0].shape[-1])

            hooks.append(module.register_forward_pre_hook(note))
    if hooks:
        like = next(model.parameters())
        try:
            model(torch.zeros(1, model.in_channels, *size, dtype=like.dtype, device=like.device))
        finally:
            for hook in hooks:
                hook.remove()
    return grids
