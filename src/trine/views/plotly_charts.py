"""Draws a `Chart` as the page shows it: the plain dictionary that plotly.js takes. Imports nothing of Plotly's."""

from __future__ import annotations

import base64
import html
import math
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from trine.views.chart import Axis, Bars, Chart, Colour, Heatmap, Line, Mark
from trine.views.chart_render import ON_WHITE
from trine.views.heatmap import data_uri, palette, scale_ticks

ON_BLACK: dict[Colour, str] = {
    "blue": "#58B4F0",
    "orange": "#E9A93B",
    "green": "#3CC79E",
    "red": "#FF8F57",
    "purple": "#E39BCB",
    "sky": "#A5D8F7",
    "ink": "#ECECEC",
    "grey": "#A3A9B3",
}
_GROUND = {False: ("#222222", "#E3E5E9", "#ffffff"), True: ("#E8EAED", "#363C46", "#1b1f26")}
"""Ink, grid, and the ground of what is shown while pointing at it."""
_CELLS_WITH_VALUES = 12_000
"""Heatmaps up to this size tell each cell's value when pointed at; larger ones are one image."""
_LONG = 64
"""Points from which a curve is sent as bytes."""
_FEW = 10
"""Whole numbers up to which each is marked; plotly.js makes ten marks at most, so on wider axes none between wholes."""
HEIGHT = 290
"""Pixels of a figure of height 1."""


def to_plotly(chart: Chart, dark: bool = False) -> dict[str, Any]:
    """``{"data": [...], "layout": {...}}``; JSON-ready, gaps are None, texts are escaped."""
    ink, grid, ground = _GROUND[dark]
    layout: dict[str, Any] = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": ink, "size": 12, "family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"},
        "margin": {"l": 58, "r": 14, "t": 10, "b": 42},
        "height": round(HEIGHT * chart.height),
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": ground, "font": {"color": ink}},
        # What is switched off in the legend stays off. Of the axes plotly.js would also keep a range that is open at
        # one end as it came out for the first data, and later ones would grow out of the figure.
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 11}}
        | {"uirevision": chart.key},
        "showlegend": True,
        "dragmode": False,
        "bargap": 0.15,
    }
    if chart.empty:
        hidden = {"visible": False, "range": [0, 1]}
        text = _words(chart.empty, 60)
        words = {"text": text, "x": 0.5, "y": 0.5, "showarrow": False, "font": {"size": 13, "color": ink}}
        return {"data": [], "layout": {**layout, "xaxis": hidden, "yaxis": hidden, "annotations": [words]}}
    colours = ON_BLACK if dark else ON_WHITE
    data: list[dict[str, Any]] = []
    if chart.heatmap is not None:
        data += _heatmap(chart.heatmap, chart, dark)
        layout |= {"hovermode": "closest", "showlegend": False}
        layout["margin"] = {**layout["margin"], "r": 84}
    for band in chart.bands:
        edge: dict[str, Any] = {"type": "scatter", "mode": "lines", "x": _column(band.x), "line": {"width": 0}}
        edge |= {"showlegend": False, "hoverinfo": "skip", "connectgaps": False}
        name = _text(band.name)
        fill = _faint(colours[band.colour], band.opacity)
        data.append({**edge, "y": _column(band.low), "legendgroup": name})
        data.append(
            {**edge, "y": _column(band.high), "fill": "tonexty", "fillcolor": fill, "name": name, "legendgroup": name}
            | {"showlegend": bool(name)}
        )
    data += [_bars(bars, colours) for bars in chart.bars] + [_line(line, colours) for line in chart.lines]
    layout["showlegend"] = layout["showlegend"] and sum(bool(one.get("showlegend")) for one in data) > 1
    layout["xaxis"] = _axis(chart.x, ink, grid, _reach(chart, "x"))
    layout["yaxis"] = _axis(chart.y, ink, grid, _reach(chart, "y"))
    if chart.heatmap is not None:
        layout["xaxis"]["showgrid"] = layout["yaxis"]["showgrid"] = False
        layout["yaxis"]["scaleanchor"] = False  # else an image's pixels are squares
    layout["shapes"], layout["annotations"] = [], []
    for mark in chart.marks:
        if mark.moves:
            continue  # the page draws it over the figure, and moves it without drawing the figure anew
        _mark(layout, mark, chart.x if mark.axis == "x" else chart.y, colours, ground)
    return {"data": data, "layout": layout}


