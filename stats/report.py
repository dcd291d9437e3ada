"""Reports: text, JSON, pictures, and one self-contained page."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections import defaultdict
from dataclasses import asdict
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from stats.matrix import COLUMNS, Line, Power, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stats.assess import Assessment
    from stats.judge import Row

WORST = 12
CEILING = 20
"""Powers of ten beyond which the matrix's colour no longer tells p-values apart."""


def text(found: Assessment) -> str:
    """The table by property and p, worst first, the worst values, and the verdict in a plain line."""
    lines = [
        f"{found.source}: level {found.level}, {found.seeds} seeds a p, base {found.base}, "
        f"{len(found.table)} values in {found.seconds:.0f} s",
        "",
        "Smallest p-value by property and p (exact tests: ok or FAULT; - where a test is not used)",
        *_by_property(found),
        "",
        f"{'Worst values':<44}{'p':>7} {'kind':<9}{'statistic':>12}{'p-value':>10}{'again':>10}{'n':>15}"
        "  smallest effect seen",
    ]
    for row in found.table[:WORST]:
        mark = {"fail": "FAIL ", "suspicious": "? "}.get(row.status, "")
        at = "" if row.p is None else f"{row.p:g}"
        again = "" if row.again is None else f"{row.again:.1e}"
        lines.append(
            f"{mark + row.name:<44}{at:>7} {row.kind:<9}{row.statistic:>12.6g}{row.pvalue:>10.1e}{again:>10}"
            f"{row.n:>15,}  {row.effect:.2g} {row.unit}"
        )
    return "\n".join([*lines, "", verdict_line(found)])


def verdict_line(found: Assessment) -> str:
    """The verdict in one line."""
    stopped = " (interrupted: only what was done is judged)" if found.interrupted else ""
    if found.verdict == "fail":
        more = f" and {len(found.failures) - 6} more" if len(found.failures) > 6 else ""
        return f"FAIL: {', '.join(found.failures[:6])}{more}{stopped}"
    odds = f"a perfect generator fails such a run with probability below {max(found.bound, 1e-12):.1e}"
    if found.verdict == "suspicious":
        names = ", ".join(dict.fromkeys(row.name for row in found.table if row.status == "suspicious"))
        return f"SUSPICIOUS: {names}; {odds}{stopped}"
    return f"PASS: no test failed; {odds}{stopped}"


def _by_property(found: Assessment) -> list[str]:
    cells: dict[tuple[str, str], dict[float | None, Row]] = defaultdict(dict)
    for row in reversed(found.table):  # worst first: the last one written is the worst
        cells[row.test, row.property][row.p] = row
    ps: list[float | None] = [*sorted(found.ps), None]
    lines = [f"{'':<52}" + "".join(f"{'any p' if p is None else f'{p:g}':>10}" for p in ps)]
    rank = {"fail": 0, "suspicious": 1, "pass": 2}
    order = sorted(cells, key=lambda key: min((rank[row.status], row.pvalue) for row in cells[key].values()))
    for test, name in order:
        row_of = cells[test, name]
        shown = [_cell(row_of.get(p)) for p in ps]
        lines.append(f"{test:<4}{name:<48}" + "".join(f"{cell:>10}" for cell in shown))
    return lines


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.kind == "exact":
        return "ok" if row.status == "pass" else "FAULT"
    return f"{'!' if row.status == 'fail' else '?' if row.status == 'suspicious' else ''}{row.pvalue:.1e}"


def to_json(found: Assessment) -> dict[str, Any]:
    """Everything but the images, for json.dump."""
    keys = "source level ps seeds base verdict failures bound cauchy seconds interrupted"
    values: dict[str, Any] = {key: getattr(found, key) for key in keys.split()}
    values["table"] = [asdict(row) for row in found.table]
    values["pvalues"] = [
        {"name": name, "p": p, "pvalues": pvalues} for (name, p), pvalues in found.pvalues.items() if pvalues
    ]
    return values


