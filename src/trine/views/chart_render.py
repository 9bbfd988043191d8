"""Draws a `Chart` with Matplotlib (reports, docs, PNG, SVG), and writes its data as CSV. Loads Matplotlib only then."""

from __future__ import annotations

import csv
import io
import itertools
import math
import textwrap
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
_LINE_OF_WORDS, _LETTER = 10.5, 4.05  # points from one line of words to the next, and that a letter is wide
_DASHES: dict[str, Any] = {"solid": "-", "dash": (0, (5, 3)), "dot": (0, (1.2, 2))}
_FIRST_OF_A_FORMULA = ("=", "+", "-", "@")


def to_matplotlib(chart: Chart, width: float = 7.2, of: str = "") -> Figure:
    """The figure, drawn without pyplot, so nothing global changes. ``width`` in inches; ``of`` stands over the rest."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    width *= 1.5 if chart.wide else 1.0
    with mpl.rc_context(_style()):
        figure = Figure(figsize=(width, _tall(chart, width)), dpi=150, layout="constrained")
        _fill(figure, figure.subplots(), chart, width)
        if chart.notes:
            text = "\n".join(_notes(chart, width))
            figure.supxlabel(text, fontsize=7.5, color=ON_WHITE["grey"], x=0.02, ha="left")
        if of:
            figure.suptitle(plain(of, 80), fontsize=8, color=ON_WHITE["grey"])
    return figure


def panels(rows: Sequence[Sequence[Chart]], of: str = "", width: float = 11.0) -> Figure:
    """Several figures on one picture, those below each other with the same left and right ends.

    Args:
        rows: figures from left to right, rows from the top; the last figure of a shorter row takes what is left.
        of: stands over all of them.
        width: of the picture, in inches.

    Raises:
        ValueError: a row without a figure, or no row.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    if not rows or not all(rows):
        raise ValueError(f"rows: found {[len(row) for row in rows]} figures, need at least one in each")
    columns = max(map(len, rows))
    one = width / columns
    talls = [max(_tall(chart, one) for chart in row) for row in rows]
    with mpl.rc_context(_style()):
        lines = textwrap.wrap(plain(of), int(8 * width))
        figure = Figure(figsize=(width, sum(talls) + 0.3 * len(lines)), dpi=120, layout="constrained")
        figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)  # type: ignore[call-arg, union-attr]
        grid = figure.add_gridspec(len(rows), columns, height_ratios=talls)
        for i, row in enumerate(rows):
            for j, chart in enumerate(row):
                axes = figure.add_subplot(grid[i, j:] if chart is row[-1] else grid[i, j])
                _fill(figure, axes, chart, one)
                if chart.notes:
                    how: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
                    text = "\n".join(_notes(chart, one))
                    axes.annotate(text, (0.0, 0.0), (-22, -36), fontsize=7.5, color=ON_WHITE["grey"], **how)
        if lines:
            figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def _style() -> Any:
    from trine.views.figures import STYLE

    # names of runs and texts are words, never formulas
    return {**STYLE, "text.parse_math": False, "svg.hashsalt": "trine"}


def _tall(chart: Chart, width: float) -> float:
    """Height of a figure of some width, inches."""
    return 3.6 * chart.height + 0.16 * len(_notes(chart, width))


def _notes(chart: Chart, width: float) -> list[str]:
    """Lines of the notes beneath a figure, none longer than it is wide."""
    return [line for note in chart.notes for line in textwrap.wrap(note, max(20, int(17 * width)))]


def _fill(figure: Figure, axes: Axes, chart: Chart, width: float) -> None:
    axes.set_title(chart.title)
    if chart.empty:
        axes.set_axis_off()
        why = "\n".join(textwrap.wrap(chart.empty, max(20, int(11 * width))))
        axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
    else:
        _draw(figure, axes, chart)


def _draw(figure: Figure, axes: Axes, chart: Chart) -> None:
    if chart.heatmap is not None:
        _heatmap(figure, axes, chart.heatmap, chart.y.down)
    how: dict[str, Any]
    for band in chart.bands:
        colour = ON_WHITE[band.colour]
        x, how = np.asarray(band.x), {"color": colour, "alpha": band.opacity}
        axes.fill_between(x, band.low, band.high, linewidth=0, label=band.name, **how)
        if len(x) == 1:  # an area between single points is none
            axes.vlines(x, band.low, band.high, linewidth=7, **how)
    for bars in chart.bars:
        width = bars.width if bars.width is not None else 0.8
        axes.bar(np.asarray(bars.x), bars.height, width=width, color=ON_WHITE[bars.colour], label=bars.name)  # type: ignore[arg-type]
    for line in chart.lines:
        how = {"color": ON_WHITE[line.colour], "label": line.name}
        if line.points:
            axes.plot(np.asarray(line.x), line.y, linestyle="none", marker="o", markersize=3, **how)
        else:
            style = "steps-post" if line.steps else "default"
            how |= {"linestyle": _DASHES[line.dash], "linewidth": line.width, "drawstyle": style}
            few = np.isfinite(np.asarray(line.y)).sum() < 4  # a line through them is short, or none
            axes.plot(np.asarray(line.x), line.y, marker="o" if few else None, markersize=3, **how)
    for mark in chart.marks:
        draw = axes.axvline if mark.axis == "x" else axes.axhline
        draw(mark.at, color=ON_WHITE[mark.colour], linestyle=_DASHES[mark.dash], linewidth=1.0)
    _axis(axes, "x", chart.x)
    _axis(axes, "y", chart.y)
    _words(axes, [mark for mark in chart.marks if mark.text and mark.axis == "x"])
    _level_words(axes, [mark for mark in chart.marks if mark.text and mark.axis == "y"])
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        # a pale ground, for there may be no place where nothing is drawn
        ground: dict[str, Any] = {"frameon": True, "framealpha": 0.8, "edgecolor": "none"}
        axes.legend(handles, labels, fontsize=8, loc="best", ncols=2 if len(labels) > 4 else 1, **ground)


