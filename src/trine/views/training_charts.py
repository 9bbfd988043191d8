"""The Training page: loss, bits per byte, rate, gradient, throughput, stages, and what happened; alerts and events as
tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from trine.views.chart import Axis, Chart, Colour, Line, Mark, nothing, plain
from trine.views.run_series import (
    STEPS,
    Array,
    by_step,
    column,
    number,
    running_median,
    stage_marks,
    step_marks,
    whole,
)
from trine.views.run_view import RunView

Record = Mapping[str, Any]
Level = Literal["info", "warning", "error"]

TITLES = {
    "training-loss": "Loss",
    "training-bits": "Bits per byte",
    "training-gradient": "Norm of the gradient",
    "training-rate": "Learning rate",
    "training-throughput": "Tokens a second",
}
HAPPENINGS: dict[str, tuple[str, Level, Colour]] = {
    "non_finite": ("not finite", "error", "red"),
    "spike": ("spike", "warning", "orange"),
    "rollback": ("rollback", "warning", "purple"),
    "no_supervised_token": ("nothing to learn", "warning", "orange"),
    "qk_clip": ("QK-clip", "info", "sky"),
    "balance_alert": ("balance", "warning", "orange"),
    "damaged_checkpoint": ("damaged checkpoint", "error", "red"),
    "recorder_set_aside": ("recorder's file renamed", "warning", "orange"),
    "short_guard": ("short text measured", "info", "green"),
    "stage": ("stage", "info", "blue"),
    "resume": ("resumed", "info", "grey"),
    "interrupted": ("interrupted", "info", "grey"),
    "done": ("done", "info", "green"),
}
"""Kinds of events: in words, how much they matter, and their colour. Unknown ones are shown by their own name."""
_DRAWN = ("non_finite", "spike", "rollback", "no_supervised_token", "qk_clip", "resume")
NO_LOSS = "No step has a finite loss."
_MEDIAN = 25  # steps of a running median, in short runs fewer
_LONGEST_VALUE = 60


def charts(run: RunView, step: int | None = None) -> list[Chart]:
    """All figures of the page.

    Args:
        run: the run.
        step: marked in each of them; None marks none.
    """
    records = by_step(run.records())
    if not records:
        why = "No step was recorded yet: metrics.jsonl has no whole line."
        return [nothing(key, title, why) for key, title in TITLES.items()]
    marks = [*stage_marks(run), *step_marks(step)]
    return [
        loss(records, run.events(), marks),
        bits_per_byte(records, run, marks),
        gradient(records, run, marks),
        rate(records, marks),
        throughput(records, marks),
    ]


def loss(records: Sequence[Record], events: Sequence[Record], marks: Sequence[Mark] = ()) -> Chart:
    """Loss of each step's batches, its running median, that of the layer that predicts one token more, and events."""
    key = "training-loss"
    x, y = column(records, "step"), column(records, "loss")
    if np.isnan(y).all():
        return nothing(key, TITLES[key], NO_LOSS)
    lines = _with_median(x, y, "loss", "blue")
    ahead = column(records, "mtp_loss")
    if np.isfinite(ahead).any():
        lines.append(Line("of the token after the next", x, ahead, "green", "dash", 1.2))
    lines += _happenings(x, y, events)
    gaps = int(np.isnan(y).sum())
    notes = [f"Not finite in {gaps} step{'s' if gaps > 1 else ''}: gaps in the line."] if gaps else []
    return Chart(key, TITLES[key], STEPS, Axis("loss", "nats a token"), lines, marks=marks, notes=notes)


def bits_per_byte(records: Sequence[Record], run: RunView, marks: Sequence[Mark] = ()) -> Chart:
    """Bits per byte of each step's text, and as level lines what the held-out text took and its yardsticks."""
    key = "training-bits"
    y = column(records, "bits_per_byte")
    if np.isnan(y).all():
        why = "The bytes of this run's text are not known, so there are no bits per byte."
        if np.isnan(column(records, "loss")).all():
            why = f"{NO_LOSS[:-1]}, so there are no bits per byte."
        return nothing(key, TITLES[key], why)
    levels: list[Mark] = []
    found = run.evaluation()
    held_out = number(found.get("bits_per_byte"))
    if np.isfinite(held_out):
        levels.append(Mark(held_out, f"held-out text {held_out:.3f}", "y", "green", "solid"))
    yardsticks = found.get("baselines")
    for name, words in (("gzip", "gzip -9"), ("ngram_best", "best byte n-gram")):
        value = number(yardsticks.get(name)) if isinstance(yardsticks, dict) else float("nan")
        if np.isfinite(value):
            levels.append(Mark(value, f"{words} {value:.3f}", "y", "grey", "dot"))
    lines = _with_median(column(records, "step"), y, "training text", "blue")
    return Chart(key, TITLES[key], STEPS, Axis("bits per byte"), lines, marks=[*marks, *levels])


