"""BiasActDropout and FusedMLP: parameters, states, copies, hooks, and the numbers of their torch.nn equivalents."""

import copy
import io
import pickle

import oracle
import pytest
import torch
from torch import nn

import xfused
from xfused import BiasActDropout, FusedMLP

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


class Plain(nn.Module):
    """The MLP as torch.nn spells it, with the same parameter names."""

    def __init__(self, features, hidden, out, activation, dropout=0.0, output_dropout=0.0, bias=True):
        super().__init__()
        self.fc1 = nn.Linear(features, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, out, bias=bias)
        self.activation = activation
        self.dropout, self.output_dropout = nn.Dropout(dropout), nn.Dropout(output_dropout)

    def forward(self, x):
        return self.output_dropout(self.fc2(self.dropout(self.activation(self.fc1(x)))))


def masks_of_next_call(rows, hidden, out, p, output_p, device="cpu"):
    """The masks that an MLP's next call draws, by the oracle; the generator is put back."""
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    masks = [
        oracle.keep(xfused.new_seed(device).tolist(), rows, columns, prob).to(device) if prob else None
        for columns, prob in ((hidden, p), (out, output_p))
    ]
    torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state)
    return masks


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("output_dropout", [0.0, 0.2])
def test_parameters_are_parameters_with_the_names_and_the_init_of_torch_nn(bias, output_dropout):
    torch.manual_seed(5)
    plain = Plain(6, 24, 5, nn.GELU(), 0.1, output_dropout, bias)
    after = torch.rand(1)
    torch.manual_seed(5)
    ours = FusedMLP(6, 24, 5, dropout=0.1, output_dropout=output_dropout, bias=bias)
    assert torch.equal(torch.rand(1), after)  # as many numbers were drawn
    named, expected = dict(ours.named_parameters()), dict(plain.named_parameters())
    assert list(named) == list(expected)
    for name, parameter in named.items():
        assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
        assert torch.equal(parameter, expected[name])
    assert isinstance(ours.fc1, nn.Linear) and isinstance(ours.fc2, nn.Linear)


def test_default_sizes_of_the_mlp():
    mlp = FusedMLP(6)
    assert mlp.fc1.weight.shape == (24, 6) and mlp.fc2.weight.shape == (6, 24)


def test_the_bias_of_bias_act_dropout_is_a_parameter_that_trains():
    module = BiasActDropout(8, "relu", p=0.5)
    assert isinstance(module.bias, nn.Parameter) and [*module.state_dict()] == ["bias"]
    assert not module.bias.any()
    optimiser = torch.optim.SGD(module.parameters(), lr=1.0)
    x = torch.ones(4, 8)
    y = module(x)
    y.sum().backward()
    assert torch.equal(module.bias.grad, y.detach().sum(0))
    optimiser.step()
    assert torch.equal(module.bias, -y.detach().sum(0))
    assert [*BiasActDropout(8, bias=False).parameters()] == [] and BiasActDropout(8, bias=False).bias is None


@pytest.mark.parametrize("output_dropout", [0.0, 0.2])
def test_state_dicts_move_both_ways(output_dropout):
    plain, ours = Plain(6, 24, 5, nn.GELU()), FusedMLP(6, 24, 5, output_dropout=output_dropout).eval()
    x = torch.randn(3, 7, 6)
    ours.load_state_dict(plain.state_dict())
    torch.testing.assert_close(ours(x), plain(x))
    other = Plain(6, 24, 5, nn.GELU())
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other(x), plain(x))
    sequential = nn.Sequential()
    sequential.add_module("fc1", nn.Linear(6, 24))
    sequential.add_module("act", nn.GELU())
    sequential.add_module("fc2", nn.Linear(24, 5))
    sequential.load_state_dict(ours.state_dict())
    torch.testing.assert_close(sequential(x), plain(x))


@on_devices
@pytest.mark.parametrize("dropout, output_dropout", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.4), (0.3, 0.4)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_mlp_is_its_torch_nn_equivalent_with_the_same_masks(device, dropout, output_dropout, bias):
    ours = FusedMLP(6, 24, 5, activation="silu", dropout=dropout, output_dropout=output_dropout, bias=bias).to(device)
    plain = Plain(6, 24, 5, nn.SiLU(), bias=bias).to(device)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(3, 7, 6, device=device)
    masks = masks_of_next_call(21, 24, 5, dropout, output_dropout, device)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = ours(a)
    h = nn.functional.silu(plain.fc1(b))
    if masks[0] is not None:
        h = h * masks[0].view(3, 7, 24) / (1 - dropout)
    expected = plain.fc2(h)
    if masks[1] is not None:
        expected = expected * masks[1].view(3, 7, 5) / (1 - output_dropout)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    for (name, parameter), twin in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-4, atol=1e-5, msg=name)


