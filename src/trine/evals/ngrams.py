"""Interpolated byte n-grams, counted exactly: the yardstick that needs no training.

The model of order n predicts a byte from the n - 1 bytes before it. Witten and Bell's interpolation (IEEE Trans. Inf.
Theory 37(4), 1991, method C) trusts a context as much as it has been seen, against the number of different bytes that
followed it:

    p_n(c | x) = (count(x c) + kinds(x) p_{n-1}(c | x')) / (count(x) + kinds(x)),    p_0 = 1 / 256,

where x' is x without its first byte and an unseen context leaves p_{n-1} as it is. Contexts do not reach across
documents: the first bytes of a document are predicted from the fewer bytes there are.

A gram of up to eight bytes is one 64-bit integer, first byte highest, so counts are exact; sorting the eight-byte grams
once sorts those of every lower order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trine.data import DataError

HIGHEST_ORDER = 8


@dataclass(frozen=True)
class _Counts:
    """Counts of one order: ``grams`` ascending with ``gram_count``; ``contexts`` ascending with what followed them."""

    grams: NDArray[np.uint64]
    gram_count: NDArray[np.int64]
    contexts: NDArray[np.uint64]
    context_count: NDArray[np.int64]
    kinds: NDArray[np.int64]


def _windows(text: NDArray[np.uint8], length: int) -> NDArray[np.uint64]:
    """The ``length``-byte gram that starts at each position of one array, [max(0, n - length + 1)]."""
    size = max(0, text.size - length + 1)
    key = np.zeros(size, dtype=np.uint64)
    for j in range(length):
        key = (key << np.uint64(8)) | text[j : j + size]
    return key


def _run_lengths(
    ordered: NDArray[np.uint64], weight: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Distinct values of a sorted array, the sum of their weights, and how many entries each had."""
    if ordered.size == 0:
        return ordered, weight, weight
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    entries = np.diff(np.append(begins, ordered.size))
    return ordered[begins], np.add.reduceat(weight, begins), entries


def _count(
    full: NDArray[np.uint64], full_count: NDArray[np.int64], tails: list[NDArray[np.uint8]], order: int
) -> _Counts:
    """Counts of an order from the sorted eight-byte grams and from the document ends, where no such gram begins."""
    keys = full >> np.uint64(8 * (HIGHEST_ORDER - order))
    weight = full_count
    ends = np.concatenate([_windows(tail, order) for tail in tails]) if tails else np.zeros(0, np.uint64)
    if ends.size:
        keys, weight, _ = _run_lengths(keys, weight)
        ends.sort()
        at = np.searchsorted(keys, ends)
        keys = np.insert(keys, at, ends)
        weight = np.insert(weight, at, np.ones(ends.size, np.int64))
    grams, gram_count, _ = _run_lengths(keys, weight)
    contexts, context_count, kinds = _run_lengths(grams >> np.uint64(8), gram_count)
    return _Counts(grams, gram_count, contexts, context_count, kinds)


def _look_up(
    keys: NDArray[np.uint64], values: tuple[NDArray[np.int64], ...], wanted: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], ...]:
    """For each wanted key its values, 0 where it does not occur."""
    if keys.size == 0:
        return tuple(np.zeros(wanted.size, np.int64) for _ in values)
    distinct, inverse = np.unique(wanted, return_inverse=True)
    at = np.minimum(np.searchsorted(keys, distinct), keys.size - 1)
    found = keys[at] == distinct
    return tuple(np.where(found, value[at], 0)[inverse] for value in values)


def ngram_bits(train: Sequence[bytes], held_out: Sequence[bytes], orders: int = HIGHEST_ORDER) -> NDArray[np.float64]:
    """Bits that models of order 1 to ``orders``, fitted on ``train``, need for each held-out document.

    Args:
        train: documents to count.
        held_out: documents to predict.
        orders: highest order, 1 to 8.

    Returns:
        float64 [orders, len(held_out)], total bits of a document under each order.

    Raises:
        DataError: an order out of range, or nothing to count.
    """
    if not 1 <= orders <= HIGHEST_ORDER:
        raise DataError(f"orders: found {orders}, need 1 to {HIGHEST_ORDER}")
    documents = [np.frombuffer(document, dtype=np.uint8) for document in train]
    if not sum(document.size for document in documents):
        raise DataError("n-grams: no training bytes to count")
    full = np.concatenate([_windows(document, HIGHEST_ORDER) for document in documents])
    full.sort()
    full, full_count, _ = _run_lengths(full, np.ones(full.size, dtype=np.int64))
    # The last seven bytes of a document begin no eight-byte gram; shorter ones begin there.
    tails = [document[max(0, document.size - HIGHEST_ORDER + 1) :] for document in documents]
    wanted = [np.frombuffer(document, dtype=np.uint8) for document in held_out]
    sizes = np.array([document.size for document in wanted], dtype=np.int64)
    owner = np.repeat(np.arange(sizes.size), sizes)
    position = np.arange(owner.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    probability = np.full(owner.size, 1.0 / 256.0)
    bits = np.zeros((orders, sizes.size))
    for order in range(1, orders + 1):
        counts = _count(full, full_count, tails, order)
        here = np.flatnonzero(position >= order - 1)
        grams = np.concatenate([_windows(document, order) for document in wanted] or [np.zeros(0, np.uint64)])
        (seen,) = _look_up(counts.grams, (counts.gram_count,), grams)
        total, kinds = _look_up(counts.contexts, (counts.context_count, counts.kinds), grams >> np.uint64(8))
        lower = probability[here]
        with np.errstate(invalid="ignore", divide="ignore"):
            mixed = (seen + kinds * lower) / (total + kinds)
        probability[here] = np.where(total > 0, mixed, lower)
        bits[order - 1] = np.bincount(owner, -np.log2(probability), minlength=sizes.size)
    return bits
