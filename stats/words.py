"""Raw words behind the masks: T17 to T19, for sources that show them."""

from __future__ import annotations

import numpy as np
from scipy import stats

from stats.outcome import Array, Outcome, Outcomes, chisquare, kolmogorov, normal_effect, split_ties, spread, two_sided
from stats.run import Run
from stats.waves import peak, squares

HALVES = 4096
"""Rows of draws for the halves: with 1024 columns, 64 draws a cell."""
BIRTHDAYS = 4096
REPEATS = 16
FLIPS = 1 << 14
SEED_BITS, OFFSET_BITS, INDEX_BITS = 64, 64, 32


def halves(run: Run, index: int) -> Outcomes:
    """T17: leading halves of the draws: their cells, their bits, neighbours, and the draws' distribution.

    The leading halves of a word's two rows are its two halves, so each fresh bit counts once.
    """
    draws = run.bits(run.seed("T17", 0.5, index), 0, HALVES, run.level.columns)
    half = (draws >> np.uint32(16)).astype(np.uint16)
    even = np.full(2**16, 2.0**-16)
    found = [chisquare("T17 halves", np.bincount(half.ravel(), minlength=2**16), even)]
    ones = np.array([int(((half >> np.uint16(bit)) & np.uint16(1)).sum()) for bit in range(16)])
    found.append(spread("T17 bits", ones, half.size, 0.5))
    byte = half >> np.uint16(8)
    for name, first, second in (
        ("along rows", byte[:, ::2], byte[:, 1::2]),
        ("down columns", byte[::2], byte[1::2]),
    ):
        pair = (first[:, : second.shape[1]] << np.uint16(8)) | second
        found.append(chisquare(f"T17 adjacent pairs {name}", np.bincount(pair.ravel(), minlength=2**16), even))
    uniform = (draws.ravel()[:: max(1, draws.size // 100_000)] + 0.5) / 2**32
    found.append(kolmogorov("T17 distribution", uniform, "uniform"))
    yield from (outcome for outcome in found if outcome)


def birthdays(run: Run, index: int) -> Outcomes:
    """T18: equal spacings of 4096 sorted words, summed over 16 repeats: Poisson of mean n**3 / (4 * 2**32) each.

    16 repeats keep the approximation's error below the sum's spread: repeats * n**3 <= 2**(32 * 5/4) (L'Ecuyer and
    Simard, On the performance of birthday spacings tests with certain families of random number generators, 2001).
    """
    words = run.bits(run.seed("T18", 0.5, index), 0, 2 * BIRTHDAYS, REPEATS)[1::2].T
    spacings = np.sort(np.diff(np.sort(words.astype(np.int64), axis=1), axis=1), axis=1)
    equal = int((np.diff(spacings, axis=1) == 0).sum())
    mean = REPEATS * BIRTHDAYS**3 / 2**34
    lower, upper = split_ties(stats.poisson(mean), equal, words[:2, :4].ravel())
    pvalue = two_sided(float(lower), float(upper))
    effect = normal_effect() / np.sqrt(mean)
    yield Outcome("T18 birthday spacings", equal, pvalue, words.size, float(effect), "relative excess")


def avalanche(run: Run, index: int) -> Outcomes:
    """T19: flip each key, offset, row group and column bit: every output bit must flip half the time."""
    z = flip_scores(run, index)
    yield peak("T19 largest flip", z, z.size, FLIPS)
    yield squares("T19 sum of flips", z, FLIPS)


def flip_scores(run: Run, index: int) -> Array:
    """Scores of T19: float array (192 input bits, 128 output bits), standard normal each.

    Counters are small numbers, as in use, and keys any: a weakness near the origin is the one that matters.
    """
    rng = np.random.default_rng(run.seed("T19", 0.5, index))
    inputs = {
        "seed": rng.integers(2**64, size=FLIPS, dtype=np.uint64),
        "offset": rng.integers(2**20, size=FLIPS, dtype=np.uint64),
        "group": rng.integers(2**10, size=FLIPS, dtype=np.uint64),
        "column": rng.integers(2**12, size=FLIPS, dtype=np.uint64),
    }
    base = run.block(**inputs)
    scores = []
    for name, bits in (("seed", SEED_BITS), ("offset", OFFSET_BITS), ("group", INDEX_BITS), ("column", INDEX_BITS)):
        for bit in range(bits):
            flipped = run.block(**{**inputs, name: inputs[name] ^ np.uint64(1 << bit)}) ^ base
            scores.append(np.unpackbits(flipped.view(np.uint8), axis=1).sum(0, dtype=np.int64))
    return (np.array(scores) - FLIPS / 2) / np.sqrt(FLIPS / 4)
