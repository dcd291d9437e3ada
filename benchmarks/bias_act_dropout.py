"""Times dropout(activation(x + bias)), forward and backward, beside a copy of x, eager PyTorch and torch.compile.

    python -m benchmarks.bias_act_dropout --csv fused.csv

Every time is a ratio to `y.copy_(x)` of the same tensor in the same run: all providers take turns, so drift of the
machine falls on all of them alike. A forward reads x and writes y, so its floor is 1.0; a backward reads dy and x and
writes dx: 1.5, or 1.0 for the identity. Before anything is timed, each provider's result is checked against float64.
"""

import argparse
import csv
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import xfused

TWINS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda u: u,
    "relu": F.relu,
    "relu_squared": lambda u: F.relu(u).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
}


@dataclasses.dataclass
class Row:
    """One line of the CSV: milliseconds (20th, 50th, 80th percentile) and the median's ratio to the copy's."""

    provider: str
    mode: str
    activation: str
    dtype: str
    rows: int
    columns: int
    p: float
    milliseconds_20: float
    milliseconds: float
    milliseconds_80: float
    over_copy: float
    peak_over_x: float
    device: str
    torch: str


def providers(activation: str, p: float) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The same function of (x, bias) by each provider."""

    torch._dynamo.reset()  # or the limit on recompilations of `eager` would turn compilation off

    def eager(x: Tensor, bias: Tensor) -> Tensor:
        return F.dropout(TWINS[activation](x + bias), p)

    def fused(x: Tensor, bias: Tensor) -> Tensor:
        return xfused.bias_act_dropout(x, bias, activation=activation, p=p)

    return {"xfused": fused, "eager": eager, "compile": torch.compile(eager)}


def check(
    name: str, function: Callable[[Tensor, Tensor], Tensor], x: Tensor, bias: Tensor, activation: str, p: float
) -> None:
    """What a provider keeps must be the scaled activation of float64, and it must drop a share p."""
    rows = x[:512].detach()
    y = function(rows, bias.detach()).double()
    want = TWINS[activation](rows.double() + bias.detach().double()) / (1 - p)
    kept = y != 0
    error = ((y - want) * kept).abs().max() / want.abs().max()
    visible = want.abs() > 1e-3 * want.abs().max()  # a small result may round to 0
    count = int(visible.sum())
    dropped = 1 - int((kept & visible).sum()) / count
    if error > 2 * torch.finfo(x.dtype).eps or abs(dropped - p) > 6 * math.sqrt(p * (1 - p) / count):
        raise SystemExit(
            f"{name}, {activation}, {x.dtype}: relative error {error:.1e}, dropped {dropped:.4f} for p = {p}"
        )


def timed(functions: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each call, the functions taking turns."""
    for function in functions.values():
        for _ in range(3):
            function()
    if device.type != "cuda":
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(repeats):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                times[name].append((time.perf_counter() - start) * 1e3)
        return times
    torch.cuda.synchronize(device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
    for _ in range(repeats):
        torch.cuda._sleep(30_000_000)  # cycles in which the host gets ahead, so that its own time is not measured
        for name, function in functions.items():
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            function()
            pair[1].record()
            events[name].append(pair)
    torch.cuda.synchronize(device)
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def peak(function: Callable[[], object], x: Tensor) -> float:
    """Memory that a call takes at its peak beyond what is allocated, in units of x; NaN without a GPU."""
    if x.device.type != "cuda":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / x.nbytes


def measure(
    activation: str, dtype: torch.dtype, shape: tuple[int, int], p: float, repeats: int, device: torch.device
) -> list[Row]:
    """All providers and both directions at one shape."""
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    bias = torch.randn(shape[1], device=device).to(dtype).requires_grad_()
    dy = torch.randn(shape, device=device).to(dtype)
    copied = torch.empty_like(dy)
    functions = providers(activation, p)
    calls: dict[tuple[str, str], Callable[[], object]] = {("copy", "copy"): lambda: copied.copy_(dy)}
    peaks = {("copy", "copy"): 0.0}
    for name, function in functions.items():
        check(name, function, x, bias, activation, p)
        y = function(x, bias)
        calls[name, "forward"] = lambda function=function: function(x, bias)  # type: ignore[misc]
        calls[name, "backward"] = lambda y=y: torch.autograd.grad(y, (x, bias), dy, retain_graph=True)  # type: ignore[misc]

        def both(function: Callable[[Tensor, Tensor], Tensor] = function) -> object:
            y = function(x, bias)
            return y, torch.autograd.grad(y, (x, bias), dy)

        both()
        peaks[name, "forward"] = peaks[name, "backward"] = peak(both, x)
    times = timed({"/".join(key): call for key, call in calls.items()}, repeats, device)
    copy = statistics.median(times["copy/copy"])
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rows = []
    for name, mode in calls:
        low, _, _, high = statistics.quantiles(times[f"{name}/{mode}"], n=5)
        middle = statistics.median(times[f"{name}/{mode}"])
        rows.append(
            Row(name, mode, activation, str(dtype).removeprefix("torch."), *shape, p, low, middle, high, middle / copy,
                peaks[name, mode], where, torch.__version__)
        )  # fmt: skip
    return rows


def spread_over_copy(row: Row) -> tuple[float, float]:
    """The 20th and 80th percentile in copies."""
    copy = row.milliseconds / row.over_copy
    return row.milliseconds_20 / copy, row.milliseconds_80 / copy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bias_act_dropout", description=__doc__.split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--shape", type=int, nargs=2, default=(8192, 16384) if cuda else (512, 1024), metavar=("M", "N")
    )
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16", "float32"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument(
        "--activation", nargs="+", default=["identity", "relu", "gelu_tanh", "gelu", "silu"], choices=TWINS
    )
    parser.add_argument("--p", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--csv", help="file that the rows are written to")
    options = parser.parse_args()
    if not 0 <= options.p < 1:
        parser.error(f"--p: got {options.p}, takes a number from 0 to below 1")

    torch._functorch.config.donated_buffer = False  # a backward is timed again and again on one graph
    rows: list[Row] = []
    cases = [(dtype, activation) for dtype in options.dtype for activation in options.activation]
    for dtype, activation in tqdm(cases, disable=not sys.stderr.isatty()):
        shape = tuple(options.shape)
        rows += measure(
            activation, getattr(torch, dtype), shape, options.p, options.repeats, torch.device(options.device)
        )

    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in rows)
    print(f"p = {options.p}, {options.shape[0]} x {options.shape[1]}, {rows[0].device}, torch {torch.__version__}")
    print("unit: a copy of x; forward / backward (20th to 80th percentile of each); peak memory of both in x")
    for dtype, activation in cases:
        for name in ("xfused", "eager", "compile"):
            mine = {r.mode: r for r in rows if (r.dtype, r.activation, r.provider) == (dtype, activation, name)}
            forward, backward = mine["forward"], mine["backward"]
            spread = ", ".join(f"{low:.3f} to {high:.3f}" for low, high in map(spread_over_copy, (forward, backward)))
            ratios = f"{forward.over_copy:6.3f} / {backward.over_copy:6.3f}"
            print(f"{dtype:9} {activation:12} {name:8} {ratios}   ({spread})   {forward.peak_over_x:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
