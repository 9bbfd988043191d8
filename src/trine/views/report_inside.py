"""The part of `report.md` that shows what was seen inside the model while it trained: the dashboard's own figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from trine.views import depth_charts, gate_charts
from trine.views.chart import Chart
from trine.views.chart_render import to_matplotlib
from trine.views.run_view import RunView

SHOWN = (
    *("depth-reading", "depth-homogeneity", "depth-maxima"),
    *("gates-decay", "gates-memory", "gates-bound-steps", "gates-openness"),
)
"""Keys of the figures that a report has, in order; the other ones move with the dashboard's slider."""


def inside_charts(folder: Path) -> list[Chart]:
    """Those of the figures `SHOWN` that the run has something for; none where nothing was seen."""
    run = RunView(folder)
    if not run.probes():
        return []
    found = {chart.key: chart for chart in (*depth_charts.charts(run), *gate_charts.charts(run))}
    return [found[key] for key in SHOWN if not found[key].empty]


def inside_figures(charts: list[Chart]) -> dict[str, Figure]:
    """They, drawn, by the name of their file."""
    return {chart.key: to_matplotlib(chart) for chart in charts}


def inside_section(charts: list[Chart], plots: Mapping[str, str]) -> str:
    """A section of Markdown; empty without figures."""
    if not charts:
        return ""
    pictures = "\n\n".join(f"![{chart.title}]({plots[chart.key]})" for chart in charts)
    about = "Looks at the same short text, every few steps (`probes.jsonl`)."
    return f"## Inside the model, over the run\n\n{about}\n\n{pictures}"
