"""What other fused dropout kernels got wrong (DESIGN, section 7), each a test that fails if it is made again.

Mistakes that are tested elsewhere too: seeds with their high bits set in test_philox.py, a module's bias that is no
Parameter in test_modules.py.
"""

import numpy as np
import oracle
import pytest
import torch
import triton
from paths import INTERPRETER, MARKS, Public, as_tensor, every_path, kernel_path, sized

import xfused
from xfused._triton import has_ptx
from xfused.activations import TABLE
from xfused.kernels.bias_act_dropout import backward_kernel, forward_kernel, mask_kernel

SIGMAS = 5.5  # of the binomial counts below: one false alarm in 26 million


def within(count, n, p):
    """Whether a binomial count is within `SIGMAS` standard deviations, and at most half a unit for rounding."""
    return abs(count - n * p) <= SIGMAS * (n * p * (1 - p)) ** 0.5 + 0.5


@every_path
@pytest.mark.parametrize("p", [0.5, 0.1])
def test_the_mask_does_not_repeat_after_any_number_of_rows(path, p):
    rows, cols = (256, 64) if path is INTERPRETER else (600, 128)
    mask = path.mask((21, 4), rows, cols, p)
    for lag in range(1, rows - 8):
        same = int((mask[lag:] == mask[:-lag]).sum())
        assert within(same, (rows - lag) * cols, p * p + (1 - p) ** 2), f"rows {lag} apart"


@every_path
def test_counter_windows_of_columns_do_not_overlap(path):
    """No column's stream is another's, shifted by any number of rows."""
    rows, cols = (192, 32) if path is INTERPRETER else (512, 64)
    mask = path.mask((5, 0), rows, cols, 0.5).double().cpu() - 0.5
    spectrum = torch.fft.rfft(mask, 2 * rows, dim=0)
    for lag in range(1, cols):  # the correlation of all columns that far apart, at all shifts at once
        shifted = torch.fft.irfft(spectrum[:, lag:] * spectrum[:, :-lag].conj(), dim=0)
        assert shifted.abs().max() < 7 * 0.25 * rows**0.5, f"columns {lag} apart"


PROBABILITIES = [1e-3, 0.1, 0.3, 0.5, 0.5 + 1e-9, 0.7, 0.9, 0.999]


@every_path
@pytest.mark.parametrize("p", PROBABILITIES)
def test_the_threshold_is_unsigned_at_every_p_forward_and_backward(path, p):
    rows, cols = (32, 64) if path is INTERPRETER else (512, 1024)
    x = torch.ones(rows, cols, device=path.device)
    y, dx, _ = path.forward_backward(x, None, x, p=p, seed=(1234, 1))
    for out in (y, dx):
        assert within(int((out == 0).sum()), x.numel(), p)
        assert torch.equal(out.cpu() != 0, oracle.keep((1234, 1), rows, cols, p))
        assert torch.equal(out[out != 0], torch.full_like(out[out != 0], 1 / (1 - p)))


@every_path
def test_p_keeps_more_than_eight_bits_and_the_mean_is_preserved(path):
    """p = 0.1 in 8 bits drops 9.77%; the mean is then off by 0.26%."""
    rows, cols = (128, 128) if path is INTERPRETER else (2048, 2048)
    x = torch.ones(rows, cols, device=path.device)
    y = path.forward(x, p=0.1, seed=(99, 0))
    assert within(int((y == 0).sum()), x.numel(), 0.1)
    assert abs(float(y.double().mean()) - 1) < SIGMAS * (0.1 / 0.9 / x.numel()) ** 0.5
    # 24 and 32 bits of p differ: only the finest threshold tells this draw from its neighbour
    draw = int(oracle.draws_at(99, 0, [5], [7])[0, 0])
    for step in (0, 1):
        assert bool(path.mask((99, 0), 8, 8, (draw + step) / 2**32)[5, 7]) == (step == 0)


