"""What ``probes.jsonl`` says, as arrays: one `Probe` a look inside the model. Without torch.

A line is what `trine.train.probes.look_inside` gives. Nothing in it is believed: a part that is not of its shape is
absent, and `Probe.lacks` names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from trine.views.chart import plain

FILE_NAME = "probes.jsonl"
FORMAT_VERSION = 1
"""Newest format that is read."""
MOST_PROBES = 256
"""Looks that are kept in memory; of longer files every second, fourth, … one, and always the last."""
_MOST_LAYERS, _MOST_HEADS, _MOST_BINS = 1024, 1024, 1024
_LONGEST_NAME = 40

Array = NDArray[np.float32]
T = TypeVar("T")


class Gate(NamedTuple):
    """The log-decays of one KDA layer."""

    layer: int
    g_min: float | None  # None for gates without a bound
    g_HQ: Array  # at `Probe.levels`
    memory_HM: Array  # tokens, at `Probe.memory_levels` over the channels
    at_g_min_H: Array | None  # shares; None without a bound
    at_zero_H: Array | None
    histogram_B: Array  # shares of all gates, bins of `Probe.bins`


class OutputGate(NamedTuple):
    """How open the output gate of one layer is, 0 to 1."""

    layer: int
    kind: str  # kda or mla
    values_HQ: Array  # at `Probe.levels`
    mean_H: Array


class Peaks(NamedTuple):
    """Sizes of activations, a layer (or what it reads) each."""

    largest: Array
    rms: Array


@dataclass(frozen=True, eq=False)
class Probe:
    """One look inside the model.

    Attributes:
        step: steps done; 0 is the untrained model.
        text, tokens, length: what was looked at, in words, its tokens, and those of its longest sequence.
        sites, weights: where depth sources are mixed, and the weight of each source there.
        labels: of the layers' inputs and the head's.
        cka: ``[N, N]`` likeness of each label with each, NaN where unknown.
        tokens_alike, next_alike: ``[N]``, ``[N - 1]`` mean cosines.
        peaks: of ``stream``, ``attention``, ``feed_forward``.
        levels, memory_levels: quantiles that gates are told at.
        bins: edges of the histogram, log10 of -g.
        gates, openness: a layer each.
        lacks: parts that were damaged.
    """

    step: int
    text: str
    tokens: int
    length: int
    sites: tuple[str, ...]
    weights: tuple[Array, ...]
    labels: tuple[str, ...]
    cka: Array
    tokens_alike: Array
    next_alike: Array
    peaks: Mapping[str, Peaks]
    levels: tuple[float, ...]
    memory_levels: tuple[float, ...]
    bins: Array
    gates: tuple[Gate, ...]
    openness: tuple[OutputGate, ...]
    lacks: tuple[str, ...]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Probe:
        """Read a line.

        Raises:
            ValueError: it has no step, or is of a newer format.
        """
        step, version = record.get("step"), record.get("format_version")
        if type(version) is int and version > FORMAT_VERSION:
            raise ValueError(f"format_version: found {version}, need at most {FORMAT_VERSION}")
        if type(step) is not int or not 0 <= step < 2**53:
            raise ValueError("step: found none")
        lacks: list[str] = []

        def part(name: str, read: Callable[[Any], T], none: Any) -> T:
            try:
                return read(record[name])
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError, AttributeError):
                lacks.append(name)
                return none  # type: ignore[no-any-return]

        levels = part("levels", _levels, ())
        memory_levels = part("memory_levels", _levels, ())
        bins = part("decades", _bins, np.zeros(0, dtype=np.float32))
        sites, weights = part("depth", _depth, ((), ()))
        none = np.zeros(0, dtype=np.float32)
        labels, cka, tokens_alike, next_alike = part("layers", _layers, ((), none.reshape(0, 0), none, none))
        return cls(
            step=step,
            text=part("text", lambda value: plain(_text(value), _LONGEST_NAME), ""),
            tokens=part("tokens", _count, 0),
            length=part("length", _count, 0),
            sites=sites,
            weights=weights,
            labels=labels,
            cka=cka,
            tokens_alike=tokens_alike,
            next_alike=next_alike,
            peaks=part("activations", _peaks, {}),
            levels=levels,
            memory_levels=memory_levels,
            bins=bins,
            gates=part("gates", lambda rows: _each(rows, lambda row: _gate(row, levels, memory_levels, bins)), ()),
            openness=part("openness", lambda rows: _each(rows, lambda row: _output_gate(row, levels)), ()),
            lacks=tuple(lacks),
        )

    def of_layer(self, layer: int) -> Gate | None:
        """The decay gates of a layer; None when it has none."""
        return next((gate for gate in self.gates if gate.layer == layer), None)


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _text(value: Any) -> str:
    _need(isinstance(value, str), "text")
    return str(value)


def _count(value: Any) -> int:
    _need(type(value) is int and 0 <= value < 2**53, "number")
    return int(value)


def _numbers(value: Any, *shape: int | None) -> Array:
    """A fp32 array of this shape (None is any size); None in it is NaN."""
    _need(isinstance(value, list), "list")
    if len(shape) > 1:
        _need(shape[0] is None or len(value) == shape[0], "size")
        rows = [_numbers(row, *shape[1:]) for row in value]
        _need(bool(rows) and len({row.shape for row in rows}) == 1, "shape")
        return np.stack(rows)
    _need(len(value) <= 4096 and (shape[0] is None or len(value) == shape[0]), "size")
    _need(all(one is None or type(one) in (int, float) for one in value), "numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.array([math.nan if one is None else one for one in value], dtype=np.float64).astype(np.float32)
    return np.where(np.isfinite(found), found, np.float32(np.nan))


def _levels(value: Any) -> tuple[float, ...]:
    found = _numbers(value, None).astype(np.float64).round(4).tolist()
    _need(1 <= len(found) <= 64 and all(0 <= one <= 1 for one in found) and found == sorted(found), "levels")
    return tuple(found)


def _bins(value: Any) -> Array:
    low, high, each = (_count_signed(one) for one in value)
    _need(low < high and each > 0 and (high - low) * each <= _MOST_BINS, "bins")
    return np.linspace(low, high, (high - low) * each + 1, dtype=np.float32)


def _count_signed(value: Any) -> int:
    _need(type(value) is int and abs(value) < 1000, "number")
    return int(value)


def _names(value: Any) -> tuple[str, ...]:
    _need(isinstance(value, list) and len(value) <= 2 * _MOST_LAYERS + 1, "names")
    return tuple(plain(_text(one), _LONGEST_NAME) for one in value)


def _depth(value: Any) -> tuple[tuple[str, ...], tuple[Array, ...]]:
    sites, rows = _names(value["sites"]), value["weights"]
    _need(isinstance(rows, list) and len(rows) == len(sites), "weights")
    return sites, tuple(_numbers(row, None) for row in rows)


def _layers(value: Any) -> tuple[tuple[str, ...], Array, Array, Array]:
    labels = _names(value["labels"])
    count = len(labels)
    _need(count > 0, "labels")
    cka = _numbers(value["cka"], count, count)
    return labels, cka, _numbers(value["tokens_alike"], count), _numbers(value["next_alike"], count - 1)


def _peaks(value: Any) -> dict[str, Peaks]:
    found = {}
    for part in ("stream", "attention", "feed_forward"):
        largest = _numbers(value[part]["max"], None)
        found[part] = Peaks(largest, _numbers(value[part]["rms"], len(largest)))
    return found


def _each(rows: Any, read: Callable[[Mapping[str, Any]], T]) -> tuple[T, ...]:
    _need(isinstance(rows, list) and len(rows) <= _MOST_LAYERS, "layers")
    return tuple(read(row) for row in rows)


def _gate(row: Mapping[str, Any], levels: Sequence[float], memory_levels: Sequence[float], bins: Array) -> Gate:
    g_HQ = _numbers(row["g"], None, len(levels))
    heads = len(g_HQ)
    _need(1 <= heads <= _MOST_HEADS, "heads")
    bound = row["g_min"]
    if bound is not None:
        _need(type(bound) in (int, float) and math.isfinite(bound) and bound < 0, "bound")
    return Gate(
        layer=_layer(row),
        g_min=None if bound is None else float(bound),
        g_HQ=g_HQ,
        memory_HM=_numbers(row["memory"], heads, len(memory_levels)),
        at_g_min_H=None if row["at_g_min"] is None else _numbers(row["at_g_min"], heads),
        at_zero_H=None if row["at_zero"] is None else _numbers(row["at_zero"], heads),
        histogram_B=_numbers(row["histogram"], len(bins) - 1),
    )


def _output_gate(row: Mapping[str, Any], levels: Sequence[float]) -> OutputGate:
    values_HQ = _numbers(row["values"], None, len(levels))
    _need(1 <= len(values_HQ) <= _MOST_HEADS, "heads")
    return OutputGate(
        _layer(row), plain(_text(row["kind"]), _LONGEST_NAME), values_HQ, _numbers(row["mean"], len(values_HQ))
    )


def _layer(row: Mapping[str, Any]) -> int:
    layer = _count(row["layer"])
    _need(layer < 100_000, "layer")
    return layer
