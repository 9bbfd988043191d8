"""Keeps the load and bias of every expert at every step, in one file of the run's folder, without holding training up.

The file is an SQLite database in WAL mode: whoever kills the process, and when, finds every frame that was committed;
others read it while it is written. What it holds is in `record_format`, how to read it in `recorder_reader`.

Frames come in tiers. Tier 0 has the last ``keep`` steps one by one; tier 1 has every ten steps as one frame, again the
last ``keep`` of them; tier 2 every hundred, and so on. A frame of many steps has, for each expert, the mean of its
loads and biases and its least and largest load, and for each figure of a layer mean, least and largest: peaks are not
lost.
The file grows with the logarithm of the steps: a million of them are four tiers, 4 000 frames.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trine._log import logger
from trine.balance.record_format import (
    APPLICATION_ID,
    FORMAT_VERSION,
    MARGIN_LEVELS,
    MAX_CELLS,
    SCHEMA,
    SUMMARY,
    TIER,
    Arrays,
    Frame,
    HostWindow,
    RecordError,
    combine,
    pack_summary,
    pack_to_fit,
    read_meta,
    unpack_summary,
)
from trine.balance.summary import Summaries
from trine.balance.window import Window

_AGAIN = 100  # frames after which the finest precision is tried again
_PAGE = 8192  # bytes of a database page

Listener = Callable[[Frame], None]
"""Called with each step's frame by the recorder's thread; what it raises is logged once and otherwise ignored."""


@dataclass(frozen=True)
class Counts:
    """What became of the steps handed to a recorder."""

    written: int = 0
    dropped: int = 0  # thrown away unwritten because the disk did not keep up
    failed: int = 0  # the file could not be written


class _Staged:
    """A window on its way to the host: tensors there already, or a copy under way on a side stream."""

    def __init__(self, step: int, window: Window) -> None:
        self.step = step
        self.window = window
        self.buffer: Tensor | None = None
        self.arrived: Any = None

    def read(self) -> HostWindow:
        """The window's arrays, once they are there; waits for the copy, so never call it from training."""
        if self.buffer is None:
            return HostWindow.of(self.window)
        self.arrived.synchronize()
        found, at = {}, 0
        for one in fields(Window):
            like = getattr(self.window, one.name)
            size = like.numel() * like.element_size()
            # a copy, since the buffer goes back to be filled again
            found[one.name] = self.buffer[at : at + size].clone().view(like.dtype).view(like.shape).numpy()
            at += size
        return HostWindow(**found)


def _flat(window: Window) -> Tensor:
    """All of a window as bytes, one array after another, so that one copy takes it along."""
    return torch.cat([getattr(window, one.name).contiguous().view(-1).view(torch.uint8) for one in fields(Window)])


