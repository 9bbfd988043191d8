"""The packing plan: which tokens make up which micro-batch of which step, as a pure function.

A document's stream is its end-of-document token (as a start symbol) followed by its tokens; every token of the
document, and at last the end-of-document token again, is a target exactly once an epoch. A stream longer than the row
length is cut into consecutive pieces; a later piece's first input is the previous piece's last target, so no target is
lost at a cut. Most pieces have exactly the row length; the short ones are packed best fit into bins of that length. A
step takes its bins from one endless sequence (the epochs one after another, each in its own random order), so that what
a step holds depends on (data, seed, stage, step) alone: there is no buffer and nothing to save for a resume.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trine.data._errors import DataError
from trine.data.rows import Piece, RowPlan, Rows, ranges
from trine.data.shards import Shards

_KEPT_EPOCHS = 2


@dataclass(frozen=True)
class Epoch:
    """The pieces of one epoch and how they fill bins of the row length.

    Attributes:
        document_P, start_P, length_P: int64, the pieces.
        bins_B1: int64 boundaries; bin b holds ``pieces_P[bins_B1[b]:bins_B1[b + 1]]``.
        pieces_P: int64 piece numbers, bin after bin.
        order_B: int64, the bins in the epoch's random order.
    """

    document_P: NDArray[np.int64]
    start_P: NDArray[np.int64]
    length_P: NDArray[np.int64]
    bins_B1: NDArray[np.int64]
    pieces_P: NDArray[np.int64]
    order_B: NDArray[np.int64]


@dataclass(frozen=True)
class PackingReport:
    """What packing did to one epoch of the documents.

    Attributes:
        documents: documents packed.
        cut_documents: of these, how many were cut.
        pieces: pieces they gave.
        full_pieces: pieces of exactly the row length.
        bins: rows of the row length that hold them.
        supervised_tokens: targets an epoch.
        padding_share: positions without a target, as a share of all.
    """

    documents: int
    cut_documents: int
    pieces: int
    full_pieces: int
    bins: int
    supervised_tokens: int
    padding_share: float


def split_mix(count: int, key: int) -> NDArray[np.uint64]:
    """``count`` numbers of the generator SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) begun at ``key``, uint64.

    Written out because a plan must not change with the version of a library of random numbers.
    """
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def best_fit_bins(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Best-fit decreasing: items into bins of ``capacity``, the longest first, each into the fullest bin it fits.

    Ties go to the item, and the bin, with the lowest number. Items of one length are placed together, and bins with the
    same room are kept together, so the time goes with the number of different lengths more than with that of items.

    Args:
        lengths: int64 [n], each 1 to ``capacity``.
        capacity: size of a bin.

    Returns:
        int64 [n], the bin of each item; bins are numbered in the order in which they were opened.
    """
    order = np.lexsort((np.arange(lengths.size), -lengths))
    ordered = lengths[order]
    edges = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1, [ordered.size]]).tolist()
    placed = np.empty(lengths.size, dtype=np.int64)
    rooms: dict[int, list[int]] = {}  # free room -> bins that have it, ascending
    sizes: list[int] = []  # the keys of `rooms`, ascending

    def put(room: int, bins: list[int]) -> None:
        if not room or not bins:
            return
        if room not in rooms:
            rooms[room] = bins
            insort(sizes, room)
        elif len(bins) == 1:
            insort(rooms[room], bins[0])
        else:
            rooms[room] = sorted(rooms[room] + bins)

    count = 0
    for at, end in pairwise(edges):
        if at == end:
            break
        length = int(ordered[at])
        while at < end:
            # A bin of the smallest room that fits is filled until it fits no more: what is left of it is smaller still.
            i = bisect_left(sizes, length)
            room = sizes[i] if i < len(sizes) else capacity
            each = room // length
            need = -(-(end - at) // each)
            if i < len(sizes):
                bins = rooms[room][:need]
                del rooms[room][:need]
                if not rooms[room]:
                    del rooms[room], sizes[i]
            else:
                bins = list(range(count, count + need))
                count += need
            n = min(end - at, len(bins) * each)
            placed[at : at + n] = bins[0] if len(bins) == 1 else np.repeat(bins, each)[:n]
            whole = n // each
            put(room - each * length, bins[:whole])
            put(room - (n % each) * length, bins[whole:])
            at += n
    found = np.empty(lengths.size, dtype=np.int64)
    found[order] = placed
    return found


def best_fit(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """``best_fit_bins`` as lists: for each bin the items in it, in the order they were placed."""
    bins_B1, items = _by_bin(lengths, best_fit_bins(lengths, capacity))
    return [items[a:b].tolist() for a, b in pairwise(bins_B1.tolist())]


def _by_bin(lengths: NDArray[np.int64], bin_of: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Boundaries of the bins, and the items bin after bin, the longest first."""
    items = np.lexsort((np.arange(lengths.size), -lengths, bin_of))
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(bin_of))]), items


def pack(length_P: NDArray[np.int64], row_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pieces into bins of ``row_length``: the full ones first, each by itself, then the others best fit.

    Returns:
        (bins_B1, pieces_P), int64: bin b holds the pieces ``pieces_P[bins_B1[b]:bins_B1[b + 1]]``.
    """
    full, short = np.flatnonzero(length_P == row_length), np.flatnonzero(length_P < row_length)
    bins_B1, items = _by_bin(length_P[short], best_fit_bins(length_P[short], row_length))
    return np.concatenate([np.arange(full.size), full.size + bins_B1]), np.concatenate([full, short[items]])


def cut(
    lengths: NDArray[np.int64], row_length: int, first: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut streams of ``lengths`` targets into consecutive pieces of at most ``row_length``.

    Args:
        lengths: int64 [D], each at least 1.
        row_length: longest piece.
        first: int64 [D], length of each stream's first piece where it is cut at all; ``row_length`` by default.

    Returns:
        (stream, start, length) of each piece, int64, in order.
    """
    head = np.minimum(lengths, row_length if first is None else np.minimum(first, row_length))
    head = np.where(lengths <= row_length, lengths, head)
    counts = 1 + -(-(lengths - head) // row_length)
    stream = np.repeat(np.arange(lengths.size, dtype=np.int64), counts)
    nth = np.arange(stream.size, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.where(nth == 0, 0, head[stream] + (nth - 1) * row_length)
    length = np.where(nth == 0, head[stream], np.minimum(row_length, lengths[stream] - start))
    return stream, start, length


def lay_flat(epoch: Epoch, chosen_R: NDArray[np.int64]) -> Rows:
    """The bins ``chosen_R`` of an epoch as rows, in that order."""
    begin, end = epoch.bins_B1[chosen_R], epoch.bins_B1[chosen_R + 1]
    pieces = epoch.pieces_P[ranges(begin, end - begin)]
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(end - begin)])
    return Rows(epoch.document_P[pieces], epoch.start_P[pieces], epoch.length_P[pieces], bounds)


def draw(count: int, *parts: object) -> NDArray[np.uint64]:
    """``count`` uniform 64-bit numbers that depend on ``parts``, written one after another, and on nothing else."""
    key = "/".join(map(str, parts))
    return split_mix(count, int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))


def spread_order(count: int, together: int, *parts: object) -> NDArray[np.int64]:
    """A random order of ``count`` bins in which each run of ``together`` holds one bin from each part of the whole.

    Bins follow the documents, and neighbours are alike: tables beside tables, one package beside itself. So the bins
    are cut into ``together`` equal strata, and the r-th run takes the r-th bin of each stratum's own random order.
    Steps then differ less from one another than steps of bins drawn anywhere, and every bin still comes once.
    """
    random = draw(count, *parts)
    stratum_B = np.arange(count) * together // max(count, 1)
    shuffled_B = np.lexsort((random, stratum_B))
    rank_B = np.empty(count, dtype=np.int64)
    rank_B[shuffled_B] = np.arange(count) - np.searchsorted(stratum_B, stratum_B)
    return np.lexsort((random, rank_B))


def shifted_first_pieces(count: int, row_length: int, *parts: object) -> NDArray[np.int64]:
    """Lengths of first pieces, uniform from 1 to ``row_length``, so that later passes are cut at other places."""
    return 1 + (draw(count, *parts, "cuts") % np.uint64(row_length)).astype(np.int64)


@dataclass(eq=False)
class PackingPlan(RowPlan):
    """Rows of one training stage.

    Attributes:
        shards: where the tokens are.
        row_length: longest piece, tokens.
        tokens_per_step: positions a step, a multiple of ``row_length``.
        micro_batch_tokens: positions a micro-batch, a multiple of ``row_length`` that divides ``tokens_per_step``.
        seed: seed of the run.
        stage: number of the stage; stages shuffle independently.
        documents: indices of the documents to use; default is the training split.
        shift_cuts: from the second epoch on, cut long documents at other places, so that a token does not meet the same
            context twice. The first epoch cuts at multiples of ``row_length``.

    Raises:
        DataError: sizes that do not fit one another, or no documents.
    """

    shards: Shards
    row_length: int = 256
    tokens_per_step: int = 16384
    micro_batch_tokens: int = 4096
    seed: int = 0
    stage: int = 0
    documents: NDArray[np.int64] | None = field(default=None, repr=False)
    shift_cuts: bool = True
    _epochs: dict[int, Epoch] = field(default_factory=dict, repr=False)
    _ends: list[int] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Check the sizes and the documents."""
        self._check_sizes()
        chosen = self.shards.select("train") if self.documents is None else np.asarray(self.documents, dtype=np.int64)
        if chosen.size == 0:
            raise DataError(f"packing plan: no documents to train on in {self.shards.folder}")
        if chosen.min() < 0 or chosen.max() >= len(self.shards.documents) or np.unique(chosen).size != chosen.size:
            raise DataError(f"documents: need different indices from 0 to {len(self.shards.documents) - 1}")
        self.documents = np.sort(chosen)
        self._lengths = np.diff(self.shards.offsets)[self.documents]
        self._key = (self.shards.hash, self.seed, self.stage, self.row_length)

    # -- epochs ------------------------------------------------------------------------------------------------------

    def epoch(self, number: int) -> Epoch:
        """The pieces and bins of an epoch (the last two asked for are kept)."""
        if number in self._epochs:
            return self._epochs[number]
        assert self.documents is not None
        first = None
        if self.shift_cuts and number > 0:
            first = shifted_first_pieces(self._lengths.size, self.row_length, *self._key, number)
        stream, start, length = cut(self._lengths, self.row_length, first)
        bins_B1, pieces_P = pack(length, self.row_length)
        built = Epoch(
            document_P=self.documents[stream],
            start_P=start,
            length_P=length,
            bins_B1=bins_B1,
            pieces_P=pieces_P,
            order_B=spread_order(
                bins_B1.size - 1, self.tokens_per_step // self.row_length, *self._key, number, "order"
            ),
        )
        while len(self._epochs) >= _KEPT_EPOCHS:
            del self._epochs[min(self._epochs)]
        self._epochs[number] = built
        return built

    def _end(self, number: int) -> int:
        """Bins in all epochs up to and including ``number``."""
        while len(self._ends) <= number:
            bins = self.epoch(len(self._ends)).order_B.size
            self._ends.append((self._ends[-1] if self._ends else 0) + bins)
        return self._ends[number]

    def _bin(self, index: int) -> tuple[Epoch, int]:
        """Bin ``index`` of the endless sequence: its epoch and its number there."""
        number = 0
        while self._end(number) <= index:
            number += 1
        built = self.epoch(number)
        return built, int(built.order_B[index - (self._ends[number - 1] if number else 0)])

    # -- what a step holds -------------------------------------------------------------------------------------------

    def steps_per_epoch(self) -> float:
        """Steps that one pass over the documents takes."""
        return self._end(0) * self.row_length / self.tokens_per_step

    def epoch_of(self, step: int) -> float:
        """Passes over the documents that lie behind the beginning of ``step``."""
        index = step * self.tokens_per_step // self.row_length
        number = 0
        while self._end(number) <= index:
            number += 1
        before = self._ends[number - 1] if number else 0
        return number + (index - before) / (self._end(number) - before)

    def _row_pieces(self, begin: int, end: int) -> list[Piece]:
        """See ``RowPlan``; rows are the bins of the endless sequence."""
        found: list[Piece] = []
        for index in range(begin, end):
            built, number = self._bin(index)
            for p in built.pieces_P[built.bins_B1[number] : built.bins_B1[number + 1]].tolist():
                found.append(Piece(int(built.document_P[p]), int(built.start_P[p]), int(built.length_P[p])))
        return found

    def rows(self, count: int) -> Rows:
        """The first ``count`` rows of the endless sequence, laid flat."""
        parts: list[Rows] = []
        number = have = 0
        while have < count:
            built = self.epoch(number)
            parts.append(lay_flat(built, built.order_B[: count - have]))
            have += parts[-1].count
            number += 1
        return Rows.join(parts)

    # -- reports -----------------------------------------------------------------------------------------------------

    def report(self, epoch: int = 0) -> PackingReport:
        """Counts of one epoch."""
        assert self.documents is not None
        built = self.epoch(epoch)
        bins = built.order_B.size
        targets = int(built.length_P.sum())
        return PackingReport(
            documents=self.documents.size,
            cut_documents=int((self._lengths > self.row_length).sum()),
            pieces=built.length_P.size,
            full_pieces=int((built.length_P == self.row_length).sum()),
            bins=bins,
            supervised_tokens=targets,
            padding_share=1.0 - targets / (bins * self.row_length),
        )

    def describe(self) -> dict[str, Any]:
        """What a run folder records of the plan."""
        return {
            "row_length": self.row_length,
            "tokens_per_step": self.tokens_per_step,
            "micro_batch_tokens": self.micro_batch_tokens,
            "seed": self.seed,
            "stage": self.stage,
            "shift_cuts": self.shift_cuts,
            "data": self.shards.hash,
            **self.report().__dict__,
        }
