"""Says when balance is lost, once, and when it is back, once: rules with hysteresis over the figures of each step.

A rule judges one figure of each MoE layer. It begins in a layer after ``patience`` steps in a row above ``above``, and
ends there after ``calm`` steps in a row at or below ``below``; between the two levels nothing changes. Figures that
chance alone raises are measured against their sampling floor, so a small batch raises no alarm of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trine.balance.record_format import Array, Frame
from trine.config import ScoreDomain

_MEMORY = 0.9  # share of the old value that the running mean of sign flips keeps
_NAMED = 8  # layers that an alert names


@dataclass(frozen=True)
class Rule:
    """One thing to watch.

    Raises:
        ValueError: levels that are not finite or cross, or numbers of steps below 1.
    """

    name: str
    what: str  # the figure, in words
    above: float  # level above which a layer is bad
    below: float  # level at or below which it is good
    patience: int = 1  # bad steps in a row after which the alert begins
    calm: int = 10  # good steps in a row after which it ends

    def __post_init__(self) -> None:
        good = math.isfinite(self.above) and math.isfinite(self.below) and self.below <= self.above
        if not good or self.patience < 1 or self.calm < 1:
            raise ValueError(
                f"rule {self.name}: found above {self.above}, below {self.below}, patience {self.patience}, "
                f"calm {self.calm}, need finite below <= above, at least 1 step each"
            )


DEFAULT_RULES = (
    Rule("p95", "P95 of load over mean load, less what sampling adds", 1.5, 1.4, patience=20),
    Rule("dead", "experts that should have got more than 10 tokens since their last", 0, 0, patience=3),
    Rule("max_vio", "MaxVio over its floor (floors below 0.05 count as 0.05)", 4, 3, patience=20),
    Rule("oscillation", "share of experts whose bias turns back at every step, running mean", 0.85, 0.75, patience=20),
    Rule("bias_range", "largest minus smallest bias", 1.0, 0.9, patience=5),
    Rule("saturation", "share of scores that fp32 cannot tell from 0 or 1", 0.01, 0.005, patience=3),
    Rule("overflow", "share of required biases outside the histogram", 0.01, 0.005, patience=3),
    Rule("non_finite", "tokens left out because a score was not finite", 0, 0),
    Rule(
        "rank_overload", "largest load of an expert-parallel rank over the mean, less sampling", 1.2, 1.15, patience=20
    ),
    Rule("stale", "steps since the bias last came from its controller", 4, 1),
)
"""What a run watches. Reasons for the levels: a bias that follows the noise of each batch turns back two
times out of three, an overshooting one always (`sign_flip_rate`); absolute biases are stable up to a lag of 4 steps; a
range of the bias above 1 means that sigmoid scores alone can no longer win against it (see `rules_for`); MaxVio
below 0.2 costs nothing worth a word, however low the floor of a large batch is. The patience of 20 steps lets a fresh
run find its balance."""


LOGIT_RANGE = 17.0
"""Range of a bias on logits above which fp32 cannot tell a score from 0 or 1 at one end of it: e^-17 is 2^-24.5."""


def rules_for(score_domain: ScoreDomain) -> tuple[Rule, ...]:
    """`DEFAULT_RULES`, with a range of the bias that fits what it is added to: "sigmoid" scores or "logit"."""
    if score_domain == "sigmoid":
        return DEFAULT_RULES
    return tuple(
        replace(rule, above=LOGIT_RANGE, below=0.9 * LOGIT_RANGE) if rule.name == "bias_range" else rule
        for rule in DEFAULT_RULES
    )


@dataclass(frozen=True)
class Signals:
    """What alerts know of a step beside its figures: of the controller."""

    stale_steps: int = 0  # since the bias last came from its controller


@dataclass(frozen=True)
class Alert:
    """A rule began or ended at a step.

    Attributes:
        step: when.
        rule: its name.
        begins: or ends.
        layers: MoE layers it began or ended in, the first eight.
        count: how many they are.
        value: the worst figure of them; NaN when there is none.
        level: what it is judged against.
        text: a sentence.
    """

    step: int
    rule: str
    begins: bool
    layers: tuple[int, ...]
    count: int
    value: float
    level: float
    text: str

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values; a figure that does not exist is null."""
        return {
            "step": self.step,
            "rule": self.rule,
            "begins": self.begins,
            "layers": list(self.layers),
            "count": self.count,
            "value": self.value if math.isfinite(self.value) else None,
            "level": self.level,
            "text": self.text,
        }


@dataclass
class _State:
    bad_L: Array
    good_L: Array
    active_L: Array


