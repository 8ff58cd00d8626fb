"""Models by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

from lrfdyn.attention.registry import ATTENTIONS, attention_options, option_takers, unknown_option
from lrfdyn.checks import check_types, checked, hints_of
from lrfdyn.errors import require, shown, unknown_name
from lrfdyn.io.hub import as_tuples
from lrfdyn.io.zoo import choose_pretrained, zoo_folder
from lrfdyn.models.base import SpikingModel
from lrfdyn.registry import Registry

Host = TypeVar("Host", bound=type[SpikingModel])

_HOSTS: Registry[type[SpikingModel]] = Registry("model")
_PRESETS: dict[str, dict[str, Any]] = {}


@checked
def register_model(name: str, **preset: Any) -> Callable[[Host], Host]:
    """Makes a host class known to `create_model`, `list_models` and all commands as `name`, built with the options of
    `preset` in the place of its defaults. A class may have several names.

        @register_model("my_host_small", width=64)
        @register_model("my_host_large", width=256)
        class MyHost(lrfdyn.models.SpikingModel):
            ...
    """

    def register(host: Host) -> Host:
        _HOSTS.add(name, host)
        _PRESETS[name] = preset
        return host

    return register


@checked
def list_models(pattern: str = "*") -> list[str]:
    """The sorted names that `create_model` takes, of those that a shell pattern such as "spikformer_8_*" matches, with
    capitals or without."""
    return sorted(name for name in _HOSTS if fnmatchcase(name.lower(), pattern.lower()))


def model_class(name: str) -> type[SpikingModel]:
    """The host class of a model; its `options()` are what `create_model` takes for it, beside those of attentions."""
    return _HOSTS[name]


def model_defaults(name: str) -> dict[str, Any]:
    """The options of a model with their defaults."""
    return {**model_class(name).options(), **_PRESETS[_HOSTS.name_of(name)]}


def host_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `create_model` as the host class takes them: those of its attention in `attention_options`. An
    unknown one is an error that names those who take it, or the near matches."""
    known = model_defaults(name)
    host, config_class = dict(options), cast(Any, model_class(name).config_class)
    check_types({key: host[key] for key in ("attention", "attention_options") if key in host}, hints_of(config_class))
    if host.get("attention") is not None:
        host["attention"] = ATTENTIONS.name_of(host["attention"])
    kind = host.get("attention", known.get("attention"))
    kind_options = {} if kind is None else attention_options(kind)
    own = {key: host.pop(key) for key in options if key in kind_options}
    for key in sorted(host.keys() - known.keys()):
        if kind is not None and option_takers(key):
            raise unknown_option(kind, key)
        raise unknown_name(f"option of {name}", key, [*known, *kind_options])
    own = {**(host.pop("attention_options", None) or {}), **own}
    return {**host, "attention_options": own} if own else host


@checked
def create_model(name: str, *, pretrained: bool | str = False, **options: Any) -> SpikingModel:
    """Builds a model, with random weights or with those of the zoo.

    `options` are those of the host (`num_classes`, `time_steps`, `in_channels`, `image_size`, `attention`, ...;
    `lrfdyn models NAME` prints all) and those of its attention (`dilations`, `dendrites`, `token`, `directions`). The
    model takes static images `[B, C, H, W]`, shown for `time_steps` steps, or event frames `[T, B, C, H, W]`, and gives
    logits `[B, classes]`.

    `pretrained` names the data set that a model of the zoo was trained on, True stands for the only one that there is
    for this model and attention (`lrfdyn models --pretrained` lists them). It has the options that it was trained with,
    also where those of `name` are others, and an option that contradicts them is an error.

        model = lrfdyn.create_model("spikformer_4_384", attention="lrf_dyn", dilations=(1, 3), num_classes=10)
        logits = model(torch.randn(2, 3, 32, 32))  # [2, 10]
        model = lrfdyn.create_model("spikformer_dvs_2_256", attention="lrf_dyn", pretrained="nmnist")
    """
    name = _HOSTS.name_of(name)
    if pretrained is not False:
        return _trained_model(name, pretrained, host_options(name, options))
    model = model_class(name)(**{**_PRESETS[name], **host_options(name, options)})
    model.name = name
    return model


def _trained_model(name: str, data: str | bool, options: dict[str, Any]) -> SpikingModel:
    """The model of the zoo, in evaluation mode; `options`, as the host takes them, must be those that it has."""
    entry = choose_pretrained(name, options.get("attention", model_defaults(name).get("attention")), data)
    model = SpikingModel.from_pretrained(zoo_folder(entry))
    kind, inner = model.config.get("attention"), options.pop("attention_options", {})
    own = {**({} if kind is None else attention_options(kind)), **(model.config.get("attention_options") or {})}
    for given, stored in ((options, model.config), (inner, own)):
        for key, value in given.items():
            same = as_tuples(value) == as_tuples(stored.get(key))
            require(same, f"{key}: {entry.name} was trained with {shown(stored.get(key))}, got {shown(value)}")
    return model
