"""Where the tiles of a set of packed sequences lie: host integers and index vectors.

Sequences with the same number of tiles and the same (rounded) past form a group; a group's sequences lie side by side
in a padded layout, so that equal tiles of all of them are one batched product. A tile's shape follows from its place in
its own sequence and from nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trine.ops import _tiles


class Tiling(NamedTuple):
    """Sizes of tiles. They depend on the kind of device alone, so that a tile's place decides its shape.

    A tile has as many query rows as all tiles before it together, but at least ``first`` and at most ``largest``: a
    short sequence is not filled up to a large tile, a long one has few. All but ``scratch`` are powers of two.

    Attributes:
        first, largest: query rows; a past is rounded up to ``largest``, which is at least 16.
        key_block: key columns of one product, at least ``largest``.
        scratch: elements of the score scratch aimed at; sequences or heads of a batch are split to stay near it.
    """

    first: int
    largest: int
    key_block: int
    scratch: int


CPU = Tiling(64, 64, 512, 1 << 18)
CARD = Tiling(256, 512, 2048, _tiles.CARD)


def tiles(rows: int, tiling: Tiling) -> Iterator[tuple[int, int]]:
    """(first row, past-the-end row) of the query tiles that cover ``rows`` rows of a sequence."""
    start = 0
    while start < rows:
        stop = start + min(max(start, tiling.first), tiling.largest)
        yield start, stop
        start = stop


@dataclass(frozen=True)
class Group:
    """Sequences whose tiles have equal shapes.

    Attributes:
        size: number of sequences.
        queries: padded query rows of each, a sum of tiles.
        front: columns given to the past of each, a multiple of the largest tile; the past ends where they end.
        first_query, first_key: where the group starts in the padded query and key layouts.
        empty_front: unused columns at the front of each sequence, fewer than the largest tile has rows.
    """

    size: int
    queries: int
    front: int
    first_query: int
    first_key: int
    empty_front: tuple[int, ...]

    @property
    def keys(self) -> int:
        """Padded key rows of each sequence."""
        return self.front + self.queries


class Index(NamedTuple):
    """Which row of one layout each row of another one holds.

    Attributes:
        rows: the row held, 0 where there is none.
        empty: the rows that hold none.
    """

    rows: Tensor
    empty: Tensor


@dataclass(frozen=True)
class Plan:
    """Groups, and how packed rows map to the padded layouts.

    Attributes:
        groups: in the order of the padded layouts.
        tiling: sizes of their tiles.
        query_rows, key_rows: for each padded row the packed row it holds; ``None``: layouts are the same.
        query_places, key_places: for each packed row its place in the padded layout; ``None`` likewise.
    """

    groups: tuple[Group, ...]
    tiling: Tiling
    query_rows: Index | None
    key_rows: Index | None
    query_places: Index | None
    key_places: Index | None


def _index(rows: Tensor | None, device: torch.device) -> Index | None:
    """``rows`` with -1 for none, made ready on the host, where looking for them stalls no card."""
    if rows is None:
        return None
    parts = rows.clamp_min(0), (rows < 0).nonzero().squeeze(1)
    # Not blocking: the driver has taken its copy of ordinary memory by the time the call returns.
    return Index(*(part.to(device, non_blocking=True) for part in parts))


def _layout(starts: Tensor, counts: Tensor, places: Tensor, padded: int) -> tuple[Tensor | None, Tensor | None]:
    """Index vectors (padded -> packed, packed -> padded) for sequences of ``counts`` rows put at ``places``."""
    total = int(counts.sum())
    within = torch.arange(total) - torch.repeat_interleave(starts, counts)
    target = torch.repeat_interleave(places, counts) + within
    if padded == total and torch.equal(target, torch.arange(total)):
        return None, None
    rows = torch.full((padded,), -1)
    rows[target] = torch.arange(total)
    return rows, target


def make_plan(lengths: list[int], pasts: list[int], device: torch.device) -> Plan:
    """Plan for N sequences of ``lengths[n]`` new tokens after ``pasts[n]`` earlier ones (all rows packed in order)."""
    tiling = CARD if _tiles.on_card(device) else CPU
    shapes: dict[tuple[int, int], list[int]] = {}
    for n, (length, past) in enumerate(zip(lengths, pasts, strict=True)):
        if length:
            padded = max(stop for _, stop in tiles(length, tiling))
            shapes.setdefault((-(-past // tiling.largest) * tiling.largest, padded), []).append(n)
    query_place, key_place = [0] * len(lengths), [0] * len(lengths)
    groups, first_query, first_key = [], 0, 0
    for (front, queries), members in sorted(shapes.items()):
        empty = tuple(front - pasts[n] for n in members)
        groups.append(Group(len(members), queries, front, first_query, first_key, empty))
        for n, gap in zip(members, empty, strict=True):
            query_place[n], key_place[n] = first_query, first_key + gap
            first_query += queries
            first_key += front + queries
    lengths_N, pasts_N = torch.tensor(lengths, dtype=torch.int64), torch.tensor(pasts, dtype=torch.int64)
    joined_N = lengths_N + pasts_N
    key_starts_N = joined_N.cumsum(0) - joined_N
    # A sequence without new tokens has no place; its past is read by nobody.
    held_N = torch.where(lengths_N > 0, joined_N, 0)
    query_rows, query_places = _layout(
        lengths_N.cumsum(0) - lengths_N, lengths_N, torch.tensor(query_place), first_query
    )
    key_rows, key_places = _key_layout(key_starts_N, joined_N, held_N, torch.tensor(key_place), first_key)
    maps = (query_rows, key_rows, query_places, key_places)
    return Plan(tuple(groups), tiling, *(_index(rows, device) for rows in maps))


def _key_layout(
    starts: Tensor, joined: Tensor, held: Tensor, places: Tensor, padded: int
) -> tuple[Tensor | None, Tensor | None]:
    """As ``_layout``, where sequences that hold nothing (no new tokens) still own packed rows; those map to -1."""
    if torch.equal(joined, held):
        return _layout(starts, joined, places, padded)
    total = int(joined.sum())
    within = torch.arange(total) - torch.repeat_interleave(starts, joined)
    target = torch.repeat_interleave(places, joined) + within
    used = torch.repeat_interleave(held > 0, joined)
    rows = torch.full((padded,), -1)
    rows[target[used]] = torch.arange(total)[used]
    return rows, torch.where(used, target, -1)


def moved(rows: Tensor, index: Index | None) -> Tensor:
    """The rows that another layout holds, zeros where it holds none; ``None``: the same layout."""
    if index is None:
        return rows
    out = rows.index_select(0, index.rows)
    return out.index_fill_(0, index.empty, 0.0) if index.empty.numel() else out
