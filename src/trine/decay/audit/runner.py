"""Targets in processes of their own: whatever one does, crash, hang or fail to import, becomes a verdict."""

from __future__ import annotations

import datetime
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trine.decay.audit.examine import FINDING, NOT_JUDGED, Verdict, select

# A target that takes its process down more often than this is not asked further.
RESTARTS = 5
# Seconds for one input, and for all probes of a target, on a CPU and on a card, where kernels are compiled first.
TIMEOUTS = {"cpu": 60.0, "cuda": 120.0}
BUDGETS = {"cpu": 600.0, "cuda": 240.0}
# A probe takes no further input once it has had this share of the time for all.
PATIENCE = 0.2
# Of what a worker wrote to its standard error, this much of the end is looked at.
TAIL_BYTES = 65_536


@dataclass
class Report:
    """All verdicts on one target.

    Attributes:
        target: as it was named; name, version, machine, versions: as the loaded target says.
        verdicts: in the order of the probes.
        seconds: of wall time.
    """

    target: str
    name: str = ""
    version: str = ""
    form: str = ""
    device: str = "cpu"
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0
    date: str = ""

    @property
    def findings(self) -> list[Verdict]:
        """Verdicts that are findings."""
        return [v for v in self.verdicts if v.verdict == FINDING]


@dataclass
class _Child:
    """What is known of a running process from its events."""

    probe: str = ""
    case: str = ""
    tried: int = 0
    loaded: bool = False
    refused: str = ""
    finished: bool = False
    lost: bool = False
    memory: dict[str, Any] = field(default_factory=dict)


def audit(
    targets: Sequence[str],
    *,
    device: str = "cpu",
    quick: bool = False,
    probes: Sequence[str] = (),
    timeout: float | None = None,
    budget: float | None = None,
    jobs: int = 0,
    on_verdict: Callable[[str, Verdict], None] = lambda target, verdict: None,
) -> list[Report]:
    """Audit targets, each in a process of its own.

    Args:
        targets: names or MODULE:FUNCTION, see :func:`trine.decay.audit.target.load`.
        device: "cpu" or "cuda".
        quick: fewer and smaller cases.
        probes: names, all for none.
        timeout: seconds that one case may take before it counts as a hang (None: 60 on a CPU, 120 on a card).
        budget: seconds for all probes of a target (None: 600 on a CPU, 240 on a card). A probe takes no further input
            after a fifth of it; what is not reached is "not judged". It is never a finding.
        jobs: targets at a time (0: two on a CPU, one on a card).
        on_verdict: called as they come, from other threads.

    Raises:
        ValueError: unknown probes; times that are no positive numbers, or a negative number of jobs.
    """
    names = [p.name for p in select(probes)]
    kind = device.partition(":")[0]
    limit = TIMEOUTS.get(kind, 60.0) if timeout is None else timeout
    total = BUDGETS.get(kind, 600.0) if budget is None else budget
    for what, value in (("timeout", limit), ("budget", total)):
        if not 0 < value < math.inf:
            raise ValueError(f"{what}: found {value:g}, need a positive number of seconds")
    if jobs < 0:
        raise ValueError(f"jobs: found {jobs}, need 0 (choose) or more")
    card = device.startswith("cuda")
    at_once = jobs or (1 if card else min(2, len(targets), os.cpu_count() or 1))
    threads = 0 if card else max(1, (os.cpu_count() or 1) // at_once)
    with ThreadPoolExecutor(at_once) as pool:
        work = [
            pool.submit(_audit_one, t, names, device, quick, limit, total, threads, lambda v, t=t: on_verdict(t, v))  # type: ignore[misc]
            for t in targets
        ]
        return [w.result() for w in work]


def _audit_one(
    target: str,
    probes: list[str],
    device: str,
    quick: bool,
    timeout: float,
    budget: float,
    threads: int,
    on_verdict: Callable[[Verdict], None],
) -> Report:
    start, report = time.monotonic(), Report(target, target, device=device)
    late = f"the time for all probes ({budget:g} s) was over"
    report.date = datetime.datetime.now(datetime.UTC).date().isoformat()
    questions = {p.name: p.question for p in select()}
    memory: dict[str, Any] = {}

    def add(verdict: Verdict) -> None:
        report.verdicts.append(verdict)
        on_verdict(verdict)

    for attempt in range(RESTARTS + 1):
        left = [p for p in probes if p not in {v.probe for v in report.verdicts}]
        if not left:
            break
        job = {
            "target": target, "device": device, "quick": quick, "threads": threads, "probes": left, "memory": memory,
            "done": [asdict(v) for v in report.verdicts], "shrink": 2.0 if quick else 6.0,
            "patience": PATIENCE * budget,
        }  # fmt: skip
        child, end = _watch(job, timeout, start + budget, report, add)
        memory = child.memory
        if child.finished:
            break
        if child.lost and attempt < RESTARTS:
            continue  # its verdict is there; the next process finds the device as it should be
        if end == LATE:
            left = [p for p in left if p not in {v.probe for v in report.verdicts}]
            if child.probe in left and child.tried > 1:
                add(Verdict(child.probe, questions[child.probe], NOT_JUDGED, f"{late} at its input {child.tried}"))
            _close(report, left, questions, late, add)
            break
        if child.refused or not child.loaded:
            text = child.refused or f"{end} while it was imported"
            add(Verdict(left[0], questions[left[0]], FINDING, text))
            _close(report, left[1:], questions, f"the target cannot be used: {text}", add)
            break
        probe = child.probe or left[0]
        if not child.lost:
            script = _crash_script(target, probe, child, device)
            add(Verdict(probe, questions[probe], FINDING, end, case=child.case, script=script))
        if probe == "contract" or attempt == RESTARTS:
            reason = "plain inputs already do this: see contract" if probe == "contract" else "stopped too often"
            _close(report, [p for p in left if p != probe], questions, reason, add)
            break
    report.verdicts.sort(key=lambda v: probes.index(v.probe))
    report.seconds = round(time.monotonic() - start, 2)
    return report


def _close(
    report: Report, probes: list[str], questions: dict[str, str], reason: str, add: Callable[[Verdict], None]
) -> None:
    known = {v.probe for v in report.verdicts}
    for name in probes:
        if name not in known:
            add(Verdict(name, questions[name], NOT_JUDGED, reason))


def _crash_script(target: str, probe: str, child: _Child, device: str) -> str:
    from trine.decay.audit.examine import SCRIPT

    case = child.case or "Case()"
    return SCRIPT.format(spec=target, probe=probe, case=case, text="stops its process", device=device)


LATE = "was still at work when the time for all was over"


def _watch(
    job: dict[str, Any], timeout: float, deadline: float, report: Report, add: Callable[[Verdict], None]
) -> tuple[_Child, str]:
    """Run one worker to its end; returns what it had said and how it ended."""
    child = _Child(memory=dict(job["memory"]))
    with tempfile.TemporaryDirectory(prefix="trine-audit-") as folder:
        events, errors = Path(folder) / "events", Path(folder) / "errors"
        events.touch()
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "trine.decay.audit.worker", json.dumps(job), str(events)],
                stdout=subprocess.DEVNULL, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        stopped = ""
        try:
            stopped = _follow(process, events, timeout, deadline, child, report, add)
        finally:
            if process.poll() is None:
                _kill(process)
        with errors.open("rb") as written:
            written.seek(max(0, errors.stat().st_size - TAIL_BYTES))
            tail = written.read().decode(errors="replace").strip().splitlines()
    if stopped:
        return child, stopped
    code = process.returncode
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
        return child, f"crashed its process ({name})"
    # The last line of a traceback says what happened, should the process have ended by one.
    last = f": {tail[-1][:200]}" if tail else ""
    return child, f"ended its process (exit code {code}){last}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the worker and whatever it started."""
    try:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass
    # A process with a kernel that never ends may outlive its kill for a while; nobody has to wait for it.
    with suppress(subprocess.TimeoutExpired):
        process.wait(30.0)


