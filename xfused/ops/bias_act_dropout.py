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
from ..philox import MAX_COL
from ._check import PLAIN, check_origin, check_p, check_rows, is_dtensor
from ._launch import Prepared, Seed, as_rows, cdiv, launch, origin_args, seed_args, stream_of, workspace
from ._tiles import alignment, column_sum_tiles, row_tiles

STAGES = 3  # of software pipelining
PREFETCHED = 4  # bytes of the narrowest access that can be; in narrower ones, stages would be kept in registers
FAST = {torch.float16: 1, torch.bfloat16: 2}
ORIGIN = 0, 0

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


def _composed(
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    activation: str,
    parameters: Sequence[float],
    p: float,
    row0: int,
    col0: int,
) -> Tensor:
    """In plain torch, given the mask."""
    keep = _keep(x, seed, p, row0, col0)
    return reference.bias_act_dropout(x, bias, keep, philox.keep_scale(p), activation, parameters)


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
    y = _composed(x, bias, seed, activation, parameters, p, row0, col0)
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


_known_forwards, _known_backwards = Prepared(), Prepared()


def launch_forward(
    x: Tensor,
    bias: Tensor | None,
    seed: Seed,
    activation: str,
    parameters: Sequence[float],
    p: float,
    row0: int,
    col0: int,
) -> Tensor:
    """One launch; x is not empty."""
    device, shape = x.device, x.shape
    n = shape[-1]
    rows = x if x.is_contiguous() else as_rows(x, n)
    if bias is not None:
        bias = bias.contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    seed_ptr, key, offset = seed_args(seed)
    case = (
        activation, *parameters, p, row0, col0, shape, x.dtype, device, seed_case(seed_ptr), rows.stride(),
        rows.data_ptr() % 16 == 0, None if bias is None else (bias.dtype, bias.data_ptr() % 16 == 0),
    )  # fmt: skip
    if (known := _known_forwards.get(case, device)) is not None:
        known[0](rows, bias, y, seed_ptr, key, offset, *known[1], stream=stream_of(device))
        return y
    rows = rows.reshape(-1, n)
    m, stride = rows.shape[0], rows.stride(0)
    align = alignment(16 // x.itemsize, n, stride)
    skip = row0 % philox.ROWS_PER_CALL
    groups = cdiv(skip + m, philox.ROWS_PER_CALL)
    tiles = row_tiles(n, groups, x.itemsize, align, device)
    count, blocks_n = cdiv(groups, tiles.block_g), cdiv(n, tiles.block_n)
    splits = cdiv(count, tiles.each)
    last = (
        *p_args(p),
        *(*parameters, 0.0, 0.0)[:2],
        *origin_args(row0, col0),
        m,
        n,
        blocks_n,
        count,
        splits,
        stride,
    )
    constants = (
        TABLE[activation].kernel,
        philox.threshold(p) > 0,
        FAST.get(x.dtype, 0),
        has_ptx(device),
        skip == 0 and m % philox.ROWS_PER_CALL == 0,
        align,
        tiles.block_g,
        tiles.block_n,
        STAGES if align * x.itemsize >= PREFETCHED else 1,
    )
    args = (rows, bias, y, seed_ptr, key, offset, *last)
    again = launch(forward_kernel, blocks_n * splits, args, constants, tiles.warps, tiles.registers)
    _known_forwards.put(case, again, (*last, *constants))
    return y


def launch_backward(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    seed: Seed,
    activation: str,
    parameters: Sequence[float],
    p: float,
    row0: int,
    col0: int,
) -> tuple[Tensor, Tensor]:
    """One launch, which also finishes dbias; dy is not empty."""
    device, shape = dy.device, dy.shape
    n = shape[-1]
    dy_rows = dy if dy.is_contiguous() else as_rows(dy, n)
    x_rows = x if x is None or x.is_contiguous() else as_rows(x, n)
    if bias is not None:
        bias = bias.contiguous()
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    dbias = dy.new_empty(0) if bias is None else torch.empty_like(bias)
    seed_ptr, key, offset = seed_args(seed)
    case = (
        activation, *parameters, p, row0, col0, shape, dy.dtype, device, seed_case(seed_ptr), dy_rows.stride(),
        dy_rows.data_ptr() % 16 == 0,
        None if x_rows is None else (x_rows.dtype, x_rows.stride(), x_rows.data_ptr() % 16 == 0),
        None if bias is None else (bias.dtype, bias.data_ptr() % 16 == 0),
    )  # fmt: skip

    def tensors(blocks_n: int, partials: int) -> tuple[Any, ...]:
        if bias is None:
            return dy_rows, x_rows, None, dx, None, None, None, seed_ptr, key, offset
        arrived, partial = workspace(blocks_n, partials, device)
        return dy_rows, x_rows, None if x is None else bias, dx, dbias, partial, arrived, seed_ptr, key, offset

    if (known := _known_backwards.get(case, device)) is not None:
        again, (work, last) = known
        again(*tensors(*work), *last, stream=stream_of(device))
        return dx, dbias
    stride_dy = dy_rows.reshape(-1, n).stride(0)
    stride_x = 0 if x_rows is None else x_rows.reshape(-1, n).stride(0)
    m = dy.numel() // n
    align = alignment(16 // dy.itemsize, n, stride_dy, stride_x)
    skip = row0 % philox.ROWS_PER_CALL
    groups = cdiv(skip + m, philox.ROWS_PER_CALL)
    tiles = column_sum_tiles(n, groups, dy.itemsize, align, device)
    count, blocks_n = cdiv(groups, tiles.block_g), cdiv(n, tiles.block_n)
    splits = cdiv(count, tiles.each)
    work = blocks_n, splits * n
    last = (
        *p_args(p),
        *(*parameters, 0.0, 0.0)[:2],
        *origin_args(row0, col0),
        m,
        n,
        blocks_n,
        count,
        splits,
        stride_dy,
        stride_x,
    )
    constants = (
        TABLE[activation].kernel_backward,
        philox.threshold(p) > 0,
        FAST.get(dy.dtype, 0),
        has_ptx(device),
        skip == 0 and m % philox.ROWS_PER_CALL == 0,
        align,
        tiles.block_g,
        tiles.block_n,
        STAGES if align * dy.itemsize >= PREFETCHED else 1,
    )
    args = (*tensors(*work), *last)
    launched = launch(backward_kernel, blocks_n * splits, args, constants, tiles.warps, tiles.registers)
    _known_backwards.put(case, launched, (work, (*last, *constants)))
    return dx, dbias


def seed_case(seed_ptr: Tensor | None) -> bool | None:
    """What of the seed's argument a compiled kernel depends on."""
    return None if seed_ptr is None else seed_ptr.data_ptr() % 16 == 0


def p_args(p: float) -> tuple[int, float]:
    """last_dropped, scale; for p = 1, where nothing is kept, a scale that can be divided by."""
    return max(philox.threshold(p) - 1, 0), philox.keep_scale(p) or 1.0


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


# for exported programs, which call the operator without the Function
torch.library.register_autograd(
    "xfused::bias_act_dropout", _BiasActDropout.backward, setup_context=_BiasActDropout.setup_context
)


class _Eager(torch.autograd.Function):
    """The same in plain eager mode on a GPU, less the operator's dispatch; the seed is a tensor or the two words."""

    @staticmethod
    def forward(ctx, x, bias, seed, activation, parameters, p, row0, col0):
        words = seed if isinstance(seed, tuple) else None
        ctx.save_for_backward(None if activation == "identity" else x, bias, None if words else seed)
        ctx.options = words, activation, parameters, p, row0, col0
        return launch_forward(x, bias, seed, activation, parameters, p, row0, col0)

    @staticmethod
    def backward(ctx, dy):
        x, bias, seed = ctx.saved_tensors
        words, *options = ctx.options
        if type(dy) is Tensor and not torch.is_grad_enabled() and torch._C._len_torch_dispatch_stack() == 0:
            dx, dbias = launch_backward(dy, x, bias, words or seed, *options)
        else:
            seed = torch.tensor(words) if words else seed
            backward = _Backward.apply if torch.is_grad_enabled() else _backward_op
            dx, dbias = backward(dy, x, bias, seed, *options)
        return dx, None if bias is None else dbias, None, None, None, None, None, None


def _is_plain_eager(x: Tensor, bias: Tensor | None) -> bool:
    """Whether nothing but a kernel has to see the call: no subclass, transform, tracing or dispatch mode."""
    return (
        type(x) in PLAIN
        and type(bias) in PLAIN
        and _on_kernels(x)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


# Function.apply, less its look at the signature of `forward` at every call, which takes longer than the rest
_apply = super(torch.autograd.Function, _BiasActDropout).apply
_apply_eager = super(torch.autograd.Function, _Eager).apply


# ----------------------------------------------------------------------------------------------------- public


def bias_act_dropout(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Any = "identity",
    p: float = 0.0,
    training: bool = True,
    seed: int | Tensor | None = None,
    origin: Sequence[int] = ORIGIN,
) -> Tensor:
    """dropout(activation(x + bias)), one kernel forward and one backward.

    Args:
        x: (..., N), float32, bfloat16, float16 or float64; a DTensor too, see `xfused.sharding`.
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
    if is_dtensor(x) or is_dtensor(bias):
        from ..sharding import on_shards

        return on_shards(bias_act_dropout, x, bias, activation=act, p=p, training=training, seed=seed, origin=origin)
    check_rows(x, bias)
    plain = _is_plain_eager(x, bias)
    if plain and origin is ORIGIN and x.numel() <= MAX_COL:  # in most calls; the check takes longer than all others
        row0, col0 = ORIGIN
    else:
        row0, col0 = check_origin(origin, math.prod(x.shape[:-1]), x.shape[-1])
    if seed is not None:
        seed = philox.as_seed(seed, x.device)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if plain:
        words: Seed = seed
        if not training or p == 0:
            p, words = 0.0, None
        elif seed is None:
            words = philox.draw_seed_words(x.device)
        elif seed.device.type == "cpu":
            words = tuple(seed.tolist())
        return (_apply_eager if needs_grad else launch_forward)(
            x, bias, words, act.name, act.parameters, float(p), row0, col0
        )
    if not training or p == 0:
        p, seed = 0.0, None
    elif seed is None:
        seed = philox.draw_seed(x.device)
    args = (x, bias, seed, act.name, list(act.parameters), float(p), row0, col0)
    transformed = torch._C._are_functorch_transforms_active()
    if torch.compiler.is_compiling() and transformed:
        return _composed(*args)  # Dynamo inlines a Function's forward there, and its gradient would be lost
    if torch.compiler.is_compiling() or transformed:
        return _BiasActDropout.apply(*args)
    return (_apply if needs_grad else _forward_op)(*args)
