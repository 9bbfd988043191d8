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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trine.data._errors import DataError
from trine.data.batch import IGNORE_INDEX, Batch
from trine.data.shards import Shards

_KEPT_EPOCHS = 2


@dataclass(frozen=True)
class Piece:
    """Consecutive targets of one document: inputs ``start .. start + length - 1`` of its stream."""

    document: int
    start: int
    length: int


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


def best_fit(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: items into bins of ``capacity``, each into the fullest bin it fits.

    Ties go to the item, and the bin, with the lowest number. O(n log n) comparisons.

    Args:
        lengths: int64 [n], each 1 to ``capacity``.
        capacity: size of a bin.

    Returns:
        For each bin the items in it, in the order they were placed.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for item in np.lexsort((np.arange(lengths.size), -lengths)).tolist():
        length = int(lengths[item])
        at = bisect_left(room, (length, -1))
        if at == len(room):
            left, index = capacity, len(bins)
            bins.append([])
        else:
            left, index = room.pop(at)
        bins[index].append(item)
        if left > length:
            insort(room, (left - length, index))
    return bins


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


@dataclass(eq=False)
class PackingPlan:
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
        if self.row_length < 2:
            raise DataError(f"row_length: found {self.row_length}, need at least 2")
        if self.micro_batch_tokens < self.row_length or self.micro_batch_tokens % self.row_length:
            raise DataError(
                f"micro_batch_tokens: found {self.micro_batch_tokens}, need a multiple of row_length {self.row_length}"
            )
        if self.tokens_per_step < self.micro_batch_tokens or self.tokens_per_step % self.micro_batch_tokens:
            raise DataError(
                f"tokens_per_step: found {self.tokens_per_step}, "
                f"need a multiple of micro_batch_tokens {self.micro_batch_tokens}"
            )
        chosen = self.shards.select("train") if self.documents is None else np.asarray(self.documents, dtype=np.int64)
        if chosen.size == 0:
            raise DataError(f"packing plan: no documents to train on in {self.shards.folder}")
        if chosen.min() < 0 or chosen.max() >= len(self.shards.documents) or np.unique(chosen).size != chosen.size:
            raise DataError(f"documents: need different indices from 0 to {len(self.shards.documents) - 1}")
        self.documents = np.sort(chosen)
        self._lengths = np.diff(self.shards.offsets)[self.documents]
        self._source_of = np.array(
            [self.shards.sources.index(entry.source) for entry in self.shards.documents], dtype=np.int64
        )
        self._bytes_of = self.shards.tokenizer.byte_lengths.astype(np.int64)

    # -- epochs ------------------------------------------------------------------------------------------------------

    def _draw(self, count: int, epoch: int, purpose: str) -> NDArray[np.uint64]:
        """Uniform 64-bit numbers that depend on data, seed, stage and epoch alone."""
        key = f"{self.shards.hash}/{self.seed}/{self.stage}/{self.row_length}/{epoch}/{purpose}"
        return split_mix(count, int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))

    def epoch(self, number: int) -> Epoch:
        """The pieces and bins of an epoch (the last two asked for are kept)."""
        if number in self._epochs:
            return self._epochs[number]
        assert self.documents is not None
        first = None
        if self.shift_cuts and number > 0:
            drawn = self._draw(self._lengths.size, number, "cuts") % np.uint64(self.row_length)
            first = 1 + drawn.astype(np.int64)
        stream, start, length = cut(self._lengths, self.row_length, first)
        full = np.flatnonzero(length == self.row_length)
        short = np.flatnonzero(length < self.row_length)
        packed = [[int(short[i]) for i in items] for items in best_fit(length[short], self.row_length)]
        sizes = np.array([1] * full.size + [len(items) for items in packed], dtype=np.int64)
        pieces = np.concatenate([full, np.array([i for items in packed for i in items], dtype=np.int64)])
        built = Epoch(
            document_P=self.documents[stream],
            start_P=start,
            length_P=length,
            bins_B1=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
            pieces_P=pieces,
            order_B=np.argsort(self._draw(sizes.size, number, "order"), kind="stable"),
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

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches a step, over all ranks."""
        return self.tokens_per_step // self.micro_batch_tokens

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

    def pieces(self, step: int, micro_batch: int) -> list[Piece]:
        """The pieces of one micro-batch; the full ones first, so that most sequences begin at a multiple of it."""
        if step < 0 or not 0 <= micro_batch < self.micro_batches_per_step:
            raise DataError(
                f"step {step}, micro-batch {micro_batch}: need step >= 0 and "
                f"micro-batch 0 to {self.micro_batches_per_step - 1}"
            )
        rows = self.micro_batch_tokens // self.row_length
        begin = (step * self.micro_batches_per_step + micro_batch) * rows
        found: list[Piece] = []
        for index in range(begin, begin + rows):
            built, number = self._bin(index)
            for p in built.pieces_P[built.bins_B1[number] : built.bins_B1[number + 1]].tolist():
                found.append(Piece(int(built.document_P[p]), int(built.start_P[p]), int(built.length_P[p])))
        return sorted(found, key=lambda piece: piece.length < self.row_length)

    def micro_batches(self, step: int, rank: int = 0, world: int = 1) -> list[Batch]:
        """The micro-batches of a step that fall to ``rank``; all of them, in order, for one process.

        Raises:
            DataError: a world size that does not divide the micro-batches of a step, or a step below 0.
        """
        if world < 1 or not 0 <= rank < world or self.micro_batches_per_step % world:
            raise DataError(
                f"rank {rank} of {world}: need a world size that divides {self.micro_batches_per_step} micro-batches"
            )
        return [self._batch(self.pieces(step, m)) for m in range(rank, self.micro_batches_per_step, world)]

    def _batch(self, pieces: list[Piece]) -> Batch:
        """Look the tokens of pieces up and lay them in one row, padded to ``micro_batch_tokens``."""
        size, eod = self.micro_batch_tokens, self.shards.tokenizer.eod_id
        tokens = np.full(size, eod, dtype=np.int64)
        targets = np.full(size, IGNORE_INDEX, dtype=np.int64)
        weights = np.zeros(size, dtype=np.float32)
        at = 0
        bounds = [0]
        for piece in pieces:
            stream = self.shards.stream(piece.document)
            end = at + piece.length
            tokens[at:end] = stream[piece.start : piece.start + piece.length]
            following = stream[piece.start + 1 : piece.start + 1 + piece.length]
            targets[at : at + following.size] = following
            if following.size < piece.length:
                targets[end - 1] = eod
            weights[at:end] = 1.0
            at = end
            bounds.append(at)
        supervised = int(self._bytes_of[targets[:at]].sum())
        padding = 0
        while at < size:
            at = min(size, at + self.row_length)
            bounds.append(at)
            padding += 1
        none = [-1] * padding
        return Batch(
            tokens_T=torch.from_numpy(tokens),
            targets_T=torch.from_numpy(targets),
            weights_T=torch.from_numpy(weights),
            cu_seqlens_N1=torch.tensor(bounds, dtype=torch.int32),
            source_N=torch.tensor([int(self._source_of[p.document]) for p in pieces] + none, dtype=torch.int64),
            document_N=torch.tensor([p.document for p in pieces] + none, dtype=torch.int64),
            start_N=torch.tensor([p.start for p in pieces] + none, dtype=torch.int64),
            supervised_bytes=supervised,
        )

    def steps(self, begin: int, end: int) -> Iterator[list[Batch]]:
        """The micro-batches of steps ``begin`` to ``end - 1``."""
        return (self.micro_batches(step) for step in range(begin, end))

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
