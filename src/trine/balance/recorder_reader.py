"""Reads a recorder's file, also while it is written, and also what is left of a damaged one."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from trine.balance.record_format import (
    FILE_NAME,
    SUMMARY,
    Array,
    Arrays,
    Frame,
    RecordError,
    Shape,
    read_meta,
    unpack_summary,
)

_MOST_ROWS = 200_000  # more frames than any file has; what a damaged one claims is not believed
_MOST_BYTES = 1 << 28
_MOST_NOTES = 20
_TIERS = 12
_FAILURES = (sqlite3.Error, UnicodeDecodeError)  # the latter: a damaged name inside SQLite's own message


class Point(NamedTuple):
    """A frame of the file: tier 0 is one step, tier n the summary of the steps ``first`` to ``last``."""

    tier: int
    first: int
    last: int
    steps: int  # recorded ones among them


class Series(NamedTuple):
    """One expert (``[P]``) or all experts of one layer (``[P, E]``) over the points of a file."""

    points: list[Point]
    loads: Array  # fp64, mean of the point's steps
    lowest: Array  # fp64, of a step
    highest: Array
    bias: Array  # fp32, mean


class RecorderReader:
    """What a recorder wrote. Read-only; safe to share between threads; follows a file that grows or is replaced.

    Every method reads the file as it is at the call. Frames that are damaged are left out where many are asked for,
    and `notes` says so; where one is asked for they are an error.

    Args:
        path: a run's folder, or the file itself.
        called: what messages and `notes` call the file; its path by default.

    Raises:
        RecordError: absent, no regular file, foreign, damaged beyond reading, or of a newer format; the message names
            the file.
    """

    def __init__(self, path: str | Path, called: str = "") -> None:
        self.path = Path(path)
        if self.path.is_dir() and self.path.name != FILE_NAME:
            self.path = self.path / FILE_NAME
        self.called = called or str(self.path)
        self.notes: list[str] = []
        """What could not be read so far, in sentences."""
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None
        self._identity: tuple[int, ...] | None = None
        self._openings = 0
        with self._lock:
            self._current()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the file go; a later call opens it again."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database, self._identity = None, None

    # -- the file ----------------------------------------------------------------------------------------------------

    def _current(self) -> sqlite3.Connection:
        """A connection to the file that has this name now."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            self.close()
            raise RecordError(f"{self.called}: cannot be read ({error.strerror})") from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise RecordError(f"{self.called}: is no regular file")
        # without a journal nobody writes, and a connection that takes it so does not see when somebody did after all
        still = not self.path.with_name(f"{self.path.name}-wal").exists()
        identity: tuple[int, ...] = (status.st_dev, status.st_ino)
        identity += (status.st_size, status.st_mtime_ns) if still else ()
        if self._database is not None and identity == self._identity:
            return self._database
        self.close()
        for journal in ("-wal", "-shm", "-journal"):  # SQLite opens them too, and would wait at a pipe
            beside = self.path.with_name(self.path.name + journal)
            if beside.exists() and not beside.is_file():
                raise RecordError(f"{self.called}{journal}: is no regular file")
        try:
            self._database = self._connect(status.st_size, still)
            self.meta: dict[str, Any] = read_meta(self._database, self.called)
        except _FAILURES as error:
            self.close()
            raise RecordError(f"{self.called}: is damaged ({_said(error)})") from error
        except RecordError:
            self.close()
            raise
        self._identity = identity
        self._openings += 1
        self.shape = Shape(self.meta["layers"], self.meta["experts"])
        names = self.meta["summary"]
        self._columns = [names.index(name) if name in names else None for name in SUMMARY]
        return self._database

    def _connect(self, size: int, still: bool) -> sqlite3.Connection:
        if size == 0:
            raise RecordError(f"{self.called}: is empty")
        uri = self.path.absolute().as_uri() + "?mode=ro"
        try:
            return _opened(
                uri + "&immutable=1" * still
            )  # else SQLite leaves an empty journal beside what it only reads
        except sqlite3.OperationalError:
            if os.access(self.path.parent, os.W_OK):
                raise
        # On a medium that cannot be written SQLite cannot make its index of the journal that is there.
        self._note("the folder cannot be written to; steps that are only in the journal are not shown")
        return _opened(uri + "&immutable=1")

    def _rows(self, statement: str, values: Sequence[int] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query, or those before the place where the file is damaged."""
        with self._lock:
            database = self._current()
            rows: list[tuple[Any, ...]] = []
            try:
                # one by one: what was read before the damage counts
                for row in database.execute(statement, values):
                    rows.append(row)
            except _FAILURES as error:
                if not rows:
                    raise RecordError(f"{self.called}: is damaged ({_said(error)})") from error
                self._note(f"part of it is damaged ({_said(error)})")
            return rows

    def _note(self, what: str) -> None:
        sentence = f"{self.called}: {what}"
        if sentence not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(sentence)

    # -- what is there -----------------------------------------------------------------------------------------------

    @property
    def layers(self) -> int:
        """MoE layers."""
        return self.shape.layers

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return self.shape.experts

    def version(self) -> tuple[int, ...]:
        """Changes whenever the file does: what to compare to see whether there is something new. Costs microseconds.

        Raises:
            RecordError: the file is gone or damaged.
        """
        with self._lock:
            database = self._current()
            try:
                (number,) = database.execute("PRAGMA data_version").fetchone()
            except _FAILURES as error:
                raise RecordError(f"{self.called}: is damaged ({_said(error)})") from error
            return (self._openings, number)

    def counts(self) -> dict[str, float]:
        """Steps ``written``, ``dropped`` and ``failed`` by the process that wrote last, and the ``time`` it did."""
        found: Any = {}
        for _, text in self._rows("SELECT key, value FROM meta WHERE key = 'counts' AND length(value) < 4096"):
            try:
                found = json.loads(text)
            except (ValueError, TypeError, RecursionError):
                self._note("its counts are damaged")
        if not isinstance(found, dict):
            return {}
        return {str(name): float(value) for name, value in found.items() if isinstance(value, int | float)}

    def points(self, first: int = 1, last: int | None = None, most: int | None = None) -> list[Point]:
        """The frames that cover the run without overlap: single steps at the end, coarser ones towards the start.

        Args:
            first, last: steps to cover; a frame that lies partly inside counts.
            most: thin out evenly to at most so many, 1 or more; first and last stay.

        Raises:
            RecordError: nothing can be read.
            ValueError: ``most`` is below 1.
        """
        if most is not None and most < 1:
            raise ValueError(f"most: found {most}, need at least 1")
        query = "SELECT tier, first, last, steps FROM frames ORDER BY tier, first LIMIT ?"
        rows = self._rows(query, (_MOST_ROWS,))
        tiers: dict[int, list[Point]] = {}
        for row in rows:
            if all(type(one) is int for one in row) and 0 <= row[0] < _TIERS and 1 <= row[1] <= row[2] and row[3] >= 1:
                tiers.setdefault(row[0], []).append(Point(*row))
            else:
                self._note("a frame is damaged (its step is no number)")
        chosen: list[Point] = []
        for tier in sorted(tiers):
            older = [point for point in tiers[tier] if not chosen or point.first < chosen[0].first]
            if older and chosen:  # a coarser frame that reaches into the finer ones takes their place
                end = older[-1].last
                chosen = [point for point in chosen if point.first > end]
            chosen = older + chosen
        chosen = [one for one in chosen if one.last >= first and (last is None or one.first <= last)]
        if most is not None and len(chosen) > most:
            picks = np.linspace(0, len(chosen) - 1, most).round().astype(int)
            chosen = [chosen[i] for i in dict.fromkeys(picks.tolist())]
        return chosen

    def steps(self) -> Array:
        """Last step of every point, int64, rising."""
        return np.array([point.last for point in self.points()], dtype=np.int64)

    def latest(self) -> Frame | None:
        """The newest step; None when nothing was recorded yet.

        Raises:
            RecordError: it cannot be read.
        """
        # Not max(last): with the index this is one descent, and a live page asks several times a second.
        rows = self._rows(
            "SELECT tier, first, last, steps, summary, arrays FROM frames WHERE tier = 0 ORDER BY first DESC LIMIT 1"
        )
        return self._frame(rows[0]) if rows else None

    def arrays(self, step: int) -> Frame:
        """The finest frame that covers ``step``.

        Raises:
            RecordError: no frame does, or it is damaged.
        """
        for tier in range(_TIERS):
            rows = self._rows(
                "SELECT tier, first, last, steps, summary, arrays FROM frames "
                "WHERE tier = ? AND first <= ? ORDER BY first DESC LIMIT 1",
                (tier, step),
            )
            if rows and isinstance(rows[0][2], int) and rows[0][2] >= step:
                return self._frame(rows[0])
        raise RecordError(f"{self.called}: has no step {step}")

    def summaries(
        self,
        first: int = 1,
        last: int | None = None,
        most: int | None = None,
        *,
        chosen: Sequence[Point] | None = None,
    ) -> tuple[list[Point], Array]:
        """Figures of every layer over the steps, without unpacking the experts.

        Args:
            first, last, most: see `points`.
            chosen: read these points instead.

        Returns:
            Points, and ``[P, 3, L, M]`` fp32: mean, least and largest of each `SUMMARY` column.
        """
        wanted = set(self.points(first, last, most) if chosen is None else chosen)
        found: list[tuple[Point, Array]] = []
        for row in self._some("summary", wanted):
            try:
                kept = self._summary(row[4])
            except RecordError as error:
                self._damaged(row, error)
                continue
            found.append((Point(*row[:4]), np.broadcast_to(kept, (3, *kept.shape[1:]))))
        found.sort(key=lambda one: one[0].first)
        empty = np.empty((0, 3, self.layers, len(SUMMARY)), dtype=np.float32)
        return [point for point, _ in found], np.stack([one for _, one in found]) if found else empty

    def series(
        self,
        layer: int,
        expert: int | None = None,
        *,
        first: int = 1,
        last: int | None = None,
        most: int = 2000,
        chosen: Sequence[Point] | None = None,
    ) -> Series:
        """Load and bias of an expert, or of all experts of a layer, over the steps.

        Args:
            layer: MoE layer, from 0.
            expert: None takes all.
            first, last, most: see `points`.
            chosen: read these points instead.

        Raises:
            ValueError: no such layer or expert.
            RecordError: nothing can be read.
        """
        if not 0 <= layer < self.layers or not (expert is None or 0 <= expert < self.experts):
            found, sizes = f"{layer}, {expert}", f"{self.layers} layers of {self.experts} experts"
            raise ValueError(f"layer, expert: found {found}, need those of {sizes}")
        wanted = set(self.points(first, last, most) if chosen is None else chosen)
        at: Any = slice(None) if expert is None else expert
        found_rows: list[tuple[Point, Array, Array, Array, Array]] = []
        for row in self._some("arrays", wanted):
            try:
                kept = Arrays.of(_blob(row[4]), self.shape)
                loads = [kept.loads(kind, layer)[at] for kind in range(3)]
                found_rows.append((Point(*row[:4]), *loads, kept.bias(layer)[at]))
            except RecordError as error:
                self._damaged(row, error)
        found_rows.sort(key=lambda one: one[0].first)
        size = (0,) if expert is not None else (0, self.experts)
        columns = [np.stack(column) if column else np.empty(size) for column in list(zip(*found_rows, strict=True))[1:]]
        if not found_rows:
            columns = [np.empty(size)] * 4
        return Series([row[0] for row in found_rows], *columns)

    # -- one frame ---------------------------------------------------------------------------------------------------

    def _some(self, column: str, wanted: set[Point]) -> list[tuple[Any, ...]]:
        """Rows of the wanted points, with one blob each."""
        rows: list[tuple[Any, ...]] = []
        for point in sorted(wanted):
            try:
                rows += self._rows(
                    f"SELECT tier, first, last, steps, {column} FROM frames WHERE tier = ? AND first = ?",
                    (point.tier, point.first),
                )
            except RecordError as error:
                why = str(error).removeprefix(f"{self.called}: ")
                self._note(f"steps {point.first} to {point.last} cannot be read ({why})")
        return [row for row in rows if row[:4] in wanted]

    def _damaged(self, row: tuple[Any, ...], error: RecordError) -> None:
        self._note(f"steps {row[1]} to {row[2]} are left out: {error}")

    def _summary(self, blob: Any) -> Array:
        """A summary with this version's columns; NaN in those the file does not have."""
        stored = unpack_summary(_blob(blob), self.shape, len(self.meta["summary"]))
        if self._columns == list(range(stored.shape[-1])):
            return stored
        known = [column for column in self._columns if column is not None]
        found = np.full((*stored.shape[:-1], len(SUMMARY)), np.nan, dtype=np.float32)
        found[..., [i for i, column in enumerate(self._columns) if column is not None]] = stored[..., known]
        return found

    def _frame(self, row: tuple[Any, ...]) -> Frame:
        tier, first, last, steps, summary, arrays = row
        if not all(type(one) is int for one in (tier, first, last, steps)):
            raise RecordError(f"{self.called}: a frame is damaged (its step is no number)")
        try:
            kept = Arrays.of(_blob(arrays), self.shape)
            return kept.frame(first, last, steps, self._summary(summary))
        except RecordError as error:
            raise RecordError(f"{self.called}: steps {first} to {last}: {error}") from error


def _blob(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise RecordError(f"the frame is damaged (found a {type(value).__name__}, need bytes)")
    return value


def _said(error: Exception) -> str:
    """What SQLite says of a damaged file, without the file's own text, which it repeats as if it were its own."""
    if isinstance(error, UnicodeDecodeError):
        return "a name in it is no text"
    return re.split(r"[:\"'(]| - ", str(error), maxsplit=1)[0].strip() or type(error).__name__


def _opened(uri: str) -> sqlite3.Connection:
    """A connection that believes nothing a strange file says, and writes nothing."""
    database = sqlite3.connect(uri, uri=True, timeout=5.0, check_same_thread=False)
    try:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
        for setting in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON", "mmap_size = 0"):
            database.execute(f"PRAGMA {setting}")
        database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except _FAILURES:
        database.close()
        raise
    return database