def _follow(
    process: subprocess.Popen[bytes],
    events: Path,
    timeout: float,
    deadline: float,
    child: _Child,
    report: Report,
    add: Callable[[Verdict], None],
) -> str:
    """Take in events until the process ends; says so when it stopped answering, or when the time for all was over."""
    last, rest = time.monotonic(), b""
    with events.open("rb") as stream:
        while True:
            over = process.poll() is not None
            data = stream.read()
            if data:
                last = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    _take(json.loads(line), child, report, add)
            if over or child.finished or child.lost:
                return ""
            # Importing a library, and compiling on first use, may take longer than a case.
            if time.monotonic() - last > (timeout if child.probe else max(timeout, 120.0)):
                return f"gave no answer within {timeout:g} s"
            if time.monotonic() > deadline:
                return LATE
            time.sleep(0.02)


def _take(event: dict[str, Any], child: _Child, report: Report, add: Callable[[Verdict], None]) -> None:
    kind = event["event"]
    if kind == "loaded":
        child.loaded = True
        report.name, report.version, report.form = event["name"], event["version"], event["form"]
        report.machine, report.versions = event["machine"], event["versions"]
    elif kind == "refused":
        child.refused = event["text"]
    elif kind == "probe":
        child.probe, child.case, child.tried = event["probe"], "", 0
    elif kind == "case":
        child.case, child.tried = event["case"], child.tried + 1
    elif kind == "verdict":
        child.memory = event["memory"]
        verdict = Verdict(**event["verdict"])
        for name in ("value", "limit"):
            value = getattr(verdict, name)
            setattr(verdict, name, float(value) if value is not None else None)
        child.case = ""
        add(verdict)
    elif kind == "done":
        child.finished = True
    elif kind == "lost":
        child.lost = True
