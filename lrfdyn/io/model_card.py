"""The README.md of a saved model: a header that the Hugging Face hub reads, and what a reader wants to know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lrfdyn.attention import attention_label
from lrfdyn.errors import LrfdynError, require

if TYPE_CHECKING:
    from lrfdyn.io.hub import HubMixin

# A card without this line belongs to whoever took it out.
CARD_MARK = "<!-- Made by lrfdyn, and made anew by every save. Remove this line to keep your changes. -->"
TAGS = ["lrfdyn", "spiking-neural-network", "vision"]


def model_card(
    model: HubMixin, config: Mapping[str, Any], source: str, description: str, header: Mapping[str, Any]
) -> str:
    """The card of a model. `source` is where a reader loads the model from, `header` holds further entries of the hub's
    header."""
    entries = {"library_name": "lrfdyn", "pipeline_tag": model.pipeline_tag, "tags": TAGS, **header}
    parts = [
        f"---\n{front_matter(entries)}---\n{CARD_MARK}\n",
        f"# {model.name or type(model).__name__}\n\n{sentence(model)}\n",
        *([description.strip() + "\n"] if description.strip() else []),
        parameter_table(model),
        "## Use\n\n```python\nfrom lrfdyn import from_pretrained\n\n"
        f"model = from_pretrained({json.dumps(source)})\n{usage(model)}```\n",
        f"## Configuration\n\n```json\n{json.dumps(config, indent=1)}\n```\n",
    ]
    return "\n".join(parts)


def usage(model: HubMixin) -> str:
    channels, height, width = model.input_size
    if model.pipeline_tag == "image-segmentation":  # of any size that its stride divides
        return (
            f"scores = model(images)  # [B, {channels}, H, W] to [B, {model.num_classes}, H, W], of image files:\n"
            "# lrfdyn predict --task segmentation --model FOLDER --out MASKS IMAGE...\n"
        )
    return f"logits = model(images)  # [B, {channels}, {height}, {width}]\n"


def front_matter(entries: Mapping[str, Any]) -> str:
    """The entries as YAML; every value as JSON, which is YAML too and quotes itself."""
    lines = []
    for key, value in entries.items():
        valid = re.fullmatch(r"[\w-]+", key) is not None
        require(valid, f"card: expected names of letters, digits, - and _, got {key!r}")
        try:
            lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}\n")
        except TypeError:
            kind = type(value).__name__
            raise LrfdynError(f"card: {key}: expected text, numbers or lists of them, got {kind}") from None
    return "".join(lines)


def sentence(model: HubMixin) -> str:
    kind, (channels, height, width) = model.config.get("attention"), model.input_size
    attention = f" with {attention_label(kind)} attention" if kind else ""
    classes = f"{model.num_classes} classes" if model.num_classes else "no classifier"
    steps = f"{model.time_steps} time step{'' if model.time_steps == 1 else 's'}"
    return (
        f"{type(model).__name__}{attention}, a spiking vision network: images of {height}x{width} pixels and "
        f"{channels} channels, {steps}, {classes}."
    )


def parameter_table(model: HubMixin) -> str:
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    counts["all"] = sum(p.numel() for p in model.parameters())
    rows = [f"| {name} | {count:,} |" for name, count in counts.items() if count]
    return "\n".join(["| part | parameters |", "|---|---:|", *rows]) + "\n"
