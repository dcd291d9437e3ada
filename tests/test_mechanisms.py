"""Every mechanism of PyTorch that a training loop relies on, proven by the mask: eager mode, autograd, torch.func.

The mask is read from the output and from the gradient; both must be what the contract gives for the seed of the call.
test_mechanisms_rng.py does the same for generators and threads, test_mechanisms_compile.py under torch.compile,
checkpoints and export, test_mechanisms_gpu.py where only a GPU will do.
"""

import pytest
import torch
from torch import nn

import xfused
from xfused import BiasActDropout, FusedMLP, bias_act_dropout, philox

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
P = 0.4


@pytest.fixture
def drawn(monkeypatch):
    """The seeds that are drawn from here on, in order."""
    seeds, draw, draw_words = [], philox.draw_seed, philox.draw_seed_words

    def record(device, generator=None):
        seed = draw(device, generator)
        if device.type != "cuda":  # there it goes by the words
            seeds.append(seed)
        return seed

    def record_words(*args, **kwargs):
        words = draw_words(*args, **kwargs)
        seeds.append(torch.tensor(words) if isinstance(words, tuple) else words)
        return words

    monkeypatch.setattr(philox, "draw_seed", record)
    monkeypatch.setattr(philox, "draw_seed_words", record_words)
    return seeds


def leaves(device, shape=(3, 8, 40)):
    """x and bias above 0, so that relu passes them on and what is 0 in y was dropped."""
    x = torch.rand(shape, device=device).add(0.5).requires_grad_()
    return x, torch.rand(shape[-1], device=device).requires_grad_()


def call(x, bias, **options):
    return bias_act_dropout(x, bias, activation="relu", p=P, **options)


def assert_mask(seed, *tensors, p=P):
    """All tensors are nonzero where the contract keeps with this seed, and nowhere else."""
    keep = xfused.dropout_mask(tensors[0].shape, p, seed, device=tensors[0].device)
    assert 0 < keep.sum() < keep.numel()
    for tensor in tensors:
        assert torch.equal(tensor != 0, keep)


def assert_step(seed, x, bias, y, dx, dbias, dy=None):
    """Forward, backward and column sum of `call` used the mask of this seed."""
    assert_mask(seed, y, dx)
    keep = xfused.dropout_mask(x.shape, P, seed, device=x.device)
    dy = torch.ones_like(x) if dy is None else dy
    want = torch.where(keep, dy / (1 - P), 0.0)
    torch.testing.assert_close(y, torch.where(keep, (x + bias) / (1 - P), 0.0))
    torch.testing.assert_close(dx, want)
    torch.testing.assert_close(dbias, want.flatten(0, -2).sum(0), rtol=1e-5, atol=1e-5)


def distinct(masks):
    return not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def rng_state(device):
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


def set_rng_state(device, state):
    torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state)


class Masks:
    """Reads the masks of a FusedMLP: `hidden` and `output`, each as (value, gradient)."""

    def __init__(self, mlp):
        self.mlp, self.kept = mlp, {}
        mlp.fc1.register_forward_hook(lambda _, __, out: self.keep("hidden gradient", out))
        mlp.fc2.register_forward_pre_hook(lambda _, args: self.keep("hidden", args[0]))
        mlp.fc2.register_forward_hook(lambda _, __, out: self.keep("output gradient", out))

    def keep(self, name, tensor):
        if tensor.requires_grad:
            tensor.retain_grad()
        self.kept[name] = tensor

    def check(self, seeds, y):
        hidden, before = self.kept["hidden"], self.kept["hidden gradient"]
        assert_mask(seeds[0], hidden, p=self.mlp.dropout)
        # a sum of a few 16-bit weights, as this gradient is, may cancel exactly
        kept = hidden != 0
        assert not before.grad[~kept].any() and (before.grad[kept] == 0).double().mean() < 1e-2
        if self.mlp.output_dropout:
            assert_mask(seeds[1], y, self.kept["output gradient"].grad, p=self.mlp.output_dropout)


# -------------------------------------------------------------------------------------------------------- eager


@on_devices
def test_eager(device, drawn):
    x, bias = leaves(device)
    dy = torch.rand_like(x).add(0.5)
    masks = []
    for _ in range(3):
        y = call(x, bias)
        assert_step(drawn[-1], x, bias, y, *torch.autograd.grad(y, (x, bias), dy), dy)
        masks.append(y != 0)
    assert len(drawn) == 3 and distinct(masks)
    call(x, bias, seed=5), call(x, bias, training=False)
    assert len(drawn) == 3


@on_devices
@pytest.mark.parametrize("output_dropout", [0.0, 0.3])
def test_modules(device, drawn, output_dropout):
    mlp = FusedMLP(6, 40, 24, activation="gelu", dropout=P, output_dropout=output_dropout).to(device)
    masks = Masks(mlp)
    y = mlp(torch.randn(5, 7, 6, device=device))
    y.backward(torch.rand_like(y).add(0.5))
    masks.check(drawn, y)
    assert len(drawn) == (2 if output_dropout else 1)
    module, (x, _) = BiasActDropout(40, "relu", p=P).to(device), leaves(device)
    y = module(x)
    y.backward(torch.ones_like(y))
    assert_step(drawn[-1], x, module.bias, y, x.grad, module.bias.grad)


