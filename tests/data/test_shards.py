"""Shards: what is written is what is read, and damage is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trine.data import Corpus, DataError, Shards, Tokenizer, manifest_hash, write_shards
from trine.data.sources import make_corpus


def test_tokens_text_and_manifest_say_the_same(shards: Shards, corpus: Corpus) -> None:
    assert shards.tokens.dtype == np.uint16 and isinstance(shards.tokens, np.memmap)
    assert len(shards.documents) == len(corpus.documents)
    for i, document in enumerate(corpus.documents):
        entry, stream = shards.documents[i], shards.stream(i)
        assert stream[0] == shards.tokenizer.eod_id
        assert (entry.name, entry.family, entry.split, entry.near_copy) == (
            *(document.name, document.family, document.split, document.near_copy),
        )
        assert (entry.tokens, entry.bytes) == (stream.size - 1, len(document.text.encode()))
        assert shards.text(i) == document.text
    assert shards.offsets[-1] == shards.tokens.size == sum(e.tokens + 1 for e in shards.documents)
    assert shards.licences == ("CC0-1.0",) and shards.sources == ("made",)
    described = shards.manifest["sources"][0]
    assert described["held_out_one_in"] == 4
    counts = described["counts"]
    assert counts["train"]["documents"] + counts["held_out"]["documents"] == 60
    assert counts["train"]["bytes"] == sum(len(d.text.encode()) for d in corpus.select("train"))


def test_held_out_text_and_dropped_files_are_in_the_manifest(tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = make_corpus("s", [("a", b"some text"), ("b", b""), ("c", b"\xff")], licence="MIT")
    shards = write_shards(tmp_path, [corpus], tokenizer)
    dropped = json.loads((tmp_path / "manifest.json").read_text())["sources"][0]["dropped"]
    assert dropped == [{"name": "b", "reason": "empty"}, {"name": "c", "reason": "not UTF-8 at byte 0"}]
    assert shards.documents[0].licence == "MIT"


def test_selection_by_split_near_copy_and_source(shards: Shards) -> None:
    train, held = shards.select("train"), shards.select("held_out")
    assert sorted([*train, *held]) == list(range(60)) and held.size > 5
    assert shards.select("held_out", near_copy=True).size == 0
    assert shards.select(source="other").size == 0


def test_same_corpus_gives_the_same_bytes_and_another_place_the_same_hash(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    one, two = write_shards(tmp_path / "1", [corpus], tokenizer), write_shards(tmp_path / "2", [corpus], tokenizer)
    for name in ("tokens.npy", "offsets.npy", "tokenizer.json", "manifest.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert one.hash == two.hash
    assert manifest_hash({**one.manifest, "places": {"made": "/elsewhere"}}) == one.hash
    assert manifest_hash({**one.manifest, "vocab_size": 513}) != one.hash


def test_a_large_vocabulary_takes_four_bytes(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer_with_many = Tokenizer(tokenizer._inner)
    tokenizer_with_many.vocab_size = 70_000
    assert write_shards(tmp_path, [corpus], tokenizer_with_many).tokens.dtype == np.uint32


def test_two_sources_keep_their_numbers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    parts = [make_corpus(name, [("a", f"text of {name}".encode())], licence=name) for name in ("one", "two")]
    shards = write_shards(tmp_path, parts, tokenizer)
    assert [entry.source for entry in shards.documents] == ["one", "two"]
    assert shards.select(source="two").tolist() == [1]
    assert shards.licences == ("one", "two")
    with pytest.raises(DataError, match="one source twice"):
        write_shards(tmp_path, [parts[0], parts[0]], tokenizer)


def _truncate(folder: Path) -> None:
    content = (folder / "tokens.npy").read_bytes()
    (folder / "tokens.npy").write_bytes(content[:-6])


def _flip(folder: Path) -> None:
    content = bytearray((folder / "tokens.npy").read_bytes())
    content[-5] ^= 1
    (folder / "tokens.npy").write_bytes(content)


def _edit(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))

    return edit


def _replace(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    """Change an array and its checksums too, as a faulty writer would."""

    def edit(folder: Path) -> None:
        np.save(folder / name, make(np.load(folder / name)))
        content = (folder / name).read_bytes()
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return edit


def _too_large(tokens: np.ndarray) -> np.ndarray:
    tokens[7] = 600
    return tokens


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, r"tokens\.npy: \d+ bytes, the manifest says \d+ \(truncated or changed\)"),
        (_flip, r"tokens\.npy: checksum differs from the manifest \(corrupt\)"),
        (lambda f: (f / "offsets.npy").unlink(), r"offsets\.npy: missing"),
        (lambda f: (f / "manifest.json").unlink(), r"has no manifest\.json \(half-written, or no shard folder\)"),
        (lambda f: (f / "manifest.json").write_text("{"), r"manifest\.json: is not JSON"),
        (lambda f: (f / "manifest.json").write_text("[]"), r"manifest\.json: has no format_version"),
        (_edit(format_version=2), r"manifest\.json: format_version 2, this release reads 1"),
        (_edit(files={"tokens.npy": {}}), r"lacks files\.offsets\.npy, files\.tokenizer\.json"),
        (_replace("tokens.npy", _too_large), r"tokens\.npy: token 7 is 600, need ids below 512"),
        (_replace("offsets.npy", lambda o: o[:-1]), r"offsets\.npy: does not fit 60 documents and \d+ tokens"),
        (_replace("offsets.npy", lambda o: np.where(o == o[3], o[5], o)), r"offsets\.npy: does not fit"),
        (_replace("tokens.npy", lambda t: t.reshape(1, -1)), r"tokens\.npy: found shape .* need one vector"),
        (_replace("tokens.npy", lambda t: t.astype(np.float32)), r"tokens\.npy: found .*float32, need one vector"),
    ],
)
def test_damage_is_named_with_its_place(
    new_shards: Callable[[], Path], damage: Callable[[Path], None], message: str
) -> None:
    folder = new_shards()
    damage(folder)
    with pytest.raises(DataError, match=message) as caught:
        Shards.open(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_without_verification_sizes_are_still_compared(new_shards: Callable[[], Path]) -> None:
    folder = new_shards()
    _flip(folder)
    Shards.open(folder, verify=False)
    _truncate(folder)
    with pytest.raises(DataError, match="truncated"):
        Shards.open(folder, verify=False)


def test_text_that_no_longer_fits_its_hash_is_refused(new_shards: Callable[[], Path]) -> None:
    folder = new_shards()
    _flip(folder)
    shards = Shards.open(folder, verify=False)
    last = len(shards.documents) - 1
    with pytest.raises(DataError, match=f"the text of {shards.documents[last].name} is not what the manifest says"):
        shards.text(last)


def test_a_write_that_fails_leaves_no_shard_folder_behind(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_shards(tmp_path / "shards", [corpus], tokenizer).folder

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"tokens\.npy: cannot be written \(No space left on device\)"):
        write_shards(folder, [corpus], tokenizer)
    assert not list(folder.glob(".*"))
    with pytest.raises(DataError, match="half-written"):
        Shards.open(folder)


def test_a_folder_that_cannot_be_made_and_a_full_disk_are_named(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="file: cannot be made"):
        write_shards(tmp_path / "file", [corpus], tokenizer)
    with pytest.raises(DataError, match="no documents"):
        write_shards(tmp_path, [], tokenizer)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(DataError, match=r"needs \d+ bytes of disk, found 10 free"):
        write_shards(tmp_path / "new", [corpus], tokenizer)
