"""How even a load is. Every function takes loads of all experts, ``[..., E]``, on any device, and never waits for it.

A load without any token counts as even, so that an idle layer raises no alarm. An expert without a token counts like
any other: leaving zeros out would hide exactly the dead ones. Loads that are none, negative or not finite, are a
ValueError on the CPU; on a card, whose values are not read back, they make the figure NaN (no count of experts, which
has no NaN).

The leading dimensions are the scope: ``[L, E]`` of a global batch, ``[M, L, E]`` of its micro-batches, ``[L, N, E]``
of the sequences of a row (`sequence_loads`). A figure says little beside another scope's: the fewer tokens, the higher
its floor (`sampling_floors`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trine.ops.router.quantile import may_read


def _counted(loads: Tensor) -> Tensor:
    """Loads in fp64, checked: NaN where they cannot be loads and values are not read back.

    Raises:
        ValueError: on the CPU, a load that is negative or not finite.
    """
    values = loads.double()
    if may_read(values) and values.numel():
        low, high = (float(one) for one in values.aminmax())
        if not 0 <= low <= high < math.inf:  # also where one is NaN, which makes both so
            first = (~(values.isfinite() & (values >= 0))).nonzero()[0].tolist()
            found = float(values[tuple(first)])
            raise ValueError(f"loads: found {found:g} at {first}, need finite numbers of at least 0")
        return values
    return torch.where(values.isfinite() & (values >= 0), values, torch.nan)


def _relative(loads: Tensor) -> Tensor:
    """Load over mean load, fp64; all 1 without any token."""
    loads = _counted(loads)
    mean = loads.mean(-1, keepdim=True)
    return torch.where(mean == 0, 1.0, loads / mean.clamp(min=1e-300))


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


def effective_experts(loads: Tensor) -> Tensor:
    """Effective number of experts, exp of the entropy of the load shares, ``[...]`` fp64: E even, 1 when one expert
    gets everything, n when n share it evenly (Hill number of order 1)."""
    experts = loads.shape[-1]
    return torch.special.entr(_relative(loads) / experts).sum(-1).exp()


def quantile_error(loads: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Largest abs(F / m - k / E) of a layer's experts, ``[...]`` fp64: how far the share of tokens an expert got is
    from the quantile its bias was solved for. 0 without tokens.

    Args:
        loads: ``[..., E]``, F.
        tokens: ``[...]``, m.
        k: experts a token.
    """
    tokens = tokens.double()
    share = _counted(loads) / tokens.clamp(min=1.0).unsqueeze(-1)
    return torch.where(tokens > 0, (share - k / loads.shape[-1]).abs().amax(-1), 0.0)


