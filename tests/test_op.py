"""The operation as PyTorch sees it: schema, what it saves, how it draws its seeds."""

import oracle
import pytest
import torch
from paths import as_tensor, every_path

import xfused

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def rng_state(device):
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


@on_devices
@pytest.mark.parametrize("activation, parameters", [("identity", []), ("gelu", []), ("elu", [1.5])])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.float64])
def test_opcheck(device, activation, parameters, bias_dtype):
    x, dy = torch.randn(3, 4, 5, device=device), torch.randn(3, 5, 4, device=device).transpose(1, 2)
    bias = None if bias_dtype is None else torch.randn(5, dtype=bias_dtype, device=device)
    seed = as_tensor((5, 6))
    options = (activation, parameters, 0.3, 1, 2)
    torch.library.opcheck(torch.ops.xfused.bias_act_dropout.default, (x, bias, seed, *options))
    saved = None if activation == "identity" else x
    torch.library.opcheck(torch.ops.xfused.bias_act_dropout_backward.default, (dy, saved, bias, seed, *options))
    torch.library.opcheck(torch.ops.xfused.dropout_mask.default, (seed, 12, 5, 0.3, 1, 2, torch.device(device)))


def test_fake_tensors_and_meta_have_the_right_shapes():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(6, 4, 8, dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
        bias = torch.empty(8, requires_grad=True)
        y = xfused.bias_act_dropout(x, bias, activation="gelu", p=0.1)
        assert y.shape == (4, 6, 8) and y.dtype == torch.bfloat16 and y.is_contiguous()
        dx, dbias = torch.autograd.grad(y, (x, bias), y)
        assert dx.shape == x.shape and dx.dtype == x.dtype and dbias.shape == (8,) and dbias.dtype == torch.float32


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", xfused.activations())
def test_saved_are_x_bias_and_seed_and_no_mask(device, activation, dtype):
    if device == "cuda" and activation not in ("identity", "gelu", "relu"):
        pytest.skip("what is saved is the same code")
    x = torch.randn(16, 64, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(64, device=device, dtype=dtype, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = xfused.bias_act_dropout(x, bias, activation=activation, p=0.3)
    big = [t for t in saved if t.numel() >= 64 * 16]
    if activation == "identity":
        assert not big
    else:
        assert len(big) == 1 and big[0].data_ptr() == x.data_ptr() and big[0].dtype == dtype
    small = [t for t in saved if t.numel() < 64 * 16]
    assert all(t.data_ptr() == bias.data_ptr() or (t.shape == (2,) and t.dtype == torch.int64) for t in small)
    assert len(small) == (1 if device == "cuda" else 2)  # a seed drawn on the host of a GPU is two numbers
    y.sum().backward()


@on_devices
def test_the_result_is_a_new_contiguous_tensor_and_inputs_are_untouched(device):
    for activation in ("identity", "relu"):
        x = torch.randn(8, 6, device=device).T
        copy = x.clone()
        y = xfused.bias_act_dropout(x, activation=activation)
        assert y.data_ptr() != x.data_ptr() and y.is_contiguous()
        y.add_(1)
        assert torch.equal(x, copy)
        x = x.clone().requires_grad_()
        dy = torch.ones_like(x)
        (dx,) = torch.autograd.grad(xfused.bias_act_dropout(x, activation=activation), x, dy)
        assert dx.data_ptr() != dy.data_ptr()


@on_devices
def test_no_gradient_is_made_for_what_needs_none(device):
    x = torch.randn(4, 6, device=device)
    bias = torch.randn(6, device=device, requires_grad=True)
    with torch.no_grad():
        assert not xfused.bias_act_dropout(x, bias, activation="relu", p=0.5).requires_grad
    y = xfused.bias_act_dropout(x, bias, activation="relu", p=0.5, seed=2)
    y.sum().backward()
    keep = oracle.keep((2, 0), 4, 6, 0.5).to(device)
    _, _, dbias = oracle.exact("relu", x, bias, torch.ones_like(x), keep=keep, scale=2.0)
    torch.testing.assert_close(bias.grad.double(), dbias)
    x.requires_grad_()
    xfused.bias_act_dropout(x, bias.detach(), activation="relu", p=0.5, seed=2).sum().backward()
    assert x.grad is not None


# -------------------------------------------------------------------------------------------------------- seeds


@on_devices
@pytest.mark.parametrize(
    "arguments",
    [
        {"training": False, "p": 0.5},
        {"p": 0.0},
        {"p": 0},
        {"p": 0.5, "seed": 3},
        {"p": 0.5, "seed": as_tensor((3, 4))},
        {"p": 1.0, "training": False},
    ],
)
def test_eval_p_zero_and_a_given_seed_draw_nothing(device, arguments):
    x = torch.ones(4, 8, device=device, requires_grad=True)
    state = rng_state(device)
    y = xfused.bias_act_dropout(x, **arguments)
    y.sum().backward()
    assert torch.equal(rng_state(device), state)
    if "seed" not in arguments:
        assert torch.equal(y, x)


@on_devices
def test_eval_ignores_the_seed(device):
    x = torch.ones(4, 8, device=device)
    assert torch.equal(xfused.bias_act_dropout(x, p=0.9, seed=1, training=False), x)


@on_devices
def test_manual_seed_repeats_and_calls_differ(device):
    x = torch.ones(32, 64, device=device)

    def masks():
        torch.manual_seed(11)
        return [xfused.bias_act_dropout(x, p=0.5) for _ in range(4)]

    first, again = masks(), masks()
    for i, (a, b) in enumerate(zip(first, again, strict=True)):
        assert torch.equal(a, b)
        assert not any(torch.equal(a, other) for other in first[:i])
    torch.manual_seed(12)
    assert not torch.equal(xfused.bias_act_dropout(x, p=0.5), first[0])


@on_devices
def test_the_state_of_the_generator_and_fork_rng_are_followed(device):
    x = torch.ones(32, 64, device=device)
    get, put = (
        (torch.get_rng_state, torch.set_rng_state)
        if device == "cpu"
        else (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    )
    state = get()
    first = xfused.bias_act_dropout(x, p=0.5)
    second = xfused.bias_act_dropout(x, p=0.5)
    put(state)
    assert torch.equal(xfused.bias_act_dropout(x, p=0.5), first)
    with torch.random.fork_rng():
        xfused.bias_act_dropout(x, p=0.5)
        xfused.bias_act_dropout(x, p=0.5)
    assert torch.equal(xfused.bias_act_dropout(x, p=0.5), second)


@on_devices
def test_forward_and_backward_share_one_mask_that_is_drawn_once(device):
    x = torch.ones(32, 64, device=device, requires_grad=True)
    y = xfused.bias_act_dropout(x, p=0.5)
    state = rng_state(device)
    torch.rand(7, device=device)  # what is drawn in between does not matter
    torch.manual_seed(99)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx != 0, y != 0) and 0 < int((y != 0).sum()) < y.numel()
    torch.manual_seed(99)
    assert not torch.equal(state, rng_state(device))


@every_path
def test_the_mask_of_the_op_is_dropout_mask(path):
    x = torch.ones(3, 9, 20, device=path.device)
    y = path.forward(x, p=0.4, seed=(9, 1), origin=(5, 6))
    mask = xfused.dropout_mask((3, 9, 20), 0.4, as_tensor((9, 1)), origin=(5, 6), device=path.device)
    assert torch.equal(y != 0, mask)
    assert torch.equal(mask.view(27, 20).cpu(), oracle.keep((9, 1), 27, 20, 0.4, (5, 6)))


@on_devices
def test_the_public_op_takes_the_mean_of_nn_dropout(device):
    """E[y] = act(x + bias): over many fresh masks the mean comes within its standard error."""
    x = torch.linspace(0.5, 3, 64, device=device).expand(64, 64)
    mean = torch.stack([xfused.bias_act_dropout(x, activation="silu", p=0.3).double() for _ in range(50)]).mean((0, 1))
    target = torch.nn.functional.silu(x[0].double())
    error = (mean - target) / (target * (0.3 / 0.7 / 3200) ** 0.5)
    assert error.abs().max() < 5


def test_importing_does_not_initialise_cuda_and_needs_no_triton():
    import subprocess
    import sys

    code = """
import sys
sys.modules["triton"] = None
import torch, xfused
assert not torch.cuda.is_initialized()
x = torch.randn(4, 5, requires_grad=True)
y = xfused.bias_act_dropout(x, torch.ones(5), activation="gelu", p=0.5, seed=1)
y.sum().backward()
assert torch.equal(y != 0, xfused.dropout_mask((4, 5), 0.5, 1))
"""
    from pathlib import Path

    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
