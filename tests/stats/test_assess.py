"""stats.assess: what it takes, what it says, and what it refuses."""

import functools

import numpy as np
import pytest
import torch

import stats
from stats import judge
from stats.assess import Record
from stats.outcome import Outcome
from stats.sources import reference
from stats.table import TESTS

FEW = {"seeds": 2, "tests": ["L0", "T1", "T5", "T13"]}


def numpy_mask(seed, offset, rows, columns, p):
    return np.random.default_rng([seed, offset]).random((rows, columns)) >= p


def torch_mask(seed, offset, rows, columns, p):
    generator = torch.Generator().manual_seed(seed + offset)
    return torch.rand(rows, columns, generator=generator) >= p


@pytest.mark.parametrize(
    "source, p",
    [
        (numpy_mask, 0.2),
        (torch_mask, 0.5),
        (torch.nn.Dropout(0.3), None),
        (torch.nn.functional.dropout, 0.5),
        (functools.partial(torch.nn.functional.dropout, p=0.75), 0.75),
    ],
    ids=["numpy", "torch", "module", "function", "partial"],
)
def test_anything_that_drops(source, p):
    found = stats.assess(source, p, **FEW)
    assert found.verdict == "pass"
    assert found.failures == []
    assert {row.test for row in found.table} >= {"T1", "T5", "T13"}
    assert all(row.n > 0 and row.effect > 0 and 0 <= row.pvalue <= 1 for row in found.table)
    assert found.bound < 1e-6
    assert "PASS" in str(found)


def test_quick_level_passes_the_package():
    """The quick level whole, with committed seeds."""
    found = stats.assess(stats.sources.package(), [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99], seeds=3)
    assert found.verdict == "pass", str(found)
    assert {row.test for row in found.table} == {test.id for test in TESTS}
    assert {row.p for row in found.table if row.test == "T5"} >= {0.1, 0.25, 0.5, 0.75, 0.9}
    assert not [row for row in found.table if row.test == "T5" and row.p in (0.01, 0.99)]


def test_module_of_one_width():
    import xfused

    module = xfused.BiasActDropout(512, activation="relu", p=0.25, bias=False)
    found = stats.assess(module, seeds=2, tests=["L0", "T1", "T5", "T16"])
    assert found.verdict == "pass"
    assert found.ps == (0.25,)


def test_fixed_outcome():
    one, other = (stats.assess(reference(), 0.1, **FEW) for _ in range(2))
    assert one.table == other.table
    assert stats.assess(reference(), 0.1, base=1, **FEW).table != one.table


def test_wrong_rate_is_seen_and_named():
    found = stats.assess(
        lambda seed, offset, rows, columns, p: numpy_mask(seed, offset, rows, columns, 0.102),
        0.1,
        tests=["T1", "T2", "T8"],
    )
    assert found.verdict == "fail"
    assert "T1 rate" in found.failures
    assert found.table[0].status == "fail"
    assert str(found).splitlines()[-1].startswith("FAIL: T")


def test_gradient_with_another_mask_is_seen():
    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.nn.functional.dropout(x, 0.5)

        @staticmethod
        def backward(ctx, dy):
            return torch.nn.functional.dropout(dy, 0.5)

    found = stats.assess(lambda x: Forgetful.apply(x), 0.5, seeds=1, tests=["L0"])
    assert found.failures == ["L0 backward"]


