"""The kernels' shapes, strides, dtypes, tails and column sums, forward and backward, on each path."""

import oracle
import pytest
import torch
from paths import GPU, INTERPRETER, every_path, kernel_path, sized

from xfused.ops import _launch

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def check(path, x, bias, dy, activation="relu", p=0.25, seed=(17, 4), origin=(0, 0)):
    """Forward, dx and dbias against float64 with the oracle's mask; returns them."""
    rows, n = x[..., 0].numel(), x.shape[-1]
    keep = oracle.keep(seed, rows, n, p, origin).view(x.shape).to(x.device) if p else None
    y, dx, dbias = path.forward_backward(x, bias, dy, activation, p, seed, origin)
    truth = oracle.exact(activation, x, bias, dy, keep=keep, scale=1 / (1 - p))
    eps = torch.finfo(x.dtype).eps
    assert y.shape == dx.shape == x.shape and y.dtype == dx.dtype == x.dtype and y.is_contiguous()
    wide = 1e-6 if path is GPU or x.dtype != F64 else 1e-14
    for ours, true in ((y, truth[0]), (dx, truth[1])):
        # bfloat16 in Triton's interpreter is truncated, not rounded
        torch.testing.assert_close(ours.double(), true, rtol=max(eps, wide), atol=1e-6 if x.dtype != F64 else 1e-13)
        if keep is not None:
            assert (ours[~keep] == 0).all()
    if bias is not None:
        assert dbias.dtype == bias.dtype and dbias.shape == bias.shape
        magnitude = truth[1].abs().reshape(-1, n).sum(0)
        error = (dbias.double() - truth[2]).abs()
        assert (error <= torch.finfo(bias.dtype).eps * truth[2].abs() + 1e-6 * magnitude + 1e-30).all()
    return y, dx, dbias