def write_json(path: str, value: Any) -> None:
    """Write JSON; infinities and NaN become null, which the standard knows."""

    def clean(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: clean(item) for key, item in one.items()}
        if isinstance(one, list | tuple):
            return [clean(item) for item in one]
        if isinstance(one, np.generic):
            one = one.item()
        return None if isinstance(one, float) and not math.isfinite(one) else one

    with open(path, "w", encoding="utf-8") as out:
        json.dump(clean(value), out, indent=1, allow_nan=False)
        out.write("\n")


def figure(width: float, height: float) -> Figure:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def images(found: Assessment) -> Figure:
    """Heat maps of the rate by row and column, the autocorrelation and the spectrum, for each p."""
    gallery = found.gallery.images if found.gallery else {}
    made = figure(10.5, 3.2 * max(1, len(gallery)))
    axes = made.subplots(max(1, len(gallery)), 3, squeeze=False)
    for row, (p, one) in zip(axes, gallery.items(), strict=False):
        scale = math.sqrt(one.count)
        for axis, values, title, ticks in (
            (row[0], one.rate / scale, "rate by row and column (sigma)", None),
            (row[1], one.autocorrelation / scale, "autocorrelation by lag (sigma)", "lag"),
            (row[2], one.spectrum / scale, "spectrum by frequency (sigma)", None),
        ):
            high, wide = values.shape
            across, down = wide // 2 + 0.5, high // 2 + 0.5
            extent = (-across, across, down, -down) if ticks == "lag" else None
            shown = axis.imshow(values, cmap="RdBu_r", vmin=-5, vmax=5, aspect="auto", extent=extent)
            axis.set_title(f"p = {p:g}: {title}", fontsize=9)
            if ticks != "lag":
                axis.set_xticks([])
                axis.set_yticks([])
            made.colorbar(shown, ax=axis)
    if not gallery:
        for axis in axes.flat:
            axis.set_axis_off()
    return made


