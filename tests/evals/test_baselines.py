"""Baselines: sizes are those of real files, and they are computed once for given data."""

from __future__ import annotations

import json
import lzma
import zlib
from pathlib import Path

import numpy as np
import pytest

from trine.data import DataError, Shards, Tokenizer, write_shards
from trine.data.sources import make_corpus
from trine.evals import baselines as module
from trine.evals.baselines import baselines, compressor_bits, primed_xz
from trine.evals.ngrams import ngram_bits

DOCUMENTS = [b"one two three four " * 30, bytes(np.random.default_rng(0).integers(97, 110, 500).astype(np.uint8))]


def test_compressors_give_the_sizes_of_the_files_they_write() -> None:
    found = compressor_bits(DOCUMENTS)
    whole = b"".join(DOCUMENTS)

    def gzipped(data: bytes) -> int:
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
        return len(deflate.compress(data) + deflate.flush()) + 18  # ten bytes before, eight after

    assert found["gzip"] * len(whole) / 8 == pytest.approx(gzipped(whole))
    assert found["gzip_each"] * len(whole) / 8 == pytest.approx(sum(map(gzipped, DOCUMENTS)))
    assert found["xz"] * len(whole) / 8 == pytest.approx(len(lzma.compress(whole, preset=9)))
    assert found["xz_each"] > found["xz"]
    assert module._xz_size(whole, extreme=True) == len(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME))
    assert module._xz_size(b"") == len(lzma.compress(b"", preset=9))


def test_primed_xz_is_the_growth_of_the_file() -> None:
    draw = np.random.default_rng(1)
    train = [bytes(draw.integers(0, 256, 4000).astype(np.uint8))]
    copied, new = [train[0][1000:3000]], [bytes(draw.integers(0, 256, 2000).astype(np.uint8))]
    known, unknown = primed_xz(train, copied), primed_xz(train, new)
    assert known < 0.4 and unknown > 7.9
    preset = 9 | lzma.PRESET_EXTREME
    growth = len(lzma.compress(train[0] + new[0], preset=preset)) - len(lzma.compress(train[0], preset=preset))
    assert unknown == pytest.approx(8 * growth / 2000)
    assert primed_xz(train, new, threads=2) == unknown


def test_both_sets_are_counted_on_their_own_bytes(shards: Shards, tmp_path: Path) -> None:
    found = baselines(shards, cache=tmp_path)
    train, every, honest = ([shards.text(i).encode() for i in shards.select(*chosen)] for chosen in _SETS)
    assert 0 < len(honest) < len(every)
    for key, documents in (("held_out", honest), ("held_out_all", every)):
        size = sum(map(len, documents))
        assert found[key]["bytes"] == size and found[key]["documents"] == len(documents)
        by_order = ngram_bits(train, documents).sum(axis=1) / size
        assert [found[key][f"ngram{n}"] for n in range(1, 9)] == pytest.approx(by_order.tolist())
        assert found[key]["ngram_best"] == pytest.approx(min(by_order))
        assert found[key][f"ngram{found[key]['ngram_best_order']}"] == found[key]["ngram_best"]
        assert found[key]["xz"] == compressor_bits(documents)["xz"]
    assert found["held_out"]["xz_primed"] == primed_xz(train, honest)
    assert found["held_out_all"]["ngram_best"] < found["held_out"]["ngram_best"], "near-copies flatter"


_SETS: list[tuple[str, bool | None]] = [("train", None), ("held_out", None), ("held_out", False)]


def test_computed_once_for_given_data(shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = baselines(shards, primed=False, cache=tmp_path)
    assert "xz_primed" not in first["held_out"]
    (path,) = tmp_path.iterdir()
    assert shards.hash[:16] in path.name

    def never(*_: object) -> None:
        raise AssertionError("must not be computed again")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_compute", never)
        assert baselines(shards, primed=False, cache=tmp_path) == first
        later = baselines(shards, primed=True, cache=tmp_path)
        assert later["held_out"]["xz_primed"] > 0
        patched.setattr(module, "primed_xz", never)
        assert baselines(shards, cache=tmp_path) == later
    kept = json.loads(path.read_text())
    for damage in ("{", json.dumps({**kept, "data": "other"}), json.dumps({**kept, "format_version": 0}), "[]"):
        path.write_text(damage)
        assert baselines(shards, primed=False, cache=tmp_path) == first
        assert json.loads(path.read_text())["data"] == shards.hash


def test_only_near_copies_or_nothing_held_out(shards: Shards, tmp_path: Path) -> None:
    table = "".join(f"line {i} of the one and only table\n" for i in range(30))
    texts = [(f"t{i}", f"{table}{i}\n".encode()) for i in range(12)]
    tokenizer: Tokenizer = shards.tokenizer
    copies = write_shards(tmp_path / "1", [make_corpus("c", texts, licence="MIT", one_in=2)], tokenizer)
    found = baselines(copies, primed=True)
    assert found["held_out"] is None and found["held_out_all"]["xz_primed"] > 0
    assert (tmp_path / "1" / f"baselines-{copies.hash[:16]}.json").exists()
    none = write_shards(tmp_path / "2", [make_corpus("c", texts, licence="MIT", one_in=1 << 60)], tokenizer)
    with pytest.raises(DataError, match="nothing is held out in"):
        baselines(none)
    with pytest.raises(DataError, match="no held-out bytes to compress"):
        compressor_bits([b""])
    with pytest.raises(DataError, match="no held-out bytes to compress"):
        primed_xz([b"a"], [b""])
