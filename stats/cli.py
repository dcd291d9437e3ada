"""The command: `python -m stats`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from stats import report
from stats.assess import ALL_PS, INDEPENDENCE_PS, Progress, assess, checked
from stats.run import LEVELS
from stats.sources import NAMED, Source, named
from stats.table import chosen

PASS, FAIL, WRONG_USE, SUSPICIOUS, INTERRUPTED = 0, 1, 2, 3, 130
DEEP_PS = (0.1, 0.5)
DEEP_DRAWS = 1 << 40


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 pass, 1 fail, 2 wrong use, 3 suspicious, 130 interrupted."""
    parser = parser_of()
    options = parser.parse_args(argv)
    try:
        for path in (options.json, options.html, options.png):
            if path:
                writable(path)
        return int(COMMANDS[options.command](options))
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"stats: {str(error).splitlines()[0] if str(error) else type(error).__name__}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("stats: interrupted", file=sys.stderr)
        return INTERRUPTED


def parser_of() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m stats", description="Tests of dropout masks.", allow_abbrev=False)
    add = parser.add_argument
    add("command", nargs="?", default="quick", help=f"{', '.join(COMMANDS)} (default: quick)", type=command)
    add("--source", default="xfused", help=f"{', '.join(NAMED)}, or package.module:attribute (default: xfused)")
    add("--device", help="cpu or cuda (default: cpu; deep: cuda)")
    add("--p", type=float, nargs="+", help="drop probabilities (default: 0.01 to 0.99, seven of them)")
    add("--seeds", type=int, help="masks for each p (default: the level's)")
    add("--base", type=int, default=0, help="every seed of the run follows from it (default: 0)")
    add("--tests", help="ids with commas, as T1,T5 (default: all)")
    add("--jobs", type=int, help="threads (default: one a core, at most 8)")
    add("--json", metavar="FILE", help="write every value")
    add("--html", metavar="FILE", help="write one self-contained page")
    add("--png", metavar="FILE", help="write the pictures")
    add("--no-progress", action="store_true", help="no progress bar")
    add("--draws", type=number, default=DEEP_DRAWS, help="deep: draws counted at 0.1 and at 0.5 (default: 2**40)")
    add("--only-count", action="store_true", help="deep: the count alone")
    add("--controls", nargs="+", metavar="NAME", help="controls, power: those whose names contain NAME")
    add("--runs", type=int, default=40, help="power: runs of each control (default: 40)")
    add("--masks", type=int, help="power: masks a run (default: the level's); calibrate: masks (default: 200)")
    add("--order", default="column", help="stream: column, row or call")
    add("--format", default="raw32", help="stream: raw32 or raw16")
    add("--seed", type=int, default=0, help="stream: key of the seed")
    add("--bytes", type=number, help="stream: stop after so many bytes (default: never)")
    return parser


def command(name: str) -> str:
    if name not in COMMANDS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(COMMANDS)}, got {name!r}")
    return name


