"""Rates and counts of cells in one mask: T1 to T4, T8 to T10, T12."""

from __future__ import annotations

import numpy as np
from scipy import stats

from stats.outcome import Array, Outcome, Outcomes, binomial, chisquare, spread
from stats.sample import Sample

TUPLES = ((8, 1), (1, 8), (2, 4), (4, 2), (3, 3), (4, 4))
BLOCKS = ((32, 1), (1, 32), (8, 8), (64, 1))
TILE = (16, 64)
_LONGEST = 1 << 12


def rate(sample: Sample) -> Outcomes:
    """T1: the number of dropped elements is binomial."""
    yield binomial("T1 rate", int(sample.row_counts.sum()), sample.dropped.size, sample.p)


def column_dispersion(sample: Sample) -> Outcomes:
    """T2: dispersion of the columns' counts."""
    yield spread("T2 column counts", sample.column_counts, sample.shape[0], sample.p)


def row_dispersion(sample: Sample) -> Outcomes:
    """T3: dispersion of the rows' counts."""
    yield spread("T3 row counts", sample.row_counts, sample.shape[1], sample.p)


def residues(sample: Sample) -> Outcomes:
    """T4: rate by row mod 2, 8, 32, 256, by column mod 8, 32, by position in a tile."""
    rows, columns = sample.shape
    for axis, counts, length, width in (
        ("row", sample.row_counts, rows, columns),
        ("column", sample.column_counts, columns, rows),
    ):
        for modulus in (2, 8, 32, 256) if axis == "row" else (8, 32):
            if 2 * modulus <= length:
                classes = np.arange(length) % modulus
                size = np.bincount(classes) * width
                yield spread(f"T4 {axis} mod {modulus}", np.bincount(classes, counts), size, sample.p)
    high, wide = TILE
    if rows >= 4 * high and columns >= 4 * wide:
        tiles = sample.dropped[: rows // high * high, : columns // wide * wide]
        counts = tiles.reshape(rows // high, high, columns // wide, wide).sum((0, 2), dtype=np.int64)
        yield spread("T4 position in tile", counts, tiles.size // counts.size, sample.p)


def tuples(sample: Sample) -> Outcomes:
    """T8: patterns of small blocks, a cell a pattern."""
    rows, columns = sample.shape
    for high, wide in TUPLES:
        size = high * wide
        tall, broad = rows // high, columns // wide
        codes = np.zeros((tall, broad), np.uint16)
        for place in range(size):
            row, column = divmod(place, wide)
            codes |= sample.dropped[row::high, column::wide][:tall, :broad].astype(np.uint16) << np.uint16(place)
        ones = np.unpackbits(np.arange(2**size, dtype=np.uint32).view(np.uint8)).reshape(-1, 32).sum(1, dtype=float)
        probability = sample.p**ones * sample.q ** (size - ones)
        outcome = chisquare(f"T8 tuples {high}x{wide}", np.bincount(codes.ravel(), minlength=2**size), probability)
        if outcome:
            yield outcome


def blocks(sample: Sample) -> Outcomes:
    """T9: drops per block are binomial."""
    rows, columns = sample.shape
    for high, wide in BLOCKS:
        tall, broad = rows // high, columns // wide
        part = sample.dropped[: tall * high, : broad * wide].reshape(tall, high, broad, wide)
        counts = np.bincount(part.sum((1, 3), dtype=np.uint8).ravel(), minlength=high * wide + 1)
        probability = stats.binom.pmf(np.arange(high * wide + 1), high * wide, sample.p)
        outcome = chisquare(f"T9 ones per {high}x{wide}", counts, probability)
        if outcome:
            yield outcome


def runs(sample: Sample) -> Outcomes:
    """T10: runs of dropped elements and gaps between them are geometric.

    Along rows, along columns, and down the rows of one residue mod 8.
    """
    rows, columns = sample.shape
    whole = sample.dropped[: rows // 8 * 8]
    for direction, sequence in (
        ("along rows", sample.dropped.ravel()),
        ("along columns", sample.dropped.T.ravel()),
        ("along rows of one residue", whole.reshape(-1, 8, columns).transpose(1, 2, 0).ravel()),
    ):
        places = np.flatnonzero(sequence)
        gaps = np.diff(places)
        # a run ends where the next gap is not 1
        ends = np.flatnonzero(gaps != 1)
        for kind, lengths, probability in (("gaps", gaps, sample.p), ("runs", np.diff(ends), sample.q)):
            outcome = geometric(f"T10 {kind} {direction}", lengths, probability)
            if outcome:
                yield outcome


def geometric(name: str, lengths: Array, probability: float) -> Outcome | None:
    """Chi-square of lengths 1, 2, ... against the geometric distribution, the tail in one cell."""
    counts = np.bincount(np.minimum(lengths, _LONGEST), minlength=_LONGEST + 1)[1:]
    cells = stats.geom.pmf(np.arange(1, _LONGEST + 1), probability)
    cells[-1] = stats.geom.sf(_LONGEST - 1, probability)
    return chisquare(name, counts, cells)


def rank_probabilities(size: int) -> Array:
    """P(rank = size, size - 1, less) of a random size x size matrix over GF(2).

    By the number of matrices of rank r, prod_{i < r} (2**size - 2**i)**2 / (2**r - 2**i) (Lidl and Niederreiter,
    Finite Fields).
    """
    chance = []
    for rank in (size, size - 1):
        place = np.arange(rank, dtype=float)
        logs = 2 * np.log(2.0**size - 2.0**place) - np.log(2.0**rank - 2.0**place)
        chance.append(np.exp(logs.sum() - size * size * np.log(2)))
    return np.array([*chance, 1 - sum(chance)])


def ranks(matrices: Array) -> Array:
    """Ranks over GF(2) of square matrices whose rows are packed in unsigned integers: (n, size) -> (n,)."""
    matrices = matrices.copy()
    count, size = matrices.shape
    rank = np.zeros(count, np.int64)
    every = np.arange(count)
    places = np.arange(size)
    for bit in range(size):
        column = (matrices >> matrices.dtype.type(bit)) & matrices.dtype.type(1)
        usable = (column == 1) & (places >= rank[:, None])
        pivot = usable.argmax(1)
        found = usable[every, pivot]
        chosen, at, top = every[found], pivot[found], rank[found]
        row = matrices[chosen, at].copy()
        matrices[chosen, at] = matrices[chosen, top]
        matrices[chosen, top] = row
        clear = (column[chosen] == 1) & (places > top[:, None])
        # the swapped row kept the bit of the row that was on top
        clear[np.arange(len(chosen)), at] &= column[chosen, top] == 1
        matrices[chosen] ^= np.where(clear, row[:, None], matrices.dtype.type(0))
        rank += found
    return rank


def binary_rank(sample: Sample) -> Outcomes:
    """T12: ranks over GF(2) of square pieces, at p = 0.5 alone."""
    rows, columns = sample.shape
    for size, kind in ((32, np.uint32), (64, np.uint64)):
        part = sample.dropped[: rows // size * size, : columns // size * size]
        packed = np.packbits(part, axis=1, bitorder="little").view(kind)
        matrices = packed.reshape(-1, size, columns // size).transpose(0, 2, 1).reshape(-1, size)
        lost = np.minimum(size - ranks(matrices), 2)
        outcome = chisquare(f"T12 rank {size}x{size}", np.bincount(lost, minlength=3), rank_probabilities(size))
        if outcome:
            yield outcome