def randn(*shape, dtype=F32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


SHAPES = [(1, 1), (1, 5), (5, 1), (7, 3), (8, 16), (9, 17), (9, 130), (2, 3, 4, 6), (11,)]
GPU_SHAPES = [(1, 1), (1, 4097), (4099, 1), (7, 3), (8, 16), (255, 127), (257, 129), (1000, 1000), (3, 5, 7, 96),
              (1023, 2049), (8192, 128), (2, 65537), (11,)]  # fmt: skip


@sized("shape", [(s,) for s in SHAPES], [(s,) for s in GPU_SHAPES], [(s,) for s in SHAPES])
def test_shapes(path, shape):
    x = randn(*shape, device=path.device)
    check(path, x, randn(shape[-1], device=path.device, seed=1), randn(*shape, device=path.device, seed=2))


@sized("shape", [((9, 40),)], [((300, 264),)], [((9, 40),)])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("bias_dtype", [F32, BF16, F16, None])
def test_dtypes_of_x_and_bias(path, shape, dtype, bias_dtype):
    bias = None if bias_dtype is None else randn(shape[-1], dtype=bias_dtype, device=path.device, seed=1)
    x, dy = (randn(*shape, dtype=dtype, device=path.device, seed=seed) for seed in (0, 2))
    check(path, x, bias, dy)


@every_path
@pytest.mark.parametrize("bias_dtype", [F32, F64, BF16])
def test_float64_takes_the_torch_path_and_a_float64_bias_is_taken(path, bias_dtype):
    if path is INTERPRETER:
        pytest.skip("float64 has no kernel")
    x, dy = (randn(9, 20, device=path.device, dtype=F64, seed=seed) for seed in (0, 2))
    check(path, x, randn(20, device=path.device, seed=1, dtype=bias_dtype), dy, "silu")
    check(path, x.float(), randn(20, device=path.device, seed=1, dtype=F64), dy.float(), "relu")


@every_path
@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_without_dropout_and_without_bias(path, activation, p):
    x, dy = (randn(10, 24, device=path.device, seed=seed) for seed in (0, 2))
    if p == 1.0:
        y, dx, dbias = path.forward_backward(x, randn(24, device=path.device), dy, activation, p)
        assert not y.any() and not dx.any() and not dbias.any()
        return
    check(path, x, None, dy, activation, p)
    y, dx, _ = check(path, x, randn(24, device=path.device), dy, activation, p)
    if activation == "identity":
        assert torch.equal(dx, dy)


VIEWS = {
    "transposed": lambda t: t(24, 16).T,
    "columns sliced": lambda t: t(16, 50)[:, 7:31],
    "every other column": lambda t: t(16, 48)[:, ::2],
    "every other row": lambda t: t(32, 24)[::2],
    "expanded rows": lambda t: t(1, 24).expand(16, 24),
    "expanded columns": lambda t: t(16, 1).expand(16, 24),
    "scalar expanded": lambda t: t(1).expand(16, 24),
    "batch permuted": lambda t: t(4, 4, 24).transpose(0, 1),
    "offset by one element": lambda t: t(16 * 24 + 1)[1:].view(16, 24),
    "last dimension outermost": lambda t: t(24, 2, 8).permute(1, 2, 0),
}


@every_path
@pytest.mark.parametrize("dy_view", [*VIEWS])
def test_strides_of_the_gradient(path, dy_view):
    dy = VIEWS[dy_view](lambda *s: randn(*s, device=path.device, seed=2))
    check(path, randn(*dy.shape, device=path.device), randn(24, device=path.device, seed=1), dy)


@every_path
@pytest.mark.parametrize("x_view", [*VIEWS])
def test_strides_of_x(path, x_view):
    x = VIEWS[x_view](lambda *s: randn(*s, device=path.device))
    check(path, x, randn(48, device=path.device, seed=1)[::2], randn(*x.shape, device=path.device, seed=2))


def test_the_gradient_of_a_sum_is_expanded_and_right():
    x = randn(6, 10).requires_grad_()
    bias = randn(10, seed=1).requires_grad_()
    from xfused import bias_act_dropout

    bias_act_dropout(x, bias, activation="tanh", p=0.5, seed=3).sum().backward()
    keep = oracle.keep((3, 0), 6, 10, 0.5)
    _, dx, dbias = oracle.exact("tanh", x, bias, torch.ones(6, 10), keep=keep, scale=2.0)
    torch.testing.assert_close(x.grad.double(), dx, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bias.grad.double(), dbias, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------- tails and origins


@kernel_path
@pytest.mark.parametrize("skip", range(8))
def test_any_first_row_of_a_group(path, skip):
    x, dy = (randn(13, 10, device=path.device, seed=seed) for seed in (0, 2))
    check(path, x, randn(10, device=path.device, seed=1), dy, origin=(8 * 5 + skip, 3))


@kernel_path
@pytest.mark.parametrize("m, n, skip", [(5, 3, 6), (9, 20, 1), (3, 129, 7)])
def test_nothing_outside_the_tensors_is_read_or_written(path, m, n, skip):
    """Tensors inside larger buffers of NaN: an unmasked load shows in the sums, an unmasked store in the frame."""

    def framed(*shape):
        buffer = torch.full((torch.Size(shape).numel() + 4096,), torch.nan, device=path.device)
        view = buffer[2048 : 2048 + torch.Size(shape).numel()].view(shape)
        view.copy_(randn(*shape))
        return view

    x, dy, bias = framed(m, n), framed(m, n), framed(n)
    check(path, x, bias, dy, "silu", origin=(skip, 1))


@kernel_path
def test_outputs_are_written_inside_their_bounds_and_everywhere(path, monkeypatch):
    """Every tensor that the launchers allocate is cut from a larger buffer of sevens."""
    real, frames = torch.empty, []

    def framed(*shape, **kwargs):
        size = torch.Size(shape[0] if isinstance(shape[0], (tuple, list, torch.Size)) else shape)
        buffer = real(size.numel() + 2048, **kwargs).fill_(7)
        frames.append((buffer, size.numel()))
        return buffer[1024 : 1024 + size.numel()].view(size)

    def framed_like(like, **_):
        return framed(like.shape, dtype=like.dtype, device=like.device)

    x, dy = (randn(21, 35, device=path.device, seed=seed) for seed in (0, 2))
    bias = randn(35, device=path.device, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", framed)
        patch.setattr(torch, "empty_like", framed_like)
        y, dx, dbias = path.forward_backward(x, bias, dy, "relu", 0.25, (17, 4), (3, 0))
    assert len(frames) >= 3  # and the partial sums, where they are not in a workspace that stays
    for buffer, size in frames:
        assert (buffer[:1024] == 7).all() and (buffer[1024 + size :] == 7).all()
    keep = oracle.keep((17, 4), 21, 35, 0.25, (3, 0)).to(path.device)
    for ours, true in zip((y, dx, dbias), oracle.exact("relu", x, bias, dy, keep=keep, scale=4 / 3), strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-5)


@kernel_path
def test_rows_outside_add_nothing_where_the_derivative_is_not_finite(path):
    """bias = inf makes act'(0 + bias) NaN in the padding of a tile; its column sum must not see it."""
    x = torch.full((3, 4), -torch.inf, device=path.device)
    x[:, 1:] = 1.0
    bias = torch.tensor([0.0, 1.0, torch.inf, torch.nan], device=path.device)
    dy = torch.ones(3, 4, device=path.device)
    _, dx, dbias = path.forward_backward(x, bias, dy, "relu")
    assert torch.equal(dbias[:3], dx.sum(0)[:3]) and dbias[1] == 3
    _, dx, dbias = path.forward_backward(x, torch.full_like(bias, torch.inf), dy, "silu", 0.999, (1, 1))
    dropped = ~oracle.keep((1, 1), 3, 4, 0.999).to(path.device)
    assert dropped.all() and not dx.any() and not dbias.any()


# ---------------------------------------------------------------------------------------------- the column sum

# splits are 256 rows, more below 16 columns; the last has more of them than are added at once
SUMS = [((257, 17), 0), ((530, 20), 0), ((600, 17), 5), ((256, 24), 1), ((4100, 32), 0)]
GPU_SUMS = [*SUMS, ((8192, 1000), 0), ((4097, 130), 3), ((100_000, 16), 0), ((70_001, 33), 7), ((12_289, 4096), 0)]


@sized("shape, skip", SUMS, GPU_SUMS, SUMS)
def test_the_column_sum_over_several_splits(path, shape, skip):
    x, dy = (randn(*shape, device=path.device, seed=seed) for seed in (0, 2))
    dy += torch.arange(shape[1], device=path.device)  # no cancellation in the sum: losing a split cannot hide
    check(path, x, randn(shape[1], device=path.device, seed=1), dy, origin=(skip, 0))


@sized("m", [700], [20_000])
def test_every_row_counts_once_in_the_column_sum(path, m):
    """Powers of two in one column each: the sum names the rows it holds."""
    rows = torch.arange(m, device=path.device)
    dy = torch.stack([((rows >> bit) & 1).float() for bit in range(16)], 1)
    _, _, dbias = path.forward_backward(torch.zeros_like(dy), torch.zeros(16, device=path.device), dy, "identity")
    assert torch.equal(dbias.cpu(), dy.sum(0).cpu())


@sized("shape", [((600, 20),)], [((20_000, 264),), ((8192, 4096),)])
def test_column_sums_have_the_same_bits_on_every_run(path, shape):
    x, dy = (randn(*shape, device=path.device, seed=seed) for seed in (0, 2))
    bias = randn(shape[1], device=path.device, seed=1)
    first = path.forward_backward(x, bias, dy, "relu", 0.25, (1, 1))[2]
    for _ in range(2 if path is INTERPRETER else 20):
        assert torch.equal(path.forward_backward(x, bias, dy, "relu", 0.25, (1, 1))[2], first)


@sized("dtype, m", [(BF16, 600), (F16, 600)], [(BF16, 30_000), (F16, 30_000)], [(BF16, 600), (F16, 600)])
def test_column_sums_of_16_bits_accumulate_in_fp32(path, dtype, m):
    """A running sum of ones in bfloat16 stops at 256, in float16 at 2048; dx is summed before it is rounded."""
    dy = torch.ones(m, 33, dtype=dtype, device=path.device)
    bias = torch.zeros(33, dtype=F32, device=path.device)
    _, _, dbias = path.forward_backward(dy, bias, dy, "identity")
    assert torch.equal(dbias, torch.full_like(dbias, m))
    _, dx, dbias = path.forward_backward(dy, bias, dy, "identity", 0.1, (1, 1))
    kept = (dx != 0).sum(0)
    torch.testing.assert_close(dbias.double(), kept.double() / 0.9, rtol=1e-6, atol=0)


def test_the_counters_are_left_at_zero(monkeypatch):
    if GPU.device.type == "cuda":
        pytest.skip("looks at the interpreter's counters; test_gpu.py looks at the GPU's")
    given = []
    real = _launch.workspace

    def workspace(blocks, partials, device):
        counters, room = real(blocks, partials, device)
        given.append(counters)
        return counters, room

    from xfused.ops import bias_act_dropout

    monkeypatch.setattr(bias_act_dropout, "workspace", workspace)
    x = randn(260, 130)  # two column blocks, two splits
    INTERPRETER.forward_backward(x, randn(130), x, "identity")
    (counter,) = given
    assert counter.dtype == torch.int32 and len(counter) == 2 and not counter.any()


@every_path
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (3, 0, 4), (0,)])
def test_empty_tensors_give_empty_results_and_zero_bias_gradients(path, shape):
    if path is INTERPRETER:
        pytest.skip("the public op launches nothing for empty tensors")
    x = torch.empty(shape, device=path.device)
    bias = torch.ones(shape[-1], device=path.device)
    for p in (0.0, 0.5, 1.0):
        y, dx, dbias = path.forward_backward(x, bias, x, "gelu", p)
        assert y.shape == dx.shape == shape and torch.equal(dbias, torch.zeros_like(bias))
