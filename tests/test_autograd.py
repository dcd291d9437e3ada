"""First and second derivatives in float64, torch.func, checkpointing and torch.compile."""

import oracle
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import xfused
from xfused import bias_act_dropout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
KINKS = torch.tensor([-6.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 6.0], dtype=torch.float64)


def away_from_kinks(*shape):
    """float64 values whose distance to every kink is above what numerical differentiation steps over."""
    x = torch.linspace(-4, 4, torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    near = (x[..., None] - KINKS).abs().amin(-1) < 0.02
    return torch.where(near, x + 0.05, x)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("activation", xfused.activations())
def test_gradcheck_and_gradgradcheck(activation, p):
    x = away_from_kinks(5, 6).requires_grad_()
    bias = torch.full((6,), 1e-3, dtype=torch.float64, requires_grad=True)

    def op(x, bias):
        return bias_act_dropout(x, bias, activation=activation, p=p, seed=3)

    assert gradcheck(op, (x, bias))
    assert gradgradcheck(op, (x, bias))


def test_second_derivatives_without_bias_and_of_the_identity():
    x = away_from_kinks(4, 3).requires_grad_()
    assert gradgradcheck(lambda x: bias_act_dropout(x, activation="tanh", p=0.5, seed=1), (x,))
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda x, bias: bias_act_dropout(x, bias, p=0.5, seed=1), (x, bias))


