"""Which activation a name, a module, a function or a partial of one resolves to."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xfused
from xfused import Activation, activation

DESIGN = [
    "identity",
    "relu",
    "leaky_relu",
    "relu_squared",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "silu",
    "mish",
    "elu",
    "selu",
    "celu",
    "softplus",
    "softsign",
    "sigmoid",
    "tanh",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "relu6",
    "smelu",
    "star_relu",
]


def test_the_names_are_the_22_of_the_design():
    assert xfused.activations() == DESIGN and len(DESIGN) == 22


@pytest.mark.parametrize("name", DESIGN)
def test_a_name_resolves_to_itself_and_its_result_resolves_too(name):
    act = activation(name)
    assert act.name == name and activation(act) is act and activation(act, **{}) == act
    x = torch.randn(3, 5)
    assert torch.equal(xfused.bias_act_dropout(x, activation=name), xfused.bias_act_dropout(x, activation=act))


ALIASES = {
    "swish": "silu",
    "squared_relu": "relu_squared",
    "relu2": "relu_squared",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "linear": "identity",
    "hard_swish": "hardswish",
    "hard_sigmoid": "hardsigmoid",
}


@pytest.mark.parametrize("alias, name", ALIASES.items())
def test_aliases(alias, name):
    assert activation(alias) == activation(name)


MODULES = [
    (nn.Identity(), "identity", ()),
    (nn.ReLU(), "relu", ()),
    (nn.ReLU(inplace=True), "relu", ()),
    (nn.LeakyReLU(), "leaky_relu", (0.01,)),
    (nn.LeakyReLU(0.2, inplace=True), "leaky_relu", (0.2,)),
    (nn.GELU(), "gelu", ()),
    (nn.GELU("none"), "gelu", ()),
    (nn.GELU(approximate="tanh"), "gelu_tanh", ()),
    (nn.SiLU(), "silu", ()),
    (nn.Mish(), "mish", ()),
    (nn.ELU(), "elu", (1.0,)),
    (nn.ELU(2), "elu", (2.0,)),
    (nn.SELU(), "selu", ()),
    (nn.CELU(0.3), "celu", (0.3,)),
    (nn.Softplus(), "softplus", (1.0, 20.0)),
    (nn.Softplus(3, threshold=5), "softplus", (3.0, 5.0)),
    (nn.Softsign(), "softsign", ()),
    (nn.Sigmoid(), "sigmoid", ()),
    (nn.Tanh(), "tanh", ()),
    (nn.Hardsigmoid(), "hardsigmoid", ()),
    (nn.Hardswish(), "hardswish", ()),
    (nn.Hardtanh(), "hardtanh", (-1.0, 1.0)),
    (nn.Hardtanh(-2, 0.5), "hardtanh", (-2.0, 0.5)),
    (nn.ReLU6(), "relu6", ()),
]


@pytest.mark.parametrize("module, name, parameters", MODULES, ids=str)
def test_modules_and_their_values(module, name, parameters):
    assert activation(module) == Activation(name, parameters)
    x = torch.randn(40, 7) * 4
    torch.testing.assert_close(xfused.bias_act_dropout(x, activation=module), module(x.clone()))


FUNCTIONS = [
    (F.relu, "relu"),
    (torch.relu, "relu"),
    (F.gelu, "gelu"),
    (F.silu, "silu"),
    (F.mish, "mish"),
    (F.elu, "elu"),
    (F.selu, "selu"),
    (torch.selu, "selu"),
    (F.celu, "celu"),
    (F.softplus, "softplus"),
    (F.softsign, "softsign"),
    (torch.sigmoid, "sigmoid"),
    (F.sigmoid, "sigmoid"),
    (torch.tanh, "tanh"),
    (F.tanh, "tanh"),
    (F.leaky_relu, "leaky_relu"),
    (F.hardsigmoid, "hardsigmoid"),
    (F.hardswish, "hardswish"),
    (F.hardtanh, "hardtanh"),
    (F.relu6, "relu6"),
]


@pytest.mark.parametrize("function, name", FUNCTIONS, ids=lambda value: getattr(value, "__name__", value))
def test_functions(function, name):
    assert activation(function) == activation(name)
    x = torch.randn(40, 7) * 4
    torch.testing.assert_close(xfused.bias_act_dropout(x, activation=function), function(x))


PARTIALS = [
    (functools.partial(F.gelu, approximate="tanh"), Activation("gelu_tanh")),
    (functools.partial(F.gelu, approximate="none"), Activation("gelu")),
    (functools.partial(F.leaky_relu, negative_slope=0.2), Activation("leaky_relu", (0.2,))),
    (functools.partial(F.softplus, threshold=4), Activation("softplus", (1.0, 4.0))),
    (functools.partial(F.relu, inplace=True), Activation("relu")),
    (functools.partial(functools.partial(F.hardtanh, min_val=-3), max_val=3), Activation("hardtanh", (-3.0, 3.0))),
]


@pytest.mark.parametrize("partial, expected", PARTIALS, ids=lambda value: str(value)[:40])
def test_partials(partial, expected):
    assert activation(partial) == expected
    x = torch.randn(40, 7) * 4
    torch.testing.assert_close(xfused.bias_act_dropout(x, activation=partial), partial(x.clone()))


def test_a_partial_with_positional_arguments_is_refused():
    """Its first argument would be the input."""
    with pytest.raises(ValueError, match="activation: got"):
        activation(functools.partial(F.leaky_relu, torch.ones(3)))


def test_an_unknown_value_of_approximate_is_refused():
    with pytest.raises(ValueError, match="activation: got"):
        activation(functools.partial(F.gelu, approximate="sometimes"))


def test_subclasses_of_modules_are_not_taken_for_their_base():
    """Their forward may differ."""

    class Shifted(nn.ReLU):
        def forward(self, x):
            return super().forward(x) + 1

    with pytest.raises(ValueError, match="activation: got"):
        activation(Shifted())


def test_parameters_by_keyword():
    assert activation("leaky_relu", negative_slope=0.5) == Activation("leaky_relu", (0.5,))
    assert activation("softplus", threshold=3) == Activation("softplus", (1.0, 3.0))
    assert activation(Activation("softplus", (2.0, 9.0)), beta=4) == Activation("softplus", (4.0, 9.0))
    assert activation(nn.ELU(3.0), alpha=2.0) == Activation("elu", (2.0,))


def test_an_activation_prints_its_name_and_values():
    assert str(activation("silu")) == "silu"
    assert str(activation("hardtanh", min_val=-2)) == "hardtanh, min_val=-2, max_val=1"
