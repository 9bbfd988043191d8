"""The example does what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "quantile_balancing_in_your_router.py"


def test_one_update_ends_the_collapse_and_training_keeps_it_so() -> None:
    train = runpy.run_path(str(EXAMPLE))["train"]
    plain, balanced = train(5, False), train(5, True)
    assert plain[0] == balanced[0], "the first step is the same: the bias acts from the next step on"
    assert plain[-1][0] > 5 and plain[-1][1] > 3
    assert balanced[1][0] < plain[1][0] / 2 and all(violation < 1.0 for violation, _ in balanced[2:]), balanced
    assert all(dead == 0 for _, dead in balanced[1:])


def test_it_is_fifteen_lines() -> None:
    between = EXAMPLE.read_text().split("# -- from here")[1].split("# -- to here")[0].splitlines()[1:]
    assert 10 <= sum(bool(line.strip()) for line in between) <= 15
