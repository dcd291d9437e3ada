"""`python -m benchmarks run | table | plot | list | sweep`."""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

import xfused

from . import plot, run, sweep, table
from .registry import DTYPES, MODES, PEERS, Case, Op, installed, ops, provider_names
from .rows import Row, Writer

TIMINGS = ("device", "wall", "graph")


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


# ------------------------------------------------------------------------------------------------------ option types


def shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"got {text!r}, takes rows x columns, as in 8192x16384")
    return int(match[1]), int(match[2])


def activation(text: str) -> str:
    try:
        return xfused.activation(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def one_or_all(text: str) -> str:
    return text if text == "all" else activation(text)


def number(kind: type, takes: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"got {text!r}, takes {takes}")

    return parse


def device(text: str) -> torch.device:
    try:
        return torch.empty(1, device=text).device
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {str(error).splitlines()[0]}") from None


def arguments() -> Parser:
    parser = Parser(prog="python -m benchmarks", description="Measures xfused beside its peers.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> Parser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    measure = command("run", "Check, then time, each provider; all take turns.")
    add_device(measure)
    measure.add_argument("--op", nargs="+", choices=ops(), default=["bias_act_dropout"], help="(default: %(default)s)")
    measure.add_argument(
        "--provider",
        nargs="+",
        choices=provider_names(),
        help="(default: xfused, eager, compile, and the others that are installed)",
    )
    measure.add_argument("--dtype", nargs="+", choices=DTYPES, help="(default: bfloat16)")
    measure.add_argument("--activation", nargs="+", type=one_or_all, help="or `all` (default: the op's, see `list`)")
    measure.add_argument("--shape", nargs="+", type=shape, metavar="MxN", help="(default: the op's, see `list`)")
    measure.add_argument("--mode", nargs="+", choices=MODES, help="(default: all that op and clock have)")
    p = number(float, "a number from 0 to below 1", lambda value: 0 <= value < 1)
    measure.add_argument("--p", type=p, help="(default: the op's, 0.1 where there is dropout)")
    repeats = number(int, "a whole number of at least 1", lambda value: value >= 1)
    measure.add_argument("--repeats", type=repeats, default=40, help="measurements of each (default: %(default)s)")
    measure.add_argument("--timing", nargs="+", choices=TIMINGS, help="(default: device on a GPU, else wall)")
    measure.add_argument("--graph", action="store_true", help="CUDA graphs too: --timing graph")
    measure.add_argument("--csv", type=Path, help="file that the rows are written to")

    tables = command("table", "Print Markdown tables of a CSV.")
    table.add_options(tables, csv_required=False)
    tables.add_argument("--write", type=Path, metavar="PAGE", help="rewrite what stands between the markers of a page")
    plot.add_options(command("plot", "Draw a CSV."))
    command("list", "List ops, their default cases, and providers.")
    sweeper = command("sweep", sweep.SUMMARY)
    add_device(sweeper)
    sweep.add_options(sweeper, shape, activation)
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default, help="(default here: %(default)s)")


# ---------------------------------------------------------------------------------------------------------- commands


def jobs(options: argparse.Namespace) -> list[tuple[Op, Case, str, list[str]]]:
    """(op, case, timing, modes) of everything that the options ask for.

    Raises:
        ValueError: options that do not go together.
    """
    cuda = options.device.type == "cuda"
    timings = list(options.timing or ([] if options.graph else ["device" if cuda else "wall"]))
    timings += ["graph"] if options.graph and "graph" not in timings else []
    if not cuda and timings != ["wall"]:
        raise ValueError(f"--timing {' '.join(timings)}: needs a CUDA device")
    found = []
    for op in (ops()[name] for name in options.op):
        for timing in timings:
            own = [mode for mode in op.modes if timing == "device" or not cuda or mode != "bwd"]
            modes = [mode for mode in options.mode or own if timing != "graph" or mode != "bwd"]
            if not modes:
                raise ValueError("--mode bwd: is not to be had in a CUDA graph, fwd+bwd is")
            default = op.tiny if not cuda else op.shapes if timing == "device" else op.small
            found += [
                (op, Case(op.name, M, N, dtype, act, op.p if options.p is None else options.p), timing, modes)
                for dtype in options.dtype or op.dtypes
                for act in (xfused.activations() if "all" in (options.activation or ()) else options.activation)
                or op.activations
                for M, N in options.shape or default
            ]
    return found


def run_command(options: argparse.Namespace) -> int:
    """0; 1 if a provider was refused."""
    todo = jobs(options)
    writer = None
    seen: set[str] = set()
    with contextlib.ExitStack() as stack:
        if options.csv:
            try:
                writer = Writer(stack.enter_context(options.csv.open("w", newline="", encoding="utf-8")))
            except OSError as error:
                raise ValueError(f"--csv: {error}") from None

        def report(line: str) -> None:
            if line not in seen:
                tqdm.write(line, file=sys.stderr)
            seen.add(line)

        rows: list[Row] = []
        bar = stack.enter_context(tqdm(todo, unit="case", disable=None))
        for op, case, timing, modes in bar:
            bar.set_postfix_str(f"{case} {timing}")
            wanted = options.provider or [
                name for name in ("xfused", "eager", "compile", *PEERS) if op.builder(name) and installed(name)
            ]
            names = run.usable(op, wanted, report)
            try:
                done = run.measure(op, case, names, modes, timing, options.repeats, options.device, report)
            except torch.OutOfMemoryError:
                report(f"{case}: not enough memory; skipped")
                done = []
            rows += done
            if writer:
                writer.write(done)
            run.free(options.device)
    layout = argparse.Namespace(rows="provider", columns="activation", value=None)
    print(table.tables(rows, layout), end="")
    return int(any(line.startswith("REFUSED") for line in seen))


def table_command(options: argparse.Namespace) -> int:
    if options.write:
        text = table.rewritten(options.write)
        try:
            options.write.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--write: {error}") from None
        return 0
    if not options.csv:
        raise ValueError("needs --csv FILE, or --write PAGE")
    print(table.tables(table.select(options), options), end="")
    return 0


def plot_command(options: argparse.Namespace) -> int:
    plot.draw(table.select(options), options.png, bool(options.activation))
    return 0


def list_command(options: argparse.Namespace) -> int:
    def shapes(values: Sequence[tuple[int, int]]) -> str:
        return " ".join(f"{M}x{N}" for M, N in values)

    for op in ops().values():
        print(f"{op.name}: {op.summary}")
        print(f"  modes {' '.join(op.modes)}; dtypes {' '.join(op.dtypes)}; p {op.p:g}; unit: {op.unit}")
        print(f"  activations {' '.join(op.activations)}")
        print(f"  shapes for device time {shapes(op.shapes)}; for wall time and graphs {shapes(op.small)}")
        has = [name for name in provider_names() if op.builder(name)]
        print("  providers", " ".join(name if installed(name) else f"({name})" for name in has))
    print("in parentheses: not installed here")
    return 0


COMMANDS = {"run": run_command, "table": table_command, "plot": plot_command, "list": list_command, "sweep": sweep.run}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a provider was refused, 2 for wrong use, with one line."""
    options = arguments().parse_args(argv)
    try:
        return COMMANDS[options.command](options)
    except ValueError as error:
        print(f"python -m benchmarks {options.command}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
