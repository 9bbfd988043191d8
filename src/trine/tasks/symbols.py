"""Recall at its smallest: keys and values of one symbol each, noise between them, questions at the end.

A row reads like ``.;Ak~,-Zq:_.?ZqAk``: after the question mark every key is asked for once, and the value that follows
it is the answer. All symbols are single ASCII characters, so that a vocabulary of bytes has one token for each. The
form is that of multi-query associative recall (Zoology, arXiv 2312.04927), with the pairs anywhere in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trine.tasks._draws import Draws
from trine.tasks._splits import Split, draw_for, stream_number

KEYS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
VALUES = "abcdefghijklmnopqrstuvwxyz012345"
NOISE = ".,;:-_~^"
ASK = "?"


@dataclass(frozen=True)
class RecallRow:
    """One row of symbol-level recall.

    Attributes:
        text: the row; one character is one symbol.
        pairs: (key, value) of each pair, in the order of the questions; pairs that are not asked for come last.
        evidence: position of each pair's value in ``text``, in the same order.
        answers: position of each asked value in ``text``.
        seed: what it was made from.
        split: see `trine.tasks.Split`.
    """

    text: str
    pairs: tuple[tuple[str, str], ...]
    evidence: tuple[int, ...]
    answers: tuple[int, ...]
    seed: int
    split: Split

    @property
    def distances(self) -> tuple[int, ...]:
        """Symbols between each answer and its evidence."""
        return tuple(answer - at for answer, at in zip(self.answers, self.evidence, strict=False))

    @property
    def chance(self) -> float:
        """How often one of the row's values, taken by fair dice, is right."""
        return 1 / len(self.pairs)

    def swap_evidence(self, seed: int = 0) -> RecallRow:
        """The same row with another value in every asked pair and as every answer.

        The new values are such as no pair of the row has; where too few are left, the asked pairs change values.
        """
        draws = Draws(f"recall/swap/{self.split}/{self.seed}/{seed}")
        asked = [value for _, value in self.pairs[: len(self.answers)]]
        free = [value for value in VALUES if value not in {value for _, value in self.pairs}]
        if len(free) >= len(asked):
            fresh = draws.sample(free, len(asked))
        else:
            turn = draws.between(1, len(asked) - 1)
            fresh = asked[turn:] + asked[:turn]
        text, pairs = list(self.text), list(self.pairs)
        for i, value in enumerate(fresh):
            text[self.evidence[i]] = text[self.answers[i]] = value
            pairs[i] = (pairs[i][0], value)
        return replace(self, text="".join(text), pairs=tuple(pairs))

    def without_evidence(self, seed: int = 0) -> RecallRow:
        """The same row with noise in place of every asked pair; the answers still stand behind their questions."""
        draws = Draws(f"recall/without/{self.split}/{self.seed}/{seed}")
        text = list(self.text)
        for at in self.evidence[: len(self.answers)]:
            text[at - 1], text[at] = draws.choice(NOISE), draws.choice(NOISE)
        return replace(self, text="".join(text))

    def with_answers_of(self, other: RecallRow) -> RecallRow:
        """This row with the answers of ``other`` behind the questions: what a loss is compared on."""
        text = list(self.text)
        for at in self.answers:
            text[at] = other.text[at]
        return replace(self, text="".join(text))


def shortest_row(pairs: int, queries: int) -> int:
    """Symbols of the shortest row that holds them."""
    return 2 * pairs + 1 + 2 * queries


def recall_row(
    seed: int,
    split: Split = "train",
    *,
    length: int = 64,
    pairs: int = 4,
    queries: int | None = None,
    distance: int | None = None,
) -> RecallRow:
    """Make a row: a pure function of its arguments.

    Args:
        seed: 0 to 2^56 - 1.
        split: training, evaluation and held-out rows have different seeds behind them and never the same pairs.
        length: symbols of the row.
        pairs: 1 to 26.
        queries: pairs that are asked for, default all.
        distance: symbols from the first question's answer back to its evidence; anywhere by default.

    Raises:
        ValueError: what was asked for does not fit the row.
    """
    queries = pairs if queries is None else queries
    if not 1 <= pairs <= len(KEYS):
        raise ValueError(f"pairs: found {pairs}, need 1 to {len(KEYS)}")
    if not 1 <= queries <= pairs:
        raise ValueError(f"queries: found {queries}, need 1 to pairs = {pairs}")
    if length < shortest_row(pairs, queries):
        raise ValueError(f"length: found {length}, need at least {shortest_row(pairs, queries)} for {pairs} pairs")
    hay = length - 1 - 2 * queries  # symbols before the question mark
    first = hay + 2  # where the first answer stands
    if distance is not None and not first - hay + 1 <= distance <= first - 1:
        raise ValueError(f"distance: found {distance}, need {first - hay + 1} to {first - 1} in {length} symbols")

    def make(draws: Draws) -> list[tuple[str, str]]:
        return list(zip(draws.sample(KEYS, pairs), draws.sample(VALUES, pairs), strict=True))

    key = f"recall/{stream_number(seed, split)}/{length}/{pairs}/{queries}/{distance}"
    chosen = draw_for(key, split, make, lambda found: sorted(a + b for a, b in found))
    draws = Draws(f"{key}/place")
    starts = _places(draws, hay, pairs, None if distance is None else first - distance - 1)
    text = [draws.choice(NOISE) for _ in range(hay)] + [ASK]
    for at, (name, value) in zip(starts, chosen, strict=True):
        text[at : at + 2] = [name, value]
    for name, value in chosen[:queries]:
        text += [name, value]
    return RecallRow(
        text="".join(text),
        pairs=tuple(chosen),
        evidence=tuple(at + 1 for at in starts),
        answers=tuple(first + 2 * i for i in range(queries)),
        seed=seed,
        split=split,
    )


def _places(draws: Draws, room: int, pairs: int, fixed: int | None) -> list[int]:
    """Beginnings of ``pairs`` pairs that do not overlap in ``room`` symbols; the first of them at ``fixed``."""
    if fixed is None:
        # Drawn in a row where a pair takes one place, then spread to two.
        packed = sorted(draws.sample(range(room - pairs), pairs))
        return draws.shuffled([at + i for i, at in enumerate(packed)])
    before, after = fixed, room - fixed - 2
    left = [pairs - 1, 0]
    while left[0] > before // 2 or (left[1] < after // 2 and left[0] > 0 and draws.uniform() < after / (room - 2)):
        left = [left[0] - 1, left[1] + 1]
    if left[1] > after // 2:
        raise ValueError(f"distance: {pairs} pairs do not fit around symbol {fixed} of {room}")
    some = _places(draws, before, left[0], None) if left[0] else []
    more = [fixed + 2 + at for at in _places(draws, after, left[1], None)] if left[1] else []
    return [fixed, *draws.shuffled(some + more)]


def solve_recall(text: str) -> str | None:
    """The values asked for, from the symbols before the question mark alone; None when a pair is missing or doubled."""
    hay, mark, asked = text.partition(ASK)
    if not mark:
        return None
    found = []
    for key in asked[::2]:
        values = _values_of(hay, key)
        if len(values) != 1:
            return None
        found.append(values[0])
    return "".join(found)


def _values_of(hay: str, key: str) -> Sequence[str]:
    return [hay[i + 1] for i in range(len(hay) - 1) if hay[i] == key and hay[i + 1] in VALUES]
