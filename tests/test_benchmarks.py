"""The benchmark compares only providers that compute the same function."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.bias_act_dropout import TWINS, check, providers, timed


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(256, 128, generator=generator), torch.randn(128, generator=generator)


@pytest.mark.parametrize("activation", TWINS)
def test_providers_compute_the_same_function(tensors, activation):
    for name in ("xfused", "eager"):
        check(name, providers(activation, 0.1)[name], *tensors, activation, 0.1)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, bias: F.dropout(F.gelu(x + bias), 0.12),
        lambda x, bias: F.dropout(F.gelu(x), 0.1),
        lambda x, bias: F.dropout(F.gelu(x + bias, approximate="tanh"), 0.1),
        lambda x, bias: F.gelu(x + bias),
    ],
    ids=["rate", "bias", "activation", "dropout"],
)
def test_another_function_is_refused(tensors, other):
    with pytest.raises(SystemExit, match="other, gelu"):
        check("other", other, *tensors, "gelu", 0.1)


def test_functions_take_turns():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = timed(functions, 5, torch.device("cpu"))
    assert "".join(calls[6:]) == "ab" * 5 and all(len(values) == 5 for values in times.values())