def _line(line: Line, colours: dict[Colour, str]) -> dict[str, Any]:
    look: dict[str, Any] = {"color": colours[line.colour]}
    trace: dict[str, Any] = {"type": "scatter", "name": _text(line.name)}
    trace |= {"x": _column(line.x), "y": _column(line.y)}
    trace |= {"showlegend": bool(line.name), "hovertemplate": "%{y:,.6~g}"}
    lone = np.asarray(line.x).size == 1  # a line of one point would not be seen
    if line.points or lone:
        return trace | {"mode": "markers", "marker": look | {"size": 7 if lone else 5}}
    look |= {"width": line.width, "dash": line.dash, "shape": "hv" if line.steps else "linear"}
    return trace | {"mode": "lines", "line": look, "connectgaps": False}


def _bars(bars: Bars, colours: dict[Colour, str]) -> dict[str, Any]:
    trace: dict[str, Any] = {"type": "bar", "name": _text(bars.name)}
    trace |= {"x": _column(bars.x), "y": _column(bars.height)}
    trace |= {"marker": {"color": colours[bars.colour], "line": {"width": 0}}, "showlegend": bool(bars.name)}
    if bars.width is not None:
        trace["width"] = _column(bars.width)
    return trace | {"hovertemplate": "%{y:,.6~g}"}