@on_devices
def test_no_two_calls_share_a_mask(device, drawn):
    """Also not in part: of two masks, p * p + (1 - p)**2 agree."""
    x, bias = leaves(device, (64, 64))
    masks = torch.stack([call(x, bias).detach() != 0 for _ in range(40)]).flatten(1).double()
    assert len({tuple(seed.tolist()) for seed in drawn}) == 40
    agree = (masks @ masks.T + (1 - masks) @ (1 - masks).T) / masks.shape[1]
    chance = P * P + (1 - P) ** 2
    deviation = (chance * (1 - chance) / masks.shape[1]) ** 0.5
    assert (agree - chance)[~torch.eye(40, dtype=bool)].abs().max() < 5.5 * deviation


@on_devices
def test_a_graph_that_is_kept_has_one_mask(device, drawn):
    x, bias = leaves(device)
    y = call(x, bias)
    for _ in range(2):
        call(x, bias)  # moves the generator on
        assert_step(drawn[0], x, bias, y, *torch.autograd.grad(y, (x, bias), torch.ones_like(y), retain_graph=True))


@on_devices
def test_gradient_accumulation(device, drawn):
    """One backward through three calls, then three with a backward each: gradients add up, each under its mask."""
    x, bias = leaves(device)
    ys = [call(x, bias) for _ in range(3)]
    sum(ys).backward(torch.ones_like(x))
    for _ in range(3):
        y = call(x, bias)
        y.backward(torch.ones_like(x))
        ys.append(y)
    for seed, y in zip(drawn, ys, strict=True):
        assert_mask(seed, y)
    keeps = torch.stack([xfused.dropout_mask(x.shape, P, seed, device=x.device) for seed in drawn])
    want = keeps.sum(0) / (1 - P)
    torch.testing.assert_close(x.grad, want)
    torch.testing.assert_close(bias.grad, want.flatten(0, -2).sum(0), rtol=1e-5, atol=1e-5)
    assert distinct(keeps)


@on_devices
def test_backwards_in_another_order_than_the_forwards(device, drawn):
    x, bias = leaves(device)
    ys = [call(x, bias) for _ in range(3)]
    for i in (1, 2, 0):
        assert_step(drawn[i], x, bias, ys[i], *torch.autograd.grad(ys[i], (x, bias), torch.ones_like(x)))


@on_devices
@pytest.mark.parametrize("where", ["the CPU", "the device"])
def test_a_seed_that_is_changed_between_forward_and_backward_is_no_other_mask(device, where):
    """The backward either has the forward's mask or is refused, as PyTorch refuses what was saved and then changed."""
    seed = torch.tensor([4, 7], device="cpu" if where == "the CPU" else device)
    x, bias = leaves(device)
    y = call(x, bias, seed=seed)
    seed += 1
    try:
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert torch.equal(dx != 0, y != 0)


@on_devices
def test_double_backward(device, drawn):
    """The mask is in y, in its gradient, and in that gradient's gradient."""
    x, bias = leaves(device)
    y = bias_act_dropout(x, bias, activation="tanh", p=P)
    bias_act_dropout(x, bias, activation="tanh", p=P)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    ddx, ddbias = torch.autograd.grad(dx, (x, bias), torch.ones_like(dx))
    assert_mask(drawn[0], y, dx, ddx)
    torch.testing.assert_close(ddbias, ddx.flatten(0, -2).sum(0), rtol=1e-4, atol=1e-5)
    assert len(drawn) == 2


@on_devices
def test_deterministic_algorithms(device, drawn):
    torch.use_deterministic_algorithms(True)
    x, bias = leaves(device, (600, 40))
    y = call(x, bias)
    dy = torch.rand_like(y).add(0.5)
    grads = torch.autograd.grad(y, (x, bias), dy, retain_graph=True)
    assert_step(drawn[0], x, bias, y, *grads, dy)
    for again in (torch.autograd.grad(y, (x, bias), dy, retain_graph=True) for _ in range(3)):
        assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))


# ----------------------------------------------------------------------------------------------------- autocast


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("output_dropout", [0.0, 0.3])
def test_autocast(device, drawn, dtype, output_dropout):
    """fp32 parameters: dtypes as torch.nn gives them, gradients in the parameters' dtype."""
    mlp = FusedMLP(6, 40, 24, activation="gelu", dropout=P, output_dropout=output_dropout).to(device)
    plain = nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Dropout(P), nn.Linear(40, 24), nn.Dropout(output_dropout))
    plain.to(device)
    masks = Masks(mlp)
    x = torch.randn(5, 7, 6, device=device).requires_grad_()
    with torch.autocast(device, dtype):
        y = mlp(x)
        assert y.dtype == plain(x).dtype == dtype
        assert masks.kept["hidden"].dtype == plain[:2](x).dtype == dtype
        tail = BiasActDropout(40, "gelu", p=0.0).to(device)
        for u in (masks.kept["hidden"].detach(), masks.kept["hidden"].detach().float()):
            assert tail(u).dtype == nn.functional.gelu(u).dtype == u.dtype
    y.backward(torch.rand_like(y).add(0.5))
    masks.check(drawn, y)
    assert x.grad.dtype == torch.float32
    for name, parameter in mlp.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name


