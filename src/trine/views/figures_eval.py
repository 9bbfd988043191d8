"""Figures of an evaluation, one function each: what `eval.json` holds, drawn in the style of `trine.views.figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trine.views.figures import BLUE, GREY, INK, LINE_COLOURS, ORANGE, RED, STYLE

Record = Mapping[str, Any]

_HEAT = "cividis"  # ordered in lightness, and told apart with every common kind of colour blindness


def length_label(length: int) -> str:
    """A length in tokens as people call it: 65536 as "64K", 1000 as "1000"."""
    return f"{length // 1024}K" if length and length % 1024 == 0 else str(length)


def loss_by_position(by_position: Record, stages: Sequence[int] = ()) -> Figure:
    """Mean loss of held-out tokens by their position, and of the same documents one bin earlier; stage lengths marked.

    Args:
        by_position: what `trine.evals.positions.loss_by_position` gives.
        stages: row lengths of the run's stages.
    """
    edges = by_position["edges"]
    # A bin that begins at 0 is drawn at its end's half, as its neighbours are.
    middles = [(max(a, b / 2) * b) ** 0.5 for a, b in pairwise(edges)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.2), dpi=120, layout="constrained")
        axes = figure.subplots()
        matched = [(x, y) for x, y in zip(middles, by_position["matched"], strict=True) if y is not None]
        if matched:
            label = "the same documents, one bin earlier"
            axes.plot(*zip(*matched, strict=True), "o", color=ORANGE, markerfacecolor="none", markersize=5, label=label)
        found = [(x, y) for x, y in zip(middles, by_position["loss"], strict=True) if y is not None]
        axes.plot(*zip(*found, strict=True), "o-", color=BLUE, linewidth=1.8, markersize=5, label="tokens of this bin")
        axes.set_xscale("log", base=2)
        axes.set_xticks(edges[1:], [length_label(edge) for edge in edges[1:]])
        axes.minorticks_off()
        _mark_lengths(axes, [length for length in stages if length <= edges[-1]])
        for x, y, documents in zip(middles, by_position["loss"], by_position["documents"], strict=True):
            if y is not None:
                axes.annotate(
                    f"{documents}", (x, y), xytext=(0, -13), textcoords="offset points", ha="center", fontsize=7,
                    color=GREY,
                )  # fmt: skip
        axes.margins(y=0.12)
        axes.set_title("Loss by position in the document (small numbers: documents that reach so far)")
        axes.set_xlabel("position, tokens")
        axes.set_ylabel("nats a token")
        axes.legend(loc="upper right", fontsize=8.5)
    return figure


def _mark_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    for length in dict.fromkeys(lengths):
        axes.axvline(length, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
        axes.text(
            length, 0.015, "trained length ", rotation=90, va="bottom", ha="right", fontsize=7, color=GREY,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip


def recall_heatmaps(families: Mapping[str, Sequence[Record]], value: str = "accuracy") -> Figure:
    """One small map a family: depth of the evidence by length of the text.

    Args:
        families: ``tasks.families`` of `eval.json`.
        value: ``"accuracy"`` (whole answers, 0 to 1), ``"token_accuracy"`` or ``"gap"`` (nats).

    Raises:
        ValueError: no family.
    """
    if not families:
        raise ValueError("families: found none, need at least one")
    columns = min(4, len(families))
    rows = -(-len(families) // columns)
    gap = value == "gap"
    highest = 1.0
    if gap:
        highest = max(0.5, *(cell["gap"] for cells in families.values() for cell in cells))
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(max(3.6, 2.45 * columns + 0.9), 2.15 * rows + 0.6), dpi=120, layout="constrained")
        grid: Any = figure.subplots(rows, columns, squeeze=False)
        image = None
        for axes, (name, cells) in zip(grid.flat, families.items(), strict=False):
            image = _draw_heat(axes, name, cells, value, highest)
        for axes in list(grid.flat)[len(families) :]:
            axes.set_visible(False)
        assert image is not None
        names = {"accuracy": "answers right", "token_accuracy": "answer tokens right", "gap": "evidence gap, nats"}
        figure.colorbar(image, ax=grid, label=names[value], shrink=0.7, aspect=30)
        figure.suptitle(
            "Evidence in place against swapped" if gap else "Answers by depth and length",
            x=0.01, ha="left", fontsize=11, fontweight="bold",
        )  # fmt: skip
    return figure


def _draw_heat(axes: Axes, name: str, cells: Sequence[Record], value: str, highest: float) -> Any:
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    table = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        table[depths.index(cell["depth"]), lengths.index(cell["length"])] = cell[value]
    image = axes.imshow(table, aspect="auto", cmap=_HEAT, vmin=0, vmax=highest)
    for (i, j), number in np.ndenumerate(table):
        if np.isfinite(number):
            text = f"{round(number, 1) + 0.0:.1f}" if value == "gap" else f"{100 * number:.0f}"  # never "-0.0"
            axes.text(j, i, text, ha="center", va="center", fontsize=7,
                      color="white" if number < 0.55 * highest else "black")  # fmt: skip
    chance = max(cell["chance"] for cell in cells)
    extra = "" if value == "gap" else f"  (chance {100 * chance:.0f} %)"
    axes.set_title(f"{name}{extra}", fontsize=8.5)
    axes.set_xticks(range(len(lengths)), [length_label(length) for length in lengths], fontsize=7)
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=7)
    axes.tick_params(length=0)
    return image


def symbol_recall(cells: Sequence[Record], trained: int) -> Figure:
    """Symbol-level recall: accuracy by length, and the evidence gap by distance; the trained length is marked.

    Args:
        cells: ``recall`` of `eval.json`.
        trained: the longest row trained on.

    Raises:
        ValueError: no cell.
    """
    if not cells:
        raise ValueError("recall: found no case, need at least one")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 4.0), dpi=120, layout="constrained")
        left, right = figure.subplots(1, 2)
        anywhere = [cell for cell in cells if cell["distance"] is None]
        for pairs, colour in zip(sorted({cell["pairs"] for cell in anywhere}), LINE_COLOURS, strict=False):
            mine = sorted((c for c in anywhere if c["pairs"] == pairs), key=lambda c: int(c["length"]))
            lengths = [cell["length"] for cell in mine]
            left.plot(lengths, [c["accuracy"] for c in mine], "o-", color=colour, label=f"{pairs} pairs", linewidth=1.6)
            left.plot(lengths, [c["chance"] for c in mine], color=colour, linewidth=0.9, linestyle=(0, (1, 2)))
        left.set_ylim(0, 1.03)
        left.set_title("Answers right (dotted: chance)")
        left.set_xlabel("symbols in the row")
        left.legend(loc="lower left", fontsize=8.5)
        far = sorted((cell for cell in cells if cell["distance"] is not None), key=lambda c: int(c["distance"]))
        right.plot([c["distance"] for c in far], [c["gap"] for c in far], "s-", color=BLUE, linewidth=1.6)
        right.axhline(0.5, color=RED, linewidth=0.9, linestyle=(0, (5, 3)), label="0.5 nat")
        right.set_ylim(bottom=min(0.0, *(c["gap"] for c in far)) if far else 0.0)
        right.set_title("Evidence gap, nats")
        right.set_xlabel("symbols from the answer back to its evidence")
        right.legend(loc="center left", fontsize=8.5)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: length_label(round(value)))
            _mark_lengths(axes, [trained])
    return figure
