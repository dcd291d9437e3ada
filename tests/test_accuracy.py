"""Values and derivatives of every activation against float64, at ordinary and at extreme inputs, and at the kinks.

What an fp32 result may be off by is counted in ulp of the function's own scale at u = x + bias:

    of f:   the largest of |f| and |u f'|: what one rounding of u moves f by is half an ulp of |u f'|;
    of f':  likewise the largest of |f'| and |u f''|;
    and of the terms that PyTorch's own formula adds up, since a sum cannot be more accurate than its largest term's
    ulp: |u| / 2 for gelu = u/2 + u/2 erf; g and u g' for the derivative g + u g' of every u g(u), where g is
    1/2 + 1/2 erf or 1/2 + 1/2 tanh for the two gelu; 1 for tanh' = 1 - t**2; s for sigmoid' = s - s**2.

Below 2**-100 nothing is asked: the exponential in 1 / (1 + e**-u) overflows long before the quotient underflows.
"""

import math

import oracle
import pytest
import torch
from paths import CUDA, GPU, INTERPRETER, MARKS, REFERENCE, every_path, kernel_path

import xfused
from xfused._triton import HAS_TRITON, triton

NAMES = list(oracle.FUNCTIONS)
ULPS = 4
# inf * 0 in PyTorch's derivatives at infinities
NAN_IN_PYTORCH = ("gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "softsign")
# derivatives at NaN that PyTorch's own CPU and CUDA kernels give differently; smelu has no twin in PyTorch
NAN_DEPENDS_ON_DEVICE = ("hardtanh", "relu6", "hardswish", "elu", "selu", "celu", "smelu")
FP16_ON_GPU = ("gelu", "gelu_tanh", "silu", "mish", "softplus", "tanh", "relu_squared", "identity")
OLD_TRITON = HAS_TRITON and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
every_activation = pytest.mark.parametrize("name", NAMES)

# float64 forms that keep their relative accuracy in the tail, where PyTorch's 1 + erf and 1 + tanh cancel even there
STABLE = {
    "gelu": lambda u: u * torch.special.erfc(-u * math.sqrt(0.5)) / 2,
    "gelu_tanh": lambda u: u * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)),
}


def test_every_activation_has_an_independent_reference():
    assert xfused.activations() == NAMES
    assert set(oracle.PARAMETERS) == {name for name in NAMES if xfused.activation(name).parameters}


