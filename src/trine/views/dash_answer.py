"""What the page is told when it asks: the figures that changed, words and tables, as JSON. Knows no web library.

The page asks with everything that is chosen (`Asked`), and with a mark of each figure it has. It is sent the figures
whose mark is another one, so a step of the slider sends four of the Balance page's eight, and of the picture of all
experts, where its colours mean the same as before, the pixels only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from trine.views.balance_charts import cell_words
from trine.views.chart import Chart
from trine.views.dash_axes import share_axes
from trine.views.dash_state import PAGES, Runs, View, kind_of, whole
from trine.views.plotly_charts import to_plotly
from trine.views.run_series import STEPS
from trine.views.training_charts import event_rows

_BUSY = 0.75
"""Share of processor time in use from which on the page is asked to look less often: something else is at work."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One question of the page; what is no such thing takes the default.

    Attributes:
        page: one of `PAGES`.
        sides: numbers of the runs, one or two beside each other.
        values: what `View.of` takes.
        dark: colours for a dark ground.
        have: marks of the figures the page has, by their ids.
        seen: `version` of what the page shows; empty when it shows nothing yet.
        look: it only wants to know whether there is something new.
        moved: since then only what figures of one step depend on was chosen anew.
        known: mark of its list of runs; empty when it has none but the page's first.
    """

    page: str = "balance"
    sides: tuple[int, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    dark: bool = False
    have: Mapping[str, str] = field(default_factory=dict)
    seen: str = ""
    look: bool = False
    moved: bool = False
    known: str = ""

    @classmethod
    def of(cls, runs: Runs, words: Mapping[str, str]) -> Asked:
        """From the words of an address."""
        if "runs" in words:
            numbers = [whole(one) for one in words["runs"].split(",")]
        else:
            numbers = list(linked(runs, words))
        sides = [one for one in numbers if one is not None and one < len(runs)] or list(runs.opening())[:1]
        have = [one.rpartition(":") for one in words.get("have", "").split(",")]
        return cls(
            page=words["page"] if words.get("page") in PAGES else "balance",
            sides=tuple(dict.fromkeys(sides))[:2],
            values=words,
            dark=words.get("theme") == "dark",
            have={name: mark for name, _, mark in have},
            seen=words.get("seen", ""),
            look="look" in words,
            moved="moved" in words,
            known=words.get("known", ""),
        )


def linked(runs: Runs, words: Mapping[str, str]) -> tuple[int, ...]:
    """The runs that an address names, ``run`` and ``beside``; what the page opens with where it names none."""
    first, second = runs.named(words.get("run")), runs.named(words.get("beside"))
    if first is None:
        return runs.opening()
    return (first,) if second in (None, first) else (first, second)


def answer(runs: Runs, asked: Asked, busy: bool = False) -> bytes | None:
    """JSON for the page, which is to look less often when ``busy``; None when it looks and there is nothing new."""
    version = _mark([runs.version(side) for side in asked.sides])
    if asked.look and asked.seen == version and asked.known == runs.mark:
        return None
    kinds = {"step"} if asked.moved and asked.seen == version else {"step", "time"}
    names = [runs.runs[side].name for side in asked.sides]
    spans = [span for side in asked.sides if (span := runs.span(side, asked.page)) is not None]
    low, high = (min(one[0] for one in spans), max(one[1] for one in spans)) if spans else (1, 1)
    views = [view_of(runs, side, asked.values, asked.page) for side in asked.sides]
    found: Json = {
        "version": version,
        "heading": f"{PAGES[asked.page]}: {' beside '.join(names)}" if names else PAGES[asked.page],
        "newest": f"newest step {high:,}" if spans else "no step yet",
        "silent": _silent(runs, asked.sides, names),
        "span": [low, high],
        "steps": [view.step for view in views],
        "layers": runs.layers(asked.sides[0], asked.page) if asked.sides else [],
        "known": runs.mark,
        "named": [runs.labels[side] for side in asked.sides] if len(runs) > 1 else [],
        "busy": busy,
        "notes": _notes(runs, asked.sides),
        "tiles": _tiles(runs, asked.sides, views) if asked.page == "balance" else [],
        "tables": _tables(runs, asked) if "time" in kinds else None,
        "whole": "time" in kinds,
        "figures": _figures(runs, asked, views, kinds),
    }
    if asked.known not in ("", runs.mark):
        found["runs"] = run_options(runs)
    return json.dumps(found, separators=(",", ":"), allow_nan=False).encode()


def cell(runs: Runs, asked: Asked, row: int, column: int) -> str:
    """What a cell of the picture of all experts of the first run asked for stands for; empty where there is none."""
    if not asked.sides or runs.runs[asked.sides[0]].problem():
        return ""
    view = view_of(runs, asked.sides[0], asked.values)
    return cell_words(runs.data(asked.sides[0]), view.step, view.what, view.order, row, column)


def view_of(runs: Runs, number: int, values: Mapping[str, Any], page: str = "balance") -> View:
    """What is looked at; of a run that ends earlier its last step."""
    view = View.of(values)
    span = runs.span(number, page)
    step = span[1] if span is not None else None
    if span is not None and view.step is not None:
        step = min(max(view.step, span[0]), span[1])
    return View(step, view.layer, view.what, view.order, view.ranks, view.expert)


def run_options(runs: Runs) -> list[Json]:
    """Entries of the list of runs."""
    listed = enumerate(zip(runs.labels, runs.gone, strict=True))
    return [{"value": i, "label": f"{name} (gone)" if gone else name} for i, (name, gone) in listed]


class Machine:
    """How busy this machine is, from its own account of processor time. Safe to share between threads."""

    def __init__(self) -> None:
        self._since = _processor_time()
        self._busy = False

    def busy(self) -> bool:
        """Whether hardly a core was free since a second or more ago; False where the machine does not say."""
        (idle, whole_time), (idle_before, before) = _processor_time(), self._since
        if whole_time - before >= os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1):
            self._since = (idle, whole_time)
            self._busy = 1 - (idle - idle_before) / (whole_time - before) > _BUSY
        return self._busy


def _processor_time() -> tuple[int, int]:
    """Ticks in which a core had nothing to do, and all, of all cores since the machine started."""
    try:
        fields = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return fields[3] + fields[4], sum(fields)


def _mark(value: Any) -> str:
    """A short word that is another one whenever the value is."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return hashlib.blake2b(data, digest_size=9).hexdigest()


