"""Triton where it exists: `triton`, `tl` and `jit`, or stand-ins that let the modules import without it."""

import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # no Triton on this platform: the torch path serves every device
    HAS_TRITON = False
    triton = None

    class _Absent:
        """Lets annotations such as `tl.constexpr` be evaluated; nothing of it is ever called."""

        def __getattr__(self, name: str) -> Any:
            return _Absent()

    tl = _Absent()


def jit(fn: Any = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """`triton.jit`; names in `do_not_specialize` that a kernel does not have are left out. Without Triton: nothing."""
    if fn is None:
        return functools.partial(jit, do_not_specialize=do_not_specialize)
    if not HAS_TRITON:
        return fn
    names = inspect.signature(fn).parameters
    return triton.jit(fn, do_not_specialize=[name for name in do_not_specialize if name in names])


# Triton's own switch, read when a kernel is decorated: kernels then run on the CPU, without inline PTX.
INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors on `device` go through the Triton kernels; every other device takes the torch path."""
    return HAS_TRITON and device.type == "cuda" and not INTERPRET


def has_ptx(device: torch.device) -> bool:
    """Whether kernels launched for `device` may hold inline PTX (NVIDIA, compiled)."""
    return device.type == "cuda" and not INTERPRET and torch.version.hip is None
