"""The paper's Table 3, and what it concludes from it held against our runs."""

from __future__ import annotations

from statistics import mean
from textwrap import fill

from docs.pages import table
from lrfdyn.paper import TABLE3, TABLE3_DILATIONS

# What the paper reads from its table: the first cell minus the second.
CLAIMS = {
    "LRF helps SSA": (("LRF-SSA", "Ω<=5"), ("LRF-SSA", "w/o LRF")),
    "LRF helps LRF-Dyn": (("LRF-Dyn", "Ω<=5"), ("LRF-Dyn", "w/o LRF")),
    "LRF-Dyn with LRF is better than SSA": (("LRF-Dyn", "Ω<=5"), ("LRF-SSA", "w/o LRF")),
    "LRF-Dyn does as well as LRF-SSA": (("LRF-Dyn", "Ω<=5"), ("LRF-SSA", "Ω<=5")),
    "LRF-Dyn without LRF does as well as SSA": (("LRF-Dyn", "w/o LRF"), ("LRF-SSA", "w/o LRF")),
    "SSA loses by being causal": (("causal SSA", "w/o LRF"), ("LRF-SSA", "w/o LRF")),
    "LRF-Dyn is better than causal SSA": (("LRF-Dyn", "w/o LRF"), ("causal SSA", "w/o LRF")),
}
TELLS = 0.5  # percent: below it, one seed shows no difference
CONTRARY = "**not as in the paper**"
REASONS = {
    "LRF-Dyn without LRF does as well as SSA": "LRF-Dyn reads the value alone here, without queries and keys: each "
    "token gets the values before it, weighted by their distance and by nothing that it asks for itself. Without LRF "
    "it never sees the rows below. The paper's form may keep queries and keys.",
    "SSA loses by being causal": "We do not know why the paper's does. A token here has seen its surroundings on all "
    "sides through the convolutions before the first block, and a sum that ends at the token tells it where it is, "
    "which a sum over all tokens does not. The paper does not describe its causal form.",
    "LRF-Dyn is better than causal SSA": "The difference is that of the two conclusions above.",
}

# Top-1 in percent by method and dilations, one value per seed.
Accuracies = dict[tuple[str, tuple[int, ...]], list[float]]


def tokens(found: Accuracies) -> list[str]:
    """What queries and keys in the token of LRF-Dyn do, where both tokens have run; the paper does not compare them."""
    return [
        f"LRF-Dyn with the qkv token minus that with the value, dilations {list(dilations)}: "
        f"{mean(values) - mean(found['LRF-Dyn', dilations]):+.2f}.\n"
        for (method, dilations), values in found.items()
        if method == "LRF-Dyn (qkv token)" and ("LRF-Dyn", dilations) in found
    ]


def above_paper(found: Accuracies) -> list[str]:
    """Of runs by another recipe than the paper's: by how much they are above it, and what of that is no attention's
    doing because all have it."""
    above = {}
    for method, values in TABLE3.items():
        for column, theirs in zip(TABLE3_DILATIONS, values, strict=True):
            ours = found.get((method, TABLE3_DILATIONS[column]))
            if ours:
                above[cell_name(method, column)] = mean(ours) - theirs
    if len(above) < 2:
        return []
    text = f"Here minus the paper: {', '.join(f'{name} {value:+.2f}' for name, value in above.items())}."
    common = min(above.values())
    if common > 0:
        text += f" What they have in common, {common:.2f}, is no attention's doing: it comes from the recipe or from "
        text += "whatever else they share."
    return [fill(text, 120) + "\n"]


def cell_name(method: str, column: str) -> str:
    return "SSA" if (method, column) == ("LRF-SSA", "w/o LRF") else f"{method} {column}"


def readings(found: Accuracies, late: Accuracies, epochs: list[int]) -> list[str]:
    """The paper's conclusions held against runs with the same number of epochs; nothing where none can be. `late` are
    their mean accuracies over the tests at `epochs`."""
    body, reasons = [], []
    for claim, cells in CLAIMS.items():
        keys = [(method, TABLE3_DILATIONS[column]) for method, column in cells]
        if not all(key in found for key in keys):
            continue
        here, near = (mean(values[keys[0]]) - mean(values[keys[1]]) for values in (found, late))
        first, second = (TABLE3[method][list(TABLE3_DILATIONS).index(column)] for method, column in cells)
        reading = read(here, near, first - second)
        if reading == CONTRARY:
            reasons.append(f"- {claim}: {REASONS.get(claim, 'we do not know why it is not so here.')}")
        names = [cell_name(*cell) for cell in cells]
        body.append([claim, " minus ".join(names), *(f"{x:+.2f}" for x in (here, near, first - second)), reading])
    if not body:
        return []
    introduction = fill(
        f"What the paper concludes from its table. One seed shows nothing below {TELLS}, nor does a last epoch that "
        f'the tests before it do not bear out: "near the end" is the mean over {len(epochs)} tests, of epoch '
        f"{epochs[0]} to {epochs[-1]}. The smaller of the two differences is what is read.",
        120,
    )
    header = ["conclusion", "difference", "here", "near the end", "paper", "reading"]
    return [f"{introduction}\n", table(header, body), *reasons, ""]


def read(here: float, near: float, paper: float) -> str:
    shown = min(here, near, key=abs) if here * near > 0 else 0.0
    if abs(shown) < TELLS:
        return "as in the paper: no difference to speak of" if abs(paper) < TELLS else "too small to tell"
    return "as in the paper" if abs(paper) >= TELLS and shown * paper > 0 else CONTRARY
