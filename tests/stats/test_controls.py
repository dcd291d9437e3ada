"""L4: each control is caught by the tests named for it, and good generators raise no alarm."""

from collections import defaultdict
from dataclasses import replace

import pytest

from stats import matrix
from stats.controls import CONTROLS
from stats.run import LEVELS, Level
from stats.sources import pcg64, philox_rounds, reference
from stats.table import IDS, TESTS

BROKEN = [
    (control, p)
    for control in CONTROLS
    for p in dict.fromkeys(p for _, p in control.caught)
]  # fmt: skip
SMALL = Level("small", 100, 256, 256, 4096, 4)


def level_for(control):
    """The standard level, thinned: two of its masks, or as many as the fault needs to show."""
    return replace(LEVELS["standard"], seeds=max(2, control.masks), thin=4)


@pytest.mark.parametrize("control, p", BROKEN, ids=[f"{control.name}, p = {p}" for control, p in BROKEN])
def test_control_is_caught_by_the_tests_named_for_it(control, p):
    names = [name for name, at in control.caught if at == p]
    tests = tuple(dict.fromkeys(test for name in names for test in matrix.needed(name)))
    rows = matrix.examine(control.source(), tests, (p,), level_for(control), 7)
    missed = [name for name in names if not matrix.hits(rows, name)]
    assert not missed


def test_every_test_is_named_for_some_control_or_is_an_estimate_of_its_own():
    named = {name.split()[0] for control in CONTROLS for name, _ in control.caught}
    assert named >= {"L0", "L3", "T1", "T5", "T8", "T10", "T11", "T12", "T13", "T14", "T15", "T16", "T19"}
    assert named <= {*IDS, "L3"}


def test_plain_agreement_misses_a_shifted_mask():
    control = next(one for one in CONTROLS if one.name == "seed added to the column")
    rows = matrix.examine(control.source(), matrix.needed("T16"), (0.1,), level_for(control), 7)
    failed = {row.name for row in rows if row.status == "fail"}
    assert "T16 next seed: cross-correlation" in failed
    assert "T16 next seed: agreement" not in failed


@pytest.mark.parametrize(
    "good, seeds", [(reference(), 100), (philox_rounds(7), 32), (pcg64(), 32)], ids=["reference", "Philox-7", "PCG64"]
)
def test_good_generators_raise_no_alarm(good, seeds):
    """328 masks in all: 100 seeds of the reference at p = 0.1 and as many at 0.5, 32 each of the others."""
    alarms = defaultdict(list)
    for p in (0.1, 0.5):
        rows = matrix.examine(
            good, [test for test in TESTS if test.scope in ("mask", "pool")], (p,), replace(SMALL, seeds=seeds), 3, 2
        )
        assert max(row.count for row in rows) == seeds
        for row in rows:
            alarms[row.status].append((row.name, row.kind, p, row.pvalue))
    assert not alarms["fail"]
    assert not alarms["suspicious"]


def test_matrix_line_says_what_missed():
    good = next(one for one in CONTROLS if one.name == "PCG64")
    claimed = replace(good, caught=(("T1", 0.5),))
    small = Level("small", 2, 256, 512, 1024, 8)
    assert matrix.line(claimed, 0.5, small, 0).missed == ("T1",)
    line = matrix.line(good, 0.5, small, 0)
    assert line.right and not line.failed
