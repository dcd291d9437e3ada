"""Share of the copy's bandwidth over the tensor's size, and time a call for small tensors."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .registry import MODES
from .rows import Row
from .table import Units, add_selection, in_order

COLOURS = {"xfused": "tab:blue", "eager": "tab:orange", "compile": "tab:green"}
MORE = ("tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:gray", "tab:olive", "tab:cyan")
LINES = ("-", "--", ":", "-.")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument("--png", type=Path, required=True)


def most_measured(rows: Sequence[Row]) -> str:
    """The activation with the most shapes."""
    counts = {name: len({row.shape for row in rows if row.activation == name}) for name in
              in_order(row.activation for row in rows)}  # fmt: skip
    return max(counts, key=lambda name: counts[name])


def draw(rows: Sequence[Row], png: Path, all_activations: bool) -> None:
    """One line of panels for each op, clock and dtype; one panel for each mode. Only one activation, unless asked for.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    units = Units(rows)
    rows = [row for row in rows if not units.is_unit(row)]
    lines = list(dict.fromkeys((row.op, row.timing, row.dtype) for row in rows))
    modes = [mode for mode in MODES if any(row.mode == mode for row in rows)]
    providers = in_order(row.provider for row in rows)
    more = iter(MORE * len(providers))
    colours = {name: COLOURS.get(name) or next(more) for name in providers}
    figure = Figure(figsize=(5.5 * len(modes), 4 * len(lines)), layout="constrained")
    axes: Any = figure.subplots(len(lines), len(modes), squeeze=False)
    for i, (op, timing, dtype) in enumerate(lines):
        of_line = [row for row in rows if (row.op, row.timing, row.dtype) == (op, timing, dtype)]
        if not all_activations:
            of_line = [row for row in of_line if row.activation == most_measured(of_line)]
        for j, mode in enumerate(modes):
            mine = [row for row in of_line if row.mode == mode]
            if not mine:
                axes[i, j].set_axis_off()
                continue
            panel(axes[i, j], mine, colours, units)
            names = ", ".join(in_order(row.activation for row in mine))
            axes[i, j].set_title(f"{op} {mode}, {names}, {dtype}, p = {mine[0].p:g}\n{mine[0].gpu}", fontsize=10)
    try:
        figure.savefig(png, format="png", dpi=110)
    except OSError as error:
        raise ValueError(f"{png}: cannot be written: {error}") from None


def panel(axis: Any, rows: Sequence[Row], colours: dict[str, str], units: Units) -> None:
    """Lines over M * N, one for each provider and activation; bars reach from the 20th to the 80th percentile."""
    by_share = rows[0].timing == "device" and units.name(rows[0]) == "copy"
    activations = in_order(row.activation for row in rows)
    for provider in in_order(row.provider for row in rows):
        for k, activation in enumerate(activations):
            mine = [row for row in rows if (row.provider, row.activation) == (provider, activation)]
            mine.sort(key=lambda row: row.M * row.N)
            size = [row.M * row.N for row in mine]
            scale = [row.copy_share * row.ms_50 if by_share else 1e3 for row in mine]
            if by_share:  # share = scale / ms
                middle, high, low = ([s / getattr(row, name) for s, row in zip(scale, mine, strict=True)]
                                     for name in ("ms_50", "ms_20", "ms_80"))  # fmt: skip
            else:
                middle, low, high = ([s * getattr(row, name) for s, row in zip(scale, mine, strict=True)]
                                     for name in ("ms_50", "ms_20", "ms_80"))  # fmt: skip
            reach = [
                [m - a for m, a in zip(middle, low, strict=True)],
                [b - m for m, b in zip(middle, high, strict=True)],
            ]
            label = provider if len(activations) == 1 else f"{provider} {activation}"
            axis.errorbar(
                size, middle, reach, fmt="o", linestyle=LINES[k % len(LINES)], color=colours[provider], label=label,
                markersize=4, capsize=2,
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xlabel("elements of x")
    if by_share:
        axis.axhline(1, color="black", linestyle="--", linewidth=1, label="limit: a copy of x")
        axis.set_ylim(0, max(1.08, axis.get_ylim()[1]))
        axis.set_ylabel("share of the copy's bandwidth")
    else:
        axis.set_yscale("log")
        clock = {"device": "device", "wall": "wall", "graph": "in a CUDA graph"}[rows[0].timing]
        axis.set_ylabel(f"microseconds a call ({clock})")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
