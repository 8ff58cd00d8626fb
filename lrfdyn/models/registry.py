"""Models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, TypeVar

from lrfdyn.attention import attention_options, option_takers, unknown_option
from lrfdyn.errors import unknown_name
from lrfdyn.models.base import SpikingModel

_MODELS: dict[str, Callable[..., SpikingModel]] = {}
Entry = TypeVar("Entry", bound=Callable[..., SpikingModel])


def register_model(entry: Entry) -> Entry:
    """Makes a function known to `create_model` under its own name; its return annotation names the host class."""
    _MODELS[entry.__name__] = entry
    return entry


def list_models(pattern: str = "*") -> list[str]:
    """The names that `create_model` takes, of a shell pattern."""
    return sorted(name for name in _MODELS if fnmatch(name, pattern))


def model_class(name: str) -> type[SpikingModel]:
    if name not in _MODELS:
        raise unknown_name("model", name, _MODELS)
    return inspect.get_annotations(_MODELS[name], eval_str=True)["return"]


def create_model(name: str, **options: Any) -> SpikingModel:
    """A model by name, with random weights. Options are the host's (`num_classes`, `time_steps`, `in_channels`,
    `image_size`, `attention`, ...; `lrfdyn models NAME` prints all) and those of its attention (`dilations`,
    `dendrites`, `token`).

    It takes static images `[B, C, H, W]`, shown for `time_steps` steps, or event frames `[T, B, C, H, W]`, and gives
    logits `[B, classes]`.
    """
    host_options = model_class(name).options()
    kind, own, kind_options = None, {}, {}
    if "attention" in host_options:
        kind = options.get("attention", host_options["attention"].default)
        kind_options = attention_options(kind)
        own = dict(options.pop("attention_options", None) or {})
        own |= {key: options.pop(key) for key in list(options) if key in kind_options}
    for key in options:
        if key in host_options:
            continue
        if kind is not None and option_takers(key):
            raise unknown_option(kind, key)
        raise unknown_name(f"option of {name}", key, [*host_options, *kind_options])
    if own:
        options["attention_options"] = own
    model = _MODELS[name](**options)
    model.name = name
    return model