# -- figures ---------------------------------------------------------------------------------------------------------


def _figures(runs: Runs, asked: Asked, views: list[View], kinds: set[str]) -> list[list[Json]]:
    """The figures of the page in reading order; each a list with one part a run."""
    charts = _charts(runs, asked.page, list(zip(asked.sides, views, strict=True)), kinds)
    found = []
    for key in dict.fromkeys(one.key for side in charts for one in side):
        parts = []
        for place, side in enumerate(charts):
            for chart in side:
                if chart.key == key:
                    name = runs.runs[asked.sides[place]].name if len(charts) > 1 else ""
                    parts.append(_part(asked, chart, place, views[place], name))
        found.append(parts)
    return found


def _charts(runs: Runs, page: str, looked: list[tuple[int, View]], kinds: set[str]) -> list[list[Chart]]:
    """Charts of every side; those of one key have one y axis."""
    if not looked:
        return [runs.charts(page, -1, View())]
    found = [runs.charts(page, side, view, lambda kind: kind in kinds) for side, view in looked]
    if len(found) == 2:
        by_key = [{one.key: one for one in side} for side in found]
        for key in by_key[0].keys() & by_key[1].keys():
            for side, one in zip(by_key, share_axes([by_key[0][key], by_key[1][key]]), strict=True):
                side[key] = one
        found = [list(side.values()) for side in by_key]
    return found


