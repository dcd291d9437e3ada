"""Markdown tables of a CSV, and the part of the README that is made of them.

Between `<!-- benchmarks: begin OPTIONS -->` and `<!-- benchmarks: end -->` stands what
`python -m benchmarks table OPTIONS` prints, with files named from the page's own folder. A page may have several such
parts.
"""

import argparse
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from .registry import MODES, ops
from .rows import Row, read

AXES: dict[str, Callable[[Row], str]] = {
    "provider": lambda row: row.provider,
    "activation": lambda row: row.activation,
    "shape": lambda row: row.shape,
    "dtype": lambda row: row.dtype,
}
MARKERS = re.compile(r"(<!-- benchmarks: begin(.*?)-->\n)(.*?)(<!-- benchmarks: end -->)", re.DOTALL)


def add_options(parser: argparse.ArgumentParser, csv_required: bool = True) -> None:
    """What selects rows, and what lays them out."""
    add_selection(parser, csv_required)
    parser.add_argument("--rows", choices=AXES, default="provider", help="(default: %(default)s)")
    parser.add_argument("--columns", choices=AXES, default="activation", help="(default: %(default)s)")
    parser.add_argument(
        "--value",
        choices=("ratio", "us", "share", "peak"),
        help="ratio to the unit, microseconds, share of the copy's bandwidth, peak memory in x "
        "(default: ratio of device time, else us)",
    )


def add_selection(parser: argparse.ArgumentParser, csv_required: bool = True) -> None:
    parser.add_argument("--csv", nargs="+", type=Path, required=csv_required, help="one or more files")
    for name in ("op", "provider", "dtype", "activation", "shape", "mode", "timing"):
        parser.add_argument(f"--{name}", nargs="+", help="only these")


def select(options: argparse.Namespace, folder: Path = Path()) -> list[Row]:
    """The rows that the options ask for, and those of the copy and of bare work, which are their units.

    Raises:
        ValueError: a file cannot be used, or nothing is left.
    """
    rows = read([folder / path for path in options.csv])
    units = {"copy", *(name for op in ops().values() for name in op.bare)}
    for name in ("op", "provider", "dtype", "activation", "shape", "mode", "timing"):
        if wanted := getattr(options, name):
            rows = [
                row
                for row in rows
                if getattr(row, name) in wanted or (name in ("provider", "mode") and row.provider in units)
            ]
    if not any(row.provider not in units for row in rows):
        raise ValueError(f"{', '.join(map(str, options.csv))}: has no row that the options ask for")
    return rows


def in_order(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


class Units:
    """The copy, or the bare work, of each case."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._ms = {(row.case, row.provider, row.mode): row.ms_50 for row in rows}

    def name(self, row: Row) -> str:
        return ops()[row.op].unit if row.op in ops() else "copy"

    def ratio(self, row: Row) -> float:
        unit = self._ms.get((row.case, self.name(row), row.mode))
        return row.over_copy if unit is None else row.ms_50 / unit

    def is_unit(self, row: Row) -> bool:
        return row.provider in ("copy", self.name(row))


def cell(row: Row, value: str, units: Units) -> str:
    if value == "us":
        return f"{row.ms_50 * 1e3:.1f}"
    if value == "share":
        return f"{row.copy_share:.0%}"
    if value == "peak":
        return f"{row.peak_bytes / (row.M * row.N * (4 if row.dtype == 'float32' else 2)):.2f}"
    ratio = units.ratio(row)
    return f"{ratio:.3f}" if units.name(row) != "copy" else f"{ratio:.2f}"


def tables(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """One table for each op, clock and whatever else is no axis; modes share a cell, as in "1.02 / 1.55"."""
    units = Units(rows)
    rows = [row for row in rows if not units.is_unit(row)]
    others = [name for name in AXES if name not in (options.rows, options.columns)]

    def group(row: Row) -> tuple[str, ...]:
        return row.op, row.timing, f"{row.p:g}", row.gpu, *(AXES[name](row) for name in others)

    parts = []
    for key in dict.fromkeys(map(group, rows)):
        mine = [row for row in rows if group(row) == key]
        parts.append(one_table(mine, options, others, units))
    return "\n\n".join(parts) + "\n"


def one_table(rows: Sequence[Row], options: argparse.Namespace, others: Sequence[str], units: Units) -> str:
    first = rows[0]
    value = options.value or ("ratio" if first.timing == "device" or units.name(first) != "copy" else "us")
    modes = [mode for mode in MODES if any(row.mode == mode for row in rows)]
    across, down = AXES[options.columns], AXES[options.rows]
    columns, lines = in_order(map(across, rows)), in_order(map(down, rows))
    found = {(down(row), across(row), row.mode): row for row in rows}
    unit = {"copy": "copies of x"}.get(units.name(first), f"times the bare {units.name(first)}")
    what = {"ratio": unit, "us": "microseconds a call", "share": "share of the copy's bandwidth", "peak": "peak in x"}
    clock = {"device": "device time", "wall": "wall time", "graph": "in a CUDA graph"}[first.timing]
    spread = max(max(row.ms_80 / row.ms_50 - 1, 1 - row.ms_20 / row.ms_50) for row in rows)
    typical = statistics.median(max(row.ms_80 / row.ms_50 - 1, 1 - row.ms_20 / row.ms_50) for row in rows)
    caption = ", ".join([f"`{first.op}`", *(AXES[name](first) for name in others), f"p = {first.p:g}", clock])
    text = [
        f"{caption}: {' / '.join(modes)}, {what[value]}. {first.gpu}, torch {first.torch}, Triton {first.triton}. The "
        f"20th and 80th percentiles are within {spread:.1%} of these medians, typically {typical:.1%}.",
        "",
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for line in lines:
        cells = []
        for column in columns:
            values = [found.get((line, column, mode)) for mode in modes]
            cells.append(" / ".join("-" if row is None else cell(row, value, units) for row in values))
        name = f"**{line}**" if line == "xfused" else line
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(text)


# ------------------------------------------------------------------------------------------------------- the README


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_marker(text: str) -> argparse.Namespace:
    """The options in a marker.

    Raises:
        ValueError: they are none.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_options(parser)
    return parser.parse_args(shlex.split(text))


def rewritten(page: Path) -> str:
    """The page with what stands between its markers made anew.

    Raises:
        ValueError: the page has no markers, or a marker's options or files are wrong.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{page}: cannot be read: {error}") from None
    if not MARKERS.search(text):
        raise ValueError(f"{page}: has no markers <!-- benchmarks: begin --csv FILE --> and <!-- benchmarks: end -->")

    def replace(match: re.Match[str]) -> str:
        try:
            options = parse_marker(match[2])
            made = tables(select(options, page.parent), options)
        except ValueError as error:
            raise ValueError(f"{page}: marker {match[1].strip()}: {error}") from None
        return f"{match[1]}\n{made}\n{match[4]}"

    return MARKERS.sub(replace, text)
