"""What is known of one step: its record, and the load figures of its experts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from trine.balance import dead_experts, load_percentiles, max_violation


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
    load_percentiles: dict[str, float] | None = None  # of load over mean load, averaged over layers: p1 to p99
    updated: bool = True  # False when the update was not applied
    mtp_loss: float | None = None  # nats a token of the layer that predicts the token after the next
    clipped_heads: int = 0  # attention heads that QK-clip scaled down

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {key: _finite(value) for key, value in asdict(self).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return value


def load_figures(loads_LE: Tensor) -> tuple[list[float], int, dict[str, float] | None]:
    """MaxVio of each layer, dead experts of all layers, and load percentiles (of the mean load, averaged over layers).

    Without MoE layers: no figures, 0, None.
    """
    if not loads_LE.numel():
        return [], 0, None
    percentiles = {key: float(value_L.mean()) for key, value_L in load_percentiles(loads_LE)._asdict().items()}
    return max_violation(loads_LE).tolist(), int(dead_experts(loads_LE).sum()), percentiles


def bits_per_byte(loss_sum: float, supervised_bytes: int) -> float | None:
    """Nats of a text over its bytes, in bits; None without bytes."""
    return loss_sum / math.log(2) / supervised_bytes if supervised_bytes else None
