"""Figures of the decay tools: what range allows, and where a model's gates live. Plain records in, figures out."""

from __future__ import annotations

import math
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from trine.views.figures import INK, LINE_COLOURS, RED, STYLE, Record


def decay_limits(calibration: Record, mark: float = -5.0) -> Figure:
    """Largest range-safe |g_min| over the rows of a tile, a panel a number format, a line an anchor.

    Args:
        calibration: what `trine.decay.calibrate.sweep` gives; its widest head is drawn.
        mark: a bound drawn as a level line.
    """
    grid = calibration["grid"]
    k = max(grid["head_dim"])
    found = {
        (one["format"], one["anchor"], one["tile"]): one["largest"]
        for one in calibration["limits"]
        if one["head_dim"] == k
    }
    styles = ("-", (0, (5, 2)), "-.", (0, (1, 1)), (0, (6, 2, 1, 2, 1, 2)), (0, (3, 4)))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.1 * len(grid["format"]) + 1.2, 3.8), dpi=120, layout="constrained")
        panels = figure.subplots(1, len(grid["format"]), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, grid["format"], strict=True):
            for i, anchor in enumerate(grid["anchor"]):
                heights = [found[name, anchor, tile] or math.nan for tile in grid["tile"]]
                colour = LINE_COLOURS[i % len(LINE_COLOURS)]
                axes.plot(grid["tile"], heights, color=colour, linestyle=styles[i % len(styles)], marker="o",
                          markersize=4, linewidth=1.6, label=anchor)  # fmt: skip
            axes.axhline(-mark, color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
            place = ((0.98, -mark), (0, 3), axes.get_yaxis_transform(), "offset points")
            axes.annotate(f"g_min = {mark:g}", *place, ha="right",
                          va="bottom", fontsize=8)  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(grid["tile"], [str(tile) for tile in grid["tile"]])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.set_title(name)
            axes.set_xlabel("rows of a tile")
        panels[0].set_yticks([0.1, 0.2, 0.5, 1, 2, 5, 10, 20])
        panels[0].set_ylabel("largest range-safe |g_min|")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8.5)
    return figure


def gate_memory(gates: Record) -> Figure:
    """How long the channels of each layer and head remember: 1st to 99th percentile, quartiles, median.

    Args:
        gates: what `trine.decay.calibrate.gates_of` gives.
    """
    rows = [(i, layer["layer"], head) for i, layer in enumerate(gates["layers"]) for head in layer["heads"]]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 1.5 + 0.24 * len(rows)), dpi=120, layout="constrained")
        axes = figure.subplots()
        for y, (i, _, head) in enumerate(rows):
            memory = head["memory"]
            colour = LINE_COLOURS[i % len(LINE_COLOURS)]
            axes.plot([memory["p1"], memory["p99"]], [y, y], color=colour, linewidth=1.2)
            axes.plot([memory["p25"], memory["p75"]], [y, y], color=colour, linewidth=5, alpha=0.55)
            axes.plot(memory["p50"], y, "o", color=colour, markersize=5)
        axes.axvline(gates["length"], color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
        above: Any = {"xycoords": axes.get_xaxis_transform(), "va": "bottom", "fontsize": 8}
        axes.annotate(f"{gates['length']} tokens were read", (gates["length"], 1.0), ha="right", **above)
        if gates["g_min"] is not None:
            axes.axvline(-1 / gates["g_min"], color=RED, linewidth=0.9)
            axes.annotate(f"bound {gates['g_min']:g}", (-1 / gates["g_min"], 1.0), ha="left", color=RED, **above)
        axes.set_xscale("log")
        axes.set_yticks(range(len(rows)), [f"layer {layer}, head {head['head']}" for _, layer, head in rows])
        axes.invert_yaxis()
        axes.set_xlabel(f"memory of a channel in tokens ({gates['inputs']}); line p1 to p99, bar quartiles, dot median")
    return figure
