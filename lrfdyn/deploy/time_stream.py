"""Models that run along: one frame after the other, membranes carried between them, logits after every one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lrfdyn.attention import Attention, StateTerm
from lrfdyn.checks import checked
from lrfdyn.deploy.streaming_attention import StreamingAttention
from lrfdyn.errors import LrfdynError, require, shown
from lrfdyn.models import SpikingModel
from lrfdyn.models.qkformer import BatchAsTimeLIF
from lrfdyn.nn.neurons import IntegerSpike, Neuron, SpikingNeuron
from lrfdyn.ops.lif import Dynamics, lif


class Membranes:
    """Those of the step before and of this one, in the order in which a pass meets the neurons: a neuron that a network
    calls twice has two."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self.names: list[str] = []  # of the neurons of this step


class CarriedNeuron(Neuron):
    """A `SpikingNeuron` on currents `[T, B, ...]` that goes on from its membrane in `membranes`. With `over_batch`
    the images of a batch are its time steps."""

    def __init__(self, name: str, dynamics: Dynamics, membranes: Membranes, over_batch: bool) -> None:
        super().__init__()
        self.name, self.dynamics, self.membranes, self.over_batch = name, dynamics, membranes, over_batch

    def forward(self, x: Tensor) -> Tensor:
        carried, currents = self.membranes, x.flatten(0, 1) if self.over_batch else x
        before = carried.before[len(carried.after)] if carried.before else None
        # The operations of the parallel pass, so that the same currents give the same bits.
        spikes, after = lif(currents, self.dynamics, before, output_final_state=True)
        assert after is not None
        carried.after.append(after)
        carried.names.append(self.name)
        return spikes.reshape(x.shape)


def replace_neurons(model: nn.Module, make: Callable[[str, Any], Neuron | None], but: tuple[str, ...] = ()) -> None:
    """Puts what `make(path, neuron)` gives in the place of every neuron with a membrane, except below the paths `but`;
    None where a neuron cannot be run step by step, which is an error."""
    for path, neuron in list(model.named_modules(remove_duplicate=False)):
        if isinstance(neuron, Neuron) and not isinstance(neuron, IntegerSpike) and not path.startswith(but):
            made = make(path, neuron) if isinstance(neuron, SpikingNeuron) else None
            if made is None:
                raise LrfdynError(f"model: neuron {type(neuron).__name__} cannot be run step by step")
            model.set_submodule(path, made)


