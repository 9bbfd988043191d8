from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trine.views.chart import Chart
from trine.views.gate_charts import TITLES, charts
from trine.views.heatmap import scale_ticks
from trine.views.run_view import RunView

Line = dict[str, Any]


def by_key(run: RunView, step: int | None = None) -> dict[str, Chart]:
    return {chart.key: chart for chart in charts(run, step)}


def lines_of(chart: Chart) -> dict[str, list[float]]:
    return {line.name: np.asarray(line.y).tolist() for line in chart.lines}


def test_every_head_has_its_place_and_its_quantiles(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    line = looked(5)
    run = RunView(run_with(probes=[looked(0), line]))
    found = by_key(run)
    assert list(found) == list(TITLES) and not any(chart.empty for chart in found.values())
    decay = found["gates-decay"]
    assert decay.y.log and [mark.text for mark in decay.marks if mark.axis == "y"] == ["g_min = -5"]
    assert [mark.at for mark in decay.marks if mark.axis == "y"] == [5.0]
    rows = [head for gate in line["gates"] for head in gate["g"]]
    assert lines_of(decay)["median"] == pytest.approx([-row[3] for row in rows], rel=1e-5)
    widest = decay.bands[0]
    assert widest.name == "98 % of the gates" and len(decay.bands) == 3
    assert np.asarray(widest.low).tolist() == pytest.approx([-row[0] for row in rows], rel=1e-5)
    assert np.asarray(widest.high).tolist() == pytest.approx([-row[-1] for row in rows], rel=1e-5)
    assert decay.x.ticks == ((0.5, "0"), (2.5, "1"), (4.5, "2"))  # two heads a layer
    assert found["gates-openness"].x.ticks == ((0.5, "0"), (2.5, "1"), (4.5, "2"), (6.5, "3"))  # and the MLA layer's


def test_the_bound_stands_in_its_bin(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    line = looked(5)
    for gate in line["gates"]:
        gate["g_min"] = -1.0
        gate["histogram"] = [0.0] * 48
    line["gates"][1]["histogram"][40] = 0.25  # 10**0 to 10**0.125
    chart = by_key(RunView(run_with(probes=[line])))["gates-histogram"]
    assert chart.heatmap is not None
    shown = np.asarray(chart.heatmap.values)
    assert shown.shape == (3, 48) and shown[1, 40] == 25 and chart.heatmap.high == 25
    (bound,) = chart.marks
    assert bound.at == pytest.approx(39.5) and bound.text == "g_min = -1"
    assert (39.5, "1") in chart.x.ticks and chart.x.ticks[0] == (-0.5, "1e-05")


def test_one_layer_with_all_in_a_bin_leaves_no_other_dark(
    run_with: Callable[..., Path], looked: Callable[..., Line]
) -> None:
    line = looked(5)
    even = [0.02] * 48
    line["gates"] = [{**line["gates"][0], "layer": i, "histogram": even} for i in range(12)]
    line["gates"][3] = {**line["gates"][3], "histogram": [0.0] * 47 + [1.0]}
    heatmap = by_key(RunView(run_with(probes=[line])))["gates-histogram"].heatmap
    assert heatmap is not None and heatmap.high == pytest.approx(2, rel=1e-5)


def test_memory_and_shares_over_steps(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    first, last = looked(0), looked(8)
    last["gates"][0] |= {"memory": [[1, 10, 100], [3, 30, 300]], "at_g_min": [0.25, 0.75], "at_zero": [0.5, None]}
    for gate in last["gates"][1:]:
        gate |= {"at_g_min": [0.0, 0.0], "at_zero": [0.1, 0.1]}
    del last["gates"][2]
    run = RunView(run_with(probes=[first, last]))
    found = by_key(run)
    memory = lines_of(found["gates-memory-steps"])
    assert memory["layer 0"][1] == pytest.approx(20) and math.isnan(memory["layer 2"][1])
    assert set(memory) == {"layer 0", "layer 1", "layer 2"}
    bound = lines_of(found["gates-bound-steps"])
    assert bound["at g_min, mean of all heads"][1] == pytest.approx(25)
    assert bound["at g_min, the head with most"][1] == pytest.approx(75)
    assert bound["at 0, the head with most"][1] == pytest.approx(50)
    assert lines_of(found["gates-bound"])["at g_min: forgets all it can"] == pytest.approx([25, 75, 0, 0])
    assert [mark.at for mark in found["gates-memory"].marks if mark.axis == "y"] == [15]
    opened = lines_of(found["gates-openness-steps"])
    assert opened["layer 3"][0] == pytest.approx(np.mean(first["openness"][3]["mean"]), rel=1e-4)


def test_many_layers_become_bands(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    line = looked(1)
    one = line["gates"][0]
    line["gates"] = [{**one, "layer": i, "memory": [[1, 1 + i, 100]] * 2} for i in range(11)]
    chart = by_key(RunView(run_with(probes=[line])))["gates-memory-steps"]
    assert lines_of(chart) == {"median of the layers": [6.0]}
    assert [(band.name, np.asarray(band.low)[0], np.asarray(band.high)[0]) for band in chart.bands] == [
        ("all layers", 1.0, 11.0),
        ("half of the layers", 3.5, 8.5),
    ]


def test_no_kda_layer_and_damage_are_told(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    none = by_key(RunView(run_with("none", probes=[{**looked(1), "gates": []}])))
    assert "no layer with decay gates" in none["gates-decay"].empty and not none["gates-openness"].empty
    line = looked(2)
    line["gates"][1]["g"][0] = "x"
    bad = by_key(RunView(run_with("bad", probes=[line])))
    assert "its decay gates cannot be read" in bad["gates-memory"].empty


def test_a_crowd_of_heads_is_a_cell_each(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    line = looked(1)
    one, other = line["gates"][0], line["openness"][0]
    wide = {key: one[key] * 15 for key in ("g", "memory", "at_g_min", "at_zero")}
    line["gates"] = [{**one, **wide, "layer": layer} for layer in (0, 2, 5)]
    line["gates"][1]["memory"] = [[1, 7, 100]] * 30
    line["gates"][2]["at_g_min"] = [0.5] * 29 + [None]
    line["gates"][2]["g_min"] = -2.0
    for gate in line["gates"][:2]:
        gate["g_min"] = -40.0
    shut = {**other, "values": other["values"] * 40, "mean": [0.25] * 80}
    line["openness"] = [{**shut, "layer": layer} for layer in (0, 7)]
    found = by_key(RunView(run_with(probes=[line])))
    cells = {key: chart.heatmap for key, chart in found.items() if chart.heatmap is not None}
    assert set(cells) == {"gates-decay", "gates-histogram", "gates-memory", "gates-bound", "gates-openness"}
    memory, bound, opened = (np.asarray(cells[f"gates-{key}"].values).T for key in ("memory", "bound", "openness"))
    assert memory.shape == (3, 30) and memory[1].tolist() == [7] * 30
    assert bound[2, :29].tolist() == [50] * 29 and np.isnan(bound[2, 29])
    assert opened.tolist() == [[0.25] * 80] * 2 and found["gates-openness"].x.ticks == ((0.0, "0"), (1.0, "7"))
    # bounds stand on the scale of colours, which reaches as far
    decay = found["gates-decay"].heatmap
    assert decay is not None and decay.high == 40
    scale = scale_ticks(decay)
    assert scale[-1] == (pytest.approx(1), "g_min -40") and [text for _, text in scale].count("40") == 0
    (two,) = [place for place, text in scale if text == "g_min -2"]
    assert decay.value_at(two) == pytest.approx(2, rel=1e-4) and scale == sorted(scale)
    assert "Choose a layer" in found["gates-decay"].notes[-1]
    assert found["gates-memory"].x.ticks == ((0.0, "0"), (1.0, "2"), (2.0, "5"))
    assert np.asarray(cells["gates-decay"].values)[0, 0] == pytest.approx(-one["g"][0][3], rel=1e-5)
    for gate in line["gates"]:
        gate |= {"memory": [[5.0, 5.0, 5.0]] * 30, "g": [[0.0] * 7] * 30}  # nothing to span colours over
    same = by_key(RunView(run_with("same", probes=[line])))
    assert same["gates-memory"].heatmap is not None and same["gates-memory"].heatmap.high == 5
    assert same["gates-decay"].heatmap is not None


def test_a_layer_shows_the_quantiles_of_every_head(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    line = looked(1)
    one, other = line["gates"][0], line["openness"][0]
    wide = {key: one[key] * 15 for key in ("g", "memory", "at_g_min", "at_zero")}
    line["gates"] = [{**one, **wide, "layer": layer, "g_min": -5.0 + layer} for layer in (0, 2, 4)]
    line["gates"][1]["g"] = [[-3, -2, -1.5, -1, -0.5, -0.25, -(i + 1) / 256] for i in range(30)]
    line["openness"] = [{**other, "layer": layer} for layer in (0, 3)]
    run = RunView(run_with(probes=[line]))
    found = {chart.key: chart for chart in charts(run, None, 2)}
    decay = found["gates-decay"]
    assert decay.title == "Log-decay of the heads of layer 2" and decay.heatmap is None and decay.y.log
    assert decay.x.title == "head of layer 2" and not decay.bands
    # the bound of this layer only
    assert [(mark.at, mark.text, mark.axis) for mark in decay.marks] == [(3.0, "g_min = -3", "y")]
    assert [bar.name for bar in decay.lines] == [f"{share} % of the gates" for share in (98, 90, 50)] + ["median"]
    widths = [bar.width for bar in decay.lines[:3]]
    assert widths == sorted(widths) and len(set(widths)) == 3
    for bar, low, high in zip(decay.lines, (3, 2, 1.5), (None, 0.25, 0.5), strict=False):
        upright = np.asarray(bar.y).reshape(30, 3)
        assert upright[:, 0].tolist() == [low] * 30 and np.isnan(upright[:, 2]).all()
        assert upright[:, 1].tolist() == ([(i + 1) / 256 for i in range(30)] if high is None else [high] * 30)
        assert np.asarray(bar.x).tolist() == np.repeat(np.arange(30), 3).tolist()
    assert decay.lines[3].points and np.asarray(decay.lines[3].y).tolist() == [1.0] * 30
    assert found["gates-memory"].title == "Memory length of the heads of layer 2"
    assert [len(np.asarray(bar.x)) for bar in found["gates-bound"].lines] == [30, 30]
    assert found["gates-openness"].title == TITLES["gates-openness"]  # layer 2 has no output gates: all that have
    unknown = {chart.key: chart for chart in charts(run, None, 9)}
    assert unknown["gates-decay"].heatmap is not None and unknown["gates-decay"].title.startswith("Median")
