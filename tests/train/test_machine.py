from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trine.train import machine


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_process_is_set_up_before_its_first_tensor() -> None:
    """Also in threads that start later: a product of two tiny numbers is flushed to zero in every part of a tensor."""
    code = """
from trine.train.machine import prepare_machine
print(prepare_machine(2))
import torch
x = torch.full((1 << 20,), 1e-20)
print(torch.get_num_threads(), float((x * x).abs().max()))
"""
    first, second = python(code).splitlines()
    glibc = machine.platform.libc_ver()[0] == "glibc"
    assert first == str({"allocator": glibc, "flush_denormal": True, "threads": 2})
    assert second == "2 0.0"


def test_freed_memory_is_kept() -> None:
    """Blocks above glibc's largest mapping threshold, 32 MiB, take page faults only until the heap has settled."""
    code = """
import ctypes, resource
from trine.train.machine import keep_freed_memory
print(keep_freed_memory())
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(ctypes.create_string_buffer(48 << 20), 1, 48 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(max([faults() for _ in range(12)][6:]))
"""
    done, rest = python(code).splitlines()
    assert done == str(machine.platform.libc_ver()[0] == "glibc")
    assert done == "False" or int(rest) < 64  # of 12288 pages


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("", ""))
    assert machine.keep_freed_memory() is False


def test_a_negative_number_of_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="threads: found -1, need 0"):
        machine.prepare_machine(-1)


def test_a_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for text, cores in (("max 100000", 64), ("200000 100000", 2), ("50000 100000", 1), ("nonsense", 64)):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert machine.usable_cores() == cores


def test_others_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([(100.0, 2), (101.5, 2)])
    monkeypatch.setattr(machine, "_core_ticks", lambda: next(ticks))
    monkeypatch.setattr(machine.time, "sleep", lambda _: None)
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    own = iter([5.0, 5.5])
    monkeypatch.setattr(machine.time, "process_time", lambda: next(own))
    # of 2 core-seconds 1.5 were busy, 0.5 of them ours
    assert machine.busy_fraction(1.0) == pytest.approx(0.5)


def test_without_a_process_table_the_load_average_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_core_ticks", lambda: None)
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (1.0, 0.0, 0.0))
    assert machine.busy_fraction() == 0.25
    monkeypatch.delattr(machine.os, "getloadavg")
    assert machine.busy_fraction() is None


@pytest.mark.parametrize(("share", "warns"), [(None, False), (0.1, False), (0.4, True)])
def test_the_warning_comes_above_the_limit(monkeypatch: pytest.MonkeyPatch, share: float | None, warns: bool) -> None:
    monkeypatch.setattr(machine, "busy_fraction", lambda seconds: share)
    message = machine.busy_warning()
    assert (message is not None) == warns
    if message:
        assert "other processes use 40% of its cores" in message and "\n" not in message


def test_real_ticks_are_read() -> None:
    ticks = machine._core_ticks()
    if sys.platform == "linux":
        assert ticks is not None and ticks[0] > 0 and ticks[1] >= 1
    share = machine.busy_fraction(0.01)
    assert share is None or 0.0 <= share <= 1.0


def test_hardware_and_versions_say_what_matters() -> None:
    found = machine.hardware()
    assert set(found) == {"system", "cpu", "cores", "cores_total", "memory_bytes", "gpus"}
    assert 1 <= found["cores"] <= found["cores_total"] and found["cpu"]
    assert found["memory_bytes"] > 1 << 28
    assert {"python", "torch", "numpy", "safetensors"} <= set(machine.versions())
    peak = machine.peak_memory_bytes()
    assert peak is not None and 1 << 24 < peak < found["memory_bytes"]


def test_memory_is_bounded_by_a_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_first_field", lambda path, key: "8000 kB")
    monkeypatch.setattr(Path, "read_text", lambda self: "1000000\n")
    assert machine.memory_bytes() == 1_000_000
    monkeypatch.setattr(Path, "read_text", lambda self: "max\n")
    assert machine.memory_bytes() == 8_192_000
