"""What every launcher needs: rows of a tensor, tile sizes, the seed's arguments, counters, the device guard."""

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor

from .. import philox


def as_rows(t: Tensor, n: int) -> Tensor:
    """`t` (..., n) as (rows, n) with unit column stride: a view where one exists, else a copy."""
    rows = t.reshape(-1, n)
    return rows if rows.stride(1) == 1 or n == 1 else rows.contiguous()


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def tile(n: int, itemsize: int, block_n: int, warps: int) -> tuple[int, int, int]:
    """(BLOCK_G, BLOCK_N, num_warps) with one 16-byte access a thread in each of the tile's eight subtiles."""
    block_n = min(block_n, next_power_of_2(n))
    return max(1, warps * 32 * (16 // itemsize) // block_n), block_n, warps


def origin_args(row0: int, col0: int) -> dict[str, int]:
    return {"group0": row0 // philox.ROWS_PER_CALL, "col0": col0, "skip": row0 % philox.ROWS_PER_CALL}


def seed_args(seed: Tensor | None, p: float) -> dict[str, Any]:
    """The kernels' seed and probability arguments; a seed on the CPU travels with the launch, else by its address."""
    T = philox.threshold(p)
    key, offset = (0, 0) if seed is None or T == 0 or seed.device.type != "cpu" else seed.tolist()
    on_device = seed is not None and T > 0 and seed.device.type != "cpu"
    return {
        "seed_ptr": seed if on_device else None,
        "key": key,
        "offset": offset,
        "last_dropped": max(T - 1, 0),
    }


def device_guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


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
