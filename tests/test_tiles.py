"""Which tiles the launchers take: what holds for every shape, and what was measured to matter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xfused.ops import _tiles

CPU = torch.device("cpu")  # for which 128 multiprocessors are assumed
RULES = {"rows": _tiles.row_tiles, "column sums": _tiles.column_sum_tiles}
rules = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(autouse=True)
def on_nvidia(monkeypatch):
    monkeypatch.setattr(_tiles, "has_ptx", lambda device: True)


@rules
@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(1, 2**17),
    groups=st.integers(1, 2**20),
    itemsize=st.sampled_from([2, 4]),
    align=st.sampled_from([1, 2, 4, 8]),
)
def test_every_shape_has_a_tile_that_can_be_launched(rule, n, groups, itemsize, align):
    tiles = RULES[rule](n, groups, itemsize, min(align, 16 // itemsize), CPU)
    assert all(value > 0 and value & (value - 1) == 0 for value in tiles[:3])
    assert tiles.each >= 1
    assert tiles.warps * 32 * tiles.registers <= 65536
    held = tiles.block_g * tiles.block_n / (32 * tiles.warps)  # columns, of a thread
    assert held <= 16 // itemsize
    assert held >= 1


@pytest.mark.parametrize("itemsize", [2, 4])
def test_partial_sums_of_large_tensors_take_less_than_a_hundredth_of_them(itemsize):
    for n, groups in ((16384, 1024), (4096, 2048), (65536, 512)):
        tiles = _tiles.column_sum_tiles(n, groups, itemsize, 16 // itemsize, CPU)
        splits = -(-groups // (tiles.block_g * tiles.each))
        assert splits * n * 4 < 0.01 * groups * 8 * n * itemsize


def test_column_sums_are_one_round_of_programs_or_several():
    """A second round that is nearly empty would double the time."""
    for n, groups in ((1024, 128), (1024, 512), (3072, 1024), (8192, 256), (65536, 64), (768, 8192), (4096, 256)):
        tiles = _tiles.column_sum_tiles(n, groups, 2, 8, CPU)
        programs = -(-n // tiles.block_n) * -(-groups // (tiles.block_g * tiles.each))
        fit = 65536 // (tiles.warps * 32 * tiles.registers) * 128
        assert programs <= fit or programs > 4 * fit


@rules
def test_threads_hold_fewer_columns_where_tensors_are_small(rule):
    held = []
    for n, groups in ((512, 16), (4096, 256), (16384, 1024)):
        tiles = RULES[rule](n, groups, 2, 8, CPU)
        held.append(tiles.block_g * tiles.block_n // (32 * tiles.warps))
    assert held == [2, 4, 8]


def test_the_alignment_divides_all_of_its_arguments():
    assert _tiles.alignment(8, 1024, 512) == 8
    assert _tiles.alignment(8, 1000, 1004) == 4
    assert _tiles.alignment(8, 50257) == 1
    assert _tiles.alignment(4, 16, 0) == 4
