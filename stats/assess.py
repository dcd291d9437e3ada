"""Run the table of tests on a source and judge it."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stats.judge import SECOND_LEAST, Row, Verdicts, judge, rows_of
from stats.outcome import Array, Outcome
from stats.pictures import Gallery
from stats.run import LEVELS, Level, Run
from stats.sample import Sample
from stats.sources import as_source
from stats.table import Test, chosen

INDEPENDENCE_PS = (0.1, 0.25, 0.5, 0.75, 0.9)
ALL_PS = (0.01, *INDEPENDENCE_PS, 0.99)

NARROWEST = 256
"""Fewest columns: the near lags reach 64 to either side."""

Progress = Callable[[int, int, str], None]


@dataclass
class Record:
    """What a subtest gave at one p: outcomes in order of the seeds, and its chi-square cells summed over them."""

    test: Test
    p: float | None
    outcomes: list[Outcome] = field(default_factory=list)
    cells: tuple[Array, Array] | None = None

    def add(self, outcome: Outcome) -> None:
        if outcome.cells is not None:
            observed, probability = outcome.cells
            self.cells = (observed if self.cells is None else self.cells[0] + observed, probability)
            outcome = replace(outcome, cells=None)
        self.outcomes.append(outcome)


Records = dict[tuple[str, float | None], Record]


@dataclass
class Assessment:
    """The result of `assess`.

    Attributes:
        verdict: "pass", "suspicious" or "fail".
        failures: names of the tests that failed.
        table: every value judged: statistic, p-value, sample size, smallest visible effect, status; worst first.
        source, level, ps, seeds, base: what was run.
        bound: upper bound of the probability that a perfect generator fails this run.
        cauchy: the Cauchy combination of all first-level values, a diagnosis that does not gate.
        pvalues: every first-level p-value by subtest and p, before anything was combined.
        interrupted: True if the run was stopped; the table holds what was done.
        gallery: images for the report, if asked for.
    """

    source: str
    level: str
    ps: tuple[float, ...]
    seeds: int
    base: int
    verdict: str
    failures: list[str]
    table: list[Row]
    bound: float
    cauchy: float
    seconds: float
    pvalues: dict[tuple[str, float | None], list[float]]
    interrupted: bool = False
    gallery: Gallery | None = None

    def __str__(self) -> str:
        from stats.report import text

        return text(self)


def assess(
    source: Any,
    p: float | Iterable[float] | None = None,
    seeds: int | None = None,
    level: str = "quick",
    *,
    tests: Iterable[str] | None = None,
    base: int = 0,
    device: str = "cpu",
    jobs: int | None = None,
    pictures: bool = False,
    counted: Records | None = None,
    keep_interrupted: bool = False,
    progress: Progress | None = None,
) -> Assessment:
    """Test a generator of dropout masks.

    Args:
        source: a function source(seed, offset, rows, columns, p) -> bool array (numpy or torch, True = kept) with the
            optional attributes of `stats.Source`, or a torch.nn.Module or function of a tensor, whose mask is read off
            ones, seeded with torch.manual_seed.
        p: drop probability or several of them, inside (0, 1); by default the module's own `p`, else 0.1.
        seeds: masks for each p; by default the level's own number (8, 32, 64).
        level: "quick", "standard" or "deep" (the sizes of the masks and pools; the count of 2**40 draws on a GPU is
            `python -m stats deep`).
        tests: ids of the tests to run, all by default.
        base: every seed of the run follows from it.
        device: where a module's ones lie.
        jobs: threads, by default one a core up to 8.
        pictures: collect images for the report.
        counted: outcomes of the deep count, to be judged along.
        keep_interrupted: on Ctrl-C return what is done instead of raising.
        progress: called with (done, total, what).

    Raises:
        ValueError: p outside (0, 1), an unknown level or test, no seeds.
        TypeError: a source that is neither function nor module; p or seeds that are no numbers.
        SourceError: a source that raises, returns the wrong shape or dtype, is constant or not reproducible.
    """
    source = as_source(source, device)
    if p is None:
        p = 0.1 if source.p is None else source.p
    ps = tuple(p) if isinstance(p, Iterable) and not isinstance(p, str) else (p,)
    sizes = checked(ps, seeds, level, source.columns)
    picked = chosen(tests)
    run = Run(source, sizes, base)
    start = time.perf_counter()
    for one in ps:
        run.check(one)
    gallery = Gallery() if pictures else None
    work = Work(run, picked, ps, jobs or min(8, os.cpu_count() or 1), gallery, progress)
    work.records.update(counted or {})
    interrupted = False
    try:
        work.measure()
    except KeyboardInterrupt:
        if not keep_interrupted:
            raise
        interrupted = True

    def again(row: Row) -> list[Row]:
        bigger = replace(sizes, seeds=4 * sizes.seeds, pool=4 * sizes.pool)
        same = tuple(test for test in picked if test.id == row.test)
        repeat = Work(Run(source, bigger, base + 2**32), same, ps if row.p is None else (row.p,), work.jobs)
        repeat.measure(4)
        return rows_of(repeat.records)

    verdicts: Verdicts = judge(rows_of(work.records), None if interrupted else again)
    return Assessment(
        source.name, sizes.name, ps, sizes.seeds, base, verdicts.verdict, verdicts.failures, verdicts.rows,
        verdicts.bound, verdicts.cauchy, time.perf_counter() - start,
        {key: [o.pvalue for o in record.outcomes if not o.exact] for key, record in work.records.items()},
        interrupted, gallery,
    )  # fmt: skip


def checked(ps: Sequence[float], seeds: int | None, level: str, columns: int | None = None) -> Level:
    """The level with this number of seeds, and this width of the masks.

    Raises:
        ValueError, TypeError: naming the argument that is wrong.
    """
    if not ps:
        raise ValueError("p must hold at least one value")
    for p in ps:
        if isinstance(p, bool) or not isinstance(p, float | int | np.floating):
            raise TypeError(f"p must be a number, got {p!r}")
        if not 0 < p < 1 or round(p * 2**32) in (0, 2**32):
            raise ValueError(f"p must be between 0 and 1, exclusive, got {p}")
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    sizes = LEVELS[level]
    if columns is not None:
        if columns < NARROWEST:
            raise ValueError(f"columns of the source must be at least {NARROWEST}, got {columns}")
        sizes = replace(sizes, columns=columns)
    if seeds is None:
        return sizes
    if isinstance(seeds, bool) or not isinstance(seeds, int | np.integer):
        raise TypeError(f"seeds must be an int, got {type(seeds).__name__}")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    return replace(sizes, seeds=int(seeds))


class Work:
    """Runs tests at several p and gathers what they give."""

    def __init__(
        self,
        run: Run,
        tests: Sequence[Test],
        ps: Sequence[float],
        jobs: int,
        gallery: Gallery | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.run, self.tests, self.ps, self.jobs = run, tests, ps, jobs
        self.gallery, self.progress = gallery, progress
        self.records: Records = {}
        self.done = 0

    def measure(self, repetitions: int = 1) -> None:
        """Run everything; `repetitions` of the pool tests, which draw masks of their own."""
        by = defaultdict(list)
        for test in self.tests:
            if test.scope != "words" or (self.run.source.bits if test.id != "T19" else self.run.source.block):
                by[test.scope].append(test)
        plan = [(test, 0) for test in by["exact"]]
        plan += [(test, index) for test in by["words"] for index in range(-(-self.run.level.seeds // test.share))]
        pools = [(p, test) for p in self.ps for test in by["pool"] if test.used(p)]
        masks = any(test.function.__name__ == "rows" for test in by["pool"]) or by["mask"]
        total = len(plan) + len(pools) * repetitions + (len(self.ps) * self.run.level.seeds if masks else 0)
        self._total = total
        for test, index in plan:
            self._add(test, None, test.function(self.run, index))
            self._tick(test.property)
        for p in self.ps:
            if masks:
                self._masks(p, by["mask"])
            for test in by["pool"]:
                if test.used(p):
                    for index in range(repetitions):
                        self._add(test, p, test.function(self.run, p, index))
                        self._tick(f"{test.property}, p = {p:g}")

    def _masks(self, p: float, tests: Sequence[Test]) -> None:
        tests = [test for test in tests if test.used(p)]

        def of_mask(keep: Array) -> tuple[list[tuple[Test, list[Outcome]]], Sample]:
            sample = Sample(keep, p, self.run.source.contract)
            return [(test, list(test.function(sample))) for test in tests], sample

        def collect() -> None:
            found, sample = pending.popleft().result()
            for test, outcomes in found:
                self._add(test, p, outcomes)
            if self.gallery is not None:
                self.gallery.add(sample, p)
            self._tick(f"masks, p = {p:g}")

        pending: deque[Any] = deque()
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for index in range(self.run.level.seeds):
                    pending.append(pool.submit(of_mask, self.run.main(p, index)))
                    if len(pending) > self.jobs:
                        collect()
                while pending:
                    collect()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _add(self, test: Test, p: float | None, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.records.setdefault((outcome.name, p), Record(test, p)).add(outcome)

    def _tick(self, what: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self._total, what)


__all__ = ["ALL_PS", "INDEPENDENCE_PS", "SECOND_LEAST", "Assessment", "Record", "Work", "assess", "checked"]
