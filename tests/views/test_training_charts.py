from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trine.balance.alerts import Alert
from trine.views import run_view
from trine.views.chart import Chart
from trine.views.run_view import RunView
from trine.views.training_charts import TITLES, alert_rows, charts, event_rows, layers_on

Line = dict[str, Any]


def metric(step: int, **more: Any) -> Line:
    return {
        "step": step,
        "stage": 0,
        "tokens": 96 * step,
        "loss": 5 - step / 20,
        "bits_per_byte": 3 - step / 40,
        "lr": 0.01,
        "grad_norm": 1.0 + step,
        "tokens_per_s": 100.0 + step,
        "seconds": 0.5,
        "updated": True,
        **more,
    }


def by_key(run: RunView, step: int | None = None) -> dict[str, Chart]:
    return {chart.key: chart for chart in charts(run, step)}


def test_curves_marks_and_levels(run_with: Callable[..., Path]) -> None:
    plan = [
        {"stage": {"length": 128}, "steps": 10, "first_step": 0},
        {"stage": {"length": 1024}, "steps": 30, "first_step": 10},
    ]
    metrics = [metric(step) for step in range(1, 41)]
    metrics[6] |= {"loss": None, "updated": False, "grad_norm": None}
    metrics[11] |= {"clipped_heads": 3}
    events = [{"kind": "non_finite", "step": 7, "tensor": "loss"}, {"kind": "spike", "step": 20, "loss": 9}]
    folder = run_with(metrics=metrics, events=events, plan=plan, config={"optimizer": {"clip": 1.5}})
    baselines = {"gzip": 2.0, "xz": 1.8, "ngram_best": None}
    (folder / "eval.json").write_text(json.dumps({"format_version": 1, "bits_per_byte": 1.46, "baselines": baselines}))
    found = by_key(RunView(folder), 12)
    assert list(found) == list(TITLES) and not any(chart.empty for chart in found.values())
    loss = found["training-loss"]
    assert [(mark.at, mark.text) for mark in loss.marks] == [(10, "stage 2, rows of 1,024"), (12, "step 12")]
    raw, median = loss.lines[0], loss.lines[1]
    assert len(np.asarray(raw.y)) == 40 and math.isnan(np.asarray(raw.y)[6]) and median.name == "median of 5 values"
    assert np.asarray(median.y)[6] == pytest.approx(5 - 7 / 20)  # of its neighbours
    points = {line.name: (np.asarray(line.x).tolist(), np.asarray(line.y).tolist()) for line in loss.lines[2:]}
    assert points == {"not finite": ([7], [pytest.approx(5 - 7 / 20)]), "spike": ([20], [pytest.approx(4.0)])}
    assert loss.notes == ("Not finite in 1 step: gaps in the line.",)
    levels = [(mark.at, mark.text) for mark in found["training-bits"].marks if mark.axis == "y"]
    assert levels == [(1.46, "held-out text 1.460"), (2.0, "gzip -9 2.000")]
    gradient = found["training-gradient"]
    assert (1.5, "clipped at 1.5") in [(mark.at, mark.text) for mark in gradient.marks]
    assert gradient.notes == (
        "Steps whose update was not applied: 1.",
        "Steps in which QK-clip scaled heads down: 1.",
    )
    assert found["training-throughput"].marks[-1].text == "median 120"


def test_one_step_and_steps_taken_back(run_with: Callable[..., Path]) -> None:
    one = by_key(RunView(run_with("one", metrics=[metric(1)])))
    assert [len(np.asarray(line.x)) for line in one["training-loss"].lines] == [1]
    again = [metric(1), metric(2, loss=9.0), metric(3), metric(2, loss=4.0), {"step": "x"}, {"step": 10**30}]
    line = by_key(RunView(run_with("again", metrics=again)))["training-loss"].lines[0]
    assert np.asarray(line.x).tolist() == [1, 2, 3] and np.asarray(line.y)[1] == 4.0


