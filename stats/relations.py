"""Masks that must not know of each other: T16."""

from __future__ import annotations

import numpy as np
from scipy import fft

from stats.outcome import Outcomes, binomial
from stats.run import Run
from stats.sample import Sample
from stats.waves import peak

NEAR = (("next seed", 1, 0), ("seed bit 0", None, 0), ("next call", 0, 1), ("third call", 0, 2), ("fifth call", 0, 4))
SEED_BITS = (1, 2, 7, 8, 15, 16, 31, 32, 33, 47, 48, 62)
OFFSET_BITS = (3, 8, 16, 31, 32, 33, 48, 62)


def others(seed: int, wide: bool, thin: int) -> list[tuple[str, int, int]]:
    """(name, seed, offset) of the masks compared with that of (seed, 0).

    A layer or a later step is another call of the seed, a rank another seed. High offsets only where the source can
    jump to them.
    """
    near = [(name, seed ^ 1 if step is None else seed + step, offset) for name, step, offset in NEAR]
    bits = [(f"seed bit {bit}", seed ^ 1 << bit, 0) for bit in SEED_BITS if wide or bit < 31]
    if wide:
        bits += [(f"offset bit {bit}", seed, 1 << bit) for bit in OFFSET_BITS]
    return near + bits[::thin]


def relations(run: Run, p: float, index: int) -> Outcomes:
    """T16: agreement and the whole two-dimensional cross-correlation of related masks.

    The cross-correlation sees a mask that is the other one shifted, which agreement cannot.
    """
    seed = run.seed("T16", p, index) | 1  # odd, so that the next seed is not the one with bit 0 flipped
    rows, columns = min(run.level.rows, 1024), run.level.columns
    base = Sample(run.draw(seed, 0, rows, columns, p), p)
    n = base.dropped.size
    for name, other_seed, offset in others(seed, run.source.block is not None, run.level.thin):
        other = Sample(run.draw(other_seed, offset, rows, columns, p), p)
        same = int((base.dropped == other.dropped).sum())
        yield binomial(f"T16 {name}: agreement", same, n, base.p**2 + base.q**2, "agreement")
        cross = fft.irfft2(base.spectrum * other.spectrum.conj(), s=base.shape) / np.float32(np.sqrt(n))
        yield peak(f"T16 {name}: cross-correlation", cross, n, n)
