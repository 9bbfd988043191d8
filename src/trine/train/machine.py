"""The machine a run stands on: allocator, threads and denormals set in one place, how busy it is, and what it is.

Two things decide more than any arithmetic on a small CPU. (1) With its defaults glibc maps every large tensor anew
and gives it back when it is freed, so each use of it pays for page faults; keeping freed memory was up to 9x faster
when filling fresh 64 MB tensors. (2) OpenMP threads spin at the end of every small operation, so one foreign busy
process can slow a training step several times; nothing but a quiet machine helps, hence `busy_fraction`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# Parameters of glibc's mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_INT_MAX = 2**31 - 1
_TOP_PAD = 64 << 20  # bytes the heap grows by at a time

BUSY_LIMIT = 0.15  # share of the usable cores taken by others above which timings mean little
_PACKAGES = ("trine", "torch", "numpy", "safetensors", "tokenizers", "triton")


def keep_freed_memory() -> bool:
    """Tell glibc's allocator never to map, and never to give back, single large blocks (``mallopt``).

    Returns:
        Whether it was done; False where the C library is not glibc. Costs 5 to 15 % of peak memory.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # The largest threshold glibc accepts for M_MMAP_THRESHOLD is 32 MiB, so mapping is turned off by its count instead.
    # One arena for all threads: memory that one frees serves the others.
    wanted = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _INT_MAX), (_M_TOP_PAD, _TOP_PAD), (_M_ARENA_MAX, 1))
    done = [mallopt(name, value) == 1 for name, value in wanted]
    return all(done)


def usable_cores() -> int:
    """Cores this process may really use: its affinity, capped by a control group's CPU quota (version 2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores


def prepare_machine(threads: int = 0) -> dict[str, Any]:
    """Set the process up for fast and repeatable work on the CPU. Call it before the first tensor is made.

    Sets the allocator (`keep_freed_memory`), flushing of denormal numbers, and the number of threads. Denormals come
    first: worker threads take the setting over from the thread that starts them.

    Args:
        threads: intra-operation threads; 0 takes torch's own choice (physical cores, or OMP_NUM_THREADS), but no more
            than `usable_cores`.

    Returns:
        What was set: ``allocator`` (bool), ``flush_denormal`` (bool), ``threads`` (int).

    Raises:
        ValueError: a negative number of threads.
    """
    if threads < 0:
        raise ValueError(f"threads: found {threads}, need 0 (choose) or more")
    allocator = keep_freed_memory()
    import torch  # after the allocator is set: torch allocates while it loads

    flush = torch.set_flush_denormal(True)
    torch.set_num_threads(threads or min(torch.get_num_threads(), usable_cores()))
    return {"allocator": allocator, "flush_denormal": flush, "threads": torch.get_num_threads()}


def _core_ticks() -> tuple[float, int] | None:
    """(busy seconds, cores) summed over the cores of this process's affinity since boot; None without /proc/stat."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        mine = os.sched_getaffinity(0)
        hertz = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None
    busy, cores = 0.0, 0
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in mine:
            user, nice, system, _idle, _wait, irq, soft, steal = (int(x) for x in fields[:8])
            busy += (user + nice + system + irq + soft + steal) / hertz
            cores += 1
    return (busy, cores) if cores else None


def busy_fraction(seconds: float = 0.5) -> float | None:
    """Share (0 to 1) of this process's cores that others are using, watched for ``seconds``.

    Returns:
        The share, or None where it cannot be known. Without /proc/stat the one-minute load average stands in, which
        includes this process's own work of the last minute.
    """
    before = _core_ticks()
    if before is None:
        if not hasattr(os, "getloadavg"):
            return None
        return min(1.0, os.getloadavg()[0] / max(1, usable_cores()))
    own = time.process_time()
    start = time.perf_counter()
    time.sleep(seconds)
    after = _core_ticks()
    passed = time.perf_counter() - start
    if after is None:
        return None
    others = (after[0] - before[0]) - (time.process_time() - own)
    return min(1.0, max(0.0, others / (passed * after[1])))


def busy_warning(seconds: float = 0.5) -> str | None:
    """One line when others use more than `BUSY_LIMIT` of the cores, else None."""
    share = busy_fraction(seconds)
    if share is None or share <= BUSY_LIMIT:
        return None
    return (
        f"the machine is busy: other processes use {share:.0%} of its cores; training can be several times slower, "
        "and timings taken now mean little"
    )


def _first_field(path: str, key: str) -> str | None:
    try:
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return None


def memory_bytes() -> int | None:
    """Memory this process may use, in bytes: the machine's, capped by a control group's limit; None if unknown."""
    found: list[int] = []
    total = _first_field("/proc/meminfo", "MemTotal")
    if total is not None:
        found.append(int(total.split()[0]) * 1024)
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found, default=None)


def peak_memory_bytes() -> int | None:
    """Largest resident size this process has had, in bytes; None where the platform does not say."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a result depends on; packages that are absent are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """What the machine is: ``system``, ``cpu``, ``cores`` (usable), ``cores_total``, ``memory_bytes``, ``gpus``.

    ``gpus`` lists name and memory of each CUDA card that torch sees.
    """
    import torch

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            gpus.append({"name": card.name, "memory_bytes": card.total_memory})
    cpu = _first_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu,
        "cores": usable_cores(),
        "cores_total": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "gpus": gpus,
    }