def rank_overload(loads: Tensor, ranks: int) -> Tensor:
    """Largest load of an expert-parallel rank over the mean of the ranks, ``[...]`` fp64, 1 to ``ranks``.

    Rank r holds experts r E / ranks to (r + 1) E / ranks, as expert parallelism lays them out. With one rank it is 1.

    Raises:
        ValueError: the experts cannot be dealt out evenly.
    """
    experts = loads.shape[-1]
    if ranks < 1 or experts % ranks:
        raise ValueError(f"ranks: found {ranks}, need a divisor of the {experts} experts")
    return _relative(_counted(loads).unflatten(-1, (ranks, experts // ranks)).sum(-1)).amax(-1)


def sign_flip_rate(step: Tensor, step_before: Tensor) -> Tensor:
    """Share of experts whose bias step went the other way than the step before it, ``[...]`` fp64.

    Of the experts that moved both times; NaN where none did. A bias that only follows the noise of each batch around
    a fixed point flips with probability 2/3 (differences of independent draws), a random walk with 1/2, steady drift
    never, and one that overshoots every time always: a gain that is too high.

    Args:
        step: ``[..., E]`` bias now minus bias before.
        step_before: ``[..., E]`` that of the step before.
    """
    product = step.double() * step_before.double()
    return (product < 0).sum(-1).double() / (product != 0).sum(-1)


def sequence_loads(ids_TK: Tensor, cu_seqlens_N1: Tensor, experts: int) -> Tensor:
    """Loads of each sequence of a packed row, ``[N, E]`` int64; of a whole micro-batch with bounds 0 and T.

    Args:
        ids_TK: ``[T, K]`` chosen experts, -1 where none; or ``[..., T, K]``, of several layers, for ``[..., N, E]``.
        cu_seqlens_N1: ``[N + 1]`` bounds of the sequences, from 0 to T.
        experts: E.

    Raises:
        ValueError: bad shapes or a number of experts below 1; on the CPU also an expert that does not exist, or
            bounds that do not go from 0 to T.
    """
    if ids_TK.dim() < 2 or cu_seqlens_N1.dim() != 1 or len(cu_seqlens_N1) < 1 or experts < 1:
        raise ValueError(
            f"ids_TK, cu_seqlens_N1, experts: found {tuple(ids_TK.shape)}, {tuple(cu_seqlens_N1.shape)}, {experts}, "
            "need [..., T, K], [N + 1], at least 1"
        )
    *lead, tokens, k = ids_TK.shape
    if may_read(ids_TK):
        if ids_TK.numel() and not -1 <= int(ids_TK.min()) <= int(ids_TK.max()) < experts:
            raise ValueError(f"ids_TK: found {int(ids_TK.min())} to {int(ids_TK.max())}, need -1 to {experts - 1}")
        bounds = cu_seqlens_N1.tolist()
        if bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
            raise ValueError(f"cu_seqlens_N1: found {bounds[:4]} … {bounds[-1]}, need 0 up to T = {tokens}")
    device, sequences, layers = ids_TK.device, len(cu_seqlens_N1) - 1, math.prod(lead)
    ends_N = cu_seqlens_N1[1:].to(device).long()
    sequence_T = torch.searchsorted(ends_N, torch.arange(tokens, device=device), right=True)
    row_LT = torch.arange(layers, device=device)[:, None] * sequences + sequence_T
    # one cell a sequence more takes the -1 of padding
    cells_LTK = row_LT[..., None] * (experts + 1) + ids_TK.reshape(layers, tokens, k).long() + 1
    counts = torch.bincount(cells_LTK.reshape(-1), minlength=layers * sequences * (experts + 1))
    return counts.view(*lead, sequences, experts + 1)[..., 1:]


def dead_experts(loads: Tensor, least_expected: float = 10.0) -> Tensor:
    """Experts without a token where the mean load is above ``least_expected``, ``[...]`` int64.

    With few tokens an expert (one decoding step, say) zeros are chance: at a mean of 10 a zero has odds of e^-10.
    """
    loads = _counted(loads)
    return ((loads == 0) & (loads.mean(-1, keepdim=True) > least_expected)).sum(-1)


def dead_over_steps(loads: Tensor, least_expected: float = 10.0) -> Tensor:
    """Experts without a token in a whole window of steps, ``[...]`` int64.

    Args:
        loads: ``[W, ..., E]``, the first dimension are the steps.
        least_expected: tokens that an expert should have got in the window, for it to count.
    """
    return dead_experts(_counted(loads).sum(0), least_expected)


def silence(before: Tensor, loads: Tensor) -> Tensor:
    """Tokens each expert should have got since it last got one, ``[..., E]`` fp64: dead_over_steps without the steps.

    Start with zeros and hand each step's result to the next; an expert whose silence is above 10 has been dead for as
    many steps as that takes, few or many.
    """
    loads = _counted(loads)
    return torch.where(loads > 0, 0.0, before + loads.mean(-1, keepdim=True))


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


def sampling_floors(tokens: Tensor, k: int, experts: int) -> tuple[Tensor, Tensor, LoadPercentiles]:
    """`sampling_floor` of many windows at once, and the load percentiles that chance alone gives.

    The last are 1 + z / sqrt(L), z the normal quantile, and not below 0: a balanced router's P95 is above 1 too.

    Args:
        tokens: ``[...]`` tokens of each window; 0 gives a floor of 0, and percentiles of 1.
        k, experts: see `sampling_floor`.

    Returns:
        Floors of CV and of MaxVio, ``[...]`` fp64 each, and percentiles, ``[...]`` each.

    Raises:
        ValueError: k is not 1 to ``experts``.
    """
    if not 1 <= k <= experts:
        raise ValueError(f"k, experts: found {k}, {experts}, need 1 <= k <= experts")
    mean = tokens.double() * k / experts
    even = (mean <= 0) | (k == experts)
    cv = torch.where(even, 0.0, mean.clamp(min=1e-300).rsqrt())
    percents = torch.tensor(_PERCENTS, dtype=torch.float64, device=tokens.device)
    spread = (1.0 + cv.unsqueeze(-1) * torch.special.ndtri(percents)).clamp(min=0.0)
    return cv, cv * math.sqrt(2.0 * math.log(experts)), LoadPercentiles(*spread.unbind(-1))
