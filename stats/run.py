"""One run: a source, a level, and the seeds that belong to them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from stats import contract
from stats.outcome import Array
from stats.sources import Source, SourceError


@dataclass(frozen=True)
class Level:
    """Sizes of a run.

    Attributes:
        seeds: masks a p, each of (rows, columns).
        pool: columns pooled in T13.
        thin: T16 flips one of so many single bits of seed and offset.
    """

    name: str
    seeds: int
    rows: int
    columns: int
    pool: int
    thin: int = 1


LEVELS = {
    level.name: level
    for level in (
        Level("quick", 8, 1024, 1024, 1 << 14, 4),
        Level("standard", 32, 2048, 1024, 1 << 18),
        Level("deep", 64, 2048, 1024, 1 << 18),
    )
}


class Run:
    """Draws what the tests ask for, checked; every seed follows from `base`, so that an outcome is fixed."""

    def __init__(self, source: Source, level: Level, base: int = 0) -> None:
        self.source = source
        self.level = level
        self.base = base
        self._masks: tuple[float, list[Array]] = (-1.0, [])

    def seed(self, label: str, p: float, index: int) -> int:
        """A seed of its own for each use: 62 bits where the source can jump, else 31."""
        key = (self.base, zlib.crc32(label.encode()), contract.threshold(p), index)
        wide = self.source.block is not None
        return int(np.random.default_rng(key).integers(2**62 if wide else 2**31))

    def calls(self, label: str, p: float, count: int) -> list[tuple[int, int]]:
        """`count` pairs (seed, offset): four calls of each seed."""
        return [(self.seed(label, p, index // 4), index % 4) for index in range(count)]

    def draw(self, seed: int, offset: int, rows: int, columns: int, p: float) -> Array:
        return self.source.draw("masker", seed, offset, rows, columns, p)

    def bits(self, seed: int, offset: int, rows: int, columns: int) -> Array:
        return self.source.words("bits", seed, offset, rows, columns)

    def block(self, seed: Any, offset: Any, group: Any, column: Any) -> Array:
        return self.source.words("block", seed, offset, group, column)

    def main(self, p: float, index: int) -> Array:
        """The mask of seed `index` on which the tests of one mask run."""
        keep = self.draw(self.seed("mask", p, index), 0, self.level.rows, self.level.columns, p)
        self._varied(keep, p)
        if self._masks[0] != p:
            self._masks = (p, [])
        if index == len(self._masks[1]):
            self._masks[1].append(np.packbits(keep, axis=1))
        return keep

    def masks(self, p: float) -> list[Array]:
        """The main masks drawn at p so far, the first one at least."""
        if self._masks[0] != p:
            self.main(p, 0)
        return [np.unpackbits(keep, axis=1, count=self.level.columns).view(bool) for keep in self._masks[1]]

    def check(self, p: float) -> None:
        """One mask: drawn twice alike, and neither all kept nor all dropped.

        Raises:
            SourceError: if it is not.
        """
        if self.source.p is not None and abs(self.source.p - p) > 1e-12:
            raise SourceError(f"p must be {self.source.p}, which {self.source.name} drops at, got {p}")
        arguments = (self.seed("mask", p, 0), 0, self.level.rows, self.level.columns, p)
        keep = self.draw(*arguments)
        self._varied(keep, p)
        if not np.array_equal(keep, self.draw(*arguments)):
            raise SourceError(f"{self.source.name} is not reproducible: one seed and offset gave two masks")

    def _varied(self, keep: Array, p: float) -> None:
        kept = int(keep.sum())
        if kept in (0, keep.size) and keep.size * min(p, 1 - p) > 50:
            what = "keeps" if kept else "drops"
            hint = " (is it in training mode?)" if kept else ""
            raise SourceError(f"{self.source.name} is constant: it {what} every element at p = {p:g}{hint}")
