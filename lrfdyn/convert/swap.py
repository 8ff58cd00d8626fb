"""Another attention in a model that is already built."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lrfdyn.attention import ATTENTIONS, Attention, create_attention
from lrfdyn.checks import checked
from lrfdyn.convert.spikingjelly import FlatAttention, is_spikingjelly, stated_grid
from lrfdyn.errors import require
from lrfdyn.nn.layers import init_weights

# Made by the host, so alike in every kind of attention that has them.
PROJECTIONS = ("q", "k", "v", "proj")


@dataclass(frozen=True)
class SwapReport:
    """Which attention layers were swapped, and what became of their parameters: names by which the model has them."""

    kind: str
    layers: tuple[str, ...]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    new: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"swapped to {self.kind}: {', '.join(self.layers)}"]
        layer = re.compile(rf"({'|'.join(map(re.escape, self.layers))})\.")
        for what in ("kept", "dropped", "new"):
            inside = dict.fromkeys(layer.sub("", name, count=1) for name in getattr(self, what))
            lines.append(f"{what}: {', '.join(inside) or 'nothing'}")
        return "\n".join(lines)


@checked
def swap_attention(model: nn.Module, kind: str, *, grid: tuple[int, int] | None = None, **options: Any) -> SwapReport:
    """Replaces every attention layer of `model` in place by one of `kind`, and returns what became of the parameters.

    `options` are those of the kind. What both kinds have stays the same parameter: the projections, local receptive
    fields of the same dilations, dendrites of the same number and directions, and the norm in front of the firing
    neuron where the kind stays. The rest is new, so an optimiser must be made again. An error leaves the model as it
    was.

    Works on the models of this package and on SpikingJelly's `SpikingSelfAttention`. Only the latter need `grid`, the
    rows and columns of tokens that the new layers are made for, and only where the model does not state it (default:
    14 x 14, that of images of 224 pixels; other sizes may still be shown).

        model = lrfdyn.create_model("spikformer_4_384")
        print(lrfdyn.swap_attention(model, "lrf_dyn", dilations=(3, 5)))
    """
    kind = ATTENTIONS.name_of(kind)  # an unknown kind is the first thing to tell
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {path: module for path, module in modules.items() if isinstance(module, Attention)}
    foreign = {path: module for path, module in modules.items() if is_spikingjelly(module)}
    found = [*layers, *foreign]
    require(bool(found), f"model: expected attention layers to swap, found none in {type(model).__name__}")
    require("" not in found, "model: is itself an attention layer; pass the model around it, to replace it in there")
    require(grid is None or bool(foreign), "grid: expected none, the attention layers of this model know their grid")

    # All layers are built before any is replaced.
    adapters = {module: FlatAttention.take_over(module, grid or stated_grid(model)) for module in foreign.values()}
    layers |= {f"{path}.attention": adapters[module].attention for path, module in foreign.items()}
    built = {old: _rebuild(old, kind, options) for old in layers.values()}

    for path, module in foreign.items():
        model.set_submodule(path, adapters[module])
        parent = model.get_submodule(path.rpartition(".")[0])
        parent.register_forward_pre_hook(adapters[module].note_grid)
    for path, old in layers.items():
        model.set_submodule(path, built[old])
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, dict) and "attention" in config:
            updated: Any = {**config, "attention": kind, "attention_options": dict(options) or None}
            module.config = updated
    before = {f"{path}.{name}": p for path, old in layers.items() for name, p in old.named_parameters()}
    after = {f"{path}.{name}": p for path, old in layers.items() for name, p in built[old].named_parameters()}
    kept = [name for name, parameter in after.items() if parameter is before.get(name)]
    dropped, new = ([name for name in names if name not in kept] for names in (before, after))
    return SwapReport(kind, tuple(layers), tuple(kept), tuple(dropped), tuple(new))


def _rebuild(old: Attention, kind: str, options: Mapping[str, Any]) -> Attention:
    """A layer of `kind` for the place of `old`, with the modules that both have."""
    new = create_attention(kind, old.dim, old.heads, old.grid, old.host, **options)
    init_weights(new)
    like = next(old.parameters())
    new.to(device=like.device, dtype=like.dtype).train(old.training)
    for name, module in old.named_children():
        other = getattr(new, name, None)
        if other is None or (name == "norm" and type(old) is not type(new)):
            continue  # what another kind normalises is another thing
        if name in PROJECTIONS or (module.state_dict() and _form(module) == _form(other)):
            setattr(new, name, module)  # the module itself: its mode, dtypes and frozen parameters come with it
    trained = getattr(new, "train_qk", True)
    if trained != getattr(old, "train_qk", True):  # what the old kind froze, or the new one does
        for name in {"q", "k"}.intersection(new.projections):
            new.get_submodule(name).requires_grad_(trained)
    return new


def _form(module: nn.Module) -> tuple[Any, dict[str, Any]]:
    """What two modules must have in common to take each other's place."""
    return getattr(module, "dilations", None), {key: value.shape for key, value in module.state_dict().items()}