def test_what_is_not_there_is_said(run_with: Callable[..., Path]) -> None:
    assert all("no whole line" in chart.empty for chart in charts(RunView(run_with("none"))))
    nothing = {"bits_per_byte": None, "grad_norm": None, "lr": "fast", "tokens_per_s": None, "loss": None}
    found = by_key(RunView(run_with("nulls", metrics=[metric(step, **nothing) for step in (1, 2)])))
    assert {key for key, chart in found.items() if chart.empty} == set(TITLES)


def test_events_are_sentences_newest_first(run_with: Callable[..., Path]) -> None:
    events: list[Line] = [
        {"time": "2026-01-01T00:00:00Z", "kind": "stage", "step": 1, "stage": 0, "length": 1024, "step_tokens": 4096},
        {"time": "t", "kind": "non_finite", "step": 3, "tensor": "gradient of head.weight"},
        {"time": "t", "kind": "spike", "step": 4, "loss": 9.5, "usual": 3.25},
        {"time": "t", "kind": "rollback", "step": 4, "to_step": 2, "checkpoint": "step-000002", "left_out": []},
        {"kind": "short_guard", "stage": 0, "after": 1.5, "change": 0.031, "worse": True, "unit": "bits per byte"},
        {"kind": "odd <b>", "step": 9, "what": ["x" * 300], "more": {"a": 1}},
        {"kind": "stage", "step": 5, "stage": "first"},
        {"kind": 7},
        {"kind": "balance_alert", "rule": "dead", "begins": True},
    ]
    rows = event_rows(RunView(run_with(events=events)))[::-1]
    assert rows[0] == (1, "2026-01-01T00:00:00Z", "stage", "info", "Stage 1: rows of 1,024, 4,096 tokens a step.")
    assert rows[1][2:] == ("not finite", "error", "The update was not applied: gradient of head.weight is not finite.")
    assert rows[2].text == "Loss 9.5, usual 3.25."
    assert rows[3].text == "Back from step 4 to step 2 (step-000002)." and rows[3].level == "warning"
    assert rows[4].text == "After stage 1: 1.5000 bits per byte (+3.1 %); it got worse." and rows[4].step is None
    assert rows[5].kind == "odd <b>" and rows[5].text.startswith('what: ["xxx') and len(rows[5].text) < 150
    assert rows[6].text == "stage: first"  # lacks a part: its fields
    assert rows[7].kind == "unknown" and len(rows) == 8
    assert len(event_rows(RunView(run_with("many", events=events[:1] * 500)), most=20)) == 20


def alert(step: int, rule: str, begins: bool, layers: tuple[int, ...]) -> Line:
    text = f"{rule} {'begins' if begins else 'ends'}"
    one = Alert(step, rule, begins, layers, len(layers), 1.0, 0.5, text)
    return {"time": "t", "kind": "balance_alert", **one.to_json()}


def test_alerts_end_when_as_many_layers_are_good_again(run_with: Callable[..., Path]) -> None:
    events = [
        *(alert(10, "dead", True, (0, 1)), alert(12, "p95", True, (3,)), alert(15, "dead", True, (2,))),
        *(alert(20, "p95", False, (3,)), alert(22, "dead", False, (0, 1)), alert(30, "p95", True, (1,))),
    ]
    run = RunView(run_with(events=events))
    assert [(one.rule, one.began, one.active, one.ended) for one in alert_rows(run)] == [
        *(("p95", 30, True, None), ("dead", 15, True, None), ("dead", 10, True, None)),
        ("p95", 12, False, 20),
    ]
    assert layers_on(events) == {"dead": 1, "p95": 1}
    assert layers_on([*events, alert(40, "dead", False, (2,)), alert(41, "x", False, (1,))]) == {"p95": 1}


def test_long_files_are_thinned_and_of_events_that_is_told(
    run_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_view, "MOST_EVENTS", 10)
    folder = run_with(events=[{"kind": "spike", "step": step} for step in range(1, 10)])
    run = RunView(folder)
    assert len(event_rows(run)) == 9 and not any("one line in" in note for note in run.notes())
    with open(folder / "events.jsonl", "a") as file:
        file.writelines(f'{{"kind": "spike", "step": {step}}}\n' for step in range(10, 30))
    rows = event_rows(run)
    assert len(rows) <= 11 and rows[0].step == 29
    assert "events.jsonl: so long that only one line in 4 is shown." in run.notes()
