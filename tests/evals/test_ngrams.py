"""Byte n-grams against a brute-force model written from the formula, and the formula by hand."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.data import DataError
from trine.evals.ngrams import ngram_bits


def _brute_force(train: list[bytes], held_out: list[bytes], orders: int) -> np.ndarray:
    """Witten-Bell interpolation with dictionaries, byte by byte."""
    following: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
    for text in train:
        for i, byte in enumerate(text):
            for n in range(min(i, orders - 1) + 1):
                following[text[i - n : i]][byte] += 1
    bits = np.zeros((orders, len(held_out)))
    for d, text in enumerate(held_out):
        for i, byte in enumerate(text):
            probability = 1.0 / 256.0
            for order in range(1, orders + 1):
                if order - 1 <= i:
                    seen = following.get(text[i - order + 1 : i])
                    if seen:
                        kinds = len(seen)
                        probability = (seen[byte] + kinds * probability) / (seen.total() + kinds)
                bits[order - 1, d] -= math.log2(probability)
    return bits


def test_by_hand() -> None:
    bits = ngram_bits([b"aab"], [b"ab"], 2)
    p_a, p_b = (2 + 2 / 256) / 5, (1 + 2 / 256) / 5
    after_a = (1 + 2 * p_b) / 4  # "a" was followed by "a" and "b" once each
    assert bits[0, 0] == pytest.approx(-math.log2(p_a) - math.log2(p_b), rel=1e-12)
    assert bits[1, 0] == pytest.approx(-math.log2(p_a) - math.log2(after_a), rel=1e-12)


_text = st.binary(max_size=40) | st.text("ab\0", max_size=60).map(str.encode)


@settings(max_examples=120, deadline=None, database=None)
@given(st.lists(_text, min_size=1, max_size=6), st.lists(_text, min_size=1, max_size=4), st.integers(1, 8))
def test_equals_brute_force_on_any_bytes(train: list[bytes], held_out: list[bytes], orders: int) -> None:
    if not any(train):
        train = [*train, b"x"]
    found = ngram_bits(train, held_out, orders)
    np.testing.assert_allclose(found, _brute_force(train, held_out, orders), rtol=1e-10, atol=1e-10)


def test_equals_brute_force_on_longer_text() -> None:
    draw = np.random.default_rng(0)
    words = [bytes(draw.integers(97, 103, draw.integers(1, 6)).astype(np.uint8)) for _ in range(40)]
    texts = [b" ".join(words[i] for i in draw.integers(0, 40, 200)) for _ in range(8)]
    found = ngram_bits(texts[:6], texts[6:])
    np.testing.assert_allclose(found, _brute_force(texts[:6], texts[6:], 8), rtol=1e-10)
    assert (np.diff(found[:4].sum(axis=1)) < 0).all(), "more context helps on repeated words"


def test_contexts_do_not_reach_across_documents() -> None:
    together, apart = ngram_bits([b"ab" * 20], [b"b"], 3), ngram_bits([b"ab" * 20], [b"a", b"b"], 3)
    assert apart[2, 1] == together[2, 0]
    ends = ngram_bits([b"xa", b"bx"], [b"ab"], 2)
    np.testing.assert_allclose(ends, _brute_force([b"xa", b"bx"], [b"ab"], 2))


def test_probabilities_of_all_bytes_sum_to_one() -> None:
    train, context = [b"the cat sat on the mat, the rat"], b"the "
    before = ngram_bits(train, [context], 5)[4, 0]
    after = ngram_bits(train, [context + bytes([b]) for b in range(256)], 5)[4]
    assert (2.0 ** -(after - before)).sum() == pytest.approx(1.0, abs=1e-9)


def test_bad_input_is_named() -> None:
    with pytest.raises(DataError, match="orders: found 9, need 1 to 8"):
        ngram_bits([b"a"], [b"a"], 9)
    with pytest.raises(DataError, match="no training bytes"):
        ngram_bits([b""], [b"a"])
    assert ngram_bits([b"a"], [b""], 3).tolist() == [[0.0], [0.0], [0.0]]
