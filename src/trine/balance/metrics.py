"""How even a load is. Every function takes loads of all experts, ``[..., E]``, on any device, and never waits for it.

A load without any token counts as even, so that an idle layer raises no alarm. An expert without a token counts like
any other: leaving zeros out would hide exactly the dead ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def _relative(loads: Tensor) -> Tensor:
    """Load over mean load, fp64; all 1 without any token."""
    loads = loads.double()
    mean = loads.mean(-1, keepdim=True)
    return torch.where(mean > 0, loads / mean.clamp(min=1e-300), 1.0)


def max_violation(loads: Tensor) -> Tensor:
    """MaxVio = max load / mean load - 1 (Loss-Free Balancing, arXiv 2408.15664), ``[...]`` fp64, 0 to E - 1."""
    return _relative(loads).amax(-1) - 1.0


def min_violation(loads: Tensor) -> Tensor:
    """1 - min load / mean load, ``[...]`` fp64, 0 to 1 (1: some expert got nothing)."""
    return 1.0 - _relative(loads).amin(-1)


def average_violation(loads: Tensor) -> Tensor:
    """Mean of abs(load - mean) / mean, ``[...]`` fp64."""
    return (_relative(loads) - 1.0).abs().mean(-1)


def coefficient_of_variation(loads: Tensor) -> Tensor:
    """Standard deviation of the loads (over all E, not E - 1) / mean, ``[...]`` fp64."""
    return _relative(loads).std(-1, correction=0)


def gini(loads: Tensor) -> Tensor:
    """Gini coefficient, ``[...]`` fp64: 0 even, (E - 1) / E when one expert gets everything."""
    ordered = _relative(loads).sort(-1).values
    experts = ordered.shape[-1]
    rank = torch.arange(1, experts + 1, dtype=ordered.dtype, device=ordered.device)
    return ((2 * rank - experts - 1) * ordered).sum(-1) / experts**2


def entropy(loads: Tensor) -> Tensor:
    """Entropy of the load shares over ln E, ``[...]`` fp64: 1 even, 0 when one expert gets everything."""
    experts = loads.shape[-1]
    share = _relative(loads) / experts
    return torch.special.entr(share).sum(-1) / math.log(experts) if experts > 1 else torch.ones_like(share[..., 0])


def dead_experts(loads: Tensor, least_expected: float = 10.0) -> Tensor:
    """Experts without a token where the mean load is above ``least_expected``, ``[...]`` int64.

    With few tokens an expert (one decoding step, say) zeros are chance: at a mean of 10 a zero has odds of e^-10.
    """
    return ((loads == 0) & (loads.double().mean(-1, keepdim=True) > least_expected)).sum(-1)


class LoadPercentiles(NamedTuple):
    """Percentiles over experts of load / mean load, each ``[...]`` fp64."""

    p1: Tensor
    p5: Tensor
    p50: Tensor
    p95: Tensor
    p99: Tensor


_PERCENTS: Sequence[float] = (0.01, 0.05, 0.50, 0.95, 0.99)


def load_percentiles(loads: Tensor) -> LoadPercentiles:
    """Percentiles over all experts of load / mean load, interpolated between order statistics."""
    relative = _relative(loads)
    levels = torch.tensor(_PERCENTS, dtype=relative.dtype, device=relative.device)
    return LoadPercentiles(*torch.quantile(relative, levels, dim=-1).unbind(0))


class SamplingFloor(NamedTuple):
    """What a perfectly balanced router would show by chance; nothing below it is a merit."""

    cv: float
    max_violation: float


def sampling_floor(tokens: int, k: int, experts: int) -> SamplingFloor:
    """Coefficient of variation 1/sqrt(L) and MaxVio sqrt(2 ln E / L) of independent tokens, L = tokens k / experts.

    The first is the Poisson spread of a load with mean L, the second the expected largest of E normal deviations of
    that spread. Tokens of one text are not independent, so a router is not at fault for being somewhat above.

    Raises:
        ValueError: a number below 1, or k above the number of experts.
    """
    if tokens < 1 or not 1 <= k <= experts:
        raise ValueError(f"tokens, k, experts: found {tokens}, {k}, {experts}, need tokens >= 1 and 1 <= k <= experts")
    if k == experts:
        return SamplingFloor(0.0, 0.0)
    mean = tokens * k / experts
    return SamplingFloor(mean**-0.5, math.sqrt(2.0 * math.log(experts) / mean))