def _words(axes: Axes, marks: Sequence[Mark]) -> None:
    """Words along upright lines, from the top or else from the bottom; where there is no room for them, none."""
    width, high = _size(axes)
    to_axes = axes.get_xaxis_transform() + axes.transAxes.inverted()
    taken: list[tuple[float, float, float, float]] = []  # left, right, bottom, top, in points
    places = {mark: float(to_axes.transform((mark.at, 0.0))[0]) * width for mark in marks}
    for mark in sorted(marks, key=lambda one: (not one.moves, one.at)):
        at, long = places[mark], _LETTER * len(mark.text)
        near = any(0 < other - at < 2 * _LINE_OF_WORDS for other in places.values())
        # The step looked at on the left, else it would hide the words of a stage that begins there.
        sides = ("right", "left") if mark.moves or near else ("left", "right")
        for va, ha in itertools.product(("top", "bottom"), sides):
            left = at + 1 if ha == "left" else at - 1 - _LINE_OF_WORDS
            place = (left, left + _LINE_OF_WORDS, *((high - long, high) if va == "top" else (0.0, long)))
            if not any(_overlap(place, other) for other in taken):
                taken.append(place)
                offset = (3 if ha == "left" else -3, -3 if va == "top" else 3)
                _write(axes, mark, ("data", "axes fraction"), (mark.at, float(va == "top")), offset,
                       ha=ha, va=va, rotation=90)  # fmt: skip
                break


def _level_words(axes: Axes, marks: Sequence[Mark]) -> None:
    """Words at level lines, to the right of the axes; apart from each other where the lines are close."""
    _, high = _size(axes)
    to_axes = axes.get_yaxis_transform() + axes.transAxes.inverted()
    above = -math.inf
    for mark in sorted(marks, key=lambda one: one.at):
        at = float(to_axes.transform((0.0, mark.at))[1]) * high
        place = max(at, above)
        above = place + _LINE_OF_WORDS
        line = {"arrowstyle": "-", "color": ON_WHITE[mark.colour], "linewidth": 0.6, "relpos": (0, 0.5)}
        line |= {"shrinkA": 0, "shrinkB": 0}
        _write(axes, mark, ("axes fraction", "data"), (1.0, mark.at), (9, place - at), ha="left", va="center",
               arrowprops=line)  # fmt: skip


def _write(axes: Axes, mark: Mark, coords: tuple[str, str], at: Any, offset: tuple[float, float], **how: Any) -> None:
    how |= {"fontsize": 7.5, "color": ON_WHITE[mark.colour], "bbox": _BEHIND_WORDS}
    axes.annotate(mark.text, at, offset, xycoords=coords, textcoords="offset points", **how)


def _size(axes: Axes) -> tuple[float, float]:
    """Width and height of the axes in points, nearly, for they are laid out later; settles how far they reach."""
    axes.autoscale_view()
    picture: Any = axes.get_figure(root=True)
    ground = axes.get_window_extent()
    return ground.width * 72 / picture.dpi, ground.height * 72 / picture.dpi


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _axis(axes: Axes, name: Literal["x", "y"], axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    at: Any = axes.xaxis if name == "x" else axes.yaxis
    at.set_label_text(axis.title)
    if axis.log:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        # The default writes powers as formulas, which this figure does not read.
        at.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        at.set_minor_formatter(FuncFormatter(lambda value, _: _between_decades(value, *at.get_view_interval())))
    else:
        low, high = sorted(at.get_view_interval())
        if axis.whole:
            at.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            if high - low < 1:  # one place: else there would be many marks around it, and none whole
                middle = (low + high) / 2
                (axes.set_xlim if name == "x" else axes.set_ylim)(middle - 0.5, middle + 0.5)
        if max(abs(low), abs(high)) >= 1000:
            at.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
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
    _cell_numbers(axes, heatmap, colours[cells])
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), ListedColormap(colours[:-1] / 255.0)), ax=axes, pad=0.01)
    ticks = scale_ticks(heatmap)
    bar.set_ticks([place for place, _ in ticks], labels=[text for _, text in ticks])
    bar.set_label(f"{heatmap.what} ({heatmap.unit})" if heatmap.unit else heatmap.what)
    bar.outline.set_visible(False)  # type: ignore[operator]


def _cell_numbers(axes: Axes, heatmap: Heatmap, colours_RC3: Any) -> None:
    """The value in each cell, where they are few enough to have room for it."""
    values = np.asarray(heatmap.values)
    width, high = _size(axes)
    texts = {at: f"{value:.2g}" for at, value in np.ndenumerate(values) if np.isfinite(value)}
    long = max(map(len, texts.values()), default=0)
    if long * _LETTER > width / values.shape[1] or high / values.shape[0] < _LINE_OF_WORDS:
        return
    for (row, column), text in texts.items():
        dark = float(colours_RC3[row, column] @ (0.299, 0.587, 0.114)) < 140  # weights of ITU-R BT.601
        axes.text(heatmap.x0 + column, heatmap.y0 + row, text, ha="center", va="center", fontsize=7,
                  color="white" if dark else ON_WHITE["ink"])  # fmt: skip


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
