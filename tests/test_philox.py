"""The mask contract: known answers, golden masks, the far corners of the index space, thresholds, seeds of shards."""

import hashlib
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paths import GPU, INTERPRETER, MARKS, REFERENCE, as_tensor, every_path, kernel_path

import xfused
from xfused import philox

triton = pytest.importorskip("triton")
tl = triton.language
triton_philox, triton_draw_words = philox.philox, philox.draw_words
triton_row_draw, triton_drop = philox.row_draw, philox.drop

# the kernels with and without inline PTX; the interpreter has none
kernels_and_ptx = pytest.mark.parametrize(
    "path, ptx",
    [
        pytest.param(INTERPRETER, False, marks=MARKS[INTERPRETER], id="interpreter"),
        pytest.param(GPU, False, marks=pytest.mark.gpu, id="cuda"),
        pytest.param(GPU, True, marks=pytest.mark.gpu, id="cuda-ptx"),
    ],
)


@triton.jit
def _philox_kernel(counter_ptr, key_ptr, out_ptr, ROUNDS: tl.constexpr, PTX: tl.constexpr, N: tl.constexpr):
    """out (4, N) = Philox of counter (4, N) under key (2, N); int64 tensors that hold 32-bit words."""
    i = tl.arange(0, N)
    c0, c1, c2, c3 = triton_philox(
        tl.load(counter_ptr + i).to(tl.uint32),
        tl.load(counter_ptr + N + i).to(tl.uint32),
        tl.load(counter_ptr + 2 * N + i).to(tl.uint32),
        tl.load(counter_ptr + 3 * N + i).to(tl.uint32),
        tl.load(key_ptr + i).to(tl.uint32),
        tl.load(key_ptr + N + i).to(tl.uint32),
        PTX,
        ROUNDS,
    )
    tl.store(out_ptr + i, c0.to(tl.int64))
    tl.store(out_ptr + N + i, c1.to(tl.int64))
    tl.store(out_ptr + 2 * N + i, c2.to(tl.int64))
    tl.store(out_ptr + 3 * N + i, c3.to(tl.int64))


@triton.jit
def _draws_kernel(out_ptr, group, col0, key, offset, PTX: tl.constexpr, N: tl.constexpr):
    """out (8, N): the draws of the eight rows of a group, N columns from col0 on."""
    i = tl.arange(0, N)
    words = triton_draw_words(
        tl.zeros((N,), tl.uint32) + group.to(tl.uint32),
        i.to(tl.uint32) + col0.to(tl.uint32),
        key.to(tl.int64),
        offset.to(tl.int64),
        PTX,
    )
    for k in tl.static_range(8):
        tl.store(out_ptr + k * N + i, triton_row_draw(words, k).to(tl.int64))


