"""What every benchmark shares: a check that the machine is quiet, interleaved timing, and records on disk.

A record is one flat JSON object with the fields ``benchmark``, ``case``, ``gates``, ``impl``, ``ms``, ``peak_bytes``,
``floor_fraction``, ``error``, ``hardware``, ``versions``, ``date`` and a few more; fields that do not apply are null.
``write_records`` puts the records of a run into ``benchmarks/results/<benchmark>-<hardware>-<date>.json``; tables and
plots in the docs are made from those files.

Import this module before torch is given its threads: ``threads(n)`` sets every thread pool once.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
QUIET_SHARE = 0.93  # below this share of the cores, timings of threaded code are not worth keeping


@dataclass(frozen=True)
class Record:
    """One measurement. ``ms`` is the best repeat; ``median_ms`` and ``quiet`` tell how far to trust it."""

    benchmark: str
    case: str
    impl: str
    ms: float | None = None
    gates: str | None = None
    peak_bytes: int | None = None
    floor_fraction: float | None = None
    error: float | None = None
    median_ms: float | None = None
    quiet: bool | None = None
    threads: int | None = None
    note: str | None = None


@dataclass(frozen=True)
class Timing:
    """Best and median of the repeats, in milliseconds."""

    best_ms: float
    median_ms: float
    repeats: int


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that the benchmarks of a CPU share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--allow-busy", action="store_true", help="keep numbers of a busy machine, marked as such")
    parser.add_argument("--dry-run", action="store_true", help="print, record nothing")
    return parser


def threads(count: int) -> int:
    """Use ``count`` CPU threads (0: all that this process may use); allocator and denormals set as in training."""
    from trine.train.machine import prepare_machine

    return int(prepare_machine(count or len(os.sched_getaffinity(0)))["threads"])


def cpu_share(count: int, seconds: float = 0.25) -> float:
    """Share of ``count`` cores that this process gets when it asks for all of them; 1.0 on a quiet machine.

    Processes started for the purpose spin and compare the CPU time they got with the time that passed. Unlike the load
    average this reacts at once and also sees neighbours outside a container.
    """
    import subprocess

    code = (
        "import time\n"
        f"end = time.perf_counter() + {seconds}\n"
        "start, cpu = time.perf_counter(), time.process_time()\n"
        "while time.perf_counter() < end: pass\n"
        "print((time.process_time() - cpu) / (time.perf_counter() - start))"
    )
    jobs = [
        subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    return sum(float(job.communicate()[0]) for job in jobs) / count


class Busy(SystemExit):
    """The machine is not quiet enough for a benchmark; exit code 1."""

    def __init__(self, share: float) -> None:
        super().__init__(
            f"this process gets {share:.0%} of the cores it asks for, need {QUIET_SHARE:.0%}: "
            "stop other jobs, or pass --allow-busy to keep the numbers marked as not quiet"
        )


def require_quiet(count: int, allow_busy: bool) -> bool:
    """True when the machine is quiet. When it is not: raise ``Busy``, or say so and return False if allowed."""
    share = cpu_share(count)
    if share >= QUIET_SHARE:
        return True
    if not allow_busy:
        raise Busy(share)
    print(f"busy machine: {share:.0%} of the cores; records will say quiet=false", file=sys.stderr)
    return False


def time_interleaved(
    entries: Mapping[str, Callable[[], object]], repeats: Mapping[str, int] | int = 7, warmup: int = 1
) -> dict[str, Timing]:
    """Time every entry in turn, round after round, so that a disturbance hits all of them alike.

    Args:
        entries: name -> call.
        repeats: rounds, for all or a name (slow entries can take part in fewer).
        warmup: untimed calls of each entry before the first round.

    Returns:
        name -> best and median.
    """
    wanted = {name: repeats if isinstance(repeats, int) else repeats[name] for name in entries}
    samples: dict[str, list[float]] = {name: [] for name in entries}
    for call in entries.values():
        for _ in range(warmup):
            call()
    gc.collect()
    gc.disable()
    try:
        for turn in range(max(wanted.values())):
            for name, call in entries.items():
                if turn >= wanted[name]:
                    continue
                start = time.perf_counter()
                call()
                samples[name].append((time.perf_counter() - start) * 1e3)
    finally:
        gc.enable()
    return {name: Timing(min(s), statistics.median(s), len(s)) for name, s in samples.items()}


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Rise of the resident set while ``call`` runs, sampled every 2 ms; None where /proc does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(statm.read_text().split()[1]) * page

    call()  # warm, so that the code's own pages are not counted
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # else what the warm call left is used again unseen
    if trim is not None:
        trim(0)
    start = high = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal high
        while not done.wait(0.002):
            high = max(high, resident())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        call()
        high = max(high, resident())
    finally:
        done.set()
        watcher.join()
    return high - start


def hardware() -> str:
    """Slug of the processor and how many cores this process may use, e.g. ``amd-epyc-7763-2cpu``; a card's own name
    when CUDA is there and the benchmark asks for it is up to the benchmark."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        name = found.group(1) if found else name
    name = re.sub(r"\(.*?\)|@.*|\b(processor|cpu)\b", " ", name, flags=re.IGNORECASE)
    return f"{slug(name)}-{len(os.sched_getaffinity(0))}cpu"


def slug(text: str) -> str:
    """Lower case, runs of anything but letters and digits turned into one hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def versions(*packages: str) -> dict[str, str | None]:
    """Python's and the packages' versions; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "numpy", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def write_records(
    benchmark: str,
    records: Sequence[Record],
    *,
    packages: Sequence[str] = (),
    device: str | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write the records of one run and return the file.

    A file of the same benchmark, hardware and day keeps its other records; those with the same case, gates and impl are
    replaced. The file is written under a temporary name and then renamed.
    """
    where = slug(device) if device else hardware()
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    common = {"hardware": where, "versions": versions(*packages), "date": day}
    new = [{**asdict(record), **common} for record in records]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark}-{where}-{day}.json"
    old = json.loads(path.read_text()) if path.exists() else []

    def key(record: Mapping[str, object]) -> tuple[object, ...]:
        return record["case"], record["gates"], record["impl"]

    fresh = {key(record) for record in new}
    rows = [record for record in old if key(record) not in fresh] + new
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=path.name, suffix=".tmp")
    with os.fdopen(handle, "w") as stream:
        json.dump(rows, stream, indent=1)
        stream.write("\n")
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
    return path


def table(records: Sequence[Record]) -> str:
    """The records as aligned text for the terminal."""
    rows = [("case", "gates", "impl", "best ms", "median ms", "error")]
    for r in records:
        best = "-" if r.ms is None else f"{r.ms:.3f}"
        median = "-" if r.median_ms is None else f"{r.median_ms:.3f}"
        rows.append((r.case, r.gates or "-", r.impl, best, median, "-" if r.error is None else f"{r.error:.1e}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
