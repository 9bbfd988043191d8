from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trine.views.run_series import (
    by_step,
    column,
    mean,
    number,
    over_layers,
    probe_at,
    running_median,
    stage_marks,
    step_marks,
    thin_ticks,
    whole,
)
from trine.views.run_view import RunView


@pytest.mark.parametrize("value", [None, True, "1", [1], {}, 10**400, float("nan"), float("inf"), 1j])
def test_what_is_no_finite_number_is_a_gap(value: Any) -> None:
    assert math.isnan(number(value)) and not whole(value)


def test_numbers_and_steps() -> None:
    assert number(3) == 3.0 and number(-0.5) == -0.5
    assert whole(0) and whole(2**53 - 1) and not whole(2**53) and not whole(-1) and not whole(1.0)


def test_records_stand_by_step_and_the_later_line_counts() -> None:
    rows = by_step([{"step": 3, "a": 1}, {"step": 1}, {"step": None}, {}, {"step": 3, "a": 2}])
    assert rows == [{"step": 1}, {"step": 3, "a": 2}]
    found = column(rows, "a")
    assert math.isnan(found[0]) and found[1] == 2 and column([], "a").shape == (0,)


def test_a_median_runs_over_gaps() -> None:
    values = np.array([1.0, 9.0, np.nan, 3.0, 4.0])
    assert running_median(values, 3).tolist() == [5.0, 5.0, 6.0, 3.5, 3.5]
    assert np.isnan(running_median(np.full(4, np.nan), 3)).all() and running_median(values[:0], 5).size == 0


def test_marks_of_stages_and_of_the_step(run_with: Callable[..., Path]) -> None:
    plan = [{"first_step": 0}, {"first_step": 7}, {"first_step": 9, "stage": {"length": 4096}}, {"first_step": "x"}, 5]
    marks = stage_marks(RunView(run_with(plan=plan)))
    assert [(mark.at, mark.text) for mark in marks] == [(7, "stage 2"), (9, "stage 3, rows of 4,096")]
    begun = [{"step": 7}, {"step": 8}]
    assert [mark.at for mark in stage_marks(RunView(run_with("begun", plan=plan, metrics=begun)))] == [7]
    assert stage_marks(RunView(run_with("before", plan=plan, metrics=begun[:1]))) == []
    assert stage_marks(RunView(run_with("odd", plan="none"))) == [] and step_marks(None) == []
    assert [(mark.at, mark.text) for mark in step_marks(1200)] == [(1200, "step 1,200")]


def test_the_look_of_a_step_is_the_last_before_it() -> None:
    probes: list[Any] = [SimpleNamespace(step=step) for step in (4, 8, 12)]
    found = [probe_at(probes, step) for step in (None, 100, 11, 8, 2)]
    assert [one.step for one in found if one is not None] == [12, 12, 8, 8, 4] and probe_at([], 3) is None


def test_few_layers_are_lines_and_many_are_bands() -> None:
    x = np.array([1.0, 2.0])
    lines, bands = over_layers(x, [0, 5], np.array([[1.0, 2.0], [3.0, np.nan]]), "median")
    assert [line.name for line in lines] == ["layer 0", "layer 5"] and not bands
    values_LS = np.stack([np.arange(9.0), np.full(9, np.nan)], axis=1)
    lines, (everything, half) = over_layers(x, range(9), values_LS, "median")
    assert np.asarray(lines[0].y)[0] == 4 and math.isnan(np.asarray(lines[0].y)[1])
    assert [np.asarray(edge)[0] for edge in (everything.low, half.low, half.high, everything.high)] == [0, 2, 6, 8]


def test_small_helpers() -> None:
    assert mean(np.array([1.0, np.nan, 3.0])) == 2 and math.isnan(mean(np.array([np.nan])))
    assert thin_ticks(["a", "b", "c", "d", "e"], first=2, most=2) == ((2.0, "a"), (5.0, "d"))
    assert thin_ticks([]) == ()
