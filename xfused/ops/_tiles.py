"""Which tile a launcher takes: a closed form of shape, dtype, alignment and the number of multiprocessors.

Fitted to sweeps on an H200, which benchmarks/README.md sums up: `python -m benchmarks sweep`.
"""

import functools
import operator
from typing import NamedTuple

import torch

from .._triton import has_ptx
from ._launch import cdiv, multiprocessors

UNALIGNED = 4  # columns that a thread holds at most where memory is not read in vectors: more cost registers only


class Tiles(NamedTuple):
    """BLOCK_G, BLOCK_N, warps of a program, tiles that it walks, registers that a thread may have."""

    block_g: int
    block_n: int
    warps: int
    each: int
    registers: int


def alignment(most: int, *elements: int) -> int:
    """The largest power of two, up to `most`, that divides all of `elements`."""
    together = functools.reduce(operator.or_, elements, most)
    return together & -together


def tile(n: int, columns: int, block_n: int, threads: int) -> tuple[int, int]:
    """(BLOCK_G, BLOCK_N) where each thread holds so many neighbouring columns of one row group."""
    block_n = min(block_n, 1 << (n - 1).bit_length())
    return max(1, threads * columns // block_n), block_n


def lanes(device: torch.device) -> int:
    """Threads of a warp; AMD's data-centre GPUs have 64."""
    return 32 if has_ptx(device) else 64


def vector(n: int, groups: int, itemsize: int, device: torch.device) -> int:
    """Neighbouring columns for a thread: 16 bytes, or less where so few threads would not hide latency."""
    columns = 16 // itemsize
    warps = n * groups // (32 * multiprocessors(device))  # a multiprocessor, of single columns
    if warps < 64 * columns:
        columns //= 2
        if warps < 4 * columns:
            columns //= 2
    return columns


def registers(warps: int) -> int:
    """For a thread where so many warps shall fit a multiprocessor's 65,536, which are handed out by eights."""
    return 65536 // (32 * warps) // 8 * 8


def row_tiles(n: int, groups: int, itemsize: int, align: int, device: torch.device) -> Tiles:
    """For a kernel that maps rows to rows, in `groups` row groups of n columns; `align` divides each row's beginning.

    Programs of one warp wait for nobody. Four tiles pay for what a thread sets up; with more, the programs that run
    together drift apart, and with them the rows of memory that they read.
    """
    columns = vector(n, groups, itemsize, device)
    resident = 14 if columns * itemsize == 16 else 16  # warps of a multiprocessor
    columns = min(columns, max(align, UNALIGNED))
    block_g, block_n = tile(n, columns, lanes(device) * columns, lanes(device))
    tiles = cdiv(groups, block_g) * cdiv(n, block_n)
    each = min(4, cdiv(tiles, resident * multiprocessors(device)))
    return Tiles(block_g, block_n, 1, each, registers(resident))


def column_sum_tiles(n: int, groups: int, itemsize: int, align: int, device: torch.device) -> Tiles:
    """For a kernel that also adds up columns.

    Each program costs a partial sum, so as many run as fit at once, unless there are so many tiles that several rounds
    of short programs, which even out their own differences, pay for it.
    """
    columns = vector(n, groups, itemsize, device)
    wide = columns * itemsize == 16
    resident = 12 if wide else 16
    columns = min(columns, max(align, UNALIGNED))
    threads = resident * 32 * multiprocessors(device)
    block_g, block_n = (4 if wide else 2), 128
    splits = min(cdiv(groups, block_g), threads * columns // (block_g * block_n * cdiv(n, block_n)))
    if not wide and splits >= 64:  # of narrow tensors: four warps share a partial sum
        block_g, block_n = 2 * columns, 64
    warps = max(1, block_g * block_n // (columns * lanes(device)))
    block_g, block_n = tile(n, columns, block_n, warps * lanes(device))
    tiles, blocks_n, programs = cdiv(groups, block_g), cdiv(n, block_n), threads // (32 * warps)
    several_rounds = tiles * blocks_n >= 20 * programs
    each = 7 if several_rounds else cdiv(tiles, max(1, programs // blocks_n))
    return Tiles(block_g, block_n, warps, each, registers(resident))
