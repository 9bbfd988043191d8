"""What the dashboard shows, as plain data: runs, figures of each page, key figures, alerts. Knows no web library."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trine._log import logger
from trine.views import balance_charts
from trine.views.balance_charts import ORDERS, STEP_KEYS, WHATS, Order, What
from trine.views.balance_data import UNNUMBERED, BalanceData, Layers
from trine.views.chart import Chart, nothing, plain
from trine.views.run_view import RunView, find_runs

PAGES = {"balance": "Balance", "depth": "Depth", "gates": "Gates", "training": "Training"}
_OTHERS = {"depth": "depth_charts", "gates": "gate_charts", "training": "training_charts"}
_OPEN_RUNS = 6  # whose figures are kept in memory
_MOST_ALERTS = 100
_MOST_NUMBER = 1 << 53


@dataclass(frozen=True)
class View:
    """What of a run is looked at."""

    step: int | None = None  # None: the newest
    layer: int | None = None  # None: all
    what: What = "load"
    order: Order = "number"
    ranks: int = 0  # 0: the run's
    expert: int | None = None  # followed in the trajectories

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> View:
        """From the words of an address or of a control; what is no such thing takes the default."""
        what, order = values.get("what"), values.get("order")
        return cls(
            step=whole(values.get("step")),
            layer=whole(values.get("layer")),
            what=what if what in WHATS else "load",
            order=order if order in ORDERS else "number",
            ranks=whole(values.get("ranks")) or 0,
            expert=whole(values.get("expert")),
        )


def whole(value: Any) -> int | None:
    """A whole number of 0 or more, or None."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < _MOST_NUMBER else None


