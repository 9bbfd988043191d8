"""Heatmaps as images: 256 shades, one byte a cell, one PNG a frame whatever the number of cells."""

from __future__ import annotations

import base64
import functools
import io
from dataclasses import replace

import numpy as np

from trine.views.chart import PALETTES, Array, Heatmap, Palette

SHADES = 255
"""Shades of values; one more of the 256 is for cells without one."""
_BLANK = 255

# Anchors of the palettes, dark ground and light ground alike: equal steps of value are about equal steps of lightness,
# and both ends of the two-sided ones are told apart by people with the common kinds of colour blindness.
_ANCHORS: dict[Palette, tuple[str, ...]] = {
    "balance": ("#08306b", "#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b", "#5c0011"),
    "signed": ("#2d004b", "#542788", "#998ec3", "#d8daeb", "#f7f7f7", "#fee0b6", "#f1a340", "#b35806", "#5f2d00"),
    "amount": ("#0b0724", "#2c1160", "#641a80", "#9c2e7f", "#d3436e", "#f8765c", "#febb81", "#fcfdbf"),
}
_BLANKS = {False: (214, 214, 214), True: (70, 74, 82)}


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


@functools.cache
def palette(name: Palette, dark: bool = False) -> Array:
    """``[256, 3]`` uint8; the last is of cells without a value.

    Raises:
        ValueError: no such palette.
    """
    if name not in PALETTES:
        raise ValueError(f"palette: found {name!r}, need one of {', '.join(PALETTES)}")
    anchors = np.array([_rgb(one) for one in _ANCHORS[name]], dtype=np.float64)
    at = np.linspace(0, len(anchors) - 1, SHADES)
    shades = np.stack([np.interp(at, np.arange(len(anchors)), anchors[:, i]) for i in range(3)], -1)
    return np.concatenate((np.rint(shades), [_BLANKS[dark]])).astype(np.uint8)


def shades(heatmap: Heatmap) -> Array:
    """The shade of every cell, ``[R, C]`` uint8; 255 where there is no value."""
    places = heatmap.places()
    known = np.isfinite(places)
    return np.where(known, np.rint(np.where(known, places, 0.0) * (SHADES - 1)), _BLANK).astype(np.uint8)


def png(heatmap: Heatmap, dark: bool = False) -> bytes:
    """The heatmap as a PNG, one pixel a cell, row 0 at the top."""
    from PIL import Image

    cells = shades(heatmap)
    if not cells.size:
        cells = np.full((1, 1), _BLANK, dtype=np.uint8)
    image = Image.frombytes("P", cells.shape[::-1], cells.tobytes())
    image.putpalette(palette(heatmap.palette, dark).tobytes())
    found = io.BytesIO()
    # a fast level: it is sent over this machine's own wire
    image.save(found, format="PNG", compress_level=3)
    return found.getvalue()


def data_uri(heatmap: Heatmap, dark: bool = False) -> str:
    """`png` as an address that a page shows without asking for it."""
    return "data:image/png;base64," + base64.b64encode(png(heatmap, dark)).decode("ascii")


def scale_ticks(heatmap: Heatmap, most: int = 5) -> list[tuple[float, str]]:
    """Places (0 to 1) and words for a scale beside it; an end that values may pass says that those look the same."""
    found = []
    for place in np.linspace(0.0, 1.0, most).tolist():
        value = heatmap.value_at(place)
        text = f"{value:.3g}"
        below, above = heatmap.beyond[0] and place == 0.0, heatmap.beyond[1] and place == 1.0
        found.append((place, f"≤ {text}" if below else f"≥ {text}" if above else text))
    marks = [(float(place), text) for at, text in heatmap.marks for place in _places_of(heatmap, at)]
    near = 0.4 / max(1, most - 1)
    return sorted([one for one in found if all(abs(one[0] - place) > near for place, _ in marks)] + marks)


def _places_of(heatmap: Heatmap, value: float) -> list[float]:
    """Where a value lies on the scale; nowhere beyond its ends."""
    inside = heatmap.low <= value <= heatmap.high * (1 + 1e-9)
    return [float(replace(heatmap, values=[[value]]).places()[0, 0])] if inside else []
