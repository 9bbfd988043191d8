"""Runs of a study side by side: each is a command of its own, so that none shares threads or memory with another."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Job:
    """One run of a study as a command of its own."""

    name: str
    words: Sequence[str]  # the command line
    log: Path  # where all it prints goes


def study_jobs(config: StudyConfig, runs: Sequence[tuple[str, int]], tokens: int, threads: int) -> list[Job]:
    """The runs of a curriculum study as jobs; each prints into ``ARM-SEED.log`` in the study's folder."""
    return [
        Job(
            f"{arm}, seed {seed}",
            command(config, arm, seed, tokens, threads),
            Path(config.folder) / f"{arm}-{seed}.log",
        )
        for arm, seed in runs
    ]


def run_side_by_side(jobs: Sequence[Job], at_once: int, say: Callable[[str], Any], again: str = "trine study") -> None:
    """Run all of ``jobs``, ``at_once`` at a time.

    Args:
        jobs: what to run, in this order.
        at_once: how many at a time.
        say: told of each beginning and end.
        again: the command that goes on, for the message of an interruption.

    Raises:
        RunError: a run failed; the others that were under way are ended at their next step, saved.
        Interrupted: a signal came; the runs under way are saved.
    """
    waiting = list(jobs)
    going: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    with _stopped_by_signals() as stopped:
        try:
            while waiting or going:
                while waiting and len(going) < at_once and not stopped:
                    job = waiting.pop(0)
                    say(f"study: {job.name}")
                    with open(job.log, "ab") as log:
                        process = subprocess.Popen(
                            list(job.words),
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,  # a Ctrl-C is for us, who pass it on once
                        )
                    going[job.name] = job, process
                if stopped:
                    raise Interrupted(f"study interrupted; its runs are saved; go on with the same `{again}` command")
                for name, (job, process) in list(going.items()):
                    if process.poll() is not None:
                        del going[name]
                        _check(process.returncode, job)
                        say(f"study: {name} is done")
                time.sleep(POLL)
        finally:
            for _, process in going.values():
                process.send_signal(signal.SIGTERM)
            for _, process in going.values():
                process.wait()


def _check(code: int, job: Job) -> None:
    if code:
        said = job.log.read_text(errors="replace").strip().splitlines() or ["nothing said"]
        raise RunError(f"study: {job.name} failed ({said[-1]}); all it said is in {job.log}")


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
