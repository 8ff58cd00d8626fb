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
    "spikformer_dvs_2_256": "spikformer_dvs_2_256_c10",
    "qkformer_dvs_2_256": "qkformer_dvs_256_c10",
    "qkformer_gesture_2_256": "qkformer_gesture_256_c11",
    "sdt_v1_dvs_2_256": "sdt_v1_dvs_2_256_c10",
    "sdt_v1_gesture_2_256": "sdt_v1_gesture_2_256_c11",
    "sdt_v2_31m": "sdt_v2_8_384",
    "sdt_v2_55m": "sdt_v2_8_512",
}
VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("host", "base", {}),
    ("LRF-SSA", "lrf_ssa", {"attention": "lrf_ssa"}),
    ("LRF-Dyn", "lrf_dyn", {"attention": "lrf_dyn", "token": "value"}),
    ('LRF-Dyn, `token="qkv"`', "lrf_dyn", {"attention": "lrf_dyn", "token": "qkv"}),
)
# Readings of LRF-SSA: dilations, and whether a batch norm is on the sum of the stencils. The last is the recipes'.
READINGS: tuple[tuple[tuple[int, ...], bool], ...] = (
    ((3, 5), False),
    ((3, 5), True),
    ((1, 3, 5), False),
    ((1, 3, 5), True),
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
        ours = [count_parameters(meta_model(name, **options)) / 1e6 for _, _, options in VARIANTS]
        paper = [IMAGENET[name][method].parameters for _, method, _ in VARIANTS]
        body.append([f"`{name}`", *(f"{here:.2f} ({there:.2f})" for here, there in zip(ours, paper, strict=True))])
    return table(["model", *(header for header, _, _ in VARIANTS)], body, numbers=True)


def readings() -> str:
    """LRF-SSA in the readings of the paper that differ in their number of parameters, next to the paper's count."""
    body = []
    for name in (name for name in list_models() if "lrf_ssa" in IMAGENET.get(name, {})):
        paper = IMAGENET[name]["lrf_ssa"].parameters
        cells = []
        for dilations, norm in READINGS:
            model = meta_model(name, attention="lrf_ssa", dilations=dilations, norm=norm)
            count = f"{count_parameters(model) / 1e6:.2f}"
            cells.append(f"**{count}**" if count == f"{paper:.2f}" else count)
        body.append([f"`{name}`", f"{paper:.2f}", *cells])
    headers = [f"{', '.join(map(str, dilations))}{', norm' if norm else ''}" for dilations, norm in READINGS]
    weights = [f"{9 * len(dilations) + 2 * norm}" for dilations, norm in READINGS]
    return table(["model", "paper", *headers], [["weights per channel", "", *weights], *body], numbers=True)


PARTS = {"models_published": published, "models_attentions": attentions, "models_readings": readings}