@pytest.mark.parametrize(
    "source, message",
    [
        (lambda seed, offset, rows, columns, p: 1 // 0, "raised ZeroDivisionError"),
        (lambda seed, offset, rows, columns, p: np.ones((rows, columns + 1), bool), "must return shape"),
        (lambda seed, offset, rows, columns, p: np.ones((rows, columns)), "must return a bool array"),
        (lambda seed, offset, rows, columns, p: [[True]], "must return a bool array, got a list"),
        (lambda seed, offset, rows, columns, p: np.ones((rows, columns), bool), "is constant: it keeps"),
        (lambda seed, offset, rows, columns, p: np.zeros((rows, columns), bool), "is constant: it drops"),
        (lambda seed, offset, rows, columns, p: np.random.random((rows, columns)) > p, "is not reproducible"),
        (torch.nn.Dropout(0.1).eval(), "training mode"),
        (lambda x: None, "must return a tensor"),
    ],
)
def test_sources_that_cannot_be_tested(source, message):
    with pytest.raises(stats.SourceError, match=message):
        stats.assess(source, 0.1, **FEW)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"p": 0.0}, ValueError, "p must be"),
        ({"p": 1.0}, ValueError, "p must be"),
        ({"p": float("nan")}, ValueError, "p must be"),
        ({"p": "x"}, TypeError, "p must be"),
        ({"p": []}, ValueError, "p must hold"),
        ({"seeds": 0}, ValueError, "seeds must be"),
        ({"seeds": 1.5}, TypeError, "seeds must be"),
        ({"level": "fast"}, ValueError, "level must be"),
        ({"tests": ["T99"]}, ValueError, "tests must be"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        stats.assess(reference(), **arguments)


@pytest.mark.parametrize("source", [3, lambda a, b: a])
def test_wrong_sources(source):
    with pytest.raises(TypeError, match="source"):
        stats.assess(source)


def test_p_of_a_module_must_be_its_own():
    with pytest.raises(stats.SourceError, match=r"p must be 0\.3"):
        stats.assess(torch.nn.Dropout(0.3), 0.1)


def test_interruption_keeps_what_is_done():
    calls = []

    def source(seed, offset, rows, columns, p):
        calls.append(seed)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return numpy_mask(seed, offset, rows, columns, p)

    found = stats.assess(source, 0.2, seeds=8, tests=["T1"], jobs=1, keep_interrupted=True)
    assert found.interrupted
    assert found.verdict == "pass"
    assert found.table[0].count == 3  # the fourth mask was drawn, its tests were still to come
    assert "interrupted" in str(found).splitlines()[-1]


def rows_with(pvalue, name="T1 rate", count=1):
    test = next(one for one in TESTS if one.id == "T1")
    outcomes = [Outcome(name, 0.1, pvalue, 100, 0.1, "rate") for _ in range(count)]
    return judge.rows_of({(name, 0.1): Record(test, 0.1, outcomes)})


@pytest.mark.parametrize(
    "first, second, verdict",
    [
        (0.3, None, "pass"),
        (1e-11, None, "fail"),
        (1e-7, 0.4, "pass"),
        (1e-7, 1e-5, "suspicious"),
        (1e-7, 1e-8, "fail"),
    ],
)
def test_verdict(first, second, verdict):
    asked = []

    def again(row):
        asked.append(row.name)
        return rows_with(second)

    found = judge.judge(rows_with(first), again)
    assert found.verdict == verdict
    assert asked == ([] if second is None else ["T1 rate"])
    assert found.failures == (["T1 rate"] if verdict == "fail" else [])


def test_a_weak_fault_becomes_clear_with_four_times_the_data():
    def weak(seed, offset, rows, columns, p):
        return numpy_mask(seed, offset, rows, columns, 0.1011)

    found = stats.assess(weak, 0.1, seeds=2, tests=["T1"], base=2)
    row = next(row for row in found.table if row.kind == "pooled")
    assert judge.FIRST < row.pvalue < judge.SUSPICIOUS
    assert row.again is not None and row.again < judge.STAYS
    assert found.verdict == "fail"


def test_second_level_sees_what_no_mask_shows():
    """P-values that crowd in the middle: each mask looks fine, all of them together do not."""
    test = next(one for one in TESTS if one.id == "T3")

    def judged(pvalues):
        outcomes = [Outcome("T3 row counts", 1.0, p, 100, 0.1, "rms rate", upper=p) for p in pvalues]
        return judge.judge(judge.rows_of({("T3 row counts", 0.1): Record(test, 0.1, outcomes)}), None)

    good = judged(np.linspace(0.01, 0.99, 64))
    assert {row.kind for row in good.rows} == {"worst", "stouffer", "ks", "cvm"}
    assert good.verdict == "pass"
    crowded = judged(np.linspace(0.49, 0.51, 64))
    assert {row.kind for row in crowded.rows if row.status == "fail"} >= {"ks", "cvm"}
    assert not [row for row in judged(np.linspace(0.49, 0.51, 31)).rows if row.kind in ("ks", "cvm")]


def test_budget():
    assert judge.budget(1000, 100, 50) < 1e-6
    with pytest.raises(ValueError, match="budget"):
        judge.budget(9000, 10, 0)
    with pytest.raises(ValueError, match="budget"):
        judge.budget(10, 101, 0)