@triton.jit
def _drop_kernel(word_ptr, y_ptr, last_dropped, K: tl.constexpr, PTX: tl.constexpr, N: tl.constexpr):
    """y = drop(1) for row K of a group whose four words are all `word`; a program does N of them."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    word = tl.load(word_ptr + i).to(tl.uint32)
    y = triton_drop(tl.full((N,), 1.0, tl.float32), (word, word, word, word), K, last_dropped.to(tl.uint32), PTX)
    tl.store(y_ptr + i, y)


# ------------------------------------------------------------------------------------------------ known answers

KNOWN = [
    (int(rounds), *([int(word, 16) for word in words.split()] for words in row))
    for rounds, *row in oracle.cases("philox_kat.txt")
]
known_answers = pytest.mark.parametrize("rounds, counter, key, output", KNOWN)


def test_the_known_answers_cover_seven_and_ten_rounds():
    assert [row[0] for row in KNOWN] == [7, 7, 7, 10, 10, 10]


@known_answers
def test_known_answers_of_the_oracle(rounds, counter, key, output):
    assert list(oracle.philox(counter, key, rounds)) == output


@known_answers
def test_known_answers_of_the_torch_half(rounds, counter, key, output):
    words = philox.philox_torch(*(torch.tensor([word]) for word in counter), *key, rounds)
    assert [int(word) for word in words] == output


@known_answers
@kernels_and_ptx
def test_known_answers_of_the_triton_half(path, ptx, rounds, counter, key, output):
    counters = torch.tensor(counter, device=path.device)[:, None].repeat(1, 2)
    keys = torch.tensor(key, device=path.device)[:, None].repeat(1, 2)
    out = torch.zeros_like(counters)
    _philox_kernel[(1,)](counters, keys, out, rounds, ptx, 2)
    assert out[:, 0].tolist() == out[:, 1].tolist() == output


@kernels_and_ptx
def test_many_counters_of_the_triton_half(path, ptx):
    rng = np.random.default_rng(1)
    counters = rng.integers(0, 2**32, (4, 1024), dtype=np.uint64)
    keys = rng.integers(0, 2**32, (2, 1024), dtype=np.uint64)
    out = torch.zeros(4, 1024, dtype=torch.int64, device=path.device)
    arrays = (torch.from_numpy(words.astype(np.int64)).to(path.device) for words in (counters, keys))
    _philox_kernel[(1,)](*arrays, out, 10, ptx, 1024)
    assert np.array_equal(out.cpu().numpy().astype(np.uint64), np.stack(oracle.philox(counters, keys)))


def test_many_counters_of_the_torch_half():
    counters = np.random.default_rng(2).integers(0, 2**32, (4, 1024), dtype=np.uint64)
    key = (0xFFFFFFFF, 0x80000001)
    words = philox.philox_torch(*torch.from_numpy(counters.astype(np.int64)), *key)
    assert np.array_equal(torch.stack(words).numpy().astype(np.uint64), np.stack(oracle.philox(counters, key)))


# ------------------------------------------------------------------------------------------------- golden masks


@every_path
@pytest.mark.parametrize("key, offset, p, shape, origin, kept, digest", oracle.cases("mask_golden.txt"))
def test_golden_masks(path, key, offset, p, shape, origin, kept, digest):
    place = tuple(int(word) for word in origin.split())
    mask = path.mask((int(key, 16), int(offset, 16)), *(int(n) for n in shape.split()), float(p), place)
    assert mask.dtype == torch.bool and mask.device == path.device
    assert int(mask.sum()) == int(kept)
    assert hashlib.sha256(mask.cpu().numpy().tobytes()).hexdigest() == digest


def test_golden_mask_that_is_written_out():
    lines = [
        line[2:] for line in (oracle.DATA / "mask_golden.txt").read_text().splitlines() if line[:3] in ("# 0", "# 1")
    ]
    mask = xfused.dropout_mask((16, 16), 0.5, 0)
    assert ["".join(str(int(kept)) for kept in row) for row in mask] == lines


@every_path
@pytest.mark.parametrize(
    "origin",
    [
        (2**31 - 9, 0),
        (2**31 - 1, 5),
        (2**32 - 3, 0),
        (2**32 + 1, 1),
        (2**34 - 11, 0),
        (2**34 + 4, 7),
        (2**35 - 21, 3),
        (0, 2**31 - 4),
        (3, 2**31),
        (0, 2**32 - 19),
        (2**35 - 21, 2**32 - 19),
        (8 * (2**31 - 1) + 1, 2**31 - 1),
    ],
)
def test_far_corners(path, origin):
    seed = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
    assert torch.equal(path.mask(seed, 21, 19, 0.37, origin).cpu(), oracle.keep(seed, 21, 19, 0.37, origin))


@every_path
@pytest.mark.parametrize(
    "seed",
    [
        (-1, 0),
        (0, -1),
        (-1, -1),
        (-(2**31), -(2**31)),
        (-(2**63), -(2**63)),
        (2**31, 2**31),
        (2**32 - 1, 2**33 - 1),
        (2**63 - 1, -(2**62)),
        (-2, 2**32),
    ],
)
def test_every_bit_of_the_seed_counts_as_unsigned(path, seed):
    if path is INTERPRETER and any(2**31 <= word < 2**32 for word in seed):
        pytest.skip("Triton's interpreter holds such an int argument in 32 bits, whatever its type")
    assert torch.equal(path.mask(seed, 9, 40, 0.4).cpu(), oracle.keep(seed, 9, 40, 0.4))


@every_path
@pytest.mark.parametrize("bit", [0, 15, 16, 31, 32, 33, 47, 63])
@pytest.mark.parametrize("word", ["key", "offset"])
def test_seeds_that_differ_in_one_bit_give_unrelated_masks(path, word, bit):
    other = (5 ^ (1 << bit), 9) if word == "key" else (5, 9 ^ (1 << bit))
    agreement = (path.mask((5, 9), 64, 64, 0.5) == path.mask(other, 64, 64, 0.5)).float().mean()
    assert abs(agreement - 0.5) < 6 * 0.5 / 64  # six standard deviations


def test_an_int_seed_is_the_key_with_offset_zero_modulo_two_to_the_64():
    for seed in (0, 7, -1, 2**63, 2**64 - 1, 2**64 + 7):
        expected = oracle.keep((seed % 2**64, 0), 8, 33, 0.3)
        assert torch.equal(xfused.dropout_mask((8, 33), 0.3, seed), expected)
        assert torch.equal(xfused.bias_act_dropout(torch.ones(8, 33), p=0.3, seed=seed) != 0, expected)


def test_rows_are_all_dimensions_but_the_last():
    expected = oracle.keep((3, 4), 30, 7, 0.5)
    assert torch.equal(xfused.dropout_mask((2, 3, 5, 7), 0.5, as_tensor((3, 4))), expected.view(2, 3, 5, 7))
    assert torch.equal(xfused.dropout_mask((7,), 0.5, as_tensor((3, 4))), expected[0])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 4)])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_empty_masks(shape, p):
    mask = xfused.dropout_mask(shape, p, 1)
    assert mask.shape == shape and mask.dtype == torch.bool


# ------------------------------------------------------------------------------------------------------- shards

rectangles = st.tuples(st.integers(0, 40), st.integers(1, 25), st.integers(0, 30), st.integers(1, 20))


@given(rectangle=rectangles, p=st.floats(0, 1), corner=st.sampled_from([(0, 0), (2**32 - 30, 2**31 - 20), (13, 1)]))
def test_a_shard_is_its_slice_of_the_whole(rectangle, p, corner):
    row, rows, col, cols = rectangle
    whole = xfused.dropout_mask((65, 50), p, 77, origin=corner)
    shard = xfused.dropout_mask((rows, cols), p, 77, origin=(corner[0] + row, corner[1] + col))
    assert torch.equal(shard, whole[row : row + rows, col : col + cols])


@kernel_path
@pytest.mark.parametrize("rectangle", [(0, 8, 0, 16), (1, 7, 3, 5), (7, 9, 0, 1), (5, 1, 29, 20), (13, 52, 1, 49)])
def test_a_shard_of_the_kernels_is_its_slice_of_the_whole(path, rectangle):
    row, rows, col, cols = rectangle
    whole = oracle.keep((77, 1), 65, 50, 0.3)
    part = whole[row : row + rows, col : col + cols]
    assert torch.equal(path.mask((77, 1), rows, cols, 0.3, (row, col)).cpu(), part)
    x = torch.ones(rows, cols, device=path.device)
    y, dx, _ = path.forward_backward(x, None, x, p=0.3, seed=(77, 1), origin=(row, col))
    assert torch.equal(y.cpu() != 0, part) and torch.equal(dx.cpu() != 0, part)


@given(split=st.integers(0, 33), col_split=st.integers(0, 21), p=st.sampled_from([0.1, 0.5, 0.9]))
def test_any_split_of_rows_and_columns_gives_the_whole(split, col_split, p):
    x = torch.ones(33, 21)
    whole = xfused.bias_act_dropout(x, p=p, seed=5, origin=(6, 2))
    parts = [
        torch.cat(
            [
                xfused.bias_act_dropout(part, p=p, seed=5, origin=(6 + row, 2 + col))
                for part, col in ((band[:, :col_split], 0), (band[:, col_split:], col_split))
            ],
            1,
        )
        for band, row in ((x[:split], 0), (x[split:], split))
    ]
    assert torch.equal(torch.cat(parts), whole)


# --------------------------------------------------------------------------------------------------- thresholds


@every_path
@pytest.mark.parametrize("k", range(8))
def test_an_element_is_kept_exactly_when_its_draw_reaches_the_threshold(path, k):
    """p = draw / 2**32 keeps the element, one step more drops it; for each of the eight rows of a word block."""
    seed = (11, 13)
    draw = int(oracle.draws_at(*seed, [k], [3])[0, 0])
    kept, dropped = (path.mask(seed, 8, 4, (draw + step) / 2**32) for step in (0, 1))
    assert kept[k, 3] and not dropped[k, 3]
    assert torch.equal(kept.cpu(), oracle.keep(seed, 8, 4, draw / 2**32))
    x = torch.ones(8, 4, device=path.device)
    for step, mask in enumerate((kept, dropped)):
        y, dx, _ = path.forward_backward(x, None, x, p=(draw + step) / 2**32, seed=seed)
        assert torch.equal(y != 0, mask) and torch.equal(dx != 0, mask)


@every_path
@pytest.mark.parametrize("p", [2**-32, 2**-31, 1e-9, 1e-6, 0.1, 0.25, 0.5, 0.5 + 2**-32, 0.75, 1 - 2**-16, 1 - 2**-32])
def test_probabilities(path, p):
    assert torch.equal(path.mask((3, 1), 16, 128, p).cpu(), oracle.keep((3, 1), 16, 128, p))


@every_path
def test_p_zero_and_one_and_those_that_round_to_them(path):
    x = torch.full((9, 5), 3.0, device=path.device)
    for p, expected in ((2**-34, 3.0), (1.0, 0.0), (1 - 2**-34, 0.0)):
        assert (
            torch.equal(path.mask((1, 2), 9, 5, p), x == expected) if p < 0.5 else not path.mask((1, 2), 9, 5, p).any()
        )
        y, dx, _ = path.forward_backward(x, None, x, p=p, seed=(1, 2))
        assert (y == expected).all() and (dx == expected).all()


def test_threshold_rounds_to_the_nearest_of_all_32_bits():
    for p in (0.0, 1.0, 0.1, 0.3, 2**-33, 3 * 2**-33, 1 - 2**-33, 0.1 + 2**-32, 1e-300, 5e-324):
        assert philox.threshold(p) == oracle.threshold(p)
    assert philox.threshold(1.0) == 2**32 and philox.threshold(0.1) == 429496730


def _words_with_every_leading_half(T):
    """All 65,536 leading halves, each with trailing halves around T's own, as the words of odd rows: draws = words."""
    lead = np.repeat(np.arange(65536, dtype=np.int64), 4) << 16
    tail = np.tile(np.array([0, (T & 0xFFFF) - 1, T & 0xFFFF, 0xFFFF]) & 0xFFFF, 65536)
    return lead | tail


