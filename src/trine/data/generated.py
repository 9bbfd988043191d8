"""Documents and rows made from tasks: a corpus of task texts for a mixture, and endless rows of symbol-level recall.

Rows of recall are a pure function of seed, stage and step; nothing is stored and nothing repeats. Besides rows of the
stage's own length a step holds some of the lengths of the stages before: what was learned at 64 tokens is kept alive
at 1 024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trine.data._errors import DataError
from trine.data.batch import IGNORE_INDEX, Batch
from trine.data.rows import StepPlan
from trine.data.shards import Shards, write_shards
from trine.data.sources import Corpus, Document
from trine.data.tokenizer import Tokenizer
from trine.tasks import FAMILIES, RecallRow, make, recall_row

RECALL = "tasks:recall"
"""Name of the source whose rows are `RecallRows`."""
RECALL_VOCABULARY = 257  # a token for each byte, and the end of a document
LICENCE = "CC0-1.0"  # of generated text: nobody wrote it

SHORT_SHARE = 0.25  # of the tokens of a later stage: rows of the lengths before
SYMBOLS_A_PAIR = 8  # a row holds a pair for every so many of its symbols ...
MOST_PAIRS = 16  # ... but no more than this
_STORED = {"train": 64, "held_out": 64}  # rows kept beside a run, to look at and to evaluate on
_STEPS = 1 << 24  # steps and rows of a step are digits of a seed
_ROWS = 1 << 16


def pairs_for(length: int) -> int:
    """Pairs in a training row of ``length`` symbols: one in 8 symbols, 16 at most."""
    return max(1, min(MOST_PAIRS, length // SYMBOLS_A_PAIR))


def row_batch(rows: Sequence[RecallRow], tokenizer: Tokenizer, size: int | None = None) -> Batch:
    """Lay rows in one packed batch: each is a document of its own, and only its answers have a weight.

    Args:
        rows: at least one.
        tokenizer: has one token for each symbol.
        size: positions of the batch, the rest is padding; default as many as the rows have.

    Raises:
        DataError: no rows, rows that are too long, or a vocabulary in which symbols share tokens.
    """
    lengths = [len(row.text) for row in rows]
    used = sum(lengths)
    size = used if size is None else size
    if not rows or used > size:
        raise DataError(
            f"recall rows: found {len(rows)} of {used} symbols for {size} positions, need 1 or more that fit"
        )
    ids = np.concatenate(tokenizer.encode_batch([row.text for row in rows]))
    if ids.size != used:
        raise DataError(f"vocabulary of {tokenizer.vocab_size}: some recall symbols share a token, need one for each")
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.full(size, tokenizer.eod_id, dtype=np.int64)
    tokens[1:used] = ids[:-1]
    tokens[bounds[:-1]] = tokenizer.eod_id
    answers = np.concatenate([np.array(row.answers) + at for row, at in zip(rows, bounds[:-1].tolist(), strict=True)])
    targets = np.full(size, IGNORE_INDEX, dtype=np.int64)
    targets[answers] = ids[answers]
    weights = np.zeros(size, dtype=np.float32)
    weights[answers] = 1.0
    source = [0] * len(rows)
    if used < size:
        bounds, source = np.append(bounds, size), [*source, -1]
    return Batch(
        tokens_T=torch.from_numpy(tokens),
        targets_T=torch.from_numpy(targets),
        weights_T=torch.from_numpy(weights),
        cu_seqlens_N1=torch.from_numpy(bounds.astype(np.int32)),
        source_N=torch.tensor(source, dtype=torch.int64),
        supervised_bytes=int(answers.size),
    )


@dataclass(frozen=True)
class RecallRows(StepPlan):
    """The rows of one stage of a recall run: what `PackingPlan` is for stored documents.

    Attributes:
        tokenizer: has one token for each symbol.
        row_length: symbols of the stage's own rows.
        tokens_per_step: positions a step.
        micro_batch_tokens: positions a micro-batch, divides ``tokens_per_step``.
        seed: seed of the run, 0 to 4095.
        stage: number of the stage, 0 to 15.
        shorter: lengths of the stages before, whose rows get ``SHORT_SHARE`` of the positions.

    Raises:
        DataError: sizes that do not fit one another.
    """

    tokenizer: Tokenizer
    row_length: int
    tokens_per_step: int
    micro_batch_tokens: int
    seed: int = 0
    stage: int = 0
    shorter: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.micro_batch_tokens < self.row_length:
            raise DataError(
                f"micro_batch_tokens: found {self.micro_batch_tokens}, need at least row_length {self.row_length}"
            )
        self._check_step()
        if not 0 <= self.seed < 1 << 12 or not 0 <= self.stage < 16:
            raise DataError(f"recall rows: found seed {self.seed}, stage {self.stage}, need 0 to 4095 and 0 to 15")

    def rows(self, step: int, micro_batch: int) -> list[RecallRow]:
        """The rows of a micro-batch.

        Raises:
            DataError: a step or micro-batch out of range.
        """
        if not 0 <= step < _STEPS or not 0 <= micro_batch < self.micro_batches_per_step:
            raise DataError(f"step {step}, micro-batch {micro_batch}: need 0 to {_STEPS - 1} and a number in the step")
        first = ((self.seed * 16 + self.stage) * _STEPS + step) * _ROWS
        number = micro_batch * (_ROWS // self.micro_batches_per_step)
        lengths = self._lengths(step * self.micro_batches_per_step + micro_batch)
        return [recall_row(first + number + i, length=n, pairs=pairs_for(n)) for i, n in enumerate(lengths)]

    def _lengths(self, number: int) -> list[int]:
        """Lengths of the rows of micro-batch ``number``, counted over the stage; short rows in turn.

        Where the short share is less than a row of the stage's own length, whole micro-batches are given to it, one in
        so many, so that the share is met over time.
        """
        size, own = self.micro_batch_tokens, self.row_length
        fits = size // own
        if not self.shorter:
            return [own] * fits
        wanted = SHORT_SHARE * fits  # own rows to give up a micro-batch, not whole
        give = int((number + 1) * wanted) - int(number * wanted)
        lengths = [own] * (fits - give)
        room, turn = size - own * len(lengths), number
        while room >= min(self.shorter):
            fitting = [n for n in self.shorter if n <= room]
            lengths.append(fitting[turn % len(fitting)])
            room -= lengths[-1]
            turn += 1
        return lengths

    def _micro_batch(self, step: int, number: int) -> Batch:
        return row_batch(self.rows(step, number), self.tokenizer, self.micro_batch_tokens)

    def describe(self) -> dict[str, Any]:
        """What a run folder records of the stage."""
        return {
            "source": RECALL,
            "row_length": self.row_length,
            "pairs": pairs_for(self.row_length),
            "shorter": list(self.shorter),
            "short_share": SHORT_SHARE if self.shorter else 0.0,
            "seed": self.seed,
            "stage": self.stage,
        }


def recall_tokenizer() -> Tokenizer:
    """One token for each byte, and the end of a document."""
    return Tokenizer.train(["recall"], RECALL_VOCABULARY)


def open_recall(folder: str | Path) -> Shards:
    """Open, or write, the vocabulary and some rows of symbol-level recall: training rows to look at, held-out rows.

    Training does not read them; see `RecallRows`.

    Raises:
        DataError: the folder holds other data, or cannot be written.
    """
    root = Path(folder)
    if (root / "manifest.json").exists():
        shards = Shards.open(root)
        if list(shards.sources) != [RECALL]:
            raise DataError(f"shards {root}: hold {', '.join(shards.sources)}, asked for {RECALL}; name another folder")
        return shards
    documents = []
    for split, count in _STORED.items():
        for i in range(count):
            length = (64, 128, 256, 512)[i % 4]
            row = recall_row(i, "train" if split == "train" else "held_out", length=length, pairs=pairs_for(length))
            spans = [(at, at + 1, 1.0) for at in row.answers]
            name = f"{split}/{i:03d}"
            documents.append(Document.make(RECALL, name, row.text, licence=LICENCE, split=split, weights=spans))
    origin = {"kind": "generated", "task": "recall", "form": "1"}
    return write_shards(root, [Corpus(RECALL, tuple(documents), origin=origin)], recall_tokenizer())


def task_corpus(
    source: str,
    *,
    count: int,
    length: int,
    families: Sequence[str] = (),
    seed: int = 0,
    held_out_one_in: int = 20,
    answer_weight: float = 10.0,
) -> Corpus:
    """Task texts as documents of a source: evidence, filler, question and answer in one.

    Args:
        source: name of the source.
        count: documents.
        length: characters of a document (a token of text is about four).
        families: names; all by default, in turn.
        seed: first seed; document i has seed ``seed + i`` of the training split, held-out ones of the held-out split.
        held_out_one_in: one document in this many is held out.
        answer_weight: weight of the answer's tokens in the loss; all others weigh 1.

    Raises:
        DataError: no documents asked for, an unknown family, or a length too small for one.
    """
    if count < 1 or held_out_one_in < 2:
        raise DataError(f"task corpus: found count {count}, held_out_one_in {held_out_one_in}, need 1 and 2 or more")
    names = tuple(families) or tuple(FAMILIES)
    documents = []
    for i in range(count):
        held_out = i % held_out_one_in == held_out_one_in - 1
        family = names[i % len(names)]
        try:
            task = make(family, seed + i, "held_out" if held_out else "train", length=length)
        except ValueError as error:
            raise DataError(f"source {source}: tasks of family {family!r} of {length} characters: {error}") from error
        shown = task.render()
        # The space before the answer belongs to its first token.
        spans = [(0, len(shown.text) + 1, 1.0), (shown.answer.start - 1, shown.answer.end, answer_weight)]
        split = "held_out" if held_out else "train"
        name = f"{family}/{i:06d}"
        documents.append(Document.make(source, name, shown.text, licence=LICENCE, split=split, weights=spans))
    origin = {"kind": "generated", "families": ",".join(names), "length": str(length), "seed": str(seed)}
    return Corpus(source, tuple(documents), origin=origin, one_in=held_out_one_in, vocabulary=False)
