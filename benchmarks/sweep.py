"""Times tiles of the fused kernels beside the launcher's own choice: to find a better rule, and to show that it is one.

What the launcher reads is replaced for the time of a call; nothing of it is an option of the library.
"""

import argparse
import concurrent.futures
import contextlib
import csv
import dataclasses
import importlib
import itertools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import xfused

from .registry import DTYPES, Case, ops
from .run import buffers, percentiles
from .timing import Call, device_times

SUMMARY = "Time tiles of the fused kernels beside the launcher's own choice."
OP = "bias_act_dropout"
OWN = "own choice"
# by name, as no public module has them: the launcher of the op, and where it keeps compiled kernels
LAUNCHER, CACHE = "xfused.ops.bias_act_dropout", ("xfused.ops._launch", "_compiled")
CHOICES = {"forward": "row_tiles", "backward": "column_sum_tiles"}
DIRECTIONS = tuple(CHOICES)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What replaces the launcher's choice; steps: tiles that a program walks. 0 leaves the last three as they are."""

    block_g: int
    block_n: int
    num_warps: int
    steps: int
    stages: int
    registers: int

    def __str__(self) -> str:
        own = [f"{getattr(self, name) or 'own'} {name}" for name in ("steps", "stages", "registers")]
        return f"{self.block_g} x {self.block_n}, {self.num_warps} warps, {', '.join(own)}"


@contextlib.contextmanager
def override(variant: Variant | None, direction: str, kept: list[Any]) -> Iterator[None]:
    """The launcher takes `variant` inside; `kept`: its kernels and launches, to be kept apart from its own.

    Raises:
        ValueError: the launcher does not read what is to be replaced.
    """
    launcher, cache = importlib.import_module(LAUNCHER), importlib.import_module(CACHE[0])
    known = "_known_forwards", "_known_backwards"
    if not kept:
        kept += [{}, *(type(getattr(launcher, name))() for name in known)]
    values: list[tuple[Any, str, Any]] = [(cache, CACHE[1], kept[0])]
    values += [(launcher, name, value) for name, value in zip(known, kept[1:], strict=True)]
    if variant is not None:
        choice = CHOICES[direction]
        own = getattr(launcher, choice, None)

        def chosen(*args: Any) -> Any:
            assert own is not None
            tiles = own(*args)._replace(block_g=variant.block_g, block_n=variant.block_n, warps=variant.num_warps)
            if variant.steps:
                tiles = tiles._replace(each=variant.steps)
            return tiles._replace(registers=max(variant.registers, 0)) if variant.registers else tiles

        values.append((launcher, choice, chosen))
        if variant.stages:
            values.append((launcher, "STAGES", variant.stages))
    for where, name, _ in values:
        if not hasattr(where, name):
            raise ValueError(f"{where.__name__} has no {name} that could be replaced")
    before = [(where, name, getattr(where, name)) for where, name, _ in values]
    try:
        for where, name, value in values:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)


def variants(options: argparse.Namespace, itemsize: int) -> list[Variant]:
    """All combinations in which a thread holds half, one or two 16-byte vectors of each row."""
    vector = 16 // itemsize
    found = [
        Variant(*values)
        for values in itertools.product(
            options.block_g, options.block_n, options.warps, options.steps, options.stages, options.registers
        )
    ]
    return [v for v in found if v.block_g * v.block_n / (32 * v.num_warps) in (vector / 2, vector, 2 * vector)]


def results(case: Case, sets: list[Any]) -> list[torch.Tensor]:
    """With their graphs, by the launcher's own choice."""
    return [xfused.bias_act_dropout(*inputs, activation=case.activation, p=case.p) for inputs in sets]


def call_of(
    case: Case, direction: str, variant: Variant | None, sets: list[Any], ys: list[torch.Tensor], dys: list[Any]
) -> Call:
    """The launch by a set of buffers' index; `ys`: what the backward starts from."""
    kept: list[Any] = []

    def forward(index: int) -> Any:
        with override(variant, direction, kept):
            return xfused.bias_act_dropout(*sets[index], activation=case.activation, p=case.p)

    if direction == "forward":
        return forward

    def backward(index: int) -> Any:
        with override(variant, direction, kept):
            return torch.autograd.grad(ys[index], sets[index], dys[index], retain_graph=True)

    return backward


def precompile(case: Case, direction: str, variant: Variant, device: str) -> str:
    """In a process of its own: one launch, whose kernel Triton's cache then holds. Returns what went wrong."""
    try:
        sets = [ops()[OP].inputs(case, torch.device(device))]
        ys = results(case, sets) if direction == "backward" else []
        call_of(case, direction, variant, sets, ys, [torch.randn_like(sets[0][0])])(0)
        torch.cuda.synchronize()
    except Exception as error:  # a tile that cannot be compiled or launched
        return (str(error) or type(error).__name__).splitlines()[0]
    return ""


