"""What a recorder's file holds: frames of loads and biases as checked, compressed blobs in one SQLite database.

A *frame* is one step, or the summary of 10, 100, 1000 … steps (its tier). Everything in it is read back within stated
bounds (`Precision`), every blob carries a checksum, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trine.balance.window import Window

FILE_NAME = "balance.sqlite"
"""Name of the file in a run's folder."""
FORMAT_VERSION = 1
APPLICATION_ID = 0x54724251
"""SQLite's mark of whose file this is ("TrBQ")."""
TIER = 10
"""Frames of one tier that become one of the next."""
MARGIN_LEVELS = (0.01, 0.05, 0.5, 0.95, 0.99)
"""Levels of `Window.margins_LQ`."""
SUMMARY = (
    *("max_vio", "cv", "p1", "p5", "p50", "p95", "p99", "dead", "entropy", "effective", "quantile_error"),
    *("rank_overload", "bias_min", "bias_max", "bias_step", "flips", "tokens", "dropped", "saturated", "overflow"),
    *("margin_p1", "margin_p5", "margin_p50", "margin_p95", "margin_p99"),
)
"""Columns of a summary, figures of one layer: see `trine.balance.metrics`. ``dead`` counts experts that should have
got more than 10 tokens since their last one; ``bias_step`` is the mean size of the bias' last change, ``flips`` its
`sign_flip_rate` (NaN where nothing moved); ``saturated`` and ``overflow`` are shares of tokens x experts, ``tokens``
and ``dropped`` are tokens; margins are quantiles of the required bias, with `batch_rounds` of that against refined
cutoffs."""
SCHEMA = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "frames": (
        "CREATE TABLE frames (tier INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, "
        "steps INTEGER NOT NULL, summary BLOB NOT NULL, arrays BLOB NOT NULL, PRIMARY KEY (tier, first))"
    ),
}
MAX_CELLS = 1 << 24
"""Most layers x experts of a file; K3 has 82 432."""
FRAME_BYTES = 190_000
"""What the arrays of a frame of 92 x 896 may take, before precision is given up (proportionally for other sizes, and
four thirds of it with the least and most of many steps)."""

Array = NDArray[Any]
_COUNTERS = ("tokens_L", "dropped_L", "saturated_L", "overflow_L")
_HEADER = struct.Struct("<4BI")  # loads' shift, loads' bits, bias' bits, arrays; length of what is before the planes
_CRC = struct.Struct("<I")
_CHUNK_CELLS = 8192  # cells compressed together: a layer is read without unpacking the others


class RecordError(ValueError):
    """A recorder's file cannot be read or written: absent, foreign, damaged or of a newer format. Names the file."""


class Precision(NamedTuple):
    """Bits kept of loads and biases.

    A load keeps ``loads`` significant bits: whole numbers up to 2**loads are exact, larger ones have a relative error
    of at most 2**-loads, and zero is zero. A bias is off by at most the range of its layer's biases over
    2 (2**bias - 1).
    """

    loads: int
    bias: int


