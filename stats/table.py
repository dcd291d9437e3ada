"""THE table of tests: one entry a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stats import cells, exact, pairs, relations, repeats, waves, words

INNER = (0.05, 0.95)
"""Independence tests are used between these p: nearer to 0 or 1 their null distributions fail on short masks."""


@dataclass(frozen=True)
class Test:
    """One test.

    Attributes:
        id: its number in the specification.
        property: what it looks at, in words.
        layer: "L0" exact oracle, "L1" structure, "L2" statistics.
        scope: what the function takes: "exact" (run, index), "mask" (sample), "pool" (run, p, index), "words" (run,
            index).
        function: yields outcomes.
        anywhere: used at every p, not only between those of INNER.
        only: the one p it is used for.
        share: of a words test, one repetition for so many seeds of the level.
    """

    id: str
    property: str
    layer: str
    scope: str
    function: Callable[..., Any]
    anywhere: bool = False
    only: float | None = None
    share: int = 1

    def used(self, p: float) -> bool:
        """Whether the test is used at p."""
        if self.only is not None:
            return p == self.only
        return self.anywhere or INNER[0] <= p <= INNER[1]


TESTS = (
    Test("L0", "exact oracle", "L0", "exact", exact.oracle),
    Test("T1", "rate", "L2", "mask", cells.rate, anywhere=True),
    Test("T2", "dispersion of column counts", "L2", "mask", cells.column_dispersion, anywhere=True),
    Test("T3", "dispersion of row counts", "L2", "mask", cells.row_dispersion, anywhere=True),
    Test("T4", "rate by residue and tile position", "L2", "mask", cells.residues, anywhere=True),
    Test("T5", "autocorrelation at every lag", "L2", "mask", waves.every_lag),
    Test("T6", "near lags", "L2", "mask", waves.near_lags),
    Test("T7", "spectrum", "L2", "mask", waves.spectrum),
    Test("T8", "tuples", "L2", "mask", cells.tuples, anywhere=True),
    Test("T9", "ones per block", "L2", "mask", cells.blocks),
    Test("T10", "runs and gaps", "L2", "mask", cells.runs),
    Test("T11", "pairs of columns and rows", "L2", "mask", pairs.correlations),
    Test("T12", "rank over GF(2)", "L2", "mask", cells.binary_rank, only=0.5),
    Test("T13", "duplicate columns", "L1", "pool", repeats.columns, anywhere=True),
    Test("T13", "duplicate rows and blocks", "L1", "pool", repeats.rows, anywhere=True),
    Test("T14", "repeated windows", "L1", "pool", repeats.windows),
    Test("T15", "symmetries", "L1", "mask", pairs.symmetries),
    Test("T16", "seeds, calls, layers, ranks", "L2", "pool", relations.relations),
    Test("T17", "raw halves", "L2", "words", words.halves, share=4),
    Test("T18", "birthday spacings", "L2", "words", words.birthdays),
    Test("T19", "avalanche", "L2", "words", words.avalanche, share=64),
    Test("T20", "rows that share a word", "L2", "mask", pairs.shared_words),
)

IDS = tuple(dict.fromkeys(test.id for test in TESTS))


def chosen(ids: Any = None) -> tuple[Test, ...]:
    """The tests of these ids, all for None.

    Raises:
        ValueError: for an unknown id.
    """
    if ids is None:
        return TESTS
    unknown = sorted(set(ids) - set(IDS))
    if unknown:
        raise ValueError(f"tests must be among {', '.join(IDS)}, got {', '.join(unknown)}")
    return tuple(test for test in TESTS if test.id in set(ids))
