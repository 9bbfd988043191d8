"""Which seeds, and which facts, belong to training, to evaluation and to the held-out set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from trine.tasks._draws import Draws

Split = Literal["train", "evaluation", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "evaluation", "held_out")

# Of sixteen sets of facts, twelve may be trained on, two serve evaluation, two are kept for a last look.
_CLASSES = {"train": range(12), "evaluation": range(12, 14), "held_out": range(14, 16)}
_MOST_TRIES = 4_000
SEEDS = 1 << 56
"""Seeds run from 0 to ``SEEDS - 1``."""

T = TypeVar("T")


def stream_number(seed: int, split: Split) -> int:
    """The number behind a seed of a split: no two pairs of seed and split share one.

    Raises:
        ValueError: an unknown split, or a seed out of range.
    """
    if split not in SPLITS:
        raise ValueError(f"split: found {split!r}, need one of {', '.join(SPLITS)}")
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed: found {seed}, need 0 to {SEEDS - 1}")
    return seed * len(SPLITS) + SPLITS.index(split)


def split_of(facts: Sequence[str]) -> Split:
    """The one split that a set of facts may be used in; a hash decides, whatever the seed."""
    number = hashlib.sha256("\n".join(facts).encode()).digest()[0] % 16
    return next(split for split in SPLITS if number in _CLASSES[split])


def draw_for(key: str, split: Split, make: Callable[[Draws], T], facts: Callable[[T], Sequence[str]]) -> T:
    """Draw until what was drawn belongs to ``split``: so not even the same facts can be met in two splits.

    Args:
        key: what the draws begin at; seed and split are in it.
        split: the split wanted.
        make: draws one candidate.
        facts: what of a candidate decides its split.

    Raises:
        ValueError: the family has too few different facts to fill the split.
    """
    for attempt in range(_MOST_TRIES):
        candidate = make(Draws(f"{key}/{attempt}"))
        if split_of(facts(candidate)) == split:
            return candidate
    raise ValueError(f"{key}: no facts of split {split!r} in {_MOST_TRIES} tries; ask for more items")