def gradient(records: Sequence[Record], run: RunView, marks: Sequence[Mark] = ()) -> Chart:
    """Norm of the whole gradient before clipping, and the norm it is clipped to."""
    key = "training-gradient"
    x, y = column(records, "step"), column(records, "grad_norm")
    if np.isnan(y).all():
        return nothing(key, TITLES[key], "No step has a finite norm of the gradient.")
    clip = number(run.config("config", "optimizer", "clip"))
    level = [Mark(clip, f"clipped at {clip:g}", "y", "red")] if np.isfinite(clip) and clip > 0 else []
    skipped = np.array([one.get("updated") is False for one in records])
    notes = [f"Steps whose update was not applied: {int(skipped.sum())}."] if skipped.any() else []
    heads = column(records, "clipped_heads")
    if np.nansum(heads) > 0:
        notes.append(f"Steps in which QK-clip scaled heads down: {int((heads > 0).sum())}.")
    axis = Axis("norm before clipping", log=bool(np.nanmin(y) > 0))
    return Chart(
        key, TITLES[key], STEPS, axis, _with_median(x, y, "norm", "purple"), marks=[*marks, *level], notes=notes
    )


def rate(records: Sequence[Record], marks: Sequence[Mark] = ()) -> Chart:
    """Rate of the matrices."""
    key = "training-rate"
    y = column(records, "lr")
    if np.isnan(y).all():
        return nothing(key, TITLES[key], "No step has a learning rate.")
    line = Line("rate of the matrices", column(records, "step"), y, "blue")
    notes = [] if np.nanmax(y) > 0 else ["The rate was 0 so far."]
    return Chart(key, TITLES[key], STEPS, _from_zero("learning rate", y), [line], marks=marks, notes=notes, height=0.8)


def throughput(records: Sequence[Record], marks: Sequence[Mark] = ()) -> Chart:
    """Tokens a second of each step, and their median."""
    key = "training-throughput"
    y = column(records, "tokens_per_s")
    known = y[np.isfinite(y)]
    if not known.size:
        return nothing(key, TITLES[key], "No step has a throughput.")
    middle = float(np.median(known))
    return Chart(
        key,
        TITLES[key],
        STEPS,
        _from_zero("tokens a second", known),
        _with_median(column(records, "step"), y, "tokens a second", "green"),
        marks=[*marks, Mark(middle, f"median {middle:,.0f}", "y")],
        height=0.8,
    )


def _from_zero(label: str, values: Array) -> Axis:
    """From 0 on; where all are 0 up to 1, for what fits would be -1 to 1."""
    return Axis(label, low=0, high=None if np.nanmax(values) > 0 else 1.0)


