"""Every figure of a run, one function each. They take plain records, as `metrics.jsonl` and `eval.json` hold them.

Colours are Okabe and Ito's, which people with the common kinds of colour blindness tell apart; lines that carry meaning
also differ in style or are labelled where they lie. Figures are drawn without pyplot, so nothing global changes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

Record = Mapping[str, Any]

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, GREY = "#222222", "#777777"
LINE_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)

# How the yardsticks of `eval.json` are called beside a curve, where room is short.
BASELINES = {
    "gzip": "gzip -9",
    "ngram3": "byte 3-gram",
    "ngram_best": "best byte n-gram",
    "xz": "xz -9",
    "xz_primed": "xz, training files seen",
}

NORMAL_P95 = 1.645  # standard deviations below which 95 % of a normal distribution lie
LEGEND_SHARE = 0.45  # of the height below it that a legend of three lines gets
OVER_LINES: Any = {"frameon": True, "framealpha": 1.0, "edgecolor": "none"}  # a legend that stage lines go behind
STAGE_LINE: Any = {"color": INK, "linewidth": 0.9, "linestyle": (0, (1, 2))}
LOG_FROM = 5.0  # times the median that the tallest spike may be before a scale becomes logarithmic

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


def learning_curve(metrics: Sequence[Record], evaluation: Record | None = None) -> Figure:
    """Bits per byte of the training batches over tokens, the held-out result, and the baselines as level lines.

    Raises:
        ValueError: no step recorded.
    """
    return _single(_draw_learning, metrics, evaluation)


def expert_load(metrics: Sequence[Record], experts: int, top_k: int) -> Figure:
    """Balance of the experts over steps: load percentiles where recorded, MaxVio of each layer, the sampling floor.

    MaxVio is (largest load - mean load) / mean load. The floor is what fair dice would give, sqrt(2 ln E / L) with L
    the mean number of tokens an expert gets in a step; nothing below it is a merit of the balancer.

    Raises:
        ValueError: no step recorded.
    """
    _need_steps(metrics)
    bands = [record for record in metrics if record.get("load_percentiles")]
    with mpl.rc_context(STYLE):
        figure = _figure(rows=2 if bands else 1)
        axes = figure.subplots(2 if bands else 1, 1, sharex=True, squeeze=False)[:, 0]
        if bands:
            _draw_load_bands(axes[0], bands, experts, top_k)
            axes[0].set_xlabel("")
        _draw_max_vio(axes[-1], metrics, experts, top_k)
    return figure


def optimizer(metrics: Sequence[Record]) -> Figure:
    """Learning rate, and the norm of the gradient before clipping, over steps.

    Raises:
        ValueError: no step recorded.
    """
    _need_steps(metrics)
    with mpl.rc_context(STYLE):
        figure = _figure(rows=2)
        top, bottom = figure.subplots(2, 1, sharex=True)
        _draw_rate(top, metrics)
        top.set_xlabel("")
        _draw_norm(bottom, metrics)
    return figure


def throughput(metrics: Sequence[Record]) -> Figure:
    """Tokens a second over steps, with the median.

    Raises:
        ValueError: no step recorded.
    """
    return _single(_draw_throughput, metrics)


def overview(
    metrics: Sequence[Record], evaluation: Record | None, experts: int, top_k: int, title: str | None = None
) -> Figure:
    """The whole run on one picture: learning curve, balance, gradient norm, throughput.

    Raises:
        ValueError: no step recorded.
    """
    _need_steps(metrics)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 7), dpi=120, layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(1.45, 1))
        above, below = halves
        _draw_learning(above.subplots(), metrics, evaluation)
        left, middle, right = below.subplots(1, 3)
        _draw_max_vio(left, metrics, experts, top_k)
        _draw_norm(middle, metrics)
        _draw_throughput(right, metrics)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


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


def sampling_floor(experts: int, mean_load: float) -> float:
    """MaxVio to expect when every token picked its experts by fair dice: sqrt(2 ln E / L).

    Args:
        experts: E.
        mean_load: L, tokens an expert gets on average in the batch.
    """
    return math.sqrt(2 * math.log(experts) / mean_load)


def step_tokens(metrics: Sequence[Record]) -> list[int]:
    """Tokens of each recorded step, from the running total; steps that were not recorded are spread evenly."""
    sizes, last_total, last_step = [], 0, 0
    for record in metrics:
        steps = max(1, record["step"] - last_step)
        sizes.append(max(1, round((record["tokens"] - last_total) / steps)))
        last_total, last_step = record["tokens"], record["step"]
    return sizes


def _need_steps(metrics: Sequence[Record]) -> None:
    if not metrics:
        raise ValueError("metrics: found no step, need at least one")


def _figure(rows: int = 1) -> Figure:
    return Figure(figsize=(7.6, 2.0 + 2.2 * rows), dpi=120, layout="constrained")


def _single(draw: Any, metrics: Sequence[Record], *arguments: Any) -> Figure:
    _need_steps(metrics)
    with mpl.rc_context(STYLE):
        figure = _figure()
        draw(figure.subplots(), metrics, *arguments)
    return figure


def _draw_learning(axes: Axes, metrics: Sequence[Record], evaluation: Record | None) -> None:
    tokens = np.array([record["tokens"] for record in metrics], dtype=float)
    bits = np.array([record["bits_per_byte"] for record in metrics], dtype=float)
    axes.plot(tokens, bits, color=SKY, linewidth=0.8, alpha=0.55)
    axes.plot(
        tokens, smooth(bits), color=BLUE, linewidth=1.8, marker=_marker(bits), label="training batches (smoothed)"
    )
    levels: list[tuple[float, str, str]] = []
    if evaluation is not None:
        held_out = evaluation["bits_per_byte"]
        if held_out is not None:
            axes.plot(tokens[-1], held_out, "D", color=RED, markersize=7, zorder=5)
            levels.append((held_out, f"held out: {held_out:.3f}", RED))
        for name, level in (evaluation.get("baselines") or {}).items():
            if name in BASELINES and level is not None:
                levels.append((level, f"{BASELINES[name]}: {level:.3f}", INK))
                axes.axhline(level, color=GREY, linewidth=0.9, linestyle=(0, (5, 3)))
    heights = [level for level, _, _ in levels]
    if np.isfinite(bits).any():
        heights += [float(np.nanmin(bits)), float(np.nanpercentile(bits, 92))]
    lowest, highest = min(heights, default=0.0), max(heights, default=1.0)
    margin = 0.06 * (highest - lowest) or 0.1
    axes.set_ylim(lowest - margin, highest + 2 * margin)
    _label_levels(axes, levels)
    _mark_stages(axes, metrics)
    axes.set_title("Bits per byte")
    axes.set_xlabel("training tokens")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    axes.legend(loc="upper center", fontsize=8.5)


def _mark_stages(axes: Axes, metrics: Sequence[Record]) -> None:
    """A dotted line where each stage but the first begins."""
    for at in stage_starts(metrics):
        axes.axvline(metrics[at - 1]["tokens"], **STAGE_LINE)
        axes.text(
            *(metrics[at - 1]["tokens"], 0.02, f" stage {metrics[at]['stage'] + 1}"),
            transform=axes.get_xaxis_transform(),
            fontsize=7.5,
            color=GREY,
            va="bottom",
        )


def _mark_steps(axes: Axes, metrics: Sequence[Record]) -> None:
    """The same over steps, without words: long stages may have few steps, and their names would overlap."""
    for at in stage_starts(metrics):
        axes.axvline(metrics[at]["step"] - 0.5, **STAGE_LINE)


def _label_levels(axes: Axes, levels: list[tuple[float, str, str]]) -> None:
    """Write each level's label to the right of the axes, pushed apart where levels lie close."""
    low, high = axes.get_ylim()
    gap = 0.062 * (high - low)
    place = -math.inf
    for level, text, colour in sorted(levels):
        place = max(level, place + gap)
        axes.annotate(
            text,
            xy=(1.0, level),
            xytext=(1.03, place),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0},
        )


