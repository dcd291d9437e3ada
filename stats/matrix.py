"""L4, the suite under test: each control against each test, the power on them, calibration on good generators."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from scipy import stats

from stats.assess import INDEPENDENCE_PS, Progress, Work
from stats.controls import CONTROLS, Control
from stats.judge import Row, judge, rows_of
from stats.run import LEVELS, Level, Run
from stats.sources import Source
from stats.table import IDS, TESTS, Test

UNIFORM = 1e-3
"""Calibration: least second-level p-value of a subtest."""
COLUMNS = (*IDS, "L3")
"""Columns of the matrix: the tests' first level, and the second level."""


def column_of(row: Row) -> str:
    """The matrix column that a value belongs to."""
    return "L3" if row.layer == "L3" and row.test != "T1" else row.test


def needed(name: str) -> tuple[Test, ...]:
    """The tests to run for a name in a control's `caught`."""
    if name == "L3":
        return tuple(test for test in TESTS if test.id == "T8")
    return tuple(test for test in TESTS if test.id == name.split()[0])


def hits(rows: Iterable[Row], name: str) -> list[Row]:
    """The failing values that answer to a name in a control's `caught`."""
    found = []
    for row in rows:
        named = row.layer == "L3" if name == "L3" else name in (row.test, row.name)
        if named and row.status == "fail":
            found.append(row)
    return found


def examine(
    source: Source, tests: Sequence[Test], ps: Sequence[float], level: Level, base: int, jobs: int = 1
) -> list[Row]:
    """The judged values of some tests, without drawing anything again."""
    work = Work(Run(source, level, base), tests, ps, jobs)
    work.measure()
    return judge(rows_of(work.records), None).rows


def controls(names: Iterable[str] | None = None) -> tuple[Control, ...]:
    """The controls of these names, or whose names contain them; all for None.

    Raises:
        ValueError: for a name that fits none.
    """
    if names is None:
        return CONTROLS
    picked = []
    for name in names:
        found = [control for control in CONTROLS if name.lower() in control.name.lower()]
        if not found:
            raise ValueError(f"no control is called {name!r}; there are: {', '.join(one.name for one in CONTROLS)}")
        picked += found
    return tuple(dict.fromkeys(picked))


@dataclass(frozen=True)
class Line:
    """One control of the matrix: per column the smallest p-value (None where the test did not run) and what failed."""

    control: str
    p: float
    named: tuple[str, ...]
    values: dict[str, float | None]
    failed: tuple[str, ...]
    missed: tuple[str, ...]
    extra: bool
    """True where a test failed that must not: any on a good generator, another than the named where those are all."""

    @property
    def right(self) -> bool:
        return not self.missed and not self.extra


def matrix(
    names: Iterable[str] | None = None, seeds: int = 4, base: int = 0, jobs: int = 1, progress: Progress | None = None
) -> list[Line]:
    """Every control against every test, on `seeds` masks of the standard level, or as many as the fault needs."""
    level = replace(LEVELS["standard"], seeds=seeds)
    picked = controls(names)
    lines = []
    for place, control in enumerate(picked):
        ps = dict.fromkeys(p for _, p in control.caught) or (0.5,)
        try:
            enough = replace(level, seeds=max(seeds, control.masks))
            lines += [line(control, p, enough, base, jobs) for p in ps]
        except KeyboardInterrupt:  # what is done stays
            break
        if progress is not None:
            progress(place + 1, len(picked), control.name)
    return lines


def line(control: Control, p: float, level: Level, base: int, jobs: int = 1) -> Line:
    """One line of the matrix."""
    rows = examine(control.source(), TESTS, (p,), level, base, jobs)
    values: dict[str, float | None] = dict.fromkeys(COLUMNS)
    for row in rows:
        column = column_of(row)
        before = values[column]
        values[column] = row.pvalue if before is None else min(before, row.pvalue)
    named = tuple(name for name, at in control.caught if at == p)
    failed = tuple(dict.fromkeys(column_of(row) for row in rows if row.status == "fail"))
    missed = tuple(name for name in named if not hits(rows, name))
    allowed = {name.split()[0] for name in named} | {"L3"}
    extra = bool(failed) if control.good else control.only and not set(failed) <= allowed
    return Line(control.name, p, named, values, failed, missed, extra)


@dataclass(frozen=True)
class Power:
    """How often a named test caught a control: `caught` of `runs`, with a 95% lower bound (Clopper and Pearson)."""

    control: str
    test: str
    p: float
    caught: int
    runs: int
    masks: int
    lower: float


