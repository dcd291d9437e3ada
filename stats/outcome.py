"""What a test returns, and the few conversions that every test shares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

Array = npt.NDArray[Any]

FIRST = 1e-10
"""A first-level p-value below this fails."""
POWER = 0.99
"""Power at which the smallest visible effect is quoted."""
LEAST = 50
"""Fewest expected counts in a cell of a chi-square."""


@dataclass(frozen=True)
class Outcome:
    """One statistic of one sample.

    Attributes:
        name: test id and what was looked at, as "T4 row mod 8".
        statistic: its value.
        pvalue: under the null, two-sided unless the test is a maximum; 0 or 1 where the test is exact.
        n: sample size in the statistic's own unit (elements, pairs, blocks, ...).
        effect: the smallest effect seen with power 0.99 at the gate.
        unit: of `effect`.
        trials: (successes, n, probability) of a binomial, for pooling over seeds.
        cells: (observed, probability) of a chi-square before merging, for pooling over seeds.
        upper: P(at least this) of a statistic with a direction, for Stouffer's sum over seeds.
        exact: no distribution: the p-value is 0 or 1.
    """

    name: str
    statistic: float
    pvalue: float
    n: int
    effect: float
    unit: str
    trials: tuple[int, int, float] | None = None
    cells: tuple[Array, Array] | None = None
    upper: float | None = None
    exact: bool = False


Outcomes = Iterator[Outcome]


def two_sided(lower: float, upper: float) -> float:
    """Twice the smaller tail, at most 1."""
    return float(min(1.0, 2 * min(lower, upper)))


def sidak(pvalue: float, count: float) -> float:
    """P-value of the smallest of `count` independent p-values."""
    return float(-np.expm1(count * np.log1p(-min(pvalue, 1 - 1e-16))))


def split_ties(law: Any, seen: Any, key: Any) -> tuple[Array, Array]:
    """(P(less), P(more)) of a discrete law, each with a random share of P(equal), so that both are uniform.

    Args:
        law: a frozen discrete scipy distribution.
        seen: the values seen.
        key: integers that seed the shares, other ones for each sample.
    """
    equal = law.pmf(seen)
    share = np.random.default_rng(key).random(np.shape(seen)) * equal
    return law.cdf(np.asarray(seen) - 1) + share, law.sf(seen) + equal - share


@cache
def normal_effect(count: float = 1) -> float:
    """Shift of a standard normal seen with power 0.99 as the largest of `count`."""
    return float(stats.norm.isf(FIRST / 2 / count) + stats.norm.isf(1 - POWER))


@cache
def chi2_effect(df: float) -> float:
    """Noncentrality of a chi-square with `df` degrees of freedom seen with power 0.99."""
    edge = stats.chi2.isf(FIRST / 2, df)
    if df > 1e4:  # the normal limit: scipy's ncx2 is slow and loses digits there
        return float(edge - df + stats.norm.isf(1 - POWER) * np.sqrt(2 * df + 4 * (edge - df)))
    return float(optimize.brentq(lambda shift: stats.ncx2.sf(edge, df, shift) - POWER, 1e-3, 50 * edge))


def binomial(name: str, successes: int, n: int, probability: float, unit: str = "rate") -> Outcome:
    """Exact two-sided binomial test of `successes` among `n`."""
    pvalue = stats.binomtest(int(successes), int(n), probability).pvalue
    effect = normal_effect() * np.sqrt(probability * (1 - probability) / n)
    trials = (int(successes), int(n), probability)
    return Outcome(name, successes / n, float(pvalue), int(n), float(effect), unit, trials)


def spread(name: str, counts: Array, size: float | Array, p: float) -> Outcome:
    """Dispersion of binomial counts with known p, two-sided.

    The sum of (k - size p)**2 / (size p q) is chi-square with one degree of freedom a count, up to the binomial's
    excess kurtosis (1 - 6pq) / (size p q), which is matched by scaling the degrees of freedom (Satterthwaite).

    Args:
        counts: integer counts of any shape.
        size: elements behind each count: a number, or an array of the counts' shape.
        p: probability of one element, exact.
    """
    size = np.broadcast_to(np.asarray(size, float), counts.shape)
    variance = size * p * (1 - p)
    value = float(((counts - size * p) ** 2 / variance).sum())
    df = counts.size
    scale = 1 + float(((1 - 6 * p * (1 - p)) / variance).mean()) / 2
    lower, upper = stats.chi2.cdf(value / scale, df / scale), stats.chi2.sf(value / scale, df / scale)
    n = int(size.sum())
    effect = np.sqrt(chi2_effect(float(df)) * p * (1 - p) / n)
    return Outcome(name, value, two_sided(lower, upper), n, float(effect), "rms rate", upper=float(upper))


def merge(observed: Array, probability: Array) -> tuple[Array, Array]:
    """Cells of a chi-square with those expecting fewer than 50 merged with their neighbours in expectation.

    Returns:
        (observed, expected) of the merged cells; their sums agree.
    """
    expected = probability * (observed.sum() / probability.sum())
    order = np.argsort(-expected, kind="stable")
    observed, expected = observed[order], expected[order]
    small = int(np.searchsorted(-expected, -LEAST, side="right"))
    # blocks of 2 * LEAST in cumulated expectation hold at least LEAST each, since no cell in them holds more
    bins = np.floor(np.cumsum(expected[small:]) / (2 * LEAST)).astype(np.int64)
    starts = np.r_[np.arange(small), small + np.flatnonzero(np.diff(bins, prepend=-1))]
    if len(starts) > 1 and expected[starts[-1] :].sum() < LEAST:
        starts = starts[:-1]
    return np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)


def chisquare(name: str, observed: Array, probability: Array) -> Outcome | None:
    """Two-sided chi-square of counts against cell probabilities; None when fewer than two cells are left.

    Both tails count: a generator that fills its cells too evenly is as wrong as one that does not.
    """
    merged, expected = merge(observed, probability)
    if len(merged) < 2:
        return None
    value, upper = stats.chisquare(merged, expected)
    df = len(merged) - 1
    n = int(observed.sum())
    effect = float(np.sqrt(chi2_effect(float(df)) / n))
    pvalue = two_sided(float(stats.chi2.cdf(value, df)), float(upper))
    return Outcome(name, float(value), pvalue, n, effect, "w", cells=(observed.astype(np.int64), probability))


def kolmogorov(name: str, values: Array, distribution: str) -> Outcome:
    """Kolmogorov-Smirnov test of continuous values against a standard scipy distribution."""
    result = stats.kstest(values, distribution)
    effect = np.sqrt(-np.log(FIRST / 2) / 2 / len(values)) + stats.norm.isf(1 - POWER) / 2 / np.sqrt(len(values))
    return Outcome(name, float(result.statistic), float(result.pvalue), len(values), float(effect), "D")


def exact(name: str, faults: int, n: int, unit: str = "mismatches") -> Outcome:
    """A check without a distribution: any fault fails."""
    return Outcome(name, float(faults), float(faults == 0), int(n), 1.0, unit, exact=True)
