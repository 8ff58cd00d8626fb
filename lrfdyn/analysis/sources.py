"""What an analysis knows of its models besides what `lrfdyn.sources` says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lrfdyn import sources
from lrfdyn.analysis.measure.images import Images
from lrfdyn.errors import LrfdynError
from lrfdyn.models.registry import model_class
from lrfdyn.sources import Source
from lrfdyn.training.config import decisive
from lrfdyn.training.recipes import load_recipe


def find_sources(text: str, images: Images) -> list[Source]:
    """All models that `text` stands for (see `lrfdyn.sources`). One that is named is made for the images."""
    return [source if source.trained else _fit(source, images) for source in sources.find_sources(text)]


def _fit(source: Source, images: Images) -> Source:
    takes = model_class(source.origin.partition(":")[0]).options()
    facts = {key: value for key, value in images.facts.items() if key in takes}
    return replace(source, options={**source.options, **facts})


def training_settings(source: Source) -> dict[str, Any]:
    """What of the recipe of a run decides its result, the seed apart, by `section.key`: equal for runs that trained
    alike. Nothing where the recipe is unknown or cannot be read."""
    if source.recipe is None:
        return {}
    try:
        return decisive(load_recipe(source.recipe).as_dict()) | {"run.seed": None}
    except LrfdynError:
        return {}
