"""How ``native.cpp`` is built: in the background, by one process, or not at all, and then it says why."""

from __future__ import annotations

import mmap
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trine.ops.kda import native_build
from trine.ops.kda.triton_native import Native

CARD = torch.device("cuda", 0)


def run_out(native: Native) -> None:
    """Ask for the module until its build has ended."""
    for _ in range(600):
        native.ready(CARD)
        if native._building is None or native._building.poll() is not None:
            break
        time.sleep(0.05)
    native.ready(CARD)


@pytest.fixture(scope="module")
def real() -> str:
    """The file of the module, built where it belongs before a test empties the cache."""
    return str(native_build.build())


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native_build.path.cache_clear()
    yield tmp_path / "cache"
    native_build.path.cache_clear()


def test_without_a_compiler_replays_stay_in_python(
    monkeypatch: pytest.MonkeyPatch, nothing_built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    native = Native()
    with caplog.at_level("WARNING", logger="trine"):
        run_out(native)
        assert native.ready(CARD) is None
    assert [record.getMessage() for record in caplog.records] == [
        "kda: calls are replayed in Python, 0.2 ms slower a forward and backward pass: native.cpp: needs the "
        "compiler that CXX names, 'no-such-compiler', found none"
    ]
    assert not nothing_built.exists()


def test_without_headers_the_message_says_so(monkeypatch: pytest.MonkeyPatch, nothing_built: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(native_build, "cuda_types", lambda: None)
        with pytest.raises(RuntimeError, match=r"needs the cuda.h that comes with Triton .*, found none"):
            native_build.build()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        patch.delenv("CXX", raising=False)
        with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler \(.*or CXX by name\), found none"):
            native_build.build()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    with pytest.raises(RuntimeError, match=r"needs Python's headers .* in /nowhere, found none"):
        native_build.build()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, nothing_built: Path, tmp_path: Path
) -> None:
    tool = tmp_path / "broken-c++"
    tool.write_text("#!/bin/sh\necho 'cannot find -lc10' >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", str(tool))
    with pytest.raises(RuntimeError, match="failed with code 3: cannot find -lc10"):
        native_build.build()
    assert list((nothing_built / "trine").iterdir()) == []
    tool.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(RuntimeError, match=r"failed with code 3: without a word$"):
        native_build.build()


@pytest.mark.parametrize("refuses", [False, True])
def test_the_module_is_linked_with_the_standard_library_of_torch(
    monkeypatch: pytest.MonkeyPatch, nothing_built: Path, tmp_path: Path, refuses: bool
) -> None:
    """A copy of its own wrote numbers of messages wrongly, or ended the process. A linker may refuse torch's."""
    shared = native_build.standard_library()
    if not shared:
        pytest.skip("torch has brought no libstdc++ of its own into this process")
    tool, asked = tmp_path / "c++", tmp_path / "asked"
    refuse = "case $x in *libstdc++.so*) exit 1;; esac;" if refuses else ""
    make = 'case $last in -o) : > "$x";; esac; last=$x;'
    tool.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {asked}\nfor x; do {refuse} {make} done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", str(tool))
    assert native_build.build().exists()
    words = asked.read_text().splitlines()
    assert words[-2:] == (["-lc10", "-ltorch_python"] if refuses else ["-Xlinker", *shared])
    assert Path(shared[0]).name.startswith("libstdc++.so")


def test_names_of_mapped_files_may_be_any_bytes(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.bin", "w+b") as file:
        file.write(b"x" * 4096)
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            assert native_build.standard_library() is not None


def test_a_build_in_the_background_is_taken_up(
    monkeypatch: pytest.MonkeyPatch, real: str, nothing_built: Path, tmp_path: Path
) -> None:
    """By a compiler that hands out the module that is there already."""
    tool = tmp_path / "fast-c++"
    tool.write_text(f'#!/bin/sh\nfor x; do case $last in -o) cp {real} "$x";; esac; last=$x; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", str(tool))
    native = Native()
    assert native.ready(torch.device("cpu")) is None and native._building is None
    assert native.ready(CARD) is None  # while it is being built
    run_out(native)
    assert native.module.__name__ == "trine_kda_native"
    assert native.ready(CARD) is native.module
    assert [one.name for one in (nothing_built / "trine").iterdir()] == [native_build.path().name]


def test_one_process_of_a_machine_builds(monkeypatch: pytest.MonkeyPatch, nothing_built: Path) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    native = Native()
    assert native.ready(CARD) is None
    assert native._building is None and native.wanted


def test_a_file_that_is_no_module_is_refused(nothing_built: Path, caplog: pytest.LogCaptureFixture) -> None:
    native_build.path().parent.mkdir(parents=True)
    native_build.path().write_bytes(b"not a library")
    with caplog.at_level("WARNING", logger="trine"):
        assert Native().ready(CARD) is None
    assert "calls are replayed in Python" in caplog.text and native_build.path().name in caplog.text


@pytest.mark.parametrize("word", ["0", "false", "OFF"])
def test_it_can_be_declined(monkeypatch: pytest.MonkeyPatch, nothing_built: Path, word: str) -> None:
    monkeypatch.setenv("TRINE_NATIVE", word)
    native = Native()
    assert native.ready(CARD) is None and native._building is None


def test_without_an_interpreter_to_run_it_is_not_built(
    monkeypatch: pytest.MonkeyPatch, nothing_built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", None)
    with caplog.at_level("WARNING", logger="trine"):
        assert Native().ready(CARD) is None
    assert "found none (sys.executable)" in caplog.text


def test_a_build_whose_end_nobody_told_us_is_not_repeated(monkeypatch: pytest.MonkeyPatch, nothing_built: Path) -> None:
    """A forked process hears 0 of its parent's child, which may still be at work."""
    native = Native()
    native._building = SimpleNamespace(poll=lambda: 0)
    monkeypatch.setattr(native_build, "build", lambda: pytest.fail("built in the caller"))
    assert native.ready(CARD) is None and native.ready(CARD) is None and native.wanted


def test_leftovers_of_killed_builds_go(monkeypatch: pytest.MonkeyPatch, nothing_built: Path) -> None:
    folder = native_build.path().parent
    folder.mkdir(parents=True)
    old, fresh = folder / "trine_kda_native-0-1.half", folder / "trine_kda_native-0-2.half"
    for one in (old, fresh):
        one.touch()
    os.utime(old, (0, 0))
    monkeypatch.setenv("CXX", "false --version")  # a command with an argument
    with pytest.raises(RuntimeError, match="false failed with code 1"):
        native_build.build()
    assert list(folder.iterdir()) == [fresh]