def compiles(case: Case, options: argparse.Namespace, report: Callable[[str], None]) -> list[Variant]:
    """The variants that compile, which takes a second each: in parallel."""
    found = variants(options, case.torch_dtype.itemsize)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(options.jobs, len(found) or 1), context) as pool:
        jobs = [pool.submit(precompile, case, options.direction, v, str(options.device)) for v in found]
        for _ in tqdm(concurrent.futures.as_completed(jobs), total=len(jobs), unit="variant", disable=None):
            pass
    good = []
    for variant, job in zip(found, jobs, strict=True):
        if message := job.result():
            report(f"{variant}: {message}; skipped")
        else:
            good.append(variant)
    return good


def add_options(parser: argparse.ArgumentParser, shape: Callable[[str], Any], activation: Callable[[str], str]) -> None:
    parser.add_argument("--direction", choices=DIRECTIONS, default="forward", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"])
    parser.add_argument("--activation", type=activation, nargs="+", default=["gelu"])
    parser.add_argument("--shape", type=shape, nargs="+", default=[(8192, 16384)], metavar="MxN")
    parser.add_argument("--block-g", type=int, nargs="+", default=[1, 2, 4, 8], help="row groups (default: 1 2 4 8)")
    parser.add_argument("--block-n", type=int, nargs="+", default=[64, 128, 256], help="(default: 64 128 256)")
    parser.add_argument("--warps", type=int, nargs="+", default=[1, 2, 4], help="(default: 1 2 4)")
    parser.add_argument("--steps", type=int, nargs="+", default=[0], help="tiles a program (default: the launcher's)")
    parser.add_argument("--stages", type=int, nargs="+", default=[0], help="(default: the launcher's)")
    parser.add_argument("--registers", type=int, nargs="+", default=[0], help="-1: any (default: the launcher's)")
    parser.add_argument("--repeats", type=int, default=20, help="(default: %(default)s)")
    jobs = min(12, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes that compile (default here: %(default)s)")
    parser.add_argument("--csv", type=Path)


COLUMNS = (
    "direction", "dtype", "M", "N", "activation", "p", "block_g", "block_n", "num_warps", "steps", "stages",
    "registers", "ms_20", "ms_50", "ms_80", "over_copy", "over_own",
)  # fmt: skip


def sweep_case(case: Case, options: argparse.Namespace, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row a variant, the fastest first; the launcher's own choice has zeros for its tile."""
    good = compiles(case, options, report)
    sets = buffers(ops()[OP], case, options.device)
    dys = [torch.randn_like(inputs[0]) for inputs in sets]
    ys = results(case, sets) if options.direction == "backward" else []
    into = [torch.empty_like(dy) for dy in dys]
    calls: dict[str, Call] = {"copy": lambda i: into[i].copy_(dys[i])}
    for variant in (None, *good):
        calls[OWN if variant is None else str(variant)] = call_of(case, options.direction, variant, sets, ys, dys)
    times = device_times(calls, len(sets), options.repeats, 2 * dys[0].nbytes, same_results=True)
    copy, own = statistics.median(times["copy"]), statistics.median(times[OWN])
    rows = []
    for chosen in (Variant(0, 0, 0, 0, 0, 0), *good):
        low, middle, high = percentiles(times[OWN if chosen.block_g == 0 else str(chosen)])
        rows.append(
            {
                "direction": options.direction, "dtype": case.dtype, "M": case.M, "N": case.N,
                "activation": case.activation, "p": case.p, **dataclasses.asdict(chosen),
                "ms_20": low, "ms_50": middle, "ms_80": high, "over_copy": middle / copy, "over_own": middle / own,
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: row["ms_50"])


def run(options: argparse.Namespace) -> int:
    """Prints, for each case, the launcher's choice and the ten fastest variants.

    Raises:
        ValueError: no CUDA device, or a file that cannot be written.
    """
    if options.device.type != "cuda":
        raise ValueError("needs a CUDA device")
    cases = [
        Case(OP, M, N, dtype, activation, 0.1)
        for dtype in options.dtype
        for activation in options.activation
        for M, N in options.shape
    ]
    with contextlib.ExitStack() as stack:
        writer = None
        if options.csv:
            try:
                file = stack.enter_context(options.csv.open("w", newline="", encoding="utf-8"))
            except OSError as error:
                raise ValueError(f"--csv: {error}") from None
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
        for case in cases:
            rows = sweep_case(case, options, lambda line: print(line, file=sys.stderr))
            print(f"{case}, {options.direction}; over the copy, over the launcher's own choice")
            for row in [row for row in rows if row["block_g"] == 0] + [row for row in rows if row["block_g"]][:10]:
                name = str(Variant(*(row[f.name] for f in dataclasses.fields(Variant)))) if row["block_g"] else OWN
                print(f"  {row['over_copy']:6.3f}  {row['over_own']:6.3f}  {name}")
            if writer:
                writer.writerows(rows)
                file.flush()
            torch.cuda.empty_cache()
    return 0
