"""Three clocks: the device's events, wall time of loops of calls, and replays of a CUDA graph.

A call takes the index of a set of buffers. All calls take turns, so that drift of the machine falls on all alike.
"""

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key")
Call = Callable[[int], object]
Times = dict[Key, list[float]]  # milliseconds a call

CYCLES_PER_SECOND = 2e9  # at most, of a GPU's clock


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def calls_per_event(copied_bytes: int) -> int:
    """So many that what is between two events takes about 0.1 ms: an event costs microseconds by itself."""
    return max(1, min(20, math.ceil(1e-4 / (copied_bytes / 4e12))))


def device_times(
    calls: Mapping[Key, Call], sets: int, repeats: int, copied_bytes: int, same_results: bool = False
) -> Times:
    """Device time between two events.

    Each call takes the next set of buffers, whoever made the last call, so that the cache holds none of it. Results
    live until their set's turn comes again, hence are rotated as well. The device sleeps while the host runs ahead.
    `same_results`: all calls return tensors of the same sizes, which need not be held for each of them.
    """
    inner = calls_per_event(copied_bytes)
    ring: list[object] = [None] * sets
    held = {key: ring if same_results else [*ring] for key in calls}
    turn = itertools.count()
    cycles = {}

    def run(key: Key) -> None:
        for _ in range(inner):
            index = next(turn) % sets
            held[key][index] = calls[key](index)

    for key, call in calls.items():
        for index in range(max(3, sets + 1)):  # one more than are held: then no memory is requested later
            held[key][index % sets] = call(index % sets)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(key)
        cycles[key] = int(CYCLES_PER_SECOND * (1.5 * (time.perf_counter() - start) + 5e-5))
        torch.cuda.synchronize()
    events: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in calls}
    with _no_collection():
        for _ in range(repeats):
            for key in calls:
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(cycles[key])
                pair[0].record()
                run(key)
                pair[1].record()
                events[key].append(pair)
            torch.cuda.synchronize()
    return {key: [start.elapsed_time(end) / inner for start, end in pairs] for key, pairs in events.items()}


def wall_times(
    calls: Mapping[Key, Call], sets: int, repeats: int, device: torch.device, seconds: float = 2e-3
) -> Times:
    """Wall time of short loops of calls, from idle to idle, divided by the calls; `seconds`: how long a loop takes."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def loop(call: Call, count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for index in range(count):
            call(index % sets)
        synchronize()
        return (time.perf_counter() - start) / count

    counts = {}
    for key, call in calls.items():
        loop(call, 3)
        counts[key] = max(1, min(200, int(seconds / loop(call, 3))))
    times: Times = {key: [] for key in calls}
    with _no_collection():
        for _ in range(repeats):
            for key, call in calls.items():
                times[key].append(loop(call, counts[key]) * 1e3)
    return times


def graph_times(
    calls: Mapping[Key, Call], sets: int, repeats: int, report: Callable[[str], None], inner: int = 20
) -> Times:
    """Device time of one call of many in a CUDA graph. A call that cannot be captured is reported, and left out."""
    graphs, held = {}, []
    for key, call in calls.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for index in range(3):
                    call(index % sets)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                held.append([call(index % sets) for index in range(inner)])
        except RuntimeError as error:
            torch.cuda.synchronize()
            report(f"{key}: cannot be captured in a CUDA graph: {str(error).splitlines()[0]}")
            continue
        graphs[key] = graph
        graph.replay()
    events: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in graphs}
    with _no_collection():
        for _ in range(repeats):
            for key, graph in graphs.items():
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(int(CYCLES_PER_SECOND * 1e-4))
                pair[0].record()
                graph.replay()
                pair[1].record()
                events[key].append(pair)
            torch.cuda.synchronize()
    return {key: [start.elapsed_time(end) / inner for start, end in pairs] for key, pairs in events.items()}
