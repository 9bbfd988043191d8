from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trine.views.chart import Chart
from trine.views.depth_charts import TITLES, charts
from trine.views.run_view import RunView

Line = dict[str, Any]


def by_key(run: RunView, step: int | None = None) -> dict[str, Chart]:
    return {chart.key: chart for chart in charts(run, step)}


def lines_of(chart: Chart) -> dict[str, list[float]]:
    return {line.name: np.asarray(line.y).tolist() for line in chart.lines}


def test_every_figure_is_there_and_shows_the_step_asked_for(
    run_with: Callable[..., Path], looked: Callable[..., Line]
) -> None:
    first, last = looked(0), looked(9)
    site = last["depth"]["sites"].index("3 attention")
    last["depth"]["weights"][site] = [0.1, 0.2, 0.7]
    last["layers"]["cka"][0][1] = last["layers"]["cka"][1][0] = 0.123
    run = RunView(run_with(probes=[first, last], config={"probe_every": 5}))
    found = by_key(run)
    assert list(found) == list(TITLES) and not any(chart.empty for chart in found.values())
    weights = found["depth-weights"].heatmap
    assert weights is not None
    shown = np.asarray(weights.values)
    assert shown.shape[0] == len(last["depth"]["sites"])
    assert shown[site, :3] == pytest.approx([0.1, 0.2, 0.7]) and np.isnan(shown[0, -1])
    similarity = found["depth-similarity"].heatmap
    assert similarity is not None and np.asarray(similarity.values)[0, 1] == pytest.approx(0.123)
    early = by_key(run, 8)["depth-weights"]
    assert early.heatmap is not None
    assert np.asarray(early.heatmap.values)[site, :3] == pytest.approx(first["depth"]["weights"][site], abs=1e-6)
    assert "step 0" in early.notes[0] and "24 tokens of held-out text" in early.notes[0]
    assert [mark.text for mark in by_key(run, 8)["depth-reading"].marks] == ["step 8"]


def test_where_depth_reads_adds_up(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    line = looked(4)
    line["depth"] = {"sites": ["a", "b", "c"], "weights": [[1.0], [0.5, 0.5], [0.1, 0.3, 0.6]]}
    found = lines_of(by_key(RunView(run_with(probes=[line])))["depth-reading"])
    assert found["the embedding"] == [pytest.approx(0.3)] and found["the newest source"] == [pytest.approx(0.55)]
    assert found["those between"] == [pytest.approx(0.15)]


def test_homogeneity_is_of_pairs_not_of_the_diagonal(
    run_with: Callable[..., Path], looked: Callable[..., Line]
) -> None:
    lines = [looked(0), looked(3)]
    lines[1]["layers"] |= {
        "labels": ["0", "1", "head"],
        "cka": [[1, 0.5, 0.1], [0.5, 1, None], [0.1, None, 1]],
        "tokens_alike": [0.1, 0.8, 0.4],
        "next_alike": [0.9, 0.7],
    }
    chart = by_key(RunView(run_with(probes=lines)))["depth-homogeneity"]
    ends = {name: values[-1] for name, values in lines_of(chart).items()}
    assert ends["two layers: CKA, mean of all pairs"] == pytest.approx(0.3)
    assert ends["a token and itself one layer on: cosine"] == pytest.approx(0.8)
    assert ends["two tokens, as the head reads them: cosine"] == pytest.approx(0.4)
    (band,) = chart.bands
    assert (np.asarray(band.low)[-1], np.asarray(band.high)[-1]) == (pytest.approx(0.1), pytest.approx(0.8))


def test_activations_stand_beside_those_of_the_first_look(
    run_with: Callable[..., Path], looked: Callable[..., Line]
) -> None:
    lines = [looked(0), looked(6)]
    lines[1]["activations"]["attention"]["max"] = [1.0, None, 50.0, 2.0]
    found = by_key(RunView(run_with(probes=lines)))
    now = lines_of(found["depth-activations"])
    assert now["written by attention"][2] == 50 and np.isnan(now["written by attention"][1])
    assert now["written by attention, step 0"] == pytest.approx(lines[0]["activations"]["attention"]["max"], rel=1e-5)
    over = lines_of(found["depth-maxima"])
    assert over["written by attention"][-1] == 50
    assert over["read by a sublayer"][0] == pytest.approx(max(lines[0]["activations"]["stream"]["max"]), rel=1e-5)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"config": {"probe_every": 0}}, "probe_every is 0"),
        ({"config": {}}, "made before runs looked"),
        ({"config": {"probe_every": 50}}, "no whole line"),
    ],
)
def test_without_a_look_every_figure_says_why(run_with: Callable[..., Path], record: Line, why: str) -> None:
    found = charts(RunView(run_with(**record)))
    assert len(found) == len(TITLES) and all(why in chart.empty for chart in found)


def test_a_damaged_part_is_told_where_its_figure_would_be(
    run_with: Callable[..., Path], looked: Callable[..., Line]
) -> None:
    line = {**looked(3), "layers": {"labels": 5}, "depth": 7, "activations": []}
    found = by_key(RunView(run_with(probes=[line])))
    for key, part in (("depth-weights", "depth"), ("depth-similarity", "layers"), ("depth-activations", "activations")):
        assert found[key].empty == f"The line of step 3 in probes.jsonl is damaged: its part {part} cannot be read."
