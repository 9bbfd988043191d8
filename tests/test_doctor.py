"""`trine doctor`: what it finds, and that bad news is told as such."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from trine import doctor
from trine.ops.kda import native_build

PARTS = ["python", "torch", "triton", "card", "memory", "disk", "threads", "load", "denormals"]


@pytest.fixture
def no_cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(doctor, "listed_cards", list)
    monkeypatch.setattr(doctor, "busy_fraction", lambda: 0.0)
    yield


def test_every_part_is_named_once_with_one_line_of_advice(no_cards: None, tmp_path: Path) -> None:
    checks = doctor.examine(tmp_path)
    assert [check.name for check in checks] == PARTS
    for check in checks:
        assert check.value and check.advice and "\n" not in check.advice + check.value
        assert check.status in ("ok", "note", "warning")


def test_json_form_can_be_written_and_says_whether_all_is_well(no_cards: None, tmp_path: Path) -> None:
    checks = doctor.examine(tmp_path)
    answer = json.loads(json.dumps(doctor.as_json(checks)))
    assert list(answer["checks"]) == PARTS
    assert answer["checks"]["torch"]["facts"]["version"] == torch.__version__
    assert answer["healthy"] == all(check.status != "warning" for check in checks)
    bad = doctor.Check("disk", "0 GiB", "warning", "free some")
    assert doctor.as_json([*checks, bad])["healthy"] is False


def test_table_shows_value_and_advice(no_cards: None, tmp_path: Path) -> None:
    text = io.StringIO()
    Console(file=text, width=200).print(doctor.as_table(doctor.examine(tmp_path)))
    assert torch.__version__ in text.getvalue()
    assert "one thread a core" in text.getvalue() or "OMP_NUM_THREADS" in text.getvalue()


def test_old_python_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    check = doctor.check_python()
    assert (check.status, check.value) == ("warning", "3.10.4")
    assert "3.11" in check.advice


def test_cpu_build_beside_a_card_and_cuda_build_without_one_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor.check_torch([]).status == "ok"
    mismatch = doctor.check_torch(["NVIDIA H200"])
    assert mismatch.status == "warning"
    assert "make install TORCH=cuda" in mismatch.advice
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    heavy = doctor.check_torch([])
    assert heavy.status == "note"
    assert "make install TORCH=cpu" in heavy.advice
    assert doctor.check_torch(["NVIDIA H200"]).status == "ok"


def test_torch_that_is_too_old_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert doctor.check_torch([]).status == "warning"
    monkeypatch.setitem(sys.modules, "torch", None)
    broken = doctor.check_torch([])
    assert broken.status == "warning"
    assert "make install" in broken.advice
    assert doctor.check_card([]).status == "ok"
    assert doctor.check_threads().facts["threads"] is None
    assert doctor.check_denormals().facts["flush"] is None


def test_triton_missing_is_no_fault_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    check = doctor.check_triton()
    assert (check.status, check.value) == ("note", "not installed")
    assert "`.venv/bin/pip install -e '.[gpu]'` in the clone" in check.advice
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "3.6.0")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.check_triton().status == "warning"
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    assert doctor.check_triton().value == "3.6.0"


def test_card_states(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.check_card(["NVIDIA H200"]).status == "warning"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * doctor.GIB, 140 * doctor.GIB))
    check = doctor.check_card(["NVIDIA H200"])
    assert (check.status, check.value) == ("ok", "1 × NVIDIA H200, sm_90, 130 of 140 GiB free")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_build.path.cache_clear()
    monkeypatch.setattr(native_build, "compiler", lambda: None)
    assert "with a C++ compiler" in doctor.check_card(["NVIDIA H200"]).advice
    native_build.path.cache_clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * doctor.GIB, 140 * doctor.GIB))
    assert "another process" in doctor.check_card(["NVIDIA H200"]).advice
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "bfloat16" in doctor.check_card(["Tesla T4"]).advice


def test_memory_reads_the_kernel_and_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable:    8388608 kB\n")
    assert doctor.available_memory(meminfo, tmp_path) == 8 * doctor.GIB
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1073741824\n")
    assert doctor.available_memory(meminfo, tmp_path) == 8 * doctor.GIB
    (tmp_path / "memory.max").write_text("3221225472\n")
    assert doctor.available_memory(meminfo, tmp_path) == 2 * doctor.GIB
    assert doctor.available_memory(tmp_path / "none", tmp_path / "none", sysconf=False) is None
    monkeypatch.setattr(doctor, "available_memory", lambda: 2 * doctor.GIB)
    assert doctor.check_memory().status == "warning"
    monkeypatch.setattr(doctor, "available_memory", lambda: 16 * doctor.GIB)
    assert doctor.check_memory().status == "ok"
    monkeypatch.setattr(doctor, "available_memory", lambda: None)
    assert doctor.check_memory().facts["available_bytes"] is None


def test_disk_is_that_of_the_nearest_existing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "not" / "yet" / "there"
    assert doctor.check_disk(deep).facts["free_bytes"] > 0
    assert not deep.parent.exists()
    usage = type("Usage", (), {"free": 10 * 2**20})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert doctor.check_disk(deep).status == "warning"


def test_more_threads_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    check = doctor.check_threads()
    assert check.status == "warning"
    assert "OMP_NUM_THREADS=2" in check.advice
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert doctor.check_threads().status == "note"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert doctor.check_threads().status == "ok"


def test_busy_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "busy_fraction", lambda: 0.8)
    busy = doctor.check_load()
    assert (busy.status, busy.value) == ("warning", "others use 80% of the cores")
    monkeypatch.setattr(doctor, "busy_fraction", lambda: 0.0)
    assert doctor.check_load().status == "ok"
    monkeypatch.setattr(doctor, "busy_fraction", lambda: None)
    assert doctor.check_load().status == "note"


@pytest.mark.parametrize("before", [False, True])
def test_looking_at_denormals_leaves_the_setting_alone(before: bool) -> None:
    torch.set_flush_denormal(before)
    try:
        doctor.check_denormals()
        assert bool(torch.tensor(1e-40) * 1.0 == 0) is before
    finally:
        torch.set_flush_denormal(False)


def test_missing_denormal_flush_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: False)
    assert doctor.check_denormals().status == "warning"


def test_cards_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA H200\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor.listed_cards() == ["NVIDIA H200", "NVIDIA H200"]
    tool.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert doctor.listed_cards() == []
    tool.write_text("not a program")
    assert doctor.listed_cards() == []
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert doctor.listed_cards() == []


def test_brackets_of_an_advice_are_shown() -> None:
    text = io.StringIO()
    check = doctor.Check("triton", "[none]", "note", "`pip install -e '.[gpu]'` in the clone")
    Console(file=text, width=200).print(doctor.as_table([check]))
    assert "pip install -e '.[gpu]'" in text.getvalue() and "[none]" in text.getvalue()
