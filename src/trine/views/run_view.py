"""One run's folder as the pages read it: while it grows, after a kill, damaged, or gone. Read-only, and without torch.

Nothing here raises for what a folder holds: what cannot be read is absent, and `RunView.notes` says why in a sentence.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from trine.balance.record_format import FILE_NAME, RecordError
from trine.balance.recorder_reader import RecorderReader
from trine.views.chart import plain
from trine.views.probe_view import FILE_NAME as PROBES
from trine.views.probe_view import MOST_PROBES, Probe

RUN_FORMAT = 1
"""Newest format_version of ``run.json`` that is read."""
MOST_RECORDS = 4096
"""Lines of a file that are kept in memory; of longer files every second, fourth, … one, and always the last."""
MOST_EVENTS = 16_384
"""The same of ``events.jsonl``, where an alert that has lost its end would seem to be on."""
_LONGEST_LINE = 1 << 20
_MOST_LAYERS = 4096
_LONGEST_FILE = 1 << 24  # of what is read whole
_PIECE = 1 << 20
_EVENTS = "events.jsonl"
_MOST_A_LOOK = 1 << 26  # bytes of a file read at once; the rest follows at the next look
_FOREIGN = "is no regular file and left out."
_AWAY = "is a link that leads out of the folders given to trine dash, and left out."
_COMPARED = 512  # bytes at the beginning, and before the place read up to, by which a file is known again

Record = Mapping[str, Any]


class NoRegularFile(OSError):
    """A folder, a pipe or a device where a file should be; ``args[0]`` goes on after the file's name."""


class LeadsAway(NoRegularFile):
    """A link whose target lies outside of the folders that may be shown."""


Roots = tuple[Path, ...]


def leads_away(path: Path, within: Roots) -> bool:
    """Whether links in a path lead out of some folders, whose own links are resolved; never where there are none."""
    if not within:
        return False
    real = Path(os.path.realpath(path))
    return not any(real.is_relative_to(root) for root in within)


def open_regular(path: Path, within: Roots = ()) -> IO[bytes]:
    """Open a file for reading; never waits for whoever would write to a pipe.

    Args:
        path: of the file.
        within: folders that it must lie in once its links are followed; it may lie anywhere where there are none.

    Raises:
        LeadsAway: it lies elsewhere; nothing was opened.
        NoRegularFile: it is no regular file; nothing was opened, so a device did nothing.
        OSError: absent, or cannot be read.
    """
    if within and os.path.lexists(path) and leads_away(path, within):
        raise LeadsAway(_AWAY)
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise NoRegularFile(_FOREIGN)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()  # it was replaced in between
    raise NoRegularFile(_FOREIGN)


