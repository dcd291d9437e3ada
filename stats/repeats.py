"""What must never repeat: T13 (columns, rows, blocks of rows) and T14 (windows), exactly."""

from __future__ import annotations

import numpy as np

from stats.outcome import Array, Outcomes, exact
from stats.run import Run

CHANCE = 1e-12
"""Chance that any two of all compared pieces agree by accident."""
_MOST = 1 << 27


def needed_length(pairs: float, p: float) -> int:
    """Elements that two pieces must share before agreement counts: `pairs` chances to agree stay under 1e-12."""
    return int(np.ceil(np.log(pairs / CHANCE) / -np.log(p * p + (1 - p) ** 2)))


def mix(words: Array) -> Array:
    """A bijection of uint64 that spreads each bit: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):  # numpy warns of wrapping where the array is a scalar
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def digests(pieces: Array) -> Array:
    """128-bit hashes of bit strings: bool (n, length) -> uint64 (n, 2)."""
    packed = np.packbits(pieces, axis=1)
    packed = np.ascontiguousarray(np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))).view(np.uint64)
    keys = np.random.default_rng(packed.shape[1]).integers(2**64, size=(2, packed.shape[1]), dtype=np.uint64)
    return np.stack([mix(packed ^ key).sum(1, dtype=np.uint64) for key in keys], 1)


def duplicates(hashes: Array) -> int:
    """How many of the hashes, uint64 (n, 2), stand there already."""
    first = np.sort(hashes[:, 0])
    if not (first[1:] == first[:-1]).any():
        return 0
    ordered = hashes[np.argsort(hashes[:, 0], kind="stable")]
    return int((ordered[1:] == ordered[:-1]).all(1).sum())


def columns(run: Run, p: float, index: int) -> Outcomes:
    """T13, columns: their leading elements, pooled over seeds and calls, as many columns as the level says."""
    wide = run.level.columns
    length = needed_length(run.level.pool**2 / 2, p)
    pool = max(2 * wide, min(run.level.pool, _MOST // length) // wide * wide)
    found = []
    for seed, offset in run.calls("T13", p, pool // wide):
        found.append(digests(~run.draw(seed, offset, length, wide, p).T))
    yield exact("T13 duplicate columns", duplicates(np.concatenate(found)), pool, "duplicates")


def rows(run: Run, p: float, index: int) -> Outcomes:
    """T13, rows: of all masks of this p; rows too short to tell apart are joined to the next ones."""
    masks = run.masks(p)
    wide = masks[0].shape[1]
    for name, least in (("rows", 1), ("8-row blocks", 8)):
        count = sum(len(keep) for keep in masks) / least
        joined = max(least, -(-needed_length(count**2 / 2, p) // wide))
        found = [digests(~keep[: len(keep) // joined * joined].reshape(-1, joined * wide)) for keep in masks]
        hashes = np.concatenate(found)
        yield exact(f"T13 duplicate {name}", duplicates(hashes), len(hashes), "duplicates")


def windows(run: Run, p: float, index: int) -> Outcomes:
    """T14: windows down the columns and along the rows, over calls of one seed and of the next."""
    seed = run.seed("T14", p, index)
    side = min(run.level.columns, 1024)
    calls = ((seed, 0), (seed, 1), (seed, 4), (seed ^ 1, 0))
    masks = [~run.draw(*call, side, run.level.columns, p)[:, :side] for call in calls]
    length = needed_length((len(calls) * side * side) ** 2 / 2, p)
    if length > side:
        return
    for name, turned in (("down columns", [mask.T for mask in masks]), ("along rows", masks)):
        hashes = np.concatenate([window_hashes(mask, length).reshape(-1, 2) for mask in turned])
        yield exact(f"T14 repeated windows {name}", duplicates(hashes), len(hashes), "duplicates")


def window_hashes(lines: Array, length: int) -> Array:
    """128-bit hashes of every window of `length` along each line: bool (n, m) -> uint64 (n, m - length + 1, 2).

    Windows double: 64 bits as they are, then hashes of two halves, and the last two halves overlap.
    """
    codes, size = np.ascontiguousarray(lines).astype(np.uint64), 1
    while size < 64 and 2 * size <= length:
        codes = codes[:, :-size] | codes[:, size:] << np.uint64(size)
        size *= 2
    lanes = [codes, mix(codes)]
    while size < length:
        step = min(size, length - size)
        left, right = ([lane[:, part] for lane in lanes] for part in (np.s_[:-step], np.s_[step:]))
        # one lane takes the halves in turn and the other crosswise, so that no two windows meet in both
        lanes = [
            mix(left[0] + mix(right[1] ^ np.uint64(size))),
            mix(left[1] ^ mix(right[0] + np.uint64(step))) + right[1],
        ]
        size += step
    return np.stack(lanes, -1)
