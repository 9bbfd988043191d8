"""What is known of one step: its record, and the load figures of its experts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """One line of ``metrics.jsonl``. Values that are not finite are written as null."""

    step: int  # steps done, this one included
    stage: int
    tokens: int  # positions seen so far, this step included
    loss: float  # nats a supervised token, weighted
    bits_per_byte: float | None  # of the supervised text; None when the batch does not say how many bytes it stands for
    lr: float  # of the matrices
    grad_norm: float  # global, before clipping
    tokens_per_s: float
    max_vio: list[float]  # a MoE layer: largest load over the mean load, minus 1
    dead_experts: int  # experts without a token, all layers together
    seconds: float
    updated: bool = True  # False when the update was not applied

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {key: _finite(value) for key, value in asdict(self).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value


def max_violation(loads_LE: Tensor) -> list[float]:
    """MaxVio a layer: largest load / mean load - 1 (Loss-Free Balancing, arXiv 2408.15664); 0 without any load."""
    loads_LE = loads_LE.double()
    mean_L = loads_LE.mean(-1)
    worst_L = loads_LE.amax(-1) / mean_L.clamp(min=1e-300) - 1
    return [max(0.0, one) if mean else 0.0 for one, mean in zip(worst_L.tolist(), mean_L.tolist(), strict=True)]


def dead_experts(loads_LE: Tensor) -> int:
    """Experts that got no token, in layers that routed any."""
    routed_L1 = loads_LE.sum(-1, keepdim=True) > 0
    return int(((loads_LE == 0) & routed_L1).sum())


def bits_per_byte(loss_sum: float, supervised_bytes: int) -> float | None:
    """Nats of a text over its bytes, in bits; None without bytes."""
    return loss_sum / math.log(2) / supervised_bytes if supervised_bytes else None
