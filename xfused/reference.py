"""The operations in plain torch, given a mask: CPU path, float64 path, double backward, and the tests' oracle.

The forward is differentiable to any order. 16-bit tensors are computed in fp32 and rounded once, as in the kernels.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .activations import TABLE


def _compute(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def bias_act_dropout(
    x: Tensor, bias: Tensor | None, keep: Tensor | None, scale: float, activation: str, parameters: Sequence[float]
) -> Tensor:
    """y = keep * scale * activation(x + bias).

    Args:
        x: (..., N), floating.
        bias: (N,) or None.
        keep: bool, broadcastable to x's shape, or None for no dropout.
        scale: 1 / (1 - p).
        activation, parameters: the table's name and the values of its parameters.
    Returns:
        y, of x's shape and dtype; exactly 0 where keep is False.
    """
    u = _compute(x)
    if bias is not None:
        u = u + bias.to(u.dtype)
    y = TABLE[activation].forward(u, *parameters)
    if keep is not None:
        y = torch.where(keep, y * scale, 0.0)
    return y.to(x.dtype)


def bias_act_dropout_backward(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    keep: Tensor | None,
    scale: float,
    activation: str,
    parameters: Sequence[float],
) -> tuple[Tensor, Tensor | None]:
    """dx = activation'(x + bias) * keep * scale * dy, and dbias = its sum over all dimensions but the last.

    Args:
        x: None where the activation is the identity; the rest as in `bias_act_dropout`.
    Returns:
        dx in dy's shape and dtype, summed before it is rounded; dbias in bias's dtype, None if there is no bias.
    """
    dx = _compute(dy)
    if keep is not None:
        dx = dx * scale
    if x is not None:
        u = _compute(x)
        if bias is not None:
            u = u + bias.to(u.dtype)
        dx = TABLE[activation].backward(dx, u, *parameters)
    if keep is not None:
        dx = torch.where(keep, dx, 0.0)
    dbias = None if bias is None else dx.reshape(math.prod(dx.shape[:-1]), dx.shape[-1]).sum(0).to(bias.dtype)
    return dx.to(dy.dtype), dbias