def _mark(layout: dict[str, Any], mark: Mark, on: Axis, colours: dict[Colour, str], ground: str) -> None:
    if on.log and mark.at <= 0:
        return
    axis, at = mark.axis, mark.at
    line = {"color": colours[mark.colour], "width": 1.2, "dash": mark.dash}
    across = "y" if axis == "x" else "x"
    shape = {"type": "line", f"{axis}0": at, f"{axis}1": at, f"{axis}ref": axis, "line": line, "layer": "above"}
    layout["shapes"].append(shape | {f"{across}0": 0, f"{across}1": 1, f"{across}ref": "paper"})
    if not mark.text:
        return
    words = {"text": _text(mark.text), "showarrow": False, "font": {"size": 11, "color": line["color"]}}
    words["bgcolor"] = _faint(ground, 0.88)  # it may lie over a bar
    at = math.log10(at) if on.log else at  # plotly.js takes a shape's place as a value, and a word's as its logarithm
    if axis == "x":
        place = {"x": at, "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "top"}
    else:
        place = {"y": at, "x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
    layout["annotations"].append(words | place)


def _axis(axis: Axis, ink: str, grid: str, reach: tuple[float, float] | None) -> dict[str, Any]:
    """What plotly.js takes for an axis on which values reach from and to; of ``log`` ones the logarithms do."""
    found: dict[str, Any] = {
        "title": {"text": _text(axis.title), "standoff": 6, "font": {"size": 12}},
        "gridcolor": grid,
        "linecolor": grid,
        "zeroline": False,
        "fixedrange": False,
        "separatethousands": True,
        "tickfont": {"size": 11, "color": ink},
    }
    if axis.log:
        found["type"] = "log"
    if axis.ticks:
        places = [place for place, _ in axis.ticks]
        found |= {"tickmode": "array", "tickvals": places, "ticktext": [_text(text) for _, text in axis.ticks]}
        # costs a second layout of the figure, so only where words need the room
        found["automargin"] = max(len(text) for _, text in axis.ticks) > 5
    low, high = axis.low, axis.high
    if axis.log:
        low, high = (None if one is None or one <= 0 else math.log10(one) for one in (low, high))
    least, most = reach or (0.0, 0.0)
    wide = (most if high is None else high) - (least if low is None else low)
    if axis.log and not axis.ticks:
        found |= _log_marks(least if low is None else low, wide)
    elif axis.whole and not axis.ticks:
        found["tickformat"] = ",d"
        if wide <= _FEW:
            found |= {"tick0": 0, "dtick": 1}  # else plotly.js marks halves, which are then written as wholes
    if axis.down:
        found |= {"range": [high, low]} if None not in (low, high) else {"autorange": "reversed"}
    elif low is not None or high is not None:
        found["range"] = [low, high]
    return found


def _log_marks(first: float, decades: float) -> dict[str, Any]:
    """Marks of an axis over so many powers of ten from ``first`` on, so that two at least have a number."""
    if decades >= 2:
        return {"dtick": 1}
    if 1e-9 < decades < 0.8:
        return {}  # plotly.js marks even steps with whole numbers; further on with a digit, a 2 for 20
    # of a single value it shows a power of ten to each side
    powers = range(math.floor(first) - 1, math.ceil(first + decades) + 2)
    places = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return {"tickmode": "array", "tickvals": places, "ticktext": [f"{place:,.6g}" for place in places]}


def _reach(chart: Chart, axis: Literal["x", "y"]) -> tuple[float, float] | None:
    """Least and largest of what is drawn along an axis, of a logarithmic one their logarithms; None of nothing."""
    on = getattr(chart, axis)
    drawn: list[ArrayLike] = [getattr(one, axis) for one in chart.lines]
    for band in chart.bands:
        drawn += [band.x] if axis == "x" else [band.low, band.high]
    drawn += [one.x if axis == "x" else one.height for one in chart.bars]
    drawn += [[mark.at] for mark in chart.marks if mark.axis == axis and not mark.moves]
    if chart.heatmap is not None:
        rows, columns = np.asarray(chart.heatmap.values).shape
        first, count = (chart.heatmap.x0, columns) if axis == "x" else (chart.heatmap.y0, rows)
        drawn.append([first - 0.5, first + count - 0.5])
    known = [values[np.isfinite(values) & ((values > 0) | (not on.log))] for values in map(np.asarray, drawn)]
    ends = [float(end) for values in known if values.size for end in (values.min(), values.max())]
    if not ends:
        return None
    return (math.log10(min(ends)), math.log10(max(ends))) if on.log else (min(ends), max(ends))


def _heatmap(heatmap: Heatmap, chart: Chart, dark: bool) -> list[dict[str, Any]]:
    values = np.asarray(heatmap.values)
    colours = palette(heatmap.palette, dark)[:-1]
    picked = np.linspace(0, len(colours) - 1, 33).round().astype(int)
    scale = [[i / 32, "rgb({},{},{})".format(*colours[at])] for i, at in enumerate(picked.tolist())]
    ticks = scale_ticks(heatmap)
    what = _text(f"{heatmap.what} ({heatmap.unit})" if heatmap.unit else heatmap.what)
    bar = {
        "title": {"text": what, "side": "right", "font": {"size": 11}},
        "tickvals": [place for place, _ in ticks],
        "ticktext": [_text(text) for _, text in ticks],
        "tickfont": {"size": 10},
        "thickness": 10,
        "outlinewidth": 0,
        "xpad": 4,
        "len": 1.0,
    }
    where = f"{_text(chart.y.label or 'row')} %{{y}}, {_text(chart.x.label or 'column')} %{{x}}"
    if values.size <= _CELLS_WITH_VALUES:
        trace: dict[str, Any] = {"type": "heatmap", "z": [_list(row) for row in heatmap.places()], "zmin": 0, "zmax": 1}
        trace |= {"text": [[f"{one:.4g}" if math.isfinite(one) else "none" for one in row] for row in values.tolist()]}
        trace |= {"x0": heatmap.x0, "dx": 1, "y0": heatmap.y0, "dy": 1, "colorscale": scale, "colorbar": bar}
        return [trace | {"hovertemplate": f"{where}: %{{text}}<extra></extra>", "hoverongaps": False}]
    image = {"type": "image", "source": data_uri(heatmap, dark), "x0": heatmap.x0, "dx": 1, "y0": heatmap.y0, "dy": 1}
    image |= {"hovertemplate": f"{where}<extra></extra>", "zsmooth": False}
    marker = {"color": [0, 1], "cmin": 0, "cmax": 1, "colorscale": scale, "showscale": True, "colorbar": bar}
    hidden = {"type": "scatter", "mode": "markers", "x": [None, None], "y": [None, None], "marker": marker}
    return [image, hidden | {"hoverinfo": "skip", "showlegend": False}]


def _column(values: ArrayLike | None) -> list[float | None] | dict[str, str]:
    """Numbers of a curve; of a long one the bytes, which cost neither side time, and in which gaps are NaN."""
    numbers = np.asarray(values, dtype="<f8")
    if numbers.size < _LONG:
        return _list(numbers)
    with np.errstate(over="ignore", invalid="ignore"):
        short = numbers.astype("<f4")
        whole = np.all(np.isnan(numbers) | (np.trunc(numbers) == numbers))
        exact = np.array_equal(short.astype("<f8"), numbers, equal_nan=True)
    # steps must not be rounded; other numbers are as good in seven digits, where those can say them
    if not exact and (whole or not np.array_equal(np.isfinite(short), np.isfinite(numbers))):
        return {"dtype": "f8", "bdata": base64.b64encode(numbers.tobytes()).decode("ascii")}
    return {"dtype": "f4", "bdata": base64.b64encode(short.tobytes()).decode("ascii")}


def _list(values: ArrayLike | None) -> list[float | None]:
    """JSON-ready numbers of six digits; what is not finite is None."""
    found: list[float | None] = []
    for one in np.asarray(values, dtype=np.float64).tolist():
        found.append(float(f"{one:.6g}") if math.isfinite(one) else None)
    return found


def _text(words: str) -> str:
    """Words for plotly.js, which takes them for markup, and knows no entity of a quotation mark."""
    return html.escape(words, quote=False)


def _faint(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _words(text: str, width: int) -> str:
    lines: list[str] = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(_text(line) for line in lines)
