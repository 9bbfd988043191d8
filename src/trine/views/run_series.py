"""What the figures over steps share: columns of records, marks of stages and of the step looked at, likely colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from trine.views.chart import Axis, Band, Chart, Colour, Line, Mark, nothing
from trine.views.probe_view import Probe
from trine.views.run_view import RunView

Array = NDArray[np.float64]

SERIES: tuple[Colour, ...] = ("blue", "orange", "green", "red", "purple", "sky")
STEPS = Axis("steps", whole=True)
MOST_STEP = 2**53
_MOST_STAGES = 32


def number(value: Any) -> float:
    """A finite number, or NaN for whatever else a record holds."""
    if type(value) not in (int, float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def whole(value: Any) -> TypeGuard[int]:
    """Whether it is a step's number."""
    return type(value) is int and 0 <= value < MOST_STEP


def by_step(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records by rising step; of two of one step the later line."""
    found = {one["step"]: one for one in records if whole(one.get("step"))}
    return [found[step] for step in sorted(found)]


def column(records: Sequence[Mapping[str, Any]], name: str) -> Array:
    """One figure of each record, ``[R]``; NaN where it is absent, null or no number."""
    return np.array([number(one.get(name)) for one in records], dtype=np.float64)


def running_median(values: Array, width: int) -> Array:
    """Median of the ``width`` values around each, of fewer at the ends; NaN are left out where there are others."""
    if not len(values) or width < 2:
        return values
    half = width // 2
    padded = np.concatenate((np.full(half, np.nan), values, np.full(half, np.nan)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    found = np.full(len(values), np.nan)
    some = ~np.isnan(windows).all(1)
    found[some] = np.nanmedian(windows[some], axis=1)
    return found


def step_marks(step: int | None) -> list[Mark]:
    """A line at the step that is looked at; none at the newest."""
    return [] if step is None else [Mark(step, f"step {step:,}", colour="ink", dash="solid", moves=True)]


def stage_marks(run: RunView) -> list[Mark]:
    """A line where each stage but the first began; stages to come are left out, else they would squeeze the curves."""
    plan = run.meta().get("plan")
    last = max((one["step"] for one in run.records()), default=MOST_STEP)
    found = []
    for index, span in enumerate(plan[:_MOST_STAGES] if isinstance(plan, list) else ()):
        if index and isinstance(span, dict) and whole(span.get("first_step")) and span["first_step"] < last:
            stage = span.get("stage")
            length = stage.get("length") if isinstance(stage, dict) else None
            rows = f", rows of {length:,}" if whole(length) else ""
            found.append(Mark(span["first_step"], f"stage {index + 1}{rows}", dash="dot"))
    return found


def probe_at(probes: Sequence[Probe], step: int | None) -> Probe | None:
    """The last look at or before a step, else the first; the newest for None."""
    if not probes or step is None:
        return probes[-1] if probes else None
    return next((one for one in reversed(probes) if one.step <= step), probes[0])


def probe_note(probe: Probe) -> str:
    """What was looked at, and when."""
    what = f" on {probe.tokens:,} tokens of {probe.text}" if probe.tokens and probe.text else ""
    return f"Seen at step {probe.step:,}{what}."


def no_probes(run: RunView) -> str:
    """Why there is no look inside the model yet, in a sentence."""
    every = run.config("config", "probe_every")
    if every == 0:
        return "This run does not look inside its model (probe_every is 0)."
    if every is None and run.meta():
        return "This run was made before runs looked inside their model."
    return "Nothing was seen inside the model yet: probes.jsonl has no whole line."


def steps_of(probes: Sequence[Probe]) -> Array:
    """The step of each look, ``[S]``."""
    return np.array([probe.step for probe in probes], dtype=np.float64)


def probe_page(
    run: RunView,
    step: int | None,
    titles: Mapping[str, str],
    draw: Callable[[Sequence[Probe], Probe], list[Chart]],
) -> list[Chart]:
    """The figures of a page about looks inside the model; without any, each says why.

    Args:
        run: the run.
        step: what was seen last at or before it; None takes the newest.
        titles: keys and titles of the page's figures.
        draw: given all looks and the one to show.
    """
    probes = run.probes()
    now = probe_at(probes, step)
    if now is None:
        why = no_probes(run)
        return [nothing(key, title, why) for key, title in titles.items()]
    return draw(probes, now)


def chart_over_steps(
    key: str,
    title: str,
    run: RunView,
    step: int | None,
    y: Axis,
    lines: Sequence[Line],
    bands: Sequence[Band] = (),
    notes: Sequence[str] = (),
) -> Chart:
    """A figure over steps, with stages and the step that is looked at marked."""
    marks = [*stage_marks(run), *step_marks(step)]
    return Chart(key, title, x=STEPS, y=y, lines=lines, bands=bands, marks=marks, notes=notes)


def mean(values: NDArray[Any]) -> float:
    """Mean of what is known; NaN of nothing."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else math.nan


def over_layers(x: Array, layers: Sequence[int], values_LS: Array, what: str) -> tuple[list[Line], list[Band]]:
    """Curves over steps: a line a layer while they can be told apart, else the median and bands over the layers.

    Args:
        x: steps ``[S]``.
        layers: their numbers.
        values_LS: a row a layer.
        what: of the median, in words.
    """
    if len(layers) <= len(SERIES):
        lines = [
            Line(f"layer {layer}", x, row, SERIES[i])
            for i, (layer, row) in enumerate(zip(layers, values_LS, strict=True))
        ]
        return lines, []
    some = ~np.isnan(values_LS).all(0)
    low, quarter, middle, three, high = (np.full(len(x), np.nan) for _ in range(5))
    if some.any():
        low[some], quarter[some], middle[some], three[some], high[some] = np.nanpercentile(
            values_LS[:, some], (0, 25, 50, 75, 100), axis=0
        )
    bands = [Band("all layers", x, low, high, opacity=0.15), Band("half of the layers", x, quarter, three, opacity=0.3)]
    return [Line(what, x, middle)], bands


def thin_ticks(names: Sequence[str], first: int = 0, most: int = 24) -> tuple[tuple[float, str], ...]:
    """Names at places ``first``, ``first`` + 1 …; every second, third … where they are many."""
    stride = max(1, -(-len(names) // most))
    return tuple((float(first + i), name) for i, name in enumerate(names) if i % stride == 0)
