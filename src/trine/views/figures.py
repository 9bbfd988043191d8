"""Figures of several runs, and what all figures drawn by Matplotlib share. What the dashboard shows of one run is in
`trine.views.training_charts` and its neighbours.

Colours are Okabe and Ito's, which people with the common kinds of colour blindness tell apart; lines that carry meaning
also differ in style or are labelled where they lie. Figures are drawn without pyplot, so nothing global changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

Record = Mapping[str, Any]

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, GREY = "#222222", "#777777"
LINE_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)

STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "text.color": INK,
}


def compare(names: Sequence[str], metrics: Sequence[Sequence[Record]]) -> Figure:
    """Loss and speed of several runs over tokens, one colour a run; a short mark where a run changes its stage.

    Raises:
        ValueError: no run, or one without a recorded step.
    """
    if not metrics:
        raise ValueError("metrics: found no run, need at least one")
    with mpl.rc_context(STYLE):
        figure = _figure(rows=2)
        top, bottom = figure.subplots(2, 1, sharex=True)
        for index, (name, lines) in enumerate(zip(names, metrics, strict=True)):
            _need_steps(lines)
            colour = LINE_COLOURS[index % len(LINE_COLOURS)]
            style = ("-", "--", ":")[index // len(LINE_COLOURS) % 3]
            tokens = np.array([line["tokens"] for line in lines], dtype=float)
            for axes, key in ((top, "loss"), (bottom, "tokens_per_s")):
                values = smooth(np.array([line[key] for line in lines], dtype=float))
                axes.plot(tokens, values, style, color=colour, linewidth=1.5, marker=_marker(values), label=name)
                for at in stage_starts(lines):
                    axes.plot(tokens[at], values[at], "|", color=colour, markersize=11)
        top.set_title("Loss of the training batches (smoothed), nats a token")
        bottom.set_title("Tokens a second (smoothed)")
        bottom.set_xlabel("training tokens")
        bottom.set_ylim(bottom=0)
        for axes in (top, bottom):
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
        top.legend(loc="upper right", fontsize=8.5)
    return figure


def study(arms: Mapping[str, Record], words: Mapping[str, str]) -> Figure:
    """Arms of a study: held-out bits per byte by context (mean, and deviation over seeds), and tokens a second.

    Raises:
        ValueError: no arm.
    """
    if not arms:
        raise ValueError("arms: found none, need at least one")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.0), dpi=120, layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
        for index, (arm, values) in enumerate(arms.items()):
            colour, style = LINE_COLOURS[index % len(LINE_COLOURS)], ("-", "--", ":")[index % 3]
            bits = values["bits_by_context"]
            contexts = sorted(bits, key=int)
            means = [bits[one]["mean"] for one in contexts]
            spread = [bits[one]["deviation"] or 0.0 for one in contexts]
            places = [int(one) for one in contexts]
            left.errorbar(
                places, means, spread, color=colour, linestyle=style, marker="o", capsize=3, label=words.get(arm, arm)
            )
            speed = values["tokens_per_s"]
            right.barh(index, speed["mean"], xerr=speed["deviation"], color=colour, height=0.6, capsize=3)
        left.set_xscale("log", base=2)
        left.set_xticks(places, [f"{place:,}" for place in places])
        left.set_xlabel("context, tokens")
        left.set_title("Bits per byte, held out")
        left.legend(fontsize=8)
        right.set_yticks(range(len(arms)), [arm.replace("-", "\n") for arm in arms])
        right.invert_yaxis()
        right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
        right.set_title("Tokens a second")
    return figure


def stage_starts(metrics: Sequence[Record]) -> list[int]:
    """Where in the record each stage but the first begins."""
    stages = [line.get("stage", 0) for line in metrics]
    return [i for i in range(1, len(stages)) if stages[i] != stages[i - 1]]


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG to a temporary name beside `path`, then rename it; returns `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", metadata={"Software": None})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _need_steps(metrics: Sequence[Record]) -> None:
    if not metrics:
        raise ValueError("metrics: found no step, need at least one")


def _figure(rows: int = 1) -> Figure:
    return Figure(figsize=(7.6, 2.0 + 2.2 * rows), dpi=120, layout="constrained")


def _marker(values: np.ndarray) -> str | None:
    """A line through very few points needs the points."""
    return "o" if len(values) < 4 else None


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred running mean over about a twentieth of the record; NaN entries are left out.

    At the beginning, where curves are steep, it is narrower; at the end it looks back instead of ahead, so that the
    last values do not jump with the noise.
    """
    wide = max(1, len(values) // 40)
    means = np.full(len(values), np.nan)
    for i in range(len(values)):
        half = min(wide, i)
        ahead = min(half, len(values) - 1 - i)
        window = values[max(0, i - 2 * half + ahead) : i + ahead + 1]
        if np.isfinite(window).any():
            means[i] = np.nanmean(window)
    return means


def short_count(value: float) -> str:
    """12 500 000 as "12.5 M", for axes and tables."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
