"""The store: a name means the same text for ever, or an error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trine.data import DataError, add, load_source, prepare, stored, stored_names
from trine.data.sources import Dropped
from trine.data.store import STORE, StoredSource

LINES = "".join(f"line {i} of a text about {i * i} things\n" for i in range(200))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder of text; the store is below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts" / "in").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text(LINES[:1500])
    (tmp_path / "texts" / "in" / "b.py").write_text("x = 1\n" + LINES[1500:3000])
    (tmp_path / "texts" / "c.bin").write_bytes(b"\x00\x01")
    return tmp_path


def test_added_listed_and_loaded_by_name(here: Path) -> None:
    added = add("mine", ["texts"], licence="MIT")
    assert (added.documents, added.bytes) == (2, 1500 + 6 + 1500)
    assert added.dropped == (Dropped("c.bin", "binary (a NUL byte)"),), "told when it is added"
    assert stored("mine") == added and stored_names() == ["mine"]
    assert Path(STORE, "mine.json").is_file() and not list(Path(STORE).glob(".*"))
    corpus = load_source("mine", one_in=3)
    assert [d.name for d in corpus.documents] == ["a.txt", "in/b.py"]
    assert corpus.documents[0].licence == "MIT" and corpus.one_in == 3
    assert corpus.dropped == (Dropped("c.bin", "binary (a NUL byte)"),)
    assert corpus.origin == {"kind": "store", "reader": "text", "hash": added.hash}


def test_the_hash_is_of_what_is_read(here: Path) -> None:
    one = add("one", ["texts"], licence="MIT").hash
    assert add("two", ["texts"], licence="MIT").hash == one
    assert add("three", ["texts"], licence="BSD-2-Clause").hash != one
    assert add("four", ["texts"], licence="MIT", suffixes=[".txt"]).hash != one
    (here / "texts" / "a.txt").write_text("other")
    assert add("five", ["texts"], licence="MIT").hash != one


def test_kinds_by_name_of_file_and_as_told(here: Path) -> None:
    (here / "r.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert add("records", ["r.jsonl"]).reading.kind == "jsonl"
    assert [d.text for d in load_source("records").documents] == ["one", "two"]
    code = add("code", ["texts"], kind="code")
    assert [file.name for file in code.files] == ["a.txt", "in/b.py"], "a binary has no ending of code"
    bundled = add("tree", ["texts"], kind="bundle", questions=3)
    (document,) = load_source("tree").documents
    assert "==> in/b.py <==" in document.text and bundled.documents == 1
    both = add("both", ["texts", "r.jsonl"], kind="text")
    assert [file.name for file in both.files] == ["texts/a.txt", "texts/c.bin", "texts/in/b.py", "r.jsonl"]
    assert load_source("r.jsonl").documents[1].text == "two", "without the store too"
    assert load_source("r.jsonl").source == "r"


def test_a_file_that_vanished_or_changed_is_named(here: Path) -> None:
    add("mine", ["texts"])
    (here / "texts" / "new.txt").write_text("a file added later is no part of it")
    assert len(load_source("mine").documents) == 2
    path = here / "texts" / "a.txt"
    path.write_text(LINES[:1499] + "!")
    with pytest.raises(DataError) as caught:
        load_source("mine")
    assert str(caught.value) == (
        f"source mine: {path} changed since it was added (1500 bytes, then 1500); "
        "bring the old content back, or add the source again"
    )
    path.unlink()
    with pytest.raises(DataError) as caught:
        load_source("mine")
    assert str(caught.value) == (
        f"source mine: {path} vanished since it was added; bring it back, or add the source again"
    )
    with pytest.raises(DataError, match="in the store already"):
        add("mine", ["texts"])
    assert add("mine", ["texts"], replace=True).documents == 2
    assert len(load_source("mine").documents) == 2


@pytest.mark.parametrize(
    ("name", "paths", "changes", "message"),
    [
        (
            "stdlib",
            ["texts"],
            {},
            "source 'stdlib': need a name of letters, digits, '.', '_' and '-' other than stdlib",
        ),
        ("a/b", ["texts"], {}, "source 'a/b': need a name of letters"),
        ("*", ["texts"], {}, r"source '\*': need a name of letters"),
        ("x", [], {}, "source x: found no path, need at least one"),
        ("x", ["absent"], {}, "source x: absent does not exist"),
        ("x", ["empty"], {}, r"source x: no documents in .*empty \(0 dropped\)"),
        (
            "x",
            ["texts"],
            {"kind": "jsonl"},
            r"no documents in .*texts \(looked for names ending in \.jsonl, .*\*\.bin: ",
        ),
        ("x", ["texts/c.bin"], {}, r"source x: no documents \(1 dropped; c.bin: "),
        (
            "x",
            ["texts", "r.jsonl"],
            {},
            "source x: found files of the kinds jsonl, text, need one; name each by itself",
        ),
        ("x", ["r.jsonl"], {"column": "body"}, r"source x: no documents in .*r.jsonl \(.*1 dropped; "),
    ],
)
def test_what_cannot_be_added_is_named_and_leaves_nothing(
    here: Path, name: str, paths: list[str], changes: dict[str, str], message: str
) -> None:
    (here / "empty").mkdir()
    (here / "r.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(DataError, match=message):
        add(name, paths, **changes)  # type: ignore[arg-type]
    assert not Path(STORE).exists()


def test_a_file_too_large_for_a_document_is_not_even_hashed(here: Path) -> None:
    """A sparse file of a terabyte: reading it would take the day."""
    with open(here / "texts" / "sparse.txt", "wb") as file:
        file.truncate(1 << 40)
    source = add("mine", ["texts"])
    assert Dropped("sparse.txt", f"enormous ({1 << 40} bytes, at most {1 << 26}; split it)") in source.dropped
    assert [file.name for file in source.files] == ["a.txt", "c.bin", "in/b.py"]
    corpus = load_source("mine")
    assert [d.name for d in corpus.documents] == ["a.txt", "in/b.py"]
    assert "sparse.txt" in {one.name for one in corpus.dropped}
    os.truncate(here / "texts" / "sparse.txt", 1 << 41)  # no part of the source, so free to change
    assert load_source("mine") == corpus


def test_enormous_and_unreadable_files_are_left_out_by_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trine.data.sources.LARGEST_FILE", 1400)
    (here / "texts" / "d.txt").write_text("small")
    os.mkfifo(here / "texts" / "pipe")
    assert add("mine", ["texts"]).documents == 1
    assert {d.name: d.reason for d in load_source("mine").dropped} == {
        "a.txt": "enormous (1500 bytes, at most 1400; split it)",
        "c.bin": "binary (a NUL byte)",
        "in/b.py": "enormous (1506 bytes, at most 1400; split it)",
        "pipe": "not a regular file",
    }
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "d.txt":
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr("trine.data.sources.LARGEST_FILE", 10_000)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    source = add("less", ["texts"])
    assert Dropped("d.txt", "cannot be read (Input/output error)") in source.dropped
    assert "d.txt" not in {file.name for file in source.files}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"data/mine\.json: damaged \(JSONDecodeError"),
        ("[]", r"data/mine\.json: damaged"),
        ("{}", r"data/mine\.json: damaged \(KeyError: 'format_version'\)"),
        ('{"format_version": 2}', r"data/mine\.json: format_version 2, this release reads 1"),
        (None, r"data/mine\.json: damaged \(its hash is .{12}, it says .{12}\)"),
    ],
)
def test_a_damaged_entry_is_named(here: Path, content: str | None, message: str) -> None:
    add("mine", ["texts"])
    path = Path(STORE, "mine.json")
    if content is None:
        entry = json.loads(path.read_text())
        entry["licence"] = "none at all"
        content = json.dumps(entry)
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_source("mine")


def test_what_is_not_there_is_named_with_what_is(here: Path) -> None:
    with pytest.raises(
        DataError, match=r"^data source nothing: neither 'stdlib', nor a name in the store, nor an exist"
    ):
        load_source("nothing")
    add("mine", ["texts"])
    with pytest.raises(DataError, match=r"nor a name in the store \(mine\), nor an existing path$"):
        load_source("nothing")
    with pytest.raises(DataError, match=r"^store data: has no source nothing$"):
        stored("nothing")


def test_shards_of_a_stored_source_know_it_again(here: Path) -> None:
    add("mine", ["texts"])
    first = prepare("shards", "mine", 300, one_in=1 << 40)
    assert first.sources == ("mine",) and prepare("shards", "mine", 300, one_in=1 << 40).hash == first.hash
    (here / "texts" / "a.txt").write_text(LINES)
    assert isinstance(add("mine", ["texts"], replace=True), StoredSource)
    with pytest.raises(DataError, match=r"hold source mine \(hash .*; asked for mine \(hash .*; name another folder"):
        prepare("shards", "mine", 300, one_in=1 << 40)