def _draw_max_vio(axes: Axes, metrics: Sequence[Record], experts: int, top_k: int) -> None:
    steps = np.array([record["step"] for record in metrics])
    layers = [np.array(record["max_vio"] or [np.nan], dtype=float) for record in metrics]
    mean, worst, best = (np.array([take(row) for row in layers]) for take in (np.mean, np.max, np.min))
    axes.fill_between(steps, best, worst, color=SKY, alpha=0.4, linewidth=0, label="best to worst layer")
    axes.plot(steps, mean, color=BLUE, linewidth=1.3, marker=_marker(mean), label="mean of the layers")
    floor = [sampling_floor(experts, size * top_k / experts) for size in step_tokens(metrics)]
    axes.plot(steps, floor, color=INK, linewidth=1.0, linestyle=(0, (1, 2)), label="sampling floor")
    finite = worst[np.isfinite(worst)]
    tallest = float(finite.max()) if finite.size else 0.0
    # The legend stands above everything that is drawn.
    if finite.size and finite.min() > 0 and tallest > LOG_FROM * float(np.median(finite)):
        axes.set_yscale("log")
        lowest = min(float(np.nanmin(mean)), *floor)
        axes.set_ylim(lowest / 1.5, tallest * (tallest / lowest) ** LEGEND_SHARE)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, (1 + LEGEND_SHARE) * max(0.5, tallest, *floor))
    _mark_steps(axes, metrics)
    axes.set_title("MaxVio of the experts")
    _steps_below(axes)
    axes.legend(loc="upper right", fontsize=8, **OVER_LINES)


