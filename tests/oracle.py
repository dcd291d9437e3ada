"""What the tests compare with, written from the contract and from torch.nn.functional alone: no code of xfused.

The mask in plain Python ints and numpy uint64; the activations and their derivatives in float64.
"""

from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

DATA = Path(__file__).parent / "data"
LOW = 0xFFFFFFFF


def cases(name):
    """The rows of a file in tests/data, split at `|`."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [tuple(field.strip() for field in line.split("|")) for line in lines if line and line[0] != "#"]


# --------------------------------------------------------------------------------------------------- the mask


def philox(counter, key, rounds=10):
    """Philox4x32 on Python ints or on numpy uint64 arrays that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # below 2**64
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & LOW, (left >> 32) ^ c3 ^ k1, left & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def threshold(p):
    """T = round(p * 2**32), exactly."""
    return round(Fraction(p) * 2**32)


def unsigned(word):
    """The 64-bit word behind an int64."""
    return int(word) % 2**64


def draws_at(key, offset, rows, cols):
    """The draws at given global rows and columns (integers): uint64 array (rows, cols)."""
    key, offset = unsigned(key), unsigned(offset)
    rows = np.asarray(rows, dtype=np.uint64)[:, None]
    cols = np.asarray(cols, dtype=np.uint64)[None, :]
    words = philox(
        (rows // np.uint64(8), np.uint64(offset & LOW), cols, np.uint64(offset >> 32)), (key & LOW, key >> 32)
    )
    word = np.choose((rows % 8 // 2).astype(np.int64), np.broadcast_arrays(*words))
    return np.where(rows % 2 == 1, word, ((word << np.uint64(16)) & np.uint64(LOW)) | (word >> np.uint64(16)))


def keep_at(key, offset, rows, cols, p):
    """The keep mask at given global rows and columns: bool array."""
    return draws_at(key, offset, rows, cols) >= threshold(p)


def keep(seed, rows, cols, p, origin=(0, 0)):
    """The keep mask of a (rows, cols) shard at `origin`, as a torch tensor; seed = (key, offset)."""
    row0, col0 = origin
    mask = keep_at(
        *seed, np.arange(row0, row0 + rows, dtype=np.uint64), np.arange(col0, col0 + cols, dtype=np.uint64), p
    )
    return torch.from_numpy(mask)


# ---------------------------------------------------------------------------------------------- the activations


def _smelu(u, beta=2.0):
    inner = u.clamp(-beta, beta)  # keeps autograd from inf - inf outside
    return torch.where(u >= beta, u, (inner + beta) ** 2 / (4 * beta))


# name -> the function as PyTorch, or the paper that introduced it, defines it; its parameters follow u
FUNCTIONS = {
    "identity": lambda u: u * 1,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "relu_squared": lambda u: F.relu(u) ** 2,
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "quick_gelu": lambda u: u * torch.sigmoid(1.702 * u),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "smelu": _smelu,
    "star_relu": lambda u, scale=0.8944, bias=-0.4472: scale * F.relu(u) ** 2 + bias,
}

# the parametrised ones with values that are not the defaults
PARAMETERS = {
    "leaky_relu": {"negative_slope": 0.3},
    "elu": {"alpha": 1.7},
    "celu": {"alpha": 0.6},
    "softplus": {"beta": 2.5, "threshold": 6.0},
    "hardtanh": {"min_val": -0.5, "max_val": 2.25},
    "smelu": {"beta": 1.25},
    "star_relu": {"scale": 1.5, "bias": -0.75},
}


def forward_backward(name, u, dy, parameters=()):
    """f(u) and dy * f'(u) by autograd, in u's dtype and on its device."""
    u = u.detach().clone().requires_grad_()
    with torch.enable_grad():
        y = FUNCTIONS[name](u, *parameters)
        (du,) = torch.autograd.grad(y, u, dy)
    return y.detach(), du


def eager(name, x, bias, dy, parameters=(), keep=None, scale=1.0):
    """What plain PyTorch gives for y, dx, dbias, in the dtypes and on the device of the tensors."""
    x = x.detach().clone().requires_grad_()
    inputs = [x]
    if bias is not None:
        bias = bias.detach().clone().requires_grad_()
        inputs.append(bias)
    with torch.enable_grad():
        y = FUNCTIONS[name](x if bias is None else x + bias, *parameters)
        if keep is not None:
            y = torch.where(keep, y * scale, torch.zeros_like(y))
        grads = torch.autograd.grad(y, inputs, dy)
    return y.detach(), grads[0], grads[1] if bias is not None else None


def exact(name, x, bias, dy, parameters=(), keep=None, scale=1.0):
    """y, dx, dbias in float64 from the exact values of the tensors."""
    bias = None if bias is None else bias.double()
    return eager(name, x.double(), bias, dy.double(), parameters, keep, scale)


def ulp(values, dtype):
    """The distance of floating-point numbers of `dtype` at |values|, as float64; subnormal spacing near zero."""
    info = torch.finfo(dtype)
    magnitude = values.double().abs().clamp_min(info.tiny)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps
