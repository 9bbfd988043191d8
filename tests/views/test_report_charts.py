"""The figures of `report.md` over steps are the dashboard's: the same functions, the same numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trine.balance.record_format import FILE_NAME
from trine.balance.recorder import Recorder
from trine.balance.window import Window
from trine.train.metrics import load_figures
from trine.views import depth_charts, gate_charts, training_charts
from trine.views.balance_charts import time_charts
from trine.views.balance_data import BalanceData
from trine.views.chart import Chart
from trine.views.chart_render import to_csv
from trine.views.report_charts import LOAD, OPTIMIZER, OVERVIEW, history_of, run_charts, run_figures, step_tokens
from trine.views.report_inside import inside_charts
from trine.views.run_view import RunView

Line = dict[str, Any]
TOKENS, EXPERTS, TOP_K = 64, 16, 2
PLAN = [
    {"stage": {"length": 32}, "steps": 20, "first_step": 0},
    {"stage": {"length": 64}, "steps": 20, "first_step": 20},
]
RECORD: dict[str, Any] = {
    "plan": PLAN,
    "model": {"experts": EXPERTS, "top_k": TOP_K},
    "config": {"optimizer": {"clip": 1.5}},
}
EVALUATION = {"format_version": 1, "bits_per_byte": 1.46, "baselines": {"gzip": 2.0, "ngram_best": 1.9}}


def loads(step: int) -> torch.Tensor:
    """``[3, E]`` tokens of the experts at a step."""
    random = torch.Generator().manual_seed(step)
    chosen = torch.rand(3, TOKENS, EXPERTS, generator=random).topk(TOP_K, -1).indices
    return torch.nn.functional.one_hot(chosen, EXPERTS).sum((1, 2))


def metric(step: int, **more: Any) -> Line:
    max_vio, dead, percentiles = load_figures(loads(step))
    return {
        "step": step,
        "stage": int(step > 20),
        "tokens": TOKENS * step,
        "loss": 5 - step / 20,
        "bits_per_byte": 3 - step / 40,
        "lr": 0.01,
        "grad_norm": 1.0 + step,
        "tokens_per_s": 100.0 + step,
        "max_vio": max_vio,
        "dead_experts": dead,
        "load_percentiles": percentiles,
        "seconds": 0.5,
        "updated": True,
        **more,
    }


def record_loads(folder: Path, steps: int) -> None:
    recorder = Recorder(folder / FILE_NAME, layers=3, experts=EXPERTS, top_k=TOP_K, ranks=1)
    none = torch.zeros(3, dtype=torch.long)
    for step in range(1, steps + 1):
        margins = torch.zeros(3, 5, dtype=torch.double)
        recorder.record(step, Window(loads(step), torch.zeros(3, EXPERTS), none + TOKENS, none, none, none, margins))
    recorder.close()


def test_the_report_has_the_dashboards_figures(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    """Every figure over steps of the pages that a report has holds the same data, marks and words."""
    events = [{"kind": "spike", "step": 7, "loss": 9.0, "usual": 4.0}]
    folder = run_with(metrics=[metric(s) for s in range(1, 41)], events=events, probes=[looked(0), looked(9)], **RECORD)
    (folder / "eval.json").write_text(json.dumps(EVALUATION))
    record_loads(folder, 40)
    run = RunView(folder)
    pages = [
        *training_charts.charts(run),
        *time_charts(BalanceData(run), None),
        *depth_charts.charts(run),
        *gate_charts.charts(run),
    ]
    page = {chart.key: chart for chart in pages}
    charts = run_charts(folder)
    assert {*OVERVIEW, *LOAD, *OPTIMIZER} <= set(charts)
    for chart in (*charts.values(), *inside_charts(folder)):
        shown = page[chart.key]
        assert (to_csv(chart), chart.title, chart.notes) == (to_csv(shown), shown.title, shown.notes)
        assert (chart.x, chart.y, list(chart.marks)) == (shown.x, shown.y, list(shown.marks))
    drawn = run_figures(charts, "a run")
    titles = {name: [axes.get_title("left") for axes in figure.axes] for name, figure in drawn.items()}
    assert titles == {
        "overview": [page[key].title for key in OVERVIEW],
        "load": [page[key].title for key in LOAD],
        "optimizer": [page[key].title for key in OPTIMIZER],
    }
    words = [text.get_text() for axes in drawn["overview"].axes for text in axes.texts]
    for text in ("held-out text 1.460", "gzip -9 2.000", "clipped at 1.5", "stage 2, rows of 64", "median 120"):
        assert text in words
    (line,) = [one for one in drawn["optimizer"].axes[0].lines if one.get_label() == "spike"]
    assert line.get_xdata() == [7]


def test_without_a_recorders_file_the_load_is_that_of_the_metrics(run_with: Callable[..., Path]) -> None:
    folder = run_with(metrics=[metric(s) for s in range(1, 31)], **RECORD)
    told = run_charts(folder)
    record_loads(folder, 30)
    recorded = run_charts(folder)
    assert set(recorded) - set(told) == {"dead", "bias"}
    for key in LOAD:
        assert [line.name for line in told[key].lines] == [line.name for line in recorded[key].lines]
        assert [mark.text for mark in told[key].marks] == ["stage 2, rows of 64"]
        assert list(told[key].marks) == list(recorded[key].marks)
        for one, other in zip(
            (*told[key].lines, *told[key].bands), (*recorded[key].lines, *recorded[key].bands), strict=True
        ):
            for part in ("x", "y", "low", "high"):
                if hasattr(one, part):
                    np.testing.assert_allclose(getattr(one, part), getattr(other, part), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("damage", [b"no database", b""])
def test_a_damaged_recorders_file_is_as_none(run_with: Callable[..., Path], damage: bytes) -> None:
    folder = run_with(metrics=[metric(s) for s in range(1, 4)], **RECORD)
    (folder / FILE_NAME).write_bytes(damage)
    assert set(LOAD) <= set(run_charts(folder))


def names(charts: dict[str, Chart]) -> dict[str, int]:
    """Panels of each picture, drawn to the end."""
    drawn = run_figures(charts, "a run")
    for figure in drawn.values():
        figure.draw_without_rendering()
    return {name: len(figure.axes) for name, figure in drawn.items()}


def test_one_step_is_drawn_as_points(run_with: Callable[..., Path]) -> None:
    charts = run_charts(run_with(metrics=[metric(1)], **RECORD))
    assert names(charts) == {"overview": 4, "load": 2, "optimizer": 3}
    upright = run_figures(charts, "")["load"].axes[0].collections[1]
    (((_, low), (_, high)),) = upright.get_segments()  # type: ignore[attr-defined]
    assert (low, high) == (charts["percentiles"].bands[0].low, charts["percentiles"].bands[0].high)
    for axes in run_figures(charts, "")["overview"].axes:
        assert axes.lines[0].get_marker() == "o" and axes.lines[0].get_xdata() == [1]
        low, high = axes.get_xlim()
        assert [place for place in axes.get_xticks() if low <= place <= high] == [1]


def test_runs_whose_numbers_are_not_finite(run_with: Callable[..., Path]) -> None:
    bad: Line = {"loss": None, "bits_per_byte": None, "grad_norm": None, "load_percentiles": None}
    bad["max_vio"] = [None] * 3
    charts = run_charts(run_with("all", metrics=[metric(s, **bad) for s in (1, 2)], **RECORD))
    assert names(charts) == {"overview": 1, "optimizer": 1}
    worse = {**bad, "tokens_per_s": None, "lr": None, "max_vio": [], "tokens": "many"}
    assert names(run_charts(run_with("none", metrics=[metric(1, **worse)], **RECORD))) == {}
    some = [metric(s, **(bad if s == 3 else {})) for s in range(1, 6)]
    old = [metric(s, load_percentiles=None) for s in (1, 2)]
    assert names(run_charts(run_with("old", metrics=old, **RECORD)))["load"] == 1
    assert names(run_charts(run_with("some", metrics=some, **RECORD))) == {"overview": 4, "load": 2, "optimizer": 3}


def test_a_run_that_was_stopped_shows_no_stage_to_come(run_with: Callable[..., Path]) -> None:
    charts = run_charts(run_with(metrics=[metric(s) for s in range(1, 6)], **RECORD))
    assert not [mark for chart in charts.values() for mark in chart.marks if mark.axis == "x"]


def test_without_bytes_the_overview_shows_the_loss(run_with: Callable[..., Path]) -> None:
    charts = run_charts(run_with(metrics=[metric(s, bits_per_byte=None) for s in (1, 2)], **RECORD))
    assert run_figures(charts, "")["overview"].axes[0].get_title("left") == "Loss"


@pytest.mark.parametrize("model", [None, {"experts": "16", "top_k": 2}, {"experts": 4, "top_k": 9}, {}])
def test_a_model_that_does_not_say_its_experts_has_no_load(run_with: Callable[..., Path], model: Any) -> None:
    folder = run_with(metrics=[metric(s) for s in (1, 2)], **{**RECORD, "model": model})
    assert names(run_charts(folder)) == {"overview": 3, "optimizer": 3}


def test_the_load_of_odd_lines() -> None:
    assert history_of([metric(1, max_vio=[])]) is None and history_of([metric(1, max_vio="x")]) is None
    found = history_of([metric(1, max_vio=[0.5]), metric(4, max_vio=[0.1, None, 0.3], load_percentiles={"p5": "x"})])
    assert found is not None and found.steps.tolist() == [1, 4]
    np.testing.assert_array_equal(
        found.of("max_vio"), np.array([[0.5, math.nan, math.nan], [0.1, math.nan, 0.3]], dtype=np.float32)
    )
    assert np.isnan(found.of("p5")[1]).all() and found.of("tokens").tolist() == [[TOKENS] * 3] * 2


def test_tokens_of_a_step_come_from_the_running_total() -> None:
    records: list[Line] = [{"step": 1, "tokens": 100}, {"step": 2, "tokens": 200}, {"step": 4, "tokens": 600}]
    assert step_tokens(records).tolist() == [100, 100, 200]
    assert np.isnan(step_tokens([{"step": 1}])).all() and step_tokens([]).tolist() == []
