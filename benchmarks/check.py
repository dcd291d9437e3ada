"""Whether a provider computes the op: values, gradients, what it drops. Nothing else is timed."""

import math

import torch
from torch import Tensor

from .registry import Builder, Case, Op


class MismatchError(ValueError):
    """A provider computes something else."""


def check(op: Op, case: Case, build: Builder, inputs: tuple[Tensor, ...]) -> None:
    """Compares with float64.

    The mask is read off the result, which is 0 where it drops; where the oracle is 0 too, keeping makes no difference.
    Errors are relative to the largest value; in 16-bit dtypes they are the roundings of a few intermediate steps.

    Raises:
        MismatchError: what differs, in one line.
    """
    exact = [t.detach().double().requires_grad_() for t in inputs]
    full = op.oracle(case, exact, None)
    y = build(case, inputs)(*inputs)
    if y.shape != full.shape:
        raise MismatchError(f"{case}: got shape {tuple(y.shape)}, not {tuple(full.shape)}")
    if y.dtype != case.torch_dtype:
        raise MismatchError(f"{case}: got {y.dtype}")
    tolerance = torch.finfo(y.dtype).eps * op.slack * (16 if y.dtype == torch.float32 else 2)
    want = full
    if case.p > 0:
        visible = full != 0
        keep = (y != 0) | ~visible
        count = int(visible.sum())
        dropped = 1 - int((keep & visible).sum()) / count
        if abs(dropped - case.p) > 6 * math.sqrt(case.p * (1 - case.p) / count):
            raise MismatchError(f"{case}: drops {dropped:.4f}")
        want = op.oracle(case, exact, keep)
    _compare(case, "value", y, want, tolerance)
    dy = torch.randn_like(y)
    for name, got, expected in zip(
        ("first", "second", "third", "fourth", "fifth", "sixth"),
        torch.autograd.grad(y, inputs, dy),
        torch.autograd.grad(want, exact, dy.double()),
        strict=False,
    ):
        _compare(case, f"gradient of the {name} input", got, expected, 2 * tolerance)


def _compare(case: Case, what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    error = float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max())
    if not error <= tolerance:  # NaN too
        raise MismatchError(f"{case}: {what} is off by {error:.1e}, more than {tolerance:.1e}")
