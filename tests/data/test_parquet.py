"""Parquet: what is done with the reader's answers; the reader itself is an optional dependency, so it is played."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from trine.data import DataError
from trine.data.parquet import read_parquet


class _Damaged(Exception):
    pass


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The column that every file has."""
    held: list[object] = []

    class File:
        schema_arrow = SimpleNamespace(names=["id", "text"])

        def __init__(self, path: Path) -> None:
            if path.name == "damaged.parquet":
                raise _Damaged("Parquet magic bytes not found\nmore")

        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def iter_batches(self, rows: int, columns: list[str]) -> object:
            assert columns == ["text"]
            for at in range(0, len(held), 2):
                yield SimpleNamespace(column=lambda _, at=at: SimpleNamespace(to_pylist=lambda: held[at : at + 2]))

    package, module = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    package.ArrowException, package.parquet, module.ParquetFile = _Damaged, module, File  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    return held


def test_a_row_is_a_document(values: list[object], tmp_path: Path) -> None:
    values += ["one", None, "three"]
    texts, dropped = read_parquet("a", tmp_path / "a.parquet")
    assert texts == [("a:1", b"one"), ("a:3", b"three")]
    assert [(d.name, d.reason) for d in dropped] == [("a:2", "'text' holds nothing, need text")]
    with pytest.raises(DataError, match=r"a\.parquet: no column 'body', it has id, text$"):
        read_parquet("a", tmp_path / "a.parquet", "body")
    with pytest.raises(DataError, match=r"damaged\.parquet: cannot be read \(Parquet magic bytes not found\)$"):
        read_parquet("a", tmp_path / "damaged.parquet")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        DataError, match=r"a\.parquet: needs pyarrow; in the clone: \.venv/bin/pip install -e '\.\[data\]'$"
    ):
        read_parquet("a", tmp_path / "a.parquet")
