"""Correlation at every lag and the spectrum of one mask: T5 to T7."""

from __future__ import annotations

import numpy as np
from scipy import stats

from stats.outcome import Outcome, Outcomes, chi2_effect, kolmogorov, normal_effect, sidak, two_sided
from stats.sample import Sample

NEAR = 64
ORDINATES = 100_000


def peak(name: str, values: np.ndarray, count: int, n: int) -> Outcome:
    """The largest of `count` standard normal values, both signs, by Sidak; n is the sample behind each value."""
    largest = float(np.abs(values).max())
    pvalue = sidak(2 * float(stats.norm.sf(largest)), count)
    return Outcome(name, largest, pvalue, n, normal_effect(count) / np.sqrt(n), "correlation")


def squares(name: str, values: np.ndarray, n: int) -> Outcome:
    """The sum of squares of independent standard normal values, two-sided; n is the sample behind each value."""
    value, df = float((values.astype(float) ** 2).sum()), values.size
    upper = float(stats.chi2.sf(value, df))
    effect = np.sqrt(chi2_effect(float(df)) / df / n)
    pvalue = two_sided(float(stats.chi2.cdf(value, df)), upper)
    return Outcome(name, value, pvalue, n, float(effect), "rms correlation", upper=upper)


def every_lag(sample: Sample) -> Outcomes:
    """T5: the largest autocorrelation over all two-dimensional lags."""
    n = sample.dropped.size
    outcome = peak("T5 largest autocorrelation", sample.autocorrelation, n // 2, n)
    yield outcome


def near_lags(sample: Sample) -> Outcomes:
    """T6: the sum of squares over the lags up to 64 both ways, each once."""
    lags = sample.autocorrelation
    first = lags[0, 1 : NEAR + 1]
    right, left = lags[1 : NEAR + 1, : NEAR + 1], lags[1 : NEAR + 1, -NEAR:]
    yield squares("T6 near autocorrelation", np.concatenate([part.ravel() for part in (first, right, left)]), lags.size)


def spectrum(sample: Sample) -> Outcomes:
    """T7: Fisher's g over the spectrum's ordinates, and their distribution.

    An ordinate over the sum of m of them is Beta(1, m - 1); g, the largest, follows by Sidak (Fisher, Tests of
    significance in harmonic analysis, 1929: the first term of his series is the same to order 1 / m).
    """
    n = sample.dropped.size
    # columns 0 and the last hold every ordinate twice
    ordinates = sample.power[:, 1 : (sample.shape[1] - 1) // 2 + 1].ravel()
    total = float(ordinates.sum(dtype=float))
    largest = float(ordinates.max()) / total
    pvalue = sidak(float(stats.beta.sf(largest, 1, ordinates.size - 1)), ordinates.size)
    effect = stats.expon.isf(1e-10 / ordinates.size) / n
    yield Outcome("T7 spectral peak", largest, pvalue, ordinates.size, float(effect), "power share")
    # a sixteenth at most, since the mean that scales them is known only from all
    step = max(16, -(-ordinates.size // ORDINATES))
    yield kolmogorov("T7 flatness", ordinates[::step] * (ordinates.size / total), "expon")