def histograms(found: Assessment) -> Figure:
    """Histograms of the first-level p-values of each test, all subtests, seeds and p together."""
    by: dict[str, list[float]] = defaultdict(list)
    for (name, _), pvalues in found.pvalues.items():
        by[name.split()[0]] += pvalues
    tests = {name: values for name, values in by.items() if values}
    wide = 6
    high = max(1, -(-len(tests) // wide))
    made = figure(12, 1.7 * high)
    axes = made.subplots(high, wide, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (name, values) in zip(axes.flat, tests.items(), strict=False):
        axis.set_axis_on()
        axis.hist(values, bins=20, range=(0, 1), color="#4477aa")
        axis.axhline(len(values) / 20, color="black", linewidth=0.8)
        axis.set_title(f"{name}, {len(values):,}", fontsize=8)
        axis.set_yticks([])
        axis.tick_params(labelsize=7)
    return made


def matrix_picture(lines: list[Line]) -> Figure:
    """Controls down, tests across: colour -log10 of the smallest p-value, a ring where a test is named, x if missed."""
    values = np.full((len(lines), len(COLUMNS)), np.nan)
    for row, one in enumerate(lines):
        for column, name in enumerate(COLUMNS):
            value = one.values.get(name)
            if value is not None:
                values[row, column] = min(CEILING, -math.log10(max(value, 1e-300)))
    made = figure(11, 1.6 + 0.27 * len(lines))
    axis = made.subplots()
    axis.set_facecolor("#dddddd")
    shown = axis.imshow(values, cmap="viridis_r", vmin=0, vmax=CEILING, aspect="auto")
    made.colorbar(shown, ax=axis, label="-log10 smallest p-value (exact tests: 0 or 20)")
    for row, one in enumerate(lines):
        for name in one.named:
            missed = name in one.missed
            mark = "rx" if missed else "wo"
            axis.plot(COLUMNS.index(name.split()[0]), row, mark, markersize=7, markerfacecolor="none")
    axis.set_xticks(range(len(COLUMNS)), COLUMNS, fontsize=8, rotation=90)
    axis.set_yticks(range(len(lines)), [f"{one.control} (p = {one.p:g})" for one in lines], fontsize=8)
    return made


def png(made: Figure) -> bytes:
    """A figure as PNG."""
    out = io.BytesIO()
    made.savefig(out, format="png", dpi=110)
    return out.getvalue()


def evidence(name: str) -> Any:
    """Committed results: "controls", "power", "calibration", "comparison" or "deep"; None where there are none."""
    file = resources.files("stats") / "evidence" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def page(found: Assessment | None, lines: list[Line] | None = None, powers: list[Power] | None = None) -> str:
    """One self-contained page of an assessment, the control matrix and the power table.

    Where no fresh matrix or power is given, the committed ones are shown and said to be so.
    """
    parts: list[str] = []
    if found is not None:
        parts += [f"<p class={found.verdict}>{html.escape(verdict_line(found))}</p>", _table(found)]
        parts += [_picture("Rates, autocorrelation, spectrum", images(found))]
        parts += [_picture("P-values of the first level", histograms(found))]
    source = "measured now"
    if lines is None and (stored := evidence("controls")):
        lines, source = [_line(one) for one in stored["lines"]], stored["run"]
    if lines:
        parts.append(_picture(f"Control matrix ({source})", matrix_picture(lines)))
    source = "measured now"
    if powers is None and (stored := evidence("power")):
        powers, source = [Power(**one) for one in stored["powers"]], stored["run"]
    if powers:
        heads = ("control", "caught by", "p", "caught", "runs", "masks a run", "95% lower bound")
        rows = [(o.control, o.test, f"{o.p:g}", o.caught, o.runs, o.masks, f"{o.lower:.3f}") for o in powers]
        parts += [f"<h2>Power on the controls ({html.escape(source)})</h2>", _grid(heads, rows)]
    title = f"stats: {found.source}" if found else "stats: controls"
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def _line(one: dict[str, Any]) -> Line:
    return Line(**{**one, "named": tuple(one["named"]), "failed": tuple(one["failed"]), "missed": tuple(one["missed"])})


def _table(found: Assessment) -> str:
    heads = ("status", "test", "p", "kind", "statistic", "p-value", "BH", "again", "n", "smallest effect seen")
    rows = []
    for row in found.table:
        again = "" if row.again is None else f"{row.again:.2g}"
        at = "" if row.p is None else f"{row.p:g}"
        effect = f"{row.effect:.2g} {row.unit}"
        rows.append(
            (row.status, row.name, at, row.kind, f"{row.statistic:.6g}", f"{row.pvalue:.2g}", f"{row.adjusted:.2g}",
             again, f"{row.n:,}", effect)
        )  # fmt: skip
    about = (
        f"Level {found.level}, {found.seeds} seeds a p, base {found.base}, {found.seconds:.0f} s. A perfect generator "
        f"fails such a run with probability below {found.bound:.1e}. Cauchy combination of all first-level values: "
        f"{found.cauchy:.2g} (a diagnosis, no gate)."
    )
    return f"<h2>{html.escape(found.source)}</h2><p>{html.escape(about)}</p>{_grid(heads, rows)}"


def _grid(heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    head = "".join(f"<th>{html.escape(one)}</th>" for one in heads)
    body = "".join(
        f"<tr class={row[0]}>" + "".join(f"<td>{html.escape(str(one))}</td>" for one in row) + "</tr>"
        if row[0] in ("pass", "suspicious", "fail")
        else "<tr>" + "".join(f"<td>{html.escape(str(one))}</td>" for one in row) + "</tr>"
        for row in rows
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _picture(title: str, made: Figure) -> str:
    data = base64.b64encode(png(made)).decode()
    return f'<h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }}
img {{ max-width: 100% }} .scroll {{ max-height: 32em; overflow: auto }}
table {{ border-collapse: collapse; font-size: 13px }} th, td {{ padding: 2px 8px; text-align: left }}
th {{ position: sticky; top: 0; background: #eee }} tr.fail {{ background: #fbb }} tr.suspicious {{ background: #fe9 }}
p.pass, p.fail, p.suspicious {{ font-size: 18px; padding: .6em }} p.pass {{ background: #cfc }}
p.fail {{ background: #fbb }} p.suspicious {{ background: #fe9 }}
</style>
<h1>{title}</h1>
{body}
</html>
"""

__all__ = [
    "evidence", "histograms", "images", "matrix_picture", "page", "plain", "png", "text", "to_json", "verdict_line",
    "write_json",
]  # fmt: skip
