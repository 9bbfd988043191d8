"""From pieces of documents to the packed rows a model sees; what every plan of rows has in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trine.data._errors import DataError
from trine.data.batch import IGNORE_INDEX, Batch
from trine.data.shards import Shards


@dataclass(frozen=True)
class Piece:
    """Consecutive targets of one document: inputs ``start .. start + length - 1`` of its stream."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class Rows:
    """Rows laid flat: row r holds the pieces ``bounds_R1[r]`` to ``bounds_R1[r + 1] - 1``.

    Attributes:
        document_P, start_P, length_P: int64, the pieces.
        bounds_R1: int64, from 0 to P.
    """

    document_P: NDArray[np.int64]
    start_P: NDArray[np.int64]
    length_P: NDArray[np.int64]
    bounds_R1: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Rows."""
        return self.bounds_R1.size - 1

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """The rows with these numbers, in that order."""
        counts = np.diff(self.bounds_R1)[rows]
        at = ranges(self.bounds_R1[rows], counts)
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return Rows(self.document_P[at], self.start_P[at], self.length_P[at], bounds)

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """The pieces of rows ``begin`` to ``end - 1``, in order."""
        a, b = int(self.bounds_R1[begin]), int(self.bounds_R1[end])
        columns = (self.document_P[a:b].tolist(), self.start_P[a:b].tolist(), self.length_P[a:b].tolist())
        return [Piece(*one) for one in zip(*columns, strict=True)]

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """All rows of the parts, one part after another."""
        none = np.zeros(0, np.int64)
        counts = np.concatenate([none, *(np.diff(part.bounds_R1) for part in parts)])
        return cls(
            np.concatenate([none, *(part.document_P for part in parts)]),
            np.concatenate([none, *(part.start_P for part in parts)]),
            np.concatenate([none, *(part.length_P for part in parts)]),
            np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        )


class StepPlan:
    """Steps of ``tokens_per_step`` positions, cut in micro-batches of ``micro_batch_tokens`` that ranks take in turn.

    Subclasses say what a micro-batch holds (``_micro_batch``).
    """

    tokens_per_step: int
    micro_batch_tokens: int

    def _check_step(self) -> None:
        """Raises DataError for a step that is not cut evenly."""
        if self.tokens_per_step < self.micro_batch_tokens or self.tokens_per_step % self.micro_batch_tokens:
            raise DataError(
                f"tokens_per_step: found {self.tokens_per_step}, "
                f"need a multiple of micro_batch_tokens {self.micro_batch_tokens}"
            )

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches a step, over all ranks."""
        return self.tokens_per_step // self.micro_batch_tokens

    def micro_batches(self, step: int, rank: int = 0, world: int = 1) -> list[Batch]:
        """The micro-batches of a step that fall to ``rank``; all of them, in order, for one process.

        Raises:
            DataError: a world size that does not divide the micro-batches of a step, or a step outside the plan.
        """
        if world < 1 or not 0 <= rank < world or self.micro_batches_per_step % world:
            raise DataError(
                f"rank {rank} of {world}: need a world size that divides {self.micro_batches_per_step} micro-batches"
            )
        return [self._micro_batch(step, m) for m in range(rank, self.micro_batches_per_step, world)]

    def _micro_batch(self, step: int, number: int) -> Batch:
        """One micro-batch of a step."""
        raise TypeError(f"{type(self).__name__} does not say what its micro-batches hold")


class RowPlan(StepPlan):
    """A plan that knows the pieces of each micro-batch of each step, and lays them out.

    No piece is longer than ``row_length``. Subclasses say which pieces (``_row_pieces``).
    """

    shards: Shards
    row_length: int

    def _check_sizes(self) -> None:
        """Raises DataError for sizes that do not fit one another."""
        if self.row_length < 2:
            raise DataError(f"row_length: found {self.row_length}, need at least 2")
        if self.micro_batch_tokens < self.row_length or self.micro_batch_tokens % self.row_length:
            raise DataError(
                f"micro_batch_tokens: found {self.micro_batch_tokens}, need a multiple of row_length {self.row_length}"
            )
        self._check_step()

    def pieces(self, step: int, micro_batch: int) -> list[Piece]:
        """The pieces of one micro-batch; the full ones first, so that most sequences begin at a multiple of it.

        Raises:
            DataError: a step or micro-batch outside the plan.
        """
        if step < 0 or not 0 <= micro_batch < self.micro_batches_per_step:
            raise DataError(
                f"step {step}, micro-batch {micro_batch}: need step >= 0 and "
                f"micro-batch 0 to {self.micro_batches_per_step - 1}"
            )
        rows = self.micro_batch_tokens // self.row_length
        begin = (step * self.micro_batches_per_step + micro_batch) * rows
        return sorted(self._row_pieces(begin, begin + rows), key=lambda piece: piece.length < self.row_length)

    def _row_pieces(self, begin: int, end: int) -> list[Piece]:
        """The pieces of rows ``begin`` to ``end - 1`` of the plan, in order."""
        raise TypeError(f"{type(self).__name__} does not say what its rows hold")

    def _micro_batch(self, step: int, number: int) -> Batch:
        return self._batch(self.pieces(step, number))

    def _batch(self, pieces: list[Piece]) -> Batch:
        """Look the tokens of pieces up and lay them in one row, padded to ``micro_batch_tokens``."""
        shards, size = self.shards, self.micro_batch_tokens
        eod = shards.tokenizer.eod_id
        tokens = np.full(size, eod, dtype=np.int64)
        targets = np.full(size, IGNORE_INDEX, dtype=np.int64)
        weights = np.zeros(size, dtype=np.float32)
        at = 0
        bounds = [0]
        for piece in pieces:
            stream = shards.stream(piece.document)
            end = at + piece.length
            tokens[at:end] = stream[piece.start : piece.start + piece.length]
            following = stream[piece.start + 1 : piece.start + 1 + piece.length]
            targets[at : at + following.size] = following
            if following.size < piece.length:
                targets[end - 1] = eod
            weights[at:end] = shards.target_weights(piece.document, piece.start, piece.length)
            at = end
            bounds.append(at)
        supervised = int(shards.byte_lengths[targets[:at][weights[:at] > 0]].sum())
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
            source_N=torch.tensor([int(shards.source_of[p.document]) for p in pieces] + none, dtype=torch.int64),
            document_N=torch.tensor([p.document for p in pieces] + none, dtype=torch.int64),
            start_N=torch.tensor([p.start for p in pieces] + none, dtype=torch.int64),
            supervised_bytes=supervised,
        )


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers ``starts[i] .. starts[i] + counts[i] - 1`` for every i, one after another, int64."""
    first = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - first, counts)
