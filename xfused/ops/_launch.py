"""What every launcher needs: rows of a tensor, the seed's arguments, counters, and a quick launch."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import philox
from .._triton import INTERPRET, has_ptx


def as_rows(t: Tensor, n: int) -> Tensor:
    """`t` (..., n) as (rows, n) with unit column stride: a view where one exists, else a copy."""
    rows = t.reshape(-1, n)
    return rows if rows.stride(1) == 1 or n == 1 else rows.contiguous()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


Seed = Tensor | tuple[int, int] | None


def seed_args(seed: Seed) -> tuple[Any, int, int]:
    """seed_ptr, key, offset: words known to the host travel with the launch, a seed on the device by its address."""
    if seed is None:
        return None, 0, 0
    if isinstance(seed, tuple):
        return None, *seed
    if seed.device.type != "cpu":
        return seed, 0, 0
    key, offset = seed.tolist()
    return None, key, offset


def origin_args(row0: int, col0: int) -> tuple[int, int, int]:
    """group0, col0, skip."""
    return row0 // philox.ROWS_PER_CALL, col0, row0 % philox.ROWS_PER_CALL


_compiled: dict[Any, Any] = {}
LIMITED = (9, 10)  # major compute capabilities where a limit of registers is set


def launch(
    kernel: Any,
    grid: int,
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    registers: int,
) -> Callable[..., None] | None:
    """kernel[(grid,)](*args, *constants) on the device of the first tensor in `args`, at a fraction of its host time.

    Triton's own launch binds and hashes every argument. Here the compiled kernel is looked up by what it depends on:
    constants, warps, registers, and each tensor's dtype and 16-byte alignment; no integer is specialised. `registers`:
    how many a thread may have; 0, or where that spills: the assembler decides.

    Returns a function that launches the same compiled kernel on the same grid with other arguments, or None.
    """
    device = args[0].device
    if INTERPRET:
        kernel[(grid,)](*args, *constants, num_warps=num_warps)
        return None
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, args, constants, num_warps, registers)
    key = [kernel.__name__, device.index, num_warps, registers, constants]
    for arg in args:
        if isinstance(arg, Tensor):
            key.append((arg.dtype, arg.data_ptr() % 16 == 0))
        elif arg is None:
            key.append(None)
    compiled = _compiled.get(tuple(key))
    if compiled is None:
        options = {"num_warps": num_warps, "enable_fp_fusion": True}
        limited = registers and has_ptx(device) and torch.cuda.get_device_capability(device)[0] in LIMITED
        compiled = kernel[(grid,)](*args, *constants, **options, **({"maxnreg": registers} if limited else {}))
        if limited and compiled.n_spills:  # a second launch writes what the first did
            compiled = kernel[(grid,)](*args, *constants, **options)
        _compiled[tuple(key)] = compiled
        return compiled[(grid, 1, 1)]
    runner = compiled[(grid, 1, 1)]
    runner(*args, *constants)
    return runner


class Prepared:
    """Launches known by all that decides them, so that a call has only to pass its pointers and its seed."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def get(self, key: Any, device: torch.device) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """(function, last arguments), if that key was put and `device` is the current one."""
        known = self._known.get(key)
        return known if known is not None and device.index == torch.cuda.current_device() else None

    def put(self, key: Any, function: Callable[..., None] | None, last: tuple[Any, ...]) -> None:
        if function is not None:
            if len(self._known) >= 4096:  # shapes that never come back
                self._known.clear()
            self._known[key] = function, last


def stream_of(device: torch.device) -> int:
    """The current stream's handle."""
    return torch._C._cuda_getCurrentRawStream(device.index)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 128


_COUNTERS = 1 << 16
_PARTIALS = 1 << 18
_RESERVE = 1 << 18
_workspaces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
_reserves: dict[int, Tensor] = {}  # by device: counters at zero that nobody has
_lock = threading.Lock()


def workspace(blocks: int, partials: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(int32 zeros for `blocks` column blocks, which each launch leaves at zero; room for `partials` fp32 numbers).

    One a stream, since launches on one stream do not overlap; a launch under capture has its own: graphs may overlap.
    """
    if device.type != "cuda" or blocks > _COUNTERS or torch.cuda.is_current_stream_capturing():
        return _own_counters(blocks, device), torch.empty(partials, dtype=torch.float32, device=device)
    key = device.index, stream_of(device)
    if key not in _workspaces:
        # In a thread of its own: the warm-up of torch.compile's CUDA graphs sends this thread's allocations to a
        # memory pool whose blocks it reclaims behind their owners' back.
        thread = threading.Thread(target=_new_workspace, args=(key,))
        thread.start()
        thread.join()
    counters, room = _workspaces[key]
    return counters, room if partials <= _PARTIALS else torch.empty(partials, dtype=torch.float32, device=device)


def _own_counters(blocks: int, device: torch.device) -> Tensor:
    """From the reserve, which is never given back: zeroing others would be a kernel more in each replay."""
    with _lock:
        reserve = _reserves.get(device.index)
        if reserve is not None and blocks <= len(reserve):
            _reserves[device.index] = reserve[blocks:]
            return reserve[:blocks]
    return torch.zeros(blocks, dtype=torch.int32, device=device)


def _new_workspace(key: tuple[int, int]) -> None:
    device = torch.device("cuda", key[0])
    zeros = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    room = torch.empty(_PARTIALS, dtype=torch.float32, device=device)
    reserve = torch.zeros(_RESERVE, dtype=torch.int32, device=device) if key[0] not in _reserves else None
    torch.cuda.synchronize(device)  # once: whichever stream uses them next finds zeros
    _workspaces[key] = zeros, room
    if reserve is not None:
        _reserves.setdefault(key[0], reserve)
