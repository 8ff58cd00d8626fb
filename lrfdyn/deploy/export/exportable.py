"""Models in the operations that exchange formats have: the same function, in few and plain ones."""

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
from lrfdyn.ops.dendrite.modes import mode_kernel, mode_numbers, mode_pairs, mode_powers
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
        currents = [x[:1]] * len(x) if is_repeated(x) else x.split(1)
        fired: Tensor | None = None
        u, spikes = currents[0], []
        for current in currents:
            if fired is not None:
                u = torch.where(fired, self.reset, u if self.kept == 1 else u * self.kept) + current
            fired = u > self.threshold if self.strict else u >= self.threshold
            spikes.append(fired.to(x.dtype))
        return torch.cat(spikes) if len(spikes) > 1 else spikes[0]


class RowDendrites(nn.Module):
    """The dendrites on a fixed grid, `[T, B, C, H, W]` to the same shape, in real numbers and without an FFT.

    Toeplitz matrices are used inside a row of tokens, and from row to row the 2M numbers of a channel's modes, whose
    recurrence takes log2(H) products instead of H. Of two directions the second has matrices of its own, turned
    around; inside a row both are one."""

    within: Tensor

    def __init__(self, dendrites: Dendrites, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = height, width = grid
        self.strides = [2**i for i in range(max(height - 2, 0).bit_length())]
        lag = torch.arange(width) - torch.arange(width).unsqueeze(1)  # [in, out]
        dtype, within = dendrites.weight.dtype, []
        self.directions = ("", "back_")[: dendrites.directions]  # what the names of their matrices begin with
        for name, (decay, frequency, weight) in zip(self.directions, dendrites.modes_by_direction(width), strict=True):
            decay, weight, real = decay.detach().double(), weight.detach().double(), frequency is None
            frequency = None if frequency is None else frequency.detach().double()
            kernel = mode_kernel(decay, frequency, weight, width)
            inside = (kernel[lag.clamp(min=0)] * (lag >= 0).unsqueeze(-1)).permute(2, 0, 1)
            powers = mode_powers(decay, frequency, torch.arange(width + 1))
            enter = mode_pairs(powers[:width].flip(0)).transpose(0, 1)  # [C, W, M, 2]
            re, im = mode_pairs(mode_numbers(weight, real) * powers[1:]).unbind(-1)
            leave = (2 * torch.stack((re, im if real else -im), -1)).permute(1, 2, 3, 0)
            if name:
                inside, enter, leave = inside.mT, enter.flip(1), leave.flip(-1)
            within.append(inside)
            self.register_buffer(f"{name}enter", enter.flatten(2).to(dtype))
            self.register_buffer(f"{name}leave", leave.flatten(1, 2).to(dtype))
            for stride in self.strides:
                re, im = mode_pairs(mode_powers(decay, frequency, torch.tensor([width * stride])))[0].unbind(-1)
                entries = (re, 0 * re, 0 * im, im) if real else (re, im, -im, re)
                turn = torch.stack(entries, 1).unflatten(1, (2, 2))  # [C, 2, 2, M]: row vector times matrix
                blocks = torch.diag_embed(turn, dim1=1, dim2=3)  # [C, M, 2, M, 2]
                self.register_buffer(f"{name}carry{stride}", blocks.flatten(3).flatten(1, 2).to(dtype))
        self.register_buffer("within", torch.stack(within).sum(0).to(dtype))

    def forward(self, u: Tensor) -> Tensor:
        height, width = self.grid
        time, batch, channels = u.shape[:3]
        # Channels first: every product is one matrix per channel.
        rows = u.flatten(0, 1).transpose(0, 1).contiguous().view(channels, -1, width)
        soma = rows @ self.within
        if height > 1:
            for name in self.directions:
                soma = soma + self.from_other_rows(rows, name)
        y = soma.view(channels, -1, height, width).transpose(0, 1).contiguous()
        return y.unflatten(0, (time, batch))

    def from_other_rows(self, rows: Tensor, name: str) -> Tensor:
        """What the rows before each one give to it in a direction, `[C, rows, W]`."""

        def shifted(state: Tensor, by: int) -> tuple[Tensor, tuple[int, ...]]:
            """The states that reach a row so much further on, and the padding in the place of those that do not."""
            return (state[:, :, by:], (0, 0, 0, by)) if name else (state[:, :, :-by], (0, 0, by, 0))

        enter, leave = getattr(self, f"{name}enter"), getattr(self, f"{name}leave")
        state, padding = shifted((rows @ enter).view(len(rows), -1, self.grid[0], enter.shape[-1]), 1)
        for stride in self.strides:
            before, zeros = shifted(state, stride)
            state = state + nn.functional.pad(before @ getattr(self, f"{name}carry{stride}").unsqueeze(1), zeros)
        return nn.functional.pad(state, padding).flatten(1, 2) @ leave


class PlainRepConv(nn.Module):
    """The chain of convolutions of SDT-V2 on `[T, B, C, H, W]`, without its norms: what the first norm makes of 0 is
    what its folded convolution makes of a padded pixel."""

    def __init__(self, layer: RepConvBN) -> None:
        super().__init__()
        first, last = fold_into(layer.conv.conv1, layer.conv.bn1), fold_into(layer.conv.conv2, layer.conv.bn2, layer.bn)
        first.padding = (1, 1)
        self.chain = nn.Sequential(first, layer.conv.depthwise, last)
        self.neuron = layer.neuron

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.neuron(fold_time(self.chain, x))
        return y if residual is None else residual + y


class ExportableModel(nn.Module):
    """A classifier of static images `[B, C, H, W]` or of films `[B, T, C, H, W]`; returns logits `[B, classes]`.

    Memory stays as it comes: exchange formats have one order of their own, and ExecuTorch computes wrong numbers of
    channels-last memory behind a change of shape."""

    def __init__(self, model: SpikingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        static = images.dim() == 4
        x = images.unsqueeze(0).expand(self.model.time_steps, -1, -1, -1, -1) if static else images.transpose(0, 1)
        return self.model.forward_head(self.model.forward_stages(x, only_last=True)[-1])


@torch.no_grad()
def exportable_model(model: SpikingModel, size: tuple[int, int]) -> ExportableModel:
    """A copy of `model` for images of `size` (height, width), in the operations of exchange formats."""
    folded = fold_batch_norm(model)
    grids: dict[nn.Module, tuple[int, int]] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        grids[module] = (inputs[0].shape[-2], inputs[0].shape[-1])

    noted = [m.register_forward_pre_hook(note) for m in folded.modules() if isinstance(m, Dendrites)]
    if noted:  # the modules are replaced below, and their hooks with them
        folded(next(folded.parameters()).new_zeros(1, model.in_channels, *size))
    for path, module in list(folded.named_modules(remove_duplicate=False)):
        if isinstance(module, SpikingNeuron):
            plain, kind = type(module).forward is SpikingNeuron.forward, type(module).__name__
            require(plain, f"model: {path} is a {kind}, which mixes the images of a batch; it cannot be exported")
            folded.set_submodule(path, UnrolledNeuron(module.dynamics))
        elif isinstance(module, Dendrites):
            folded.set_submodule(path, RowDendrites(module, grids[module]))
        elif isinstance(module, RepConvBN):
            folded.set_submodule(path, PlainRepConv(module))
    return ExportableModel(folded).eval()
