"""Writes docs/models.md: parameters of every model here, in the official code and in the paper."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.pages import table
from lrfdyn.models import list_models
from lrfdyn.models.summary import count_parameters, meta_model
from lrfdyn.paper import IMAGENET

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"

# Fixtures that are named otherwise than the model. Models without a fixture have no official count.
FIXTURES = {
    "spikformer_4_384": "spikformer_cifar_4_384_c100",
    "qkformer_4_384": "qkformer_cifar_4_384_c100",
    "sdt_v2_31m": "sdt_v2_8_384",
    "sdt_v2_55m": "sdt_v2_8_512",
}

INTRODUCTION = """\
# Models and their parameters

<!-- Made by docs/make_models.py; `python docs/make_models.py` writes it anew. -->

`lrfdyn models` prints this list with input sizes, time steps and accuracies; `lrfdyn models NAME` prints the layers.

## As published

Every model with its own attention. "Official" is what the official code registers (`tests/golden/`), "never used" the
part of it that its forward pass never touches, "paper" the figure of the LRF-Dyn paper's ImageNet table in millions.
"""

EXPLANATION = """
Ours are the official counts without the parameters that are never used, which do not exist here:

- Spikformer registers two LayerNorms per block and never calls them: 4 · dim parameters in each block.
- SDT-V1 registers a `talking_heads` convolution per block and never calls it: heads · heads parameters in each block.

All other counts are equal to the last parameter. The paper's figures are ours to within 0.01 million (some rounded,
some cut after two digits), except SDT-V2 15M: the official code gives 15.11 million and the paper 15.08, for reasons
that it does not state. Models without an official count are other sizes of the same code.

## With another attention

Millions of parameters; the paper's figures in brackets.
"""

END = """
LRF-SSA adds nine weights per channel and dilation. LRF-Dyn adds to them the dendrites and a batch norm; its token is
the value alone by default, so that the projections of queries and keys fall away, and with `token="qkv"` they stay. The
paper does not say how its own counts come about: those of LRF-SSA lie below ours for Spikformer-8-512 and above for the
others, those of LRF-Dyn fit only a form that keeps queries and keys, and its QKFormer-10-384 with LRF-Dyn has fewer
parameters than the host. Ours are counted from the equations.
"""


def published_row(name: str) -> list[str]:
    ours = count_parameters(meta_model(name))
    path = GOLDEN / f"params_{FIXTURES.get(name, name)}.json"
    official, unused = "", ""
    if path.exists():
        fixture = json.loads(path.read_text(encoding="utf-8"))
        official = f"{fixture['num_parameters']:,}"
        unused = f"{fixture['num_parameters_never_used_in_forward']:,}"
    paper, difference = "", ""
    if name in IMAGENET:
        published = IMAGENET[name]["base"].parameters
        paper, difference = f"{published:.2f}", f"{round(published - ours / 1e6, 3) + 0.0:+.3f}"
    return [f"`{name}`", f"{ours:,}", official, unused, paper, difference]


def attention_row(name: str) -> list[str]:
    cells = [f"`{name}`"]
    for method, options in (
        ("base", {}),
        ("lrf_ssa", {"attention": "lrf_ssa"}),
        ("lrf_dyn", {"attention": "lrf_dyn", "token": "value"}),
        ("lrf_dyn", {"attention": "lrf_dyn", "token": "qkv"}),
    ):
        ours = count_parameters(meta_model(name, **options)) / 1e6
        cells.append(f"{ours:.2f} ({IMAGENET[name][method].parameters:.2f})")
    return cells


def render() -> str:
    published = table(
        ["model", "ours", "official", "never used", "paper (M)", "paper − ours (M)"],
        [published_row(name) for name in list_models()],
        numbers=True,
    )
    attentions = table(
        ["model", "host", "LRF-SSA", "LRF-Dyn", 'LRF-Dyn, `token="qkv"`'],
        [attention_row(name) for name in list_models() if "lrf_dyn" in IMAGENET.get(name, {})],
        numbers=True,
    )
    return "\n".join([INTRODUCTION, published + EXPLANATION, attentions + END])


if __name__ == "__main__":
    (ROOT / "docs" / "models.md").write_text(render(), encoding="utf-8")
