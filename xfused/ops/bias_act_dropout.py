"""xfused::bias_act_dropout, y = dropout(activation(x + bias)), and its backward."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import philox, reference
from .._triton import has_ptx, runs_kernels
from ..activations import TABLE
from ..activations import activation as resolve
from ..kernels.bias_act_dropout import backward_kernel, forward_kernel
from ._check import check_origin, check_p, check_rows
from ._launch import as_rows, cdiv, counters, launch, origin_args, seed_args, tile

SPLIT_ROWS = 256  # rows of a backward program: its fp32 column sums are then 1/128 of the bytes of a bf16 x at most
STAGES = 3  # of software pipelining in its loop
REGISTERS = {10: 112}  # a thread of the forward may have; left to itself the assembler takes 96 there, and spills
REGISTERS_BACKWARD = {9: 168, 10: 168}  # six programs then fit the 65,536 of a multiprocessor

_OPTIONS = "str activation, float[] parameters, float p, SymInt row0, SymInt col0"
torch.library.define("xfused::bias_act_dropout", f"(Tensor x, Tensor? bias, Tensor? seed, {_OPTIONS}) -> Tensor")
torch.library.define(
    "xfused::bias_act_dropout_backward",
    f"(Tensor dy, Tensor? x, Tensor? bias, Tensor? seed, {_OPTIONS}) -> (Tensor, Tensor)",
)


@torch.library.register_fake("xfused::bias_act_dropout")
def _forward_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("xfused::bias_act_dropout_backward")
def _backward_fake(dy: Tensor, x: Tensor | None, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape), dy.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _vmap(info: Any, in_dims: Sequence[Any], *args: Any, op: Any) -> tuple[Any, Any]:
    """One call an example: each has a seed of its own (randomness="different") or shares one ("same")."""
    examples = [
        op(*(arg.select(dim, i) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(examples[0], Tensor):
        return torch.stack(examples), 0
    return tuple(torch.stack(results) for results in zip(*examples, strict=True)), (0,) * len(examples[0])


# -------------------------------------------------------------------------------------------- implementations


def _on_kernels(t: Tensor) -> bool:
    return runs_kernels(t.device) and t.dtype != torch.float64 and t.numel() > 0


def _keep(t: Tensor, seed: Tensor | None, p: float, row0: int, col0: int) -> Tensor | None:
    """The keep mask for t (..., N), or None for p = 0."""
    if p == 0 or seed is None:
        return None
    rows = math.prod(t.shape[:-1])
    return torch.ops.xfused.dropout_mask(seed, rows, t.shape[-1], p, row0, col0, t.device).view(t.shape)


def _forward(
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    activation: str,
    parameters: Sequence[float],
    p: float,
    row0: int,
    col0: int,
) -> Tensor:
    if _on_kernels(x):
        return launch_forward(x, bias, seed, activation, parameters, p, row0, col0)
    keep = _keep(x, seed, p, row0, col0)
    y = reference.bias_act_dropout(x, bias, keep, philox.keep_scale(p), activation, parameters)
    return x.new_empty(x.shape).copy_(y) if y is x or not y.is_contiguous() else y


torch.library.impl("xfused::bias_act_dropout", "CompositeExplicitAutograd")(_forward)


def _backward(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    activation: str,
    parameters: Sequence[float],
    p: float,
    row0: int,
    col0: int,
) -> tuple[Tensor, Tensor]:
    if _on_kernels(dy):
        return launch_backward(dy, x, bias, seed, activation, parameters, p, row0, col0)
    keep = _keep(dy, seed, p, row0, col0)
    dx, dbias = reference.bias_act_dropout_backward(dy, x, bias, keep, philox.keep_scale(p), activation, parameters)
    dx = dy.new_empty(dy.shape).copy_(dx) if dx is dy or not dx.is_contiguous() else dx
    return dx, dy.new_empty(0) if dbias is None else dbias


torch.library.impl("xfused::bias_act_dropout_backward", "CompositeExplicitAutograd")(_backward)


def launch_forward(
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    activation: str,
    parameters: Sequence[float],
    p: float,
    row0: int,
    col0: int,
) -> Tensor:
    """One launch; x is not empty."""
    n = x.shape[-1]
    rows = as_rows(x, n)
    m = rows.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_g, block_n, warps = tile(n, 16 // x.itemsize, 256, 2)
    blocks_n = cdiv(n, block_n)
    groups = cdiv(row0 % philox.ROWS_PER_CALL + m, philox.ROWS_PER_CALL)
    args = (
        rows,
        None if bias is None else bias.contiguous(),
        y,
        *seed_args(seed, p),
        philox.keep_scale(p),
        *(*parameters, 0.0, 0.0)[:2],
        *origin_args(row0, col0),
        m,
        n,
        blocks_n,
        rows.stride(0),
    )
    constants = (
        TABLE[activation].kernel,
        philox.threshold(p) > 0,
        x.itemsize == 2,
        has_ptx(x.device),
        block_g,
        block_n,
    )
    launch(forward_kernel, blocks_n * cdiv(groups, block_g), args, constants, warps, REGISTERS)
    return y


def launch_backward(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    activation: str,
    parameters: Sequence[float],
    p: float,
    row0: int,
    col0: int,
) -> tuple[Tensor, Tensor]:
    """One launch, which also finishes dbias; dy is not empty."""
    n = dy.shape[-1]
    dy_rows = as_rows(dy, n)
    x_rows = None if x is None else as_rows(x, n)
    m = dy_rows.shape[0]
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    dbias = torch.empty(0 if bias is None else n, dtype=(dy if bias is None else bias).dtype, device=dy.device)
    block_g, block_n, warps = tile(n, 16 // dy.itemsize, 128, dy.itemsize)
    blocks_n = cdiv(n, block_n)
    skip = row0 % philox.ROWS_PER_CALL
    split_groups = max(block_g, SPLIT_ROWS // philox.ROWS_PER_CALL)
    splits = cdiv(cdiv(skip + m, philox.ROWS_PER_CALL), split_groups)
    args = (
        dy_rows,
        x_rows,
        None if x is None or bias is None else bias.contiguous(),
        dx,
        None if bias is None else dbias,
        None if bias is None else torch.empty((splits, n), dtype=torch.float32, device=dy.device),
        None if bias is None else counters(blocks_n, dy.device),
        *seed_args(seed, p),
        philox.keep_scale(p),
        *(*parameters, 0.0, 0.0)[:2],
        *origin_args(row0, col0),
        m,
        n,
        blocks_n,
        splits,
        split_groups,
        dy_rows.stride(0),
        0 if x_rows is None else x_rows.stride(0),
    )
    constants = (
        TABLE[activation].kernel_backward,
        philox.threshold(p) > 0,
        dy.itemsize == 2,
        has_ptx(dy.device),
        skip == 0 and m % philox.ROWS_PER_CALL == 0,
        block_g,
        block_n,
        STAGES,
    )
    launch(backward_kernel, blocks_n * splits, args, constants, warps, REGISTERS_BACKWARD)
    return dx, dbias


# --------------------------------------------------------------------------------------------------- autograd

_forward_op = torch.ops.xfused.bias_act_dropout.default
_backward_op = torch.ops.xfused.bias_act_dropout_backward.default
for _op in (_forward_op, _backward_op):
    torch.library.register_vmap(_op, functools.partial(_vmap, op=_op))


class _Backward(torch.autograd.Function):
    """(dx, dbias) as a differentiable function of (dy, x, bias); its own backward is plain torch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dy, x, bias, seed, activation, parameters, p, row0, col0):
        return _backward_op(dy, x, bias, seed, activation, parameters, p, row0, col0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        dy, x, bias, seed, *ctx.options = inputs
        ctx.save_for_backward(dy, x, bias, seed)

    @staticmethod
    def backward(ctx, ddx, ddbias):
        dy, x, bias, seed = ctx.saved_tensors
        activation, parameters, p, row0, col0 = ctx.options
        keep = _keep(dy, seed, p, row0, col0)
        inputs = [t for t in (dy, x, bias) if t is not None]

        def forward(x: Tensor, *bias: Tensor) -> Tensor:
            b = bias[0] if bias else None
            return reference.bias_act_dropout(x, b, keep, philox.keep_scale(p), activation, parameters)

        def first_order(dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            # where the forward is linear in x and x was not saved, any x will do
            primals = inputs if x is not None else (torch.zeros_like(dy), *inputs)
            return torch.func.vjp(forward, *primals)[1](dy)

        _, vjp = torch.func.vjp(first_order, *inputs)
        grads = list(vjp((ddx,) if bias is None else (ddx, ddbias)))
        return *(None if t is None else grads.pop(0) for t in (dy, x, bias)), *[None] * 6


class _BiasActDropout(torch.autograd.Function):
    """Saves x (not for the identity), bias and seed; no mask."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, bias, seed, activation, parameters, p, row0, col0):
        return _forward_op(x, bias, seed, activation, parameters, p, row0, col0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, bias, seed, *ctx.options = inputs
        ctx.save_for_backward(None if ctx.options[0] == "identity" else x, bias, seed)

    @staticmethod
    def backward(ctx, dy):
        # under create_graph and torch.func, the gradient is itself differentiated
        backward = _Backward.apply if torch.is_grad_enabled() else _backward_op
        x, bias, seed = ctx.saved_tensors
        dx, dbias = backward(dy, x, bias, seed, *ctx.options)
        return dx, None if bias is None else dbias, *[None] * 6


# ----------------------------------------------------------------------------------------------------- public


def bias_act_dropout(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Any = "identity",
    p: float = 0.0,
    training: bool = True,
    seed: int | Tensor | None = None,
    origin: Sequence[int] = (0, 0),
) -> Tensor:
    """dropout(activation(x + bias)), one kernel forward and one backward.

    Args:
        x: (..., N), float32, bfloat16, float16 or float64.
        bias: (N,) of any of these dtypes, or None. x + bias is not rounded to x's dtype.
        activation: what `xfused.activation` takes: a name, a torch.nn activation module, a torch function.
        p: probability that an element is set to 0; the others are scaled by 1 / (1 - p). As in
            `torch.nn.functional.dropout`.
        training: False applies no dropout and draws no seed.
        seed: of the mask, as in `xfused.dropout_mask`; default: a new one, which follows `torch.manual_seed`.
        origin: (row, column) of x's first element in the whole mask, where x is a shard.
    Returns:
        y (..., N), contiguous, in x's dtype. What is dropped is exactly 0, also where x is infinite or NaN.
    Raises:
        TypeError, ValueError: an argument outside what is said above, by name, before anything is launched.
    """
    act = resolve(activation)
    check_p(p)
    check_rows(x, bias)
    n = x.shape[-1]
    row0, col0 = check_origin(origin, math.prod(x.shape[:-1]), n)
    if seed is not None:
        seed = philox.as_seed(seed, x.device)
    if not training or p == 0:
        p, seed = 0.0, None
    elif seed is None:
        seed = philox.draw_seed(x.device)
    args = (x, bias, seed, act.name, list(act.parameters), float(p), row0, col0)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _BiasActDropout.apply(*args)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        # Function.apply, less its look at the signature of `forward` at every call, which takes longer than the rest
        return super(torch.autograd.Function, _BiasActDropout).apply(*args)
    return _forward_op(*args)
