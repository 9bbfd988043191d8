"""The folder of one run: who may write to it, its records, its events, its metrics.

Line files (``metrics.jsonl``, ``events.jsonl``) are appended to line by line, so that others can follow them;
everything else is written whole. One process at a time: a lock that the operating system drops when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

from trine.data._files import write_atomically
from trine.train.checkpoint import list_checkpoints
from trine.train.errors import RunError

FORMAT_VERSION = 1
_LOCK = "lock"


class RunFolder:
    """A run's folder, held exclusively until `close` (or the end of a ``with``).

    A folder made here in which no run has begun when an error ends the ``with`` is removed again.

    Args:
        path: the folder; made when absent.

    Raises:
        RunError: another process trains in it, or it cannot be written to.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._made = [one for one in (self.path, *self.path.parents) if not one.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] | None = open(self.path / _LOCK, "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written to ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            self._lock.close()
            raise RunError(f"{self.path}: in use by {holder}; wait for it, or choose another --run") from error
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and self._made and not self.has_run:
            shutil.rmtree(self.path, ignore_errors=True)
            for parent in self._made[1:]:
                with contextlib.suppress(OSError):  # somebody else's run is in there by now
                    parent.rmdir()
        self.close()

    def close(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def has_run(self) -> bool:
        """Whether a run has begun here."""
        return (self.path / "run.json").exists()

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write ``name`` whole, with this format's version in it."""
        self.write_text(name, json.dumps({"format_version": FORMAT_VERSION, **value}, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write ``name`` whole."""
        try:
            write_atomically(self.path / name, text.encode())
        except ValueError as error:
            raise RunError(str(error)) from error

    def event(self, kind: str, **details: Any) -> None:
        """Append one line to ``events.jsonl``: time, kind, details."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._append("events.jsonl", {"time": now, "kind": kind, **details})

    def metric(self, record: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``."""
        self._append("metrics.jsonl", record)

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        try:
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(value) + "\n")
        except OSError as error:
            raise RunError(f"{self.path / name}: cannot be written ({error.strerror})") from error

    def forget_metrics_after(self, step: int) -> int:
        """Drop the metrics of steps after ``step`` (they will be made again) and a torn last line.

        Returns:
            Lines dropped.
        """
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return 0
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [json.dumps(record) for record in _records(lines) if record.get("step", 0) <= step]
        if len(kept) < len(lines):
            self.write_text("metrics.jsonl", "".join(line + "\n" for line in kept))
        return len(lines) - len(kept)


def _records(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def read_json(path: Path) -> dict[str, Any]:
    """Read a record of a run.

    Raises:
        RunError: absent, damaged, or written by a newer version; the message names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{path}: does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: damaged ({error})") from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if not isinstance(version, int):
        raise RunError(f"{path}: damaged (no format_version)")
    if version > FORMAT_VERSION:
        raise RunError(
            f"{path}: format_version {version} is newer than {FORMAT_VERSION}, the newest this version reads"
        )
    return dict(value)


def free_name(runs: Path, base: str) -> str:
    """``base``, or ``base-2``, ``base-3`` … when folders of these names exist in ``runs``."""
    name, number = base, 1
    while (runs / name).exists():
        number += 1
        name = f"{base}-{number}"
    return name


def newest_run(runs: Path, base: str) -> str | None:
    """Of ``base``, ``base-2``, …: the one that was begun or saved last; None when there is none."""
    found = []
    for path in runs.glob(f"{base}*"):
        rest = path.name.removeprefix(base)
        if (rest == "" or (rest[:1] == "-" and rest[1:].isdigit())) and (path / "run.json").exists():
            times = [one.stat().st_mtime_ns for _, one in list_checkpoints(path / "checkpoints")]
            found.append((max([*times, (path / "run.json").stat().st_mtime_ns]), path.name))
    return max(found)[1] if found else None