def _with_median(x: Array, y: Array, name: str, colour: Colour) -> list[Line]:
    """A curve; of a longer one, thin, with its running median over it."""
    width = min(_MEDIAN, len(y) // 8)
    if width < 3:
        return [Line(name, x, y, colour)]
    return [
        Line(name, x, y, "grey", width=0.8),
        Line(f"median of {2 * (width // 2) + 1} values", x, running_median(y, width), colour, width=2.0),
    ]


def _happenings(x: Array, y: Array, events: Sequence[Record]) -> list[Line]:
    """A point on the curve for each event that has a step."""
    known = np.isfinite(y)
    if not known.any():
        return []
    lines = []
    for kind in _DRAWN:
        steps = [one["step"] for one in events if one.get("kind") == kind and whole(one.get("step"))]
        if steps:
            at = np.array(sorted(set(steps)), dtype=np.float64)
            words, _, colour = HAPPENINGS[kind]
            lines.append(Line(words, at, np.interp(at, x[known], y[known]), colour, points=True))
    return lines


# -- tables ------------------------------------------------------------------------------------------------------------


class Happening(NamedTuple):
    """A row of the table of events or alerts."""

    step: int | None
    time: str
    kind: str  # in words
    level: Level
    text: str  # a sentence


def event_rows(run: RunView, most: int = 200) -> list[Happening]:
    """What happened, newest first; alerts of the balance are left to `alert_rows`."""
    rows = [_row(one) for one in run.events() if one.get("kind") != "balance_alert"]
    return rows[::-1][:most]


class Standing(NamedTuple):
    """An alert of the balance: when it began, and when its rule was good again everywhere, if it is."""

    rule: str
    began: int | None
    active: bool
    ended: int | None
    text: str


def alert_rows(run: RunView, most: int = 200) -> list[Standing]:
    """Alerts of the balance: those that are on first, then the newest.

    A rule begins and ends layer by layer; its alerts end together, when as many layers have ended as have begun.
    """
    rows, _ = _stand(run.events())
    return sorted(rows, key=lambda one: (not one.active, -(one.began or 0)))[:most]


def layers_on(events: Sequence[Record]) -> dict[str, int]:
    """Layers in which each rule is on."""
    return {rule: count for rule, count in _stand(events)[1].items() if count}


def _stand(events: Sequence[Record]) -> tuple[list[Standing], dict[str, int]]:
    found: list[Standing] = []
    on: dict[str, int] = {}
    places: dict[str, list[int]] = {}  # of alerts in found that are on
    for one in events:
        if one.get("kind") != "balance_alert":
            continue
        rule, at, layers = plain(one.get("rule", ""), 40), one.get("step"), one.get("count")
        step: int | None = at if whole(at) else None
        count: int = layers if whole(layers) else 1
        if one.get("begins") is True:
            on[rule] = on.get(rule, 0) + count
            places.setdefault(rule, []).append(len(found))
            found.append(Standing(rule, step, True, None, plain(one.get("text", ""))))
            continue
        on[rule] = max(0, on.get(rule, 0) - count)
        if not on[rule]:
            for place in places.pop(rule, []):
                found[place] = found[place]._replace(active=False, ended=step)
    return found, on


def _row(event: Record) -> Happening:
    kind = event.get("kind")
    name = kind if isinstance(kind, str) else "unknown"
    words, level, _ = HAPPENINGS.get(name, (plain(name, 40), "info", "grey"))
    step = event.get("step")
    time = event.get("time")
    return Happening(
        step if whole(step) else None,
        plain(time, 20) if isinstance(time, str) else "",
        words,
        level,
        plain(_sentence(name, event)),
    )


def _sentence(kind: str, event: Record) -> str:
    """What an event says, in words; of one that is not known, or lacks a part, its fields."""
    try:
        match kind:
            case "stage":
                return (
                    f"Stage {event['stage'] + 1}: rows of {event['length']:,}, {event['step_tokens']:,} tokens a step."
                )
            case "non_finite":
                return f"The update was not applied: {event['tensor']} is not finite."
            case "spike":
                return f"Loss {event['loss']:.4g}, usual {event['usual']:.4g}."
            case "rollback":
                return f"Back from step {event['step']:,} to step {event['to_step']:,} ({event['checkpoint']})."
            case "resume":
                return f"Went on from step {event['step']:,} ({event['checkpoint']})."
            case "interrupted":
                return f"Interrupted after step {event['step']:,}; everything up to it is saved."
            case "done":
                return f"{event['step']:,} steps done, {event['seconds']:,} seconds of training."
            case "qk_clip":
                return f"{len(event['heads'])} heads scaled down."
            case "short_guard":
                change = "" if event["change"] is None else f" ({100 * event['change']:+.1f} %)"
                worse = "; it got worse" if event["worse"] else ""
                return f"After stage {event['stage'] + 1}: {event['after']:.4f} {event['unit']}{change}{worse}."
            case "no_supervised_token":
                return "The step had no token to learn from."
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    rest = {key: one for key, one in event.items() if key not in ("time", "kind", "step")}
    return ", ".join(f"{key}: {_short(one)}" for key, one in rest.items())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return plain(text, _LONGEST_VALUE)
