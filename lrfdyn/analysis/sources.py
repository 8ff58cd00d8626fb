"""What an analysis knows of its models besides what `lrfdyn.sources` says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from lrfdyn import sources
from lrfdyn.analysis.measure.images import Images
from lrfdyn.attention import LABELS, attention_options
from lrfdyn.errors import LrfdynError
from lrfdyn.models import SpikingModel
from lrfdyn.models.registry import model_class
from lrfdyn.sources import Source
from lrfdyn.training.config import decisive
from lrfdyn.training.recipes import load_recipe


def find_sources(text: str, images: Images) -> list[Source]:
    """All models that `text` stands for (see `lrfdyn.sources`). One that is named is made for the images."""
    return [source if source.trained else _fit(source, images) for source in sources.find_sources(text)]


def _fit(source: Source, images: Images) -> Source:
    takes = model_class(source.origin.partition(":")[0]).options()
    facts = {key: value for key, value in images.model_options().items() if key in takes}
    return replace(source, options={**source.options, **facts})


def training_settings(source: Source) -> str:
    """What of a recipe decides the result, the seed apart, as JSON: equal for runs that trained alike. Nothing where
    the recipe is unknown or cannot be read."""
    if source.recipe is None:
        return ""
    try:
        return json.dumps(decisive(load_recipe(source.recipe).as_dict()) | {"run.seed": None}, sort_keys=True)
    except LrfdynError:
        return ""


def describe(model: SpikingModel) -> tuple[str, dict[str, Any]]:
    """A short label of the attention with what is not default about it, and all its options."""
    kind = model.config.get("attention")
    if kind is None:
        return type(model).__name__, {}
    defaults = attention_options(kind)
    options = {**defaults, **(model.config.get("attention_options") or {})}
    changed = [f"{key} {_text(value)}" for key, value in options.items() if _text(value) != _text(defaults[key])]
    return ", ".join([LABELS[kind], *changed]), options


def _text(value: Any) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, (list, tuple)) else str(value)