def number(written: str) -> int:
    """A count, as 1000 or 2**40."""
    base, power, exponent = written.partition("**")
    try:
        value = int(base) ** int(exponent) if power else int(base)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a count such as 1000 or 2**40, got {written!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {written!r}")
    return value


def writable(path: str) -> None:
    """Fail early where a report could not be written.

    Raises:
        OSError: naming the path.
    """
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise OSError(f"cannot write {path}: it is a directory")
    if not os.path.isdir(folder):
        raise OSError(f"cannot write {path}: there is no directory {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise OSError(f"cannot write {path}: permission denied")


def progress(options: argparse.Namespace) -> Progress | None:
    """A progress bar on standard error, where that is a terminal."""
    if options.no_progress or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    bar: Any = None

    def show(done: int, total: int, what: str) -> None:
        nonlocal bar
        if bar is None or bar.total != total:
            bar = tqdm(total=total, leave=False, dynamic_ncols=True)
        bar.set_description(what, refresh=False)
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return show


def level(options: argparse.Namespace) -> int:
    """quick, standard, deep."""
    deep = options.command == "deep"
    device = options.device or ("cuda" if deep else "cpu")
    usable(device, options.command)
    ps = tuple(options.p or ALL_PS)
    checked(ps, options.seeds, options.command)
    tests = options.tests.split(",") if options.tests else None
    chosen(tests)
    source, ps = one_source(options.source, ps, device, options.p is None)
    bar = progress(options)
    counted: dict[Any, Any] = {}
    if deep and source.name == "xfused":
        counted = deep_count(options, device, bar)
        if options.only_count:
            tests = []
    found = assess(
        source, ps, options.seeds, options.command, tests=tests, base=options.base, device=device, jobs=options.jobs,
        pictures=bool(options.html or options.png), counted=counted, keep_interrupted=True, progress=bar,
    )  # fmt: skip
    print(found)
    if options.json:
        report.write_json(options.json, report.to_json(found))
    if options.html:
        write(options.html, report.page(found).encode())
    if options.png:
        write(options.png, report.png(report.images(found)))
    if found.interrupted:
        return INTERRUPTED
    return {"pass": PASS, "fail": FAIL, "suspicious": SUSPICIOUS}[found.verdict]


def one_source(name: str, ps: tuple[float, ...], device: str, default: bool) -> tuple[Source, tuple[float, ...]]:
    """The source, and the p's it is tested at: its own one alone where it has but one and none was asked for."""
    source = named(name, ps[0] if len(ps) == 1 else 0.1, device)
    if source.p is not None and default:
        return source, (source.p,)
    return source, ps


def deep_count(options: argparse.Namespace, device: str, bar: Progress | None) -> dict[Any, Any]:
    """The count on the device at 0.1 and 0.5, printed as it is done."""
    import time

    from stats import deep

    records: dict[Any, Any] = {}
    for p in DEEP_PS:
        start = time.perf_counter()
        counted = deep.count(p, options.draws, device, options.base, bar)
        seconds = time.perf_counter() - start
        records.update(deep.records(counted))
        measured, error, exact = deep.correlation(counted)
        rate = int(counted.counts[:8].sum()) / counted.draws
        print(
            f"p = {p:g}: {counted.draws:,} draws in {seconds:.1f} s ({counted.draws / seconds:.2e} a second); rate "
            f"{rate:.10f}; correlation of the two rows of a word {measured:.3e} +- {error:.1e}, exact {exact:.3e}",
            flush=True,
        )
    return records


def usable(device: str, what: str) -> None:
    """Raises ValueError where there is no such device."""
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be cpu or cuda, got {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        hint = " (--device cpu counts there, slowly)" if what == "deep" else ""
        raise ValueError(f"{what} needs a CUDA GPU, and torch sees none{hint}")


def write(path: str, data: bytes) -> None:
    with open(path, "wb") as out:
        out.write(data)


def run_controls(options: argparse.Namespace) -> int:
    """The control matrix."""
    from stats import matrix

    seeds = 4 if options.seeds is None else options.seeds
    checked((0.5,), seeds, "quick")
    lines = matrix.matrix(options.controls, seeds, options.base, options.jobs or 1, progress(options))
    for one in lines:
        named_tests = ", ".join(one.named) or "nothing"
        state = "ok  " if one.right else "FAIL"
        wrong = f"; missed: {', '.join(one.missed)}" if one.missed else "; failed what it must not" if one.extra else ""
        failed = ", ".join(one.failed) or "nothing"
        print(f"{state} {one.control} (p = {one.p:g}): must fail {named_tests}; failed {failed}{wrong}")
    bad = sum(not one.right for one in lines)
    print(f"\n{'FAIL' if bad else 'PASS'}: {len(lines) - bad} of {len(lines)} controls behave as they must")
    about = f"{seeds} masks of the standard level, base {options.base}"
    if options.json:
        report.write_json(options.json, {"run": about, "lines": report.plain(lines)})
    if options.png:
        write(options.png, report.png(report.matrix_picture(lines)))
    if options.html:
        write(options.html, report.page(None, lines).encode())
    return FAIL if bad else PASS


def run_power(options: argparse.Namespace) -> int:
    """Power of the named tests on the controls."""
    from stats import matrix

    if options.runs < 1 or (options.masks is not None and options.masks < 1):
        raise ValueError("runs and masks must be at least 1")
    found = matrix.power(options.controls, options.runs, options.masks, options.jobs or 1, progress(options))
    for one in found:
        print(f"{one.control}: {one.test} at p = {one.p:g}: {one.caught} of {one.runs} (at least {one.lower:.3f})")
    weak = [one for one in found if one.caught < 0.99 * one.runs]
    state = "FAIL" if weak else "PASS"
    print(f"\n{state}: {len(found) - len(weak)} of {len(found)} pairs caught in 99% of their runs")
    if options.json:
        masks = options.masks or LEVELS["standard"].seeds
        about = f"standard level, {masks} masks a run, {options.runs} runs"
        report.write_json(options.json, {"run": about, "powers": report.plain(found)})
    if options.html:
        write(options.html, report.page(None, None, found).encode())
    return FAIL if weak else PASS


def run_calibrate(options: argparse.Namespace) -> int:
    """Uniformity of the p-values on a good generator."""
    from stats import matrix

    masks = 200 if options.masks is None else options.masks
    ps = tuple(options.p or ALL_PS)
    checked(ps, masks, "quick")
    tests = chosen(options.tests.split(",") if options.tests else None)
    source = named(options.source, ps[0], options.device or "cpu")
    found = matrix.calibrate(source, ps, masks, tests, options.base, options.jobs or 1, progress=progress(options))
    for one in found[:12]:
        at = "any p" if one.p is None else f"p = {one.p:g}"
        again = "" if one.again is None else f", over 4 times as many fresh ones {one.again:.4f}"
        print(f"{one.ks:.4f} {one.name} ({at}), {one.count} p-values, smallest {one.smallest:.1e}{again}")
    low = sum(not one.uniform for one in found)
    print(f"\n{len(found)} distributions of p-values on {source.name}; {low} not uniform (KS below 0.001)")
    if options.json:
        about = f"{source.name}, {masks} masks of the quick level, base {options.base}"
        report.write_json(options.json, {"run": about, "entries": report.plain(found)})
    return FAIL if low else PASS


def run_compare(options: argparse.Namespace) -> int:
    """Implementations side by side."""
    from stats import matrix

    device = options.device or "cpu"
    usable(device, "compare")
    ps = tuple(options.p or INDEPENDENCE_PS)
    checked(ps, options.seeds, "quick")
    names = ["xfused", "torch", "torch-compiled"]
    if options.source not in names:
        names.append(options.source)
    makers = {name: partial(named, name, device=device) for name in names}
    lines = matrix.compare(makers, ps, "quick", options.jobs or 1, progress(options))
    for one in lines:
        print(f"{one['source']:<20} p = {one['p']:<6g}{one['verdict']:<12}{', '.join(one['failures'])}")
    if options.json:
        report.write_json(options.json, {"run": f"quick level, {device}", "lines": lines})
    return PASS


def run_stream(options: argparse.Namespace) -> int:
    """Raw words on standard output."""
    from stats import stream

    device = options.device or "cpu"
    usable(device, "stream")
    stream.write(options.order, options.format, options.seed, device, options.bytes)
    return PASS


COMMANDS = {
    **dict.fromkeys(LEVELS, level),
    "controls": run_controls,
    "power": run_power,
    "calibrate": run_calibrate,
    "compare": run_compare,
    "stream": run_stream,
}
