"""The deep count: 2**40 draws and more, counted where they are drawn; nothing leaves the device but counts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import xfused
from stats import contract
from stats.assess import Record
from stats.outcome import Array, binomial, spread
from stats.sources import signed
from stats.table import Test
from xfused import _triton
from xfused.philox import draw_words, drop

if _triton.HAS_TRITON:
    import triton
    import triton.language as tl

    jit = triton.jit
else:  # the torch path counts then
    tl, jit = _triton.tl, _triton.jit

COLUMNS = 1 << 14
STREAMS = 16
"""(seed, offset) pairs that share the draws."""
KINDS = 15
"""Counts for each column: drops in rows 0 to 7 of a group, then both of rows k and k + 1 for k = 0 to 6."""
BLOCK = 128
LOOP = 1 << 10

COUNT = Test("T1", "rate, counted on the device", "L2", "deep", print)
SHARED = Test("T20", "rows that share a word, counted on the device", "L2", "deep", print)
SPREAD = Test("T4", "rate by row and column, counted on the device", "L2", "deep", print)


@jit
def count_kernel(
    counts_ptr,
    key: "i64",  # type: ignore[name-defined]  # noqa: F821
    offset: "i64",  # type: ignore[name-defined]  # noqa: F821
    last_dropped: "u32",  # type: ignore[name-defined]  # noqa: F821
    columns: "i32",  # type: ignore[name-defined]  # noqa: F821
    LOOP: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the KINDS counts of BLOCK columns over LOOP row groups to counts (KINDS, columns), int64.

    The words and the comparison are the package's own: they are what is under test.
    """
    blocks = columns // BLOCK
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    first = (tl.program_id(0) // blocks) * LOOP
    ones = tl.full((BLOCK,), 1.0, tl.float32)
    zero = tl.zeros((BLOCK,), tl.int32)
    totals = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    for step in range(LOOP):
        group = (first + step + tl.zeros((BLOCK,), tl.int32)).to(tl.uint32)
        words = draw_words(group, cols.to(tl.uint32), key, offset, PTX)
        dropped = ()
        for k in tl.static_range(8):
            one = (drop(ones, words, k, last_dropped, PTX) == 0.0).to(tl.int32)
            dropped = dropped + (one,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no unpacking)
        sums = ()
        for k in tl.static_range(8):
            sums = sums + (totals[k] + dropped[k],)  # type: ignore[assignment]  # noqa: RUF005
        for k in tl.static_range(7):
            sums = sums + (totals[8 + k] + (dropped[k] & dropped[k + 1]),)  # type: ignore[assignment]  # noqa: RUF005
        totals = sums  # type: ignore[assignment]
    for k in tl.static_range(15):
        tl.atomic_add(counts_ptr + k * columns + cols, totals[k].to(tl.int64))


def count_triton(seed: int, offset: int, groups: int, columns: int, p: float, device: str) -> Array:
    """The counts by the kernel: int64 array (KINDS, columns). Fast where 1024 divides groups."""
    if columns % BLOCK:
        raise ValueError(f"columns must be a multiple of {BLOCK}, got {columns}")
    counts = torch.zeros((KINDS, columns), dtype=torch.int64, device=device)
    loop = math.gcd(groups, LOOP)
    grid = (columns // BLOCK * (groups // loop),)
    ptx = _triton.has_ptx(counts.device)
    count_kernel[grid](
        counts, signed(seed), signed(offset), contract.threshold(p) - 1, columns, loop, ptx, BLOCK, num_warps=4
    )
    return counts.cpu().numpy()


def count_torch(seed: int, offset: int, groups: int, columns: int, p: float, device: str) -> Array:
    """The same counts from `xfused.dropout_mask` in pieces of 2**24 elements, with torch's sums."""
    counts = torch.zeros((KINDS, columns), dtype=torch.int64, device=device)
    words = torch.tensor([signed(seed), signed(offset)])
    step = max(1, (1 << 24) // (8 * columns))
    for start in range(0, groups, step):
        rows = 8 * min(step, groups - start)
        keep = xfused.dropout_mask((rows, columns), p, words, origin=(8 * start, 0), device=device)
        dropped = (~keep).view(-1, 8, columns)
        counts[:8] += dropped.sum(0)
        counts[8:] += (dropped[:, :-1] & dropped[:, 1:]).sum(0)
    return counts.cpu().numpy()


@dataclass(frozen=True)
class Counted:
    """The counts of one p, summed over the streams: int64 array (KINDS, columns), and the groups behind each."""

    p: float
    groups: int
    counts: Array

    @property
    def draws(self) -> int:
        return 8 * self.groups * self.counts.shape[1]


def count(
    p: float, draws: int, device: str, base: int = 0, progress: Callable[[int, int, str], None] | None = None
) -> Counted:
    """Count at least `draws` draws at p over STREAMS pairs of seed and offset.

    Raises:
        ValueError: if draws is not positive.
    """
    if draws < 1:
        raise ValueError(f"draws must be positive, got {draws}")
    columns = COLUMNS if draws >= 1 << 30 else BLOCK
    groups = -(-draws // (8 * columns * STREAMS))
    if groups > LOOP:
        groups = -(-groups // LOOP) * LOOP
    kernel = _triton.runs_kernels(torch.device(device))
    counts = np.zeros((KINDS, columns), np.int64)
    rng = np.random.default_rng([base, contract.threshold(p)])
    # a launch holds fewer groups than a signed 32-bit word counts
    if groups >= 2**31 - LOOP:
        raise ValueError(f"draws must be below {8 * columns * STREAMS * (2**31 - LOOP)}, got {draws}")
    for stream in range(STREAMS):
        seed, offset = (int(word) for word in rng.integers(2**64, size=2, dtype=np.uint64))
        counts += (count_triton if kernel else count_torch)(seed, offset, groups, columns, p, device)
        if progress is not None:
            progress(stream + 1, STREAMS, f"counting, p = {p:g}")
    return Counted(p, groups * STREAMS, counts)


def records(found: Counted) -> dict[Any, Record]:
    """The counts as outcomes for the verdict: rate, dispersion by row residue and column, pairs of rows."""
    p = contract.threshold(found.p) / 2**32
    columns = found.counts.shape[1]
    drops, both = found.counts[:8], found.counts[8:]
    pairs = found.groups * columns
    outcomes = [
        (COUNT, binomial("deep rate", int(drops.sum()), found.draws, p)),
        (SPREAD, spread("deep row mod 8", drops.sum(1), pairs, p)),
        (SPREAD, spread("deep columns", drops.sum(0), 8 * found.groups, p)),
        (SPREAD, spread("deep row mod 8 by column", drops, found.groups, p)),
    ]
    shared, apart = int(both[::2].sum()), int(both[1::2].sum())
    expected = contract.shared_word(found.p)[0]
    outcomes.append((SHARED, binomial("deep shared word", shared, 4 * pairs, expected, "both dropped")))
    outcomes.append((SHARED, binomial("deep words side by side", apart, 3 * pairs, p * p, "both dropped")))
    return {(outcome.name, found.p): Record(test, found.p, [outcome]) for test, outcome in outcomes}


def correlation(found: Counted) -> tuple[float, float, float]:
    """(measured, its standard error, exact) correlation of the two rows that share a word."""
    p = contract.threshold(found.p) / 2**32
    pairs = 4 * found.groups * found.counts.shape[1]
    # given the rate, which is exact: the measured rate would add its own noise
    measured = (int(found.counts[8::2].sum()) / pairs - p * p) / (p * (1 - p))
    error = np.sqrt(p * p * (1 - p * p) / pairs) / (p * (1 - p))
    return float(measured), float(error), contract.shared_word(found.p)[1]
