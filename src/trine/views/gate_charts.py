"""The Gates page: where log-decays live against their bound, how far memory reaches, how open the output gates are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from trine.views.chart import Axis, Band, Chart, Colour, Heatmap, Line, Mark, nothing
from trine.views.probe_view import Gate, Probe
from trine.views.run_series import (
    Array,
    chart_over_steps,
    mean,
    over_layers,
    probe_note,
    probe_page,
    steps_of,
    thin_ticks,
)
from trine.views.run_view import RunView


class _Layered(Protocol):
    @property
    def layer(self) -> int: ...


T = TypeVar("T", bound=_Layered)

TITLES = {
    "gates-decay": "Log-decay by layer and head",
    "gates-histogram": "Log-decays of each layer",
    "gates-memory": "Memory length by layer and head",
    "gates-memory-steps": "Memory length over steps",
    "gates-bound": "Share of gates at a bound",
    "gates-bound-steps": "Share of gates at a bound, over steps",
    "gates-openness": "Openness of the output gates by layer and head",
    "gates-openness-steps": "Openness of the output gates over steps",
}
_BARS: tuple[Colour, ...] = ("sky", "blue", "purple")
_CHOOSE = "Choose a layer to see all of its heads' gates."
_HEADS = Axis("layer, its heads side by side")
_CROWD = 64
"""Heads of all layers above which a curve over them cannot be read: a cell a head is shown instead."""


def charts(run: RunView, step: int | None = None, layer: int | None = None) -> list[Chart]:
    """All figures of the page.

    Args:
        run: the run.
        step: what was seen last at or before it; None takes the newest.
        layer: whose heads the figures by head show; all for None, and where there is no such layer.
    """

    def draw(probes: Sequence[Probe], now: Probe) -> list[Chart]:
        return [
            decays(now, layer),
            histogram(now),
            memory(now, layer),
            memory_over_steps(probes, run, step),
            at_bound(now, layer),
            at_bound_over_steps(probes, run, step),
            openness(now, layer),
            openness_over_steps(probes, run, step),
        ]

    return probe_page(run, step, TITLES, draw)


def decays(probe: Probe, layer: int | None = None) -> Chart:
    """Quantiles of -g over tokens and channels, head by head, and the bound they cannot pass; of one layer as bars.

    g is the log-decay a token, in (g_min, 0) for bounded gates (K3 report, arXiv 2607.24653, Eq. 5).
    """
    key = "gates-decay"
    if not probe.gates:
        return nothing(key, TITLES[key], _no_gates(probe))
    gates = _of(probe.gates, layer)
    bounds = sorted({gate.g_min for gate in gates if gate.g_min is not None})
    if len(gates) > 1 and _crowded(rows := [(one.layer, -one.g_HQ[:, len(probe.levels) // 2]) for one in gates]):
        title, notes = "Median log-decay by layer and head", [probe_note(probe), "Small -g remembers, large forgets."]
        named = tuple((-bound, f"g_min {bound:g}") for bound in bounds)
        return _grid(key, title, rows, "median -g", "nats a token", [*notes, _CHOOSE], marks=named)
    sizes_QH = -np.concatenate([gate.g_HQ for gate in gates]).T.astype(np.float64)
    x, marks, axis = _heads([(gate.layer, len(gate.g_HQ)) for gate in gates])
    marks += [Mark(-bound, f"g_min = {bound:g}", "y", "red") for bound in bounds]
    bands, lines = _spread(x, sizes_QH, probe.levels, "gates", gates)
    return Chart(
        key,
        _title("Log-decay", gates, layer, TITLES[key]),
        x=axis,
        y=Axis("-g", "nats a token", log=True),
        bands=bands,
        lines=lines,
        marks=marks,
        notes=[probe_note(probe), "A state keeps exp(g) of itself at each token: small -g remembers, large forgets."],
    )


def histogram(probe: Probe) -> Chart:
    """Share of a layer's gates in each bin of log10(-g); all heads and channels."""
    key = "gates-histogram"
    if not probe.gates:
        return nothing(key, TITLES[key], _no_gates(probe))
    rows_LB = np.stack([100 * gate.histogram_B for gate in probe.gates])
    edges = probe.bins.astype(np.float64)
    each = (len(edges) - 1) / (edges[-1] - edges[0])
    decades = range(round(edges[0]), round(edges[-1]) + 1)
    ticks = tuple(((one - edges[0]) * each - 0.5, f"{10.0**one:g}") for one in decades)
    bounds = sorted({gate.g_min for gate in probe.gates if gate.g_min is not None})
    known = rows_LB[np.isfinite(rows_LB)]
    # Of many layers one that has everything in a bin would leave the others dark.
    most = float(np.quantile(known, 0.995) if len(rows_LB) > 8 and known.size else known.max(initial=0.0))
    return Chart(
        key,
        TITLES[key],
        x=Axis("-g", "nats a token", ticks=ticks),
        y=Axis("layer", ticks=thin_ticks([str(gate.layer) for gate in probe.gates]), down=True),
        heatmap=Heatmap(
            *(rows_LB, "share of the gates", 0.0, max(1.0, most), "%"),
            beyond=(False, bool(known.size and known.max() > max(1.0, most))),
        ),
        marks=[Mark((np.log10(-b) - edges[0]) * each - 0.5, f"g_min = {b:g}", colour="red") for b in bounds],
        notes=[probe_note(probe), "The outermost bins also hold what lies beyond them."],
        height=min(1.4, 0.7 + len(rows_LB) / 60),
    )


