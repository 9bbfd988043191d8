"""A recorder's file as the Balance page asks for it: what was read once is kept, what is new added. Without torch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from trine.balance.record_format import SUMMARY, Array, Frame, RecordError
from trine.balance.recorder_reader import Point, RecorderReader
from trine.views.chart import plain
from trine.views.run_view import RunView, moe_layers

MOST_POINTS = 600
"""Points that figures over steps are thinned to."""
_MOST_BIAS_POINTS = 120  # each of them is unpacked
_MOST_FRAMES = 3
_MOST_CELLS = 1 << 20


KEPT = {"p1": 0, "p5": 0, "p50": 0, "p95": 0, "p99": 0, "tokens": 0} | {
    "max_vio": 2, "dead": 2, "saturated": 2, "bias_min": 1, "bias_max": 2,
}  # fmt: skip
"""Columns of `SUMMARY` that figures over steps take; of a point of many steps 0 the mean, 1 the least, 2 the most."""
_AT_ONCE = 64  # points


class History(NamedTuple):
    """Figures of every layer over steps: ``[P]`` int64 steps, ``[P, K, L]`` fp32 of `KEPT`."""

    steps: Array
    figures: Array

    def of(self, name: str) -> Array:
        """One column of `KEPT`, ``[P, L]``."""
        return self.figures[:, list(KEPT).index(name)]


class Layers(NamedTuple):
    """What the recorded layers are called: by their numbers in the model, as on the other pages, or where the run does
    not tell them counted, and then said to be."""

    first: int = 0  # number of the first; each has one more than the one before
    word: str = "MoE layer"

    def of(self, row: int) -> str:
        """The layer of a row, in words."""
        return f"{self.word} {self.first + row}"


UNNUMBERED = Layers()
"""Of a run that does not tell its layers' numbers."""