class _Staging:
    """Copies windows of a card to pinned memory: one copy a step, on its own stream, which nobody waits for."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._free: deque[Tensor] = deque()

    def take(self, step: int, window: Window) -> _Staged:
        """Begin to copy a window; returns at once."""
        staged = _Staged(step, window)
        if not window.loads_LE.is_cuda:
            return staged
        device = window.loads_LE.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        flat = _flat(window)
        try:
            staged.buffer = self._free.pop()
        except IndexError:
            staged.buffer = torch.empty(len(flat), dtype=torch.uint8, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            staged.buffer.copy_(flat, non_blocking=True)
            staged.arrived = torch.cuda.Event(blocking=True)
            staged.arrived.record(self._stream)
        flat.record_stream(self._stream)
        return staged

    def give_back(self, staged: _Staged) -> None:
        """Its buffer may be filled again."""
        # Copies into one buffer follow one another on the stream, so one that is still under way does no harm.
        if staged.buffer is not None:
            self._free.append(staged.buffer)


class Recorder:
    """Writes windows to a file from a thread of its own.

    `record` only hands the window over: it never waits for the disk, the thread or the card. When the thread falls
    ``depth`` windows behind, the oldest one is thrown away and counted.

    Args:
        path: the file; made when absent, gone on with when it is this model's.
        layers, experts, top_k: of the model; layers are its MoE layers.
        ranks: expert-parallel ranks, for `rank_overload`.
        keep: frames that each tier keeps, at least 20.
        depth: windows that may wait.
        listeners: called with each step's frame, see `Listener`.

    Raises:
        RecordError: the file is another model's, damaged, foreign or of a newer format, or cannot be written to.
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        layers: int,
        experts: int,
        top_k: int,
        ranks: int = 1,
        keep: int = 1000,
        depth: int = 32,
        listeners: Sequence[Listener] = (),
    ) -> None:
        if keep < 2 * TIER:
            raise ValueError(f"keep: found {keep}, need at least {2 * TIER} frames")
        if depth < 1:
            raise ValueError(f"depth: found {depth}, need at least 1")
        if layers * experts > MAX_CELLS:
            raise ValueError(f"layers, experts: found {layers} x {experts}, need at most {MAX_CELLS} experts in all")
        self.path = Path(path)
        self.keep, self.depth, self.listeners = keep, depth, tuple(listeners)
        self._summaries = Summaries(layers, experts, top_k, ranks)
        self._meta = {"layers": layers, "experts": experts, "top_k": top_k, "ranks": ranks}
        _open(self.path, self._meta, keep).close()
        self._staging = _Staging()
        self._queue: deque[_Staged | Callable[[], None]] = deque()
        self._windows = 0  # of the queue
        self._wake = threading.Condition()
        self._closing = False
        self._counts = {"written": 0, "dropped": 0, "failed": 0}
        self._kept = dict(self._counts)  # what the file has
        self._told: set[str] = set()
        self._database: sqlite3.Connection | None = None
        self._precision, self._since = [0, 0], 0  # of frames of one step, of many
        self._last = 0  # step
        self._thread = threading.Thread(target=self._work, name="trine-recorder", daemon=True)
        self._thread.start()

    # -- what training calls -----------------------------------------------------------------------------------------

    def record(self, step: int, window: Window) -> None:
        """Hand over the window of step ``step`` (steps done, from 1). Its tensors must not be written to any more.

        Raises:
            ValueError: the recorder is closed, or a step below 1.
        """
        if step < 1 or self._closing:
            raise ValueError(f"step: found {step}, need 1 or more" if step < 1 else f"{self.path}: recorder is closed")
        staged = self._staging.take(step, window)
        with self._wake:
            if self._windows == self.depth:
                oldest = next(one for one in self._queue if isinstance(one, _Staged))
                self._queue.remove(oldest)
                self._staging.give_back(oldest)
                self._windows -= 1
                self._counts["dropped"] += 1
            self._queue.append(staged)
            self._windows += 1
            self._wake.notify()

    def forget_after(self, step: int) -> None:
        """Drop everything after ``step``, which will be made again. Handed to the thread like a window."""
        self._ask(lambda: self._forget(step))

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything handed over so far is written; False when it took longer than ``timeout`` seconds."""
        done = threading.Event()
        self._ask(done.set)
        return done.wait(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Write what is left and end the thread; after ``timeout`` seconds it is left to itself. Safe to repeat."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)

    @property
    def counts(self) -> Counts:
        """What became of the steps so far."""
        return Counts(**self._counts)

    def _ask(self, what: Callable[[], None]) -> None:
        with self._wake:
            self._queue.append(what)
            self._wake.notify()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    break
                job = self._queue.popleft()
                self._windows -= isinstance(job, _Staged)
            try:
                if isinstance(job, _Staged):
                    self._one(job)
                else:
                    job()
            except Exception as error:
                # Whatever is wrong with the file must not end a training run; it is counted, and told once a kind.
                if isinstance(job, _Staged):
                    self._counts["failed"] += 1
                    self._keep_counts()  # those of its own transaction are gone with it
                self._tell(f"cannot be written ({error})", type(error).__name__)
        if self._database is not None:
            self._keep_counts()
            with contextlib.suppress(sqlite3.Error):
                self._database.close()

    def _keep_counts(self) -> None:
        """Write the counts where the file has others; where that fails too, the next step or the end tries again."""
        if self._database is not None and self._kept != self._counts:
            counts = dict(self._counts)
            with contextlib.suppress(sqlite3.Error), self._database:
                self._write_counts(self._database, counts)
                self._kept = counts

    def _write_counts(self, database: sqlite3.Connection, counts: dict[str, int]) -> None:
        values = json.dumps({**counts, "time": time.time()})
        database.execute("INSERT OR REPLACE INTO meta VALUES ('counts', ?)", (values,))

    def _tell(self, what: str, kind: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("recorder %s: %s; training goes on", self.path, what)

    def _one(self, staged: _Staged) -> None:
        try:
            window = staged.read()
        finally:
            self._staging.give_back(staged)
        frame = self._summaries.step(staged.step, window)
        for listener in self.listeners:
            try:
                listener(frame)
            except Exception as error:
                self._tell(f"a listener failed: {type(error).__name__}: {error}", f"listener {type(error).__name__}")
        self._write(frame)
        self._counts["written"] += 1

    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            self._database = _open(self.path, self._meta, self.keep)
            (newest,) = self._database.execute("SELECT max(last) FROM frames WHERE tier = 0").fetchone()
            self._last = newest or 0
        return self._database

    def _write(self, frame: Frame) -> None:
        """One step and whatever it completes, in one transaction."""
        database = self._connection()
        if frame.last <= self._last:
            raise RecordError(f"{self.path}: found step {frame.last} after step {self._last}, need forget_after first")
        if self._last and frame.first != self._last + 1:
            self._summaries.restart()
        self._since += 1
        if self._since % _AGAIN == 0:
            self._precision = [0, 0]
        with database:
            self._complete(database, frame.first)
            self._insert(database, 0, frame)
            stale = ((tier, frame.last - self.keep * TIER**tier) for tier in range(_tiers(frame.last)))
            database.executemany("DELETE FROM frames WHERE tier = ? AND last <= ?", stale)
            counts = {**self._counts, "written": self._counts["written"] + 1}
            self._write_counts(database, counts)
        self._last, self._kept = frame.last, counts

    def _insert(self, database: sqlite3.Connection, tier: int, frame: Frame) -> None:
        many = tier > 0
        arrays, self._precision[many] = pack_to_fit(frame, self._precision[many])
        row = (tier, frame.first, frame.last, frame.steps, pack_summary(frame.summary_KLM), arrays)
        # A run that goes back to the last step of a block and on from there makes the block's frame once more.
        verb = "INSERT OR REPLACE" if many else "INSERT"
        database.execute(f"{verb} INTO frames VALUES (?, ?, ?, ?, ?, ?)", row)

    def _complete(self, database: sqlite3.Connection, step: int) -> None:
        """Before the first step of a new block of ten (hundred, …): make one frame of the block before it."""
        for tier in range(1, _tiers(step)):
            span = TIER**tier
            block = (self._last - 1) // span
            if not self._last or (step - 1) // span == block:
                return
            rows = database.execute(
                "SELECT first, last, steps, summary, arrays FROM frames "
                "WHERE tier = ? AND first > ? AND last <= ? ORDER BY first",
                (tier - 1, block * span, (block + 1) * span),
            ).fetchall()
            if rows:
                self._insert(database, tier, combine([self._frame(row) for row in rows]))

    def _frame(self, row: tuple[int, int, int, bytes, bytes]) -> Frame:
        first, last, steps, summary, arrays = row
        shape = self._summaries.shape
        return Arrays.of(arrays, shape).frame(first, last, steps, unpack_summary(summary, shape, len(SUMMARY)))

    def _forget(self, step: int) -> None:
        database = self._connection()
        with database:
            database.execute("DELETE FROM frames WHERE last > ?", (step,))
        (newest,) = database.execute("SELECT max(last) FROM frames WHERE tier = 0").fetchone()
        self._last = newest or 0
        self._summaries.restart()


def _tiers(step: int) -> int:
    """Tiers that a run of ``step`` steps has."""
    return len(str(step))


def _open(path: Path, meta: dict[str, int], keep: int) -> sqlite3.Connection:
    """A connection that may write; the file is made, or checked to be this model's."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists() or path.stat().st_size == 0
        database = sqlite3.connect(path, timeout=5.0)
    except (OSError, sqlite3.Error) as error:
        raise RecordError(f"{path}: cannot be written to ({error})") from error
    try:
        database.execute("PRAGMA trusted_schema = OFF")
        if fresh:
            _create(database, meta, keep)
        else:
            found = read_meta(database, path)
            for name, value in meta.items():
                if found[name] != value and name != "ranks":
                    raise RecordError(f"{path}: found {name} {found[name]}, this model has {value}")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA journal_size_limit = 8388608")
    except sqlite3.Error as error:
        database.close()
        what = "cannot be written to" if isinstance(error, sqlite3.OperationalError) else "is damaged"
        raise RecordError(f"{path}: {what} ({error})") from error
    except RecordError:
        database.close()
        raise
    return database


def _create(database: sqlite3.Connection, meta: dict[str, int], keep: int) -> None:
    database.execute(f"PRAGMA page_size = {_PAGE}")
    database.execute("PRAGMA journal_mode = WAL")
    values = {**meta, "keep": keep, "summary": list(SUMMARY), "margin_levels": list(MARGIN_LEVELS)}
    with database:
        database.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.values():
            database.execute(statement)
        rows = [(name, json.dumps(value)) for name, value in values.items()]
        database.executemany("INSERT INTO meta VALUES (?, ?)", rows)
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
