"""The activation table: one entry = forward, derivative, torch reference, aliases. A new activation is one entry.

In the kernels an activation is `fn(c, u, a, b, FAST, PTX)` = c * f(u): c a scalar, u fp32, (a, b) the entry's
parameters as fp32 scalars, FAST the approximations that the result's rounding hides (0: none, 1: float16's,
2: bfloat16's), PTX allows NVIDIA's inline assembly for them. The derivative is `fn(g, u, a, b, FAST, PTX)` = g * f'(u).
In torch it is `forward(u, *parameters)` and `backward(grad, u, *parameters)`, PyTorch's own functions where they are
accurate, so that the values at kinks and infinities are PyTorch's by construction.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._triton import jit, tl

aten = torch.ops.aten


# ------------------------------------------------------------------------------------- functions of fp32, Triton


@jit
def _exp2(x, PTX: tl.constexpr):
    if PTX:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = tl.exp2(x)
    return y


@jit
def _exp(x, FAST: tl.constexpr, PTX: tl.constexpr, dx=None):
    """e**x, or e**(x + dx) where dx is what rounding x lost. FAST: ex2.approx. Else below 1 ulp, for x < 40 only."""
    if FAST:
        y = _exp2(x * 1.4426950408889634, PTX)
    else:  # 2**i times e**f
        x = tl.maximum(x, -110.0, tl.PropagateNan.ALL)
        t = x * 1.4426950408889634 + 12582912.0  # 3 * 2**22: the sum has no fraction bits, its lowest bits are i
        i = t - 12582912.0
        f = tl.fma(i, -0.693145751953125, x)  # log(2) in two parts, the first short enough for an exact product
        f = tl.fma(i, -1.428606765330187e-06, f)
        if dx is not None:
            f += dx
        q = 1 / 24 + f * (1 / 120 + f * (1 / 720 + f * (1 / 5040)))
        q = f + f * f * (0.5 + f * (1 / 6 + f * q))
        # 2**-64 e**f times 2**(i + 64), whose exponent field holds also what is a denormal in the end
        two_i = ((t.to(tl.uint32, bitcast=True) << 23) + (191 << 23)).to(tl.float32, bitcast=True)
        y = tl.fma(q, 5.421010862427522e-20, 5.421010862427522e-20) * two_i
    return y


@jit
def _divide(n, d, FAST: tl.constexpr, PTX: tl.constexpr):
    """n / d for 1 <= d < 2**126. Unless FAST, below 1 ulp: the quotient is corrected once by its own remainder."""
    if PTX:
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], tl.float32, True, 1)
        y = n * r
        if not FAST:
            y = tl.fma(tl.fma(-y, d, n), r, y)
    else:
        y = tl.div_rn(n, d)
    return y


@jit
def _expm1(x, FAST: tl.constexpr, PTX: tl.constexpr):
    """e**x - 1; the difference cancels near 0."""
    if FAST == 2:  # it lies between x and x e**x: relative error 5e-4, without a predicate, of which there are few
        e = _exp(x, FAST, PTX)
        y = tl.maximum(x, tl.minimum(e - 1.0, x * e))
    elif FAST:  # 3e-5
        y = tl.where(tl.abs(x) < 0.0078125, tl.fma(0.5 * x, x, x), _exp(x, FAST, PTX) - 1.0)
    else:
        near = tl.abs(x) < 0.7
        tail = 1 / 720 + x * (1 / 5040 + x * (1 / 40320 + x * (1 / 362880)))
        tail = 1 / 6 + x * (1 / 24 + x * (1 / 120 + x * tail))
        y = tl.where(near, x + x * x * (0.5 + x * tail), _exp(x, FAST, PTX) - 1.0)
    return y


@jit
def _log1p(c, x, FAST: tl.constexpr):
    """c * log(1 + x), c a scalar, 0 <= x <= 1; the polynomials are of least relative error: 4e-4, 8e-6, 5e-9."""
    if FAST == 2:
        q = c * 0.2540250026 + x * (c * -0.07434310144)
        y = x * (c * 0.9996070225 + x * (c * -0.4864141343 + x * q))
    elif FAST:
        q = c * -0.21004869 + x * (c * 0.1012222848 + x * (c * -0.02386915171))
        y = x * (c * 0.9999915982 + x * (c * -0.4993613647 + x * (c * 0.3252066803 + x * q)))
    else:
        q = 0.1060365485 + x * (-0.05695953403 + x * (0.0198514623 + x * -0.003244025173))
        q = -0.2495413365 + x * (0.1967593924 + x * (-0.1530559254 + x * q))
        y = c * (x * (1.0 + x * (-0.4999990242 + x * (0.3332996242 + x * q))))
    return y


@jit
def _reciprocal(c, e, PTX: tl.constexpr):
    """c / (1 + e), FAST; the scalar c goes into the denominator, where it costs no instruction."""
    return _divide(1.0, tl.fma(e, 1.0 / c, 1.0 / c), True, PTX)


@jit
def _sigmoid(c, x, FAST: tl.constexpr, PTX: tl.constexpr):
    """c * sigmoid(x), c a scalar."""
    if FAST:
        y = _reciprocal(c, _exp(-x, FAST, PTX), PTX)
    else:
        e = _exp(-tl.abs(x), FAST, PTX)
        y = c * _divide(tl.where(x < 0, e, 1.0), 1.0 + e, FAST, PTX)
    return y


@jit
def _sigmoid_and_slope(x, FAST: tl.constexpr, PTX: tl.constexpr, dx=None):
    """(s, s * (1 - s)) of s = sigmoid(x), or of x + dx where dx is what rounding x lost."""
    if FAST:
        s = _sigmoid(1.0, x, FAST, PTX)
        slope = s * (1.0 - s)
    else:  # 1 - s cancels where s is near 1; with e = e**-|x| both are quotients
        e = _exp(-tl.abs(x), FAST, PTX, dx if dx is None else tl.where(x < 0, dx, -dx))
        s = _divide(tl.where(x < 0, e, 1.0), 1.0 + e, FAST, PTX)
        slope = _divide(e, tl.fma(e, e + 2.0, 1.0), FAST, PTX)
    return s, slope


@jit
def _tanh(c, x, FAST: tl.constexpr, PTX: tl.constexpr):
    """c * tanh(x), c a scalar; tanh.approx is too coarse for fp16."""
    if FAST:  # x P(x**2) / Q(x**2) of least relative error for |x| < 5, 5e-5, which is 1 - tanh(5) too
        x = tl.clamp(x, -5.0, 5.0, tl.PropagateNan.ALL)
        t = x * x
        p = c * 0.99994805 + t * (c * 0.1024177 + t * (c * 6.7056552e-4))
        y = _divide(x * p, 1.0 + t * (0.4354325 + t * 0.01281989), FAST, PTX)
    else:  # of |x|: z / (z + 2), z = e**(2|x|) - 1; it is 1 in fp32 from 9.1 on
        z = _expm1(2.0 * tl.minimum(tl.abs(x), 10.0, tl.PropagateNan.ALL), FAST, PTX)
        y = _divide(z, z + 2.0, FAST, PTX)
        y = c * tl.where(x < 0, -y, y)
    return y


@jit
def _normal_cdf(c, x, FAST: tl.constexpr, PTX: tl.constexpr):
    """c * P(X <= x) of the standard normal distribution, c a scalar."""
    if FAST:
        # sigmoid of an odd polynomial fitted to log(cdf(x) / cdf(-x)); coefficients times -log2(e). Relative error for
        # x > -3.4, and the absolute one of x * cdf(x) further out: 1.4e-5 and 3e-7; in bfloat16 3.7e-4 and 4e-7
        t = x * x
        if FAST == 2:
            p = 2.70415031e-05 + t * -9.99582635e-07
            p = 0.00089586523 + t * p
            p = -0.106891038 + t * p
            p = -2.30071094 + t * p
        else:
            p = 3.20521214e-07 + t * -4.06306826e-09
            p = -1.01085986e-05 + t * p
            p = 0.000146410981 + t * p
            p = 0.000154738802 + t * p
            p = -0.104951503 + t * p
            p = -2.30214626 + t * p
        y = _reciprocal(c, _exp2(x * p, PTX), PTX)
    else:
        y = c * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    return y


# --------------------------------------------------- forward(c, u) = c f(u) and backward(g, u) = g f'(u), Triton
# NaN passes through every comparison to the branch that keeps it, as in PyTorch.


@jit
def _identity(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return c * u


@jit
def _identity_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return g


@jit
def _relu(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return c * tl.maximum(u, 0.0, tl.PropagateNan.ALL)


@jit
def _relu_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where(u <= 0, 0.0, g)


@jit
def _leaky_relu(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return c * tl.where(u > 0, u, a * u)


@jit
def _leaky_relu_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where(u > 0, g, a * g)


@jit
def _relu_squared(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    r = tl.maximum(u, 0.0, tl.PropagateNan.ALL)
    return c * r * r


@jit
def _relu_squared_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where(u <= 0, 0.0, 2.0 * g * u)


@jit
def _gelu(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return u * _normal_cdf(c, u, FAST, PTX)


@jit
def _gelu_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    bell = _exp2(-0.7213475204444817 * (u * u), PTX) if FAST else _exp(-0.5 * (u * u), FAST, PTX)
    return g * (_normal_cdf(1.0, u, FAST, PTX) + (0.3989422804014327 * u) * bell)


@jit
def _gelu_tanh(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    # (1 + tanh(z)) / 2 = sigmoid(2 z), which keeps its relative accuracy in the tail
    if FAST:  # log2(e) goes into the coefficients
        s = _reciprocal(c, _exp2(u * (-2.3022081984 + -0.1029432407 * (u * u)), PTX), PTX)
    else:
        s = _sigmoid(c, u * (1.5957691216057308 + 0.07135481282553506 * (u * u)), FAST, PTX)
    return u * s


@jit
def _gelu_tanh_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    t = tl.minimum(u * u, 1e4)  # s is 0 or 1 and its slope 0 beyond; NaN comes back with u
    if FAST:
        s = _reciprocal(1.0, _exp2(u * (-2.3022081984 + -0.1029432407 * t), PTX), PTX)
        slope = s * (1.0 - s)
    else:
        s, slope = _sigmoid_and_slope(u * (1.5957691216057308 + 0.07135481282553506 * t), FAST, PTX)
    return g * (s + (1.5957691216057308 + 0.21406443847660518 * t) * (u * slope))


@jit
def _quick_gelu(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return u * _sigmoid(c, 1.702 * u, FAST, PTX)


@jit
def _quick_gelu_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    w = u if FAST else tl.clamp(u, -1e3, 1e3, tl.PropagateNan.ALL)  # a finite product, for its rounding error
    v = 1.702 * w
    s, slope = _sigmoid_and_slope(v, FAST, PTX, None if FAST else tl.fma(w, 1.702, -v))
    return g * tl.fma(u, 1.702 * slope, s)  # in this order, finite where 1.702 * u is not


@jit
def _silu(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return u * _sigmoid(c, u, FAST, PTX)


@jit
def _silu_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    s, slope = _sigmoid_and_slope(u, FAST, PTX)
    return g * (s + u * slope)


@jit
def _mish(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    # tanh(log(1 + e)) = n / (n + 2) with e = e**u, n = e * (e + 2); it is 1 in fp32 from u = 9 on
    e = _exp(tl.minimum(u, 20.0, tl.PropagateNan.ALL), FAST, PTX)
    n = tl.fma(e, e, 2.0 * e)
    return c * u * _divide(n, n + 2.0, FAST, PTX)


@jit
def _mish_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    v = tl.clamp(u, -1e4, 20.0, tl.PropagateNan.ALL)  # e**v is 0 below
    e = _exp(v, FAST, PTX)
    n = tl.fma(e, e, 2.0 * e)
    d = n + 2.0
    return g * _divide(tl.fma(4.0 * v, tl.fma(e, e, e), n * d), d * d, FAST, PTX)


@jit
def _elu(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    above, below = tl.maximum(u, 0.0, tl.PropagateNan.ALL), tl.minimum(u, 0.0, tl.PropagateNan.ALL)
    return c * tl.fma(a, _expm1(below, FAST, PTX), above)


@jit
def _elu_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where(u <= 0, g * (a * _exp(u, FAST, PTX)), g)


@jit
def _selu(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return _elu(c * 1.0507009873554805, u, 1.6732632423543772, b, FAST, PTX)


@jit
def _selu_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return 1.0507009873554805 * tl.where(u <= 0, g * (1.6732632423543772 * _exp(u, FAST, PTX)), g)


@jit
def _celu(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    above, below = tl.maximum(u, 0.0, tl.PropagateNan.ALL), tl.minimum(u, 0.0, tl.PropagateNan.ALL)
    return c * tl.fma(a, _expm1(below * (1.0 / a), FAST, PTX), above)


@jit
def _celu_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where(u <= 0, g * _exp(u * (1.0 / a), FAST, PTX), g)


@jit
def _softplus(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    v = a * u
    e = _exp(tl.where(v > b, float("-inf"), -tl.abs(v)), FAST, PTX)  # beyond the threshold 0
    sign = tl.where(a < 0, -1.0, 1.0)  # max(v, 0) / a = sign * max(sign * u, 0), also where v overflows
    return _log1p(c / a, e, FAST) + sign * tl.maximum((c * sign) * u, 0.0, tl.PropagateNan.ALL)


@jit
def _softplus_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where(a * u > b, g, g * _sigmoid(1.0, a * u, FAST, PTX))


@jit
def _softsign(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    d = 1.0 + tl.abs(u)  # may exceed what _divide takes
    return c * (u / d if FAST else tl.div_rn(u, d))


@jit
def _softsign_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    d = 1.0 + tl.abs(u)
    return _divide(g, d * d, FAST, PTX) if FAST else tl.div_rn(g, d * d)


@jit
def _sigmoid_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    s, slope = _sigmoid_and_slope(u, FAST, PTX)
    return g * slope


@jit
def _sigmoid_forward(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return _sigmoid(c, u, FAST, PTX)


@jit
def _tanh_forward(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return _tanh(c, u, FAST, PTX)


@jit
def _tanh_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    if FAST:  # 4 e / (1 + e)**2 with e = e**(-2|u|)
        e = _exp2(-2.8853900817779268 * tl.abs(u), PTX)
        d = 1.0 + e
        y = 4.0 * g * _divide(e, d * d, FAST, PTX)
    else:
        t = _tanh(1.0, u, FAST, PTX)
        y = g * ((1.0 - t) * (1.0 + t))
    return y


@jit
def _hardsigmoid(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.clamp(u + 3.0, 0.0, 6.0, tl.PropagateNan.ALL) * (c * (1 / 6))


@jit
def _hardsigmoid_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where(tl.abs(u) < 3.0, g * (1 / 6), 0.0)


@jit
def _hardswish(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return u * (tl.clamp(u + 3.0, 0.0, 6.0, tl.PropagateNan.ALL) * (c * (1 / 6)))


@jit
def _hardswish_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where(u <= -3.0, 0.0, tl.where(u < 3.0, g * (u * (1 / 3) + 0.5), g))


@jit
def _hardtanh(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return c * tl.clamp(u, a, b, tl.PropagateNan.ALL)


@jit
def _hardtanh_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where((u <= a) | (u >= b), 0.0, g)


@jit
def _relu6(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return c * tl.clamp(u, 0.0, 6.0, tl.PropagateNan.ALL)


@jit
def _relu6_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where((u <= 0) | (u >= 6.0), 0.0, g)


@jit
def _smelu(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    r = tl.maximum(u + a, 0.0, tl.PropagateNan.ALL)
    return c * tl.where(u >= a, u, r * r * (0.25 / a))


@jit
def _smelu_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return g * tl.clamp((u + a) * (0.5 / a), 0.0, 1.0, tl.PropagateNan.ALL)


@jit
def _star_relu(c, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    r = tl.maximum(u, 0.0, tl.PropagateNan.ALL)
    return c * (a * r * r + b)


@jit
def _star_relu_backward(g, u, a, b, FAST: tl.constexpr, PTX: tl.constexpr):
    return tl.where(u <= 0, 0.0, 2.0 * a * g * u)


# ---------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Entry:
    """One activation.

    Attributes:
        kernel, kernel_backward: the @triton.jit pair, fn(c, u, a, b, FAST, PTX) = c * f(u) and fn(g, ...) = g * f'(u).
        forward, backward: the torch pair, f(u, *parameters), differentiable, and g * f'(u) as fn(g, u, *parameters).
        parameters: names and default values, at most two; named as PyTorch names them.
        aliases: other names; the transformers library's are among them.
        twins: torch.nn modules and functions that compute it, or a class's full name where its library is optional;
            (twin, keyword, values) where it does so only with one of these values (None: not given).
        check: raises ValueError for parameters outside the domain.
    """

    kernel: Any
    kernel_backward: Any
    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    parameters: dict[str, float] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    twins: tuple[Any, ...] = ()
    check: Callable[..., None] | None = None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _smelu_torch(u: Tensor, beta: float) -> Tensor:
    return torch.where(u >= beta, u, (u + beta).clamp_min(0).square() / (4 * beta))


def _gelu_torch(u: Tensor) -> Tensor:
    return (0.5 * u) * torch.erfc(-math.sqrt(0.5) * u)  # oneDNN's F.gelu, which some CPUs take, is 1e-6 off


def _quick_gelu_backward_torch(g: Tensor, u: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * u)
    return g * (s + 1.702 * (u * (s * (1 - s))))  # in this order 1.702 * u is free to overflow


_HF = "transformers.activations."

TABLE: dict[str, Entry] = {
    "identity": Entry(
        _identity,
        _identity_backward,
        lambda u: u,
        lambda g, u: g,
        aliases=("linear", "none"),
        twins=(nn.Identity, _HF + "LinearActivation"),
    ),
    "relu": Entry(
        _relu,
        _relu_backward,
        F.relu,
        lambda g, u: aten.threshold_backward(g, u, 0),
        twins=(nn.ReLU, F.relu, torch.relu),
    ),
    "leaky_relu": Entry(
        _leaky_relu,
        _leaky_relu_backward,
        F.leaky_relu,
        lambda g, u, negative_slope: aten.leaky_relu_backward(g, u, negative_slope, False),
        {"negative_slope": 0.01},
        twins=(nn.LeakyReLU, F.leaky_relu),
    ),
    "relu_squared": Entry(
        _relu_squared,
        _relu_squared_backward,
        lambda u: F.relu(u).square(),
        lambda g, u: aten.threshold_backward(2 * g * u, u, 0),
        aliases=("squared_relu", "relu2"),
        twins=(_HF + "ReLUSquaredActivation",),
    ),
    "gelu": Entry(
        _gelu,
        _gelu_backward,
        _gelu_torch,
        aten.gelu_backward,
        aliases=("gelu_python", "gelu_erf"),
        twins=(
            (nn.GELU, "approximate", ("none",)),
            (F.gelu, "approximate", ("none", None)),
            _HF + "GELUActivation",
        ),
    ),
    "gelu_tanh": Entry(
        _gelu_tanh,
        _gelu_tanh_backward,
        lambda u: F.gelu(u, approximate="tanh"),
        lambda g, u: aten.gelu_backward(g, u.clamp(-1e5, 1e5), approximate="tanh"),  # u**3 is free to overflow
        aliases=("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "approx_gelu"),
        twins=(
            (nn.GELU, "approximate", ("tanh",)),
            (F.gelu, "approximate", ("tanh",)),
            _HF + "GELUTanh",
            _HF + "NewGELUActivation",
            _HF + "FastGELUActivation",
        ),
    ),
    "quick_gelu": Entry(
        _quick_gelu,
        _quick_gelu_backward,
        lambda u: u * torch.sigmoid(1.702 * u),
        _quick_gelu_backward_torch,
        twins=(_HF + "QuickGELUActivation",),
    ),
    "silu": Entry(
        _silu,
        _silu_backward,
        F.silu,
        aten.silu_backward,
        aliases=("swish",),
        twins=(nn.SiLU, F.silu, _HF + "SiLUActivation"),
    ),
    "mish": Entry(_mish, _mish_backward, F.mish, aten.mish_backward, twins=(nn.Mish, F.mish, _HF + "MishActivation")),
    "elu": Entry(
        _elu,
        _elu_backward,
        F.elu,
        lambda g, u, alpha: aten.elu_backward(g, alpha, 1, 1, False, u),
        {"alpha": 1.0},
        twins=(nn.ELU, F.elu),
    ),
    "selu": Entry(
        _selu,
        _selu_backward,
        F.selu,
        lambda g, u: aten.elu_backward(
            g, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1, False, u
        ),
        twins=(nn.SELU, F.selu, torch.selu),
    ),
    "celu": Entry(
        _celu,
        _celu_backward,
        F.celu,
        lambda g, u, alpha: aten.elu_backward(g, alpha, 1, 1 / alpha, False, u),
        {"alpha": 1.0},
        twins=(nn.CELU, F.celu, torch.celu),
        check=lambda alpha: _require(alpha != 0, f"alpha: got {alpha}, takes any number but 0"),
    ),
    "softplus": Entry(
        _softplus,
        _softplus_backward,
        F.softplus,
        aten.softplus_backward,
        {"beta": 1.0, "threshold": 20.0},
        twins=(nn.Softplus, F.softplus),
        check=lambda beta, threshold: _require(beta != 0, f"beta: got {beta}, takes any number but 0"),
    ),
    "softsign": Entry(
        _softsign,
        _softsign_backward,
        F.softsign,
        lambda g, u: g / (1 + u.abs()).square(),
        twins=(nn.Softsign, F.softsign),
    ),
    "sigmoid": Entry(
        _sigmoid_forward,
        _sigmoid_backward,
        torch.sigmoid,
        lambda g, u: aten.sigmoid_backward(g, torch.sigmoid(u)),
        twins=(nn.Sigmoid, torch.sigmoid, F.sigmoid),
    ),
    "tanh": Entry(
        _tanh_forward,
        _tanh_backward,
        torch.tanh,
        lambda g, u: aten.tanh_backward(g, torch.tanh(u)),
        twins=(nn.Tanh, torch.tanh, F.tanh),
    ),
    "hardsigmoid": Entry(
        _hardsigmoid,
        _hardsigmoid_backward,
        lambda u: F.relu6(u + 3) / 6,  # PyTorch has no second derivative of its own function
        lambda g, u: torch.where(u.abs() < 3, g / 6, 0.0),
        aliases=("hard_sigmoid",),
        twins=(nn.Hardsigmoid, F.hardsigmoid),
    ),
    "hardswish": Entry(
        _hardswish,
        _hardswish_backward,
        lambda u: u * (F.relu6(u + 3) / 6),  # on CUDA, PyTorch's own has a single precision 1 / 6 in float64
        aten.hardswish_backward,
        aliases=("hard_swish",),
        twins=(nn.Hardswish, F.hardswish),
    ),
    "hardtanh": Entry(
        _hardtanh,
        _hardtanh_backward,
        F.hardtanh,
        aten.hardtanh_backward,
        {"min_val": -1.0, "max_val": 1.0},
        twins=(nn.Hardtanh, F.hardtanh),
        check=lambda lo, hi: _require(lo <= hi, f"min_val: got {lo}, takes a number not above max_val = {hi}"),
    ),
    "relu6": Entry(
        _relu6,
        _relu6_backward,
        F.relu6,
        lambda g, u: aten.hardtanh_backward(g, u, 0, 6),
        twins=(nn.ReLU6, F.relu6),
    ),
    "smelu": Entry(  # Shamir et al., "Real world large scale recommendation systems reproducibility", 2022
        _smelu,
        _smelu_backward,
        _smelu_torch,
        lambda g, u, beta: g * ((u + beta) / (2 * beta)).clamp(0, 1),
        {"beta": 2.0},
        check=lambda beta: _require(beta > 0, f"beta: got {beta}, takes a number above 0"),
    ),
    "star_relu": Entry(  # Yu et al., "MetaFormer baselines for vision", 2022
        _star_relu,
        _star_relu_backward,
        lambda u, scale, bias: scale * F.relu(u).square() + bias,
        lambda g, u, scale, bias: aten.threshold_backward(2 * scale * g * u, u, 0),
        {"scale": 0.8944, "bias": -0.4472},
    ),
}

_NAMES = {alias: name for name, entry in TABLE.items() for alias in (name, *entry.aliases)}


class Activation(NamedTuple):
    """A resolved activation: the table's name and the values of its parameters, in the table's order."""

    name: str
    parameters: tuple[float, ...] = ()

    def __str__(self) -> str:
        given = zip(TABLE[self.name].parameters, self.parameters, strict=True)
        return self.name + "".join(f", {name}={value:g}" for name, value in given)


_PLAIN = {alias: Activation(name, tuple(TABLE[name].parameters.values())) for alias, name in _NAMES.items()}


def activations() -> list[str]:
    """The names of all activations, without aliases."""
    return list(TABLE)


def activation(spec: Any, **parameters: float) -> Activation:
    """Resolves an activation.

    Args:
        spec: a name or alias (`"gelu"`, `"swish"`, ...), a `torch.nn` activation module, a `torch.nn.functional`
            function, a `functools.partial` of one with keyword arguments, or a result of this function.
        parameters: replace the defaults; named as in PyTorch: `activation("leaky_relu", negative_slope=0.2)`.
    Returns:
        Activation, which every `activation=` argument takes.
    Raises:
        ValueError: an unknown name or function, an unknown parameter, or a value outside the parameter's domain.
        TypeError: a parameter that is not a number, or a spec of no kind named above.
    """
    if not parameters:
        if isinstance(spec, str) and spec in _PLAIN:
            return _PLAIN[spec]
        if isinstance(spec, Activation):
            return spec
    return _resolve(spec, parameters)


def _resolve(spec: Any, parameters: dict[str, Any]) -> Activation:
    if isinstance(spec, functools.partial) and not spec.args:
        return _resolve(spec.func, {**spec.keywords, **parameters})
    if isinstance(spec, str):
        name = _NAMES.get(spec)
    elif isinstance(spec, Activation):
        name = spec.name
        parameters = {**dict(zip(TABLE[name].parameters, spec.parameters, strict=True)), **parameters}
    elif isinstance(spec, nn.Module):
        name, parameters = _twin(type(spec), {**vars(spec), **parameters}, is_module=True)
    elif callable(spec):
        name, parameters = _twin(spec, parameters)
    else:
        raise TypeError(f"activation: got {type(spec).__name__}, takes a name, a torch.nn module or a function")
    if name is None:
        raise ValueError(f"activation: got {spec!r}, takes one of {', '.join(TABLE)}, or a torch twin of one")
    entry = TABLE[name]
    values = {**entry.parameters, **parameters}
    if unknown := values.keys() - entry.parameters.keys():
        takes = ", ".join(entry.parameters) or "none"
        raise ValueError(f"activation: got parameter {', '.join(sorted(unknown))} for {name}, which takes {takes}")
    for parameter, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{parameter}: got {type(value).__name__}, takes a number")
        _require(math.isfinite(value), f"{parameter}: got {value}, takes a finite number")
    if entry.check is not None:
        entry.check(*values.values())
    return Activation(name, tuple(float(value) for value in values.values()))


def _twin(twin: Any, given: dict[str, Any], is_module: bool = False) -> tuple[str | None, dict[str, Any]]:
    """The entry that a torch class or function computes under the given keywords, and the parameters among them."""
    full_name = f"{getattr(twin, '__module__', '')}.{getattr(twin, '__qualname__', '')}"
    for name, entry in TABLE.items():
        for candidate in entry.twins:
            known, keyword, values = candidate if isinstance(candidate, tuple) else (candidate, "inplace", None)
            if (known is twin or known == full_name) and (values is None or given.get(keyword) in values):
                # a module's dict holds more than parameters; a function's keywords are all meant
                return name, {
                    k: v for k, v in given.items() if k in entry.parameters or not (is_module or k == keyword)
                }
    return None, given
