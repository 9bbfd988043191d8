"""A figure as plain data: what a function of the figures returns, and what every renderer draws.

`trine.views.chart_render` turns one into a Matplotlib figure (reports, docs, PNG, SVG) or into CSV,
`trine.views.plotly_charts` into what the dashboard shows. Colours are named, so that each renderer can pick the shade
that reads well on its ground.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]
Colour = Literal["blue", "orange", "green", "red", "purple", "sky", "ink", "grey"]
Dash = Literal["solid", "dash", "dot"]
Palette = Literal["balance", "amount", "signed"]

COLOURS: tuple[Colour, ...] = ("blue", "orange", "green", "red", "purple", "sky", "ink", "grey")
PALETTES: tuple[Palette, ...] = ("balance", "amount", "signed")
_LONGEST_TEXT = 400


def plain(text: object, longest: int = _LONGEST_TEXT) -> str:
    """Text that is safe to draw: one line, no control or direction characters, at most ``longest`` characters."""
    kept = "".join(" " if unicodedata.category(one)[0] in "CZ" else one for one in str(text)[: 4 * longest])
    kept = " ".join(kept.split())
    return kept if len(kept) <= longest else kept[: longest - 1] + "…"


def _numbers(values: ArrayLike, what: str) -> Array:
    """A 1-D fp64 array; what is infinite becomes NaN, which is drawn as a gap."""
    if isinstance(values, list | tuple):
        values = [math.nan if one is None else one for one in values]
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what}: found values that are no numbers ({error})") from error
    if found.ndim != 1:
        raise ValueError(f"{what}: found {found.ndim} dimensions, need 1")
    return np.where(np.isfinite(found), found, np.nan)


def _alike(what: str, **columns: Array) -> None:
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise ValueError(f"{what}: found {found}, need as many of each")


def _set(owner: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(owner, name, value)


@dataclass(frozen=True)
class Axis:
    """One axis: what it shows, in which unit, and how.

    Attributes:
        label, unit: words; the unit follows in brackets.
        log: a logarithmic scale; values that are not above 0 are gaps.
        low, high: ends; None takes what fits.
        ticks: places and their words; empty takes what fits.
        whole: only whole numbers are marked.
        down: values grow downwards.
    """

    label: str = ""
    unit: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: tuple[tuple[float, str], ...] = ()
    whole: bool = False
    down: bool = False

    def __post_init__(self) -> None:
        _set(self, label=plain(self.label), unit=plain(self.unit))
        _set(self, ticks=tuple((float(at), plain(text)) for at, text in self.ticks))

    @property
    def title(self) -> str:
        """Label and unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, eq=False)
class Line:
    """Points in order, joined (or, with ``points``, not).

    Raises:
        ValueError: x and y differ in length, or are no numbers.
    """

    name: str
    x: ArrayLike
    y: ArrayLike
    colour: Colour = "blue"
    dash: Dash = "solid"
    width: float = 1.6
    points: bool = False  # marks instead of a line
    steps: bool = False  # level until the next point

    def __post_init__(self) -> None:
        x, y = _numbers(self.x, f"line {self.name}, x"), _numbers(self.y, f"line {self.name}, y")
        _alike(f"line {self.name}", x=x, y=y)
        _set(self, name=plain(self.name), x=x, y=y)


@dataclass(frozen=True, eq=False)
class Band:
    """The area between two lines.

    Raises:
        ValueError: x, low and high differ in length, or are no numbers.
    """

    name: str
    x: ArrayLike
    low: ArrayLike
    high: ArrayLike
    colour: Colour = "blue"
    opacity: float = 0.2

    def __post_init__(self) -> None:
        what = f"band {self.name}"
        x, low, high = (_numbers(one, what) for one in (self.x, self.low, self.high))
        _alike(what, x=x, low=low, high=high)
        _set(self, name=plain(self.name), x=x, low=low, high=high)


@dataclass(frozen=True, eq=False)
class Bars:
    """Upright bars, centred on x. ``width`` is one number, one a bar, or None for what fits.

    Raises:
        ValueError: x, height and width differ in length, or are no numbers.
    """

    name: str
    x: ArrayLike
    height: ArrayLike
    colour: Colour = "blue"
    width: ArrayLike | None = None

    def __post_init__(self) -> None:
        what = f"bars {self.name}"
        x, height = _numbers(self.x, what), _numbers(self.height, what)
        width = self.width
        if width is not None:
            width = _numbers(np.broadcast_to(np.asarray(width, dtype=np.float64), x.shape), what)
        _alike(what, x=x, height=height)
        _set(self, name=plain(self.name), x=x, height=height, width=width)


@dataclass(frozen=True)
class Mark:
    """A straight line across the figure at one place of an axis, with a word beside it.

    Raises:
        ValueError: the place is not finite.
    """

    at: float
    text: str = ""
    axis: Literal["x", "y"] = "x"
    colour: Colour = "grey"
    dash: Dash = "dash"
    moves: bool = False  # the step that is looked at: pages move it by themselves

    def __post_init__(self) -> None:
        if not math.isfinite(self.at):
            raise ValueError(f"mark {self.text}: found {self.at}, need a finite place")
        _set(self, at=float(self.at), text=plain(self.text))