class BalanceData:
    """What a run's recorder holds. Safe to share between threads; raises nothing for what a file holds.

    After every method `problem` is a sentence when nothing could be read, else empty.
    """

    def __init__(self, run: RunView) -> None:
        self.run = run
        self.problem = ""
        self._lock = threading.RLock()
        self._forget(None)

    def _forget(self, sizes: Any) -> None:
        self._sizes = sizes
        self._summaries: dict[Point, Array] = {}
        self._history: History | None = None
        self._biases: dict[int, dict[Point, Array]] = {}
        self._frames: OrderedDict[Any, Frame] = OrderedDict()
        self._points: tuple[Any, list[Point]] = (None, [])

    def _reader(self) -> RecorderReader | None:
        reader = self.run.recorder()
        if reader is None:
            self.problem = " ".join(self.run.notes()) or f"{self.run.name} has no record of its experts."
            return None
        reader.version()  # opens the file that has this name now
        if reader.layers * reader.experts > _MOST_CELLS:
            self.problem = (
                f"{reader.layers} layers of {reader.experts} experts are more than this page draws ({_MOST_CELLS})."
            )
            return None
        sizes = (reader.layers, reader.experts, reader.meta["top_k"], reader.meta["ranks"])
        if sizes != self._sizes:
            self._forget(sizes)
        self.problem = "" if reader.layers else "The model has no MoE layers: there is no load to balance."
        return reader if reader.layers else None

    @property
    def sizes(self) -> tuple[int, int, int, int] | None:
        """Layers, experts, experts a token, ranks; None when nothing can be read."""
        with self._lock:
            try:
                return self._sizes if self._reader() is not None else None
            except RecordError as error:
                self.problem = plain(error)
                return None

    @property
    def layers(self) -> Layers:
        """What its layers are called."""
        sizes = self.sizes
        numbers = moe_layers(self.run, sizes[0]) if sizes is not None else range(0)
        return Layers(numbers[0], "layer") if numbers else UNNUMBERED

    def row(self, number: int | None) -> int | None:
        """The row of the layer of a number; None where there is none."""
        sizes = self.sizes
        row = -1 if number is None else number - self.layers.first
        return row if sizes is not None and 0 <= row < sizes[0] else None

    def span(self) -> tuple[int, int] | None:
        """First and last step there is; None when there is none."""
        with self._lock:
            try:
                reader = self._reader()
                points = self._all_points(reader) if reader is not None else []
            except RecordError as error:
                self.problem = plain(error)
                return None
            if reader is not None and not points:
                self.problem = "No step was recorded yet."
            return (points[0].last, points[-1].last) if points else None

    def _all_points(self, reader: RecorderReader) -> list[Point]:
        """All points; read once a version of the file, for their rows take as long as a picture."""
        version = reader.version()
        if self._points[0] != version:
            self._points = (version, reader.points())
        return self._points[1]

    def _thinned(self, reader: RecorderReader, most: int) -> list[Point]:
        """Of each tier every second, fourth, … point, the same ones when steps come to it, and always the last."""
        points = self._all_points(reader)
        stride = 1
        while len(points) // stride > most:
            stride *= 2
        return [one for one in points if (one.last // 10**one.tier) % stride == 0 or one is points[-1]]

    def history(self) -> History | None:
        """Figures of the layers over steps; None when there is nothing."""
        with self._lock:
            try:
                reader = self._reader()
                if reader is None:
                    return None
                wanted = self._thinned(reader, MOST_POINTS)
                missing = [one for one in wanted if one not in self._summaries]
                if not missing and self._history is not None and len(self._history.steps) == len(wanted):
                    return self._history
                for start in range(0, len(missing), _AT_ONCE):
                    self._summaries.update(_summaries(reader, missing[start : start + _AT_ONCE]))
                keep = set(wanted)
                self._summaries = {point: row for point, row in self._summaries.items() if point in keep}
            except RecordError as error:
                self.problem = plain(error)
                return None
            known = [one for one in wanted if one in self._summaries]
            if not known:
                self.problem = self.problem or "No step was recorded yet, or none can be read."
                return None
            steps = np.array([one.last for one in known], dtype=np.int64)
            self._history = History(steps, np.stack([self._summaries[one] for one in known]))
            return self._history

    def frame(self, step: int | None) -> Frame | None:
        """The finest frame that covers ``step`` (None: the newest step); None when there is none."""
        with self._lock:
            try:
                reader = self._reader()
                if reader is None:
                    return None
                key = (reader.version(), step)
                if key in self._frames:
                    self._frames.move_to_end(key)
                    return self._frames[key]
                frame = reader.latest() if step is None else reader.arrays(step)
            except RecordError as error:
                self.problem = plain(error)
                return None
            if frame is None:
                self.problem = "No step was recorded yet."
                return None
            self._frames[key] = frame
            while len(self._frames) > _MOST_FRAMES:
                self._frames.popitem(last=False)
            return frame

    def biases(self, layer: int) -> tuple[Array, Array] | None:
        """``[P]`` int64 steps and ``[P, E]`` fp32 biases of the layer of a row; None when there are none."""
        with self._lock:
            try:
                reader = self._reader()
                if reader is None or not 0 <= layer < reader.layers:
                    return None
                wanted = self._thinned(reader, _MOST_BIAS_POINTS)
                kept = self._biases.get(layer, {})
                missing = [one for one in wanted if one not in kept]
                if missing:
                    found = reader.series(layer, chosen=missing)
                    kept.update(zip(found.points, found.bias, strict=True))
                self._biases = {layer: {point: kept[point] for point in wanted if point in kept}}
            except RecordError as error:
                self.problem = plain(error)
                return None
            rows = self._biases[layer]
            if not rows:
                return None
            return np.array([one.last for one in rows], dtype=np.int64), np.stack(list(rows.values()))


def _summaries(reader: RecorderReader, chosen: list[Point]) -> dict[Point, Array]:
    """What is kept of the summaries of some points, ``[K, L]`` each."""
    points, figures = reader.summaries(chosen=chosen)
    kinds, columns = list(KEPT.values()), [SUMMARY.index(name) for name in KEPT]
    return {point: row[kinds, :, columns] for point, row in zip(points, figures, strict=True)}
