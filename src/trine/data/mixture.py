"""The rows of a stage whose text comes from several parts: how many rows each part gives, which, and in what order.

Everything is decided when the plan is made, from (data, plan, seed, stage) alone, so a step is looked up: there is no
buffer, no counter and nothing to save for a resume, on however many ranks.

A part (`trine.config.SourceShare`) is a set of documents. Rows of the stage are given to parts one by one, so that at
every row no part is a whole row ahead of or behind its share, also while shares change. A part reads its documents in
passes: first those that were read least by this stage and the stages before, each once, then all again. Of these it
takes just as many as fill its rows; the last one is left in the middle, and the next stage goes on there, whatever the
length of its rows.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trine.config import SourceShare
from trine.data._errors import DataError
from trine.data.packing import Epoch, PackingPlan, cut, draw, lay_flat, pack, shifted_first_pieces
from trine.data.rows import Piece, RowPlan, Rows, ranges
from trine.data.shards import Shards

MOST_EPOCHS = 4.0
"""A source read more often than this is refused unless repeats are allowed."""
LEAST_LONG = 0.4
"""Share of the tokens of a later stage that should come from documents longer than the rows of the stage before."""
OTHERS = "*"
"""As the source of a part: every source that no other part of the mixture names."""


@dataclass(frozen=True)
class PartReport:
    """What one part of a mixture gives in a stage.

    Attributes:
        source, shortest, longest: the part, as in ``SourceShare``.
        documents: documents it may draw from.
        available_tokens: their targets.
        rows: rows of the stage that are its own.
        share: of the stage's rows.
        supervised_tokens: its targets in this stage.
        cut_documents: documents it has in this stage that are longer than a row.
        epochs: passes over its documents in this stage.
        epochs_in_all: passes over its documents in this stage and those before.
    """

    source: str
    shortest: int
    longest: int
    documents: int
    available_tokens: int
    rows: int
    share: float
    supervised_tokens: int
    cut_documents: int
    epochs: float
    epochs_in_all: float


@dataclass(frozen=True)
class MixtureReport:
    """What a stage holds.

    Attributes:
        documents: different documents in it.
        cut_documents: of these, how many are longer than a row and so were cut into consecutive pieces.
        pieces: pieces of documents.
        full_pieces: pieces of exactly the row length.
        bins: rows.
        supervised_tokens: targets.
        padding_share: positions without a target, as a share of all.
        long_share: share of the targets that lie in documents longer than the rows of the stage before; None in a first
            stage.
        parts: one report a part of the mixture.
        warnings: sentences for the user, each about one thing that is likely not what was meant.
    """

    documents: int
    cut_documents: int
    pieces: int
    full_pieces: int
    bins: int
    supervised_tokens: int
    padding_share: float
    long_share: float | None
    parts: tuple[PartReport, ...]
    warnings: tuple[str, ...]


def shares(mixture: Sequence[SourceShare], rows: int) -> NDArray[np.float64]:
    """Share of each part at each row of a stage, float64 [parts, rows]; every column adds up to 1.

    A weight goes linearly from the stage's beginning to its end; row r is taken at its middle, (r + 1/2) / rows, so
    that the mean over the stage is that of the line.
    """
    place_R = (np.arange(rows) + 0.5) / rows
    ends = [(part.weight, part.weight if part.end is None else part.end) for part in mixture]
    weight_CR = np.stack([begin + (end - begin) * place_R for begin, end in ends])
    return weight_CR / weight_CR.sum(0)


def apportion(share_CR: NDArray[np.float64]) -> NDArray[np.int64]:
    """Give every row to one part so that after each row every part has its cumulative share to within one row.

    Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980): part c becomes eligible for
    its next row when it is 1 / (2n - 2) behind, must have it before it is 1 - 1 / (2n - 2) behind, and of the eligible
    parts the one with the nearest deadline is served. The deviation stays within 1 - 1 / (2n - 2).

    Args:
        share_CR: shares, [parts, rows], every column adding up to 1.

    Returns:
        int64 [rows], the part of each row.
    """
    parts, rows = share_CR.shape
    if parts == 1:
        return np.zeros(rows, dtype=np.int64)
    slack = 1.0 / (2 * parts - 2)
    jobs: list[tuple[int, int, int]] = []  # (first row it may have, last row it may have, part)
    for c in range(parts):
        due_R = np.cumsum(share_CR[c])
        nth = np.arange(int(np.ceil(due_R[-1])) + 1)
        first = np.searchsorted(due_R, nth + slack)
        last = np.searchsorted(due_R, nth + 1 - slack)
        jobs += [(a, b, c) for a, b in zip(first.tolist(), last.tolist(), strict=True) if a < rows]
    jobs.sort()
    chosen = np.empty(rows, dtype=np.int64)
    waiting: list[tuple[int, int]] = []
    at = 0
    for r in range(rows):
        while at < len(jobs) and (jobs[at][0] <= r or not waiting):
            heapq.heappush(waiting, jobs[at][1:])
            at += 1
        chosen[r] = heapq.heappop(waiting)[1]
    return chosen


class MixturePlan(RowPlan):
    """Rows of one stage, drawn from a mixture.

    Attributes:
        shards, row_length, tokens_per_step, micro_batch_tokens, seed, stage: as in ``PackingPlan``.
        mixture: the parts; none means every training document, as ``PackingPlan`` orders them if no stage came before.
        steps: steps of the stage.
        used_D: int64, targets of each document that this stage reads.
        used_before_D: the same of the stages before.
    """

    def __init__(
        self,
        shards: Shards,
        mixture: tuple[SourceShare, ...] = (),
        *,
        row_length: int = 256,
        tokens_per_step: int = 16384,
        micro_batch_tokens: int = 4096,
        steps: int,
        seed: int = 0,
        stage: int = 0,
        before: Sequence[MixturePlan] = (),
        allow_repeats: bool = False,
    ) -> None:
        """Decide every row of the stage.

        Args:
            shards: where the tokens are.
            mixture: the parts. No document may belong to two of them. Source ``"*"`` means every source that no other
                part names.
            row_length: longest piece, tokens.
            tokens_per_step: positions a step, a multiple of ``micro_batch_tokens``.
            micro_batch_tokens: positions a micro-batch, a multiple of ``row_length``.
            steps: steps of the stage, counted from 0 inside it.
            seed: seed of the run.
            stage: number of the stage.
            before: the plans of all earlier stages, in order; what they read is read again only when all is used up.
            allow_repeats: let a part be read more than ``MOST_EPOCHS`` times.

        Raises:
            DataError: sizes that do not fit one another; a mixture that names no source, no document or one document
                twice; a part read too often; plans of other data in ``before``.
        """
        self.shards, self.row_length, self.tokens_per_step = shards, row_length, tokens_per_step
        self.micro_batch_tokens, self.steps, self.seed, self.stage = micro_batch_tokens, steps, seed, stage
        self._check_sizes()
        if steps < 1:
            raise DataError(f"steps: found {steps}, need at least 1")
        if any(plan.shards.hash != shards.hash for plan in before):
            raise DataError("before: a plan of other data, need the earlier stages of this run")
        self.mixture = tuple(mixture)
        self._before_length = before[-1].row_length if before else None
        self._targets_D = np.diff(shards.offsets)
        self.used_D: NDArray[np.int64] = np.zeros(self._targets_D.size, dtype=np.int64)
        self.used_before_D = np.zeros(self._targets_D.size, dtype=np.int64)
        # Without a mixture rows come from all over the documents, as ever; they are then not used up one by one.
        self._in_order: bool = bool(mixture or before)
        read_D = np.zeros(self._targets_D.size, dtype=np.int64)
        for plan in before:
            self.used_before_D += plan.used_D
            read_D += plan.used_D if plan._in_order else -(-plan.used_D // self._targets_D) * self._targets_D
        count = steps * tokens_per_step // row_length
        parts = self.mixture or (SourceShare(OTHERS),)
        self._members = _members(shards, parts)
        self._part_R = apportion(shares(parts, count))
        if self._in_order:
            taken = np.bincount(self._part_R, minlength=len(parts))
            sides = [
                self._take(documents, read_D, int(rows), part.source, part.shortest, part.longest)
                for part, documents, rows in zip(parts, self._members, taken, strict=True)
            ]
            first = np.cumsum(taken) - taken
            place = np.empty(count, dtype=np.int64)
            place[np.argsort(self._part_R, kind="stable")] = ranges(first, taken)
            self._rows = Rows.join(sides).take(place)
        else:
            whole = PackingPlan(shards, row_length, tokens_per_step, micro_batch_tokens, seed, stage)
            self._rows = whole.rows(count)
        used = np.bincount(self._rows.document_P, self._rows.length_P, self._targets_D.size)
        self.used_D = used.astype(np.int64)
        self._report = self._count(parts)
        if not allow_repeats:
            self._refuse_repeats()

    # -- which rows --------------------------------------------------------------------------------------------------

    def _take(self, documents: NDArray[np.int64], read_D: NDArray[np.int64], rows: int, *part: object) -> Rows:
        """``rows`` rows of a part's documents, those read least first; ``read_D`` says what was read before."""
        targets = self._targets_D[documents]
        passes, offset = read_D[documents] // targets, read_D[documents] % targets
        key = (self.shards.hash, self.seed, self.stage, self.row_length, *part)
        found: list[Rows] = []
        while rows > 0:
            level = int(passes.min())
            drawn = draw(documents.size, *key, level, "documents")
            chosen = np.flatnonzero(passes == level)
            chosen = chosen[np.lexsort((drawn[chosen], offset[chosen] == 0))]
            first = None if level == 0 else shifted_first_pieces(documents.size, self.row_length, *key, level)[chosen]
            epoch = _fill(documents[chosen], offset[chosen], targets[chosen], first, self.row_length, rows)
            bins = epoch.bins_B1.size - 1
            order = np.argsort(draw(bins, *key, level, "order"), kind="stable")
            found.append(lay_flat(epoch, order))
            rows -= bins
            passes[chosen] += 1
            offset[chosen] = 0
        return Rows.join(found)

    def _row_pieces(self, begin: int, end: int) -> list[Piece]:
        """See ``RowPlan``."""
        if end > self._rows.count:
            raise DataError(f"step {begin * self.row_length // self.tokens_per_step}: need 0 to {self.steps - 1}")
        return self._rows.pieces(begin, end)

    # -- reports -----------------------------------------------------------------------------------------------------

    def report(self) -> MixtureReport:
        """What the stage holds, part by part, with warnings."""
        return self._report

    def steps_per_epoch(self) -> float:
        """Steps in which the stage would read as many targets as the documents of all parts have."""
        available = sum(part.available_tokens for part in self._report.parts)
        return available * self.steps / max(1, self._report.supervised_tokens)

    def describe(self) -> dict[str, Any]:
        """What a run folder records of the plan, JSON-ready."""
        return {
            "row_length": self.row_length,
            "tokens_per_step": self.tokens_per_step,
            "micro_batch_tokens": self.micro_batch_tokens,
            "steps": self.steps,
            "seed": self.seed,
            "stage": self.stage,
            "mixture": [asdict(part) for part in self.mixture],
            "data": self.shards.hash,
            **asdict(self._report),
        }

    def _count(self, parts: Sequence[SourceShare]) -> MixtureReport:
        """Count what the stage holds."""
        rows, targets_D = self._rows, self._targets_D
        tokens = int(rows.length_P.sum())
        reports = []
        for c, (part, documents) in enumerate(zip(parts, self._members, strict=True)):
            available = int(targets_D[documents].sum())
            here, before = int(self.used_D[documents].sum()), int(self.used_before_D[documents].sum())
            given = int((self._part_R == c).sum())
            reports.append(
                PartReport(
                    source=part.source,
                    shortest=part.shortest,
                    longest=part.longest,
                    documents=documents.size,
                    available_tokens=available,
                    rows=given,
                    share=given / rows.count,
                    supervised_tokens=here,
                    cut_documents=int(((self.used_D > 0) & (targets_D > self.row_length))[documents].sum()),
                    epochs=here / available,
                    epochs_in_all=(here + before) / available,
                )
            )
        long_share, previous = None, self._before_length
        if previous is not None:
            long_share = float(self.used_D[targets_D - 1 > previous].sum() / tokens)
        return MixtureReport(
            documents=int((self.used_D > 0).sum()),
            cut_documents=sum(report.cut_documents for report in reports),
            pieces=rows.length_P.size,
            full_pieces=int((rows.length_P == self.row_length).sum()),
            bins=rows.count,
            supervised_tokens=tokens,
            padding_share=1.0 - tokens / (rows.count * self.row_length),
            long_share=long_share,
            parts=tuple(reports),
            warnings=tuple(self._warnings(reports, long_share)),
        )

    def _warnings(self, reports: Sequence[PartReport], long_share: float | None) -> list[str]:
        found = [
            f"stage {self.stage + 1}: {_name(part)} gets none of the {self._rows.count} rows; its share is too small"
            for part in reports
            if part.rows == 0
        ]
        if long_share is not None and self._before_length != self.row_length and long_share < LEAST_LONG:
            found.append(
                f"stage {self.stage + 1}: {long_share:.0%} of the tokens come from documents longer than the "
                f"{self._before_length} tokens of the stage before, need {LEAST_LONG:.0%} for rows of "
                f"{self.row_length} to teach more than shorter ones; raise the share of long documents"
            )
        return found

    def _refuse_repeats(self) -> None:
        for part in self._report.parts:
            if part.rows and part.epochs_in_all > MOST_EPOCHS:
                raise DataError(
                    f"stage {self.stage + 1}: {_name(part)} would be read {part.epochs_in_all:.1f} times "
                    f"({part.documents} documents, {part.available_tokens} tokens), need at most {MOST_EPOCHS:g}: "
                    "add data, lower its share, or allow repeats"
                )