@dataclass(frozen=True, eq=False)
class Heatmap:
    """A number a cell, ``[R, C]``, drawn as one image; cells that are not finite are left blank.

    Colours run evenly from ``low`` to ``high``; with ``log2`` evenly in powers of two (values at or below 0 have the
    colour of ``low``). What lies outside has the colour of the nearest end: the scale says so.

    Attributes:
        values: ``[R, C]`` fp32; row 0 is drawn at the bottom, or at the top where the y axis goes ``down``.
        what, unit: of a value, in words.
        low, high: ends of the colours.
        log2: colours even in log2.
        palette: ``balance`` (less than 1 blue, 1 pale, more red), ``signed`` (the same around 0), ``amount``.
        x0, y0: what the first column and row stand for; the next ones are one more each.
        beyond: whether there may be values below ``low``, and above ``high``.
        marks: values that the scale names, and in which words.

    Raises:
        ValueError: not two dimensions, or ends that are no range.
    """

    values: ArrayLike
    what: str
    low: float
    high: float
    unit: str = ""
    log2: bool = False
    palette: Palette = "amount"
    x0: int = 0
    y0: int = 0
    beyond: tuple[bool, bool] = (True, True)
    marks: tuple[tuple[float, str], ...] = ()

    def __post_init__(self) -> None:
        values = np.asarray(self.values, dtype=np.float32)
        if values.ndim != 2:
            raise ValueError(f"heatmap: found {values.ndim} dimensions, need 2, rows and columns")
        ends = math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high
        if not ends or (self.log2 and self.low <= 0):
            raise ValueError(f"heatmap: found {self.low} to {self.high}, need a finite range, above 0 with log2")
        _set(self, values=values, what=plain(self.what), unit=plain(self.unit))
        _set(self, marks=tuple((float(at), plain(text)) for at, text in self.marks))

    def places(self) -> Array:
        """Where each value lies between ``low`` (0) and ``high`` (1), ``[R, C]`` fp32; NaN where there is none."""
        values = np.asarray(self.values)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.log2:
                low, high = math.log2(self.low), math.log2(self.high)
                found = (np.log2(np.maximum(values, self.low)) - low) / (high - low)
            else:
                found = (values - self.low) / (self.high - self.low)
        return np.where(np.isfinite(values), np.clip(found, 0.0, 1.0), np.nan)

    def value_at(self, place: float) -> float:
        """The value whose colour lies at ``place`` between the ends."""
        if self.log2:
            return 2.0 ** (math.log2(self.low) + place * (math.log2(self.high) - math.log2(self.low)))
        return self.low + place * (self.high - self.low)


@dataclass(frozen=True, eq=False)
class Chart:
    """A figure.

    Attributes:
        key: short name, unique on a page: letters, digits and ``-``.
        title: what it shows.
        x, y: the axes.
        lines, bands, bars, marks, heatmap: what is drawn.
        notes: sentences beneath it: how to read it, what could not be read.
        empty: shown instead when there is nothing to draw; not empty means that nothing is.
        height: relative height; 1 is that of a usual figure.
        wide: wants the width of the page.

    Raises:
        ValueError: a key that is none.
    """

    key: str
    title: str
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    lines: Sequence[Line] = ()
    bands: Sequence[Band] = ()
    bars: Sequence[Bars] = ()
    marks: Sequence[Mark] = ()
    heatmap: Heatmap | None = None
    notes: Sequence[str] = ()
    empty: str = ""
    height: float = 1.0
    wide: bool = False

    def __post_init__(self) -> None:
        good = self.key and all(one.isascii() and (one.isalnum() or one == "-") for one in self.key)
        if not good or len(self.key) > 60:
            raise ValueError(f"chart: found key {self.key!r}, need letters, digits and '-'")
        _set(self, title=plain(self.title), empty=plain(self.empty), notes=tuple(plain(one) for one in self.notes))

    @property
    def description(self) -> str:
        """What a reader who cannot see it is told."""
        if self.empty:
            return f"{self.title}. {self.empty}"
        drawn: list[Band | Bars | Line] = [*self.bands, *self.bars, *self.lines]
        names = [one.name for one in drawn if one.name]
        parts = [f"{self.title}."]
        if self.heatmap is not None:
            rows, columns = np.asarray(self.heatmap.values).shape
            parts.append(f"{rows} rows by {columns} columns of {self.heatmap.what}.")
        axes = [f"{one.title} {way}" for one, way in ((self.y, "upwards"), (self.x, "to the right")) if one.title]
        parts += [f"{', '.join(axes)}."] if axes else []
        parts += [f"Shows {', '.join(dict.fromkeys(names))}."] if names else []
        return " ".join((*parts, *self.notes))


def nothing(key: str, title: str, why: str, **options: Any) -> Chart:
    """A figure that says in a sentence why there is none."""
    return Chart(key, title, empty=why, **options)