@on_devices
def test_double_backward_of_fp32_uses_the_same_mask(device):
    x = torch.randn(8, 16, device=device, requires_grad=True)
    keep = oracle.keep((4, 0), 8, 16, 0.5).to(device)
    y = bias_act_dropout(x, activation="tanh", p=0.5, seed=4)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.square().sum(), x)
    z = x.detach().double().requires_grad_()
    (dz,) = torch.autograd.grad((torch.tanh(z) * keep * 2).sum(), z, create_graph=True)
    (ddz,) = torch.autograd.grad(dz.square().sum(), z)
    torch.testing.assert_close(ddx.double(), ddz, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------------- torch.func


def reference(x, bias, keep, activation="silu", scale=2.0):
    return torch.where(keep, oracle.FUNCTIONS[activation](x + bias) * scale, torch.zeros_like(x))


@on_devices
def test_func_grad_and_vjp(device):
    x, bias = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    keep = oracle.keep((2, 0), 4, 8, 0.5).to(device)

    def ours(x, bias):
        return bias_act_dropout(x, bias, activation="silu", p=0.5, seed=2).square().sum()

    def theirs(x, bias):
        return reference(x, bias, keep).square().sum()

    for a, b in zip(torch.func.grad(ours, (0, 1))(x, bias), torch.func.grad(theirs, (0, 1))(x, bias), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    hessian = torch.func.jacrev(torch.func.grad(ours, 1), 1)(x, bias)
    torch.testing.assert_close(hessian, torch.func.jacrev(torch.func.grad(theirs, 1), 1)(x, bias), rtol=1e-3, atol=1e-4)


@on_devices
def test_per_sample_gradients(device):
    x, bias = torch.randn(5, 3, 8, device=device), torch.randn(8, device=device)
    keep = oracle.keep((2, 0), 3, 8, 0.5).to(device)

    def loss(bias, x):
        return bias_act_dropout(x, bias, activation="silu", p=0.5, seed=2).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(bias, x)
    expected = torch.stack([
        torch.func.grad(lambda b, x: reference(x, b, keep).square().sum())(bias, sample) for sample in x
    ])  # fmt: skip
    torch.testing.assert_close(per_sample, expected, rtol=1e-4, atol=1e-4)


@on_devices
def test_vmap_and_its_randomness(device):
    x = torch.ones(6, 16, 32, device=device)

    def op(x):
        return bias_act_dropout(x, p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(op)(x)
    same = torch.func.vmap(op, randomness="same")(x)
    assert all(torch.equal(y, same[0]) for y in same) and 0 < (same[0] != 0).sum() < 512
    different = torch.func.vmap(op, randomness="different")(x)
    for i, y in enumerate(different):
        assert 0 < (y != 0).sum() < 512 and not any(torch.equal(y, other) for other in different[:i])
    seeded = torch.func.vmap(lambda x: bias_act_dropout(x, p=0.5, seed=8))(x)
    keep = oracle.keep((8, 0), 16, 32, 0.5).to(device)
    assert all(torch.equal(y != 0, keep) for y in seeded)
    # over an inner dimension: each slice is an operation of its own
    seeded = torch.func.vmap(lambda x: bias_act_dropout(x, p=0.5, seed=8), in_dims=1, out_dims=1)(x)
    assert all(torch.equal(seeded[:, i] != 0, keep[:6]) for i in range(16))


def test_forward_mode_is_refused_cleanly():
    x = torch.randn(3, 4)
    with pytest.raises(Exception, match=r"(?i)jvp|forward"):
        torch.func.jvp(lambda x: bias_act_dropout(x, activation="silu"), (x,), (x,))


# --------------------------------------------------------------------------------------------------- checkpoint


@on_devices
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_the_same_mask(device, use_reentrant):
    x = torch.ones(32, 64, device=device, requires_grad=True)
    calls = []

    def block(x):
        y = bias_act_dropout(x * 1.0, p=0.5)
        calls.append(y.detach().clone())
        return y * y.detach()  # the gradient shows the recomputed mask beside the backward's

    y = checkpoint(block, x, use_reentrant=use_reentrant)
    torch.rand(3, device=device)
    y.sum().backward()
    assert len(calls) == 2 and torch.equal(*calls)
    assert torch.equal(x.grad, calls[0] * 2)


# ------------------------------------------------------------------------------------------------ torch.compile


def compiled(function, backend, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def _check_compiled(step, x, bias):
    masks = []
    for _ in range(3):
        x.grad = bias.grad = None
        y = step(x, bias)
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)
        torch.testing.assert_close(bias.grad, x.grad.sum(0))
        masks.append(y.detach() != 0)
        assert 0.3 < masks[-1].float().mean() < 0.7
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@on_devices
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_draws_a_fresh_mask_a_call_that_its_backward_shares(device, backend):
    x = torch.rand(32, 64, device=device).add(1).requires_grad_()
    bias = torch.rand(64, device=device).requires_grad_()
    step = compiled(lambda x, bias: bias_act_dropout(x, bias, activation="relu", p=0.5), backend)
    _check_compiled(step, x, bias)


@on_devices
def test_compile_gives_the_mask_of_a_given_seed(device):
    x, bias = torch.randn(9, 20, device=device), torch.randn(20, device=device)
    for seed in (5, torch.tensor([5, 6])):
        step = compiled(
            lambda x, bias, seed=seed: bias_act_dropout(x, bias, activation="gelu", p=0.5, seed=seed), "aot_eager"
        )
        torch.testing.assert_close(step(x, bias), bias_act_dropout(x, bias, activation="gelu", p=0.5, seed=seed))


@on_devices
def test_compile_with_dynamic_shapes_and_origins(device):
    step = compiled(
        lambda x, row: bias_act_dropout(x, activation="relu", p=0.5, seed=7, origin=(row, 3)), "aot_eager", dynamic=True
    )
    for rows, cols, row in ((4, 8, 2), (7, 16, 9), (33, 5, 1)):
        y = step(torch.ones(rows, cols, device=device), row)
        assert torch.equal(y.cpu() != 0, oracle.keep((7, 0), rows, cols, 0.5, (row, 3)))


@on_devices
def test_compiled_checkpoint_shares_one_mask(device):
    def step(x):
        return checkpoint(lambda x: bias_act_dropout(x * 1.0, p=0.5), x, use_reentrant=False)

    x = torch.ones(32, 64, device=device, requires_grad=True)
    y = compiled(step, "aot_eager")(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()) and 0 < (y != 0).sum() < y.numel()


@pytest.mark.parametrize("budget", [0.0, 0.1, 0.5])
def test_the_compiled_backward_never_redraws_under_a_memory_budget(budget):
    """PyTorch's partitioner would draw again, so a draw inside is refused, and a seed from outside is the way."""
    x = torch.rand(32, 64).add(1).requires_grad_()

    def function(x, seed=None):
        return bias_act_dropout(x.sin().cos(), activation="relu", p=0.5, seed=seed).exp()

    with torch._functorch.config.patch(activation_memory_budget=budget):
        with pytest.raises(Exception, match="activation_memory_budget < 1"):
            compiled(function, "aot_eager")(x)
        y = compiled(function, "aot_eager")(x, xfused.new_seed())
        y.sum().backward()
    assert torch.equal(x.grad != 0, y != 1)


def test_compile_of_eval_and_of_modules():
    for module in (xfused.BiasActDropout(8, p=0.5), xfused.FusedMLP(8, dropout=0.5, output_dropout=0.5)):
        x = torch.randn(4, 8)
        step = compiled(module, "aot_eager")
        assert not torch.equal(step(x), step(x))
        module.eval()
        torch.testing.assert_close(step(x), module(x))
        assert torch.equal(step(x), step(x))
