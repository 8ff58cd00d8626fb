"""Parts of models.md: parameters of every model here, in the official code and in the paper."""

from __future__ import annotations

import json
from typing import Any

from docs.parts import ROOT, table
from lrfdyn.models import list_models
from lrfdyn.models.summary import count_parameters, meta_model
from lrfdyn.paper import IMAGENET

GOLDEN = ROOT / "tests" / "golden"
# Fixtures that are named otherwise than the model. Models without a fixture have no official count.
FIXTURES = {
    "spikformer_4_384": "spikformer_cifar_4_384_c100",
    "qkformer_4_384": "qkformer_cifar_4_384_c100",
    "sdt_v2_31m": "sdt_v2_8_384",
    "sdt_v2_55m": "sdt_v2_8_512",
}
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("base", {}),
    ("lrf_ssa", {"attention": "lrf_ssa"}),
    ("lrf_dyn", {"attention": "lrf_dyn", "token": "value"}),
    ("lrf_dyn", {"attention": "lrf_dyn", "token": "qkv"}),
)


def published() -> str:
    """Every model with its own attention, next to the counts of the official code and of the paper."""
    body = []
    for name in list_models():
        ours = count_parameters(meta_model(name))
        path = GOLDEN / f"params_{FIXTURES.get(name, name)}.json"
        fixture = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        official = [fixture.get(key) for key in ("num_parameters", "num_parameters_never_used_in_forward")]
        paper = IMAGENET[name]["base"].parameters if name in IMAGENET else None
        difference = "" if paper is None else f"{round(paper - ours / 1e6, 3) + 0.0:+.3f}"
        cells = ["" if count is None else f"{count:,}" for count in official]
        body.append([f"`{name}`", f"{ours:,}", *cells, "" if paper is None else f"{paper:.2f}", difference])
    header = ["model", "ours", "official", "never used", "paper (M)", "paper − ours (M)"]
    return table(header, body, numbers=True)


def attentions() -> str:
    """The same models with another attention, in millions, the paper's counts in brackets."""
    body = []
    for name in (name for name in list_models() if "lrf_dyn" in IMAGENET.get(name, {})):
        ours = [count_parameters(meta_model(name, **options)) / 1e6 for _, options in VARIANTS]
        paper = [IMAGENET[name][method].parameters for method, _ in VARIANTS]
        body.append([f"`{name}`", *(f"{here:.2f} ({there:.2f})" for here, there in zip(ours, paper, strict=True))])
    return table(["model", "host", "LRF-SSA", "LRF-Dyn", 'LRF-Dyn, `token="qkv"`'], body, numbers=True)


PARTS = {"models_published": published, "models_attentions": attentions}