def arguments(path, dtype, rows=32):
    """x (rows, 128) with random, evenly spaced, and over all exponents spaced values, a bias, and dy."""
    rows = 1024 if path is GPU else rows
    generator = torch.Generator().manual_seed(5)
    count = rows * 32
    exponents = torch.exp(torch.linspace(-30, 4.5, count // 2))
    x = torch.cat(
        [
            torch.randn(2 * count, generator=generator) * 2,
            torch.linspace(-12, 12, count),
            exponents,
            -exponents,
        ]
    )
    bias = torch.randn(128, generator=generator) * 0.7
    dy = torch.randn(rows, 128, generator=generator)
    return tuple(t.to(dtype).to(path.device) for t in (x.view(rows, 128), bias, dy))


def truth_and_scales(name, u, parameters=()):
    """f, f' and their scales at u, float64."""
    function = STABLE.get(name, oracle.FUNCTIONS[name])
    u = u.double().requires_grad_()
    f = function(u, *parameters)
    (slope,) = torch.autograd.grad(f.sum(), u, create_graph=name != "hardsigmoid")  # it has no second derivative
    curvature = torch.zeros_like(u)
    if slope.requires_grad:
        (curvature,) = torch.autograd.grad(slope.sum(), u)
    u, f, slope = u.detach(), f.detach(), slope.detach()
    scales = [torch.maximum(f.abs(), (u * slope).abs()), torch.maximum(slope.abs(), (u * curvature).abs())]
    if name == "gelu":
        scales[0] = torch.maximum(scales[0], u.abs() / 2)
    if name in ("gelu", "gelu_tanh", "quick_gelu", "silu", "mish"):
        g = torch.where(u == 0, slope, f / u)
        scales[1] = torch.stack([scales[1], g.abs(), (slope - g).abs()]).amax(0)
    if name in ("gelu", "gelu_tanh"):
        scales[1] = scales[1].clamp_min(0.5)
    if name == "tanh":
        scales[1] = torch.ones_like(u)
    if name == "sigmoid":
        scales[1] = torch.maximum(scales[1], f)
    return f, slope, *(scale.clamp_min(2.0**-100) for scale in scales)


def assert_within_ulps(ours, truth, scale, u, what):
    error = (ours.double() - truth).abs() / oracle.ulp(scale, torch.float32)
    worst = int(error.argmax())
    assert not error.isnan().any()
    assert error.max() <= ULPS, f"{what}: {float(error.max()):.1f} ulp at u = {float(u.flatten()[worst])!r}"


@kernel_path
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@every_activation
def test_fp32_is_within_4_ulp_of_its_scale(path, name, with_bias):
    if with_bias and path is INTERPRETER and name not in ("relu", "gelu", "gelu_tanh", "mish", "tanh"):
        pytest.skip("the sum x + bias is the same code for all; all of them run on a GPU")
    x, bias, _ = arguments(path, torch.float32)
    dy = torch.ones_like(x)
    y, dx, dbias = path.forward_backward(x, bias if with_bias else torch.zeros_like(bias), dy, name)
    u = x.double() + bias.double() if with_bias else x.double()
    f, slope, scale, slope_scale = truth_and_scales(name, u)
    assert_within_ulps(y, f, scale, u, f"{name} forward")
    assert_within_ulps(dx, slope, slope_scale, u, f"{name} derivative")
    # a sum in fp32 of terms that each hold a bound of their own
    slack = ULPS * oracle.ulp(slope_scale, torch.float32).sum(0) + slope.abs().sum(0) * x.shape[0] ** 0.5 * 2**-23
    assert ((dbias.double() - slope.sum(0)).abs() <= slack).all()


@kernel_path
@pytest.mark.parametrize("name", list(oracle.PARAMETERS))
def test_fp32_with_other_parameters(path, name):
    x, bias, _ = arguments(path, torch.float32)
    values = oracle.PARAMETERS[name]
    act = xfused.activation(name, **values)
    y, dx, _ = path.forward_backward(x, torch.zeros_like(bias), torch.ones_like(x), act)
    f, slope, scale, slope_scale = truth_and_scales(name, x, tuple(values.values()))
    assert_within_ulps(y, f, scale, x, f"{act} forward")
    assert_within_ulps(dx, slope, slope_scale, x, f"{act} derivative")


def _errors(ours, truth, dtype):
    """Largest and root mean square error, absolute and in ulp of the true value."""
    error = (ours.double() - truth).abs()
    relative = error / oracle.ulp(truth, dtype)
    return [error.max(), error.square().mean().sqrt(), relative.max(), relative.square().mean().sqrt()]


@kernel_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every_activation
def test_16_bits_are_never_worse_than_eager_pytorch(path, name, dtype):
    if path is INTERPRETER and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16, where hardware rounds")
    if path is GPU and dtype == torch.float16 and name not in FP16_ON_GPU:
        pytest.skip("the same code as bf16, which runs")
    x, bias, dy = arguments(path, dtype, rows=64)
    x = x.clamp(-60, 60)  # the squares stay finite in fp16
    ours = path.forward_backward(x, bias, dy, name)
    eager = oracle.eager(name, x, bias, dy)
    truth = oracle.exact(name, x, bias, dy)
    assert ours[0].dtype == ours[1].dtype == ours[2].dtype == dtype
    for what, a, b, true in zip(("y", "dx", "dbias"), ours, eager, truth, strict=True):
        for kind, error, bound in zip(("max", "rms"), _errors(a, true, dtype), _errors(b, true, dtype), strict=False):
            assert error <= bound, f"{name} {what}: {kind} error {float(error):.3g}, PyTorch's {float(bound):.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@every_activation
def test_the_reference_path_is_pytorch(name, dtype):
    """In 16 bits: PyTorch in fp32, rounded once."""
    x, bias, dy = arguments(REFERENCE, dtype)
    ours = REFERENCE.forward_backward(x, bias, dy, name)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = oracle.eager(name, x.to(wide), bias.to(wide), dy.to(wide))
    # autograd's own formula for softsign cancels: 50 ulp; gelu from oneDNN, which some CPUs take, is 1e-6 off
    if name in ("softsign", "gelu") and dtype == torch.float32:
        expected = [t.float() for t in oracle.exact(name, x, bias, dy)]
    if name == "hardsigmoid" and dtype == torch.float64:  # PyTorch's own has a single precision 1 / 6 in its gradient
        expected = [expected[0], dy / 6 * ((x + bias).abs() < 3)]
    for a, b in zip(ours[:2], expected[:2], strict=True):
        tolerance = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2**-8}[dtype]
        torch.testing.assert_close(a.to(wide), b, rtol=tolerance, atol=tolerance * 0.1)


# ------------------------------------------------------------------------------------------------------ extremes


def _filled(points):
    """The points over and over, as (8, 128): a shape whose kernels the tests above have compiled."""
    return points.repeat(-(-1024 // points.numel()))[:1024].view(8, 128)


def _neighbours(values):
    points = torch.tensor(values, dtype=torch.float32)
    up, down = (torch.nextafter(points, torch.tensor(inf)) for inf in (math.inf, -math.inf))
    return torch.cat([down, points, up])


KINKS = [-6.0, -3.0, -2.0, -1.25, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 1.25, 2.0, 2.25, 2.4, 3.0, 6.0, 20.0]


@every_path
@pytest.mark.parametrize("parameters", [False, True], ids=["default", "other"])
@pytest.mark.parametrize(
    "name",
    [
        "relu",
        "relu_squared",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "softplus",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "relu6",
        "smelu",
        "star_relu",
    ],
)
def test_derivatives_at_kinks_are_pytorchs(path, name, parameters):
    if parameters and name not in oracle.PARAMETERS:
        pytest.skip("has no parameters")
    values = oracle.PARAMETERS[name] if parameters else {}
    x = _filled(_neighbours(KINKS)).to(path.device)
    dy = torch.ones_like(x)
    expected = oracle.forward_backward(name, x, dy, tuple(values.values()))
    if name == "softplus":  # at the threshold, decided in fp32, PyTorch goes over to the identity
        values = values or {"beta": 1.0, "threshold": 20.0}
    y, dx, _ = path.forward_backward(x, torch.zeros_like(x[0]), dy, xfused.activation(name, **values))
    for ours, theirs in zip((y, dx), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def _extremes(dtype, device):
    info = torch.finfo(dtype)
    points = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        info.max,
        info.min,
        info.tiny,
        -info.tiny,
        info.smallest_normal / 4,
        -info.smallest_normal / 4,
        1e4,
        -1e4,
        250.0,
        -250.0,
        88.0,
        -88.0,
        89.0,
        -89.0,
        104.0,
        -104.0,
        20.0,
        -20.0,
        9.0,
        -9.0,
        1e-4,
        -1e-4,
    ]
    if dtype != torch.float16:
        points += [1e30, -1e30, 2e19, -2e19, 3e12, -3e12]
    return _filled(torch.tensor(points, dtype=torch.float64).to(dtype).to(device))


@every_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@every_activation
def test_extreme_inputs_give_what_pytorch_gives(path, name, dtype):
    if path is GPU and dtype == torch.float16 and name not in FP16_ON_GPU:
        pytest.skip("the same code as bf16, which runs")
    x = _extremes(dtype, path.device)
    if path is INTERPRETER and dtype == torch.bfloat16:  # it does not convert bfloat16's subnormal numbers
        x = torch.where(x.abs() < torch.finfo(dtype).tiny, 0.0, x)
        if OLD_TRITON and name in ("elu", "selu", "celu"):  # its tl.minimum hands on NaN, as on no GPU
            x = torch.where(x.isneginf(), 0.0, x)
    bias = torch.zeros(x.shape[1], dtype=dtype, device=path.device)
    dy = torch.ones_like(x)
    y, dx, _ = path.forward_backward(x, bias, dy, name)
    # PyTorch in fp32 rounded once: in eager 16-bit arithmetic x * x overflows where the result need not; in float64
    # where a product on the way overflows fp32
    narrow = oracle.forward_backward(name, x.float(), dy.float())
    wide = oracle.forward_backward(name, x.double(), dy.double())
    finite = x.isfinite()
    rtol = 4 * torch.finfo(dtype).eps
    for what, ours, *theirs in zip(("forward", "derivative"), (y, dx), narrow, wide, strict=True):
        assert not ours[finite].isnan().any(), (
            f"{name} {what}: NaN from {set(x[finite][ours[finite].isnan()].tolist())}"
        )
        theirs = [t.to(dtype).double() for t in theirs]
        close = torch.stack(
            [torch.isclose(ours.double(), t, rtol=rtol, atol=1e-6, equal_nan=True) for t in theirs]
        ).any(0)
        if what == "derivative" and name in NAN_IN_PYTORCH:
            close |= theirs[0].isnan() & x.isinf()
        if what == "derivative" and name in NAN_DEPENDS_ON_DEVICE and (path is not GPU or name == "smelu"):
            close |= x.isnan()
        assert close.all(), f"{name} {what} at {x[~close][0]}: {ours[~close][0]}, not {theirs[0][~close][0]}"


@every_path
@pytest.mark.parametrize("name", ["identity", "relu", "gelu", "star_relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_dropped_is_zero_even_where_x_and_dy_are_not_finite(path, name, dtype):
    x = _extremes(dtype, path.device)
    rows, cols = x.shape
    bias = torch.linspace(-1, 1, cols).to(x)
    keep = oracle.keep((6, 6), rows, cols, 0.5).to(path.device)
    y, dx, _ = path.forward_backward(x, bias, x.flip(0), name, 0.5, (6, 6))
    assert (y[~keep] == 0).all() and (dx[~keep] == 0).all()
    assert y[keep & x.isnan()].isnan().all()
    if name in ("identity", "gelu"):  # the others are 0 below 0, whatever dy is
        assert dx[keep & x.flip(0).isnan()].isnan().all()
    everything = path.forward_backward(x, bias, x, name, 1.0, (6, 6))
    assert all((out == 0).all() for out in everything)


def test_kernels_are_tested_somewhere():
    assert CUDA or MARKS[INTERPRETER].args[0] is False
