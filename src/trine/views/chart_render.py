"""Draws a `Chart` with Matplotlib (reports, docs, PNG, SVG), and writes its data as CSV. Loads Matplotlib only then."""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trine.views.chart import Axis, Chart, Colour, Heatmap, Mark, plain
from trine.views.heatmap import palette, scale_ticks, shades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["png", "svg", "csv"]
FORMATS: tuple[Format, ...] = ("png", "svg", "csv")

# Of Okabe and Ito, darkened where a thin line would be too pale on white (3 to 1 at least).
ON_WHITE: dict[Colour, str] = {
    "blue": "#0072B2",
    "orange": "#B8730A",
    "green": "#00825C",
    "red": "#C94F00",
    "purple": "#A8508A",
    "sky": "#2C86BD",
    "ink": "#222222",
    "grey": "#6B6B6B",
}
_DRAWER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trine-export")
"""Draws all figures for files, one after the other, in one thread: Matplotlib's settings and Python's warnings are
those of all threads, a figure takes tens of MB while it is drawn, and each thread that ever drew one keeps as much."""
_BEHIND_WORDS = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}  # else curves run through them
_DASHES: dict[str, Any] = {"solid": "-", "dash": (0, (5, 3)), "dot": (0, (1.2, 2))}
_FIRST_OF_A_FORMULA = ("=", "+", "-", "@")