@every_path
@pytest.mark.parametrize("word", ["key", "offset"])
def test_the_next_seed_is_not_this_one_shifted(path, word):
    rows, cols, reach = 64, 64, 9
    mask = path.mask((1000, 50), rows, cols, 0.5)
    after = path.mask((1001, 50) if word == "key" else (1000, 51), rows, cols, 0.5)
    inner = mask[reach:-reach, reach:-reach]
    for dr in range(-reach, reach + 1):
        for dc in range(-reach, reach + 1):
            window = after[reach + dr : rows - reach + dr, reach + dc : cols - reach + dc]
            assert within(int((window == inner).sum()), inner.numel(), 0.5), f"shifted by {dr}, {dc}"


@every_path
def test_the_seed_is_its_value_and_not_its_address(path):
    x = torch.ones(16, 64, device=path.device)
    buffer = as_tensor((1, 0)).to(path.device)
    call = path.forward if path is INTERPRETER else None

    def mask(seed):
        if call is not None:
            return call(x, p=0.5, seed=seed.tolist()) != 0
        return xfused.bias_act_dropout(x, p=0.5, seed=seed) != 0

    first = mask(buffer)
    assert torch.equal(mask(buffer.clone()), first)
    buffer += 1  # another value at the same address
    assert not torch.equal(mask(buffer), first)
    assert torch.equal(mask(buffer).cpu(), oracle.keep((2, 1), 16, 64, 0.5))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_generator_advances_between_calls(device):
    x = torch.ones(64, 64, device=device)
    masks = [xfused.bias_act_dropout(x, p=0.5) != 0 for _ in range(8)]
    seeds = [tuple(xfused.new_seed(device).tolist()) for _ in range(32)]
    assert len(set(seeds)) == len(seeds)
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert within(int((mask == other).sum()), mask.numel(), 0.5)


@every_path
def test_no_two_columns_or_row_groups_share_their_bits(path):
    """With seeds of 16 bits a tile or a column, 4096 columns would hold about 128 pairs of equal ones."""
    rows, cols = (64, 256) if path is INTERPRETER else (64, 4096)
    mask = path.mask((8, 15), rows, cols, 0.5).cpu().numpy()
    assert len(np.unique(np.packbits(mask, axis=0), axis=1).T) == cols
    rows, cols = (256, 64) if path is INTERPRETER else (4096, 64)
    mask = path.mask((8, 15), rows, cols, 0.5).cpu().numpy()
    assert len(np.unique(np.packbits(mask, axis=1), axis=0)) == rows


