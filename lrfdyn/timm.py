"""The models in timm: `import lrfdyn.timm`, then `timm.create_model("spikformer_8_512", attention="lrf_dyn")`.

What it gives is the model of `lrfdyn.create_model`, with `pretrained=True` the one of the zoo. `forward_features` keeps
the time axis, `[T, B, C, H, W]`, because most heads fire once more before they average it; `features_only=True` gives
maps averaged over time, `[B, C, H, W]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lrfdyn.errors import require
from lrfdyn.models import SpikingModel, create_model, list_models
from lrfdyn.models.base import Backbone
from lrfdyn.models.registry import model_class
from lrfdyn.models.summary import meta_model

try:
    from timm.models import FeatureInfo, generate_default_cfgs, register_model, resolve_pretrained_cfg
except ImportError as error:
    raise ImportError(f"lrfdyn.timm needs timm ({error}): pip install 'lrfdyn[timm]'") from error

__all__: list[str] = []  # timm adds the names of the models

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "crop_pct": 0.875}
CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616), "crop_pct": 1.0}
EVENTS = {"mean": (0.0, 0.0), "std": (1.0, 1.0), "crop_pct": 1.0}  # counts as they are
# timm's names of our arguments.
RENAMED = {"in_chans": "in_channels", "drop_path_rate": "drop_path", "img_size": "image_size"}
# What timm's scripts pass to every model: the one value that the models have.
FIXED = {"drop_rate": 0.0, "global_pool": "avg"}


def default_config(name: str) -> dict[str, Any]:
    """timm's description of a model as it is without options."""
    return config_of(meta_model(name))


def config_of(model: SpikingModel) -> dict[str, Any]:
    """timm's description of a model: its input, its classes, and the layers that other inputs or classes change."""
    size, own = model.input_size, model.preprocessing
    images = CIFAR if size[-1] == 32 else IMAGENET
    return {
        **(EVENTS if model.in_channels == 2 else images),
        **({} if own is None else {"mean": own.mean, "std": own.std}),
        "input_size": size,
        "num_classes": model.num_classes,
        "pool_size": tuple(-(-side // model.feature_info[-1].stride) for side in size[1:]),
        "first_conv": next(path for path, module in model.named_modules() if isinstance(module, nn.Conv2d)),
        "classifier": "head",
    }


def our_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `create_model` from those in timm's words."""
    for key, only in FIXED.items():
        value = options.get(key, only)
        require(value == only, f"{key}: expected {only!r}, the only one that {name} has, got {value!r}")
    ours = {RENAMED.get(key, key): value for key, value in options.items() if key not in FIXED}
    size = ours.get("image_size")
    if isinstance(size, Sequence):
        require(len(size) == 2 and size[0] == size[1], f"img_size: expected a square, got {size}")
        ours["image_size"] = size[0]
    if "image_size" not in model_class(name).options():  # it takes any size
        ours.pop("image_size", None)
    return ours


def entry_point(name: str) -> Callable[..., nn.Module]:
    """The function that timm registers under the name of a model."""

    def entry(
        pretrained: bool | str = False,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None,
        cache_dir: Any = None,  # of timm's downloads; those of the zoo have their own
        features_only: bool = False,
        out_indices: int | Sequence[int] | None = None,
        **options: Any,
    ) -> nn.Module:
        require(features_only or out_indices is None, "out_indices: is for features_only=True")
        overlay = {"pretrained_cfg": pretrained_cfg, "pretrained_cfg_overlay": pretrained_cfg_overlay}
        config = resolve_pretrained_cfg(name, **overlay).to_dict()
        model: Any = create_model(name, pretrained=pretrained, **our_options(name, options))
        config |= config_of(model) if pretrained else {}
        if features_only:
            model = Backbone(model, out_indices)
            stages = ({"num_chs": stage.channels, "reduction": stage.stride} for stage in model.stages)
            info = [{**stage, "module": f"stage{i}"} for i, stage in enumerate(stages)]
            model.feature_info = FeatureInfo(info, model.out_indices)
            config = {key: value for key, value in config.items() if key not in ("num_classes", "classifier")}
        model.pretrained_cfg = model.default_cfg = config  # timm reads both names
        return model

    entry.__name__ = entry.__qualname__ = name  # timm takes the name from here
    entry.__doc__ = f"`lrfdyn.create_model({name!r})`"
    return entry


# timm looks for this name in the module of an entry point while it registers it.
default_cfgs = generate_default_cfgs({name: default_config(name) for name in list_models()})

for _name in list_models():
    globals()[_name] = register_model(entry_point(_name))
