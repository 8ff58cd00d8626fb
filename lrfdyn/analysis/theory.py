"""Theorems 1 and 2 of the paper, computed exactly, by the sums that define a quantity and by their closed forms.

Attention of one query is a distribution over distances 0..N-1 (the paper leaves out how many tokens lie at a distance):
VSA exp(-beta D), SSA (alpha - beta D)_+, LRF-SSA (1 - lambda) SSA + lambda R with local weights R.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lrfdyn.errors import require

Vector = NDArray[np.float64]
SMALL = 1e-4  # a fall of the weights over all tokens that is computed as a series
# B_{2k+2} / ((2k+2)(2k+1)(2k)) for k = 1, 2, ...: Bernoulli's numbers -1/30, 1/42, -1/30, 5/66
_TAIL = (-1 / 720, 1 / 5040, -1 / 10080, 1 / 9504)


def _check(n: int, alpha: float = 1.0, beta: float = 0.0) -> None:
    require(n >= 1, f"n: expected an integer >= 1, got {n}")
    require(alpha > 0, f"alpha: expected a positive number, got {alpha}")
    require(beta >= 0, f"beta: expected a number >= 0, got {beta}")


def vsa_distribution(n: int, beta: float) -> Vector:
    """VSA: the softmax of a similarity that falls linearly with distance, `[n]`."""
    _check(n, beta=beta)
    weights = np.exp(-beta * np.arange(n))
    return weights / weights.sum()


def ssa_distribution(n: int, alpha: float, beta: float) -> Vector:
    """SSA: the similarity itself, cut off at zero and normalised, `[n]`."""
    _check(n, alpha, beta)
    weights = np.maximum(alpha - beta * np.arange(n), 0)
    return weights / weights.sum()


def local_distribution(n: int, distances: Sequence[int]) -> Vector:
    """R: the same weight at each of the given distances, those that appear twice twice."""
    require(len(distances) > 0, "distances: expected at least one")
    require(min(distances) >= 0 and max(distances) < n, f"distances: expected 0..{n - 1}, got {list(distances)}")
    return np.bincount(np.asarray(distances), minlength=n) / len(distances)


def stencil_distances(dilations: Sequence[int]) -> list[int]:
    """Distances of the taps -d, 0, d of every dilation along a line."""
    return [distance for d in dilations for distance in (d, 0, d)]


def mixture(p: Vector, r: Vector, share: float) -> Vector:
    """LRF-SSA: (1 - share) p + share r."""
    require(0 <= share <= 1, f"share: expected a number in [0, 1], got {share}")
    return (1 - share) * p + share * r


def radius(p: Vector) -> float:
    """The expected radius sum_D D p(D)."""
    return float(np.arange(len(p)) @ p)


def vsa_radius(n: int, beta: float) -> float:
    """r / (1 - r) - N r^N / (1 - r^N) with r = exp(-beta); (N - 1) / 2 for beta = 0."""
    _check(n, beta=beta)
    if beta * n < SMALL:  # the two terms below nearly cancel: their series around 0
        return (n - 1) / 2 - beta * (n * n - 1) / 12
    return 1 / math.expm1(beta) - (n / math.expm1(beta * n) if beta * n < 700 else 0.0)


def ssa_support(n: int, alpha: float, beta: float) -> int:
    """Distances with positive weight: all N of them only for beta < alpha / (N - 1)."""
    _check(n, alpha, beta)
    return n if beta == 0 else min(n, math.ceil(alpha / beta))


def ssa_radius(n: int, alpha: float, beta: float) -> float:
    """The paper's formula (N - 1)(3 alpha - beta (2N - 1)) / (3 (2 alpha - beta (N - 1))) with `ssa_support` for N."""
    m = ssa_support(n, alpha, beta)
    return (m - 1) * (3 * alpha - beta * (2 * m - 1)) / (3 * (2 * alpha - beta * (m - 1)))


def lrf_radius(n: int, alpha: float, beta: float, distances: Sequence[int], share: float) -> float:
    """The radius of LRF-SSA, (1 - lambda) mu_ssa + lambda mu_r."""
    return (1 - share) * ssa_radius(n, alpha, beta) + share * radius(local_distribution(n, distances))