def _name(part: PartReport | SourceShare) -> str:
    """A part in words."""
    limits = [f"from {part.shortest}"] * (part.shortest > 0) + [f"to {part.longest}"] * (part.longest > 0)
    return f"mixture part {part.source}" + (f" ({' '.join(limits)} tokens)" if limits else "")


def _members(shards: Shards, parts: Sequence[SourceShare]) -> list[NDArray[np.int64]]:
    """Training documents of each part, ascending. Raises DataError when a part has none, or two share one."""
    train = shards.select("train")
    if not train.size:
        raise DataError(f"mixture: no documents to train on in {shards.folder}")
    tokens, sources = np.diff(shards.offsets)[train] - 1, shards.source_of[train]
    named = {part.source for part in parts} - {OTHERS}
    found: list[NDArray[np.int64]] = []
    owner = np.full(len(shards.documents), -1, dtype=np.int64)
    for c, part in enumerate(parts):
        if part.source == OTHERS:
            wanted = [i for i, name in enumerate(shards.sources) if name not in named]
        elif part.source in shards.sources:
            wanted = [shards.sources.index(part.source)]
        else:
            near = difflib.get_close_matches(part.source, shards.sources, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(f"mixture: no source {part.source!r}, the data has {', '.join(shards.sources)}{hint}")
        fits = np.isin(sources, wanted) & (tokens >= part.shortest)
        if part.longest:
            fits &= tokens <= part.longest
        documents = train[fits]
        if not documents.size:
            have = tokens[np.isin(sources, wanted)]
            sizes = f"; its documents have {have.min()} to {have.max()} tokens" if have.size else ""
            hint = ": change the limits, or give the stage no mixture" if have.size else ""
            raise DataError(f"{_name(part)}: holds no training document{sizes}{hint}")
        taken = documents[owner[documents] >= 0]
        if taken.size:
            other, one = parts[int(owner[taken[0]])], shards.documents[int(taken[0])]
            raise DataError(
                f"{_name(part)}: shares {taken.size} documents with {_name(other)}, for example {one.name} "
                f"({one.tokens} tokens); need parts without a common document"
            )
        owner[documents] = c
        found.append(documents)
    return found


def _fill(
    documents: NDArray[np.int64],
    offset: NDArray[np.int64],
    targets: NDArray[np.int64],
    first: NDArray[np.int64] | None,
    row_length: int,
    rows: int,
) -> Epoch:
    """Pack documents, in the order given, from ``offset`` on, into at most ``rows`` rows.

    Either all of them fit, or the first so many fill exactly ``rows`` rows; the last one is then possibly left after a
    whole number of rows of its text.
    """
    left = targets - offset
    if first is not None:
        first = np.where(offset > 0, row_length, first)

    def packed(count: int) -> Epoch:
        head = None if first is None else first[:count]
        stream, start, length = cut(left[:count], row_length, head)
        bins_B1, pieces_P = pack(length, row_length)
        order_B = np.arange(bins_B1.size - 1, dtype=np.int64)
        return Epoch(documents[stream], start + offset[stream], length, bins_B1, pieces_P, order_B)

    total = np.cumsum(left)
    # More documents than these hold more targets than the rows have positions.
    high = int(np.searchsorted(total, rows * row_length, side="right"))
    built = packed(high)
    if built.order_B.size <= rows:
        low = high
    else:
        low, built = _longest_prefix(packed, total, high, built.order_B.size, rows)
    free = rows - built.order_B.size
    while free > 0 and low < documents.size:
        take = min(int(left[low]), free * row_length)
        _, start, length = cut(np.array([take]), row_length)
        built = _append(built, int(documents[low]), start + offset[low], length)
        free -= length.size
        low += 1
    return built


def _longest_prefix(
    packed: Callable[[int], Epoch], total: NDArray[np.int64], high: int, high_bins: int, rows: int
) -> tuple[int, Epoch]:
    """The most documents that fit into ``rows`` rows, fewer than ``high``, which take ``high_bins``.

    Bins grow almost in proportion to targets, so the next guess is interpolated; every second one halves the interval.
    """
    low, built, halve = 0, packed(0), False
    while high - low > 1 and built.order_B.size < rows:
        low_total, high_total = int(total[low - 1]) if low else 0, int(total[high - 1])
        part = (rows - built.order_B.size) / (high_bins - built.order_B.size)
        guess = int(np.searchsorted(total, low_total + part * (high_total - low_total)))
        middle = (low + high) // 2 if halve else min(max(guess, low + 1), high - 1)
        tried = packed(middle)
        if tried.order_B.size <= rows:
            low, built = middle, tried
        else:
            high, high_bins = middle, tried.order_B.size
        halve = not halve
    return low, built


def _append(epoch: Epoch, document: int, start_P: NDArray[np.int64], length_P: NDArray[np.int64]) -> Epoch:
    """An epoch with pieces of one more document, each in a bin of its own."""
    pieces, bins = epoch.length_P.size, epoch.order_B.size
    more = np.arange(length_P.size, dtype=np.int64)
    return Epoch(
        np.concatenate([epoch.document_P, np.full(length_P.size, document, dtype=np.int64)]),
        np.concatenate([epoch.start_P, start_P]),
        np.concatenate([epoch.length_P, length_P]),
        np.concatenate([epoch.bins_B1, epoch.bins_B1[-1] + 1 + more]),
        np.concatenate([epoch.pieces_P, pieces + more]),
        np.arange(bins + length_P.size, dtype=np.int64),
    )
