"""What this machine offers a run, with one line of advice for each part: `trine doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trine.train.machine import BUSY_LIMIT, busy_fraction, usable_cores

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["ok", "note", "warning"]

GIB = 2**30
# What the laptop run may take: its resident memory, and its checkpoints, data and virtual environment on disk.
LAPTOP_MEMORY = 4 * GIB
LAPTOP_DISK = 2 * GIB
TESTED_TORCH = (2, 11)
TESTED_PYTHON = (3, 11)


@dataclass(frozen=True)
class Check:
    """One line of the examination."""

    name: str
    value: str  # what was found
    status: Status  # "note": worth knowing; "warning": costs speed or will fail
    advice: str  # one sentence: what it means, or what to do
    facts: Mapping[str, Any] = field(default_factory=dict)  # the same as numbers, for `--json`


def examine(folder: Path) -> list[Check]:
    """Look at Python, torch, triton, card, memory, disk, threads, load and number format of this machine.

    Args:
        folder: where runs would be written; its disk is the one that counts. It need not exist yet.
    """
    cards = listed_cards()
    return [
        check_python(),
        check_torch(cards),
        check_triton(),
        check_card(cards),
        check_memory(),
        check_disk(folder),
        check_threads(),
        check_load(),
        check_denormals(),
    ]


def as_json(checks: list[Check]) -> dict[str, Any]:
    """The examination as JSON-ready values: `healthy` is false when any check is a warning."""
    return {
        "healthy": all(check.status != "warning" for check in checks),
        "checks": {check.name: asdict(check) for check in checks},
    }


def as_table(checks: list[Check]) -> Table:
    """The examination as a table for a terminal."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "part", "found", "advice"):
        table.add_column(heading, overflow="fold")
    marks = {"ok": "[green]ok[/]", "note": "[blue]note[/]", "warning": "[bold yellow]warn[/]"}
    for check in checks:
        # '.[gpu]' in an advice is no style of rich's
        table.add_row(marks[check.status], check.name, escape(check.value), escape(check.advice))
    return table


def check_python() -> Check:
    """The running interpreter."""
    found = ".".join(map(str, sys.version_info[:3]))
    facts = {"version": found, "executable": sys.executable, "platform": platform.platform()}
    if sys.version_info < TESTED_PYTHON:
        return Check("python", found, "warning", "trine needs Python 3.11 or newer", facts)
    return Check("python", f"{found} on {platform.system()} {platform.machine()}", "ok", "fine", facts)


def check_torch(cards: list[str]) -> Check:
    """Release and build of torch, and whether the build suits the machine's cards."""
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        return Check(
            "torch", "cannot be imported", "warning", f"run `make install`; it says: {reason}", {"error": reason}
        )
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    facts = {"version": torch.__version__, "cuda": torch.version.cuda}
    value = f"{torch.__version__}, {build}"
    if release < TESTED_TORCH:
        return Check("torch", value, "warning", "older than 2.11, the oldest that is tested", facts)
    if cards and not torch.version.cuda:
        return Check("torch", value, "warning", "cannot use this machine's card: `make install TORCH=cuda`", facts)
    if not cards and torch.version.cuda:
        advice = "works, but carries gigabytes of CUDA libraries for no card: `make install TORCH=cpu`"
        return Check("torch", value, "note", advice, facts)
    return Check("torch", value, "ok", "the build for this machine", facts)


