from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trine.views.report_inside import SHOWN, inside_charts, inside_figures, inside_section

Line = dict[str, Any]


def test_a_report_shows_what_was_seen(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    charts = inside_charts(run_with(probes=[looked(0), looked(4)]))
    assert tuple(chart.key for chart in charts) == SHOWN
    drawn = inside_figures(charts[:1])
    assert [figure.axes[0].get_title("left") for figure in drawn.values()] == [charts[0].title]
    text = inside_section(charts, {key: f"plots/{key}.png" for key in SHOWN})
    assert text.count("![") == len(SHOWN) and "![Memory length by layer and head](plots/gates-memory.png)" in text


def test_parts_that_a_model_lacks_are_left_out(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    plain = {"residual": "plain", "output_gates": False}
    keys = [chart.key for chart in inside_charts(run_with(probes=[looked(0, **plain)]))]
    assert keys == [key for key in SHOWN if key not in ("depth-reading", "gates-openness")]


def test_a_run_without_looks_has_no_such_section(run_with: Callable[..., Path]) -> None:
    assert inside_charts(run_with()) == [] and inside_section([], {}) == ""
