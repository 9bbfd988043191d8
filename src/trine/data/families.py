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

TIED_AT = 0.3
"""Share of the smaller document's distinct lines (in characters) that must also stand in the other."""
LEAST_SHARED = 256
"""Shared characters below which two documents are not tied: short files share a licence line or an import."""
SHORTEST_LINE = 12
"""Shorter lines (``else:``, ``return None``) say nothing about where a text comes from."""
MOST_HOLDERS = 256
"""A line found in more documents than this is boilerplate and ties none of them."""


@dataclass(frozen=True)
class Families:
    """For each of D documents its family.

    Attributes:
        first: index of the first member of the family, [D].
        size: members of the family, [D]; 1 for a document by itself.
    """

    first: list[int]
    size: list[int]


def near_copy_families(texts: Sequence[str], tied_at: float = TIED_AT, least_shared: int = LEAST_SHARED) -> Families:
    """Group texts into families of near-copies; exact, and independent of the order up to which member comes first."""
    holders: defaultdict[str, list[int]] = defaultdict(list)
    weight = np.zeros(len(texts), dtype=np.int64)
    for i, text in enumerate(texts):
        lines = {line.strip() for line in text.split("\n")}
        for line in lines:
            if len(line) >= SHORTEST_LINE:
                holders[line].append(i)
                weight[i] += len(line)
    # Lines held by the same number of documents form one matrix, and all their pairs are counted at once.
    by_count: defaultdict[int, tuple[list[list[int]], list[int]]] = defaultdict(lambda: ([], []))
    for line, documents in holders.items():
        if 2 <= len(documents) <= MOST_HOLDERS:
            rows, lengths = by_count[len(documents)]
            rows.append(documents)
            lengths.append(len(line))
    pairs, shared = [], []
    for count, (rows, lengths) in sorted(by_count.items()):
        held = np.array(rows, dtype=np.int64)
        low, high = np.triu_indices(count, 1)
        key, inverse = np.unique((held[:, low] * len(texts) + held[:, high]).ravel(), return_inverse=True)
        pairs.append(key)
        shared.append(np.bincount(inverse, np.repeat(np.array(lengths), low.size)))
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
