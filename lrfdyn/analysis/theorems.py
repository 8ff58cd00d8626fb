"""The figures of Theorems 1 and 2, and the checks of every closed form against its sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from lrfdyn.analysis import theory as t
from lrfdyn.analysis.report.page import RESULTS_FORMAT
from lrfdyn.errors import require
from lrfdyn.version import __version__

Chart = dict[str, Any]
POINTS = 60
CELLS = 48

REASON = (
    "Mixing adds up to h(λ) to the entropy, so the bound h(λ) + (1-λ)H(P) + λH(R) is below H(P) only where "
    "h(λ) ≤ λ(H(P) - H(R)), which no small λ > 0 satisfies: there the paper's last step does not follow. "
    "Its conclusion H((1-λ)P + λR) ≤ H(P) is true for every λ exactly where the cross entropy -Σ R log P is at most "
    "H(P) (entropy is concave in λ and this difference is its slope at 0), which an R at least as local as a falling P "
    "satisfies and a dilated R does not once P has fallen off before the taps of R."
)
RADIUS_NOTE = (
    "Theorem 1 needs α: VSA is at least as local as SSA wherever α ≥ 1 + β(N-1), because (α-βΔ)exp(βΔ) then grows with "
    "Δ; for α ≤ 1 it falls, and the order is reversed. For fixed α and β the radius of SSA does not grow with N "
    "without end: its weights are zero from α/β on, and the radius stays near α/(3β). Θ(N) needs a β that falls like "
    "1/N, such as the β ≤ α/(N-1) of Theorem 2."
)
ORDER_NOTE = (
    "Of μ(VSA) ≤ μ(LRF-SSA) ≤ μ(SSA) the right half needs μ(R) ≤ μ(SSA). The left half needs "
    "λ ≤ (μ(SSA)-μ(VSA)) / (μ(SSA)-μ(R)) where R is more local than VSA: with a larger λ LRF-SSA is more local than "
    "VSA."
)


@dataclass(frozen=True)
class TheorySettings:
    """`alpha` None takes 1 + beta (n - 1), the smallest with which the order of Theorem 1 is sure."""

    n: int = 196
    beta: float = 0.1
    alpha: float | None = None
    share: float = 0.5
    dilations: tuple[int, ...] = (3, 5)

    def __post_init__(self) -> None:
        require(self.n >= 8, f"n (tokens): expected an integer >= 8, got {self.n}")
        require(0 < self.beta < math.inf, f"beta: expected a positive number, got {self.beta}")
        require(self.alpha is None or 0 < self.alpha < math.inf, f"alpha: expected a positive number, got {self.alpha}")
        require(0 <= self.share <= 1, f"share: expected a number in [0, 1], got {self.share}")
        require(
            len(self.dilations) > 0 and all(1 <= d < self.n for d in self.dilations),
            f"dilations: expected integers in 1..{self.n - 1}, got {self.dilations}",
        )

    def alpha_at(self, n: int, beta: float | None = None) -> float:
        """The chosen alpha, or the one that goes with `n` and `beta`."""
        return 1 + (self.beta if beta is None else beta) * (n - 1) if self.alpha is None else self.alpha

    @property
    def alpha_text(self) -> str:
        return "1 + β(N-1)" if self.alpha is None else f"{self.alpha:g}"

    @property
    def taps(self) -> list[int]:
        return t.stencil_distances(self.dilations)


def checks(settings: TheorySettings) -> list[dict[str, Any]]:
    """Every closed form next to the sum that defines it."""
    n, beta = settings.n, settings.beta
    alpha = settings.alpha_at(n)
    vsa, ssa = t.vsa_distribution(n, beta), t.ssa_distribution(n, alpha, beta)
    mix = t.mixture(ssa, t.local_distribution(n, settings.taps), settings.share)
    pairs = [
        ("μ of VSA", t.radius(vsa), t.vsa_radius(n, beta)),
        ("μ of SSA", t.radius(ssa), t.ssa_radius(n, alpha, beta)),
        ("μ of LRF-SSA", t.radius(mix), t.lrf_radius(n, alpha, beta, settings.taps, settings.share)),
        ("H of VSA", t.entropy_of(vsa), t.vsa_entropy(n, beta)),
        ("H of SSA", t.entropy_of(ssa), t.ssa_entropy(n, alpha, beta)),
    ]
    return [{"name": name, "sum": a, "closed_form": b, "difference": abs(a - b)} for name, a, b in pairs]


def theory_results(settings: TheorySettings | None = None, command: str = "lrfdyn theory") -> dict[str, Any]:
    """Charts, checks and explanations, in the format of the report."""
    settings = settings or TheorySettings()
    n, beta = settings.n, settings.beta
    return {
        "format": RESULTS_FORMAT,
        "title": "Theorems 1 and 2: radius and entropy of attention",
        "lead": f"Exact values for attention over distances 0..N-1. Unless an axis says otherwise N = {n}, "
        f"β = {beta:g}, α = {settings.alpha_text}, "
        f"λ = {settings.share:g}, and R has the taps of stencils with dilations "
        f"{', '.join(map(str, settings.dilations))}.",
        "command": command,
        "created": datetime.now().isoformat(timespec="seconds"),
        "version": __version__,
        "checks": checks(settings),
        "charts": [*_curves(settings), *_regions(settings)],
        "notes": [REASON, RADIUS_NOTE, ORDER_NOTE],
    }


def _curves(settings: TheorySettings) -> Iterator[Chart]:
    quantities: list[tuple[str, str, Callable[[t.Vector], float]]] = [
        ("radius", "Expected radius μ", t.radius),
        ("entropy", "Entropy H (nats)", t.entropy_of),
    ]
    fixed = settings.alpha_at(64)

    def ssa(n: int) -> t.Vector:
        return t.ssa_distribution(n, fixed, settings.beta)

    for name, label, value in quantities:
        theorem = "Theorem 1" if name == "radius" else "Theorem 2"
        sizes = sorted({round(2**e) for e in np.linspace(3, 12, 37)} | {settings.n})
        yield _lines(
            f"{name}-tokens",
            f"{theorem}: {name} against N",
            f"{label.split(' (')[0]} against the number of tokens. With α that grows with N, SSA spreads over all "
            "tokens; with α fixed its weights end at α/β.",
            {"label": "N", "log": True},
            {"label": label, "log": name == "radius"},
            [
                *_family(settings, value, sizes, lambda x: (int(x), settings.beta, settings.share)),
                {"label": f"SSA, α fixed at {fixed:g}", "points": [[x, value(ssa(x))] for x in sizes]},
            ],
        )
        betas = np.geomspace(1e-3, 3, POINTS)
        yield _lines(
            f"{name}-beta",
            f"{theorem}: {name} against β",
            f"{label.split(' (')[0]} against the fall β of the similarity per token.",
            {"label": "β", "log": True},
            {"label": label, "log": False},
            _family(settings, value, betas, lambda x: (settings.n, float(x), settings.share)),
        )
        shares = np.linspace(0, 1, POINTS + 1)
        yield _lines(
            f"{name}-lambda",
            f"{theorem}: {name} against λ",
            f"{label.split(' (')[0]} against the share λ of the local weights: LRF-SSA goes from SSA to R.",
            {"label": "λ", "log": False},
            {"label": label, "log": False},
            _family(settings, value, shares, lambda x: (settings.n, settings.beta, float(x))),
        )
    p = t.ssa_distribution(settings.n, settings.alpha_at(settings.n), settings.beta)
    r = t.local_distribution(settings.n, settings.taps)
    shares = np.linspace(0, 1, POINTS + 1)
    yield _lines(
        "inequality-lambda",
        "Theorem 2: both sides of the inequality",
        f"The entropy of LRF-SSA, the paper's bound, and the entropy of SSA. The bound is below H(P) from "
        f"λ = {t.proof_threshold(p, r):.3f} on.",
        {"label": "λ", "log": False},
        {"label": "Entropy H (nats)", "log": False},
        [
            {"label": "H of LRF-SSA", "points": [[s, t.entropy_of(t.mixture(p, r, s))] for s in map(float, shares)]},
            {"label": "the paper's bound", "points": [[s, t.mixture_bound(p, r, s)] for s in map(float, shares)]},
            {"label": "H of SSA", "points": [[float(s), t.entropy_of(p)] for s in shares]},
        ],
    )


def _family(
    settings: TheorySettings,
    value: Callable[[t.Vector], float],
    xs: Sequence[Any] | np.ndarray,
    at: Callable[[Any], tuple[int, float, float]],
) -> list[dict[str, Any]]:
    """VSA, SSA and LRF-SSA over x, where `at(x)` is (n, beta, share)."""
    lines: dict[str, list[list[float]]] = {"VSA": [], "SSA": [], "LRF-SSA": []}
    for x in xs:
        n, beta, share = at(x)
        ssa = t.ssa_distribution(n, settings.alpha_at(n, beta), beta)
        local = t.local_distribution(n, [min(tap, n - 1) for tap in settings.taps])
        for name, p in (("VSA", t.vsa_distribution(n, beta)), ("SSA", ssa), ("LRF-SSA", t.mixture(ssa, local, share))):
            lines[name].append([float(x), value(p)])
    return [{"label": name, "points": points} for name, points in lines.items()]


def _lines(id_: str, title: str, caption: str, x: Chart, y: Chart, series: list[dict[str, Any]]) -> Chart:
    return {"id": id_, "kind": "lines", "title": title, "caption": caption, "x": x, "y": y, "series": series}


def _regions(settings: TheorySettings) -> Iterator[Chart]:
    n = settings.n
    betas, alphas = np.geomspace(1e-3, 1, CELLS), np.geomspace(0.1, 1000, CELLS)
    yield _map(
        "radius-order",
        "Theorem 1: where VSA is at least as local as SSA",
        f"The sign of μ(SSA) - μ(VSA) for N = {n}. {RADIUS_NOTE}",
        ("β", betas),
        ("α", alphas, True),
        ["μ(VSA) ≤ μ(SSA)", "μ(VSA) > μ(SSA)"],
        [[int(t.vsa_radius(n, b) > t.ssa_radius(n, a, b) + 1e-12) for b in betas] for a in alphas],
    )
    ratios, shares = np.geomspace(0.1 / n, 1, CELLS), np.linspace(0, 1, CELLS + 1)[1:]
    yield _map(
        "radius-between",
        "Theorem 1: where LRF-SSA is between VSA and SSA",
        f"The order of the three radii for N = {n}, α = {settings.alpha_text} and R of dilations "
        f"{', '.join(map(str, settings.dilations))}. {ORDER_NOTE}",
        ("β", betas),
        ("λ", shares, False),
        ["μ(VSA) ≤ μ(LRF-SSA) ≤ μ(SSA)", "LRF-SSA is more local than VSA", "LRF-SSA is less local than SSA"],
        [[_radius_order(settings, float(beta), float(share)) for beta in betas] for share in shares],
    )
    for id_, name, taps in (
        ("inequality-local", "R uniform on distances 0 and 1", [0, 1]),
        ("inequality-stencil", f"R of dilations {', '.join(map(str, settings.dilations))}", settings.taps),
    ):
        yield _map(
            id_,
            f"Theorem 2: where the last inequality holds, {name}",
            f"Whether H((1-λ)P + λR) ≤ H(P) for N = {n}, P the weights of SSA, and if the bound shows it. {REASON}",
            ("β/α", ratios),
            ("λ", shares, False),
            ["follows from the bound", "true, but not by the bound", "false"],
            _inequality_cells(n, ratios, shares, taps),
        )


def _radius_order(settings: TheorySettings, beta: float, share: float) -> int:
    n, alpha = settings.n, settings.alpha_at(settings.n, beta)
    mixed = t.lrf_radius(n, alpha, beta, settings.taps, share)
    if mixed > t.ssa_radius(n, alpha, beta) + 1e-12:
        return 2
    return int(mixed < t.vsa_radius(n, beta) - 1e-12)


def _inequality_cells(n: int, ratios: np.ndarray, shares: np.ndarray, taps: Sequence[int]) -> list[list[int]]:
    columns = []
    r = t.local_distribution(n, taps)
    for ratio in ratios:
        p = t.ssa_distribution(n, 1.0, float(ratio))
        proved, failing = t.proof_threshold(p, r), t.failing_share(p, r)
        columns.append([2 if share < failing else 0 if share >= proved else 1 for share in shares])
    return [list(row) for row in zip(*columns, strict=True)]


def _map(
    id_: str, title: str, caption: str, x: tuple[str, np.ndarray], y: tuple[str, np.ndarray, bool],
    classes: list[str], cells: list[list[int]],
) -> Chart:  # fmt: skip
    return {
        "id": id_,
        "kind": "regions",
        "title": title,
        "caption": caption,
        "x": {"label": x[0], "values": x[1].tolist(), "log": True},
        "y": {"label": y[0], "values": y[1].tolist(), "log": y[2]},
        "classes": classes,
        "cells": cells,
    }