def power(
    names: Iterable[str] | None = None,
    runs: int = 40,
    masks: int | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> list[Power]:
    """How often each control is caught by the tests named for it, in `runs` runs with seeds of their own.

    Args:
        masks: masks a run and p; by default the standard level's. Fewer masks see less, so that what is measured
            with fewer bounds the standard level's power from below.
    """
    standard = LEVELS["standard"]
    level = replace(standard, seeds=masks or standard.seeds)
    cases = [(control, p) for control in controls(names) for p in dict.fromkeys(p for _, p in control.caught)]
    found = []
    for place, (control, p) in enumerate(cases):
        named = [name for name, at in control.caught if at == p]
        tests = tuple(dict.fromkeys(test for name in named for test in needed(name)))
        caught = dict.fromkeys(named, 0)
        try:
            for run in range(runs):
                rows = examine(control.source(), tests, (p,), level, 1000 + run, jobs)
                for name in named:
                    caught[name] += bool(hits(rows, name))
        except KeyboardInterrupt:  # what is done stays
            break
        for name, count in caught.items():
            lower = float(stats.binomtest(count, runs).proportion_ci(0.9, "exact").low)
            found.append(Power(control.name, name, p, count, runs, level.seeds, lower))
        if progress is not None:
            progress(place + 1, len(cases), control.name)
    return found


@dataclass(frozen=True)
class Calibration:
    """One subtest at one p on a good generator: Kolmogorov-Smirnov of its p-values against uniform.

    Where that is below 0.001, `again` is the same over four times as many fresh masks: among hundreds of subtests one
    such is to be expected now and then.
    """

    source: str
    name: str
    p: float | None
    count: int
    ks: float
    smallest: float
    again: float | None = None

    @property
    def uniform(self) -> bool:
        return (self.ks if self.again is None else self.again) > UNIFORM


def calibrate(
    source: Source,
    ps: Sequence[float] = INDEPENDENCE_PS,
    masks: int = 200,
    tests: Sequence[Test] = TESTS,
    base: int = 0,
    jobs: int = 1,
    progress: Progress | None = None,
) -> list[Calibration]:
    """P-values of every subtest over at least `masks` masks at each p, and whether they are uniform.

    T16 pools its related masks, T17 to T19 repeat over seeds; T13, T14 and L0 have no p-values.

    Returns:
        One entry a subtest and p, the least uniform first.
    """
    pooled = _pvalues(source, ps, masks, tests, base, jobs, progress)
    entries = []
    for (test, name, p), values in pooled.items():
        ks, again = _uniformity(values), None
        if ks < UNIFORM:
            same = [one for one in tests if one.id == test]
            fresh = _pvalues(source, ps if p is None else (p,), 4 * masks, same, base + 2**32, jobs, None)
            again = _uniformity(fresh[test, name, p])
        entries.append(Calibration(source.name, name, p, len(values), ks, float(min(values)), again))
    return sorted(entries, key=lambda entry: entry.ks)


def _uniformity(pvalues: Sequence[float]) -> float:
    return float(stats.kstest(pvalues, "uniform", method="exact").pvalue)


def _pvalues(
    source: Source,
    ps: Sequence[float],
    masks: int,
    tests: Sequence[Test],
    base: int,
    jobs: int,
    progress: Progress | None,
) -> dict[tuple[str, str, float | None], list[float]]:
    """(test, subtest, p) -> p-values."""
    level = replace(LEVELS["quick"], seeds=masks)
    chosen = [replace(test, share=1) for test in tests if test.layer == "L2"]
    pooled: dict[tuple[str, str, float | None], list[float]] = defaultdict(list)
    per_call = [test for test in chosen if test.scope == "pool"]
    rest = [test for test in chosen if test.scope != "pool"]
    work = Work(Run(source, level, base), rest, ps, jobs, progress=progress)
    work.measure()
    records = [work.records]
    if per_call:  # each repetition compares some two dozen masks with one
        few = Work(Run(source, level, base), per_call, ps, jobs)
        few.measure(-(-masks // 8))
        records.append(few.records)
    for found in records:
        for (name, p), record in found.items():
            key = f"T16 {name.rsplit(': ', 1)[1]}" if record.test.id == "T16" else name
            pooled[record.test.id, key, p] += [outcome.pvalue for outcome in record.outcomes]
    return dict(pooled)


def compare(
    makers: Mapping[str, Callable[[float], Source]],
    ps: Sequence[float],
    level: str,
    jobs: int = 1,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Implementations side by side: verdict and failures of each at each p."""
    from stats.assess import assess

    lines = []
    total = len(makers) * len(ps)
    for name, make in makers.items():
        for p in ps:
            start = time.perf_counter()
            try:
                result = assess(make(p), p, level=level, jobs=jobs)
                entry = {"verdict": result.verdict, "failures": result.failures, "values": len(result.table)}
            except ValueError as error:
                entry = {"verdict": "cannot be tested", "failures": [str(error)], "values": 0}
            lines.append({"source": name, "p": p, "level": level, **entry, "seconds": time.perf_counter() - start})
            if progress is not None:
                progress(len(lines), total, f"{name}, p = {p:g}")
    return lines


def plain(found: Iterable[Any]) -> list[dict[str, Any]]:
    """Dataclasses as dictionaries, for JSON."""
    return [asdict(one) for one in found]


__all__ = [
    "COLUMNS", "Calibration", "Line", "Power", "calibrate", "compare", "controls", "examine", "hits", "line", "matrix",
    "plain", "power",
]  # fmt: skip
