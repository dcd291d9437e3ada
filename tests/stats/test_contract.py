"""The numpy oracle against known answers, golden masks, and itself."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stats import contract

DATA = Path(__file__).parents[1] / "data"


def cases(name):
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [[field.strip() for field in line.split("|")] for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("rounds, counter, key, output", cases("philox_kat.txt"))
def test_known_answers(rounds, counter, key, output):
    words = contract.philox(
        tuple(int(word, 16) for word in counter.split()), tuple(int(word, 16) for word in key.split()), int(rounds)
    )
    assert [f"{int(word):08x}" for word in words] == output.split()


def test_known_answers_of_the_suite_are_those_of_the_file():
    rows = cases("philox_kat.txt")
    assert [(int(rounds), *rest) for rounds, *rest in rows] == list(contract.KNOWN_ANSWERS)


@pytest.mark.parametrize("key, offset, p, shape, origin, kept, digest", cases("mask_golden.txt"))
def test_golden_masks(key, offset, p, shape, origin, kept, digest):
    place = tuple(int(word) for word in origin.split())
    mask = contract.mask(int(key, 16), int(offset, 16), *(int(n) for n in shape.split()), float(p), place)
    assert int(mask.sum()) == int(kept)
    assert hashlib.sha256(mask.astype(np.uint8).tobytes()).hexdigest() == digest


def test_draws_at_any_rows_and_columns_are_those_of_the_whole():
    whole = contract.draws(3, 2**40 + 1, np.arange(70), np.arange(50))
    rows, columns = np.array([69, 3, 3, 0, 17, 16, 8]), np.array([49, 0, 7, 7])
    assert np.array_equal(contract.draws(3, 2**40 + 1, rows, columns), whole[np.ix_(rows, columns)])


def test_leading_halves_of_a_word_are_its_two_halves():
    words = contract.block(9, 0, np.arange(4)[:, None], np.arange(5)[None, :])
    draws = contract.draws(9, 0, np.arange(32), np.arange(5)).reshape(4, 8, 5)
    for j in range(4):
        assert np.array_equal(draws[:, 2 * j + 1], words[..., j])
        assert np.array_equal(draws[:, 2 * j] >> np.uint32(16), words[..., j] & np.uint32(0xFFFF))


def test_negative_words_are_twos_complement():
    assert np.array_equal(contract.block(-1, -(2**63), 5, 6), contract.block(2**64 - 1, 2**63, 5, 6))


def test_ends():
    assert contract.mask(0, 0, 9, 9, 0.0).all()
    assert not contract.mask(0, 0, 9, 9, 1.0).any()
    assert contract.threshold(2.0**-33) == 0
    with pytest.raises(ValueError, match="p must be"):
        contract.threshold(1.5)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**32 - 1))
def test_shared_word_counts_every_word(limit):
    both, correlation = contract.shared_word(limit / 2**32)
    a, b = divmod(limit, 2**16)
    # for each high half: how many low halves drop the odd row, how many the even one; both are intervals from 0
    high = np.arange(2**16)
    odd = np.where(high < a, 2**16, np.where(high == a, b, 0))
    even = a + (high < b)
    count = int(np.minimum(odd, even).sum())
    assert both == count / 2**32
    assert correlation == pytest.approx((count * 2**32 - limit**2) / (limit * (2**32 - limit)), rel=1e-12)


def test_shared_word_stays_below_the_promised_correlation():
    grid = np.linspace(0.001, 0.999, 20001)
    assert max(abs(contract.shared_word(p)[1]) for p in grid) < 3.3e-5
    assert contract.shared_word(0.1)[1] == pytest.approx(1.4e-5, rel=0.05)
    assert contract.shared_word(0.25)[1] == 0
