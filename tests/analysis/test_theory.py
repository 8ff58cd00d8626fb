"""Theorems 1 and 2: closed forms against sums, and where the inequalities hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrfdyn.analysis import theory as t
from lrfdyn.analysis.theory_report import TheorySettings, checks, theory_results
from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError

tokens = st.integers(1, 300)
betas = st.floats(1e-4, 3)
shares = st.floats(0.001, 0.999)


@settings(deadline=None, max_examples=60)
@given(tokens, betas, st.floats(0.05, 50))
def test_closed_forms_equal_their_sums(n, beta, alpha):
    vsa, ssa = t.vsa_distribution(n, beta), t.ssa_distribution(n, alpha, beta)
    assert t.vsa_radius(n, beta) == pytest.approx(t.radius(vsa), abs=1e-8)
    assert t.vsa_entropy(n, beta) == pytest.approx(t.entropy_of(vsa), abs=1e-9)
    assert t.ssa_radius(n, alpha, beta) == pytest.approx(t.radius(ssa), abs=1e-8)
    assert t.ssa_entropy(n, alpha, beta) == pytest.approx(t.entropy_of(ssa), abs=1e-7)


@pytest.mark.parametrize("fall", [1e-13, 1e-9, 0.9e-4, 1.1e-4, 1e-3])
@pytest.mark.parametrize("n", [1, 2, 64, 2000])
def test_closed_forms_keep_their_digits_where_attention_is_nearly_flat(n, fall):
    """`fall` is that of the weights over all tokens."""
    beta = fall / n
    assert t.vsa_radius(n, beta) == pytest.approx(t.radius(t.vsa_distribution(n, beta)), rel=1e-9)
    assert t.vsa_entropy(n, beta) == pytest.approx(t.entropy_of(t.vsa_distribution(n, beta)), abs=1e-11)
    for alpha in (1.0, 5000.0):
        ssa = t.entropy_of(t.ssa_distribution(n, alpha, beta * alpha))
        assert t.ssa_entropy(n, alpha, beta * alpha) == pytest.approx(ssa, abs=1e-10)


@pytest.mark.parametrize("fall", [-0.01, 0.01])
def test_series_of_nearly_flat_weights_to_the_fourth_term(fall):
    """Far beyond where it is used, so that every term is seen."""
    weights = 1 + fall / 64 * np.arange(64)
    assert t._flat_entropy(64, fall / 64) == pytest.approx(t.entropy_of(weights / weights.sum()), abs=5e-12)


def test_the_papers_formulas():
    n, alpha, beta = 50, 2.0, 0.01
    r = math.exp(-beta)
    paper = (n - 1) * (3 * alpha - beta * (2 * n - 1)) / (3 * (2 * alpha - beta * (n - 1)))
    assert t.ssa_radius(n, alpha, beta) == pytest.approx(paper, rel=1e-14)
    entropy = math.log((1 - r**n) / (1 - r)) - r / (1 - r) * (1 - n * r ** (n - 1) + (n - 1) * r**n) / (
        1 - r**n
    ) * math.log(r)
    assert t.vsa_entropy(n, beta) == pytest.approx(entropy, rel=1e-12)
    # N to infinity: r / (1 - r) and -log(1 - r) - r / (1 - r) log r
    r = math.exp(-0.5)
    assert t.vsa_radius(100_000, 0.5) == pytest.approx(r / (1 - r), rel=1e-12)
    assert t.vsa_entropy(100_000, 0.5) == pytest.approx(-math.log(1 - r) + r / (1 - r) * 0.5, rel=1e-12)


def test_uniform_and_triangular_ends():
    assert t.ssa_entropy(64, 1.0, 0.0) == pytest.approx(math.log(64))
    assert t.ssa_radius(64, 1.0, 0.0) == pytest.approx(63 / 2)
    assert t.vsa_radius(64, 0.0) == 63 / 2
    assert t.vsa_entropy(64, 0.0) == math.log(64)
    n = 200_000
    triangle = 0.5 - math.log(2)  # the entropy of the density 2 (1 - x) on [0, 1]
    assert t.ssa_entropy(n, 1.0, 1 / (n - 1)) - math.log(n) == pytest.approx(triangle, abs=1e-4)


def test_radius_of_ssa_stops_growing_for_fixed_weights():
    alpha, beta = 1.0, 0.01
    assert t.ssa_radius(10_000, alpha, beta) == t.ssa_radius(100, alpha, beta) == pytest.approx(33, abs=0.5)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 200), betas)
def test_order_of_theorem_1(n, beta):
    sure = 1 + beta * (n - 1)
    assert t.vsa_radius(n, beta) <= t.ssa_radius(n, sure, beta) + 1e-9
    assert t.vsa_radius(n, beta) >= t.ssa_radius(n, 1.0, beta) - 1e-9  # reversed


@settings(deadline=None, max_examples=60)
@given(st.integers(8, 100), betas, shares, st.sampled_from([[0], [0, 1], [0, 0, 3, 3, 5, 5], [7]]))
def test_mixture(n, beta, share, distances):
    p, r = t.ssa_distribution(n, 1.0, beta), t.local_distribution(n, distances)
    mix = t.mixture(p, r, share)
    assert t.radius(mix) == pytest.approx(t.lrf_radius(n, 1.0, beta, distances, share), abs=1e-9)
    assert t.entropy_of(mix) <= t.mixture_bound(p, r, share) + 1e-12
    # The bound is below H(P) exactly from the threshold on, and the order fails exactly below `failing_share`.
    threshold, failing = t.proof_threshold(p, r), t.failing_share(p, r)
    if abs(t.mixture_bound(p, r, share) - t.entropy_of(p)) > 1e-9:
        assert (t.mixture_bound(p, r, share) <= t.entropy_of(p)) == (share >= threshold)
    if abs(t.entropy_of(mix) - t.entropy_of(p)) > 1e-9:
        assert (t.entropy_of(mix) <= t.entropy_of(p)) == (share >= failing)


def test_last_inequality_is_false_for_a_dilated_stencil_on_a_sharp_distribution():
    p = t.ssa_distribution(64, 1.0, 0.5)  # two distances with weight
    r = t.local_distribution(64, t.stencil_distances((3, 5)))
    assert t.entropy_of(t.mixture(p, r, 0.2)) > t.entropy_of(p)
    assert t.cross_entropy(r, p) == math.inf
    assert not t.order_always_holds(p, r)
    flat = t.ssa_distribution(64, 1.0, 1 / 63)
    assert t.order_always_holds(flat, r)
    assert 0 < t.proof_threshold(flat, r) < 0.2


def test_failing_share_against_a_grid():
    """Of random distributions over three distances, and of mixtures close to P, where the order fails for a moment."""
    generator = np.random.default_rng(0)
    grid = np.linspace(0, 1, 1001)
    seen = set()
    for trial in range(60):
        p, other = generator.dirichlet([1.0] * 3, 2)
        r = other if trial % 2 else 0.9 * p + 0.1 * other
        mixed = np.array([t.entropy_of(t.mixture(p, r, share)) for share in grid])
        above = grid[1:][mixed[1:] > t.entropy_of(p)]
        failing = t.failing_share(p, r)
        seen.add("never" if failing == 0 else "always" if failing == math.inf else "up to a share")
        if failing == math.inf:
            assert len(above) == 1000
        else:
            assert (above.max() if len(above) else 0.0) == pytest.approx(failing, abs=2e-3)
    assert len(seen) == 3


def test_failing_share_where_both_have_the_same_entropy():
    p = np.array([0.5, 0.25, 0.25])
    assert t.failing_share(p, p) == 0
    # The same numbers in other places: more entropy up to R itself, which has as much as P.
    assert t.entropy_of(p[[1, 0, 2]]) == t.entropy_of(p)
    assert t.failing_share(p, p[[1, 0, 2]]) == pytest.approx(1)
    assert t.failing_share(p, np.full(3, 1 / 3)) == math.inf
    # An even P has the most entropy there is, and R inside it can only take some away.
    assert t.failing_share(np.full(3, 1 / 3), p) == 0
    # The crossing by hand: h(lambda) of two places that were one.
    assert t.failing_share(np.array([0.9, 0.1]), np.array([0.0, 1.0])) == pytest.approx(8 / 9)


def test_results():
    results = theory_results(TheorySettings(n=32))
    assert max(row["difference"] for row in results["checks"]) < 1e-10
    charts = {chart["id"]: chart for chart in results["charts"]}
    assert {"radius-tokens", "radius-beta", "radius-lambda", "entropy-tokens", "entropy-beta", "entropy-lambda"} <= set(
        charts
    )
    stencil = np.array(charts["inequality-stencil"]["cells"])
    local = charts["inequality-local"]
    r = t.local_distribution(32, [0, 1])
    for column, ratio in enumerate(local["x"]["values"]):
        failing = t.failing_share(t.ssa_distribution(32, 1.0, ratio), r)
        assert [row[column] == 2 for row in local["cells"]] == [share < failing for share in local["y"]["values"]]
    assert set(np.unique(stencil)) == {0, 1, 2}
    assert stencil[0, 0] == 1  # a small share of R on a flat P: true, not proved
    assert results["notes"][0].count(". ") + 1 == 2  # sentences


def test_lrf_ssa_is_between_vsa_and_ssa_up_to_a_share():
    settings = TheorySettings(n=64)
    chart = next(c for c in theory_results(settings)["charts"] if c["id"] == "radius-between")
    betas, shares, cells = chart["x"]["values"], np.array(chart["y"]["values"]), np.array(chart["cells"])
    local = t.radius(t.local_distribution(64, settings.taps))
    for column, beta in enumerate(betas):
        ssa, vsa = t.ssa_radius(64, 1 + 63 * beta, beta), t.vsa_radius(64, beta)
        limit = (ssa - vsa) / (ssa - local) if local < vsa else math.inf
        expected = np.where(local > ssa, 2, np.where(shares <= limit, 0, 1))
        assert cells[:, column].tolist() == expected.tolist()
    assert {0, 1} <= set(cells.flatten())
    # With R far out, LRF-SSA is less local than SSA.
    wide = theory_results(TheorySettings(n=64, dilations=(60,), alpha=1.0))
    cells = np.array(next(c for c in wide["charts"] if c["id"] == "radius-between")["cells"])
    assert 2 in cells


def test_command(tmp_path, capsys):
    assert main(["theory", "--out", str(tmp_path), "--tokens", "16", "--figures", "none"]) == 0
    assert "H of SSA" in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "tables" / "inequality_stencil.csv").read_text().startswith("β/α,λ,region")
    assert main(["theory", "--out", str(tmp_path), "--beta", "0"]) == 2
    assert "beta: expected a positive number" in capsys.readouterr().err
    assert main(["theory", "--out", str(tmp_path), "--tokens", "1000000000"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "n (tokens): expected an integer in 8..65536" in line


def test_bad_input():
    for n, alpha, beta, message in (
        (0, 1.0, 0.1, "n: expected an integer >= 1, got 0"),
        (4, 0.0, 0.1, "alpha: expected a positive number, got 0"),
        (4, 1.0, -0.1, "beta: expected a number >= 0, got -0.1"),
    ):
        with pytest.raises(LrfdynError, match=message):
            t.ssa_distribution(n, alpha, beta)
    with pytest.raises(LrfdynError, match=r"distances: expected 0\.\.7"):
        t.local_distribution(8, [9])
    with pytest.raises(LrfdynError, match="share: expected a number"):
        t.mixture(t.vsa_distribution(4, 0.1), t.vsa_distribution(4, 0.1), 2)
    with pytest.raises(LrfdynError, match="dilations"):
        TheorySettings(n=8, dilations=(9,))
    for name in ("alpha", "beta"):
        with pytest.raises(LrfdynError, match=f"{name}: expected a finite number.*, got inf"):
            TheorySettings(**{name: math.inf})
    assert len(checks(TheorySettings())) == 5