def to_matplotlib(chart: Chart, width: float = 7.2, of: str = "") -> Figure:
    """The figure, drawn without pyplot, so nothing global changes. ``width`` in inches; ``of`` stands over the rest."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from trine.views.figures import STYLE

    tall = 3.6 * chart.height + 0.16 * len(chart.notes)
    # names of runs and texts are words, never formulas
    with mpl.rc_context({**STYLE, "text.parse_math": False, "svg.hashsalt": "trine"}):
        figure = Figure(figsize=(width * (1.5 if chart.wide else 1.0), tall), dpi=150, layout="constrained")
        axes = figure.subplots()
        axes.set_title(chart.title)
        if of:
            figure.suptitle(plain(of, 80), fontsize=8, color=ON_WHITE["grey"])
        if chart.empty:
            axes.set_axis_off()
            axes.text(0.5, 0.5, chart.empty, ha="center", va="center", wrap=True, transform=axes.transAxes)
        else:
            _draw(figure, axes, chart)
        if chart.notes:
            figure.supxlabel("\n".join(chart.notes), fontsize=7.5, color=ON_WHITE["grey"], x=0.02, ha="left")
    return figure


def _draw(figure: Figure, axes: Axes, chart: Chart) -> None:
    if chart.heatmap is not None:
        _heatmap(figure, axes, chart.heatmap, chart.y.down)
    for band in chart.bands:
        colour = ON_WHITE[band.colour]
        axes.fill_between(
            np.asarray(band.x), band.low, band.high, color=colour, alpha=band.opacity, linewidth=0, label=band.name
        )
    for bars in chart.bars:
        width = bars.width if bars.width is not None else 0.8
        axes.bar(np.asarray(bars.x), bars.height, width=width, color=ON_WHITE[bars.colour], label=bars.name)  # type: ignore[arg-type]
    for line in chart.lines:
        how: dict[str, Any] = {"color": ON_WHITE[line.colour], "label": line.name}
        if line.points:
            axes.plot(np.asarray(line.x), line.y, linestyle="none", marker="o", markersize=3, **how)
        else:
            style = "steps-post" if line.steps else "default"
            dash = _DASHES[line.dash]
            axes.plot(np.asarray(line.x), line.y, linestyle=dash, linewidth=line.width, drawstyle=style, **how)
    for mark in chart.marks:
        draw = axes.axvline if mark.axis == "x" else axes.axhline
        draw(mark.at, color=ON_WHITE[mark.colour], linestyle=_DASHES[mark.dash], linewidth=1.0)
        if mark.text:
            _words(axes, mark)
    _axis(axes, "x", chart.x)
    _axis(axes, "y", chart.y)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(handles, labels, fontsize=8, loc="best", ncols=2 if len(labels) > 4 else 1)


def _words(axes: Axes, mark: Mark) -> None:
    how: dict[str, Any] = {"fontsize": 7.5, "color": ON_WHITE[mark.colour], "bbox": _BEHIND_WORDS}
    how |= {"textcoords": "offset points"}
    if mark.axis == "y":
        where, how = (1.0, mark.at), {**how, "xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axes.annotate(mark.text, where, (-3, 3), **how)
        return
    # On the left of the step looked at, else it would hide the words of a stage that begins there.
    side, ha = (-3, "right") if mark.moves else (3, "left")
    how |= {"xycoords": ("data", "axes fraction"), "ha": ha, "va": "top", "rotation": 90}
    axes.annotate(mark.text, (mark.at, 1.0), (side, -3), **how)


def _axis(axes: Axes, name: Literal["x", "y"], axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    at: Any = axes.xaxis if name == "x" else axes.yaxis
    at.set_label_text(axis.title)
    if axis.log:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        # The default writes powers as formulas, which this figure does not read.
        at.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        at.set_minor_formatter(FuncFormatter(lambda value, _: _between_decades(value, *at.get_view_interval())))
    elif axis.whole:
        at.set_major_locator(MaxNLocator(integer=True))
    if axis.ticks:
        at.set_ticks([place for place, _ in axis.ticks], labels=[text for _, text in axis.ticks])
    (axes.set_xlim if name == "x" else axes.set_ylim)(axis.low, axis.high)
    if axis.down and not at.get_inverted():
        at.set_inverted(True)


def _between_decades(value: float, low: float, high: float) -> str:
    """The word at a tick between two powers of ten: only where few powers are in sight, and then at 2, 3 and 5."""
    return f"{value:g}" if max(low, high) < 20 * min(low, high) and f"{value:e}"[0] in "235" else ""


def _heatmap(figure: Figure, axes: Axes, heatmap: Heatmap, down: bool) -> None:
    cells = shades(heatmap)
    if not cells.size:
        return
    rows, columns = cells.shape
    colours = palette(heatmap.palette)
    bottom, top = heatmap.y0 - 0.5, heatmap.y0 + rows - 0.5
    extent = (heatmap.x0 - 0.5, heatmap.x0 + columns - 0.5, *((top, bottom) if down else (bottom, top)))
    axes.imshow(
        colours[cells], extent=extent, origin="upper" if down else "lower", aspect="auto", interpolation="nearest"
    )
    axes.grid(False)
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), ListedColormap(colours[:-1] / 255.0)), ax=axes, pad=0.01)
    ticks = scale_ticks(heatmap)
    bar.set_ticks([place for place, _ in ticks], labels=[text for _, text in ticks])
    bar.set_label(f"{heatmap.what} ({heatmap.unit})" if heatmap.unit else heatmap.what)
    bar.outline.set_visible(False)  # type: ignore[operator]


def to_csv(chart: Chart) -> str:
    """The data: rows ``series, x, y, low, high``; a heatmap as a table, its columns' numbers in the first line.

    Texts that a spreadsheet would take for a formula begin with an apostrophe.
    """
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    if chart.heatmap is not None:
        values = np.asarray(chart.heatmap.values)
        corner = f"{chart.y.label or 'row'} \\ {chart.x.label or 'column'}"
        write([_cell(corner), *range(chart.heatmap.x0, chart.heatmap.x0 + values.shape[1])])
        for row, line in enumerate(values.tolist()):
            write([chart.heatmap.y0 + row, *(_number(one) for one in line)])
        if not (chart.lines or chart.bands or chart.bars):
            return out.getvalue()
    write(["series", _cell(chart.x.title or "x"), _cell(chart.y.title or "y"), "low", "high"])
    series = [(line.name, line.x, line.y) for line in chart.lines] + [
        (one.name, one.x, one.height) for one in chart.bars
    ]
    for name, xs, ys in series:
        for x, y in zip(np.asarray(xs).tolist(), np.asarray(ys).tolist(), strict=True):
            write([_cell(name), _number(x), _number(y), "", ""])
    for band in chart.bands:
        columns: Sequence[list[float]] = [np.asarray(one).tolist() for one in (band.x, band.low, band.high)]
        for x, low, high in zip(*columns, strict=True):
            write([_cell(band.name), _number(x), "", _number(low), _number(high)])
    for mark in chart.marks:
        at = [_number(mark.at), ""] if mark.axis == "x" else ["", _number(mark.at)]
        write([_cell(mark.text or "mark"), *at, "", ""])
    return out.getvalue()


def _number(value: float) -> str:
    return f"{value:.8g}" if math.isfinite(value) else ""


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FIRST_OF_A_FORMULA) else text


def export(chart: Chart, format: Format, of: str = "") -> bytes:
    """The figure as a PNG or SVG file, or its data as CSV; ``of`` stands over the title of a picture.

    Raises:
        ValueError: no such format.
    """
    if format == "csv":
        return to_csv(chart).encode("utf-8")
    if format not in FORMATS:
        raise ValueError(f"format: found {format!r}, need one of {', '.join(FORMATS)}")
    return _DRAWER.submit(_drawn, chart, format, of).result()


def _drawn(chart: Chart, format: Format, of: str) -> bytes:
    import matplotlib as mpl

    found = io.BytesIO()
    fixed: dict[str, Any] = {"Software": None} if format == "png" else {"Date": None}
    with mpl.rc_context({"svg.hashsalt": "trine", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may have characters that the font lacks
        figure = to_matplotlib(chart, of=of)
        figure.savefig(found, format=format, metadata=fixed)
        figure.clear()  # its parts know each other: they would stay until the collector looks
    return found.getvalue()


def write_chart(chart: Chart, path: Path) -> Path:
    """Write a figure (the ending says which kind) to a temporary name, then rename it; returns ``path``.

    Raises:
        ValueError: an ending that is none of `FORMATS`, or the file cannot be written.
    """
    from trine.data._files import write_atomically

    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"{path}: found the ending {kind!r}, need one of {', '.join(FORMATS)}")
    write_atomically(path, export(chart, kind))
    return path