@on_devices
@pytest.mark.parametrize("activation", ["gelu", nn.LeakyReLU(0.3), nn.functional.mish])
def test_bias_act_dropout_is_the_op(device, activation):
    module = BiasActDropout(6, activation, p=0.4).to(device)
    nn.init.normal_(module.bias)
    x = torch.randn(5, 2, 6, device=device)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    y = module(x)
    torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state)
    assert torch.equal(y, xfused.bias_act_dropout(x, module.bias, activation=activation, p=0.4))
    torch.testing.assert_close(module.eval()(x), xfused.bias_act_dropout(x, module.bias, activation=activation))


MODULES = {
    "BiasActDropout": lambda: BiasActDropout(6, nn.ELU(0.7), p=0.5),
    "without bias": lambda: BiasActDropout(6, "gelu", p=0.5, bias=False),
    "FusedMLP": lambda: FusedMLP(6, 12, activation=nn.Softplus(2.0), dropout=0.5),
    "output dropout": lambda: FusedMLP(6, 12, dropout=0.5, output_dropout=0.5),
}
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


@every_module
def test_eval_applies_no_dropout_and_draws_no_seed(make):
    module = make()
    x = torch.randn(40, 6)
    assert not torch.equal(module(x), module(x))
    module.eval()
    state = torch.get_rng_state()
    assert torch.equal(module(x), module(x)) and (module(x) != 0).all()
    assert torch.equal(torch.get_rng_state(), state)
    module.train()
    assert not torch.equal(module(x), module(x))


def _saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": _saved}


@every_module
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_copies_compute_the_same(make, duplicate, used):
    module, x = make(), torch.randn(40, 6)
    if used:
        module(x).sum().backward() if any(True for _ in module.parameters()) else module(x)
    twin = duplicate(module)
    assert repr(twin) == repr(module) and type(twin) is type(module)
    outputs = []
    for one in (module, twin):
        torch.manual_seed(3)
        outputs.append(one(x))
    assert torch.equal(*outputs)
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr() and isinstance(b, nn.Parameter)


def test_repr_names_what_the_module_does():
    text = repr(BiasActDropout(6, nn.LeakyReLU(0.25), p=0.125))
    assert text.startswith("BiasActDropout(6,") and all(
        part in text for part in ("leaky_relu", "0.25", "p=0.125", "bias=True")
    )
    text = repr(FusedMLP(6, activation="swish", dropout=0.25, output_dropout=0.5))
    assert all(
        part in text for part in ("silu", "dropout=0.25", "output_dropout=0.5", "(fc1)", "(fc2)", "in_features=6")
    )


@pytest.mark.parametrize("output_dropout", [0.0, 0.5])
def test_hooks_on_submodules_fire_and_their_results_are_used(output_dropout):
    mlp = FusedMLP(6, 12, dropout=0.0, output_dropout=output_dropout)
    seen = []
    for name in ("fc1", "fc2"):
        layer = getattr(mlp, name)
        layer.register_forward_pre_hook(lambda *_, name=name: seen.append(f"{name} before"))
        layer.register_forward_hook(lambda *_, name=name: seen.append(f"{name} after"))
        layer.register_full_backward_hook(lambda *_, name=name: seen.append(f"{name} backward"))
    mlp(torch.randn(3, 6, requires_grad=True)).sum().backward()
    assert seen == ["fc1 before", "fc1 after", "fc2 before", "fc2 after", "fc2 backward", "fc1 backward"]
    mlp.fc1.register_forward_hook(lambda _, inputs, output: torch.zeros_like(output))
    constant = mlp.eval()(torch.randn(3, 6))
    assert torch.equal(constant[0], constant[1])
    torch.testing.assert_close(constant[0], mlp.fc2.weight @ nn.functional.gelu(mlp.fc1.bias) + mlp.fc2.bias)


def test_a_replaced_submodule_is_called():
    """As LoRA does it: a wrapper around fc1 that adds to its output."""

    class Wrapper(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.bias = base, base.bias

        def forward(self, x):
            return self.base(x) + 1

    mlp = FusedMLP(6, 12, activation="identity", dropout=0.0)
    x = torch.randn(3, 6)
    before = mlp(x)
    mlp.fc1 = Wrapper(mlp.fc1)
    torch.testing.assert_close(mlp(x), before + mlp.fc2.weight.sum(1))


def test_dtype_device_and_freezing():
    mlp = FusedMLP(6, 12, dtype=torch.bfloat16, device="meta")
    assert all(p.dtype == torch.bfloat16 and p.is_meta for p in mlp.parameters())
    assert BiasActDropout(6, dtype=torch.float64).bias.dtype == torch.float64
    mlp = FusedMLP(6, 12).to(torch.bfloat16)
    assert mlp(torch.randn(2, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16
    mlp.requires_grad_(False)
    x = torch.randn(2, 6, dtype=torch.bfloat16, requires_grad=True)
    mlp(x).sum().backward()
    assert x.grad is not None and mlp.fc1.bias.grad is None


@on_devices
def test_autocast_gives_what_linear_gives(device):
    mlp = FusedMLP(8, 16, dropout=0.2, output_dropout=0.2).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = mlp(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in mlp.parameters())
