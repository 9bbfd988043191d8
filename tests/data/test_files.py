"""Atomic writes: the old content or the new, and nothing left over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trine.data import DataError
from trine.data._files import write_atomically


def test_replaces_whole_files(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"old")
    write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none/a: cannot be written \(No such file or directory\)"):
        write_atomically(tmp_path / "none" / "a", b"x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file/a: cannot be written \(Not a directory\)"):
        write_atomically(tmp_path / "file" / "a", b"x")


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_cut_short_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    write_atomically(tmp_path / "a", b"old")

    def stop(descriptor: int) -> None:
        raise failure

    monkeypatch.setattr(os, "fsync", stop)
    expected = DataError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