def memory(probe: Probe, layer: int | None = None) -> Chart:
    """Tokens after which a channel's state has faded to 1/e, 1 / mean |g|: spread over the channels of each head."""
    key = "gates-memory"
    if not probe.gates:
        return nothing(key, TITLES[key], _no_gates(probe))
    gates = _of(probe.gates, layer)
    rows = [(gate.layer, gate.memory_HM[:, gate.memory_HM.shape[1] // 2]) for gate in gates]
    if len(gates) > 1 and _crowded(rows):
        note = "After so many tokens the state of a head's median channel has faded to 1/e."
        return _grid(key, TITLES[key], rows, "median memory", "tokens", [probe_note(probe), note, _CHOOSE])
    spread_MH = np.concatenate([gate.memory_HM for gate in gates]).T.astype(np.float64)
    x, marks, axis = _heads([(gate.layer, len(gate.g_HQ)) for gate in gates])
    if probe.length:
        marks.append(Mark(probe.length, f"longest text looked at: {probe.length:,} tokens", "y"))
    bands, lines = _spread(x, spread_MH, probe.memory_levels, "channels", gates)
    return Chart(
        key,
        _title("Memory length", gates, layer, TITLES[key]),
        x=axis,
        y=Axis("memory", "tokens", log=True),
        bands=bands,
        lines=lines,
        marks=marks,
        notes=[probe_note(probe), "After so many tokens a channel's state has faded to 1/e."],
    )


def memory_over_steps(probes: Sequence[Probe], run: RunView, step: int | None) -> Chart:
    """Median memory of each layer's heads over steps."""
    key = "gates-memory-steps"

    def middle(gate: Gate) -> float:
        return mean(gate.memory_HM[:, gate.memory_HM.shape[1] // 2])

    x, layers, values_LS = _by_layer(probes, lambda probe: probe.gates, middle)
    if not layers:
        return nothing(key, TITLES[key], _no_gates(probes[-1]))
    lines, bands = over_layers(x, layers, values_LS, "median of the layers")
    axis = Axis("median memory", "tokens", log=True)
    notes = ["Of each layer the mean over its heads: tokens after which a median channel's state has faded to 1/e."]
    return chart_over_steps(key, TITLES[key], run, step, axis, lines, bands, notes)


def at_bound(probe: Probe, layer: int | None = None) -> Chart:
    """Share of gates beyond 99.5 % of g_min, and as near to 0, head by head: there a gate hardly learns any more."""
    key = "gates-bound"
    bounded = [gate for gate in probe.gates if gate.at_g_min_H is not None and gate.at_zero_H is not None]
    if not bounded:
        return nothing(key, TITLES[key], _no_gates(probe) if not probe.gates else "These gates have no bound.")
    bounded = _of(bounded, layer)
    note = "At a bound: within 0.5 % of the gate's range, where its slope is under 2 % of the steepest."
    rows = [(gate.layer, 100 * gate.at_g_min_H) for gate in bounded if gate.at_g_min_H is not None]
    if len(bounded) > 1 and _crowded(rows):
        title, notes = "Share of gates at g_min by layer and head", [probe_note(probe), note, _CHOOSE]
        return _grid(key, title, rows, "share of the gates", "%", notes, ends=(0.0, 100.0))
    x, marks, axis = _heads([(gate.layer, len(gate.g_HQ)) for gate in bounded])
    low, high = (np.concatenate(both) for both in zip(*((g.at_g_min_H, g.at_zero_H) for g in bounded), strict=True))  # type: ignore[misc]
    return Chart(
        key,
        _title("Share of gates at a bound", bounded, layer, TITLES[key]),
        x=axis,
        y=_shares(low, high),
        lines=[
            Line("at g_min: forgets all it can", x, 100 * low, "red"),
            Line("at 0: forgets nothing", x, 100 * high, "blue", "dash"),
        ],
        marks=marks,
        notes=[probe_note(probe), note],
    )


def at_bound_over_steps(probes: Sequence[Probe], run: RunView, step: int | None) -> Chart:
    """The same shares over steps: mean of all heads, and the head that has most."""
    key = "gates-bound-steps"
    x = steps_of(probes)
    lines = []
    for name, words, colour in (("at_g_min_H", "at g_min", "red"), ("at_zero_H", "at 0", "blue")):
        found = np.full((2, len(probes)), np.nan)
        for i, probe in enumerate(probes):
            rows = [row for gate in probe.gates if (row := getattr(gate, name)) is not None]
            heads = np.concatenate(rows) if rows else np.zeros(0)
            if np.isfinite(heads).any():
                found[:, i] = 100 * mean(heads), 100 * float(np.nanmax(heads))
        if np.isfinite(found).any():
            lines.append(Line(f"{words}, mean of all heads", x, found[0], colour))  # type: ignore[arg-type]
            lines.append(Line(f"{words}, the head with most", x, found[1], colour, "dot"))  # type: ignore[arg-type]
    if not lines:
        last = probes[-1]
        return nothing(key, TITLES[key], _no_gates(last) if not last.gates else "These gates have no bound.")
    return chart_over_steps(key, TITLES[key], run, step, _shares(*(np.asarray(line.y) for line in lines)), lines)


def _shares(*shares: Any) -> Axis:
    """From 0 on; where all are 0 up to 1 %, for what fits would be -1 to 1."""
    some = any(np.nanmax(one, initial=0.0) > 0 for one in shares)
    return Axis("share of the gates", "%", low=0, high=None if some else 1.0)


def openness(probe: Probe, layer: int | None = None) -> Chart:
    """Quantiles of the output gates' sigmoids over tokens and channels, head by head."""
    key = "gates-openness"
    if not probe.openness:
        return nothing(key, TITLES[key], _no_output_gates(probe))
    note = "0 is shut: that head's output does not reach the stream; untrained gates are at 0.5."
    gates = _of(probe.openness, layer)
    if len(gates) > 1 and _crowded(rows := [(gate.layer, gate.mean_H) for gate in gates]):
        return _grid(key, TITLES[key], rows, "mean openness", "", [probe_note(probe), note, _CHOOSE], ends=(0.0, 1.0))
    values_QH = np.concatenate([gate.values_HQ for gate in gates]).T.astype(np.float64)
    x, marks, axis = _heads([(gate.layer, len(gate.mean_H)) for gate in gates])
    bands, lines = _spread(x, values_QH, probe.levels, "gates", gates)
    average = np.concatenate([gate.mean_H for gate in gates])
    return Chart(
        key,
        _title("Openness of the output gates", gates, layer, TITLES[key]),
        x=axis,
        y=Axis("openness", low=0, high=1),
        bands=bands,
        lines=[*lines, Line("mean", x, average, "orange", "dash", points=len(gates) == 1)],
        marks=marks,
        notes=[probe_note(probe), note],
    )


def openness_over_steps(probes: Sequence[Probe], run: RunView, step: int | None) -> Chart:
    """Mean openness of each layer over steps."""
    key = "gates-openness-steps"
    x, layers, values_LS = _by_layer(probes, lambda probe: probe.openness, lambda gate: mean(gate.mean_H))
    if not layers:
        return nothing(key, TITLES[key], _no_output_gates(probes[-1]))
    lines, bands = over_layers(x, layers, values_LS, "median of the layers")
    return chart_over_steps(key, TITLES[key], run, step, Axis("mean openness", low=0, high=1), lines, bands)


def _of(gates: Sequence[T], layer: int | None) -> list[T]:
    """Those of a layer; all where it has none, or none is chosen."""
    return [gate for gate in gates if gate.layer == layer] or list(gates)


def _title(what: str, gates: Sequence[_Layered], layer: int | None, of_all: str) -> str:
    chosen = layer is not None and all(gate.layer == layer for gate in gates)
    return f"{what} of the heads of layer {layer}" if chosen else of_all


def _crowded(rows: Sequence[tuple[int, Any]]) -> bool:
    return sum(len(values_H) for _, values_H in rows) > _CROWD


def _grid(
    key: str,
    title: str,
    rows: Sequence[tuple[int, Any]],
    what: str,
    unit: str,
    notes: Sequence[str],
    ends: tuple[float, float] | None = None,
    marks: tuple[tuple[float, str], ...] = (),
) -> Chart:
    """A cell a head, a column a layer; without ``ends`` the colours are even in powers of two over what there is."""
    values_HL = np.full((max(len(values_H) for _, values_H in rows), len(rows)), np.nan)
    for i, (_, values_H) in enumerate(rows):
        values_HL[: len(values_H), i] = values_H
    known = values_HL[np.isfinite(values_HL) & (values_HL > 0)]
    reach = max((at for at, _ in marks), default=0.0)
    low, high = ends or (float(known.min(initial=1e30)), max(float(known.max(initial=0.0)), reach))
    if not low < high:
        low, high = (high / 2, high) if high > 0 else (0.5, 1.0)
    return Chart(
        key,
        title,
        x=Axis("layer", ticks=thin_ticks([str(layer) for layer, _ in rows], most=16)),
        y=Axis("head", whole=True, down=True),
        heatmap=Heatmap(
            *(values_HL, what, low, high, unit),
            log2=ends is None,
            beyond=(ends is None and bool(np.any(values_HL < low)), False),
            marks=marks,
        ),
        notes=notes,
        height=min(1.4, 0.7 + len(values_HL) / 60),
    )


def _heads(layers: Sequence[tuple[int, int]]) -> tuple[Array, list[Mark], Axis]:
    """A place a head, with a gap between layers where few heads would otherwise run together; an axis that names them.

    Args:
        layers: number and heads of each.
    """
    places: list[Array] = []
    middles: list[float] = []
    marks: list[Mark] = []
    at = 0.0
    for _, heads in layers:
        places.append(np.arange(heads, dtype=np.float64) + at)
        middles.append(at + (heads - 1) / 2)
        if at and len(layers) <= 16:
            marks.append(Mark(at - 0.5, dash="dot"))
        at += heads
    if len(layers) == 1:
        return places[0], marks, Axis(f"head of layer {layers[0][0]}", low=-0.6, high=at - 0.4, whole=True)
    names = thin_ticks([str(layer) for layer, _ in layers])
    ticks = tuple((middles[round(place)], name) for place, name in names)
    return np.concatenate(places), marks, Axis(_HEADS.label, ticks=ticks)


def _spread(
    x: Array, values_QH: Array, levels: Sequence[float], of: str, gates: Sequence[_Layered]
) -> tuple[list[Band], list[Line]]:
    """Quantiles of heads: a fan across the heads of several layers, of those of one layer a bar each."""
    if len(gates) > 1:
        return _fan(x, values_QH, levels, of)
    lines: list[Line] = []
    room = min(1.0, 24 / max(1, len(x)))
    pairs = len(levels) // 2
    for i in range(pairs):
        share = round(100 * (levels[-1 - i] - levels[i]))
        gap = np.full(len(x), np.nan)
        upright = np.stack([values_QH[i], values_QH[-1 - i], gap], 1).ravel()
        lines.append(
            Line(f"{share} % of the {of}", np.repeat(x, 3), upright, _BARS[min(i, 2)], width=(3.0 + 4.5 * i) * room)
        )
    if len(levels) % 2:
        lines.append(Line("median", x, values_QH[len(levels) // 2], "ink", points=True))
    return [], lines


def _fan(x: Array, values_QH: Array, levels: Sequence[float], of: str = "gates") -> tuple[list[Band], list[Line]]:
    """Bands between quantiles that mirror each other, and the median where there is one."""
    bands: list[Band] = []
    lines: list[Line] = []
    for i in range(len(levels) // 2):
        share = round(100 * (levels[-1 - i] - levels[i]))
        pale = 0.12 + 0.14 * i
        bands.append(Band(f"{share} % of the {of}", x, values_QH[i], values_QH[-1 - i], "blue", min(pale, 0.6)))
    if len(levels) % 2:
        lines.append(Line("median", x, values_QH[len(levels) // 2], "ink"))
    return bands, lines


def _by_layer(probes: Sequence[Probe], rows: Any, figure: Any) -> tuple[Array, list[int], Array]:
    """A figure of each layer at each look: steps ``[S]``, layers, ``[L, S]``."""
    layers = sorted({gate.layer for probe in probes for gate in rows(probe)})
    place = {layer: i for i, layer in enumerate(layers)}
    values_LS = np.full((len(layers), len(probes)), np.nan)
    for s, probe in enumerate(probes):
        for gate in rows(probe):
            values_LS[place[gate.layer], s] = figure(gate)
    return steps_of(probes), layers, values_LS


def _no_gates(probe: Probe) -> str:
    return _why_none(probe, "gates", "decay gates", "layer with decay gates (Kimi Delta Attention)")


def _no_output_gates(probe: Probe) -> str:
    return _why_none(probe, "openness", "output gates", "output gates")


def _why_none(probe: Probe, part: str, what: str, lacking: str) -> str:
    if part in probe.lacks:
        return f"The line of step {probe.step:,} in probes.jsonl is damaged: its {what} cannot be read."
    return f"This model has no {lacking}."