@dataclass
class Alerts:
    """The rules over a sequence of steps: a pure state machine, whose state is JSON-ready.

    Args:
        layers, experts, top_k, ranks: of the model.
        rules: what to watch; names must differ. With one rank the rule ``rank_overload`` is left out: there is nothing
            to compare.

    Raises:
        ValueError: two rules of one name, or one whose figure is not known.
    """

    layers: int
    experts: int
    top_k: int
    ranks: int = 1
    rules: Sequence[Rule] = DEFAULT_RULES
    _states: dict[str, _State] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.rules]
        unknown = set(names) - {rule.name for rule in DEFAULT_RULES}
        if len(set(names)) != len(names) or unknown:
            known = ", ".join(rule.name for rule in DEFAULT_RULES)
            raise ValueError(f"rules: found {names}, need each once, of {known}")
        self.rules = tuple(rule for rule in self.rules if self.ranks > 1 or rule.name != "rank_overload")
        self._flips_L = np.full(self.layers, np.nan)
        self._states = {rule.name: self._fresh() for rule in self.rules}

    def _fresh(self) -> _State:
        return _State(*(np.zeros(self.layers, dtype=kind) for kind in (np.int64, np.int64, np.bool_)))

    def step(self, frame: Frame, signals: Signals | None = None) -> list[Alert]:
        """Judge one step; returns what begins or ends with it.

        Raises:
            ValueError: the frame is of another number of layers, or of more than one step.
        """
        if frame.summary_KLM.shape[:2] != (1, self.layers):
            raise ValueError(f"frame: found {frame.summary_KLM.shape[:2]}, need one step of {self.layers} layers")
        figures = self.figures(frame, signals or Signals())
        alerts = []
        for rule in self.rules:
            value_L, state = figures[rule.name], self._states[rule.name]
            bad_L, good_L = value_L > rule.above, value_L <= rule.below  # both false where there is no figure
            state.bad_L = np.where(bad_L, state.bad_L + 1, np.where(np.isnan(value_L), state.bad_L, 0))
            state.good_L = np.where(good_L, state.good_L + 1, np.where(np.isnan(value_L), state.good_L, 0))
            begin_L = ~state.active_L & (state.bad_L >= rule.patience)
            end_L = state.active_L & (state.good_L >= rule.calm)
            state.active_L = (state.active_L | begin_L) & ~end_L
            for changed_L, begins in ((begin_L, True), (end_L, False)):
                if changed_L.any():
                    alerts.append(_alert(rule, frame.last, value_L, changed_L, begins))
        return alerts

    def figures(self, frame: Frame, signals: Signals) -> dict[str, Array]:
        """What each rule judges, ``[L]`` fp64; NaN where a step says nothing. Moves the mean of the sign flips on."""
        # Not above: whoever only wants to know the rules (the dashboard) does without torch.
        import torch

        from trine.balance.metrics import sampling_floors

        figure = {name: frame.summary(name).astype(np.float64) for name in _READ}
        floor_cv_L, floor_L, percentiles = sampling_floors(torch.from_numpy(frame.tokens_L), self.top_k, self.experts)
        spread_L = percentiles.p95.numpy() - 1.0
        # a rank sums E / ranks experts, and the largest of the ranks' deviations counts
        rank_L = floor_cv_L.numpy() * math.sqrt(self.ranks / self.experts * 2.0 * math.log(max(self.ranks, 1)))
        flips_L = figure["flips"]
        mean_L = np.where(np.isnan(self._flips_L), flips_L, _MEMORY * self._flips_L + (1 - _MEMORY) * flips_L)
        self._flips_L = np.where(np.isnan(flips_L), self._flips_L, mean_L)
        return {
            "p95": figure["p95"] - spread_L,
            "dead": figure["dead"],
            "max_vio": figure["max_vio"] / np.maximum(floor_L.numpy(), 0.05),
            "oscillation": np.where(np.isnan(flips_L), np.nan, self._flips_L),
            "bias_range": figure["bias_max"] - figure["bias_min"],
            "saturation": figure["saturated"],
            "overflow": figure["overflow"],
            "non_finite": figure["dropped"],
            "rank_overload": figure["rank_overload"] - rank_L,
            "stale": np.full(self.layers, float(signals.stale_steps)),
        }

    @property
    def active(self) -> dict[str, list[int]]:
        """Layers in which each rule has begun and not ended; rules without one are left out."""
        found = {name: np.flatnonzero(state.active_L).tolist() for name, state in self._states.items()}
        return {name: layers for name, layers in found.items() if layers}

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        states = {
            name: [state.bad_L.tolist(), state.good_L.tolist(), state.active_L.astype(int).tolist()]
            for name, state in self._states.items()
        }
        flips = [None if math.isnan(one) else one for one in self._flips_L.tolist()]
        return {"flips": flips, "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave. Rules that the state does not know start fresh.

        Raises:
            ValueError: it is of another number of layers, or no such state; nothing is changed.
        """
        try:
            flips_L = np.array([math.nan if one is None else float(one) for one in state["flips"]], dtype=np.float64)
            found = {
                name: _State(*(np.array(row, dtype=kind) for row, kind in zip(rows, kinds, strict=True)))
                for kinds in ((np.int64, np.int64, np.bool_),)
                for name, rows in dict(state["states"]).items()
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state: found no state of alerts ({error})") from error
        arrays = [array for one in found.values() for array in (one.bad_L, one.good_L, one.active_L)]
        if any(array.shape != (self.layers,) for array in (flips_L, *arrays)):
            raise ValueError(f"state: found one of {len(flips_L)} layers, need {self.layers}")
        self._flips_L = flips_L
        self._states = {rule.name: found.get(rule.name, self._fresh()) for rule in self.rules}


_READ = ("p95", "dead", "max_vio", "flips", "bias_min", "bias_max", "saturated", "overflow", "dropped", "rank_overload")


def _alert(rule: Rule, step: int, value_L: Array, changed_L: Array, begins: bool) -> Alert:
    layers = np.flatnonzero(changed_L)
    found = value_L[layers]
    value = float(np.nanmax(found)) if np.isfinite(found).any() else math.nan
    named = tuple(layers[:_NAMED].tolist())
    where = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, named))}"
    if len(layers) > len(named):
        where += f" and {len(layers) - len(named)} more"
    level = rule.above if begins else rule.below
    how = f"above {level:g}" if begins else f"at or below {level:g} again"
    if (rule.patience if begins else rule.calm) > 1:
        how += f" for {rule.patience if begins else rule.calm} steps"
    text = f"{rule.what}: {value:.4g} in {where}, {how}"
    return Alert(step, rule.name, begins, named, len(layers), value, level, text)
