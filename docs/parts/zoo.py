"""The tables of zoo.md and of the README's part on it, from the index of the zoo."""

from __future__ import annotations

from docs.parts import kib, table
from lrfdyn.attention import attention_label
from lrfdyn.io.zoo import Pretrained, list_pretrained


def top1(entry: Pretrained) -> str:
    """The mean; where there are several seeds, the standard deviation and their number too."""
    spread = "" if entry.deviation is None else f" ± {entry.deviation:.2f} (n = {len(entry.top1)})"
    return f"{entry.mean:.2f}{spread}"


def models() -> str:
    """A row for every model, with a link to its card."""
    body = [
        [
            f"[{entry.name}](../weights/{entry.name}/README.md)",
            f'`create_model("{entry.model}", attention="{entry.attention}", pretrained="{entry.data}")`',
            top1(entry),
            f"{entry.float32:.2f}",
            f"{entry.bf16:.2f}",
            "–" if entry.integer is None else f"{entry.integer:.2f}",
            f"{entry.test_images:,}",
            f"{entry.parameters:,}",
            kib(entry.state_bytes),
            f"{entry.bytes / 1e6:.2f} MB",
        ]
        for entry in list_pretrained()
    ]
    header = ["name", "in Python", "top-1 %, seeds", "stored: float32", "bf16", "integers", "test images", "parameters"]
    return table([*header, "state", "files"], body)


def short() -> str:
    """The same in short, for the README."""
    body = [
        [
            f"[{entry.name}](weights/{entry.name}/README.md)",
            attention_label(str(entry.attention)),
            entry.data,
            top1(entry),
            f"{entry.bf16:.2f}",
            "–" if entry.integer is None else f"{entry.integer:.2f}",
            f"{entry.parameters:,}",
            f"{entry.bytes / 1e6:.1f} MB",
        ]
        for entry in list_pretrained()
    ]
    return table(["name", "attention", "data", "top-1 %", "as stored", "in integers", "parameters", "files"], body)


PARTS = {"zoo_models": models, "zoo_short": short}
