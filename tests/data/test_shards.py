"""Shards: what is written is what is read, and damage is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trine.data import Corpus, DataError, Document, PackingPlan, Shards, Tokenizer, manifest_hash, write_shards
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
        (
            _flip,
            r"checksum differs from the manifest \(corrupt\); the first block that differs begins at byte 0$",
        ),
        (lambda f: (f / "offsets.npy").unlink(), r"offsets\.npy: missing"),
        (lambda f: (f / "manifest.json").unlink(), r"has no manifest\.json \(half-written, or no shard folder\)"),
        (lambda f: (f / "manifest.json").write_text("{"), r"manifest\.json: is not JSON"),
        (lambda f: (f / "manifest.json").write_text("[]"), r"manifest\.json: has no format_version"),
        (_edit(format_version=3), r"manifest\.json: format_version 3, this release reads 1 to 2"),
        (_edit(format_version=0), r"manifest\.json: format_version 0, this release reads 1 to 2"),
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


# -- weights -----------------------------------------------------------------------------------------------------------


def _weighted(tokenizer: Tokenizer, folder: Path) -> tuple[Shards, str]:
    text = "karo mintel suva é: qober"
    answer = text.index("qober")
    spans = [(0, len(text), 0.25), (answer, len(text), 2.0), (len(text), len(text) + 1, 1.0)]
    documents = (
        Document.make("tasks", "one", text, licence="CC0-1.0", weights=spans),
        Document.make("tasks", "two", text + "x1", licence="CC0-1.0", weights=[(answer, answer + 1, 3.0)]),
        Document.make("tasks", "three", "minlingtel", licence="CC0-1.0"),
    )
    return write_shards(folder, [Corpus("tasks", documents)], tokenizer), text


def test_weights_follow_the_characters_they_were_given_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shards, text = _weighted(tokenizer, tmp_path)
    assert (
        shards.weights is not None and isinstance(shards.weights, np.memmap) and shards.manifest["format_version"] == 2
    )
    answer = len(text[: text.index("qober")].encode())
    for document, text_of in ((0, text), (1, text + "x1")):
        ids = shards.stream(document)[1:]
        ends = np.cumsum(shards.tokenizer.byte_lengths[ids])
        got = shards.target_weights(document, 0, ids.size + 1)
        inside = ends > answer if document == 0 else (ends > answer) & (ends - shards.byte_lengths[ids] <= answer)
        assert inside.any() and not inside.all() and shards.text(document) == text_of
        assert got.tolist() == [
            *np.where(inside, 2.0 if document == 0 else 3.0, 0.25 if document == 0 else 0.0).tolist(),
            1.0 if document == 0 else 0.0,
        ]
        assert shards.target_weights(document, 2, 3).tolist() == got[2:5].tolist()
    assert set(shards.target_weights(2, 0, shards.documents[2].tokens + 1).tolist()) == {1.0}


def test_a_batch_has_the_weights_and_counts_only_weighted_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shards, _ = _weighted(tokenizer, tmp_path)
    plan = PackingPlan(shards, row_length=8, tokens_per_step=64, micro_batch_tokens=64)
    (batch,) = plan.micro_batches(0)
    assert batch.document_N is not None and batch.start_N is not None
    expected = np.zeros(64, dtype=np.float32)
    for n, (a, b) in enumerate(zip(batch.cu_seqlens_N1[:-1].tolist(), batch.cu_seqlens_N1[1:].tolist(), strict=True)):
        if batch.source_N[n] >= 0:
            expected[a:b] = shards.target_weights(int(batch.document_N[n]), int(batch.start_N[n]), b - a)
    assert batch.weights_T.tolist() == expected.tolist() and {0.0, 0.25, 1.0, 2.0, 3.0} == set(expected.tolist())
    targets = batch.targets_T.numpy()
    assert batch.bytes == shards.byte_lengths[targets[expected > 0]].sum()
    assert batch.bytes < shards.byte_lengths[targets[targets >= 0]].sum()
    real = np.repeat(batch.source_N.numpy() >= 0, np.diff(batch.cu_seqlens_N1.numpy()))
    assert (targets[real] >= 0).all(), "a target without weight is still known, as the next input"


def test_damaged_weights_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = _weighted(tokenizer, tmp_path)[0].folder
    for make, message in [
        (
            lambda w: np.where(np.arange(w.size) == 3, np.float16(np.nan), w),
            r"weights\.npy: weight 3 is nan, need 0 or",
        ),
        (lambda w: w.astype(np.float32), r"weights\.npy: found shape .* float32, need float16 for \d+ tokens"),
        (lambda w: w[:-1].astype(np.float16), r"weights\.npy: found shape"),
    ]:
        _replace("weights.npy", make)(folder)
        with pytest.raises(DataError, match=message):
            Shards.open(folder)
    (folder / "weights.npy").unlink()
    with pytest.raises(DataError, match=r"weights\.npy: missing"):
        Shards.open(folder)


@pytest.mark.parametrize(
    "span", [(0, 0, 1.0), (2, 1, 1.0), (0, 8, 1.0), (-1, 2, 1.0), (0, 1, -0.5), (0, 1, float("nan"))]
)
def test_weights_that_lie_nowhere_are_refused(span: tuple[int, int, float]) -> None:
    with pytest.raises(DataError, match=r"source s: n has weight .* at characters .*, need a weight from 0 to 65504"):
        Document.make("s", "n", "a text", licence="MIT", weights=[span])


def test_documents_that_are_no_text_are_refused() -> None:
    with pytest.raises(DataError, match="source s: document n is empty"):
        Document.make("s", "n", "", licence="MIT")
    with pytest.raises(DataError, match="source s: n is not valid Unicode at character 1"):
        Document.make("s", "n", "a\ud800", licence="MIT")


def test_shards_without_weights_are_written_as_before(new_shards: Callable[[], Path]) -> None:
    folder = new_shards()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format_version"] == 1 and not (folder / "weights.npy").exists()
    with_blocks = Shards.open(folder)
    del manifest["blocks"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert Shards.open(folder).hash == with_blocks.hash, "the hash of data made before there were blocks is the same"
    _flip(folder)
    with pytest.raises(DataError, match=r"tokens\.npy: checksum differs from the manifest \(corrupt\)$"):
        Shards.open(folder)


def test_the_first_block_that_differs_is_named(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trine.data.shards._BLOCK", 512)
    folder = write_shards(tmp_path, [corpus], tokenizer).folder
    content = bytearray((folder / "tokens.npy").read_bytes())
    content[5 * 512 + 3] ^= 1
    content[9 * 512] ^= 1
    (folder / "tokens.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"\(corrupt\); the first block that differs begins at byte 2560$"):
        Shards.open(folder)