class TimeStream:
    """A classifier that follows a camera: `step` takes one frame and gives the logits so far, and every neuron carries
    its membrane on to the next frame. The logits are those of the model for all frames until then: on a CPU in float64
    bit for bit, but for the order of a sum in SDT-V2 with two classifiers, and elsewhere up to rounding.

    - `model`: A model of this package in evaluation mode. Its weights are shared and not copied.

    A static image is shown by giving it again at every step. An object follows one camera, or a batch of them in step;
    it is for one thread. Example:

        stream = TimeStream(model)
        for frame in frames:                # [B, C, H, W] each
            logits = stream.step(frame)     # [B, classes], as model(frames until now) gives them
        stream.reset()                      # before the next recording
    """

    @checked
    def __init__(self, model: SpikingModel) -> None:
        require(model.pipeline_tag == "image-classification", "model: expected a classifier, got a segmentation model")
        require(model.spiking, "model: a network without spikes has no membranes to carry from step to step")
        require(not model.training, "model: expected evaluation mode (batch statistics are those of all time steps)")
        self._membranes = Membranes()
        weights = chain(model.parameters(), model.buffers())
        # With the names of the model's parts, so that hooks can look on.
        self.network = copy.deepcopy(model, {id(tensor): tensor for tensor in weights})
        replace_neurons(self.network, self._carried)
        kinds: set[type] = set()
        for path, module in self.network.named_modules():
            unfixed = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
            require(not unfixed, f"model: {path} takes its statistics from all time steps, those to come among them")
            rows = f"model: {path} runs over rows, not along time; expected the model without StreamingAttention"
            require(not isinstance(module, StreamingAttention), rows)
            if isinstance(module, Attention) and type(module) not in kinds:
                kinds.add(type(module))
                later = f"model: attention {module.kind!r} looks at later time steps, so it cannot run along"
                require(not looks_ahead(module), later)
            if isinstance(module, nn.Conv2d):
                module.register_forward_pre_hook(_as_one_of_many)
        self.reset()

    def _carried(self, path: str, neuron: SpikingNeuron) -> Neuron | None:
        forward, over_batch = type(neuron).forward, isinstance(neuron, BatchAsTimeLIF)
        known = forward is (BatchAsTimeLIF if over_batch else SpikingNeuron).forward
        return CarriedNeuron(path, neuron.dynamics, self._membranes, over_batch) if known else None

    def reset(self) -> None:
        """Brings every membrane to rest and forgets the logits."""
        self.steps = 0  # how many frames it has seen
        self.step_logits: Tensor | None = None  # `[B, classes]` of the last frame by itself
        self._shape: torch.Size | None = None
        self._held: list[Tensor] = []  # membranes
        self._total: Tensor | None = None  # over all steps, of spikes or of logits

    def step(self, frame: Tensor) -> Tensor:
        """The logits `[B, classes]` after one more frame `[B, C, H, W]`: those of all frames since the last `reset`.
        An error leaves the stream as it was."""
        require(isinstance(frame, Tensor), f"frame: expected a tensor, got {type(frame).__name__}")
        require(frame.dim() == 4, f"frame: expected one frame [B, C, H, W], got {list(frame.shape)}")
        same = self._shape in (None, frame.shape)
        require(same, f"frame: expected {list(self._shape or ())} as before, got {list(frame.shape)}; or reset() first")
        held, total, own, logits = self._pass(frame, self._held, self._total, self.steps + 1)
        self._held, self._total, self.step_logits, self._shape = held, total, own, frame.shape
        self.steps += 1
        return logits

    def keep(self, chosen: Tensor) -> None:
        """Goes on with the images of the batch that the mask `chosen`, `[B]`, names, and forgets the others."""
        require_alone(self.network)
        require(self.steps > 0, "chosen: the stream has seen no frame yet")
        assert self._shape is not None
        assert self._total is not None
        mask = isinstance(chosen, Tensor) and chosen.dtype == torch.bool and chosen.shape == self._shape[:1]
        require(mask, f"chosen: expected a mask [{self._shape[0]}], got {shown(chosen)}")
        self._held, self._total = [membrane[chosen] for membrane in self._held], self._total[chosen]
        self.step_logits = None if self.step_logits is None else self.step_logits[chosen]
        self._shape = torch.Size((len(self._total), *self._shape[1:]))

    @torch.no_grad()
    def _pass(
        self, frame: Tensor, held: list[Tensor], total: Tensor | None, steps: int
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """What is held after a frame, membranes and total, and the logits of the frame and of all `steps`."""
        model, membranes = self.network, self._membranes
        membranes.before, membranes.after, membranes.names = held, [], []
        last = model.forward_features(frame.unsqueeze(0))
        spikes = model.head_map(last)
        if spikes is None:  # logits of every step, averaged
            own = model.forward_head(last)
            total = own if total is None else total + own
            logits = total / steps
        else:  # logits of averages: sums of spikes are exact in any order, so that only the total is kept
            cells = math.prod(spikes.shape[-2:])
            sums = spikes.sum((0, 3, 4), dtype=torch.promote_types(spikes.dtype, torch.float32))
            total = sums if total is None else total + sums
            own, logits = (model.head((x / n).to(spikes.dtype)) for x, n in ((sums, cells), (total, steps * cells)))
        after, membranes.before, membranes.after = membranes.after, [], []
        return after, total, own, logits

    @property
    def nbytes(self) -> int:
        """Bytes that are held from step to step, beside the weights and `step_logits`: none before the first frame."""
        return sum(x.nbytes for x in (*self._held, self._total) if x is not None)

    @checked
    def state_terms(self, batch: int = 1, size: tuple[int, int] | None = None) -> list[StateTerm]:
        """What is held from step to step for a batch of frames of `size` (height and width, default: those that the
        model was laid out for), derived from shapes: a number for every neuron, layer by layer, and the classifier's
        sum. Their `bytes` together are `nbytes`."""
        channels, *laid_out = self.network.input_size
        with FakeTensorMode(allow_non_fake_inputs=True):  # shapes without memory
            frame = torch.zeros(batch, channels, *(size or laid_out)).to(next(self.network.parameters()))
            held, total, *_ = self._pass(frame, [], None, 1)
        named = zip([*self._membranes.names, "classifier"], [*held, total], strict=True)
        return [StateTerm(name, " x ".join(map(str, x.shape)), x.numel(), 8 * x.itemsize) for name, x in named]


def require_alone(model: SpikingModel) -> None:
    """An error where the neurons of an image go on from those of others in the batch."""
    alone = not model.config.get("legacy_neuron_axis")
    require(alone, "model: with legacy_neuron_axis=True an image needs those before it in the batch; none can leave")


def looks_ahead(attention: Attention) -> bool:
    """Whether the mixing of one time step changes with the step behind it, tried on random spikes."""
    weight = next(attention.parameters())
    generator = torch.Generator().manual_seed(0)
    widths = [attention.value_dim if name == "v" else attention.dim for name in attention.projections]
    shapes = [(2, 1, width, *attention.grid) for width in widths]
    spikes = [torch.randint(2, shape, generator=generator).to(weight) for shape in shapes]
    with torch.no_grad():
        both, first = attention.mix(*spikes)[:1], attention.mix(*(x[:1] for x in spikes))
    return both.shape != first.shape or not torch.allclose(both, first, rtol=1e-3, atol=1e-3)


def _as_one_of_many(_conv: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
    """One image in channels-last memory with the stride that it has among others. Folding one step of one image leaves
    another stride, and the convolution then takes the image for one in the other memory format and adds in another
    order."""
    (x,) = inputs
    if x.dim() != 4 or len(x) > 1 or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    channels, height, width = x.shape[1:]
    return (x.as_strided(x.shape, (channels * height * width, 1, width * channels, channels)),)
