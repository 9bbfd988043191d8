"""Records: JSON Lines and data sets become documents, bad records are named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from trine.data import DataError, dataset_source, records
from trine.data.records import read_json_lines
from trine.data.sources import Dropped


def test_a_line_is_a_document_and_bad_lines_are_named(tmp_path: Path) -> None:
    lines = [
        b'{"text": "one\\nline"}',
        b"",
        b'{"text": "caf\xc3\xa9", "more": 1}',
        b'{"other": 1}',
        b'{"text": 3}',
        b'["text"]',
        b'{"text": ',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    texts, dropped = read_json_lines("a.jsonl", tmp_path / "a.jsonl")
    assert texts == [("a.jsonl:1", b"one\nline"), ("a.jsonl:3", "café".encode())]
    assert [d.name for d in dropped] == [f"a.jsonl:{n}" for n in (4, 5, 6, 7, 8, 9)]
    assert [d.reason for d in dropped[:4]] == [
        "'text' holds nothing, need text",
        "'text' holds int, need text",
        "holds list, need an object",
        "is not JSON (Expecting value)",
    ]
    assert dropped[4].reason.startswith("is not JSON ('utf-8' codec can't decode")
    assert dropped[5] == Dropped("a.jsonl:9", "not valid Unicode at character 0")


def test_packed_lines_and_another_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps({"body": f"n {i}"}).encode() + b"\n" for i in range(3))))
    assert read_json_lines("a", path, "body") == ([("a:1", b"n 0"), ("a:2", b"n 1"), ("a:3", b"n 2")], [])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"^JSON Lines file .*a\.jsonl\.gz: cannot be read \(Compressed file ended"):
        read_json_lines("a", path)
    path.write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        read_json_lines("a", path)
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read \(No such file or directory\)"):
        read_json_lines("absent", tmp_path / "absent.jsonl")


class _DataSet(list):
    """What a ``datasets.Dataset`` shows of itself."""

    column_names = ("text", "label")
    _fingerprint = "f00d"


def test_a_data_set_is_iterated_over() -> None:
    rows = _DataSet([{"text": f"row {i}", "label": i} for i in range(5)] + [{"text": None, "label": 9}])
    corpus = dataset_source(rows, "rows", licence="CC0-1.0")
    assert [(d.name, d.text) for d in corpus.documents] == [(f"{i:09d}", f"row {i}") for i in range(5)]
    assert corpus.dropped == (Dropped("000000005", "'text' holds nothing, need text"),)
    assert corpus.documents[0].licence == "CC0-1.0" and corpus.origin["fingerprint"] == "f00d"
    assert len(dataset_source(iter(rows), "rows", limit=2).documents) == 2
    with pytest.raises(DataError, match="source rows: no column 'body', the data set has text, label"):
        dataset_source(rows, "rows", column="body")
    with pytest.raises(DataError, match="source rows: found the splits train, test, need one of them"):
        dataset_source({"train": rows, "test": rows}, "rows")  # type: ignore[arg-type]


def test_a_line_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = tmp_path / "sparse.jsonl"
    sparse.write_bytes(b'{"text": "one"}\n')
    os.truncate(sparse, 1 << 40)
    with pytest.raises(DataError, match=r"sparse\.jsonl: line 2 is enormous \(more than 67108864 bytes\)"):
        read_json_lines("sparse.jsonl", sparse)
    monkeypatch.setattr(records, "LARGEST_LINE", 15)
    (tmp_path / "r.jsonl").write_bytes(b'{"text": "one"}\n{"text": "two"}\n')  # 15 bytes each, but for their ends
    assert [text for _, text in read_json_lines("r.jsonl", tmp_path / "r.jsonl")[0]] == [b"one", b"two"]
    (tmp_path / "r.jsonl").write_bytes(b'{"text": "one"}\n{"text": "more"}\n')
    with pytest.raises(DataError, match="line 2 is enormous"):
        read_json_lines("r.jsonl", tmp_path / "r.jsonl")