@pytest.mark.gpu
def test_seeds_of_many_calls_do_not_collide_on_the_gpu():
    seeds = {tuple(xfused.new_seed("cuda").tolist()) for _ in range(20_000)}
    assert len(seeds) == 20_000
    keys = []
    for seed in range(2000):
        torch.cuda.manual_seed(seed)
        keys.append(xfused.new_seed("cuda")[0].item())
    bits = np.array(keys, dtype=np.int64).view(np.uint64)[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < SIGMAS * 0.5 / 2000**0.5  # all 64 bits of the key are used
    assert not set(keys) & set(range(2000))  # PyTorch's own kernels use the plain seed as key


# -------------------------------------------------------------------------------- the mask and the tile's shape

TILES = [(1, 32), (2, 16), (4, 8)]
GPU_TILES = [(1, 256), (4, 128), (16, 16)]


def _grid_args(m, n, origin, seed, p, block_g, block_n):
    groups = -(-(origin[0] % 8 + m) // 8)
    blocks_n = -(-n // block_n)
    words = dict(zip(("key", "offset"), as_tensor(seed).tolist(), strict=True))
    place = {"group0": origin[0] // 8, "col0": origin[1], "skip": origin[0] % 8}
    sizes = {"m": m, "n": n, "blocks_n": blocks_n, "BLOCK_G": block_g, "BLOCK_N": block_n}
    args = {"seed_ptr": None, **words, "last_dropped": oracle.threshold(p) - 1, **place, **sizes}
    return groups, blocks_n, args


@sized("block_g, block_n", TILES, TILES[:1] + GPU_TILES)
def test_the_mask_does_not_depend_on_the_block_size(path, block_g, block_n):
    m, n, origin, seed, p = 21, 37, (2**33 + 5, 2**31 - 40), (-7, 2**45 + 3), 0.3
    expected = oracle.keep(seed, m, n, p, origin)
    x = torch.ones(m, n, device=path.device)
    groups, blocks_n, args = _grid_args(m, n, origin, seed, p, block_g, block_n)
    args |= {"scale": 1 / (1 - p), "a": 0.0, "b": 0.0, "DROPOUT": True, "FAST": 0, "PTX": has_ptx(x.device)}
    tiles = -(-groups // block_g)
    args |= {"WHOLE": False, "STAGES": 1, "ALIGN": 1, "bias_ptr": None, "tiles": tiles}
    grid = (blocks_n * tiles,)

    def launch(kernel, grid, **tensors):
        kernel[grid](**{name: value for name, value in {**args, **tensors}.items() if name in kernel.arg_names})

    keep = torch.full((m, n), 7, dtype=torch.uint8, device=path.device)
    launch(mask_kernel, grid, keep_ptr=keep)
    assert torch.equal(keep.cpu(), expected.to(torch.uint8))

    act = TABLE["identity"].kernel
    for splits in (tiles, -(-tiles // 2)):
        y = torch.full_like(x, 7)
        launch(forward_kernel, (blocks_n * splits,), x_ptr=x, y_ptr=y, splits=splits, stride_x=n, ACT=act)
        assert torch.equal(y.cpu(), expected * torch.tensor(1 / (1 - p)))

    for splits in (tiles, -(-tiles // 2)):
        dx, dbias = torch.full_like(x, 7), torch.full((n,), 7.0, device=path.device)
        partial = torch.full((splits, n), torch.nan, device=path.device)
        arrived = torch.zeros(blocks_n, dtype=torch.int32, device=path.device)
        launch(
            backward_kernel,
            (blocks_n * splits,),
            dy_ptr=x,
            x_ptr=None,
            dx_ptr=dx,
            dbias_ptr=dbias,
            partial_ptr=partial,
            arrived_ptr=arrived,
            splits=splits,
            stride_dy=n,
            stride_x=0,
            ACT=TABLE["identity"].kernel_backward,
        )
        assert torch.equal(dx.cpu(), expected * torch.tensor(1 / (1 - p)))
        torch.testing.assert_close(dbias.cpu().double(), expected.double().sum(0) / (1 - p), rtol=1e-6, atol=0)
        assert not arrived.any()


@kernel_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mask_does_not_depend_on_the_dtype(path, dtype):
    for shape in ((17, 40), (9, 300)):
        x = torch.ones(shape, dtype=dtype, device=path.device)
        y, dx, _ = path.forward_backward(x, None, x, p=0.1, seed=(3, 3))
        expected = oracle.keep((3, 3), *shape, 0.1)
        assert torch.equal(y.cpu() != 0, expected) and torch.equal(dx.cpu() != 0, expected)


@every_path
def test_the_mask_does_not_depend_on_strides_and_they_do_not_spoil_the_gradient(path):
    """The gradient with regard to a non-contiguous input, from an expanded, transposed or sliced dy."""
    base = torch.linspace(-3, 3, 40 * 24, device=path.device).view(40, 24)
    bias = torch.linspace(-1, 1, 20, device=path.device)
    x = base[:20:2, :20]
    keep = oracle.keep((4, 4), 10, 20, 0.25).to(path.device)
    for dy in (
        x.new_tensor(1.5).expand(10, 20),
        base[20:, :10].T,
        base[3:13, 1:21],
        torch.arange(20.0).to(x).expand(10, 20),
    ):
        y, dx, dbias = path.forward_backward(x, bias, dy, "silu", 0.25, (4, 4))
        expected = oracle.exact("silu", x, bias, dy, keep=keep, scale=1 / 0.75)
        for ours, truth in zip((y, dx, dbias), expected, strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=2e-6, atol=1e-6)


def test_triton_versions_agree_on_what_a_path_is():
    """The interpreter path really runs kernels: else half of this file would test torch against torch."""
    assert type(INTERPRETER).mask is not Public.mask
    if MARKS[INTERPRETER].args[0] is False:
        assert type(forward_kernel) is not triton.runtime.JITFunction
