"""Measures one case: every provider in every mode, and the copy of x, in one interleaved run."""

import functools
import gc
import importlib.metadata
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

import xfused

from .check import check
from .registry import Case, Function, NotOfferedError, Op, installed
from .rows import Row
from .timing import Call, device_times, graph_times, wall_times

COPY = ("copy", "copy")
MAX_SETS = 256
Report = Callable[[str], None]


def usable(op: Op, providers: Sequence[str], report: Report) -> list[str]:
    """Those that have the op and are installed; the others are reported, in a line each."""
    found = []
    for name in providers:
        if op.builder(name) is None:
            report(f"{name}: does not compute {op.name}; skipped")
        elif not installed(name):
            report(f"{name}: is not installed; skipped")
        else:
            found.append(name)
    return found


_checked: set[tuple[str, Case]] = set()


def checked(op: Op, case: Case, providers: Sequence[str], device: torch.device, report: Report) -> list[str]:
    """The providers that compute the case; the others are reported, in a line each."""
    good = []
    for name in providers:
        build = op.builder(name)
        assert build is not None
        try:
            for index, (probe, inputs) in enumerate(op.probes(case, device)):
                if name == "compile" and index > 0:
                    break  # its function is eager's, and each shape costs seconds
                if (name, probe) not in _checked:
                    check(op, probe, build, inputs)
                    _checked.add((name, probe))
        except NotOfferedError as error:
            report(f"{name}: has {error}; skipped")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # other people's code may raise anything
            report(f"REFUSED {name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        else:
            good.append(name)
    return good


def buffers(op: Op, case: Case, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Sets of inputs whose x together take more than four times the L2 cache; parameters are shared."""
    first = op.inputs(case, device)
    count = 2
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        count = max(2, min(MAX_SETS, math.ceil(4 * cache / first[0].nbytes)))
    shared = first[op.rotating :]
    rest = [tuple(torch.randn_like(t).requires_grad_() for t in first[: op.rotating]) for _ in range(count - 1)]
    return [first, *((*fresh, *shared) for fresh in rest)]


def call_of(function: Function, mode: str, timing: str, sets: list[tuple[Tensor, ...]], dys: list[Tensor]) -> Call:
    """A call on the set of buffers with a given index."""
    if mode == "fwd":
        return lambda i: function(*sets[i])
    if mode == "bwd":
        graphs = [function(*inputs) for inputs in sets]
        return lambda i: torch.autograd.grad(graphs[i], sets[i], dys[i], retain_graph=True)

    def step(i: int) -> object:  # as in training
        for t in sets[i]:
            t.grad = None
        function(*sets[i]).backward(dys[i])
        return None

    def gradients(i: int) -> object:
        y = function(*sets[i])
        return y, torch.autograd.grad(y, sets[i], dys[i])

    return step if timing == "wall" else gradients


def peak(call: Call, device: torch.device) -> int:
    """Bytes that a call takes at its peak beyond what is allocated; -1 without a GPU."""
    if device.type != "cuda":
        return -1
    call(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = call(0)
    del held
    return torch.cuda.max_memory_allocated() - before


@functools.cache
def versions() -> dict[str, str]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {"torch": torch.__version__, "triton": triton, "xfused": xfused.__version__}


def measure(
    op: Op,
    case: Case,
    providers: Sequence[str],
    modes: Sequence[str],
    timing: str,
    repeats: int,
    device: torch.device,
    report: Report,
) -> list[Row]:
    """Checks and times the providers at one case; `timing` is "device", "wall" or "graph"."""
    torch._functorch.config.donated_buffer = False  # a backward is timed again and again on one graph
    torch._dynamo.reset()  # or the limit on recompilations would turn compilation off
    good = checked(op, case, providers, device, report)
    sets = buffers(op, case, device)
    functions = {name: build(case, sets[0]) for name in good if (build := op.builder(name))}
    xs = [inputs[0].detach() for inputs in sets]
    copies = [torch.empty_like(x) for x in xs]
    calls: dict[tuple[str, str], Call] = {COPY: lambda i: copies[i].copy_(xs[i])}
    peaks = {COPY: 0}
    if functions:
        with torch.no_grad():
            y = next(iter(functions.values()))(*sets[0])
        dys = [torch.randn_like(y) for _ in sets]
        del y
    for name, function in functions.items():
        both = peak(call_of(function, "fwd+bwd", "device", sets, dys), device)
        for mode in modes:
            calls[name, mode] = call_of(function, mode, timing, sets, dys)
            peaks[name, mode] = peak(calls[name, mode], device) if mode == "fwd" else both
    for name, bare in op.bare.items():
        for mode in modes if functions else ():
            runs = [bare(case, inputs, dy, mode) for inputs, dy in zip(sets, dys, strict=True)]
            calls[name, mode] = lambda i, runs=runs: runs[i]()  # type: ignore[misc]
            peaks[name, mode] = peak(calls[name, mode], device)
    times = clock(calls, len(sets), timing, repeats, xs[0].nbytes, device, report)
    return rows_of(op, case, times, peaks, timing, xs[0].nbytes, device)


def clock(
    calls: dict[tuple[str, str], Call],
    sets: int,
    timing: str,
    repeats: int,
    nbytes: int,
    device: torch.device,
    report: Report,
) -> dict[tuple[str, str], list[float]]:
    if timing == "wall":
        return wall_times(calls, sets, repeats, device)
    if timing == "graph":
        return graph_times(calls, sets, repeats, report)
    return device_times(calls, sets, repeats, 2 * nbytes)


def rows_of(
    op: Op,
    case: Case,
    times: dict[tuple[str, str], list[float]],
    peaks: dict[tuple[str, str], int],
    timing: str,
    nbytes: int,
    device: torch.device,
) -> list[Row]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    moved: dict[str, int] = {**op.moved(case), "copy": 2 * nbytes}
    copy = statistics.median(times[COPY])
    rows = []
    for (name, mode), values in times.items():
        low, middle, high = percentiles(values)
        speed, copy_speed = moved[mode] / middle / 1e6, moved["copy"] / copy / 1e6  # bytes a ms, in GB/s
        fixed: dict[str, Any] = {"timing": timing, "gpu": gpu, **versions()}
        rows.append(
            Row(
                case.op, name, mode, case.dtype, case.M, case.N, case.p, case.activation, low, middle, high,
                moved[mode], speed, speed / copy_speed, middle / copy, peaks[name, mode], **fixed,
            )
        )  # fmt: skip
    return rows


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th, 80th."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, _, high = statistics.quantiles(values, n=5, method="inclusive")
    return low, statistics.median(values), high


def free(device: torch.device) -> None:
    """Gives a case's memory back before the next one's is taken."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
