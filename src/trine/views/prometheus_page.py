"""``/metrics`` of the dashboard: the newest figures of some runs as a page for Prometheus.

The number of series is bounded whatever the number of experts and heads: a few of a run, a few of a layer. The label
``layer`` is the layer's number in the model, of loads of experts as of what was seen inside.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trine.balance.exporters import Family, Prometheus, exposition
from trine.balance.record_format import RecordError
from trine.views.chart import plain
from trine.views.probe_view import Probe
from trine.views.run_series import by_step, mean, number
from trine.views.run_view import RunView, moe_layers
from trine.views.training_charts import layers_on

TRAINING: Mapping[str, tuple[str, str]] = {
    "train_step": ("step", "Steps done."),
    "train_stage": ("stage", "Stage of the plan, from 0."),
    "train_tokens": ("tokens", "Positions seen."),
    "train_loss": ("loss", "Loss of the newest step, nats a token."),
    "train_bits_per_byte": ("bits_per_byte", "Bits per byte of the newest step's text."),
    "train_learning_rate": ("lr", "Learning rate of the matrices."),
    "train_gradient_norm": ("grad_norm", "Norm of the gradient before clipping."),
    "train_tokens_per_second": ("tokens_per_s", "Tokens a second of the newest step."),
    "train_step_seconds": ("seconds", "Seconds of the newest step."),
    "train_dead_experts": ("dead_experts", "Experts without a token in the newest step, all layers together."),
    "train_clipped_heads": ("clipped_heads", "Attention heads that QK-clip scaled down in the newest step."),
}
"""Series of a run: the key of ``metrics.jsonl`` they come from, and what they say."""


MOST_RUNS = 20
"""Of a page: those whose files were written last."""
_MOST_KINDS = 40  # of events
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the page."""


def metrics_text(runs: Sequence[RunView]) -> str:
    """The page. A run that cannot be read has ``trine_run_readable`` 0 and nothing else.

    Args:
        runs: of more than `MOST_RUNS` those that were written to last are served, so that the one that is training
            now is among them.

    Raises:
        ValueError: prometheus_client is not installed.
    """
    found: dict[str, tuple[Prometheus | None, list[Family]]] = {}
    for run in newest(runs):
        name, copies = run.name, 1
        while name in found:
            copies += 1
            name = f"{run.name} ({copies})"
        readable = not run.problem()
        families = [Family("run_readable", "Whether the run's folder can be read.", (), [((), float(readable))])]
        if readable:
            families += [*_training(run), *_events(run), *_inside(run.probes())]
        found[name] = (_experts(run) if readable else None, families)
    return exposition(found)


def newest(runs: Sequence[RunView], most: int = MOST_RUNS) -> list[RunView]:
    """The runs that were written to last, in the order given."""
    if len(runs) <= most:
        return list(runs)
    latest = sorted(range(len(runs)), key=lambda i: (runs[i].written(), i))[-most:]
    return [runs[i] for i in sorted(latest)]


def _experts(run: RunView) -> Prometheus | None:
    """The gauges that a run with ``prometheus`` set serves itself; None where no expert was recorded."""
    reader = run.recorder()
    if reader is None:
        return None
    try:
        frame = reader.latest()
        counts = reader.counts()
    except RecordError:
        return None
    if frame is None or not reader.layers:
        return None
    gauges = Prometheus()
    gauges.layers = moe_layers(run, reader.layers)
    on = {rule: range(count) for rule, count in layers_on(run.events()).items()}
    gauges.update(frame, on, {name: counts[name] for name in ("written", "dropped", "failed") if name in counts})
    return gauges


def _training(run: RunView) -> list[Family]:
    records = by_step(run.records())
    found = []
    if records:
        newest = records[-1]
        for name, (key, text) in TRAINING.items():
            value = number(newest.get(key))
            if np.isfinite(value):
                found.append(Family(name, text, (), [((), value)]))
    planned = number(run.meta().get("planned_steps"))
    if np.isfinite(planned):
        found.append(Family("train_planned_steps", "Steps of the whole plan.", (), [((), planned)]))
    try:
        written = os.stat(run.path / "metrics.jsonl").st_mtime
    except OSError:
        return found
    text = "When the newest step was written, seconds since 1970: what to watch for a run that hangs."
    return [*found, Family("train_written_timestamp_seconds", text, (), [((), written)])]


def _events(run: RunView) -> list[Family]:
    counts: dict[str, int] = {}
    for event in run.events():
        kind = event.get("kind")
        name = plain(kind, 40) if isinstance(kind, str) else ""
        if name in counts or (name and len(counts) < _MOST_KINDS):
            counts[name] = counts.get(name, 0) + 1
    values = [((kind,), float(count)) for kind, count in sorted(counts.items())]
    return [Family("events", "Events so far.", ("kind",), values)]


def _inside(probes: Sequence[Probe]) -> list[Family]:
    """What the newest look inside the model found: means over heads."""
    if not probes:
        return []
    probe = probes[-1]
    found = [Family("inside_step", "Step of the newest look inside the model.", (), [((), float(probe.step))])]

    def add(name: str, text: str, label: str, values: Sequence[tuple[Any, float]]) -> None:
        known = [((str(of),), value) for of, value in values if np.isfinite(value)]
        if known:
            found.append(Family(f"inside_{name}", text, (label,), known))

    gates = probe.gates
    middle = [(gate.layer, mean(gate.memory_HM[:, gate.memory_HM.shape[1] // 2])) for gate in gates]
    add("memory_tokens", "Tokens after which a state has faded to 1/e: median over channels.", "layer", middle)
    for name, words in (("at_g_min", "at their bound g_min"), ("at_zero", "at 0, which forget nothing")):
        shares = [(gate.layer, mean(row)) for gate in gates if (row := getattr(gate, f"{name}_H")) is not None]
        add(name, f"Share of decay gates {words}.", "layer", shares)
    open_ = [(gate.layer, mean(gate.mean_H)) for gate in probe.openness]
    add("openness", "Mean openness of the output gates.", "layer", open_)
    peaks = [
        (part, float(np.nanmax(one.largest))) for part, one in probe.peaks.items() if np.isfinite(one.largest).any()
    ]
    add("activation_max", "Largest activation of any layer.", "part", peaks)
    alike = list(zip(probe.labels, map(float, probe.tokens_alike), strict=False))
    add("tokens_alike", "Mean cosine of two tokens of what a layer reads.", "layer", alike)
    return found
