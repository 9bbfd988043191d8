"""Axes that the figures of two runs beside each other share, so that they can be compared by eye."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trine.views.balance_charts import LEAST
from trine.views.chart import Chart
from trine.views.run_series import STEPS


def share_axes(charts: Sequence[Chart]) -> list[Chart]:
    """Charts of several runs with one y axis, or one scale of colours, so that they can be compared by eye; those over
    steps also with the same steps."""
    charts = _share_steps(charts)
    maps = [one.heatmap for one in charts if one.heatmap is not None]
    if len(maps) > 1 and len({(one.log2, one.palette) for one in maps}) == 1:
        low, high = min(one.low for one in maps), max(one.high for one in maps)
        return [
            replace(one, heatmap=replace(one.heatmap, low=low, high=high)) if one.heatmap is not None else one
            for one in charts
        ]
    drawn = [one for one in charts if not one.empty and one.heatmap is None]
    if len(drawn) < 2:
        return list(charts)
    if any(one.y.log for one in drawn):
        shared = iter(_share_log(drawn))
        return [next(shared) if one in drawn else one for one in charts]
    if any(one.y.ticks for one in drawn):
        return list(charts)
    ends = _ends(drawn)
    if not ends:
        return list(charts)
    room = 0.04 * (max(ends) - min(ends)) or 0.5
    lows = [one.y.low for one in drawn]
    low = min(ends) - room if None in lows else min(one for one in lows if one is not None)
    highs = [one.y.high for one in drawn]
    high = max(ends) + room if None in highs else max(one for one in highs if one is not None)
    return [replace(one, y=replace(one.y, low=low, high=high)) if one in drawn else one for one in charts]


def _share_steps(charts: Sequence[Chart]) -> list[Chart]:
    over = [one for one in charts if one.x.label == STEPS.label and one.heatmap is None and not one.empty]
    columns = [np.asarray(part.x) for one in over for part in one.lines]
    columns += [np.asarray(part.x) for one in over for part in one.bands]
    steps = np.concatenate([one[np.isfinite(one)] for one in columns]) if columns else np.zeros(0)
    if len(over) < 2 or not steps.size or steps.min() == steps.max():
        return list(charts)
    room = 0.02 * (steps.max() - steps.min())
    low, high = float(steps.min() - room), float(steps.max() + room)
    return [replace(one, x=replace(one.x, low=low, high=high)) if one in over else one for one in charts]


def _ends(charts: Sequence[Chart], above: float = -math.inf) -> list[float]:
    """Least and largest of every curve, band and bar, of what is larger than ``above``."""
    ends: list[float] = []
    for one in charts:
        parts = [np.asarray(line.y) for line in one.lines] + [np.asarray(bars.height) for bars in one.bars]
        for band in one.bands:
            parts += [np.asarray(band.low), np.asarray(band.high)]
        for part in parts:
            known = part[np.isfinite(part) & (part > above)]
            ends += [float(known.min()), float(known.max())] if known.size else []
    return ends


def _share_log(charts: Sequence[Chart]) -> list[Chart]:
    """Charts with one logarithmic y axis, though some have a linear one: what is 0 there lies at the least value."""
    ends = _ends(charts, above=0.0)
    if not ends:
        return list(charts)
    axis = next(one.y for one in charts if one.y.log)
    least = max(min(ends), LEAST) if axis.ticks else min(ends)
    room = (max(ends) / least) ** 0.04 if max(ends) > least else 1.5
    axis = replace(axis, low=least / room, high=max(ends) * room)
    found = []
    for one in charts:
        shown = one
        if not one.y.log and min(_ends([one]), default=least) < least:
            lines = [replace(line, y=np.maximum(np.asarray(line.y), least)) for line in one.lines]
            bands = [
                replace(band, low=np.maximum(np.asarray(band.low), least), high=np.maximum(band.high, least))
                for band in one.bands
            ]
            note = f"Below {least:.3g} is drawn at {least:.3g}."
            shown = replace(one, lines=lines, bands=bands, notes=(*one.notes, note))
        found.append(replace(shown, y=axis))
    return found