def check_triton() -> Check:
    """Whether Triton is there; it is never needed on a CPU."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        advice = (
            "not needed on a CPU; on a card it comes with torch's CUDA build or "
            "`.venv/bin/pip install -e '.[gpu]'` in the clone"
        )
        return Check("triton", "not installed", "note", advice, {"version": None})
    if importlib.util.find_spec("triton") is None:
        return Check("triton", f"{version}, but not importable", "warning", "reinstall it", {"version": version})
    return Check("triton", version, "ok", "used on CUDA cards; a CPU takes the torch path", {"version": version})


def check_card(cards: list[str]) -> Check:
    """The CUDA card that torch would use."""
    try:
        import torch

        usable = torch.cuda.is_available()
    except (ImportError, OSError):
        usable = False
    if not usable:
        if cards:
            advice = "the driver lists a card that torch cannot use; see the line on torch"
            return Check("card", "; ".join(cards), "warning", advice, {"usable": False, "cards": cards})
        advice = "the smoke and laptop presets run well without one; 130m and larger need one"
        return Check("card", "none", "ok", advice, {"usable": False, "cards": []})
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    facts = {
        "usable": True,
        "cards": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "capability": [major, minor],
        "free_bytes": free,
        "total_bytes": total,
    }
    value = f"{torch.cuda.device_count()} × {name}, sm_{major}{minor}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
    if (major, minor) < (8, 0):
        return Check("card", value, "note", "no bfloat16 matrix units: train in fp32", facts)
    if free < 0.5 * total:
        return Check("card", value, "warning", "another process holds most of its memory", facts)
    from trine.ops.kda.native_build import lacking, path

    built = path().exists()
    lack = None if built else lacking()
    facts["native"] = "built" if built else "to be built" if lack is None else None
    advice = "bfloat16 training and the Triton kernels run here"
    if lack is not None:
        advice += f"; with {lack} KDA's calls would cost the host 0.2 ms less"
    return Check("card", value, "ok", advice, facts)


def check_memory() -> Check:
    """Main memory a new process can have."""
    free = available_memory()
    if free is None:
        return Check("memory", "unknown", "note", "the laptop run takes up to 4 GiB", {"available_bytes": None})
    facts = {"available_bytes": free}
    value = f"{free / GIB:.1f} GiB available"
    if free < LAPTOP_MEMORY:
        return Check(
            "memory", value, "warning", "the laptop run takes up to 4 GiB; `--preset smoke` takes under 1", facts
        )
    return Check("memory", value, "ok", "enough for the laptop run, which takes up to 4 GiB", facts)


def check_disk(folder: Path) -> Check:
    """Free space where runs are written."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    facts = {"free_bytes": free, "folder": str(folder)}
    value = f"{free / GIB:.1f} GiB free for {folder}"
    if free < LAPTOP_DISK:
        return Check("disk", value, "warning", "a laptop run with its checkpoints takes up to 2 GiB", facts)
    if not os.access(existing, os.W_OK):
        return Check("disk", value, "warning", f"no permission to write in {existing}", facts)
    return Check("disk", value, "ok", "enough for many laptop runs", facts)


def check_threads() -> Check:
    """Threads that torch would use against the cores this process may use."""
    cores = usable_cores()
    try:
        import torch

        threads = torch.get_num_threads()
    except (ImportError, OSError):
        return Check("threads", f"{cores} cores", "note", "torch is missing", {"cores": cores, "threads": None})
    facts = {"cores": cores, "threads": threads, "logical": os.cpu_count()}
    value = f"{threads} threads on {cores} usable cores"
    if threads > cores:
        advice = f"more threads than cores makes them wait for each other: set OMP_NUM_THREADS={cores}"
        return Check("threads", value, "warning", advice, facts)
    if threads < cores and "OMP_NUM_THREADS" in os.environ:
        return Check("threads", value, "note", "OMP_NUM_THREADS leaves cores idle", facts)
    return Check("threads", value, "ok", "one thread a core", facts)


def check_load() -> Check:
    """Whether other processes use the cores now; a busy neighbour costs a run far more than its share."""
    share = busy_fraction()
    if share is None:
        return Check("load", "unknown", "note", "close other programs before timing anything", {"busy": None})
    value = f"others use {share:.0%} of the cores"
    if share > BUSY_LIMIT:
        advice = "busy: the threads of a run wait for one another at every step; time nothing now"
        return Check("load", value, "warning", advice, {"busy": share})
    return Check("load", value, "ok", "quiet", {"busy": share})


def check_denormals() -> Check:
    """Whether the processor can treat denormal numbers as zero; arithmetic with them is up to 100 times slower."""
    try:
        import torch
    except (ImportError, OSError):
        return Check("denormals", "unknown", "note", "torch is missing", {"flush": None})
    before = bool(torch.tensor(1e-40) * 1.0 == 0)
    can = torch.set_flush_denormal(True)
    torch.set_flush_denormal(before)
    if not can:
        advice = "decayed states can reach denormals, which are slow here; nothing to be done"
        return Check("denormals", "cannot be flushed", "warning", advice, {"flush": False})
    return Check("denormals", "can be flushed", "ok", "training switches it on", {"flush": True})


def listed_cards() -> list[str]:
    """Names of the NVIDIA cards that the driver lists, whether or not torch can use them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        query = [tool, "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup"), sysconf: bool = True
) -> int | None:
    """Bytes a new process can have: what the kernel calls available, less where a container's limit is lower."""
    found: list[int] = []
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    elif sysconf and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        found.append(max(0, int(text) - int(used.read_text())))
    return min(found) if found else None