def _part(asked: Asked, chart: Chart, place: int, view: View, who: str) -> Json:
    """One figure of one run: its words, and what plotly.js draws unless the page has it."""
    plot = to_plotly(chart, asked.dark)
    picture = plot["data"][0].pop("source") if plot["data"] and plot["data"][0]["type"] == "image" else ""
    part: Json = {
        "id": f"{chart.key}-{place}",
        "key": chart.key,
        "side": place,
        "title": chart.title,
        "who": who,
        "notes": list(chart.notes),
        "description": chart.description,
        "height": plot["layout"]["height"],
        "wide": chart.wide,
        "timed": kind_of(asked.page, chart.key) == "time",
        "over": _steps_of(chart),
        "query": "" if chart.empty else _query(asked, asked.sides[place], view),
    }
    if chart.key == "heat" and chart.heatmap is not None:
        rows, columns = np.asarray(chart.heatmap.values).shape
        part["cells"] = [rows, columns, chart.heatmap.y0]
        plot["layout"]["hovermode"] = False  # the page asks for the cell's words
    text = json.dumps(plot, separators=(",", ":"), allow_nan=False).encode()
    part["mark"] = f"{_mark(text)}.{_mark(picture) if picture else ''}"
    had = asked.have.get(part["id"], ".").split(".")
    now = part["mark"].split(".")
    if had != now:
        part["picture"] = picture
        if had[0] != now[0]:
            part["plot"] = plot
    return part


def _steps_of(chart: Chart) -> list[float] | None:
    """First and last step of a figure over steps; None of others. The line at a step stays between them."""
    if chart.x.label != STEPS.label or chart.heatmap is not None or chart.empty:
        return None
    columns = [np.asarray(line.x) for line in chart.lines] + [np.asarray(band.x) for band in chart.bands]
    ends = [float(end) for x in columns if x.size for end in (x[0], x[-1])]
    known = [end for end in ends if np.isfinite(end)]
    return [min(known), max(known)] if known else None


def _query(asked: Asked, number: int, view: View) -> str:
    """What is looked at, as the words of an address."""
    words: Json = {"page": asked.page, "runs": number, "what": view.what, "order": view.order, "ranks": view.ranks}
    words |= {name: one for name in ("step", "layer", "expert") if (one := getattr(view, name)) is not None}
    return urlencode(words)


# -- words and tables ------------------------------------------------------------------------------------------------


def _silent(runs: Runs, sides: tuple[int, ...], names: list[str]) -> list[list[Any]]:
    """Of each run that is not over: its name where there are two, and the seconds since its newest step."""
    found = [(name if len(names) > 1 else "", runs.silence(side)) for side, name in zip(sides, names, strict=True)]
    return [[name, round(seconds, 1)] for name, seconds in found if seconds is not None]


def _notes(runs: Runs, sides: tuple[int, ...]) -> list[str]:
    notes = [note if len(sides) == 1 else f"{runs.runs[one].name}: {note}" for one in sides for note in runs.notes(one)]
    return list(dict.fromkeys(notes))


def _tiles(runs: Runs, sides: tuple[int, ...], views: list[View]) -> list[Json]:
    found = [(side, runs.tiles(side, view)) for side, view in zip(sides, views, strict=True)]
    return [{"who": runs.runs[side].name if len(sides) > 1 else "", "tiles": tiles} for side, tiles in found if tiles]


def _tables(runs: Runs, asked: Asked) -> list[Json]:
    """Alerts of each run; on the page about training also what else happened, from what its marks are made of."""
    found = []
    for side in asked.sides:
        run = runs.runs[side]
        of = f" of {run.name}" if len(asked.sides) > 1 else ""
        if asked.page == "training" and not run.problem():
            rows = [
                [_step_text(one.step), one.kind, one.time, one.text, "on" if one.level != "info" else ""]
                for one in event_rows(run)
            ]
            columns = ["Step", "Event", "Time", "What"]
            found.append({"title": f"Events{of}", "columns": columns, "rows": rows, "none": "None so far."})
        if asked.page in ("balance", "training"):
            rows = [
                [_step_text(step), rule, "begins, still on" if still else "begins" if begins else "ends", text,
                 "on" if begins else "off"]
                for step, rule, begins, text, still in ([] if run.problem() else runs.alerts(side))
            ]  # fmt: skip
            none = "None so far." if not run.problem() else "Whether there were any cannot be read."
            columns = ["Step", "Rule", "State", "What"]
            found.append({"title": f"Alerts{of}", "columns": columns, "rows": rows, "none": none})
    return found


def _step_text(step: int | None) -> str:
    return "" if step is None else str(step)
