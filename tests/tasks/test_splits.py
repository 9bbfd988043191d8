"""Training, evaluation and held-out seeds cannot meet: neither their numbers nor the facts behind them."""

from __future__ import annotations

from collections import Counter

import pytest

from trine.tasks import FAMILIES, SEEDS, SPLITS, make, recall_row, split_of, stream_number
from trine.tasks._draws import Draws

EXPECTED = [496, 218, 12, 698, 147]


def test_no_two_seeds_of_any_splits_share_a_stream() -> None:
    seeds = [0, 1, 2, 3, 1_000, SEEDS - 2, SEEDS - 1]
    numbers = [stream_number(seed, split) for seed in seeds for split in SPLITS]
    assert len(set(numbers)) == len(numbers)
    # The map is one to one on all of them: seed and split can be read back.
    for seed in seeds:
        for index, split in enumerate(SPLITS):
            assert divmod(stream_number(seed, split), len(SPLITS)) == (seed, index)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_facts_are_never_in_two_splits(family: str) -> None:
    facts: dict[str, set[tuple[str, ...]]] = {}
    for split in SPLITS:
        tasks = [make(family, seed, split, length=1_700) for seed in range(25)]
        found = set()
        for task in tasks:
            texts = [s.texts[0] for d in task.documents for s in d.segments if s.kind == "evidence"]
            pieces = (task.question, *sorted(text.strip() for text in texts))
            assert split_of(pieces) == split  # a hash of the facts decides, whatever the seed
            found.add(pieces)
        assert len(found) > 12  # seeds give different facts
        facts[split] = found
    assert not facts["train"] & facts["evaluation"]
    assert not (facts["train"] | facts["evaluation"]) & facts["held_out"]


def test_symbol_rows_of_two_splits_never_hold_the_same_pairs() -> None:
    """Two pairs of few symbols would meet by chance often; they do not."""
    held = {split: {frozenset(recall_row(s, split, length=16, pairs=1).pairs) for s in range(400)} for split in SPLITS}
    assert not held["train"] & held["evaluation"]
    assert not held["held_out"] & (held["train"] | held["evaluation"])
    assert len(held["train"]) > 250 and len(held["evaluation"]) > 60


def test_shares_of_the_splits() -> None:
    found = Counter(split_of([str(i)]) for i in range(4_000))
    assert 0.72 < found["train"] / 4_000 < 0.78
    assert 0.10 < found["evaluation"] / 4_000 < 0.15


def test_draws_are_fixed_for_ever() -> None:
    """Values written down once: a change of any library, or of ours, must not move them."""
    draws = Draws("a key")
    assert [draws.below(1000) for _ in range(5)] == EXPECTED
    again = Draws("a key")
    assert again.fork("x").below(10**6) == Draws("a key/x").below(10**6)
    assert sorted(Draws("s").shuffled(range(9))) == list(range(9))
    assert all(3 <= Draws(str(i)).between(3, 5) <= 5 for i in range(50))
    assert {Draws(str(i)).between(3, 5) for i in range(50)} == {3, 4, 5}
    assert 0 <= Draws("u").uniform() < 1
    with pytest.raises(ValueError, match="sample: asked for 4, need at most 3"):
        Draws("s").sample([1, 2, 3], 4)
