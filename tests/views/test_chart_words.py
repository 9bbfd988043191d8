"""What the figures of depth, gates and training say where there is little room or nothing to draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trine.views import depth_charts, gate_charts, training_charts
from trine.views.chart import Chart
from trine.views.plotly_charts import to_plotly
from trine.views.run_view import RunView

Line = dict[str, Any]
LONGEST_TITLE = 30  # characters along an axis of a phone
METRIC: Line = {"step": 1, "loss": 5.0, "bits_per_byte": 3.0, "lr": 0.01, "grad_norm": 1.0, "tokens_per_s": 100.0}


def all_charts(run: RunView) -> dict[str, Chart]:
    return {one.key: one for module in (depth_charts, gate_charts, training_charts) for one in module.charts(run)}


@pytest.mark.parametrize("crowd", [64, 0])
def test_titles_of_axes_fit_a_phone_and_call_a_layer_a_layer(
    run_with: Callable[..., Path], looked: Callable[..., Line], monkeypatch: pytest.MonkeyPatch, crowd: int
) -> None:
    monkeypatch.setattr(gate_charts, "_CROWD", crowd)
    run = RunView(run_with(probes=[looked(0), looked(5)], metrics=[METRIC, {**METRIC, "step": 2}]))
    found = all_charts(run)
    assert len(found) == 19 and not [key for key, one in found.items() if one.empty]
    titles = {(key, axis.title) for key, one in found.items() for axis in (one.x, one.y)}
    assert not {one for one in titles if len(one[1]) > LONGEST_TITLE}
    assert not {one for one in titles if "KDA layer" in one[1]}
    (order,) = [note for note in found["depth-weights"].notes if note.startswith("Sources")]
    assert "the embedding, then finished blocks, last the running sum" in order


@pytest.mark.parametrize("loss", [None, float("nan"), "inf"])
def test_where_no_loss_is_finite_loss_and_bits_say_so(run_with: Callable[..., Path], loss: Any) -> None:
    run = RunView(run_with(metrics=[{**METRIC, "step": step, "loss": loss, "bits_per_byte": None} for step in (1, 2)]))
    found = {one.key: one.empty for one in training_charts.charts(run)}
    assert found["training-loss"] == "No step has a finite loss."
    assert found["training-bits"] == "No step has a finite loss, so there are no bits per byte."
    assert not found["training-rate"]
    (other,) = [
        one.empty
        for one in training_charts.charts(RunView(run_with("bytes", metrics=[{**METRIC, "bits_per_byte": None}])))
        if one.key == "training-bits"
    ]
    assert other == "The bytes of this run's text are not known, so there are no bits per byte."


def test_what_is_0_in_every_step_lies_on_the_axis(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    line = looked(5)
    for gate in line["gates"]:
        gate["at_g_min"] = gate["at_zero"] = [0.0 for _ in gate["at_g_min"]]
    run = RunView(run_with(probes=[line], metrics=[{**METRIC, "lr": 0.0, "tokens_per_s": 0.0}]))
    found = all_charts(run)
    for key in ("training-rate", "training-throughput", "gates-bound", "gates-bound-steps"):
        chart = found[key]
        assert max(np.nanmax(np.asarray(one.y)) for one in chart.lines) == 0.0
        assert to_plotly(chart)["layout"]["yaxis"]["range"] == [0, 1.0]
    assert found["training-rate"].notes == ("The rate was 0 so far.",)
    rising = RunView(run_with("rising", metrics=[{**METRIC, "lr": 0.0}, {**METRIC, "step": 2}]))
    rate = next(one for one in training_charts.charts(rising) if one.key == "training-rate")
    assert to_plotly(rate)["layout"]["yaxis"]["range"] == [0, None] and not rate.notes