class Runs:
    """The runs a page may show, and nothing else.

    Args:
        paths: folders of runs, or of folders of runs; looked through again by `refresh`.

    Attributes:
        runs: all so far; one that is deleted stays, so that the others keep their numbers.
        labels: what each is called in the list: its name, with its place where two have one.
        gone: whether the folder of each was missing when it was looked for last.
        mark: another one whenever the list is.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = tuple(Path(one).absolute() for one in paths)
        self._lock = threading.RLock()
        self._data: OrderedDict[int, BalanceData] = OrderedDict()
        self.runs: list[RunView] = []
        self.labels: list[str] = []
        self.gone: list[bool] = []
        self.mark = ""
        self._over: dict[int, tuple[str, bool]] = {}  # by number: at which version of the run, and whether it was over
        self.refresh()

    def refresh(self) -> bool:
        """Add runs that appeared since; those that are known keep their numbers. Whether there are new ones."""
        with self._lock:
            known = {one.path for one in self.runs}
            try:
                fresh = [one for one in find_runs(self.paths) if one.path not in known]
            except OSError:  # a folder that went, or was shut, while it was looked through
                fresh = []
            # of a folder of runs that is gone there is nothing to add
            fresh = [one for one in fresh if not known or one.path.is_dir()]
            # a folder that had no run when it was looked at is one no longer
            if len(self.runs) == len(self.paths) and all(one.path in self.paths for one in self.runs):
                stale = [one for one in self.runs if one.problem()]
                if stale and fresh:
                    self.runs = [one for one in self.runs if one not in stale]
                    self._data.clear()
                    self._over.clear()
            self.runs += fresh
            names = Counter(one.name for one in self.runs)
            self.labels = [
                one.name if names[one.name] == 1 else f"{one.name} ({i + 1})" for i, one in enumerate(self.runs)
            ]
            self.gone = [not one.path.is_dir() for one in self.runs]
            said = json.dumps([self.labels, self.gone]).encode()
            self.mark = hashlib.blake2b(said, digest_size=9).hexdigest()
            return bool(fresh)

    def __len__(self) -> int:
        return len(self.runs)

    def opening(self) -> tuple[int, ...]:
        """The runs a page begins with: two that were named beside each other, else the first."""
        both = len(self.paths) > 1 and len(self) == 2
        return (0, 1) if both else (0,) if self.runs else ()

    def run(self, number: Any) -> RunView | None:
        """The run of a number; None when there is none."""
        at = whole(number)
        return self.runs[at] if at is not None and at < len(self.runs) else None

    def data(self, number: int) -> BalanceData:
        """Figures of a run; those not asked for in a while are forgotten."""
        with self._lock:
            if number not in self._data:
                self._data[number] = BalanceData(self.runs[number])
            self._data.move_to_end(number)
            while len(self._data) > _OPEN_RUNS:
                _, old = self._data.popitem(last=False)
                old.run.close()
            return self._data[number]

    def version(self, number: Any) -> str:
        """Changes whenever something of the run does."""
        run = self.run(number)
        return "" if run is None else repr((run.version(), run.problem()))

    # -- pages -------------------------------------------------------------------------------------------------------

    def span(self, number: int, page: str = "balance") -> tuple[int, int] | None:
        """First and last step of a run; None when there is none.

        On the Balance page those of the recorder, where it has some. Others show also what else the run has written,
        which may be further on.
        """
        run = self.run(number)
        if run is None:
            return None
        recorded = self.data(number).span()
        if recorded is not None and page == "balance":
            return recorded
        steps = [one["step"] for one in run.records() if whole(one["step"]) is not None]
        ends = [*(recorded or ()), *((min(steps), max(steps)) if steps else ())]
        return (min(ends), max(ends)) if ends else None

    def silence(self, number: int) -> float | None:
        """Seconds since a run wrote a step; None for one that is over, or says nothing of when it will be."""
        run = self.run(number)
        if run is None or run.problem():
            return None
        version = self.version(number)
        known, over = self._over.get(number, ("", False))
        if known != version:
            over = self._is_over(run, number)
            self._over[number] = (version, over)
        return None if over else max(0.0, time.time() - run.stepped() / 1e9)

    def _is_over(self, run: RunView, number: int) -> bool:
        last, planned = self.span(number, "training"), whole(run.meta().get("planned_steps"))
        kinds = [one.get("kind") for one in run.events()]
        newest = next((kind for kind in reversed(kinds) if kind in ("done", "interrupted", "resume", "stage")), "")
        return last is None or planned is None or last[1] >= planned or newest in ("done", "interrupted")

    def named(self, label: str | None) -> int | None:
        """The run that the list calls so; None when it has none of that name."""
        return self.labels.index(label) if label in self.labels else None

    def charts(self, page: str, number: int, view: View, only: Callable[[str], bool] | None = None) -> list[Chart]:
        """The figures of a page, in reading order.

        Args:
            page: one of `PAGES`.
            number: of the run.
            view: what of it.
            only: whether a kind, ``step`` or ``time``, is wanted; all are by default.
        """
        run = self.run(number)
        if run is None:
            return [nothing("none", "No run", "There is no such run.")]
        problem = run.problem()
        if problem:
            return [nothing("problem", run.name, problem, wide=True)]
        try:
            if page == "balance":
                return self._balance(number, view, only or (lambda _: True))
            module = importlib.import_module(f"trine.views.{_OTHERS[page]}")
            chosen = {"layer": view.layer} if page == "gates" else {}
            return list(module.charts(run, view.step, **chosen))
        except Exception as error:
            # Whatever a file holds must not take the page down; it is told, and logged with its trace.
            logger.warning("dashboard: %s of %s: %s: %s", page, run.name, type(error).__name__, error)
            logger.debug("dashboard", exc_info=True)
            why = f"This page cannot be drawn from what the run's folder holds ({type(error).__name__}: {error})."
            return [nothing("problem", PAGES.get(page, "Page"), plain(why), wide=True)]

    def _balance(self, number: int, view: View, only: Callable[[str], bool]) -> list[Chart]:
        data = self.data(number)
        step = balance_charts.step_charts(
            data, view.step, view.layer, view.what, view.order, view.ranks
        ) if only("step") else []  # fmt: skip
        time = balance_charts.time_charts(data, view.layer, view.expert) if only("time") else []
        by_key = {one.key: one for one in (*step, *time)}
        return [by_key[key] for key in BALANCE_ORDER if key in by_key]

    def layers(self, number: int, page: str) -> list[tuple[int, str]]:
        """Layers of a run that can be chosen on a page: numbers, and what they are called."""
        run = self.run(number)
        if run is None or run.problem():
            return []
        if page == "balance":
            sizes, names = self.data(number).sizes, self.data(number).layers
            return [(names.first + row, names.of(row)) for row in range(sizes[0] if sizes is not None else 0)]
        probes = run.probes() if page == "gates" else []
        last = probes[-1] if probes else None
        seen = {one.layer for one in last.gates} | {one.layer for one in last.openness} if last is not None else set()
        return [(layer, f"layer {layer}") for layer in sorted(seen)]

    def notes(self, number: int) -> list[str]:
        """Sentences about a run that stand above its figures."""
        run = self.run(number)
        if run is None:
            return []
        found = [run.problem()]
        problem = self.data(number).problem
        found += [problem] if problem and problem not in found else []
        found += [note for note in run.notes() if note not in " ".join(found)]
        if run.config("demo"):
            found.append("This run is synthesised to look at; nothing in it was measured.")
        return [one for one in dict.fromkeys(found) if one]

    def tiles(self, number: int, view: View) -> list[tuple[str, str, str, bool]]:
        """Key figures of a step: what, value, in comparison with, whether it is bad."""
        run = self.run(number)
        if run is None or run.problem():
            return []
        data = self.data(number)
        frame, sizes = data.frame(view.step), data.sizes
        if frame is None or sizes is None:
            return []
        layers, experts, top_k, _ = sizes
        row = data.row(view.layer)
        pick = slice(None) if row is None else slice(row, row + 1)
        tokens_L = frame.tokens_L / max(1, frame.steps)
        cv_L, floor_L = balance_charts.floors(tokens_L, min(max(1, top_k), experts), experts)

        def worst(name: str) -> float:
            found = [one for one in frame.summary(name, 2)[pick].tolist() if math.isfinite(one)]
            return max(found, default=math.nan)

        def text(value: float) -> str:
            return f"{value:.3g}" if math.isfinite(value) else "unknown"

        vio, floor = worst("max_vio"), float(floor_L[pick].max())
        p95, by_chance = worst("p95"), 1 + 1.645 * float(cv_L[pick].max())
        known = [one for one in frame.summary("dead", 2)[pick].tolist() if math.isfinite(one)]
        dead = sum(known) if known else math.nan  # of nothing known it is not 0
        reach = float((frame.bias_LE.max(-1) - frame.bias_LE.min(-1))[pick].max())
        saturated = worst("saturated")
        shown = layers if pick == slice(None) else 1
        return [
            ("Experts", f"{shown * experts:,}", f"{shown} layer{'s' if shown > 1 else ''}, {top_k} a token", False),
            ("MaxVio, worst layer", text(vio), f"by chance {text(floor)}", vio > 4 * max(floor, 0.05)),
            ("P95 load, worst layer", text(p95), f"by chance {text(by_chance)}", p95 - by_chance + 1 > 1.5),
            ("Dead experts", f"{dead:,.0f}" if known else "unknown", f"of {shown * experts:,}", dead > 0),
            ("Widest bias range", text(reach), "alert above 1", reach > 1),
            ("Saturated scores", f"{100 * saturated:.2f} %" if math.isfinite(saturated) else "unknown",
             "alert above 1 %", saturated > 0.01),
        ]  # fmt: skip

    def alerts(self, number: int) -> list[tuple[int, str, bool, str, bool]]:
        """Alerts of a run: step, rule, whether it begins, sentence, whether it is still on.

        Those that are on first, then the newest; of very many only the first ones.
        """
        run = self.run(number)
        if run is None:
            return []
        found: list[tuple[int, str, bool, str, bool]] = []
        on: dict[str, int] = {}
        events = [one for one in run.events() if one.get("kind") == "balance_alert"]
        names = self.data(number).layers if events else UNNUMBERED
        for event in events:
            step, rule = whole(event.get("step")), plain(event.get("rule", "?"), 40)
            if step is None:
                continue
            begins, count = event.get("begins") is True, whole(event.get("count")) or 1
            on[rule] = max(0, on.get(rule, 0) + (count if begins else -count))
            text = _by_number(plain(event.get("text", "")), event.get("layers"), names)
            found.append((step, rule, begins, text, False))
        newest = {rule: max(one[0] for one in found if one[1] == rule and one[2]) for rule, left in on.items() if left}
        marked = [(*one[:4], one[2] and newest.get(one[1]) == one[0]) for one in found]
        return sorted(marked, key=lambda one: (not one[4], -one[0]))[:_MOST_ALERTS]


BALANCE_ORDER = ("heat", "layer", "percentiles", "max-vio", "dead", "bias", "required", "ranks")


def _by_number(text: str, layers: Any, names: Layers) -> str:
    """The sentence of an alert, whose layers count those with experts, with the numbers that the page calls them by."""
    if not isinstance(layers, list) or not all(type(one) is int for one in layers) or not layers:
        return text
    word = "layers" if len(layers) > 1 else "layer"
    before, found, after = text.partition(f" in {word} {', '.join(map(str, layers))}")
    if not found or not after.startswith((",", " and ")) or names == UNNUMBERED:
        return text
    return f"{before} in {word} {', '.join(str(names.first + one) for one in layers)}{after}"


def kind_of(page: str, key: str) -> str:
    """``step`` for figures that change with the step looked at, ``time`` for others."""
    return "step" if page != "balance" or key in STEP_KEYS or key in ("problem", "none") else "time"