class JsonLines:
    """Follows a file of one JSON object a line; reads only what was added since the last look.

    A torn last line waits for its end; other lines that are no JSON objects are counted in ``bad``; ``why``
    says what ``keep`` found wrong last. One line in ``stride`` is kept. A file that was replaced, cut back or written
    over in its place is read from its beginning. Anything but a regular file is not opened: a pipe would hold the page
    up for ever; ``foreign`` says why.

    Args:
        path: the file.
        most: lines that are kept.
        keep: what is kept of a line; a ValueError from it makes the line a bad one. The object itself by default.
        within: folders that links may lead to, as of `open_regular`.
    """

    def __init__(
        self,
        path: Path,
        most: int = MOST_RECORDS,
        keep: Callable[[Record], Any] | None = None,
        within: Roots = (),
    ) -> None:
        self.path, self.most, self._keep, self._within = path, most, keep, within
        self._forget()

    def _forget(self) -> None:
        self.bad, self.why = 0, ""
        self.foreign = ""
        self._identity: tuple[int, int] | None = None
        self._changed = -1  # when the file was, in nanoseconds
        self._head = self._tail = b""  # of what was read
        self._at, self._rest, self._seen, self.stride = 0, b"", 0, 1
        self._kept: list[Any] = []
        self._last: Any = None
        self._long = False

    def read(self) -> list[Any]:
        """All lines so far, oldest first, thinned to ``most``; empty where there is no such file."""
        try:
            with open_regular(self.path, self._within) as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._identity or status.st_size < self._at or not self._knows(file, status):
                    self._forget()  # replaced, or cut back by a run that took steps back
                    self._identity = identity
                self._changed = status.st_mtime_ns
                file.seek(self._at)
                end = self._at + _MOST_A_LOOK
                while self._at < end and (piece := file.read(_PIECE)):
                    self._at += len(piece)
                    self._head += piece[: _COMPARED - len(self._head)]
                    self._tail = (self._tail + piece[-_COMPARED:])[-_COMPARED:]
                    self._take(piece)
        except NoRegularFile as error:
            self._forget()
            self.foreign = str(error)
        except OSError:
            self._forget()
        beyond = self._last is not None and (not self._kept or self._kept[-1] is not self._last)
        return [*self._kept, self._last] if beyond and self._last is not None else list(self._kept)

    def _knows(self, file: IO[bytes], status: os.stat_result) -> bool:
        """Whether the file still begins with what was read of it, as one that only grew does."""
        if (status.st_size, status.st_mtime_ns) == (self._at, self._changed):
            return True
        if file.read(len(self._head)) != self._head:
            return False
        file.seek(self._at - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _take(self, piece: bytes) -> None:
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if self._long:  # the end of a line that was given up
                self._long = False
            else:
                self._line(line)
        if len(self._rest) > _LONGEST_LINE:
            self.bad += not self._long
            self._rest, self._long = b"", True

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self.bad += 1
            return
        try:
            found = found if self._keep is None else self._keep(found)
        except ValueError as error:
            self.bad, self.why = self.bad + 1, plain(error)
            return
        self._last = found
        if self._seen % self.stride == 0:
            self._kept.append(found)
            if len(self._kept) > self.most:
                self._kept, self.stride = self._kept[::2], self.stride * 2
        self._seen += 1


class RunView:
    """A run's folder. Safe to share between threads.

    Args:
        path: the folder; need not exist (any more).
        name: what it is called on the page; the folder's name by default.
        within: folders that links in it may lead to, without links of their own; anywhere where there are none.
    """

    def __init__(self, path: str | Path, name: str = "", within: Roots = ()) -> None:
        self.path, self.within = Path(path), within
        self.name = plain(name or self.path.resolve().name or str(self.path), 80) or "unnamed"
        self._lock = threading.RLock()
        self._lines: dict[str, JsonLines] = {}
        self._reader: RecorderReader | None = None
        self._why_no_reader = ""
        self._meta: tuple[tuple[int, int, int], dict[str, Any], str] | None = None
        self._evaluation: tuple[tuple[int, int, int], dict[str, Any], str] | None = None

    def close(self) -> None:
        """Let the files go."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
            self._reader = None
            self._lines.clear()

    # -- what is there -----------------------------------------------------------------------------------------------

    def problem(self) -> str:
        """Why nothing of it can be shown, in a sentence; empty when something can."""
        if not self.path.is_dir():
            gone = "is no folder" if self.path.exists() else "does not exist (any more)"
            return f"The run {self.name} cannot be shown: its folder {gone}."
        if leads_away(self.path, self.within):
            return (
                f"The run {self.name} cannot be shown: its folder is a link that leads out of the folders given to "
                "trine dash; give it the folder it leads to as well."
            )
        if not any((self.path / name).exists() for name in ("run.json", "metrics.jsonl", FILE_NAME)):
            return (
                f"{self.name} is no run: a run's folder has run.json, metrics.jsonl or {FILE_NAME}, this one has none."
            )
        newer = self._meta_of()[1]
        return newer if "newer" in newer else ""

    def notes(self) -> list[str]:
        """What could not be read so far, in sentences."""
        with self._lock:
            found = [self._meta_of()[1], self._why_no_reader]
            found += [self._evaluation[2]] if self._evaluation is not None else []
            found += [plain(note) for note in self._reader.notes] if self._reader is not None else []
            for name, lines in self._lines.items():
                if name == _EVENTS and lines.stride > 1:
                    found.append(f"{name}: so long that only one line in {lines.stride} is shown.")
                if lines.foreign:
                    found.append(f"{name} {lines.foreign}")
                if lines.bad:
                    why = f" ({lines.why})" if lines.why else ""
                    found.append(f"{name}: {lines.bad} damaged line{'s' if lines.bad > 1 else ''} left out{why}.")
            return [one for one in dict.fromkeys(found) if one]

    def version(self) -> tuple[Any, ...]:
        """Changes whenever one of its files does; costs microseconds."""
        found: list[Any] = []
        for name in dict.fromkeys(("run.json", "metrics.jsonl", "events.jsonl", PROBES, *sorted(self._lines))):
            found.append(_stamp(self.path / name))
        reader = self.recorder()
        try:
            found.append(reader.version() if reader is not None else self._why_no_reader)
        except RecordError as error:
            found.append(str(error))
        return tuple(found)

    def written(self) -> int:
        """When one of its files was last written to, nanoseconds since 1970; 0 where there is none."""
        names = ("run.json", "metrics.jsonl", _EVENTS, FILE_NAME, f"{FILE_NAME}-wal")
        return max(_stamp(self.path / name)[2] for name in names)

    def stepped(self) -> int:
        """When a step was last written, nanoseconds since 1970; 0 where none was."""
        names = ("metrics.jsonl",) if (self.path / "metrics.jsonl").exists() else (FILE_NAME, f"{FILE_NAME}-wal")
        return max(_stamp(self.path / name)[2] for name in names)

    # -- files -------------------------------------------------------------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """``run.json``; empty when it cannot be read."""
        return self._meta_of()[0]

    def lines(self, name: str) -> list[Record]:
        """A file of one JSON object a line, thinned to `MOST_RECORDS`; empty when there is none.

        Args:
            name: of the file, inside the folder.

        Raises:
            ValueError: the name leads elsewhere.
        """
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"name: found {name!r}, need a file's name")
        with self._lock:
            most = MOST_EVENTS if name == _EVENTS else MOST_RECORDS
            return self._lines.setdefault(name, JsonLines(self.path / name, most, None, self.within)).read()

    def records(self) -> list[Record]:
        """``metrics.jsonl``: one `trine.train.metrics.StepRecord` a step; only those with a whole step number."""
        return [one for one in self.lines("metrics.jsonl") if type(one.get("step")) is int]

    def events(self) -> list[Record]:
        """``events.jsonl``."""
        return self.lines(_EVENTS)

    def evaluation(self) -> dict[str, Any]:
        """``eval.json``; empty when there is none (yet) or it cannot be read."""
        path = self.path / "eval.json"
        stamp = _stamp(path)
        with self._lock:
            if self._evaluation is None or self._evaluation[0] != stamp:
                self._evaluation = (stamp, *_read_meta(path, self.within))
            return self._evaluation[1]

    def probes(self) -> list[Probe]:
        """Looks inside the model, ``probes.jsonl``, thinned to `MOST_PROBES`, by rising step."""
        with self._lock:
            lines = self._lines.get(PROBES)
            if lines is None:
                lines = self._lines[PROBES] = JsonLines(self.path / PROBES, MOST_PROBES, Probe.of, self.within)
            found = lines.read()
        return list({one.step: one for one in sorted(found, key=lambda one: one.step)}.values())

    def recorder(self) -> RecorderReader | None:
        """The recorder's file; None when there is none or it cannot be read, which `notes` explains."""
        with self._lock:
            path = self.path / FILE_NAME
            beside = [one for end in ("", "-wal", "-shm") if os.path.lexists(one := f"{path}{end}")]
            if any(leads_away(Path(one), self.within) for one in beside):
                if self._reader is not None:
                    self._reader.close()
                self._reader, self._why_no_reader = None, f"{FILE_NAME} {_AWAY}"
                return None
            if self._reader is not None:
                return self._reader
            self._why_no_reader = ""
            try:
                if path.exists():
                    self._reader = RecorderReader(path, FILE_NAME)
                else:
                    self._why_no_reader = f"{FILE_NAME} does not exist: the load of experts was not recorded (yet)."
            except RecordError as error:
                self._why_no_reader = plain(f"{error}.")
            except OSError as error:
                self._why_no_reader = plain(f"{FILE_NAME}: cannot be read ({error.strerror}).")
            return self._reader

    def config(self, *names: str) -> Any:
        """A value of ``run.json``, name inside name; None when it is not there."""
        found: Any = self.meta()
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _meta_of(self) -> tuple[dict[str, Any], str]:
        path = self.path / "run.json"
        stamp = _stamp(path)
        with self._lock:
            if self._meta is None or self._meta[0] != stamp:
                self._meta = (stamp, *_read_meta(path, self.within))
            return self._meta[1], self._meta[2]


def moe_layers(run: RunView, count: int) -> range:
    """The model's numbers of its ``count`` recorded MoE layers, as ``run.json`` tells; empty where it does not.

    They are the layers after the dense ones. A layer that predicts one token more has the number after the last.
    """
    dense, layers = run.config("model", "dense_layers"), run.config("model", "layers")
    if type(dense) is not int or type(layers) is not int or not 0 <= dense <= layers <= _MOST_LAYERS:
        return range(0)
    return range(dense, dense + count) if dense + count == layers + bool(run.config("model", "mtp")) else range(0)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _read_meta(path: Path, within: Roots) -> tuple[dict[str, Any], str]:
    try:
        with open_regular(path, within) as file:
            text = file.read(_LONGEST_FILE + 1)
        if len(text) > _LONGEST_FILE:
            return {}, f"{path.name} is too large to be a run's."
        found = json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        return {}, ""
    except NoRegularFile as error:
        return {}, f"{path.name} {error}"
    except (OSError, ValueError, RecursionError):
        return {}, f"{path.name} is damaged and left out."
    version = found.get("format_version") if isinstance(found, dict) else None
    if type(version) is not int:
        return {}, f"{path.name} is damaged (no format_version) and left out."
    if version > RUN_FORMAT:
        return {}, (
            f"This run was written by a newer version of Trine (format_version {version}; {RUN_FORMAT} is the newest "
            "this one reads): update Trine to look at it."
        )
    return found, ""


def find_runs(paths: Sequence[str | Path], most: int = 2000) -> list[RunView]:
    """The runs of some folders: each a run's own, or a folder of runs, newest first.

    A folder that is neither is one run, whose `RunView.problem` says so. Links in them may lead from one of these
    folders to another, and nowhere else.
    """
    within = tuple(Path(os.path.realpath(one)) for one in paths)
    found: dict[Path, RunView] = {}
    for one in map(Path, paths):
        inside: list[tuple[float, Path]] = []
        if one.is_dir() and not _is_run(one):
            for child in one.iterdir():
                if _is_run(child):
                    inside.append((-max(_stamp(child / name)[2] for name in _MARKS), child))
        for child in [path for _, path in sorted(inside)] or [one]:
            if len(found) < most:
                found.setdefault(child.resolve(), RunView(child, within=within))
    return list(found.values())


_MARKS = ("run.json", "metrics.jsonl", FILE_NAME)


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in _MARKS)
