"""Each statistic against a slow, obvious way to compute it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from stats import cells, contract, outcome, pairs, repeats, waves
from stats.sample import Sample


@pytest.fixture(scope="module")
def sample():
    return Sample(contract.mask(1, 2, 264, 320, 0.3), 0.3)


def by_name(outcomes):
    return {one.name: one for one in outcomes}


def test_counts(sample):
    assert by_name(cells.rate(sample))["T1 rate"].statistic == sample.dropped.mean()
    value = ((sample.dropped.sum(0) - 264 * sample.p) ** 2).sum() / (264 * sample.p * sample.q)
    assert by_name(cells.column_dispersion(sample))["T2 column counts"].statistic == pytest.approx(value)
    found = by_name(cells.residues(sample))
    by_row = np.array([sample.dropped[k::8].sum() for k in range(8)])
    size = 33 * 320
    expected = ((by_row - size * sample.p) ** 2 / (size * sample.p * sample.q)).sum()
    assert found["T4 row mod 8"].statistic == pytest.approx(expected)


def test_autocorrelation_at_every_lag(sample):
    x = sample.dropped - sample.dropped.mean()
    x /= x.std()
    lags = sample.autocorrelation
    for lag in ((0, 1), (1, 0), (5, -3), (131, 17), (-1, 160)):
        direct = (x * np.roll(x, (-lag[0], -lag[1]), (0, 1))).sum() / np.sqrt(x.size)
        assert lags[lag] == pytest.approx(direct, abs=2e-3)
    own = (x * np.roll(x, (132, 160), (0, 1))).sum() / np.sqrt(2 * x.size)
    assert lags[132, 160] == pytest.approx(own, abs=2e-3)
    near = [lags[0, k] for k in range(1, 65)] + [lags[a, b] for a in range(1, 65) for b in range(-64, 65)]
    found = next(iter(waves.near_lags(sample)))
    assert len(near) == 8320
    assert found.statistic == pytest.approx(float(np.square(near).sum()), rel=1e-5)


def test_tuples_and_blocks(sample):
    found = by_name(cells.tuples(sample))
    bits = sample.dropped[:264, :320]
    codes = [sum(int(bits[8 * i + k, j]) << k for k in range(8)) for i, j in itertools.product(range(33), range(320))]
    assert np.array_equal(found["T8 tuples 8x1"].cells[0], np.bincount(codes, minlength=256))
    assert found["T8 tuples 8x1"].cells[1].sum() == pytest.approx(1)
    sums = [int(bits[8 * i : 8 * i + 8, 8 * j : 8 * j + 8].sum()) for i in range(33) for j in range(40)]
    assert np.array_equal(by_name(cells.blocks(sample))["T9 ones per 8x8"].cells[0], np.bincount(sums, minlength=65))


def test_runs_and_gaps(sample):
    found = by_name(cells.runs(sample))
    flat = sample.dropped.ravel().tolist()
    lengths = [len(list(group)) for value, group in itertools.groupby(flat) if value]
    observed = found["T10 runs along rows"].cells[0]
    # the first and the last run may be cut off and are left out
    assert abs(int(observed.sum()) - len(lengths)) <= 2
    assert np.abs(observed[:12] - np.bincount(lengths, minlength=13)[1:13]).sum() <= 2
    gaps = np.diff(np.flatnonzero(flat))
    assert np.array_equal(found["T10 gaps along rows"].cells[0][:40], np.bincount(gaps, minlength=41)[1:41])


def slow_rank(rows):
    rows, rank = list(rows), 0
    while rows:
        pivot = rows.pop()
        if pivot:
            rank += 1
            low = pivot & -pivot
            rows = [row ^ pivot if row & low else row for row in rows]
    return rank


def test_ranks_over_gf2():
    rng = np.random.default_rng(0)
    matrices = rng.integers(2**32, size=(40, 32), dtype=np.uint32)
    matrices[::4, 7] = matrices[::4, 3] ^ matrices[::4, 12]
    matrices[1::4, 5:9] = 0
    assert cells.ranks(matrices).tolist() == [slow_rank(int(row) for row in one) for one in matrices]
    assert cells.rank_probabilities(32) == pytest.approx([0.2888, 0.5776, 0.1336], abs=1e-4)


def test_pairs(sample):
    r = np.corrcoef(sample.dropped.T.astype(float))
    z = r[np.triu_indices(320, 1)] * np.sqrt(263)
    found = by_name(pairs.correlations(sample))
    assert found["T11 sum over column pairs"].statistic == pytest.approx(float((z**2).sum()), rel=1e-6)
    assert abs(found["T11 largest column pair"].statistic) == pytest.approx(float(np.abs(z).max()), rel=1e-6)


def test_symmetries_take_pairs_that_share_no_element():
    rng = np.random.default_rng(1)
    dropped = rng.random((40, 52)) < 0.5
    square = dropped[:40, :40]
    found = by_name(pairs.symmetries(Sample(~dropped, 0.5)))
    upper = np.triu_indices(40, 1)
    assert found["T15 transpose"].trials[0] == int((square == square.T)[upper].sum())
    assert found["T15 left-right flip"].trials[0] == int((dropped == dropped[:, ::-1])[:, :26].sum())
    assert found["T15 half turn"].trials[0] == int((dropped == dropped[::-1, ::-1])[:20].sum())
    quarter = square == np.rot90(square)
    assert found["T15 quarter turn"].trials[0] == int(quarter[:20, :20].sum() + quarter[20:, 20:].sum())
    assert found["T15 three-quarter turn"].trials[0] == int(quarter[:20, 20:].sum() + quarter[20:, :20].sum())
    symmetric = np.triu(square) | np.triu(square).T
    assert by_name(pairs.symmetries(Sample(~symmetric, 0.5)))["T15 transpose"].statistic == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([3, 64, 65, 100, 200]), st.integers(0, 1))
def test_window_hashes_agree_exactly_where_windows_do(seed, length, biased):
    rng = np.random.default_rng(seed)
    lines = rng.random((3, 260)) < (0.5, 0.02)[biased]
    lines[2, 20:240] = lines[0, 10:230]
    hashes = repeats.window_hashes(lines, length)
    assert hashes.shape == (3, 261 - length, 2)
    windows = [line[start : start + length].tobytes() for line in lines for start in range(261 - length)]
    assert repeats.duplicates(hashes.reshape(-1, 2)) == len(windows) - len(set(windows))


def test_duplicate_digests():
    rng = np.random.default_rng(2)
    pieces = rng.random((500, 77)) < 0.5
    assert repeats.duplicates(repeats.digests(pieces)) == 0
    pieces[[3, 400, 401]] = pieces[17]
    assert repeats.duplicates(repeats.digests(pieces)) == 3


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_needed_length_keeps_accidents_rare(p):
    length = repeats.needed_length(1e9, p)
    alike = p * p + (1 - p) ** 2
    assert 1e9 * alike**length <= 1e-12 < 1e9 * alike ** (length - 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1), min_size=2, max_size=300), st.integers(200, 10**6), st.integers(0, 2**32))
def test_merged_cells(weights, total, seed):
    probability = np.array(weights) / sum(weights)
    observed = np.random.default_rng(seed).multinomial(total, probability)
    merged, expected = outcome.merge(observed, probability)
    assert merged.sum() == total
    assert expected.sum() == pytest.approx(total)
    assert len(merged) == 1 or expected.min() >= outcome.LEAST


def test_effects_are_seen_with_the_promised_power():
    n, p = 2**22, 0.1
    effect = outcome.binomial("", n // 10, n, p).effect
    sigma = np.sqrt(p * (1 - p) / n)
    assert stats.norm.sf(stats.norm.isf(outcome.FIRST / 2) - effect / sigma) == pytest.approx(outcome.POWER, abs=1e-4)
    assert effect == pytest.approx(1.2e-3, rel=0.1)  # the specification's figure
    for df in (1.0, 50.0, 9000.0):
        edge = stats.chi2.isf(outcome.FIRST / 2, df)
        assert stats.ncx2.sf(edge, df, outcome.chi2_effect(df)) == pytest.approx(outcome.POWER, abs=1e-6)
    assert outcome.chi2_effect(10001.0) == pytest.approx(outcome.chi2_effect(9999.0), rel=0.01)


def test_sidak_is_the_law_of_the_smallest():
    assert outcome.sidak(1e-3, 100) == pytest.approx(1 - 0.999**100)
    assert outcome.sidak(1e-20, 1e6) == pytest.approx(1e-14)
    assert outcome.sidak(0.0, 10) == 0