def entropy_of(p: Vector) -> float:
    """The entropy -sum p log p in nats."""
    positive = p[p > 0]
    return float(-(positive @ np.log(positive)))


def vsa_entropy(n: int, beta: float) -> float:
    """log (1 - r^N)/(1 - r) + beta mu_vsa, which is the paper's closed form: -log p(D) is linear in D."""
    _check(n, beta=beta)
    if beta == 0:
        return math.log(n)
    return math.log(-math.expm1(-beta * n)) - math.log(-math.expm1(-beta)) + beta * vsa_radius(n, beta)


def ssa_entropy(n: int, alpha: float, beta: float) -> float:
    """log S - (1/S) sum w log w, the sum through the derivative of Hurwitz' zeta function:
    sum_{i < M} (x + i) log(x + i) = zeta'(-1, x + M) - zeta'(-1, x)."""
    m = ssa_support(n, alpha, beta)
    if beta * n < SMALL * alpha:
        return _flat_entropy(n, -beta / alpha)
    total = alpha * m - beta * m * (m - 1) / 2
    least = alpha / beta - (m - 1)  # the smallest weight in units of beta
    start, count = (least, m) if least > 0 else (1.0, m - 1)
    logs = _zeta_derivative(start + count) - _zeta_derivative(start)
    return math.log(total) - (beta * logs + math.log(beta) * total) / total


def _flat_entropy(n: int, step: float) -> float:
    """Of the weights 1 + step i, i < N, for small |step| N: the series of (1 + x) log(1 + x), sums of powers of i."""
    first, second = n * (n - 1) / 2, (n - 1) * n * (2 * n - 1) / 6
    third, fourth = first * first, second * (3 * n * n - 3 * n - 1) / 5
    total = n + step * first
    logs = step * first + step**2 * second / 2 - step**3 * third / 6 + step**4 * fourth / 12
    return math.log(total) - logs / total


def _zeta_derivative(x: float) -> float:
    """zeta'(-1, x) up to a constant, by its asymptotic series from 20 on."""
    value = 0.0
    while x < 20:
        value -= x * math.log(x)
        x += 1
    series = sum(c * x ** (-2 * (k + 1)) for k, c in enumerate(_TAIL))
    return value + (x * x - x + 1 / 6) / 2 * math.log(x) - x * x / 4 - series


def binary_entropy(share: float) -> float:
    """The entropy h(lambda) of two outcomes in nats."""
    return sum(-s * math.log(s) for s in (share, 1 - share) if s > 0)


def mixture_bound(p: Vector, r: Vector, share: float) -> float:
    """The paper's bound h(lambda) + (1 - lambda) H(P) + lambda H(R), never below the entropy of the mixture."""
    return binary_entropy(share) + (1 - share) * entropy_of(p) + share * entropy_of(r)


def cross_entropy(r: Vector, p: Vector) -> float:
    """The cross entropy -sum R log P; infinite where R has weight and P has none."""
    where = r > 0
    return math.inf if np.any(p[where] <= 0) else float(-(r[where] @ np.log(p[where])))


def proof_threshold(p: Vector, r: Vector) -> float:
    """The smallest lambda > 0 with the paper's bound below H(P); 1 or more where it never gets there."""
    gap = entropy_of(p) - entropy_of(r)  # h(lambda) / lambda, which falls from infinity to 0, is this there
    return math.inf if gap <= 0 else _crossing(lambda share: binary_entropy(share) > gap * share)


def _crossing(above: Callable[[float], bool]) -> float:
    """Up to which number in [0, 1] `above` holds, where it holds from 0 to there."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) else (low, middle)
    return high


def order_always_holds(p: Vector, r: Vector) -> bool:
    """Whether H((1 - lambda) P + lambda R) <= H(P) for every lambda in [0, 1]."""
    # Entropy is concave in lambda, and its slope at 0 is this difference.
    return cross_entropy(r, p) <= entropy_of(p) + 1e-12


def failing_share(p: Vector, r: Vector) -> float:
    """The lambda up to which the mixture has more entropy than P: 0 where it never has, infinite where R has too."""
    if order_always_holds(p, r):
        return 0.0
    target = entropy_of(p)  # above P right of 0, below it at 1, and concave: one crossing
    return math.inf if entropy_of(r) > target else _crossing(lambda x: entropy_of(mixture(p, r, x)) > target)
