"""dropout(activation(x + bias)), x (M, N), bias (N,)."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import xfused

from ..eager import activation
from ..registry import Case, Function, NotOfferedError, Op


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    x = torch.randn(case.M, case.N, device=device, dtype=case.torch_dtype, requires_grad=True)
    return x, torch.randn(case.N, device=device, dtype=case.torch_dtype, requires_grad=True)


def on_grid(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """Inputs whose sum has eight significant bits, and is never an integer: exact in 16 bits, and on no kink."""
    x = torch.randint(-64, 64, (case.M, case.N), device=device) / 32 + 1 / 64
    bias = torch.randint(-64, 64, (case.N,), device=device) / 32
    return x.to(case.torch_dtype).requires_grad_(), bias.to(case.torch_dtype).requires_grad_()


def probes(case: Case, device: torch.device) -> Iterator[tuple[Case, tuple[Tensor, ...]]]:
    small = dataclasses.replace(case, M=256, N=256, dtype="float32")  # which tells gelu from gelu_tanh
    for probe in (case, small):
        yield probe, on_grid(probe, device)


def oracle(case: Case, inputs: Sequence[Tensor], keep: Tensor | None) -> Tensor:
    x, bias = inputs
    y = activation(case.activation)(x + bias) / (1 - case.p)
    return y if keep is None else y * keep


def moved(case: Case) -> dict[str, int]:
    one = case.M * case.N * case.torch_dtype.itemsize
    backward = 2 * one if case.activation == "identity" else 3 * one  # dy, x unless the derivative is 1, dx
    return {"fwd": 2 * one, "bwd": backward, "fwd+bwd": 2 * one + backward}


def fused(case: Case, inputs: Sequence[Tensor]) -> Function:
    return lambda x, bias: xfused.bias_act_dropout(x, bias, activation=case.activation, p=case.p)


def eager(case: Case, inputs: Sequence[Tensor]) -> Function:
    function, p = activation(case.activation), case.p
    return lambda x, bias: F.dropout(function(x + bias), p)


def xformers(case: Case, inputs: Sequence[Tensor]) -> Function:
    """Its last releases with Triton kernels of this kind: 0.0.2x."""
    from xformers.components.activations import Activation  # type: ignore[import-not-found]
    from xformers.triton.dropout import dropout  # type: ignore[import-not-found]

    names = {"relu": "ReLU", "leaky_relu": "LeakyReLU", "relu_squared": "SquaredReLU", "smelu": "SmeLU"}
    names |= {"gelu_tanh": "GeLU", "star_relu": "StarReLU"}
    if case.activation != "identity" and not hasattr(Activation, names.get(case.activation, "-")):
        raise NotOfferedError(f"no {case.activation}")
    act = None if case.activation == "identity" else getattr(Activation, names[case.activation])
    return lambda x, bias: dropout(x, case.p, bias, act)


def attorch(case: Case, inputs: Sequence[Tensor]) -> Function:
    """Activation and dropout are one kernel there; PyTorch adds the bias."""
    import attorch  # type: ignore[import-not-found]

    names = {"relu": "ReLU", "leaky_relu": "LeakyReLU", "gelu": "GELU", "silu": "SiLU", "mish": "Mish", "elu": "ELU"}
    names |= {"selu": "SELU", "celu": "CELU", "softplus": "Softplus", "softsign": "Softsign", "sigmoid": "Sigmoid"}
    names |= {"tanh": "Tanh", "hardsigmoid": "Hardsigmoid", "hardswish": "Hardswish", "hardtanh": "Hardtanh"}
    names |= {"relu6": "ReLU6"}
    if case.activation == "identity":
        layer = attorch.Dropout(case.p)
    elif hasattr(attorch, names.get(case.activation, "-")):
        layer = getattr(attorch, names[case.activation])(drop_p=case.p)
    else:
        raise NotOfferedError(f"no {case.activation}")
    return lambda x, bias: layer(x + bias)


OP = Op(
    "bias_act_dropout",
    "dropout(activation(x + bias))",
    inputs,
    oracle,
    probes,
    moved,
    {"xfused": fused, "eager": eager, "xformers": xformers, "attorch": attorch},
    shapes=(
        (8192, 16384), (1024, 1024), (4096, 1024), (8192, 3072), (2048, 8192), (16384, 4096), (65536, 768),
        (512, 65536), (8192, 1000), (4096, 50257),
    ),
    activations=("identity", "relu", "gelu_tanh", "gelu", "silu"),
)  # fmt: skip
