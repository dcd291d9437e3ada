"""Pairs of columns, of rows, and of a mask with its own images: T11, T15, T20."""

from __future__ import annotations

import numpy as np
from scipy import stats

from stats import contract
from stats.outcome import Array, Outcome, Outcomes, binomial, normal_effect, sidak, split_ties, two_sided
from stats.sample import Sample

CANDIDATES = 256
WIDEST = 2048


def correlations(sample: Sample) -> Outcomes:
    """T11: Pearson's r of all pairs of columns and of rows: its maximum and its sum of squares.

    Given the margins the overlap of two columns is hypergeometric; that gives the exact tail of the largest pair at
    any p, where the normal tail is wrong at p = 0.01, and the exact variance of r**2.
    """
    yield from _all_pairs("column", sample.dropped[:, :WIDEST], sample.column_counts[:WIDEST])
    yield from _all_pairs("row", sample.dropped[:WIDEST].T, sample.row_counts[:WIDEST])


def _all_pairs(kind: str, table: Array, counts: Array) -> Outcomes:
    length = len(table)
    usable = (counts > 0) & (counts < length)
    table, counts = table[:, usable], counts[usable]
    overlap = table.T.astype(np.float32) @ table.astype(np.float32)
    first, second = np.triu_indices(len(counts), 1)
    size = counts.astype(float)
    spread = np.sqrt(size * (length - size))
    r = (length * overlap.astype(float) - np.outer(size, size)) / np.outer(spread, spread)
    z = (r * np.sqrt(length - 1))[first, second]
    pairs = z.size

    # the pair with the smallest exact tail is among the largest |z| or, all alike, those that overlap least; a random
    # share of the tie, drawn anew for each mask, makes p continuous
    ends = min(CANDIDATES, pairs // 2)
    least = np.maximum(0, counts[:, None] + counts - length)
    lowest = np.flatnonzero((overlap == least)[first, second])
    extreme = np.unique(np.r_[np.argpartition(z, (ends - 1, -ends))[np.r_[:ends, -ends:0]], lowest])
    i, j = first[extreme], second[extreme]
    seen = overlap[i, j].astype(np.int64)
    lower, upper = split_ties(stats.hypergeom(length, counts[i], counts[j]), seen, counts)
    smallest = 2 * float(np.minimum(lower, upper).min())
    largest = float(z[extreme][np.abs(z[extreme]).argmax()])
    yield Outcome(
        f"T11 largest {kind} pair", largest, sidak(smallest, pairs), pairs,
        normal_effect(pairs) / np.sqrt(length), "correlation",
    )  # fmt: skip

    # var(z**2) = 2 + excess kurtosis; the kurtosis is smooth in the margins, so at the mean margin
    kurtosis = float(stats.hypergeom.stats(length, round(size.mean()), round(size.mean()), moments="k"))
    total = float((z**2).sum())
    score = (total - pairs) / np.sqrt(pairs * (2 + kurtosis))
    upper_tail = float(stats.norm.sf(score))
    effect = np.sqrt(normal_effect() * np.sqrt(2 + kurtosis) / np.sqrt(pairs) / length)
    yield Outcome(
        f"T11 sum over {kind} pairs", total, two_sided(float(stats.norm.cdf(score)), upper_tail), pairs,
        float(effect), "rms correlation", upper=upper_tail,
    )  # fmt: skip


def symmetries(sample: Sample) -> Outcomes:
    """T15: agreement of the mask with its images under the symmetries of the rectangle.

    Flips and the half turn act on the whole mask, the others on its leading square. An image's pairs are taken so that
    no two share an element: one of each two for an involution, every other one of each four for a quarter turn.
    """
    dropped = sample.dropped
    rows, columns = dropped.shape
    side = min(rows, columns) // 2 * 2
    square = dropped[:side, :side]
    half = side // 2
    above, below = np.triu_indices(side, 1)
    top = dropped[: rows // 2]
    quarter = np.rot90(square)
    corners = [np.s_[:half, :half], np.s_[half:, half:]], [np.s_[:half, half:], np.s_[half:, :half]]
    images = (
        ("transpose", square[above, below], square[below, above]),
        ("other transpose", square[:, ::-1][above, below], square[:, ::-1][below, above]),
        ("up-down flip", top, dropped[::-1][: rows // 2]),
        ("left-right flip", dropped[:, : columns // 2], dropped[:, ::-1][:, : columns // 2]),
        ("half turn", top, dropped[::-1, ::-1][: rows // 2]),
        *(
            (
                name,
                np.concatenate([square[at].ravel() for at in pair]),
                np.concatenate([quarter[at].ravel() for at in pair]),
            )
            for name, pair in zip(("quarter turn", "three-quarter turn"), corners, strict=True)
        ),
    )
    agree = sample.p**2 + sample.q**2
    for name, own, image in images:
        yield binomial(f"T15 {name}", int((own == image).sum()), own.size, agree, "agreement")


def shared_words(sample: Sample) -> Outcomes:
    """T20: rows 2j and 2j + 1 share a word: how often both are dropped, against the exact value from T.

    A mask that does not follow the contract is held to independence instead.
    """
    rows = sample.shape[0] // 2 * 2
    both = int((sample.dropped[:rows:2] & sample.dropped[1:rows:2]).sum())
    expected = contract.shared_word(sample.p)[0] if sample.contract else sample.p**2
    yield binomial("T20 shared word", both, rows // 2 * sample.shape[1], expected, "both dropped")
