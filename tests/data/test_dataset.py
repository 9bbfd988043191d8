"""From a source's name to shards: built once, found again, never silently something else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trine.data import Corpus, DataError, Document, Recipe, prepare
from trine.data.dataset import Tokenizer

TEXT = "".join(f"word{i} and the number {i * i}, line {i % 13}\n" for i in range(300))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(30):
        (source / f"{i}.txt").write_text(f"file {i}\n" + TEXT[i * 200 : i * 200 + 900])
    return source


def test_prepared_once_and_found_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(tmp_path / "data", str(folder), 300, one_in=5)
    assert first.sources == ("source",) and first.tokenizer.vocab_size == 300
    assert first.select("train").size + first.select("held_out").size == 30
    (folder / "0.txt").write_text("changed since")

    def never(*_: object) -> None:
        raise AssertionError("must not train again")

    monkeypatch.setattr(Tokenizer, "train", never)
    assert prepare(tmp_path / "data", str(folder), 300, one_in=5).hash == first.hash


def test_the_vocabulary_sees_the_training_split_only(folder: Path, tmp_path: Path) -> None:
    shards = prepare(tmp_path / "data", str(folder), 300, one_in=5)
    texts = [shards.text(i) for i in shards.select("train").tolist()]
    assert Tokenizer.train(texts, 300).sha256 == shards.tokenizer.sha256


def test_another_request_for_the_same_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "data", str(folder), 300, one_in=5)
    for source, vocabulary, one_in, found in [
        (str(folder), 301, 5, r"300 ids, .* asked for .*, 301 ids"),
        (str(folder), 300, 6, r"1 in 5 held out; asked for .*, 1 in 6"),
        ("stdlib", 300, 5, r"hold source .*source, 300 ids, .*; asked for stdlib"),
    ]:
        with pytest.raises(DataError, match=found):
            prepare(tmp_path / "data", source, vocabulary, one_in=one_in)


def test_half_written_shards_are_built_anew_and_damaged_ones_named(folder: Path, tmp_path: Path) -> None:
    first = prepare(tmp_path / "data", str(folder), 300)
    (tmp_path / "data" / "manifest.json").unlink()
    assert prepare(tmp_path / "data", str(folder), 300).hash == first.hash
    (tmp_path / "data" / "tokens.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"tokens\.npy: 0 bytes, the manifest says"):
        prepare(tmp_path / "data", str(folder), 300)


def test_no_data_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="source empty: no documents"):
        prepare(tmp_path / "data", str(tmp_path / "empty"))
    assert not (tmp_path / "data").exists()


def test_nothing_to_train_on_or_to_hold_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text(TEXT)
    with caplog.at_level(logging.WARNING, logger="trine"):
        prepare(tmp_path / "data", str(tmp_path / "one"), 300, one_in=1 << 60)
    assert "none of 1 documents is held out" in caplog.text
    names = [f"{i}.txt" for i in range(40)]
    from trine.data.sources import split_of

    held = next(name for name in names if split_of(name, 2) == "held_out")
    (tmp_path / "one" / "a.txt").rename(tmp_path / "one" / held)
    with pytest.raises(DataError, match="all 1 documents are held out, none to train on"):
        prepare(tmp_path / "data2", str(tmp_path / "one"), 300, one_in=2)


def _tasks(seed: int, count: int = 5) -> Corpus:
    documents = tuple(
        Document.make("tasks", f"{seed}-{i}", f"the key is {seed}{i}\nanswer: {seed}{i}", licence="CC0-1.0")
        for i in range(count)
    )
    return Corpus("tasks", documents, origin={"kind": "made", "seed": str(seed)}, vocabulary=False)


def test_several_sources_and_made_ones(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for i in range(9):
        (other / f"{i}.md").write_text(f"other {i}\n" + TEXT[-900 - i * 100 :][:400])
    calls: list[int] = []

    def make() -> Corpus:
        calls.append(1)
        return _tasks(3)

    recipe = Recipe("tasks", {"kind": "made", "seed": "3"}, make)
    wanted = [str(folder), other, recipe]
    shards = prepare(tmp_path / "data", wanted, 300, one_in=5)
    assert shards.sources == ("source", "other", "tasks") and shards.select("train", source="tasks").size == 5
    texts = [shards.text(i) for name in ("source", "other") for i in shards.select("train", source=name).tolist()]
    assert Tokenizer.train(texts, 300).sha256 == shards.tokenizer.sha256, "made text is not learnt from"
    assert prepare(tmp_path / "data", wanted, 300, one_in=5).hash == shards.hash and calls == [1]
    assert prepare(tmp_path / "data", [str(folder), other, _tasks(3)], 300, one_in=5).hash == shards.hash
    with pytest.raises(DataError, match=r"hold source .*tasks \(kind made, seed 3\), .* asked for .*seed 4\)"):
        prepare(tmp_path / "data", [str(folder), other, _tasks(4)], 300, one_in=5)
    with pytest.raises(DataError, match=r"hold source .*source, .*other, tasks .*; asked for .*source, .*other, 300"):
        prepare(tmp_path / "data", [str(folder), other], 300, one_in=5)


def test_made_text_alone_is_learnt_from_and_has_no_rate(tmp_path: Path) -> None:
    shards = prepare(tmp_path / "data", _tasks(3, 40), 270)
    assert shards.tokenizer.vocab_size == 270
    assert prepare(tmp_path / "data", _tasks(3, 40), 270, one_in=7).hash == shards.hash


@pytest.mark.parametrize("nothing", ["", [], ["stdlib", ""]])
def test_a_source_without_a_name_is_refused(folder: Path, tmp_path: Path, nothing: str | list[str]) -> None:
    prepare(tmp_path / "data", str(folder), 300, one_in=5)
    for where in ("data", "new"):
        with pytest.raises(DataError, match=f"shards .*{where}: no source named"):
            prepare(tmp_path / where, nothing)
    assert not (tmp_path / "new").exists()


def test_sources_that_name_nothing_and_recipes_that_lie_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no source named"):
        prepare(tmp_path / "data", [])
    lie = Recipe("tasks", {"kind": "made", "seed": "4"}, lambda: _tasks(3))
    with pytest.raises(DataError, match=r"source tasks: its recipe made tasks from \{'kind': 'made', 'seed': '3'\}"):
        prepare(tmp_path / "data", lie)
    assert not (tmp_path / "data").exists()