@on_devices
def test_a_grad_scaler_trains(device, drawn):
    """fp16 with loss scaling: the masks of backward and forward are one, and a step is taken."""
    mlp = FusedMLP(6, 40, 24, activation="gelu", dropout=P).to(device)
    masks, before = Masks(mlp), mlp.fc1.weight.detach().clone()
    scaler, optimiser = torch.amp.GradScaler(device, init_scale=1024.0), torch.optim.SGD(mlp.parameters(), lr=0.1)
    with torch.autocast(device, torch.float16):
        y = mlp(torch.randn(5, 7, 6, device=device))
    scaler.scale(y.float().square().mean()).backward()
    masks.check(drawn, y)
    scaler.step(optimiser)
    scaler.update()
    assert mlp.fc1.weight.isfinite().all() and not torch.equal(mlp.fc1.weight, before)


# ---------------------------------------------------------------------------------------------------- torch.func


@on_devices
def test_func_grad(device, drawn):
    x, bias = (leaf.detach() for leaf in leaves(device))

    def loss(x, bias):
        y = call(x, bias)
        return y.sum(), y

    masks = []
    for _ in range(2):
        (dx, dbias), y = torch.func.grad(loss, (0, 1), has_aux=True)(x, bias)
        assert_step(drawn[-1], x, bias, y, dx, dbias)
        masks.append(y != 0)
    assert len(drawn) == 2 and distinct(masks)


def seeded(x, bias):
    """loss, (y, seed): the seed is drawn inside of what is transformed."""
    seed = xfused.new_seed(x.device)
    y = call(x, bias, seed=seed)
    return y.sum(), (y, seed)


@on_devices
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap(device, randomness):
    """Per-sample gradients: each example's gradient has the mask of its own output."""
    x, bias = (leaf.detach() for leaf in leaves(device, (4, 2, 8, 40)))
    grad = torch.func.grad(seeded, (0, 1), has_aux=True)
    (dx, dbias), (y, seeds) = torch.func.vmap(grad, in_dims=(0, None), randomness=randomness)(x, bias)
    for i in range(4):
        assert_step(seeds[i].cpu(), x[i], bias, y[i], dx[i], dbias[i])
    if randomness == "same":
        assert all(torch.equal(mask, y[0] != 0) for mask in y != 0)
    else:
        assert distinct(y != 0)


@on_devices
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_without_a_seed(device, randomness):
    x, bias = (leaf.detach() for leaf in leaves(device, (4, 2, 8, 40)))

    def loss(x, bias):
        y = call(x, bias)
        return y.sum(), y

    grad = torch.func.vmap(torch.func.grad(loss, has_aux=True), in_dims=(0, None), randomness=randomness)
    for _ in range(2):
        dx, y = grad(x, bias)
        assert torch.equal(dx != 0, y != 0) and 0.4 < (y != 0).double().mean() < 0.8
        assert distinct(y != 0) == (randomness == "different")
    assert not torch.equal(grad(x, bias)[1] != 0, y != 0)


@on_devices
def test_vmap_refuses_a_draw_unless_told_which(device):
    x, bias = (leaf.detach() for leaf in leaves(device, (4, 8, 40)))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call, in_dims=(0, None), randomness="error")(x, bias)
    y = torch.func.vmap(lambda x: call(x, bias, seed=6), randomness="error")(x)
    for example in y:
        assert_mask(6, example)


@on_devices
def test_functional_call(device, drawn):
    mlp = FusedMLP(6, 40, 24, activation="gelu", dropout=P, output_dropout=0.3).to(device)
    masks = Masks(mlp)
    others = {name: torch.rand_like(parameter).requires_grad_() for name, parameter in mlp.named_parameters()}
    y = torch.func.functional_call(mlp, others, torch.randn(9, 6, device=device))
    y.backward(torch.rand_like(y).add(0.5))
    masks.check(drawn, y)
    assert all(other.grad is not None for other in others.values())
    assert all(parameter.grad is None for parameter in mlp.parameters())


@on_devices
def test_an_ensemble_by_functional_call_and_vmap(device):
    models = [BiasActDropout(40, "relu", p=P).to(device) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    x, _ = leaves(device)

    def loss(parameters):
        y = torch.func.functional_call(models[0], (parameters, buffers), x.detach())
        return y.sum(), y

    grads, y = torch.func.vmap(torch.func.grad(loss, has_aux=True), randomness="different")(parameters)
    assert distinct(y != 0)
    torch.testing.assert_close(grads["bias"], (y != 0).flatten(1, -2).sum(1) / (1 - P), rtol=1e-5, atol=1e-5)
