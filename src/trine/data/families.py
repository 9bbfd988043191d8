"""Near-copies: documents that share so much of their text that one held out is almost known from the others.

Exact duplicates are easy to drop; the tables of a character set, or one topic that quotes another, are not exact. Left
in a held-out set they flatter every number (0.1 bits per byte and more on a standard library). Two documents are tied
when the distinct lines they share make up a given part of the smaller one; a family is a connected group of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TIED_AT = 0.3
"""Share of the smaller document's distinct lines (in characters) that must also stand in the other."""
LEAST_SHARED = 256
"""Shared characters below which two documents are not tied: short files share a licence line or an import."""
SHORTEST_LINE = 12
"""Shorter lines (``else:``, ``return None``) say nothing about where a text comes from."""
MOST_HOLDERS = 256
"""A line found in more documents than this is boilerplate and ties none of them."""

_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Families:
    """For each of D documents its family.

    Attributes:
        first: index of the first member of the family, [D].
        size: members of the family, [D]; 1 for a document by itself.
    """

    first: list[int]
    size: list[int]


def _lines(text: str) -> set[str]:
    """The distinct lines of a text that say something."""
    return {line for line in map(str.strip, text.split("\n")) if len(line) >= SHORTEST_LINE}


def near_copy_families(texts: Sequence[str], tied_at: float = TIED_AT, least_shared: int = LEAST_SHARED) -> Families:
    """Group texts into families of near-copies; exact, and independent of the order up to which member comes first."""
    weight = np.zeros(len(texts), dtype=np.int64)
    hashes: list[NDArray[np.int64]] = []
    for i, text in enumerate(texts):
        lines = _lines(text)
        weight[i] = sum(map(len, lines))
        hashes.append(np.fromiter(map(hash, lines), dtype=np.int64, count=len(lines)))
    # Most lines stand in one document alone. Only those whose hash was seen twice are kept: a large corpus must fit.
    value, count = np.unique(np.concatenate([*hashes, np.zeros(0, np.int64)]), return_counts=True)
    repeated = set(value[count > 1].tolist())
    del hashes, value, count
    holders: defaultdict[str, list[int]] = defaultdict(list)
    for i, text in enumerate(texts):
        for line in _lines(text):
            if hash(line) in repeated:
                holders[line].append(i)
    # Lines held by the same number of documents form one matrix, and their pairs are counted at once.
    by_count: defaultdict[int, tuple[list[list[int]], list[int]]] = defaultdict(lambda: ([], []))
    for line, documents in holders.items():
        if 2 <= len(documents) <= MOST_HOLDERS:
            rows, lengths = by_count[len(documents)]
            rows.append(documents)
            lengths.append(len(line))
    pairs, shared = [], []
    for holding, (rows, lengths) in sorted(by_count.items()):
        low, high = np.triu_indices(holding, 1)
        for begin in range(0, len(rows), max(1, _PAIRS_AT_ONCE // low.size)):
            part = slice(begin, begin + max(1, _PAIRS_AT_ONCE // low.size))
            held = np.array(rows[part], dtype=np.int64)
            key, inverse = np.unique((held[:, low] * len(texts) + held[:, high]).ravel(), return_inverse=True)
            pairs.append(key)
            shared.append(np.bincount(inverse, np.repeat(np.array(lengths[part]), low.size)))
    parent = list(range(len(texts)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    if pairs:
        key, inverse = np.unique(np.concatenate(pairs), return_inverse=True)
        total = np.bincount(inverse, np.concatenate(shared))
        low, high = key // len(texts), key % len(texts)
        tied = (total >= least_shared) & (total >= tied_at * np.minimum(weight[low], weight[high]))
        for a, b in zip(low[tied].tolist(), high[tied].tolist(), strict=True):
            a, b = sorted((root(a), root(b)))
            parent[b] = a
    first = [root(i) for i in range(len(texts))]
    size = np.bincount(np.array(first, dtype=np.int64), minlength=max(1, len(texts)))
    return Families(first, [int(size[f]) for f in first])
