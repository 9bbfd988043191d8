"""Figures of the load of experts, one function each, from what the recorder holds. Without torch.

Layers are rows here; what they are called is said by `Layers`. Only `step_charts` and `time_charts` take a number.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from trine.balance.record_format import MARGIN_LEVELS, Array, Frame
from trine.views.balance_data import UNNUMBERED, BalanceData, History, Layers
from trine.views.chart import Axis, Band, Bars, Chart, Colour, Heatmap, Line, Mark, nothing
from trine.views.run_series import STEPS, stage_marks
from trine.views.run_view import RunView

What = Literal["load", "bias", "saturation"]
Order = Literal["number", "value"]
WHATS: tuple[What, ...] = ("load", "bias", "saturation")
ORDERS: tuple[Order, ...] = ("number", "value")
STEP_KEYS = ("heat", "layer", "required", "ranks")
"""Figures that show one step."""
TIME_KEYS = ("percentiles", "max-vio", "dead", "bias")
"""Figures over steps."""

_REACHES = (1.25, 2.0, 4.0)
"""How many times the mean load the ends of the colours may stand for; few, so that pictures mostly compare."""
LEAST = 0.05
"""What smaller loads are drawn as on a logarithmic axis."""
_TIMES = ((0.05, "0.05"), (0.1, "0.1"), (0.2, "0.2"), (0.5, "0.5"), (1.0, "1"), (2.0, "2"), (5.0, "5"), (10.0, "10"),
          (20.0, "20"), (50.0, "50"), (100.0, "100"))  # fmt: skip
_PROBITS = {"p1": -2.326348, "p5": -1.644854, "p50": 0.0, "p95": 1.644854, "p99": 2.326348}
_NO_FIGURE = "None of the recorded steps has a figure of it."
_FOLLOWED: tuple[Colour, ...] = ("blue", "red", "green", "purple", "orange", "sky")


def floors(tokens: Array, top_k: int, experts: int) -> tuple[Array, Array]:
    """CV and MaxVio that chance alone gives, 1 / sqrt(L) and sqrt(2 ln E / L), L = tokens k / experts; 0 of 0 tokens.

    As `trine.balance.metrics.sampling_floors`, which takes torch; a test holds the two together.
    """
    mean = np.asarray(tokens, dtype=np.float64) * top_k / experts
    even = ~(mean > 0) | (top_k >= experts)
    cv = np.where(even, 0.0, 1.0 / np.sqrt(np.where(even, 1.0, mean)))
    return cv, cv * math.sqrt(2.0 * math.log(max(experts, 1)))


def when(frame: Frame) -> str:
    """The step of a frame, in words."""
    if frame.last == frame.first:
        return f"step {frame.last}"
    return f"mean of steps {frame.first} to {frame.last}"


def heat_chart(data: BalanceData, frame: Frame, what: What, order: Order) -> Chart:
    """Layer x expert of load (over the layer's mean) or bias; of saturation layer x step, as it is counted by layer."""
    if what == "saturation":
        return _saturation(data)
    values_LE, note = _values(frame, what)
    title, names = f"{'Load' if what == 'load' else 'Bias'} of every expert, {when(frame)}", data.layers
    across = "expert"
    if order == "value":
        values_LE = np.sort(values_LE, axis=1)
        across = "experts of a layer, least to most"
    return Chart(
        "heat",
        title,
        x=Axis(across, low=-0.5, high=values_LE.shape[1] - 0.5, whole=True),
        y=_down(names, len(values_LE)),
        heatmap=replace(_coloured(values_LE, what), y0=names.first),
        notes=(note,),
        height=1.45,
        wide=True,
    )


def _down(names: Layers, count: int) -> Axis:
    """The layers from above to below."""
    return Axis(names.word, low=names.first - 0.5, high=names.first + count - 0.5, whole=True, down=True)


def _values(frame: Frame, what: What) -> tuple[Array, str]:
    if what == "bias":
        return np.asarray(frame.bias_LE, dtype=np.float32), "What is added to an expert's score before the choice."
    mean_L1 = frame.loads_LE.mean(-1, keepdims=True)
    with np.errstate(all="ignore"):
        values_LE = np.where(mean_L1 > 0, frame.loads_LE / mean_L1, np.nan)
    return values_LE, "1 is the layer's mean load; dead experts are darkest blue."


def _coloured(values: Array, what: What) -> Heatmap:
    if what == "load":
        reach = next((one for one in _REACHES if _far(values, one) <= 1e-3), _REACHES[-1])
        return Heatmap(values, "load / mean load", 1 / reach, reach, log2=True, palette="balance")
    reach = _finite_max(np.abs(values)) or 1.0
    # a round number, so that the colours of two steps, or of two runs, mostly mean the same
    reach = 2.0 ** math.ceil(math.log2(min(max(reach, 1e-9), 1e9)))
    return Heatmap(values, "bias", -reach, reach, palette="signed", beyond=(False, False))


def _far(values: Array, reach: float) -> float:
    """Share of loads more than ``reach`` times off the mean, dead ones left out."""
    known = values[values > 0]
    return float(np.mean((known > reach) | (known < 1 / reach))) if known.size else 0.0


def _saturation(data: BalanceData) -> Chart:
    history = data.history()
    title = "Saturated scores of every layer over steps"
    if history is None:
        return nothing("heat", title, data.problem or "Nothing was recorded.", height=1.45, wide=True)
    names, share_PL, grid, at = data.layers, history.of("saturated"), *_columns(history)
    places = np.linspace(0, len(grid) - 1, min(6, len(grid))).round().astype(int)
    return Chart(
        "heat",
        title,
        x=Axis("steps", low=-0.5, high=len(grid) - 0.5, ticks=tuple((float(i), str(grid[i])) for i in places)),
        y=_down(names, share_PL.shape[1]),
        heatmap=Heatmap(share_PL[at].T, "share of scores", 1e-5, 0.1, log2=True, palette="amount", y0=names.first),
        notes=("Scores that fp32 cannot tell from 0 or 1, counted by layer; the largest share of a step.",),
        height=1.45,
        wide=True,
    )  # fmt: skip


def _columns(history: History) -> tuple[Array, Array]:
    """Steps of the columns of the picture over steps, and the point of the history that each shows."""
    steps = history.steps
    grid = np.linspace(steps[0], steps[-1], min(len(steps), 400)).round().astype(np.int64)
    return grid, np.minimum(np.searchsorted(steps, grid), len(steps) - 1)


def cell_words(data: BalanceData, step: int | None, what: What, order: Order, row: int, column: int) -> str:
    """What one cell of `heat_chart` stands for, in words with its values; empty where there is no such cell."""
    layer = data.layers.of(row)
    layer = layer[0].upper() + layer[1:]
    if what == "saturation":
        history = data.history()
        if history is None:
            return ""
        grid, at = _columns(history)
        share_PL = history.of("saturated")
        if not (0 <= row < share_PL.shape[1] and 0 <= column < len(grid)):
            return ""
        return f"{layer}, step {grid[column]:,}: {100 * share_PL[at[column], row]:.3f} % of the scores saturated."
    frame = data.frame(step)
    if frame is None or not (0 <= row < len(frame.loads_LE) and 0 <= column < frame.loads_LE.shape[1]):
        return ""
    with np.errstate(all="ignore"):
        mean = float(frame.loads_LE[row].mean())
        place, expert = "", column
        if order == "value":
            expert = int(
                np.argsort(frame.bias_LE[row] if what == "bias" else frame.loads_LE[row], kind="stable")[column]
            )
            place = f" ({column + 1} of {frame.loads_LE.shape[1]} from the least)"
        tokens, bias = float(frame.loads_LE[row, expert]), float(frame.bias_LE[row, expert])
    load = f"{tokens / mean:.3g} times the layer's mean" if mean > 0 else "none in the whole layer"
    return f"{layer}, expert {expert}{place}: load {load} ({tokens:,.4g} tokens), bias {bias:.4g}."


def layer_chart(frame: Frame, layer: int | None, what: What, order: Order, top_k: int, names: Layers) -> Chart:
    """One layer's experts, with the range that chance alone gives; without a layer, the layers' spread."""
    if layer is None:
        return _layers_chart(frame, top_k, names)
    shown: What = "bias" if what == "bias" else "load"
    values_LE, note = _values(frame, shown)
    values_E = np.sort(values_LE[layer]) if order == "value" else values_LE[layer]
    experts = len(values_E)
    numbers = np.arange(experts)
    title = f"{'Bias' if shown == 'bias' else 'Load'} of the experts of {names.of(layer)}, {when(frame)}"
    across = Axis("expert" if order == "number" else "experts, least to most", low=-0.5, high=experts - 0.5, whole=True)
    if shown == "bias":
        lines = (Line("bias", numbers, values_E, "purple", points=order == "number" and experts > 200),)
        marks = (Mark(0.0, "", "y"),)
        return Chart("layer", title, across, Axis("bias"), lines=lines, marks=marks, notes=(note,), wide=True)
    cv, _ = floors(_tokens_a_step(frame)[layer], top_k, experts)
    low, high = max(0.0, 1 - 2.33 * float(cv)), 1 + 2.33 * float(cv)
    chance = Band("98 % of experts by chance", [-0.5, experts - 0.5], [low] * 2, [high] * 2, "grey", 0.3)
    bars = (Bars("load / mean load", numbers, values_E, "blue", 1.0 if experts > 100 else 0.8),)
    dead = np.flatnonzero(values_E == 0)
    lost = [Line("without a token", dead, np.zeros(len(dead)), "red", points=True)] if len(dead) else []
    return Chart(
        "layer", title, across, Axis("load / mean load", low=0.0), lines=lost, bands=(chance,), bars=bars,
        marks=(Mark(1.0, "mean", "y"),), wide=True,
    )  # fmt: skip


def _layers_chart(frame: Frame, top_k: int, names: Layers) -> Chart:
    layers, experts = frame.loads_LE.shape
    numbers = names.first + np.arange(layers)
    p = {name: frame.summary(name) for name in _PROBITS}
    _, floor_L = floors(_tokens_a_step(frame), top_k, experts)
    return Chart(
        "layer",
        f"Load by layer, {when(frame)}",
        Axis(names.word, whole=True),
        Axis("load / mean load", low=0.0),
        bands=(
            Band("P1 to P99", numbers, p["p1"], p["p99"], "blue", 0.18),
            Band("P5 to P95", numbers, p["p5"], p["p95"], "blue", 0.3),
        ),
        lines=(
            Line("largest", numbers, 1.0 + frame.summary("max_vio"), "red", points=layers < 30),
            Line("median", numbers, p["p50"], "blue"),
            Line("largest by chance", numbers, 1.0 + floor_L, "grey", "dash"),
        ),
        notes=("Choose a layer, or press on one in the picture above, to see its experts.",),
        wide=True,
    )


def _tokens_a_step(frame: Frame) -> Array:
    return frame.tokens_L / max(1, frame.steps)


def _over_layers(values_PL: Array, how: Literal["mean", "max", "min", "median", "sum"], layer: int | None) -> Array:
    if layer is not None:
        return values_PL[:, layer]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # of steps without a figure
        reduce: Any = getattr(np, f"nan{how}")
        found = np.asarray(reduce(values_PL.astype(np.float64), axis=1))
    return np.where(np.isnan(values_PL).all(1), np.nan, found)  # a sum of nothing known is not 0


def percentile_chart(
    history: History, layer: int | None, top_k: int, experts: int, names: Layers = UNNUMBERED
) -> Chart:
    """P1, P5, P50, P95, P99 of load over mean load over steps, and what chance alone gives."""
    p = {name: _over_layers(history.of(name), "mean", layer) for name in _PROBITS}
    cv_PL, _ = floors(_tokens_of(history), top_k, experts)
    cv = _over_layers(cv_PL, "mean", layer)
    chance = {name: np.maximum(0.0, 1 + z * cv) for name, z in _PROBITS.items()}
    steps = history.steps
    title = f"Percentiles of load over steps, {'mean over layers' if layer is None else names.of(layer)}"
    if not any(np.isfinite(one).any() for one in p.values()):
        return nothing("percentiles", title, _NO_FIGURE)
    y = Axis("load / mean load", low=0.0)
    notes = ["Within the dashed lines lies what a perfectly even router would show by chance."]
    if _finite_max(p["p99"]) > 3.0:
        y = Axis("load / mean load", log=True, ticks=_TIMES)
        p, chance = ({name: np.maximum(one, LEAST) for name, one in part.items()} for part in (p, chance))
        notes.append(f"Below {LEAST:g} is drawn at {LEAST:g}.")
    return Chart(
        "percentiles",
        title,
        STEPS,
        y,
        bands=(
            Band("P1 to P99", steps, p["p1"], p["p99"], "blue", 0.16),
            Band("P5 to P95", steps, p["p5"], p["p95"], "blue", 0.28),
        ),
        lines=(
            Line("P50", steps, p["p50"], "blue"),
            Line("P1 by chance", steps, chance["p1"], "grey", "dot", 1.3),
            Line("P5 by chance", steps, chance["p5"], "orange", "dash", 1.3),
            Line("P95 by chance", steps, chance["p95"], "orange", "dash", 1.3),
            Line("P99 by chance", steps, chance["p99"], "grey", "dot", 1.3),
        ),
        notes=notes,
    )


def _tokens_of(history: History) -> Array:
    return history.of("tokens")


def max_vio_chart(history: History, layer: int | None, top_k: int, experts: int, names: Layers = UNNUMBERED) -> Chart:
    """MaxVio, largest load over mean load minus 1, over steps: worst layer, median, and its floor."""
    value = history.of("max_vio")
    title = f"MaxVio over steps{'' if layer is None else f', {names.of(layer)}'}"
    if not np.isfinite(value if layer is None else value[:, layer]).any():
        return nothing("max-vio", title, _NO_FIGURE)
    _, floor_PL = floors(_tokens_of(history), top_k, experts)
    lines = []
    if layer is None:
        lines += [
            Line("worst layer", history.steps, _over_layers(value, "max", None), "red"),
            Line("median layer", history.steps, _over_layers(value, "median", None), "blue"),
        ]
    else:
        lines.append(Line(names.of(layer), history.steps, value[:, layer], "red"))
    lines.append(Line("by chance", history.steps, _over_layers(floor_PL, "mean", layer), "grey", "dash"))
    values = np.concatenate([np.asarray(line.y) for line in lines])
    positive = values[np.isfinite(values) & (values > 0)]
    wide = bool(len(positive)) and positive.max() > 20 * np.median(positive)
    return Chart("max-vio", title, STEPS, Axis("largest load / mean load - 1", log=wide), lines=lines)


def dead_chart(history: History, layer: int | None, names: Layers = UNNUMBERED) -> Chart:
    """Experts that should have got more than 10 tokens since their last, over steps."""
    count = _over_layers(history.of("dead"), "sum", layer)
    title = f"Dead experts over steps, {'all layers' if layer is None else names.of(layer)}"
    known = count[np.isfinite(count)]
    if not known.size:
        return nothing("dead", title, _NO_FIGURE)
    # the area has the steps of its line: level until the next point
    x, level = np.repeat(history.steps, 2)[1:], np.repeat(count, 2)[:-1]
    return Chart(
        "dead",
        title,
        STEPS,
        Axis("experts", low=0.0, high=None if known.max() > 0 else 1.0, whole=True),
        bands=(Band("", x, np.zeros(len(x)), level, "red", 0.25),),
        lines=(Line("dead", history.steps, count, "red", steps=True),),
        notes=("An expert is dead once it should have got more than 10 tokens and got none.",),
    )


def bias_chart(data: BalanceData, history: History, layer: int | None, follow: int | None = None) -> Chart:
    """Bias trajectories: of the experts of a layer, some of them followed; without a layer the reach of every layer."""
    if layer is None:
        low_PL, high_PL = history.of("bias_min"), history.of("bias_max")
        steps = history.steps
        if not (np.isfinite(low_PL).any() and np.isfinite(high_PL).any()):
            return nothing("bias", "Bias over steps, all layers", _NO_FIGURE)
        lowest, highest = _over_layers(low_PL, "min", None), _over_layers(high_PL, "max", None)
        middle = (_over_layers(low_PL, "median", None), _over_layers(high_PL, "median", None))
        return Chart(
            "bias",
            "Bias over steps, all layers",
            STEPS,
            Axis("bias"),
            bands=(
                Band("all layers, least to largest", steps, lowest, highest, "purple", 0.16),
                Band("median layer, least to largest", steps, *middle, "purple", 0.3),
            ),
            lines=(
                Line("", steps, lowest, "purple", width=1.0),
                Line("", steps, highest, "purple", width=1.0),
            ),
            notes=("Choose a layer to follow single experts.",),
        )
    found, title = data.biases(layer), f"Bias over steps, {data.layers.of(layer)}"
    if found is None:
        return nothing("bias", title, data.problem or "No bias can be read.")
    steps, bias_PE = found
    if not np.isfinite(bias_PE).any():
        return nothing("bias", title, _NO_FIGURE)
    order = np.argsort(bias_PE[-1], kind="stable")
    experts = bias_PE.shape[1]
    picked = [int(order[round(at * (experts - 1))]) for at in (0.0, 0.25, 0.5, 0.75, 1.0)]
    if follow is not None and 0 <= follow < experts:
        picked.insert(0, follow)
    picked = list(dict.fromkeys(picked))
    with np.errstate(all="ignore"):
        low, p5, p95, high = np.quantile(bias_PE, (0.0, 0.05, 0.95, 1.0), axis=1)
    return Chart(
        "bias",
        title,
        STEPS,
        Axis("bias"),
        bands=(
            Band("least to largest", steps, low, high, "grey", 0.16),
            Band("P5 to P95", steps, p5, p95, "grey", 0.24),
        ),
        lines=[Line(f"expert {one}", steps, bias_PE[:, one], _FOLLOWED[i]) for i, one in enumerate(picked[:6])],
    )


def required_chart(frame: Frame, layer: int | None, top_k: int, names: Layers) -> Chart:
    """Histogram of required bias of a layer with its cutoff; without a layer its quantiles and cutoff in every one.

    The required bias of an expert for a token is what would tie its score with the last one chosen (K3 report Eq. 13);
    its k / E quantile is the next bias. The recorder holds five quantiles, all experts of a layer together: between two
    of them the histogram is level, and the 1 % beyond each end is not drawn.
    """
    experts = frame.loads_LE.shape[1]
    share = top_k / experts
    bias_L = frame.bias_LE.astype(np.float64)
    note = "From five quantiles of all experts together; the outer 1 % on each side is not drawn."
    if layer is None:
        q = {name: frame.margins_LQ[:, i] for i, name in enumerate(_PROBITS)}
        numbers = names.first + np.arange(len(frame.margins_LQ))
        cut_L = np.array([_cutoff(edges, share) for edges in frame.margins_LQ.astype(np.float64)])
        if not (np.isfinite(frame.margins_LQ).any() or np.isfinite(bias_L).any()):
            return nothing("required", f"Required bias by layer, {when(frame)}", "This step has no required biases.")
        return Chart(
            "required",
            f"Required bias by layer, {when(frame)}",
            Axis(names.word, whole=True),
            Axis("required bias"),
            bands=(
                Band("P1 to P99", numbers, q["p1"], q["p99"], "green", 0.18),
                Band("P5 to P95", numbers, q["p5"], q["p95"], "green", 0.28),
                Band("biases in force", numbers, bias_L.min(-1), bias_L.max(-1), "purple", 0.45),
            ),
            lines=(
                Line("P50", numbers, q["p50"], "green"),
                Line(f"cutoff: {100 * share:.1f} % of tokens", numbers, cut_L, "red", "dash"),
            ),
            notes=(
                f"An expert is chosen where its bias is above what is required, by {100 * share:.1f} % of the tokens.",
                "Choose a layer to see its histogram.",
            ),
        )
    edges = frame.margins_LQ[layer].astype(np.float64)
    title = f"Required bias of {names.of(layer)}, {when(frame)}"
    if not _rises(edges) or edges[0] == edges[-1]:
        return nothing("required", title, "The recorder has no spread of required biases for this layer at this step.")
    width = np.diff(edges)
    mass = np.diff(MARGIN_LEVELS)
    wide = width > 0
    middle, density = (edges[:-1] + width / 2)[wide], mass[wide] / width[wide]
    cut = float(np.interp(share, MARGIN_LEVELS, edges))
    known = MARGIN_LEVELS[0] <= share <= MARGIN_LEVELS[-1]
    marks = [
        Mark(cut, f"cutoff: {100 * share:.1f} % of tokens" if known else "cutoff beyond what is kept", colour="red")
    ]
    reach = bias_L[layer]
    top = float(density.max()) * 1.12
    if not np.isfinite(top):
        return nothing("required", title, "The required biases of this layer lie too close together to be drawn.")
    return Chart(
        "required",
        title,
        Axis("required bias"),
        Axis("share of tokens x experts per unit", low=0.0, high=top),
        bands=(Band("biases in force", [reach.min(), reach.max()], [0.0, 0.0], [top, top], "purple", 0.2),),
        bars=(Bars("required bias", middle, density, "green", width[wide]),),
        marks=marks,
        notes=(note,),
    )


def _rises(edges_Q: Array) -> bool:
    return bool(np.isfinite(edges_Q).all()) and not np.any(np.diff(edges_Q) < 0)


def _cutoff(edges_Q: Array, share: float) -> float:
    """The required bias that a share of the tokens stays under; NaN where the quantiles that are kept do not say."""
    if not _rises(edges_Q) or not MARGIN_LEVELS[0] <= share <= MARGIN_LEVELS[-1]:
        return math.nan
    return float(np.interp(share, MARGIN_LEVELS, edges_Q))


def rank_chart(frame: Frame, layer: int | None, top_k: int, ranks: int, recorded: int, names: Layers) -> Chart:
    """Load of expert-parallel ranks, each with a row of neighbouring experts: of a layer, or of each the fullest."""
    layers, experts = frame.loads_LE.shape
    title = f"Load of {ranks} ranks, {when(frame)}"
    if ranks < 2 or experts % ranks:
        why = "One rank holds all experts: there is nothing to compare." if ranks < 2 else ""
        return nothing("ranks", title, why or f"{experts} experts cannot be dealt out evenly to {ranks} ranks.")
    note = (
        () if ranks == recorded else (f"As if the experts were dealt out to {ranks} ranks; this run has {recorded}.",)
    )
    loads_LR = frame.loads_LE.reshape(layers, ranks, -1).sum(-1)
    with np.errstate(all="ignore"):
        mean_L1 = loads_LR.mean(-1, keepdims=True)
        relative_LR = np.where(mean_L1 > 0, loads_LR / mean_L1, np.nan)
    cv_L, _ = floors(_tokens_a_step(frame), top_k, experts)
    # a rank sums E / ranks experts, and the largest of the ranks' deviations counts
    floor_L = 1.0 + cv_L * math.sqrt(ranks / experts * 2.0 * math.log(ranks))
    y = Axis("load / mean load of ranks", low=0.0)
    if layer is not None:
        numbers = np.arange(ranks)
        return Chart(
            "ranks", f"Load of {ranks} ranks, {names.of(layer)}, {when(frame)}", Axis("rank", whole=True), y,
            bars=(Bars("load", numbers, relative_LR[layer], "blue"),),
            marks=(Mark(float(floor_L[layer]), "fullest by chance", "y"), Mark(1.2, "alert", "y", "red", "dot")),
            notes=note,
        )  # fmt: skip
    worst_L = _over_layers(relative_LR, "max", None)
    high = max(1.25, min(_finite_max(worst_L) * 1.05, 1e6))
    return Chart(
        "ranks", title, Axis(names.word, whole=True), Axis("fullest rank / mean", low=0.98, high=high),
        lines=(
            Line("fullest rank", names.first + np.arange(layers), worst_L, "blue"),
            Line("by chance", names.first + np.arange(layers), floor_L, "grey", "dash"),
        ),
        marks=(Mark(1.2, "alert", "y", "red", "dot"),), notes=note,
    )  # fmt: skip


def _finite_max(values: Array) -> float:
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    return float(known.max()) if known.size else 0.0


def default_ranks(experts: int, recorded: int) -> int:
    """The run's own ranks, or of a run on one: as many as a usual machine has cards, where that divides the experts."""
    if recorded > 1:
        return recorded
    return next((ranks for ranks in (8, 7, 6, 5, 4, 3, 2) if experts % ranks == 0 and ranks < experts), 1)


def step_charts(
    data: BalanceData, step: int | None, layer: int | None, what: What = "load", order: Order = "number", ranks: int = 0
) -> list[Chart]:
    """The figures of one step, in the order of `STEP_KEYS`; ``ranks`` 0 takes `default_ranks`, ``layer`` is a number
    as of `BalanceData.layers`."""
    frame, sizes = data.frame(step), data.sizes
    if frame is None or sizes is None:
        why = data.problem or "Nothing was recorded."
        return [nothing(key, _TITLES[key], why, wide=key in ("heat", "layer")) for key in STEP_KEYS]
    _, experts, top_k, recorded = sizes
    row, names = data.row(layer), data.layers
    top_k = min(max(1, top_k), experts)
    with np.errstate(all="ignore"):
        return [
            heat_chart(data, frame, what, order),
            layer_chart(frame, row, what, order, top_k, names),
            required_chart(frame, row, top_k, names),
            rank_chart(frame, row, top_k, ranks or default_ranks(experts, recorded), recorded, names),
        ]


def time_charts(data: BalanceData, layer: int | None, follow: int | None = None) -> list[Chart]:
    """The figures over steps, in the order of `TIME_KEYS`; ``layer`` is a number as of `BalanceData.layers`."""
    history, sizes = data.history(), data.sizes
    if history is None or sizes is None:
        return [nothing(key, _TITLES[key], data.problem or "Nothing was recorded.") for key in TIME_KEYS]
    _, experts, top_k, _ = sizes
    row, names = data.row(layer), data.layers
    top_k = min(max(1, top_k), experts)
    with np.errstate(all="ignore"):
        charts = [
            percentile_chart(history, row, top_k, experts, names),
            max_vio_chart(history, row, top_k, experts, names),
            dead_chart(history, row, names),
            bias_chart(data, history, row, follow),
        ]
    return with_stages(charts, data.run, history)


def with_stages(charts: Sequence[Chart], run: RunView, history: History) -> list[Chart]:
    """Figures over steps with a line where each stage of the run began."""
    marks = [mark for mark in stage_marks(run) if mark.at < history.steps[-1]]
    return [replace(chart, marks=[*chart.marks, *marks]) for chart in charts]


_TITLES = {
    "heat": "Load of every expert",
    "layer": "Load by layer",
    "required": "Required bias",
    "ranks": "Load of ranks",
    "percentiles": "Percentiles of load over steps",
    "max-vio": "MaxVio over steps",
    "dead": "Dead experts over steps",
    "bias": "Bias over steps",
}