TS = [1, 0x8000, 0xFFFF, 0x10000, 0x10001, 429496730, 2**31 - 1, 2**31, 2**31 + 1, 3006477107, 2**32 - 65536, 2**32 - 1]


def _swap_halves(words):
    return ((words << 16) & 0xFFFFFFFF) | (words >> 16)


@pytest.mark.parametrize("T", TS)
@kernels_and_ptx
def test_all_leading_halves_against_the_threshold_in_triton(path, ptx, T):
    draws = _words_with_every_leading_half(T)
    for k in (0, 1):
        words = torch.from_numpy(draws if k == 1 else _swap_halves(draws)).to(path.device)
        y = torch.empty(draws.size, device=path.device)
        block = 1024 if path is GPU else draws.size  # the interpreter's time goes by programs
        _drop_kernel[(draws.size // block,)](words, y, T - 1, k, ptx, block)
        assert np.array_equal(y.cpu().numpy() == 1.0, draws >= T)
        assert np.array_equal(y.cpu().numpy() == 0.0, draws < T)


@pytest.mark.parametrize("T", TS)
@pytest.mark.parametrize("k", range(8))
def test_all_leading_halves_against_the_threshold_in_torch(monkeypatch, T, k):
    draws = _words_with_every_leading_half(T)
    words = torch.from_numpy(draws if k % 2 == 1 else _swap_halves(draws))[None]
    noise = torch.full_like(words, 0x5A5A5A5A)
    monkeypatch.setattr(
        philox, "philox_torch", lambda *_, **__: tuple(words if j == k // 2 else noise for j in range(4))
    )
    mask = philox.keep_mask_torch(8, draws.size, T / 2**32, torch.tensor([1, 2]), (0, 0), torch.device("cpu"))
    assert np.array_equal(mask[k].numpy(), draws >= T)


@kernels_and_ptx
def test_even_rows_take_the_word_rotated_by_sixteen(path, ptx):
    out = torch.zeros(8, 64, dtype=torch.int64, device=path.device)
    key, offset, group, col0 = -3, 2**40 + 5, 2**32 - 2, 2**31 - 1
    _draws_kernel[(1,)](out, group, col0, key, offset, ptx, 64)
    draws = out.cpu().numpy()
    assert np.array_equal(draws[0::2], _swap_halves(draws[1::2]))
    rows = np.arange(8, dtype=np.uint64) + np.uint64(8 * group)
    assert np.array_equal(draws.astype(np.uint64), oracle.draws_at(key, offset, rows, col0 + np.arange(64)))


def test_rows_of_a_word_pair_are_rows_2j_and_2j_plus_1():
    """By the oracle's own draws: it shares no code with the library, so its pairing is checked against the text."""
    draws = oracle.draws_at(1, 2, np.arange(8), np.arange(16))
    words = np.stack(oracle.philox((0, 2, np.arange(16, dtype=np.uint64), 0), (1, 0)))
    assert np.array_equal(draws[1::2], words)
    assert np.array_equal(draws[0::2] >> np.uint64(16), words & np.uint64(0xFFFF))


# -------------------------------------------------------------------------------------------------------- seeds


def test_new_seed_is_two_words_that_advance():
    seeds = torch.stack([xfused.new_seed() for _ in range(64)])
    assert seeds.dtype == torch.int64 and seeds.shape == (64, 2)
    bits = (seeds[..., None] >> torch.arange(64)) & 1
    assert (bits.amin(0) == 0).all() and (bits.amax(0) == 1).all()  # all 128 bits are drawn


def test_new_seed_follows_manual_seed_fork_rng_and_generators():
    torch.manual_seed(3)
    first, second = xfused.new_seed(), xfused.new_seed()
    torch.manual_seed(3)
    with torch.random.fork_rng():
        assert torch.equal(xfused.new_seed(), first)
    assert torch.equal(xfused.new_seed(), first) and torch.equal(xfused.new_seed(), second)
    generator = torch.Generator().manual_seed(8)
    state = torch.get_rng_state()
    drawn = xfused.new_seed(generator=generator)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(xfused.new_seed(generator=generator.manual_seed(8)), drawn)
    assert not torch.equal(xfused.new_seed(generator=generator), drawn)


def test_new_seed_on_the_device_asked_for():
    assert xfused.new_seed("cpu").device == torch.device("cpu")
    assert xfused.new_seed(device=torch.device("meta")).device.type == "meta"
    other = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ValueError, match="generator: got one on cuda, takes one on cpu"):
        xfused.new_seed("cpu", other)


@pytest.mark.gpu
def test_masks_do_not_depend_on_where_the_seed_lies():
    seed = as_tensor((-5, 2**40))
    on_gpu = xfused.dropout_mask((70, 300), 0.2, seed.cuda())
    assert on_gpu.is_cuda and torch.equal(on_gpu, xfused.dropout_mask((70, 300), 0.2, seed, device="cuda"))
    assert torch.equal(on_gpu.cpu(), REFERENCE.mask((-5, 2**40), 70, 300, 0.2))
    x = torch.ones(70, 300, device="cuda")
    assert torch.equal(xfused.bias_act_dropout(x, p=0.2, seed=seed.cuda()) != 0, on_gpu)
