from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trine.balance.metrics import sampling_floors
from trine.balance.record_format import FILE_NAME
from trine.balance.recorder import Recorder
from trine.balance.window import Window
from trine.views import balance_charts
from trine.views.balance_data import BalanceData
from trine.views.chart import Chart
from trine.views.dash_axes import share_axes
from trine.views.run_view import RunView

LOADS = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0]])
MARGINS = torch.tensor([[-0.2, -0.1, 0.0, 0.3, 0.5], [0.1, 0.1, 0.1, 0.1, 0.1]])


def window(step: int) -> Window:
    zero = torch.zeros(2, dtype=torch.long)
    bias_LE = torch.tensor([[0.0, 0.1, -0.1, 0.0], [0.5, -0.5, 0.0, 0.0]]) * step
    return Window(LOADS * step, bias_LE, torch.tensor([16, 16]) * step, zero, zero, zero, MARGINS.double())


@pytest.fixture
def data(tmp_path: Path) -> BalanceData:
    recorder = Recorder(tmp_path / FILE_NAME, layers=2, experts=4, top_k=1, ranks=2)
    for step in (1, 2, 3):
        recorder.record(step, window(step))
    recorder.close()
    return BalanceData(RunView(tmp_path))


def by_key(charts: list[Chart]) -> dict[str, Chart]:
    return {one.key: one for one in charts}


@pytest.mark.parametrize(("k", "experts"), [(1, 2), (16, 896), (4, 4)])
def test_floors_are_those_of_the_metrics(k: int, experts: int) -> None:
    tokens = np.array([0, 1, 8192, 4_000_000])
    cv, vio = balance_charts.floors(tokens, k, experts)
    wanted = sampling_floors(torch.from_numpy(tokens), k, experts)
    np.testing.assert_allclose(cv, wanted[0].numpy(), rtol=1e-12)
    np.testing.assert_allclose(vio, wanted[1].numpy(), rtol=1e-12)


def test_the_heatmap_holds_load_over_mean_load_and_bias(data: BalanceData) -> None:
    found = by_key(balance_charts.step_charts(data, 2, None))
    assert found["heat"].title == "Load of every expert, step 2"
    np.testing.assert_array_equal(found["heat"].heatmap.values, [[1, 1, 1, 1], [4, 0, 0, 0]])  # type: ignore[union-attr]
    bias = balance_charts.step_charts(data, 2, None, "bias", "value")[0].heatmap
    assert bias is not None and (bias.low, bias.high) == (-1.0, 1.0)
    np.testing.assert_allclose(bias.values, [[-0.2, 0, 0, 0.2], [-1, 0, 0, 1]], atol=1e-4)
    saturation = balance_charts.step_charts(data, 2, None, "saturation")[0]
    assert saturation.heatmap is not None and np.asarray(saturation.heatmap.values).shape == (2, 3)


def test_a_layer_is_zoomed_to_with_its_dead_experts_marked(data: BalanceData) -> None:
    chart = by_key(balance_charts.step_charts(data, 3, 1))["layer"]
    assert np.asarray(chart.bars[0].height).tolist() == [4, 0, 0, 0]
    assert np.asarray(chart.lines[0].x).tolist() == [1, 2, 3] and chart.lines[0].name == "without a token"
    assert by_key(balance_charts.step_charts(data, 3, 99))["layer"].title == "Load by layer, step 3"  # no such layer


def test_figures_over_steps_take_the_worst_layer_and_the_floor(data: BalanceData) -> None:
    found = by_key(balance_charts.time_charts(data, None))
    worst, median, floor = found["max-vio"].lines
    assert np.asarray(worst.y).tolist() == [3, 3, 3] and np.asarray(median.y).tolist() == [1.5, 1.5, 1.5]
    np.testing.assert_allclose(floor.y, [np.sqrt(2 * np.log(4) / (4 * step)) for step in (1, 2, 3)], rtol=1e-6)
    np.testing.assert_allclose(found["dead"].lines[0].y, [0, 3, 3])  # should have got 4, then 12 tokens
    assert [one.name for one in found["percentiles"].bands] == ["P1 to P99", "P5 to P95"]


def test_bias_is_followed_expert_by_expert(data: BalanceData) -> None:
    chart = by_key(balance_charts.time_charts(data, 1, 3))["bias"]
    assert chart.lines[0].name == "expert 3"  # the one pressed on comes first
    lines = {one.name: np.asarray(one.y) for one in chart.lines}
    np.testing.assert_allclose(lines["expert 0"], [0.5, 1.0, 1.5], atol=1e-3)


def test_the_histogram_of_required_bias_has_its_mass_and_its_cutoff(data: BalanceData) -> None:
    chart = by_key(balance_charts.step_charts(data, 1, 0))["required"]
    bars = chart.bars[0]
    np.testing.assert_allclose(np.asarray(bars.height) * np.asarray(bars.width), [0.04, 0.45, 0.45, 0.04], rtol=1e-5)
    # a quarter of the tokens (k / E): between P5 at -0.1 and P50 at 0
    assert chart.marks[0].at == pytest.approx(-0.1 + 0.1 * (0.25 - 0.05) / 0.45, abs=1e-6)
    assert "no spread" in by_key(balance_charts.step_charts(data, 1, 1))["required"].empty


def test_ranks_are_those_of_the_run_or_any_that_divide(data: BalanceData) -> None:
    chart = by_key(balance_charts.step_charts(data, 1, 1))["ranks"]
    assert np.asarray(chart.bars[0].height).tolist() == [2, 0] and not chart.notes
    other = by_key(balance_charts.step_charts(data, 1, 1, ranks=4))["ranks"]
    assert np.asarray(other.bars[0].height).tolist() == [4, 0, 0, 0] and "this run has 2" in other.notes[0]
    assert "cannot be dealt out evenly" in by_key(balance_charts.step_charts(data, 1, None, ranks=3))["ranks"].empty
    assert [balance_charts.default_ranks(*one) for one in ((896, 1), (7, 1), (12, 4), (1, 1))] == [8, 1, 4, 1]


def test_what_grows_is_read_once_and_followed(data: BalanceData, tmp_path: Path) -> None:
    assert data.span() == (1, 3)
    before = data.history()
    assert before is not None and data.history() is before
    recorder = Recorder(tmp_path / FILE_NAME, layers=2, experts=4, top_k=1, ranks=2)
    recorder.record(4, window(4))
    recorder.close()
    after = data.history()
    assert after is not None and after.steps.tolist() == [1, 2, 3, 4] and data.span() == (1, 4)
    assert len(data.biases(0)[0]) == 4  # type: ignore[index]


def test_side_by_side_shares_axes_and_colours(data: BalanceData) -> None:
    one, other = (by_key(balance_charts.step_charts(data, step, None, "bias")) for step in (1, 3))
    heats = share_axes([one["heat"], other["heat"]])
    assert [chart.heatmap.high for chart in heats] == [2.0, 2.0]  # type: ignore[union-attr]
    lows = share_axes([one["required"], other["required"]])
    assert lows[0].y == lows[1].y and lows[0].y.low is not None
