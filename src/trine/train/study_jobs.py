"""Runs of a study side by side: each is a command of its own, so that none shares threads or memory with another."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from trine.train.errors import Interrupted, RunError
from trine.train.study_config import StudyConfig

POLL = 0.2  # seconds between two looks at what is running


def command(config: StudyConfig, arm: str, seed: int, tokens: int, threads: int) -> list[str]:
    """The command line of one run of a study."""
    words = [sys.executable, "-m", "trine.cli", "study", "curriculum", "--arms", arm, "--seed", str(seed)]
    for name in ("folder", "preset", "longest", "seeds", "device"):
        words += [f"--{name}", str(getattr(config, name))]
    words += ["--source", config.source] if config.source else []
    return [*words, "--jobs", "1", "--threads", str(threads), "--tokens", str(tokens), "--more", *config.more]


def run_side_by_side(
    config: StudyConfig,
    runs: Sequence[tuple[str, int]],
    jobs: int,
    tokens: int,
    threads: int,
    say: Callable[[str], Any],
) -> None:
    """Run all of ``runs``, ``jobs`` at a time; what each prints goes to ``ARM-SEED.log`` in the study's folder.

    Raises:
        RunError: a run failed; the others that were under way are ended at their next step, saved.
        Interrupted: a signal came; the runs under way are saved.
    """
    waiting = list(runs)
    going: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    with _stopped_by_signals() as stopped:
        try:
            while waiting or going:
                while waiting and len(going) < jobs and not stopped:
                    arm, seed = waiting.pop(0)
                    say(f"study: {arm}, seed {seed}, {tokens:,} tokens")
                    with open(_log(config, arm, seed), "ab") as log:
                        going[arm, seed] = subprocess.Popen(
                            command(config, arm, seed, tokens, threads),
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,  # a Ctrl-C is for us, who pass it on once
                        )
                if stopped:
                    raise Interrupted(
                        "study interrupted; its runs are saved; go on with the same `trine study` command"
                    )
                for run, process in list(going.items()):
                    if process.poll() is not None:
                        del going[run]
                        _check(process.returncode, run, _log(config, *run))
                        say(f"study: {run[0]}, seed {run[1]} is done")
                time.sleep(POLL)
        finally:
            for process in going.values():
                process.send_signal(signal.SIGTERM)
            for process in going.values():
                process.wait()


def _check(code: int, run: tuple[str, int], log: Path) -> None:
    if code:
        said = log.read_text(errors="replace").strip().splitlines() or ["nothing said"]
        raise RunError(f"study: {run[0]}, seed {run[1]} failed ({said[-1]}); all it said is in {log}")


def _log(config: StudyConfig, arm: str, seed: int) -> Path:
    return Path(config.folder) / f"{arm}-{seed}.log"


@contextmanager
def _stopped_by_signals() -> Iterator[list[int]]:
    """A list that SIGINT and SIGTERM put their number into."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    old: dict[int, Any] = {}
    try:
        for one in (signal.SIGINT, signal.SIGTERM):
            old[one] = signal.signal(one, note)
    except ValueError:  # not the main thread: signals are not ours
        pass
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
