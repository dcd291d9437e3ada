"""What every launcher needs: rows of a tensor, tile sizes, the seed's arguments, counters, and a quick launch."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import philox
from .._triton import INTERPRET, has_ptx


def as_rows(t: Tensor, n: int) -> Tensor:
    """`t` (..., n) as (rows, n) with unit column stride: a view where one exists, else a copy."""
    rows = t.reshape(-1, n)
    return rows if rows.stride(1) == 1 or n == 1 else rows.contiguous()


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def tile(n: int, vector: int, block_n: int, warps: int) -> tuple[int, int, int]:
    """(BLOCK_G, BLOCK_N, num_warps) where each thread holds `vector` neighbouring columns of one row group."""
    block_n = min(block_n, next_power_of_2(n))
    return max(1, warps * 32 * vector // block_n), block_n, warps


def seed_args(seed: Tensor | None, p: float) -> tuple[Tensor | None, int, int, int]:
    """seed_ptr, key, offset, last_dropped: a seed on the CPU travels with the launch, another by its address."""
    last_dropped = max(philox.threshold(p) - 1, 0)
    if seed is None:
        return None, 0, 0, last_dropped
    if seed.device.type != "cpu":
        return seed, 0, 0, last_dropped
    key, offset = seed.tolist()
    return None, key, offset, last_dropped


def origin_args(row0: int, col0: int) -> tuple[int, int, int]:
    """group0, col0, skip."""
    return row0 // philox.ROWS_PER_CALL, col0, row0 % philox.ROWS_PER_CALL


_compiled: dict[Any, Any] = {}
_SPECIALISED = ("n", "stride_x", "stride_dy")  # of a kernel's integers, those whose alignment the compiler uses


def launch(
    kernel: Any,
    grid: int,
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    registers: Mapping[int, int],
) -> None:
    """kernel[(grid,)](*args, *constants) on the device of the first tensor in `args`, at a fraction of its host time.

    Triton's own launch binds and hashes every argument. Here the compiled kernel is looked up by what it depends on:
    the constants, each tensor's dtype and 16-byte alignment, and the specialised integers' alignment. `registers`: how
    many a thread may have, by the GPU's major compute capability; the assembler decides where nothing is given.
    """
    device = args[0].device
    if INTERPRET:
        kernel[(grid,)](*args, *constants, num_warps=num_warps)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, args, constants, num_warps, registers)
    key = [kernel.__name__, device.index, num_warps, constants]
    for name, arg in zip(kernel.arg_names, args, strict=False):
        if isinstance(arg, Tensor):
            key.append((arg.dtype, arg.data_ptr() % 16 == 0))
        elif arg is None:
            key.append(None)
        elif name in _SPECIALISED:
            key.append((arg % 16 == 0, arg == 1))
    compiled = _compiled.get(tuple(key))
    if compiled is None:
        options = {"num_warps": num_warps, "enable_fp_fusion": True}
        if has_ptx(device) and (limit := registers.get(torch.cuda.get_device_capability(device)[0])):
            options["maxnreg"] = limit
        _compiled[tuple(key)] = kernel[(grid,)](*args, *constants, **options)
    else:
        compiled[(grid, 1, 1)](*args, *constants)


_COUNTERS = 1 << 16
_counters: dict[tuple[int, int], Tensor] = {}


def counters(blocks: int, device: torch.device) -> Tensor:
    """int32 zeros for `blocks` column blocks, which each launch leaves at zero.

    One buffer a stream, since launches on one stream do not overlap; a graph under capture gets its own, which its
    replays zero.
    """
    if device.type != "cuda" or blocks > _COUNTERS or torch.cuda.is_current_stream_capturing():
        return torch.zeros(blocks, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (index, torch.cuda.current_stream(index).cuda_stream)
    if key not in _counters:
        # In a thread of its own: the warm-up of torch.compile's CUDA graphs sends this thread's allocations to a
        # memory pool whose blocks it reclaims behind their owners' back.
        thread = threading.Thread(target=_new_counters, args=(key,))
        thread.start()
        thread.join()
    return _counters[key]


def _new_counters(key: tuple[int, int]) -> None:
    zeros = torch.zeros(_COUNTERS, dtype=torch.int32, device=torch.device("cuda", key[0]))
    torch.cuda.synchronize(key[0])  # once: whichever stream uses it next finds zeros
    _counters[key] = zeros
