"""What a migration changed, and whether that can be called safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trine.decay.calibrate_gates import Rows
from trine.model import Model

WHY_NOT_THE_SAME = (
    "A checkpoint keeps its layout, every tensor with its name, shape and dtype, but not its function: "
    "g_min sigmoid(e^A (x + b)) is another curve than -e^A softplus(x + b), bent where that is straight, and bounded "
    "where that is not. With the old numbers in it the new formula gives other decays, so A_log, dt_bias and the "
    "projection's rows are fitted anew, and what no fit can reach is learned or lost."
)


@dataclass(frozen=True)
class Limits:
    """Above any of these a migration is called not safe."""

    decay_p99: float = 0.05  # of |exp(g_new) - exp(g_old)|, in any layer
    # A memory 1.25 times as long leaves up to 8 % more of a state (the largest gap of exp(-t) and exp(-t / 1.25)).
    memory_factor: float = 1.25  # of how much longer or shorter 95 % of a layer's channels remember
    loss_change: float = 0.05  # nats a token on held-out text, before recovery


def decay_drift(layer: int, old_THK: Tensor, new_THK: Tensor, g_min: float) -> dict[str, Any]:
    """Differences of one layer's decays, JSON-ready.

    Returns:
        ``decay_error``: quantiles of |exp(g_new) - exp(g_old)| over tokens and channels; ``memory_factor``: quantiles
        over channels of how many times longer or shorter they remember (1: the same), a memory being 1 / mean |g|;
        ``beyond``: share of the old gates that are stronger than the new bound; ``fit``: share of the variance of
        exp(g_old) that the new decays explain.
    """
    old, new = old_THK.double(), new_THK.double()
    gap = (new.exp() - old.exp()).abs().flatten()
    ratio = (new.mean(0).clamp_max(-1e-12) / old.mean(0).clamp_max(-1e-12)).log().abs().exp().flatten()
    spread = (old.exp() - old.exp().mean(0)).square().sum()
    return {
        "layer": layer,
        "decay_error": {**_quantiles(gap, (0.5, 0.9, 0.99)), "max": float(gap.max())},
        "memory_factor": {**_quantiles(ratio, (0.5, 0.95)), "max": float(ratio.max())},
        "beyond": float((old < g_min).double().mean()),
        "fit": float(1 - gap.square().sum() / spread.clamp_min(1e-300)),
        "output_error": None,
    }


def _quantiles(x: Tensor, shares: Sequence[float]) -> dict[str, float]:
    ordered = x.sort().values
    return {f"p{100 * share:g}": float(ordered[round(share * (x.numel() - 1))]) for share in shares}


def output_errors(old: Model, new: Model, inputs: Mapping[int, Tensor], rows: Sequence[Rows]) -> dict[int, float]:
    """Relative RMS difference of each KDA layer's output, both given what the old model's layer was given."""
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), *(row.cu_seqlens_N1.diff().long() for row in rows)])
    cu_seqlens = bounds.cumsum(0).to(torch.int32)
    errors = {}
    with torch.no_grad():
        for layer, x_TD in inputs.items():
            before, after = (model.layers[layer].attention(x_TD, cu_seqlens)[0].double() for model in (old, new))
            errors[layer] = float((after - before).norm() / before.norm())
    return errors


def verdict(report: Mapping[str, Any], limits: Limits) -> tuple[str, list[str]]:
    """``"safe"``, ``"not safe"`` or ``"unproven"`` (nothing speaks against it, but no data went through the model), and
    the reasons."""
    reasons = []
    for layer in report["layers"]:
        found = layer["decay_error"]["p99"]
        if found > limits.decay_p99:
            reasons.append(
                f"layer {layer['layer']}: 1 % of the decays are off by {found:.3g} or more "
                f"(limit {limits.decay_p99:g}); {layer['beyond']:.1%} of its gates were beyond the new bound"
            )
        found = layer["memory_factor"]["p95"]
        if found > limits.memory_factor:
            reasons.append(
                f"layer {layer['layer']}: 5 % of its channels remember {found:.3g} times longer or shorter, or worse "
                f"(limit {limits.memory_factor:g})"
            )
    loss = report.get("loss")
    if loss is not None and loss["fitted"] - loss["before"] > limits.loss_change:
        rise = loss["fitted"] - loss["before"]
        reasons.append(f"the loss rose by {rise:.3g} nats a token (limit {limits.loss_change:g})")
    if reasons:
        return "not safe", reasons
    if report["inputs"] == "sampled":
        return "unproven", ["gate inputs were sampled: give --inputs, or migrate a run, whose data can be used"]
    return "safe", []
