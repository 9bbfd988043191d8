"""Figures of `report.md` that the dashboard has too: its own functions draw them, from the same files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from trine.views import training_charts
from trine.views.balance_charts import max_vio_chart, percentile_chart, time_charts, with_stages
from trine.views.balance_data import KEPT, BalanceData, History
from trine.views.chart import Chart
from trine.views.chart_render import panels
from trine.views.run_series import Array, by_step, column, number, whole
from trine.views.run_view import RunView

Record = Mapping[str, Any]

OVERVIEW = ("training-bits", "max-vio", "training-gradient", "training-throughput")
LOAD = ("percentiles", "max-vio")
OPTIMIZER = ("training-loss", "training-rate", "training-gradient")
"""Keys of the figures on each picture."""


def run_charts(folder: Path) -> dict[str, Chart]:
    """The dashboard's figures of a run's training and balance over steps, by their key; those that are empty left out.

    The load is what the recorder holds, or where there is no recorder's file what ``metrics.jsonl`` tells of it.
    """
    run = RunView(folder)
    try:
        found = [*training_charts.charts(run), *_balance(run)]
    finally:
        run.close()
    return {chart.key: chart for chart in found if not chart.empty}


def run_figures(charts: Mapping[str, Chart], title: str) -> dict[str, Figure]:
    """They, drawn on up to three pictures, by the name of its file; one without any figure is absent.

    Args:
        charts: of `run_charts`.
        title: over the overview.
    """
    first = ("training-loss", *OVERVIEW[1:]) if "training-bits" not in charts else OVERVIEW
    drawn = {}
    glance = [charts[key] for key in first if key in charts]
    if glance:
        drawn["overview"] = panels([glance[i : i + 2] for i in range(0, len(glance), 2)], title, width=12.0)
    for name, keys in (("load", LOAD), ("optimizer", OPTIMIZER)):
        shown = [[charts[key]] for key in keys if key in charts]
        if shown:
            drawn[name] = panels(shown, width=8.0)
    return drawn


def step_tokens(metrics: Sequence[Record]) -> Array:
    """Tokens of each recorded step, ``[R]``, from the running total; steps that were not recorded are spread evenly.

    NaN where a record does not say.
    """
    totals = np.concatenate(([0.0], column(metrics, "tokens")))
    steps = np.concatenate(([0.0], column(metrics, "step")))
    return np.maximum(1.0, np.round(np.diff(totals) / np.maximum(1.0, np.diff(steps))))


def _balance(run: RunView) -> list[Chart]:
    data = BalanceData(run)
    if data.history() is not None:
        return time_charts(data, None)
    experts, top_k = (run.config("model", name) for name in ("experts", "top_k"))
    history = history_of(by_step(run.records()))
    if history is None or not (whole(experts) and whole(top_k) and 1 <= top_k <= experts):
        return []
    drawn = (("p50", percentile_chart), ("max_vio", max_vio_chart))
    with np.errstate(all="ignore"):
        known = [chart(history, None, top_k, experts) for name, chart in drawn if np.isfinite(history.of(name)).any()]
    return with_stages(known, run, history)


def history_of(metrics: Sequence[Record]) -> History | None:
    """What ``metrics.jsonl`` tells of the load, as the recorder's would: MaxVio of each layer, and percentiles, which
    are means over the layers already; None without MoE layers."""
    rows = [one if isinstance(one := record.get("max_vio"), list) else [] for record in metrics]
    layers = max(map(len, rows), default=0)
    if not layers:
        return None
    figures_PKL = np.full((len(metrics), len(KEPT), layers), np.nan, dtype=np.float32)
    columns = {name: i for i, name in enumerate(KEPT)}
    for i, (record, row) in enumerate(zip(metrics, rows, strict=True)):
        figures_PKL[i, columns["max_vio"], : len(row)] = [number(one) for one in row]
        percentiles = record.get("load_percentiles")
        if isinstance(percentiles, dict):
            for name in ("p1", "p5", "p50", "p95", "p99"):
                figures_PKL[i, columns[name]] = number(percentiles.get(name))
    figures_PKL[:, columns["tokens"]] = step_tokens(metrics)[:, None]
    return History(column(metrics, "step").astype(np.int64), figures_PKL)
