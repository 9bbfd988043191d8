"""Forced imbalance: routing whose MaxVio is chosen, what it costs the experts, and how fast a policy removes it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trine.balance import metrics
from trine.balance.policies import BalancePolicy, make_policy
from trine.config import BalanceConfig, PolicyName
from trine.ops.experts import grouped_experts
from trine.ops.router import RouterStats, route
from trine.ops.router.quantile import check_k

MAX_VIOLATIONS = (0.0, 0.2, 1.0, 4.0)
"""Even, and the sweep that expert-parallel kernels are measured with in public (vLLM #57598)."""
_FLOORS = 2.0  # balanced: MaxVio within so many sampling floors
_HELD = 3  # steps in a row
_FEATURES = 64  # of the synthetic tokens


def forced_loads(tokens: int, experts: int, k: int, max_violation: float, hot: int = 1) -> Tensor:
    """Loads with the MaxVio asked for, ``[E]`` int64: ``hot`` equal full experts first, the rest shared evenly.

    The fullest load is the whole number nearest to (1 + max_violation) tokens k / experts; 0 gives the most even loads
    there are.

    Raises:
        ValueError: numbers out of range, or a MaxVio that so many hot experts cannot have: no expert can get more than
            every token, and together they can get no more than all there are.
    """
    largest = _largest(tokens, experts, k, hot)
    mean = tokens * k / experts
    if not 0.0 <= max_violation <= largest + 1e-9:
        raise ValueError(
            f"max_violation: found {max_violation}, need 0 to {largest:.6g}: {hot} of {experts} experts, {k} a token"
        )
    full = min(tokens, round(mean * (1.0 + max_violation)))
    if full <= math.ceil(mean):  # even loads are as near
        hot = 0
    elif hot * full > tokens * k:
        full = tokens * k // hot
    whole, rest = divmod(tokens * k - hot * full, experts - hot) if hot < experts else (0, 0)
    loads_E = torch.full((experts,), whole, dtype=torch.int64)
    loads_E[:hot] = full
    loads_E[hot : hot + rest] += 1
    return loads_E


def _largest(tokens: int, experts: int, k: int, hot: int) -> float:
    if tokens < 1 or not 1 <= k <= experts or not 1 <= hot <= experts:
        raise ValueError(
            f"tokens, experts, k, hot: found {tokens}, {experts}, {k}, {hot}, need tokens >= 1, 1 <= k <= experts and "
            "1 <= hot <= experts"
        )
    return min(experts / k, experts / hot) - 1.0


def forced_routing(tokens: int, experts: int, k: int, max_violation: float, seed: int, *, hot: int = 1) -> Tensor:
    """Expert ids whose loads have the MaxVio asked for, ``[tokens, k]`` int64; k different experts a token.

    Which experts are hot, which tokens go where and the order of a token's experts are drawn from ``seed``; the loads
    are those of `forced_loads`, exactly.

    Args:
        tokens, experts, k: sizes.
        max_violation: largest load over mean load, minus 1; 0 to experts / k - 1.
        seed: of everything random.
        hot: experts that have that load.

    Raises:
        ValueError: see `forced_loads`.
    """
    loads_E = forced_loads(tokens, experts, k, max_violation, hot)
    generator = torch.Generator().manual_seed(seed)
    name_E = torch.randperm(experts, generator=generator)
    # Each expert fills a run of places no longer than the tokens; token t takes places t, t + tokens, ..., so no run
    # reaches it twice.
    ids_KT = torch.repeat_interleave(name_E, loads_E).view(k, tokens)
    ids_TK = ids_KT.t()[torch.randperm(tokens, generator=generator)]
    order_TK = torch.rand(tokens, k, generator=generator).argsort(1)
    return ids_TK.gather(1, order_TK)


def possible(tokens: int, experts: int, k: int) -> tuple[float, ...]:
    """Those of the usual sweep (`MAX_VIOLATIONS`, without 0) that sizes allow, or if there are none the largest MaxVio.

    An expert cannot get more than every token, so experts / k - 1 is the largest. What is below one and a half sampling
    floors may be what tokens do by chance.

    Raises:
        ValueError: numbers out of range; or k = E, where loads cannot be uneven.
    """
    check_k(k, experts)
    largest = _largest(tokens, experts, k, 1)
    if largest <= 0:
        raise ValueError(f"k: found {k}, need less than {experts}, the number of experts: all loads are equal")
    least = 1.5 * metrics.sampling_floor(tokens, k, experts).max_violation
    return tuple(one for one in MAX_VIOLATIONS if least <= one <= largest and one > 0) or (largest,)


@dataclass(frozen=True)
class Timing:
    """Time of the routed experts under one load.

    Attributes:
        max_violation: asked for.
        found: what the whole numbers of tokens gave.
        milliseconds: median of a forward pass, or forward and backward.
        relative: over the time of even loads.
        per_token_k: microseconds a token and expert.
    """

    max_violation: float
    found: float
    milliseconds: float
    relative: float
    per_token_k: float

    def to_json(self) -> dict[str, Any]:
        """Field names and values."""
        return asdict(self)


def time_experts(
    tokens: int,
    experts: int,
    k: int,
    *,
    latent: int = 64,
    hidden: int = 64,
    max_violations: Sequence[float] = MAX_VIOLATIONS,
    repeats: int = 5,
    backward: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> list[Timing]:
    """Time `trine.ops.experts.grouped_experts` at forced loads, even loads first; medians of interleaved repeats.

    One process runs all experts here, so what shows is the cost of uneven groups. Where experts lie on several ranks
    the step waits for the fullest one: 1 + MaxVio times, at one expert a rank.

    Raises:
        ValueError: a size out of range, or a MaxVio that cannot be.
    """
    if min(latent, hidden, repeats) < 1:
        raise ValueError(f"latent, hidden, repeats: found {latent}, {hidden}, {repeats}, need at least 1 each")
    wanted = list(dict.fromkeys((0.0, *max_violations)))
    routings = [forced_routing(tokens, experts, k, one, seed).to(device) for one in wanted]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    x_TL, weights_TK = normal(tokens, latent), torch.full((tokens, k), 1.0 / k, device=device)
    gate_EFL, up_EFL = normal(experts, hidden, latent) / latent**0.5, normal(experts, hidden, latent) / latent**0.5
    stacks = (gate_EFL, up_EFL, normal(experts, latent, hidden) / hidden**0.5)
    for tensor in stacks:
        tensor.requires_grad_(backward)

    def once(ids_TK: Tensor) -> float:
        _wait(device)
        began = time.perf_counter()
        y_TL = grouped_experts(x_TL, ids_TK, weights_TK, *stacks)
        if backward:
            torch.autograd.grad(y_TL.sum(), stacks)
        _wait(device)
        return time.perf_counter() - began

    for ids_TK in routings:
        once(ids_TK)
    rounds = [[once(ids_TK) for ids_TK in routings] for _ in range(repeats)]
    seconds = [statistics.median(one) for one in zip(*rounds, strict=True)]
    found = [float(metrics.max_violation(torch.bincount(ids.reshape(-1), minlength=experts))) for ids in routings]
    return [
        Timing(target, vio, 1e3 * took, took / seconds[0], 1e6 * took / (tokens * k))
        for target, vio, took in zip(wanted, found, seconds, strict=True)
    ]


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Recovery:
    """How a policy removed a forced imbalance.

    Attributes:
        policy: its name.
        max_violation: MaxVio asked for.
        path: MaxVio of each step, the first one before any update.
        floor: MaxVio that chance gives.
        steps: updates after which MaxVio stayed within twice the floor for three steps; None if it never did.
    """

    policy: str
    max_violation: float
    path: tuple[float, ...]
    floor: float
    steps: int | None

    def to_json(self) -> dict[str, Any]:
        """Field names and values."""
        return asdict(self)


class SkewedScores:
    """A router that does not learn: sigmoid scores of fresh tokens, with one offset that gives a MaxVio asked for.

    Logits are x W / sqrt(features) + offset, x and W normal. Without a bias, the offset of the first expert is set by
    bisection so that the first batch has that MaxVio; 0 asks for no offset and keeps what the weights give.

    Raises:
        ValueError: see `forced_loads`; or a MaxVio below what the weights alone give.
    """

    def __init__(self, tokens: int, experts: int, k: int, max_violation: float, seed: int) -> None:
        forced_loads(tokens, experts, k, max_violation)
        self.tokens, self.experts, self.k = tokens, experts, k
        self._generator = torch.Generator().manual_seed(seed)
        self._weight_FE = torch.randn(_FEATURES, experts, generator=self._generator) / _FEATURES**0.5
        # equal columns in norm: the offset alone makes the imbalance
        self._weight_FE /= self._weight_FE.norm(dim=0)
        self._offset_E = torch.zeros(experts)
        first_TE = self._batch()
        if max_violation > 0:
            self._offset_E[0] = _offset(first_TE, k, max_violation)
        self._first_TE: Tensor | None = first_TE + self._offset_E

    def logits(self) -> Tensor:
        """A fresh batch, ``[T, E]``."""
        first_TE, self._first_TE = self._first_TE, None
        return self._batch() + self._offset_E if first_TE is None else first_TE

    def _batch(self) -> Tensor:
        return torch.randn(self.tokens, _FEATURES, generator=self._generator) @ self._weight_FE


def _offset(logits_TE: Tensor, k: int, wanted: float) -> float:
    """What to add to the first expert's logits for that MaxVio."""

    def found(offset: float) -> float:
        moved_TE = logits_TE.clone()
        moved_TE[:, 0] += offset
        ids_N = moved_TE.topk(k, dim=1).indices.reshape(-1)
        return float(metrics.max_violation(torch.bincount(ids_N, minlength=logits_TE.shape[1])))

    low, high = 0.0, 40.0
    if found(low) > wanted:
        raise ValueError(
            f"max_violation: found {wanted}, need at least {found(low):.3g}, what these tokens give by chance: take "
            "more of them"
        )
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < wanted else (low, middle)
    return high


def recovery(
    name: str,
    policy: BalancePolicy,
    tokens: int,
    experts: int,
    k: int,
    max_violation: float,
    *,
    steps: int = 40,
    seed: int = 0,
    stats: RouterStats | None = None,
) -> Recovery:
    """Drive a policy through a forced imbalance of a router that does not learn.

    Args:
        name: for the record.
        policy: fresh.
        tokens, experts, k: sizes.
        max_violation: MaxVio of the first batch.
        steps: updates, at least 3.
        seed: of the router and the tokens.
        stats: fresh statistics of one layer; default of the report's estimator.

    Raises:
        ValueError: a number out of range.
    """
    if steps < _HELD:
        raise ValueError(f"steps: found {steps}, need at least {_HELD}")
    scores = SkewedScores(tokens, experts, k, max_violation, seed)
    stats = RouterStats.allocate(1, experts) if stats is None else stats
    floor = metrics.sampling_floor(tokens, k, experts).max_violation
    path: list[float] = []
    with torch.no_grad():
        for _ in range(steps + 1):
            route(scores.logits(), stats.bias_LE[0], k, stats=stats.layer(0))
            path.append(float(metrics.max_violation(policy.step(stats).loads_LE)[0]))
    return Recovery(name, max_violation, tuple(path), floor, _settled(path, floor))


def _settled(path: Sequence[float], floor: float) -> int | None:
    good = [one <= _FLOORS * max(floor, 1e-9) for one in path]
    return next((i for i in range(len(good) - _HELD + 1) if all(good[i : i + _HELD])), None)


def recoveries(
    policies: Sequence[PolicyName],
    max_violations: Sequence[float],
    tokens: int,
    experts: int,
    k: int,
    *,
    steps: int = 40,
    seed: int = 0,
) -> list[Recovery]:
    """`recovery` of each policy of `trine.config.BalanceConfig`, with its default dials, at each MaxVio.

    Raises:
        ValueError: an unknown policy, or a number out of range.
    """
    return [
        recovery(
            name, make_policy(BalanceConfig(policy=name), k, experts), tokens, experts, k, one, steps=steps, seed=seed
        )
        for one in max_violations
        for name in policies
    ]
