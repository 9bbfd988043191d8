"""From saved loads: is there imbalance, does it last, is it one of experts or of ranks, and what would have alarmed.

Everything is judged against what chance alone does to loads of that size (`trine.balance.sampling_floor`), so that few
tokens are not taken for a bad router.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from trine.balance.advice import FEWEST, advise
from trine.balance.alerts import Alert, Alerts, rules_for
from trine.balance.metrics import (
    coefficient_of_variation,
    dead_over_steps,
    load_percentiles,
    max_violation,
    rank_overload,
    sampling_floors,
)
from trine.balance.record_format import Array
from trine.balance.saved_loads import TOLD_RULES, Loads
from trine.balance.summary import Summaries

_FLOORS = 2.0  # a CV of more than so many floors is no chance
_WORTH = 0.2  # MaxVio below this costs nothing worth a word
_RANK_WORTH = 0.1  # overload of the fullest rank that is worth a word
_LASTS = 0.5  # correlation from which on loads count as the same
_FALLS = 0.5  # CV of the last quarter of the steps over that of the first, below which it is going away
_ROUNDING = 0.002  # share of slots that may look empty because large loads are kept to 11 bits
_KINDS = ("lasting", "drifting", "changing", "falling", "unknown")
_LOAD_RULES = ("p95", "dead", "max_vio", "rank_overload")  # rules that loads alone can answer


@dataclass(frozen=True)
class LayerAnalysis:
    """What the loads of one MoE layer say. Means are over the steps that had tokens.

    Attributes:
        layer: number, from 0.
        cv, cv_floor: coefficient of variation, and what chance gives.
        max_vio, max_vio_floor: MaxVio, and what chance gives.
        p5, p95: percentiles of load over mean load.
        dead: experts without a token in all steps together, where more than 10 were due.
        uneven: CV above twice its floor, and MaxVio above 0.2.
        correlation: of the loads of two steps, by the distance of the steps; chance taken out; 1 is the same loads.
        lasts: ``"lasting"`` (the same experts a quarter of the steps later), ``"drifting"`` (at the next step only),
            ``"changing"`` (not even then), ``"falling"`` (it is going away: the CV of the last quarter of the steps is
            less than half of the first quarter's), ``"unknown"`` (fewer than 20 steps) or ``""`` (even).
        hottest: up to three experts of the highest mean load, with load over mean load.
        rank_overload, rank_floor: mean of the fullest rank's load over the ranks' mean, and what chance gives.
        uneven_ranks: its excess over 1 above twice the floor, and above 0.1.
        empty: share of tokens x k that no expert got, where a run's recorder counted its tokens; else 0. All figures
            are of the slots that were filled.
    """

    layer: int
    cv: float
    cv_floor: float
    max_vio: float
    max_vio_floor: float
    p5: float
    p95: float
    dead: int
    uneven: bool
    correlation: Mapping[int, float]
    lasts: str
    hottest: tuple[tuple[int, float], ...]
    rank_overload: float
    rank_floor: float
    uneven_ranks: bool
    empty: float = 0.0


@dataclass(frozen=True)
class Analysis:
    """The verdict on saved loads; `verdict` says it in sentences.

    Attributes:
        source: file or folder they came from.
        steps, first, last: how many steps, and their first and last number.
        experts, ranks: of a layer.
        policy: what the run balances with; ``""`` where that is not known.
        layers: MoE layers, one by one.
        alerts: what the default rules make of the loads, and what the run told of its controller.
        rules: rules that could be asked.
        advice: for each kind of imbalance that was found (`LayerAnalysis.lasts`), what it means and what may help.
        notes: what could not be read.
    """

    source: str
    steps: int
    first: int
    last: int
    experts: int
    ranks: int
    policy: str
    layers: tuple[LayerAnalysis, ...]
    alerts: tuple[Alert, ...]
    rules: tuple[str, ...]
    advice: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> list[str]:
        """Plain sentences: imbalance, how long it lasts, where it is, what would have alarmed, what may help."""
        return [*_on_experts(self), *_on_ranks(self), *_on_alerts(self), *self.notes]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        values = asdict(self) | {"alerts": [alert.to_json() for alert in self.alerts], "verdict": self.verdict}
        for layer in values["layers"]:
            layer["correlation"] = {str(lag): value for lag, value in layer["correlation"].items()}
        return values


def analyze(loads: Loads, ranks: int = 1) -> Analysis:
    """Judge saved loads.

    Args:
        loads: of at least one step.
        ranks: expert-parallel ranks, each with a row of neighbouring experts.

    Raises:
        ValueError: ``ranks`` does not divide the number of experts, or no step has a token.
    """
    _, layers, experts = loads.loads_SLE.shape
    if ranks < 1 or experts % ranks:
        raise ValueError(f"ranks: found {ranks}, need a divisor of the {experts} experts")
    if not loads.loads_SLE.any():
        raise ValueError(f"{loads.source}: found no token in any step, need at least one")
    alerts, rules = _replay(loads, ranks)
    judged = (_layer(layer, loads.loads_SLE[:, layer], loads.top_k, ranks) for layer in range(layers))
    found = tuple(replace(one, empty=empty) for one, empty in zip(judged, _empty(loads), strict=True))
    kinds = {kind: [one.layer for one in found if one.lasts == kind] for kind in _KINDS}
    return Analysis(
        source=loads.source,
        steps=len(loads.steps_S),
        first=int(loads.steps_S[0]),
        last=int(loads.steps_S[-1]),
        experts=experts,
        ranks=ranks,
        policy=loads.balance.policy if loads.balance is not None else "",
        layers=found,
        alerts=tuple(alerts),
        rules=rules,
        advice={kind: advise(kind, loads, those) for kind, those in kinds.items() if those},
        notes=loads.notes,
    )


def _layer(layer: int, loads_SE: Array, top_k: int, ranks: int) -> LayerAnalysis:
    counted_SE = torch.from_numpy(loads_SE[loads_SE.sum(-1) > 0])
    experts = counted_SE.shape[1]
    if not len(counted_SE):  # an idle layer: even, as `trine.balance.metrics` has it
        return LayerAnalysis(layer, 0, 0, 0, 0, 1, 1, 0, False, {}, "", (), 1, 0, False)
    tokens_S = counted_SE.sum(-1) // top_k
    cv_floor_S, vio_floor_S, _ = sampling_floors(tokens_S, top_k, experts)
    percentiles = load_percentiles(counted_SE)
    cv_S = coefficient_of_variation(counted_SE)
    cv, max_vio = float(cv_S.mean()), float(max_violation(counted_SE).mean())
    cv_floor, vio_floor = float(cv_floor_S.mean()), float(vio_floor_S.mean())
    uneven = cv > _FLOORS * cv_floor and max_vio > _WORTH
    relative_SE = (counted_SE.double() / counted_SE.double().mean(-1, keepdim=True)).numpy()
    correlation = _correlation(relative_SE - 1.0, float(cv_floor_S.square().mean()))
    mean_E = relative_SE.mean(0)
    hottest = tuple((int(expert), float(mean_E[expert])) for expert in np.argsort(-mean_E, kind="stable")[:3])
    # a rank's load is the sum of E / ranks experts'; the largest of the ranks' deviations counts
    rank_floor = cv_floor * math.sqrt(ranks / experts * 2.0 * math.log(ranks))
    overload = float(rank_overload(counted_SE, ranks).mean())
    return LayerAnalysis(
        layer=layer,
        cv=cv,
        cv_floor=cv_floor,
        max_vio=max_vio,
        max_vio_floor=vio_floor,
        p5=float(percentiles.p5.mean()),
        p95=float(percentiles.p95.mean()),
        dead=int(dead_over_steps(counted_SE)),
        uneven=uneven,
        correlation=correlation,
        lasts=_lasts(correlation, cv_S.numpy()) if uneven else "",
        hottest=hottest,
        rank_overload=overload,
        rank_floor=rank_floor,
        uneven_ranks=overload - 1.0 > max(_FLOORS * rank_floor, _RANK_WORTH),
    )


def _empty(loads: Loads) -> list[float]:
    """Share of slots of each layer that found no expert; 0 where tokens were not counted, and below what rounding of
    recorded loads can make (they keep 11 bits)."""
    slots_L = loads.top_k * sum((one.tokens_L for one in loads.windows_S), np.zeros(loads.loads_SLE.shape[1]))
    share_L = 1.0 - loads.loads_SLE.sum((0, 2)) / np.maximum(slots_L, 1)
    return np.where((slots_L > 0) & (share_L > _ROUNDING), share_L, 0.0).tolist()


def _correlation(deviation_SE: Array, noise: float) -> dict[int, float]:
    """Correlation of deviations from the even load, some steps apart, by the distance.

    Chance adds ``noise`` to the variance of each step and nothing to the product of two steps, so it is taken out of
    the denominator. Empty where there is no more than chance.
    """
    steps = len(deviation_SE)
    signal = float((deviation_SE**2).mean()) - noise
    if signal <= noise:
        return {}
    lags = sorted({2**power for power in range(20) if 2**power < steps} | {steps // 4 or 1} & set(range(1, steps)))
    products = {lag: float((deviation_SE[lag:] * deviation_SE[:-lag]).mean()) for lag in lags}
    return {lag: max(-1.0, min(1.0, product / signal)) for lag, product in products.items()}


def _lasts(correlation: Mapping[int, float], cv_S: Array) -> str:
    steps = len(cv_S)
    if steps < FEWEST or not correlation:
        return "unknown"
    if cv_S[-(steps // 4) :].mean() < _FALLS * cv_S[: steps // 4].mean():
        return "falling"
    if correlation[steps // 4] >= _LASTS:
        return "lasting"
    return "drifting" if correlation[1] >= _LASTS else "changing"


def _replay(loads: Loads, ranks: int) -> tuple[list[Alert], tuple[str, ...]]:
    """What the default rules would have said, and which of them could be asked; what the run itself said in between."""
    _, layers, experts = loads.loads_SLE.shape
    rules = rules_for(loads.balance.score_domain if loads.balance is not None else "sigmoid")
    recorded = tuple(rule for rule in rules if rule.name not in TOLD_RULES)
    asked = recorded if loads.windows_S else tuple(rule for rule in rules if rule.name in _LOAD_RULES)
    summaries = Summaries(layers, experts, loads.top_k, ranks)
    alerts = Alerts(layers, experts, loads.top_k, ranks, asked)
    found: list[Alert] = list(loads.told or ())
    for step, window in zip(loads.steps_S, loads.windows(), strict=True):
        found += alerts.step(summaries.step(int(step), window))
    names = (*(rule.name for rule in alerts.rules), *(TOLD_RULES if loads.told is not None else ()))
    return sorted(found, key=lambda alert: alert.step), names


def _named(layers: list[LayerAnalysis]) -> str:
    numbers = [str(one.layer) for one in layers]
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:8])}{more}"


def _on_experts(analysis: Analysis) -> list[str]:
    layers = analysis.layers
    under = f" (balance.policy {analysis.policy})" if analysis.policy else ""
    lines = []
    if not any(one.uneven for one in layers):
        worst = max(layers, key=lambda one: one.max_vio)
        lines.append(
            f"Experts are even{under}: MaxVio is at most {worst.max_vio:.2f} on average (layer {worst.layer}), where "
            f"chance gives {worst.max_vio_floor:.2f}."
        )
    for kind, meaning in analysis.advice.items():
        those = [one for one in layers if one.lasts == kind]
        worst = max(those, key=lambda one: one.max_vio)
        lines.append(
            f"Experts are uneven in {_named(those)}{under}: MaxVio {worst.max_vio:.2f} against "
            f"{worst.max_vio_floor:.2f} by chance, P95 of load over mean {worst.p95:.2f} (layer {worst.layer}); "
            f"{meaning}."
        )
    if any(one.empty for one in layers):
        worst = max(layers, key=lambda one: one.empty)
        lines.append(
            f"Up to {worst.empty:.1%} of the slots stayed empty (layer {worst.layer}); loads and MaxVio are over the "
            "mean of those that were filled."
        )
    dead = [one for one in layers if one.dead]
    if dead:
        lines.append(f"{sum(one.dead for one in dead)} experts got no token in any step, in {_named(dead)}.")
    return lines


def _on_ranks(analysis: Analysis) -> list[str]:
    if analysis.ranks == 1:
        return []
    uneven = [one for one in analysis.layers if one.uneven_ranks]
    worst = max(analysis.layers, key=lambda one: one.rank_overload)
    found = f"the fullest of {analysis.ranks} ranks has {worst.rank_overload:.2f} times the mean (layer {worst.layer})"
    if not uneven:
        return [f"Ranks are even: {found}, where chance gives {1 + worst.rank_floor:.2f}."]
    only = " Experts are even there, so another placement of experts on ranks may be enough."
    return [f"Ranks are uneven in {_named(uneven)}: {found}." + only * (not any(one.uneven for one in uneven))]


def _on_alerts(analysis: Analysis) -> list[str]:
    begun: dict[str, list[Alert]] = {}
    for alert in analysis.alerts:
        if alert.begins:
            begun.setdefault(alert.rule, []).append(alert)
    if not begun:
        return [f"No alert would have begun ({', '.join(analysis.rules)})."]
    return [
        f"Alert {rule} {'began' if rule in TOLD_RULES else 'would have begun'} at step "
        f"{', '.join(str(alert.step) for alert in those[:5])}"
        f"{' and later' if len(those) > 5 else ''}: {those[0].text}."
        for rule, those in begun.items()
    ]
