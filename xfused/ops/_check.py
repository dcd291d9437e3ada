"""Checks of arguments that operations share. Each raises before anything is launched or changed."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..philox import MAX_COL, MAX_ROW

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN = {Tensor, torch.nn.Parameter, type(None)}  # of what a tensor argument may be, all but subclasses


def is_dtensor(t: Any) -> bool:
    """Whether t is a DTensor; does not import torch.distributed.tensor."""
    if type(t) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def check_p(p: Any, name: str = "p") -> None:
    if type(p) is not float and (isinstance(p, bool) or not isinstance(p, (int, float))):
        raise TypeError(f"{name}: got {type(p).__name__}, takes a number from 0 to 1")
    if not 0 <= p <= 1:  # False for NaN
        raise ValueError(f"{name}: got {p}, takes a number from 0 to 1")


def check_x(x: Any, name: str = "x") -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, takes a tensor")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name}: got dtype {x.dtype}, takes float32, bfloat16, float16 or float64")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: got layout {x.layout}, takes torch.strided")


def check_rows(x: Any, bias: Any) -> None:
    """x (..., N) and bias (N,) or None, on one device."""
    check_x(x)
    if x.dim() == 0:
        raise ValueError("x: got a 0-dimensional tensor, takes at least one dimension")
    if bias is None:
        return
    check_x(bias, "bias")
    if bias.dim() != 1 or bias.shape[0] != x.shape[-1]:
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, takes ({x.shape[-1]},), x's last dimension")
    if bias.device != x.device:
        raise ValueError(f"bias: got a tensor on {bias.device}, takes one on {x.device}, as x")


def check_origin(origin: Any, rows: int, cols: int) -> tuple[int, int]:
    if not isinstance(origin, Sequence) or len(origin) != 2:
        raise TypeError(f"origin: got {origin!r}, takes two ints: row, column")
    row0, col0 = origin
    for value in (row0, col0):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"origin: got {origin!r}, takes two ints: row, column")
    if row0 < 0 or col0 < 0:
        raise ValueError(f"origin: got {tuple(origin)}, takes no negative number")
    if not all(type(value) is int for value in (row0, col0, rows, cols)):
        return row0, col0  # a symbolic size under torch.compile or torch.export, which a check would restrict
    if row0 + rows - 1 > MAX_ROW:
        raise ValueError(f"origin: got row {row0} for {rows} rows, takes a last row of at most 2**35 - 1")
    if col0 + cols - 1 > MAX_COL:
        raise ValueError(f"origin: got column {col0} for {cols} columns, takes a last column of at most 2**32 - 1")
    return row0, col0
