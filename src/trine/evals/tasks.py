"""Task families by depth and length: accuracy beside chance, loss of the answer, and what the evidence is worth.

The evidence gap is the loss of the true answer's tokens when the evidence tells of another world, minus their loss with
the evidence in place. A model that does not look at the evidence has a gap of 0, however well it guesses.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from trine.data import DataError, Tokenizer
from trine.evals.answers import TOKENS_PER_CALL, Answered, Asked, score_answers
from trine.evals.bits import LanguageModel
from trine.tasks import FAMILIES, RecallRow, Split, Task, make, recall_row

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SAMPLES = 4
SYMBOL_ROWS = 64


@dataclass(frozen=True)
class TaskPlan:
    """What is asked at which length: decided before anything is made, so that its cost is known.

    Attributes:
        cells: (family, length, depth, samples).
        left_out: what was asked for and is not measured, in words.
    """

    cells: tuple[tuple[str, int, float, int], ...]
    left_out: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens to read: every task is read with its evidence in place and swapped."""
        return sum(2 * length * samples for _, length, _, samples in self.cells)


def plan_tasks(
    lengths: Sequence[int],
    *,
    families: Sequence[str] = (),
    depths: Sequence[float] = DEPTHS,
    samples: int = SAMPLES,
    budget: int = 0,
) -> TaskPlan:
    """Choose cells for an evaluation.

    Args:
        lengths: tokens of the whole task.
        families: names; all by default.
        depths: where the evidence lies.
        samples: tasks a cell.
        budget: most tokens to read, 0 for no limit. The longest lengths are left out, and named, until an equal part
            for each of the others is enough to ask every family once. In its part a length gets fewer samples and
            then fewer depths, down to the middle one.

    Raises:
        ValueError: no length, or an unknown family.
    """
    if not lengths:
        raise ValueError("lengths: found none, need at least one")
    names = tuple(families) or tuple(FAMILIES)
    for name in names:
        if name not in FAMILIES:
            raise ValueError(f"families: found {name!r}, need some of {', '.join(FAMILIES)}")
    cells: list[tuple[str, int, float, int]] = []
    left_out: list[str] = []
    kept = sorted(set(lengths))
    while budget and kept and budget // len(kept) < 2 * kept[-1] * len(names):
        once, part = 2 * kept[-1] * len(names), budget // len(kept)
        of = f"the {budget:,}" if len(kept) == 1 else f"its part, {part:,} of the {budget:,}"
        left_out.insert(0, f"tasks of {kept.pop()} tokens: need {once:,} tokens, more than {of} that may be read")
    for length in kept:
        most = budget // len(kept) // (2 * length * len(names)) if budget else samples * len(depths)
        use = depths if most >= len(depths) else _thinned(depths, most)
        each = min(samples, most // len(use))
        cells += [(name, length, depth, each) for name in names for depth in use]
    return TaskPlan(tuple(cells), tuple(left_out))


def _thinned(depths: Sequence[float], count: int) -> list[float]:
    """``count`` of the depths, evenly; the middle one alone for 1."""
    if count == 1:
        return [depths[len(depths) // 2]]
    return [depths[round(i * (len(depths) - 1) / (count - 1))] for i in range(count)]


def evaluate_tasks(
    model: LanguageModel,
    tokenizer: Tokenizer,
    plan: TaskPlan,
    *,
    split: Split = "evaluation",
    tokens_per_call: int = TOKENS_PER_CALL,
    tick: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Ask every cell of a plan.

    Args:
        model: see `trine.evals.bits.LanguageModel`.
        tokenizer: its vocabulary.
        plan: see `plan_tasks`.
        split: which seeds.
        tokens_per_call: see `score_answers`.
        tick: called with tokens done.

    Returns:
        ``families``: name -> cells with ``length``, ``depth``, ``accuracy`` (whole answers), ``token_accuracy``,
        ``chance``, ``loss`` (nats an answer token), ``gap``, ``count``; ``left_out``; ``tokens``; ``seconds``. A length
        that is too small for a family's facts is left out by name.
    """
    began = time.perf_counter()
    left_out = list(plan.left_out)
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    small: set[tuple[str, int]] = set()
    # Tasks of one length are made and asked together, and forgotten before the next.
    for length in sorted({length for _, length, _, _ in plan.cells}):
        cells = [cell for cell in plan.cells if cell[1] == length]
        tasks: list[tuple[int, Task]] = []
        for number, (name, _, depth, samples) in enumerate(cells):
            if (name, length) in small:
                continue
            for i in range(samples):
                try:
                    seed = _seed(length, depth, i)
                    tasks.append((number, _task(name, seed, split, length, depth, tokenizer)))
                except _TooShort as error:
                    small.add((name, length))
                    left_out.append(f"{name} at {length} tokens: {error}")
                    break
        asked = [one for _, task in tasks for one in _both_ways(task, tokenizer)]
        scores = score_answers(model, asked, tokens_per_call=tokens_per_call, tick=tick)
        for number, (name, _, depth, _) in enumerate(cells):
            mine = [i for i, (n, _) in enumerate(tasks) if n == number]
            if mine:
                pairs = [(scores[2 * i], scores[2 * i + 1]) for i in mine]
                cell = _summary(pairs, fmean(tasks[i][1].chance for i in mine))
                found[name].append({"length": length, "depth": depth, **cell})
    return {
        "families": {name: found[name] for name in FAMILIES if name in found},
        "left_out": left_out,
        "tokens": plan.tokens,
        "seconds": time.perf_counter() - began,
    }


class _TooShort(ValueError):
    """The facts of a task do not fit the length."""


def _task(name: str, seed: int, split: Split, length: int, depth: float, tokenizer: Tokenizer) -> Task:
    # The end-of-document token that a prompt begins with is one of its tokens.
    try:
        return make(name, seed, split, length=length - 1, units=lambda text: len(tokenizer.encode(text)), depth=depth)
    except ValueError as error:
        if str(error).startswith("length:"):
            raise _TooShort(str(error).removeprefix("length: ")) from error
        raise


def _seed(length: int, depth: float, number: int) -> int:
    """Seeds of different cells differ; they depend on nothing but the cell."""
    return (length * 1_001 + round(1_000 * depth)) * 1_000 + number


def asked_of(prompt: str, answer: str, tokenizer: Tokenizer) -> Asked:
    """Tokens of a prompt and its answer; the two are tokenised apart, as a prompt is when a model is asked."""
    before, after = tokenizer.encode_batch([prompt, answer])
    stream = np.concatenate([np.array([tokenizer.eod_id], dtype=np.int64), before, after])
    return Asked(stream, np.arange(1 + before.size, stream.size))


def asked_of_row(row: RecallRow, tokenizer: Tokenizer) -> Asked:
    """Tokens of a symbol row and the places of its answers.

    Raises:
        DataError: a vocabulary in which symbols share tokens.
    """
    ids = tokenizer.encode_batch([row.text])[0]
    if ids.size != len(row.text):
        raise DataError(f"vocabulary of {tokenizer.vocab_size}: some recall symbols share a token, need one for each")
    stream = np.concatenate([np.array([tokenizer.eod_id], dtype=np.int64), ids])
    return Asked(stream, np.array(row.answers, dtype=np.int64) + 1)


def _both_ways(task: Task, tokenizer: Tokenizer) -> Iterator[Asked]:
    """The true answer after the evidence in place, then after swapped evidence."""
    shown, other = task.render(), task.swap_evidence().render(task.answer)
    yield asked_of(shown.prompt, shown.completion, tokenizer)
    yield asked_of(other.prompt, other.completion, tokenizer)


def _summary(pairs: Sequence[tuple[Answered, Answered]], chance: float) -> dict[str, Any]:
    """Figures of a cell from (in place, swapped) scores."""
    in_place = [one for one, _ in pairs]
    tokens = sum(one.tokens for one in in_place)
    return {
        "accuracy": fmean(one.right for one in in_place),
        "token_accuracy": sum(one.right_tokens for one in in_place) / tokens,
        "chance": chance,
        "loss": sum(one.loss * one.tokens for one in in_place) / tokens,
        "gap": sum((other.loss - one.loss) * one.tokens for one, other in pairs) / tokens,
        "count": len(pairs),
    }


def evaluate_recall(
    model: LanguageModel,
    tokenizer: Tokenizer,
    cases: Sequence[tuple[int, int, int | None]],
    *,
    rows: int = SYMBOL_ROWS,
    split: Split = "evaluation",
    tokens_per_call: int = TOKENS_PER_CALL,
    tick: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Symbol-level recall: accuracy of single answers and the evidence gap.

    Args:
        model: see `trine.evals.bits.LanguageModel`.
        tokenizer: a vocabulary with one token for each symbol.
        cases: (length, pairs, distance): symbols of a row, pairs in it, and the exact distance of one question, or
            None to ask for every pair, wherever it lies.
        rows: rows a case of up to 512 symbols; fewer of longer ones, so that they stay affordable, and at least 8.
        split: which seeds.
        tokens_per_call: see `score_answers`.
        tick: called with tokens done.

    Returns:
        For each case ``length``, ``pairs``, ``distance``, ``accuracy``, ``chance`` (one of the row's values by fair
        dice), ``loss``, ``gap`` (nats) and ``count`` of answers.
    """
    found = []
    for number, (length, pairs, distance) in enumerate(cases):
        count = min(rows, max(8, rows * 512 // length))
        queries = 1 if distance is not None else pairs
        seeds = range(number * 100_000, number * 100_000 + count)
        made = [recall_row(s, split, length=length, pairs=pairs, queries=queries, distance=distance) for s in seeds]
        asked: list[Asked] = []
        for row in made:
            other = row.swap_evidence().with_answers_of(row)
            asked += [asked_of_row(row, tokenizer), asked_of_row(other, tokenizer)]
        scores = score_answers(model, asked, tokens_per_call=tokens_per_call, tick=tick)
        cell = _summary(list(zip(scores[::2], scores[1::2], strict=True)), 1 / pairs)
        cell["accuracy"] = cell.pop("token_accuracy")
        cell["count"] = sum(one.tokens for one in scores[::2])
        found.append({"length": length, "pairs": pairs, "distance": distance, **cell})
    return found
