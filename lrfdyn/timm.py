"""The models in timm: `import lrfdyn.timm`, then `timm.create_model("lrfdyn/spikformer_8_512", attention="lrf_dyn")`.

"spikformer_8_512" is the same; the prefix says whose model it is. Since version 1.0.2x timm refuses a "/" in a name, so
the import teaches its parser that "lrfdyn/" is not a path.
What it gives is the model of `lrfdyn.create_model`. `forward_features` keeps the time axis, `[T, B, C, H, W]`, because
most heads fire once more before they average it; `features_only=True` gives maps averaged over time, `[B, C, H, W]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lrfdyn.errors import LrfdynError, require
from lrfdyn.models import SpikingModel, create_model, list_models
from lrfdyn.models.backbone import Backbone
from lrfdyn.models.registry import model_class

try:
    from timm.models import FeatureInfo, generate_default_cfgs, register_model, resolve_pretrained_cfg
except ImportError as error:
    raise ImportError(f"lrfdyn.timm needs timm ({error}): pip install 'lrfdyn[timm]'") from error

__all__: list[str] = []  # timm adds the names of the models

PREFIX = "lrfdyn/"
IMAGENET_STATISTICS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CIFAR_STATISTICS = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}
CIFAR_SIZE = 32
# timm's names of our arguments.
RENAMED = {"in_chans": "in_channels", "drop_path_rate": "drop_path"}
# What timm's scripts pass to every model: the one value that the models have.
FIXED = {"drop_rate": 0.0, "global_pool": "avg"}


def accept_prefix(factory: Any) -> None:
    """Lets timm's `create_model`, which lives in `factory`, take names that start with "lrfdyn/"."""
    parse = factory.parse_model_name
    if getattr(parse, "takes_lrfdyn", False):
        return

    def parse_model_name(model_name: str) -> Any:
        return parse(model_name.removeprefix(PREFIX))

    parse_model_name.takes_lrfdyn = True  # type: ignore[attr-defined]
    factory.parse_model_name = parse_model_name


def default_config(name: str) -> dict[str, Any]:
    """timm's description of a model: input, classes and the layers that other inputs or classes change."""
    with torch.device("meta"):
        model = create_model(name)
    first = next(path for path, module in model.named_modules() if isinstance(module, nn.Conv2d))
    cifar = model.input_size[-1] == CIFAR_SIZE
    return {
        "input_size": model.input_size,
        "num_classes": model.num_classes,
        "crop_pct": 1.0 if cifar else 0.875,
        **(CIFAR_STATISTICS if cifar else IMAGENET_STATISTICS),
        "pool_size": tuple(-(-side // model.feature_info[-1].stride) for side in model.input_size[1:]),
        "first_conv": first,
        "classifier": "head",
    }


def our_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of `create_model` from those in timm's words."""
    ours = dict(options)
    for key, only in FIXED.items():
        value = ours.pop(key, only)
        require(value == only, f"{key}: expected {only!r}, the only one that {name} has, got {value!r}")
    size = ours.pop("img_size", None)
    if size is not None and "image_size" in model_class(name).options():  # the others take any size
        ours["image_size"] = square_side(size)
    for theirs, our in RENAMED.items():
        if theirs in ours:
            ours[our] = ours.pop(theirs)
    return ours


def square_side(size: int | Sequence[int]) -> int:
    sides = (size, size) if isinstance(size, int) else tuple(size)
    require(len(sides) == 2 and sides[0] == sides[1], f"img_size: expected a square, got {size}")
    return sides[0]


def build(
    name: str,
    *,
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    cache_dir: Any = None,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    **options: Any,
) -> SpikingModel | Backbone:
    """What timm's `create_model` calls. `cache_dir` is for downloads, of which there are none."""
    if pretrained:
        raise LrfdynError(
            f"pretrained: timm has no weights of {name}; pass pretrained=False, or load a saved model with "
            "lrfdyn.from_pretrained(folder or repository)"
        )
    require(features_only or out_indices is None, "out_indices: is for features_only=True")
    config = resolve_pretrained_cfg(
        name, pretrained_cfg=pretrained_cfg, pretrained_cfg_overlay=pretrained_cfg_overlay
    ).to_dict()
    model = create_model(name, **our_options(name, options))
    if not features_only:
        return _with_config(model, config)
    backbone = Backbone(model, out_indices)
    info = [
        {"num_chs": stage.channels, "reduction": stage.stride, "module": f"stage{i}"}
        for i, stage in enumerate(backbone.stages)
    ]
    backbone.feature_info = FeatureInfo(info, backbone.out_indices)
    return _with_config(backbone, {k: v for k, v in config.items() if k not in ("num_classes", "classifier")})


def _with_config(model: Any, config: dict[str, Any]) -> Any:
    model.pretrained_cfg = model.default_cfg = config  # timm reads both names
    return model


def _entry_point(name: str) -> Callable[..., nn.Module]:
    def entry(pretrained: bool = False, **options: Any) -> nn.Module:
        return build(name, pretrained=pretrained, **options)

    entry.__name__ = entry.__qualname__ = name  # what timm registers it under
    entry.__doc__ = f"`lrfdyn.create_model({name!r})`"
    return entry


# timm looks for this name in the module of an entry point while it registers it.
default_cfgs = generate_default_cfgs({name: default_config(name) for name in list_models()})

for _name in list_models():
    globals()[_name] = register_model(_entry_point(_name))
accept_prefix(import_module("timm.models._factory"))