def _draw_load_bands(axes: Axes, bands: Sequence[Record], experts: int, top_k: int) -> None:
    steps = [record["step"] for record in bands]
    rows = {key: [record["load_percentiles"][key] for record in bands] for key in ("p5", "p50", "p95")}
    label = "middle 90 % of the experts"
    axes.fill_between(steps, rows["p5"], rows["p95"], color=SKY, alpha=0.4, linewidth=0, label=label)
    axes.plot(steps, rows["p50"], color=BLUE, linewidth=1.4, label="median expert")
    axes.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), label="even load")
    # Fair dice: a load is close to a normal number around the mean L with variance L (1 - 1/E).
    spread = [NORMAL_P95 * math.sqrt((1 - 1 / experts) * experts / (size * top_k)) for size in step_tokens(bands)]
    for sign, text in ((-1, "middle 90 % of fair dice"), (1, None)):
        edge = [1 + sign * one for one in spread]
        axes.plot(steps, edge, color=INK, linewidth=1.0, linestyle=(0, (1, 2)), label=text)
    axes.set_ylim(0, 1.2 * max(*rows["p95"], 1 + max(spread)))  # room for the legend
    _mark_steps(axes, bands)
    axes.set_title("Load of an expert / mean load")
    axes.legend(loc="upper right", fontsize=8, ncols=4, **OVER_LINES)


def _draw_rate(axes: Axes, metrics: Sequence[Record]) -> None:
    steps = [record["step"] for record in metrics]
    rates: dict[str, list[float]] = {}
    for record in metrics:
        rate = record["lr"] if isinstance(record["lr"], Mapping) else {"learning rate": record["lr"]}
        for name, value in rate.items():
            rates.setdefault(name, []).append(value)
    for (name, values), colour in zip(rates.items(), LINE_COLOURS, strict=False):
        axes.plot(steps[: len(values)], values, color=colour, linewidth=1.5, label=name)
    axes.set_ylim(bottom=0)
    _mark_steps(axes, metrics)
    axes.set_title("Learning rate")
    if len(rates) > 1:
        axes.legend(loc="upper right", fontsize=8)
    _steps_below(axes)


def _draw_norm(axes: Axes, metrics: Sequence[Record]) -> None:
    steps = [record["step"] for record in metrics]
    norms = np.array([record["grad_norm"] for record in metrics], dtype=float)
    axes.plot(steps, norms, color=SKY, linewidth=0.8, alpha=0.6)
    axes.plot(steps, smooth(norms), color=BLUE, linewidth=1.5, marker=_marker(norms))
    if np.nanmin(norms) > 0 and np.nanmax(norms) > 30 * np.nanmedian(norms):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    _mark_steps(axes, metrics)
    axes.set_title("Gradient norm")
    _steps_below(axes)


def _draw_throughput(axes: Axes, metrics: Sequence[Record]) -> None:
    steps = [record["step"] for record in metrics]
    rates = np.array([record["tokens_per_s"] for record in metrics], dtype=float)
    axes.plot(steps, rates, color=GREEN, linewidth=1.0, marker=_marker(rates))
    median = float(np.nanmedian(rates))
    axes.axhline(median, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), label=f"median {short_count(median)}")
    axes.set_ylim(0, 1.25 * float(np.nanmax(rates)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    _mark_steps(axes, metrics)
    axes.set_title("Tokens a second")
    axes.legend(loc="lower right", fontsize=8.5, **OVER_LINES)
    _steps_below(axes)


def _marker(values: np.ndarray) -> str | None:
    """A line through very few points needs the points."""
    return "o" if len(values) < 4 else None


def _steps_below(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


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
