"""The vocabulary: exact on every text, deterministic, and faster than the library that made it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.data import END_OF_DOCUMENT, Corpus, DataError, Tokenizer
from trine.data.tokenizer import _LEARNT_WORD, _SETTLED, _pieces, _settled_patterns

AWKWARD = [
    "",
    " ",
    "\n",
    "\r\n\r\n  x",
    "\t\tif x:\n\n\n        return y  \n",
    "  leading and trailing  ",
    "naïve café — “quotes” 漢字 👩‍👩‍👧 \u200b\u2028",
    "\ufeffmark",
    "\x00\x01\x7f\x1c\x1d\x1e\x1f\x85\xa0",
    "0123456789 12345 x1y22",
    "self.__init__(*args, **kwargs)  # …\n",
    "É\u0301 e\u0301 ß ﬁ ² Ⅷ ١٢٣",
]


def _whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """What the library itself says of the whole text."""
    return list(tokenizer._inner.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", AWKWARD)
def test_round_trip_is_exact_and_equals_the_library(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert ids == _whole(tokenizer, text)


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.text(
        alphabet=st.one_of(st.sampled_from("aZ9 _.(\n\r\t\x0b\x0c\x1c'é漢²\x85\u2028"), st.characters(codec="utf-8"))
    )
)
def test_any_text_comes_back_and_equals_the_library(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert ids == _whole(tokenizer, text)


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(
        st.sampled_from(["x", "Ab", " ", "  ", "\n", "\r", "\t", "é", "12", "==", "\n    ", "\n\nfoo", "\x1c", "漢"])
    )
)
def test_cutting_long_texts_changes_no_word(tokenizer: Tokenizer, parts: list[str]) -> None:
    assert tokenizer.encode("".join(parts)) == _whole(tokenizer, "".join(parts))


@settings(max_examples=150, deadline=None, database=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["\n", "\n\n", "  ", " ", "x", "7", "==", "\r\n", "\f", "\x1c", "\xa0", "\u2028", "\u0301", "👧"]
            ),
            st.sampled_from(
                [
                    "né",
                    "\u0301",
                    "👧",
                    "ДА",
                    "漢字",
                    "かな",
                    "한",
                    "²",
                    "¾",
                    "“",
                    "…",
                    "→",
                    "─",
                    "、",
                    "ª",
                    "µ",
                    "×",
                    "ǅ",
                ]
            ),
            st.characters(min_codepoint=0xA1, max_codepoint=0x3FF),
        ),
        max_size=12,
    )
)
def test_text_beyond_ascii_is_cut_as_the_library_does(tokenizer: Tokenizer, parts: list[str]) -> None:
    assert tokenizer.encode("".join(parts)) == _whole(tokenizer, "".join(parts))


def test_every_settled_character_means_the_same_to_both(tokenizer: Tokenizer) -> None:
    every = [chr(code) for first, last in _SETTLED for code in range(first, last + 1)]
    text = "".join(f"a{one}1{one}{one} " for one in every)
    words = _settled_patterns()[0]
    assert re.findall(words, text) == [word for word, _ in tokenizer._words._split(text)]  # type: ignore[union-attr]


def test_batch_equals_one_by_one_and_lengths_are_those_of_the_bytes(tokenizer: Tokenizer, corpus: Corpus) -> None:
    texts = [d.text for d in corpus.documents]
    found = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in found] == [tokenizer.encode(text) for text in texts]
    for ids, text in zip(found, texts, strict=True):
        assert int(tokenizer.byte_lengths[ids].sum()) == len(text.encode())
    assert sum(map(len, found)) < 0.6 * sum(len(text.encode()) for text in texts), "pairs were merged"


def test_a_text_cannot_spell_the_end_of_a_document(tokenizer: Tokenizer) -> None:
    text = f"before {END_OF_DOCUMENT} after"
    ids = tokenizer.encode(text)
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eod_id]) == ""
    assert tokenizer.byte_lengths[tokenizer.eod_id] == 0
    assert tokenizer.vocab_size == 512


def test_ids_cut_in_the_middle_of_a_character_give_its_first_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("漢")
    assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == "漢".encode()
    assert tokenizer.decode(ids[:1]) == "\ufffd"


@pytest.mark.parametrize("run", ["a", "漢", "=", "_", " ", " \n", "é="])
def test_words_without_end_are_learnt_in_pieces_and_come_back(run: str) -> None:
    text = "before " + run * (60_000 // len(run)) + " after"
    pieces = _pieces(text)
    assert "".join(pieces) == text
    # A word of letters and marks by turns is many short words; one of either kind is cut.
    assert (max(map(len, pieces)) <= 2 * _LEARNT_WORD) == (run != "é=")
    learnt = Tokenizer.train([text, "before and after"], 262)
    ids = learnt.encode(text)
    assert learnt.decode(ids) == text and ids == _whole(learnt, text)


def test_ordinary_text_is_learnt_from_whole(corpus: Corpus) -> None:
    library = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in library] + [d.text for d in corpus.documents]
    texts += ["漢字かな、交じり文。" * 500, "=" * 120 + "\n" + " " * 120, "x" * 120 + "1" + "x" * 120, "0" * 5000]
    assert len(library) > 50 and all(_pieces(text) == [text] for text in texts)


def test_same_texts_give_the_same_vocabulary_in_any_order(corpus: Corpus) -> None:
    texts = [d.text for d in corpus.select("train")]
    assert Tokenizer.train(texts, 400).sha256 == Tokenizer.train(texts[::-1], 400).sha256


def test_saved_and_loaded_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.encode(f"some text {END_OF_DOCUMENT}") == tokenizer.encode(f"some text {END_OF_DOCUMENT}")
    assert (loaded.byte_lengths == tokenizer.byte_lengths).all()
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]


def test_another_pre_tokenizer_is_obeyed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import pre_tokenizers

    inner = Library.from_str(tokenizer.to_json())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.save(str(tmp_path / "other.json"))
    other = Tokenizer.load(tmp_path / "other.json")
    assert other._words is None
    assert other.encode("karo  (minka)\n    x") == _whole(other, "karo  (minka)\n    x")


def test_forgotten_words_are_found_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tokenizer.encode("karo min karo")
    monkeypatch.setattr("trine.data.tokenizer._REMEMBERED_WORDS", 1)
    assert tokenizer.encode("karo min karo") == before
    assert tokenizer._words is not None and set(tokenizer._words._number) == {"karo", " min", " karo"}


def test_errors_name_what_is_wrong(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token ids: found 512, need 0 to 511"):
        tokenizer.decode([1, 512])
    with pytest.raises(DataError, match="token ids: found -1"):
        tokenizer.decode_bytes(np.array([-1]))
    with pytest.raises(DataError, match="text 1: not valid Unicode at character 2"):
        tokenizer.encode_batch(["good", "ab\ud800"])
    with pytest.raises(DataError, match="vocab_size: found 256, need at least 257"):
        Tokenizer.train(["abc"], 256)
    with pytest.raises(DataError, match=r"fill only 25[0-9] ids, found 4096"):
        Tokenizer.train(["ab"], 4096)
    with pytest.raises(DataError, match=r"need <\|eod\|> among them"):
        Tokenizer.train(["ab"], 300, special_tokens=["<pad>"])
    with pytest.raises(DataError, match=r"absent.json: cannot be read"):
        Tokenizer.load(tmp_path / "absent.json")
    (tmp_path / "damaged.json").write_text(tokenizer.to_json()[:1000])
    with pytest.raises(DataError, match=r"damaged.json: damaged"):
        Tokenizer.load(tmp_path / "damaged.json")
    (tmp_path / "other.json").write_text(tokenizer.to_json().replace(END_OF_DOCUMENT, "<|end|>"))
    with pytest.raises(DataError, match=r"other.json: tokenizer: has no token"):
        Tokenizer.load(tmp_path / "other.json")
