"""The charts of Theorems 1 and 2 for a report, and the checks of every closed form against its sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lrfdyn.analysis import theory as t
from lrfdyn.analysis.report.look import places
from lrfdyn.analysis.report.write import results_head
from lrfdyn.checks import checked
from lrfdyn.errors import require

Chart = dict[str, Any]
Axes = tuple[dict[str, Any], dict[str, Any]]  # x and y
Lines = dict[str, list[list[float]]]  # points by label
POINTS, CELLS = 60, 48  # of a line, and a side of a map
KINDS = {"VSA": "vsa", "SSA": "ssa", "LRF-SSA": "lrf_ssa"}  # whose colours lines have
TOLERANCE = 1e-12  # in which two radii are equal
MOST = 2**16  # tokens: every point of a chart is a sum over all of them

REASON = (
    "Mixing adds up to `h(λ)` to the entropy, so the bound `h(λ) + (1-λ)H(P) + λH(R)` is below `H(P)` only where "
    "`h(λ) ≤ λ(H(P) - H(R))`, which no small `λ > 0` satisfies: there the paper's last step does not follow. "
    "Its conclusion `H((1-λ)P + λR) ≤ H(P)` is true for every `λ` exactly where the cross entropy `-Σ R log P` is at "
    "most `H(P)` (entropy is concave in `λ` and this difference is its slope at 0), which an `R` at least as local as "
    "a falling `P` satisfies and a dilated `R` does not once `P` has fallen off before the taps of `R`."
)
RADIUS_NOTE = (
    "Theorem 1 needs `α`: VSA is at least as local as SSA wherever `α ≥ 1 + β(N-1)`, because `(α-βΔ)exp(βΔ)` then "
    "grows with `Δ`; for `α ≤ 1` it falls, and the order is reversed. For fixed `α` and `β` the radius of SSA does not "
    "grow with `N` without end: its weights are zero from `α/β` on, and the radius stays near `α/(3β)`. `Θ(N)` needs "
    "a `β` that falls like `1/N`, such as the `β ≤ α/(N-1)` of Theorem 2."
)
ORDER_NOTE = (
    "Of `μ(VSA) ≤ μ(LRF-SSA) ≤ μ(SSA)` the right half needs `μ(R) ≤ μ(SSA)`. The left half needs "
    "`λ ≤ (μ(SSA)-μ(VSA)) / (μ(SSA)-μ(R))` where `R` is more local than VSA: with a larger `λ` LRF-SSA is more local "
    "than VSA."
)


@checked
@dataclass(frozen=True)
class TheorySettings:
    """The numbers of the theorems."""

    n: int = 196  # tokens
    beta: float = 0.1  # fall of the similarity per token
    alpha: float | None = None  # similarity at distance 0; None: 1 + beta (n - 1), with which Theorem 1's order is sure
    share: float = 0.5  # of local weights
    dilations: tuple[int, ...] = (3, 5)  # of the local weights

    def __post_init__(self) -> None:
        sums = "as every point of a chart is a sum over all tokens"
        require(8 <= self.n <= MOST, f"n (tokens): expected an integer in 8..{MOST}, {sums}, got {self.n}")
        for name, value in (("beta", self.beta), ("alpha", 1 if self.alpha is None else self.alpha)):
            require(0 < value <= 1e9, f"{name}: expected a positive number up to 1e9, got {value}")
        require(0 <= self.share <= 1, f"share: expected a number in [0, 1], got {self.share}")
        inside = len(self.dilations) > 0 and all(1 <= d < self.n for d in self.dilations)
        require(inside, f"dilations: expected integers in 1..{self.n - 1}, got {self.dilations}")

    def alpha_at(self, n: int, beta: float) -> float:
        """Return the chosen alpha, or the one that goes with `n` and `beta`."""
        return 1 + beta * (n - 1) if self.alpha is None else self.alpha

    @property
    def taps(self) -> list[int]:
        return t.stencil_distances(self.dilations)


def checks(settings: TheorySettings) -> list[dict[str, Any]]:
    """Compute every closed form and the sum that defines it."""
    n, beta = settings.n, settings.beta
    alpha = settings.alpha_at(n, beta)
    vsa, ssa, mix = _distributions(settings, n, beta, settings.share).values()
    pairs = [
        ("μ of VSA", t.radius(vsa), t.vsa_radius(n, beta)),
        ("μ of SSA", t.radius(ssa), t.ssa_radius(n, alpha, beta)),
        ("μ of LRF-SSA", t.radius(mix), t.lrf_radius(n, alpha, beta, settings.taps, settings.share)),
        ("H of VSA", t.entropy_of(vsa), t.vsa_entropy(n, beta)),
        ("H of SSA", t.entropy_of(ssa), t.ssa_entropy(n, alpha, beta)),
    ]
    return [{"name": name, "sum": a, "closed_form": b, "difference": abs(a - b)} for name, a, b in pairs]


@checked
def theory_results(settings: TheorySettings | None = None, command: str = "lrfdyn theory") -> dict[str, Any]:
    """Compute charts, checks and explanations of Theorems 1 and 2, in the format that `write_all` takes."""
    settings = settings or TheorySettings()
    alpha = "1 + β(N-1)" if settings.alpha is None else f"{settings.alpha:g}"
    dilations = f"dilations {', '.join(map(str, settings.dilations))}"
    lead = (
        f"Exact values for attention over distances `0..N-1`. Unless an axis says otherwise `N = {settings.n}`, "
        f"`β = {settings.beta:g}`, `α = {alpha}`, `λ = {settings.share:g}`, and `R` has the taps of stencils with "
        f"{dilations}."
    )
    return {
        **results_head("Theorems 1 and 2: radius and entropy of attention", lead, command),
        "checks": checks(settings),
        "charts": [*_curves(settings), *_regions(settings, alpha, dilations)],
        "notes": [REASON, RADIUS_NOTE, ORDER_NOTE],
    }


def _chart(id_: str, title: str, caption: str, axes: Axes, lines: Lines | None = None, **regions: Any) -> Chart:
    """Lines through points by label, or a map of regions, which are classes and cells."""
    colours = places([KINDS.get(label.removeprefix("H of "), label) for label in lines or {}])
    parts = zip(lines or {}, (lines or {}).values(), colours, strict=True)
    series = {"series": [{"label": label, "points": points, "place": place} for label, points, place in parts]}
    head = {"id": id_, "kind": "lines" if lines else "regions", "title": title, "caption": caption}
    return {**head, "x": axes[0], "y": axes[1], **(series if lines else regions)}


def _axis(label: str, log: bool = False, **values: Any) -> dict[str, Any]:
    return {"label": label, **values, "log": log}


def _distributions(settings: TheorySettings, n: int, beta: float, share: float) -> dict[str, t.Vector]:
    """The attention of one query over `n` tokens."""
    ssa = t.ssa_distribution(n, settings.alpha_at(n, beta), beta)
    local = t.local_distribution(n, [min(tap, n - 1) for tap in settings.taps])
    return {"VSA": t.vsa_distribution(n, beta), "SSA": ssa, "LRF-SSA": t.mixture(ssa, local, share)}


def _curves(settings: TheorySettings) -> Iterator[Chart]:
    """Radius and entropy against N, β and λ, and both sides of the inequality of Theorem 2."""
    n, beta, share = settings.n, settings.beta, settings.share
    fixed = settings.alpha_at(64, beta)
    sizes = sorted({round(2**e) for e in np.linspace(3, 12, 37)} | {n})
    betas, shares = np.geomspace(1e-3, 3, POINTS).tolist(), np.linspace(0, 1, POINTS + 1).tolist()
    sweeps: list[tuple[str, str, list[Any], Callable[[Any], tuple[int, float, float]], str]] = [
        ("tokens", "N", sizes, lambda x: (x, beta, share), "number of tokens. With `α` that grows with `N`, SSA "
         "spreads over all tokens; with `α` fixed its weights end at `α/β`."),
        ("beta", "β", betas, lambda x: (n, x, share), "fall `β` of the similarity per token."),
        ("lambda", "λ", shares, lambda x: (n, beta, x), "share `λ` of local weights: LRF-SSA goes from SSA to `R`."),
    ]  # fmt: skip
    quantities = (1, "radius", "Expected radius μ", t.radius), (2, "entropy", "Entropy H (nats)", t.entropy_of)
    for theorem, name, label, value in quantities:
        for id_, symbol, xs, at, against in sweeps:
            lines: Lines = {}
            for x in xs:
                for kind, p in _distributions(settings, *at(x)).items():
                    lines.setdefault(kind, []).append([float(x), value(p)])
            if id_ == "tokens":
                lines[f"SSA, α fixed at {fixed:g}"] = [[x, value(t.ssa_distribution(x, fixed, beta))] for x in xs]
            axes = _axis(symbol, id_ != "lambda"), _axis(label, (name, id_) == ("radius", "tokens"))
            title = f"Theorem {theorem}: {name} against {symbol}"
            caption = f"{label.removesuffix(' (nats)')} against the {against}"
            yield _chart(f"{name}-{id_}", title, caption, axes, lines)
    p, r = t.ssa_distribution(n, settings.alpha_at(n, beta), beta), t.local_distribution(n, settings.taps)
    yield _chart(
        "inequality-lambda",
        "Theorem 2: both sides of the inequality",
        f"The entropy of LRF-SSA, the paper's bound, and the entropy of SSA. The bound is below `H(P)` from "
        f"`λ = {t.proof_threshold(p, r):.3f}` on.",
        (_axis("λ"), _axis("Entropy H (nats)")),
        {
            "H of LRF-SSA": [[x, t.entropy_of(t.mixture(p, r, x))] for x in shares],
            "the paper's bound": [[x, t.mixture_bound(p, r, x)] for x in shares],
            "H of SSA": [[x, t.entropy_of(p)] for x in shares],
        },
    )


def _regions(settings: TheorySettings, alpha: str, dilations: str) -> Iterator[Chart]:
    """Where the orders and the inequality of the theorems hold; `alpha` and `dilations` in words."""
    n, taps = settings.n, settings.taps
    betas, ratios = np.geomspace(1e-3, 1, CELLS).tolist(), np.geomspace(0.1 / n, 1, CELLS).tolist()
    alphas, shares = np.geomspace(0.1, 1000, CELLS).tolist(), np.linspace(0, 1, CELLS + 1)[1:].tolist()
    yield _chart(
        "radius-order",
        "Theorem 1: where VSA is at least as local as SSA",
        f"The sign of `μ(SSA) - μ(VSA)` for `N = {n}`. {RADIUS_NOTE}",
        (_axis("β", True, values=betas), _axis("α", True, values=alphas)),
        classes=["μ(VSA) ≤ μ(SSA)", "μ(VSA) > μ(SSA)"],
        cells=[[int(t.vsa_radius(n, b) > t.ssa_radius(n, a, b) + TOLERANCE) for b in betas] for a in alphas],
    )

    def order(beta: float, share: float) -> int:
        at = settings.alpha_at(n, beta)
        mixed = t.lrf_radius(n, at, beta, taps, share)
        less_local = mixed > t.ssa_radius(n, at, beta) + TOLERANCE
        return 2 if less_local else int(mixed < t.vsa_radius(n, beta) - TOLERANCE)

    yield _chart(
        "radius-between",
        "Theorem 1: where LRF-SSA is between VSA and SSA",
        f"The order of the three radii for `N = {n}`, `α = {alpha}` and `R` of {dilations}. {ORDER_NOTE}",
        (_axis("β", True, values=betas), _axis("λ", values=shares)),
        classes=["μ(VSA) ≤ μ(LRF-SSA) ≤ μ(SSA)", "LRF-SSA is more local than VSA", "LRF-SSA is less local than SSA"],
        cells=[[order(beta, share) for beta in betas] for share in shares],
    )
    distributions = [t.ssa_distribution(n, 1.0, ratio) for ratio in ratios]
    kinds = ("local", "R uniform on distances 0 and 1", [0, 1]), ("stencil", f"R of {dilations}", taps)
    for id_, name, distances in kinds:
        r = t.local_distribution(n, distances)
        limits = [(t.failing_share(p, r), t.proof_threshold(p, r)) for p in distributions]
        yield _chart(
            f"inequality-{id_}",
            f"Theorem 2: where the last inequality holds, {name}",
            f"Whether `H((1-λ)P + λR) ≤ H(P)` for `N = {n}`, `P` being SSA, and if the bound shows it. {REASON}",
            (_axis("β/α", True, values=ratios), _axis("λ", values=shares)),
            classes=["follows from the bound", "true, but not by the bound", "false"],
            cells=[[2 if share < failing else int(share < proved) for failing, proved in limits] for share in shares],
        )