PRECISIONS = (Precision(11, 16), Precision(11, 12), Precision(11, 10), Precision(9, 9), Precision(8, 8))
"""Tried in this order until a frame fits; models of up to 16 384 cells always have the first."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a file's arrays."""

    layers: int
    experts: int

    @property
    def cells(self) -> int:
        """Layers x experts."""
        return self.layers * self.experts

    @property
    def layers_a_chunk(self) -> int:
        """Layers compressed together."""
        return max(1, _CHUNK_CELLS // max(1, self.experts))

    @property
    def chunks(self) -> int:
        """Chunks of an array."""
        return -(-self.layers // self.layers_a_chunk)


@dataclass(frozen=True)
class Frame:
    """One step, or the summary of the recorded steps ``first`` to ``last``.

    Attributes:
        first, last: steps, counted from 1.
        steps: how many of them were recorded.
        loads_LE: ``[L, E]`` fp64 tokens of each expert; the mean of the steps.
        bias_LE: ``[L, E]`` fp32 bias the steps were routed with; their mean.
        tokens_L, dropped_L, saturated_L, overflow_L: ``[L]`` int64 as in `Window`; sums over the steps.
        margins_LQ: ``[L, 5]`` fp32 required bias at `MARGIN_LEVELS`; the mean of the steps.
        lowest_LE, highest_LE: ``[L, E]`` fp64 least and largest load of a step; those of a single step are its loads.
        summary_KLM: ``[1, L, M]`` fp32 figures `SUMMARY` of one step, or ``[3, L, M]`` their mean, least and largest.
        precision: of loads and biases; None when they were never packed.
    """

    first: int
    last: int
    steps: int
    loads_LE: Array
    bias_LE: Array
    tokens_L: Array
    dropped_L: Array
    saturated_L: Array
    overflow_L: Array
    margins_LQ: Array
    lowest_LE: Array
    highest_LE: Array
    summary_KLM: Array
    precision: Precision | None = None

    def summary(self, name: str, kind: int = 0) -> Array:
        """One figure of every layer, ``[L]`` fp32; ``kind`` 0 the mean, 1 the least, 2 the largest of the steps."""
        return self.summary_KLM[kind if len(self.summary_KLM) > 1 else 0, :, SUMMARY.index(name)]


@dataclass(frozen=True)
class HostWindow:
    """A `Window` in the host's memory: NumPy arrays of the same names, shapes and dtypes."""

    loads_LE: Array
    bias_LE: Array
    tokens_L: Array
    dropped_L: Array
    saturated_L: Array
    overflow_L: Array
    margins_LQ: Array

    @classmethod
    def of(cls, window: Window) -> HostWindow:
        """Read a window; waits for its device."""
        return cls(**{name: getattr(window, name).cpu().numpy() for name in window.__dataclass_fields__})

    def check(self, shape: Shape) -> None:
        """Refuse what is no window of this model.

        Raises:
            ValueError: another shape, a load below 0, a bias that is not finite.
        """
        size = (shape.layers, shape.experts)
        if self.loads_LE.shape != size or self.bias_LE.shape != size:
            found = f"loads {self.loads_LE.shape}, bias {self.bias_LE.shape}"
            raise ValueError(f"window: found {found}, need {size}, layers x experts of the recorder")
        if self.margins_LQ.shape != (shape.layers, len(MARGIN_LEVELS)):
            found = str(self.margins_LQ.shape)
            raise ValueError(f"window: found margins {found}, need {(shape.layers, len(MARGIN_LEVELS))}")
        if self.loads_LE.size and self.loads_LE.min() < 0:
            raise ValueError(f"window: found a load of {self.loads_LE.min()}, need 0 or more")
        if not np.isfinite(self.bias_LE).all():
            raise ValueError("window: found a bias that is not finite")


# -- numbers to words ------------------------------------------------------------------------------------------------


def load_shift(largest: float) -> int:
    """Power of two that loads are divided by so that fp16 holds them; the mantissa, and so their value, stays."""
    return max(0, math.ceil(math.log2(largest / 32768.0))) if largest > 32768.0 else 0


def load_words(loads: Array, shift: int, bits: int) -> Array:
    """Loads as fp16 of load / 2**shift, rounded to ``bits`` significant bits and moved down: uint16."""
    drop = 11 - bits
    mantissa, exponent = np.frexp(loads.astype(np.float64))
    # rounded once, so that fp16 has nothing left to round
    rounded = np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits - shift)
    words: Array = rounded.astype(np.float16).view(np.uint16).astype(np.uint32)
    words = (words + ((1 << drop) >> 1)) >> drop
    return np.where(loads > 0, np.maximum(words, 1), 0).astype(np.uint16)


def load_values(words: Array, shift: int, bits: int) -> Array:
    """What `load_words` stands for, fp64."""
    return np.ldexp((words << np.uint16(11 - bits)).view(np.float16).astype(np.float64), shift)


def bias_words(bias_LE: Array, bits: int) -> tuple[Array, Array]:
    """Biases on an even grid of 2**bits values from the lowest to the highest of their layer.

    Returns:
        Words ``[L, E]`` uint16, and ``[L, 2]`` fp64: the lowest, and the width of a step (0 where all are equal).
    """
    bias_LE = bias_LE.astype(np.float64)
    low_L, high_L = bias_LE.min(-1), bias_LE.max(-1)
    step_L = (high_L - low_L) / ((1 << bits) - 1)
    words_LE = np.rint((bias_LE - low_L[:, None]) / np.where(step_L > 0, step_L, 1.0)[:, None])
    return words_LE.astype(np.uint16), np.stack((low_L, step_L), -1)


# -- blobs -----------------------------------------------------------------------------------------------------------


def _planes(words_LE: Array, shape: Shape) -> list[bytes]:
    """Low and high bytes apart, a chunk of layers at a time: noise in one does not hide the order in the other."""
    packed = []
    for start in range(0, shape.layers, shape.layers_a_chunk):
        chunk = np.ascontiguousarray(words_LE[start : start + shape.layers_a_chunk], dtype="<u2")
        for plane in chunk.view(np.uint8).reshape(-1, 2).T:
            squeeze = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
            packed.append(squeeze.compress(plane.tobytes()) + squeeze.flush())
    return packed


def _checked(body: bytes) -> bytes:
    return _CRC.pack(zlib.crc32(body)) + body


def _verified(blob: bytes, what: str) -> memoryview:
    if len(blob) < _CRC.size or _CRC.unpack_from(blob)[0] != zlib.crc32(memoryview(blob)[_CRC.size :]):
        raise RecordError(f"{what} is damaged (its checksum does not fit)")
    return memoryview(blob)[_CRC.size :]


def pack_summary(summary_KLM: Array) -> bytes:
    """A frame's summary, ``[1 or 3, L, M]``, as a blob."""
    return _checked(summary_KLM.astype("<f4").tobytes())


def unpack_summary(blob: bytes, shape: Shape, columns: int) -> Array:
    """What `pack_summary` packed.

    Raises:
        RecordError: the blob is damaged, or of other sizes.
    """
    body = _verified(blob, "the summary")
    size = 4 * shape.layers * columns
    if len(body) not in (size, 3 * size):
        raise RecordError(f"the summary has {len(body)} bytes, need {size} or {3 * size}")
    return np.frombuffer(body, dtype="<f4").reshape(-1, shape.layers, columns).astype(np.float32)


def pack_arrays(frame: Frame, precision: Precision) -> bytes:
    """Loads, biases (and the least and largest loads of many steps), counters and margins as one blob."""
    shape = Shape(*frame.loads_LE.shape)
    many = frame.steps > 1 or frame.last > frame.first
    loads = [frame.loads_LE, *((frame.lowest_LE, frame.highest_LE) if many else ())]
    shift = load_shift(max((float(one.max()) for one in loads if one.size), default=0.0))
    words_LE, scale_L2 = bias_words(frame.bias_LE, precision.bias) if shape.cells else (frame.bias_LE, np.zeros((0, 2)))
    planes = [plane for one in loads for plane in _planes(load_words(one, shift, precision.loads), shape)]
    planes += _planes(words_LE, shape)
    fixed = b"".join(
        (
            np.stack([getattr(frame, name) for name in _COUNTERS]).astype("<i8").tobytes(),
            frame.margins_LQ.astype("<f4").tobytes(),
            scale_L2.astype("<f8").tobytes(),
            np.array([len(plane) for plane in planes], dtype="<u4").tobytes(),
        )
    )
    header = _HEADER.pack(shift, precision.loads, precision.bias, len(loads) + 1, len(fixed))
    return _checked(b"".join((header, fixed, *planes)))


def pack_to_fit(frame: Frame, start: int = 0) -> tuple[bytes, int]:
    """`pack_arrays` with the first of `PRECISIONS`, from number ``start`` on, that keeps to `FRAME_BYTES`.

    Returns:
        The blob, and the number of the precision.
    """
    shape = Shape(*frame.loads_LE.shape)
    room = FRAME_BYTES * shape.cells / 82_432
    if frame.last > frame.first:
        room *= 4 / 3
    for number in range(start, len(PRECISIONS)):
        blob = pack_arrays(frame, PRECISIONS[number])
        if shape.cells <= 2 * _CHUNK_CELLS or len(blob) <= room:
            return blob, number
    return blob, len(PRECISIONS) - 1


@dataclass(frozen=True)
class Arrays:
    """A blob of `pack_arrays`, checked; loads and biases are unpacked on demand."""

    shape: Shape
    shift: int
    precision: Precision
    counters_4L: Array
    margins_LQ: Array
    scale_L2: Array
    sizes: Array  # [arrays, chunks, 2] bytes of the planes
    body: memoryview
    start: int  # of the planes

    @classmethod
    def of(cls, blob: bytes, shape: Shape) -> Arrays:
        """Check a blob and read what is not compressed.

        Raises:
            RecordError: it is damaged, or of other sizes.
        """
        body = _verified(blob, "the frame")
        if len(body) < _HEADER.size:
            raise RecordError(f"the frame has {len(body)} bytes")
        shift, loads, bias, arrays, fixed = _HEADER.unpack_from(body)
        layers, levels = shape.layers, len(MARGIN_LEVELS)
        parts = (32 * layers, 4 * layers * levels, 16 * layers, 8 * shape.chunks * arrays)
        if arrays not in (2, 4) or not 1 <= loads <= 11 or not 1 <= bias <= 16 or shift > 64 or fixed != sum(parts):
            raise RecordError(
                f"the frame's header is {(shift, loads, bias, arrays, fixed)}, need one of {layers} layers"
            )
        if len(body) < _HEADER.size + fixed:
            raise RecordError(f"the frame has {len(body)} bytes, need {_HEADER.size + fixed} and more")
        bounds = np.cumsum((_HEADER.size, *parts)).tolist()
        one, two, three, four = (body[a:b] for a, b in pairwise(bounds))
        sizes = np.frombuffer(four, dtype="<u4").reshape(arrays, shape.chunks, 2).astype(np.int64)
        if int(sizes.sum()) != len(body) - bounds[-1]:
            raise RecordError(f"the frame has {len(body) - bounds[-1]} bytes of arrays, need {int(sizes.sum())}")
        return cls(
            shape=shape,
            shift=shift,
            precision=Precision(loads, bias),
            counters_4L=np.frombuffer(one, dtype="<i8").reshape(4, layers).astype(np.int64),
            margins_LQ=np.frombuffer(two, dtype="<f4").reshape(layers, levels).astype(np.float32),
            scale_L2=np.frombuffer(three, dtype="<f8").reshape(layers, 2).astype(np.float64),
            sizes=sizes,
            body=body,
            start=bounds[-1],
        )

    def _words(self, number: int, chunk: int) -> Array:
        first = chunk * self.shape.layers_a_chunk
        layers = min(self.shape.layers_a_chunk, self.shape.layers - first)
        cells = layers * self.shape.experts
        flat = number * self.shape.chunks + chunk
        at = self.start + int(self.sizes.reshape(-1, 2)[:flat].sum())
        words = np.empty((cells, 2), dtype=np.uint8)
        for plane in (0, 1):
            size = int(self.sizes[number, chunk, plane])
            words[:, plane] = np.frombuffer(_inflate(self.body[at : at + size], cells), dtype=np.uint8)
            at += size
        return words.reshape(-1).view("<u2").astype(np.uint16).reshape(layers, self.shape.experts)

    def _whole(self, number: int, layer: int | None) -> Array:
        if layer is not None:
            return self._words(number, layer // self.shape.layers_a_chunk)[layer % self.shape.layers_a_chunk]
        parts = [self._words(number, chunk) for chunk in range(self.shape.chunks)]
        return np.concatenate(parts) if parts else np.empty((0, self.shape.experts), dtype=np.uint16)

    def loads(self, kind: int = 0, layer: int | None = None) -> Array:
        """Loads, fp64 ``[L, E]``, or ``[E]`` of one layer; ``kind`` 0 the mean, 1 the least, 2 the largest."""
        number = kind if len(self.sizes) > 2 else 0
        return load_values(self._whole(number, layer), self.shift, self.precision.loads)

    def bias(self, layer: int | None = None) -> Array:
        """Biases, fp32 ``[L, E]``, or ``[E]`` of one layer."""
        words = self._whole(len(self.sizes) - 1, layer)
        low, step = (self.scale_L2[..., i] if layer is None else self.scale_L2[layer, i] for i in (0, 1))
        if layer is None:
            low, step = low[:, None], step[:, None]
        return (low + words * step).astype(np.float32)

    def frame(self, first: int, last: int, steps: int, summary_KLM: Array) -> Frame:
        """Everything unpacked."""
        return Frame(
            first=first,
            last=last,
            steps=steps,
            loads_LE=self.loads(),
            bias_LE=self.bias(),
            **dict(zip(_COUNTERS, self.counters_4L, strict=True)),
            margins_LQ=self.margins_LQ,
            lowest_LE=self.loads(1),
            highest_LE=self.loads(2),
            summary_KLM=summary_KLM,
            precision=self.precision,
        )


def _inflate(data: memoryview, size: int) -> bytes:
    """Exactly ``size`` bytes, and never more than that in memory."""
    squeezed = zlib.decompressobj(-15)
    try:
        found = squeezed.decompress(data, size + 1)
    except zlib.error as error:
        raise RecordError(f"the frame is damaged ({error})") from error
    if len(found) != size:
        raise RecordError(f"the frame's plane has {len(found)} bytes or more, need {size}")
    return found


def combine(frames: list[Frame]) -> Frame:
    """Frames that follow one another as one: means of their steps, least, largest, and sums of counters."""
    steps_F = np.array([frame.steps for frame in frames], dtype=np.float64)

    def mean(name: str) -> Array:
        total = sum(getattr(frame, name).astype(np.float64) * frame.steps for frame in frames)
        return np.asarray(total) / steps_F.sum()

    rows = [
        frame.summary_KLM if len(frame.summary_KLM) == 3 else np.repeat(frame.summary_KLM, 3, 0) for frame in frames
    ]
    means, lows, highs = (np.stack([row[kind] for row in rows]).astype(np.float64) for kind in range(3))
    known = np.isfinite(means)  # a figure that a step does not have says nothing about the others
    weight = np.where(known, steps_F[:, None, None], 0.0)
    total = weight.sum(0)
    average = np.where(known, means, 0.0) * weight
    average_LM = np.where(total > 0, average.sum(0) / np.where(total > 0, total, 1.0), np.nan)
    return Frame(
        first=frames[0].first,
        last=frames[-1].last,
        steps=int(steps_F.sum()),
        loads_LE=mean("loads_LE"),
        bias_LE=mean("bias_LE").astype(np.float32),
        **{name: sum(getattr(frame, name) for frame in frames) for name in _COUNTERS},
        margins_LQ=mean("margins_LQ").astype(np.float32),
        lowest_LE=np.minimum.reduce([frame.lowest_LE for frame in frames]),
        highest_LE=np.maximum.reduce([frame.highest_LE for frame in frames]),
        summary_KLM=np.stack((average_LM, np.fmin.reduce(lows), np.fmax.reduce(highs))).astype(np.float32),
    )


# -- the file --------------------------------------------------------------------------------------------------------


def read_meta(database: sqlite3.Connection, path: str | Path) -> dict[str, Any]:
    """What a file says of itself, checked.

    Raises:
        RecordError: foreign, of a newer format, or damaged.
        sqlite3.Error: damaged in a way that SQLite found.
    """
    (mark,), (version,) = (database.execute(f"PRAGMA {one}").fetchone() for one in ("application_id", "user_version"))
    if mark != APPLICATION_ID:
        raise RecordError(f"{path}: is an SQLite file, but not one of Trine's recorder")
    if version > FORMAT_VERSION:
        raise RecordError(f"{path}: format_version {version} is newer than {FORMAT_VERSION}, the newest that is read")
    found = dict(database.execute("SELECT name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"))
    if found != SCHEMA or version < 1:
        raise RecordError(f"{path}: is damaged (its tables are not those of format_version {FORMAT_VERSION})")
    meta: dict[str, Any] = {}
    for name, text in database.execute("SELECT key, value FROM meta WHERE length(value) < 65536"):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            meta[str(name)] = json.loads(text)
    sizes = [meta.get(name) for name in ("layers", "experts", "top_k", "ranks", "keep")]
    good = all(type(one) is int and 0 <= one <= MAX_CELLS for one in sizes)
    good = good and sizes[1] >= 1 and sizes[3] >= 1 and sizes[0] * sizes[1] <= MAX_CELLS  # type: ignore[operator]
    names = meta.get("summary")
    good = good and isinstance(names, list) and all(isinstance(one, str) for one in names) and len(names) <= 256
    if not good or meta.get("margin_levels") != list(MARGIN_LEVELS):
        raise RecordError(f"{path}: is damaged (it does not say what it holds)")
    return meta
