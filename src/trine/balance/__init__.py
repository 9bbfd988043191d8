"""Expert load outside the forward pass: a step's router statistics become the next step's bias; measures."""

from __future__ import annotations

from trine.balance.metrics import (
    LoadPercentiles,
    SamplingFloor,
    average_violation,
    coefficient_of_variation,
    dead_experts,
    entropy,
    gini,
    load_percentiles,
    max_violation,
    min_violation,
    sampling_floor,
)
from trine.balance.policies import BalancePolicy
from trine.balance.quantile_balancing import QuantileBalancing
from trine.balance.window import MARGIN_LEVELS, Window

__all__ = [
    "MARGIN_LEVELS",
    "BalancePolicy",
    "LoadPercentiles",
    "QuantileBalancing",
    "SamplingFloor",
    "Window",
    "average_violation",
    "coefficient_of_variation",
    "dead_experts",
    "entropy",
    "gini",
    "load_percentiles",
    "max_violation",
    "min_violation",
    "sampling_floor",
]
