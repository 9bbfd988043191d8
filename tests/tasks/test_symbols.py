"""Symbol-level recall: rows of an exact length, evidence at an exact distance, answers that the text settles."""

from __future__ import annotations

import pytest

from trine.tasks import recall_row, solve_recall
from trine.tasks.symbols import ASK, KEYS, NOISE, VALUES, shortest_row

ROWS = [(64, 4, None), (256, 8, None), (1024, 16, None), (17, 4, None), (64, 1, None), (64, 4, 2), (100, 26, 20)]


@pytest.mark.parametrize(("length", "pairs", "queries"), ROWS)
def test_row_is_what_was_asked_for(length: int, pairs: int, queries: int | None) -> None:
    for seed in range(20):
        row = recall_row(seed, "evaluation", length=length, pairs=pairs, queries=queries)
        asked = pairs if queries is None else queries
        assert len(row.text) == length and len(row.pairs) == pairs and len(row.answers) == asked
        assert len({key for key, _ in row.pairs}) == pairs == len({value for _, value in row.pairs})
        assert row.text[length - 2 * asked - 1] == ASK and row.text.count(ASK) == 1
        for (key, value), at in zip(row.pairs, row.evidence, strict=True):
            assert row.text[at - 1 : at + 1] == key + value
        for (key, value), at in zip(row.pairs, row.answers, strict=False):
            assert row.text[at - 1 : at + 1] == key + value
        hay = row.text[: length - 2 * asked - 1]
        assert sum(symbol in KEYS for symbol in hay) == pairs == sum(symbol in VALUES for symbol in hay)
        assert row.chance == 1 / pairs
        assert solve_recall(row.text) == "".join(value for _, value in row.pairs[:asked])


def test_swapped_and_missing_evidence() -> None:
    row = recall_row(3, length=80, pairs=5, queries=3)
    swapped, cut = row.swap_evidence(1), row.without_evidence()
    assert solve_recall(cut.text) is None
    assert solve_recall(swapped.text) == "".join(value for _, value in swapped.pairs[:3])
    changed = [i for i in range(80) if row.text[i] != swapped.text[i]]
    assert changed == sorted([*row.evidence[:3], *row.answers])
    assert not {value for _, value in swapped.pairs[:3]} & {value for _, value in row.pairs}
    old = swapped.with_answers_of(row)
    assert [i for i in range(80) if row.text[i] != old.text[i]] == sorted(row.evidence[:3])
    assert all(cut.text[at] in NOISE and cut.text[at - 1] in NOISE for at in row.evidence[:3])
    assert cut.pairs == row.pairs and swapped.swap_evidence(1) != row


@pytest.mark.parametrize("distance", [3, 4, 20, 55, 57])
def test_distance_is_exact(distance: int) -> None:
    for seed in range(30):
        row = recall_row(seed, "evaluation", length=60, pairs=3, queries=1, distance=distance)
        assert row.distances == (distance,)
        assert solve_recall(row.text) == row.pairs[0][1]


def test_bad_arguments() -> None:
    assert shortest_row(4, 4) == 17
    for arguments, message in (
        ({"pairs": 27}, "pairs: found 27, need 1 to 26"),
        ({"queries": 5}, "queries: found 5, need 1 to pairs = 4"),
        ({"length": 16}, "length: found 16, need at least 17 for 4 pairs"),
        ({"queries": 1, "distance": 2}, "distance: found 2, need 3 to 62 in 64 symbols"),
        ({"queries": 1, "distance": 63}, "distance: found 63, need 3 to 62 in 64 symbols"),
    ):
        with pytest.raises(ValueError, match=message):
            recall_row(0, **arguments)  # type: ignore[arg-type]
