"""Routing by quantile thresholds of the batch at hand, without a memory: the second article's form, named as such.

The thresholds of a batch depend on all its tokens, later ones of the same text included. That is no harm in training
and cannot be had in decoding, where a token comes alone; there the running thresholds stand in, which are the bias.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trine._log import logger
from trine.ops.router import LayerStats, Routing, route
from trine.ops.router.quantile import finite_rows
from trine.ops.router.select import top_ids

BINS = 1000  # of the histogram quantile
SATURATED_BELOW = 2.0**-25  # as of `route`: a sigmoid this close to 0 has a mirror image that is 1.0 in fp32
SAMPLE = 1024  # rows, at most about so many, of the sketch quantile


@dataclass(frozen=True)
class Stateless:
    """How a batch balances itself.

    Attributes:
        mode: ``"drop"``: each token asks for its k best experts, an expert takes the best ceil(capacity * m k / E) of
            those who ask and the rest is lost; ``"reassign"``: whoever was refused asks the next best expert that has
            room, in at most ``rounds`` rounds; ``"dual"``: the dual of the assignment problem is iterated ``rounds``
            times on the batch (K3 report, arXiv 2607.24653, appendix C) and every token gets its k experts.
        quantile: ``"exact"`` order statistics; ``"histogram"``, 1000 bins, within a bin's width; ``"sketch"``, order
            statistics of every n-th token, about a thousand of them.
        threshold_source: ``"batch"``, or ``"running"``: top-k of score + bias, token by token.
        capacity: most tokens of an expert over its even share m k / E, in drop and reassign.
        rounds: see ``mode``.
    """

    mode: Literal["drop", "reassign", "dual"] = "dual"
    quantile: Literal["exact", "histogram", "sketch"] = "exact"
    threshold_source: Literal["batch", "running"] = "batch"
    capacity: float = 1.0
    rounds: int = 3

    def __post_init__(self) -> None:
        for name, choices in (
            ("mode", ("drop", "reassign", "dual")),
            ("quantile", ("exact", "histogram", "sketch")),
            ("threshold_source", ("batch", "running")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: found {getattr(self, name)!r}, need one of {', '.join(choices)}")
        if not 0 < self.capacity < math.inf or self.rounds < 1:
            raise ValueError(
                f"capacity, rounds: found {self.capacity}, {self.rounds}, need a finite capacity above 0, rounds >= 1"
            )


def route_stateless(
    logits_TE: Tensor,
    bias_E: Tensor,
    k: int,
    rule: Stateless,
    *,
    scale: float = 1.0,
    stats: LayerStats | None = None,
    mask_T: Tensor | None = None,
) -> Routing:
    """`route` with the choice made by the thresholds of this batch, or by the running ones.

    Weights are those of `route`: raw scores over the sum of the chosen ones, here over the slots that are filled. The
    required biases that ``stats`` gets are those of the running bias, whatever the batch chose by, so that a policy can
    solve the running thresholds from all tokens of a step (`trine.balance.StatelessThresholds`).

    Args:
        logits_TE: ``[T, E]`` floating point.
        bias_E: ``[E]`` fp32 or fp64, minus the running thresholds.
        k: experts per token, 1 to E.
        rule: how to choose.
        scale: factor on the weights.
        stats: where loads and required biases are counted; None counts nothing.
        mask_T: ``[T]`` bool, true for real tokens.

    Returns:
        `Routing`; ``ids_TK`` is -1 and the weight 0 in slots that stay empty.

    Raises:
        ValueError: as of `route`.
    """
    if rule.threshold_source == "running":
        return route(logits_TE, bias_E, k, scale=scale, stats=stats, mask_T=mask_T)
    live = route(logits_TE, bias_E, k, mask_T=mask_T)
    finite_T = finite_rows(logits_TE.detach())
    ids_TK = choose_by_batch(live.scores_TE.detach(), k, rule, mask_T, finite_T)
    chosen_TK = torch.where(ids_TK >= 0, live.scores_TE.gather(1, ids_TK.clamp(min=0)), 0.0)
    weights_TK = scale * chosen_TK / (chosen_TK.sum(1, keepdim=True) + 1e-20)
    if stats is not None:
        cutoff_T = live.cutoff_T if k < logits_TE.shape[1] else None
        scores_TE, limits = live.scores_TE.detach(), (SATURATED_BELOW, 1.0)
        stats.add(ids_TK, scores_TE, cutoff_T, mask_T, bias_E, *limits, logits_TE.detach())
    return Routing(ids_TK, weights_TK, live.cutoff_T, live.scores_TE)


@torch.no_grad()
def choose_by_batch(
    scores_TE: Tensor, k: int, rule: Stateless, mask_T: Tensor | None = None, finite_T: Tensor | None = None
) -> Tensor:
    """Experts of each token by the thresholds of this batch.

    Every number of tokens works: with fewer tokens than experts an expert still has room for one. k = E leaves nothing
    to choose: every token gets every expert.

    Args:
        scores_TE: ``[T, E]`` raw scores in [0, 1], fp32 or fp64.
        k: experts per token, 1 to E.
        rule: the mode and its dials; ``threshold_source`` is not looked at.
        mask_T: ``[T]`` bool, true for real tokens. Others get no expert and shift no threshold.
        finite_T: ``[T]`` bool, rows whose logits are all finite; default: whose scores are.

    Returns:
        ``[T, k]`` int64, by descending score (dual: score less threshold), the lowest id winning ties; -1 where a slot
        stays empty: padding, and what drop and reassign could not place. Rows that are not finite shift no
        threshold; dual routes them by score, the other modes place them nowhere.
    """
    _warn_once()
    tokens, experts = scores_TE.shape
    valid_T = finite_rows(scores_TE) if finite_T is None else finite_T
    if mask_T is not None:
        valid_T = valid_T & mask_T
    if rule.mode == "dual" or k == experts:
        biased_TE = scores_TE
        for _ in range(rule.rounds if k < experts and tokens else 0):
            biased_TE = scores_TE + _dual_step(scores_TE, biased_TE, k, valid_T, rule.quantile)
        ids_TK = top_ids(biased_TE.contiguous(), k)
        return ids_TK if mask_T is None else torch.where(mask_T[:, None], ids_TK, -1)

    room_E = torch.ceil(rule.capacity * k / experts * valid_T.sum().double() - 1e-9).expand(experts)
    free_T = torch.where(valid_T, k, 0)
    taken_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
    asked_TE = torch.zeros_like(taken_TE)
    slots_K = torch.arange(k, device=scores_TE.device)
    for _ in range(1 if rule.mode == "drop" else rule.rounds):
        open_TE = torch.where(asked_TE | (room_E <= 0) | ~valid_T[:, None], -torch.inf, scores_TE)
        ids_TK = top_ids(open_TE.contiguous(), k)
        asks_TK = (slots_K < free_T[:, None]) & (open_TE.gather(1, ids_TK) > -torch.inf)
        asks_TE = torch.zeros_like(taken_TE).scatter_(1, ids_TK, asks_TK)
        let_in_TE = asks_TE & _best(scores_TE, asks_TE, room_E, rule.quantile)
        asked_TE, taken_TE = asked_TE | asks_TE, taken_TE | let_in_TE
        room_E = room_E - let_in_TE.sum(0)
        free_T = free_T - let_in_TE.sum(1)
    ids_TK = top_ids(torch.where(taken_TE, scores_TE, -torch.inf), k)
    return torch.where(taken_TE.gather(1, ids_TK), ids_TK, -1)


def _dual_step(scores_TE: Tensor, biased_TE: Tensor, k: int, valid_T: Tensor, method: str) -> Tensor:
    """The bias that lets k/E of the batch in at each expert, given the cutoffs of the last one, ``[E]``, mean 0."""
    cutoff_T1 = torch.topk(biased_TE, k + 1, dim=1).values[:, k:]
    wanted = valid_T.sum().double() * k / scores_TE.shape[1]
    margins_TE = scores_TE - cutoff_T1
    theta_E = upper_threshold(margins_TE, valid_T[:, None].expand_as(margins_TE), wanted, method)
    theta_E = torch.where(theta_E.isfinite(), theta_E, 0.0)  # no valid token
    return (theta_E.mean() - theta_E).to(scores_TE.dtype)


def _best(scores_TE: Tensor, asks_TE: Tensor, room_E: Tensor, method: str) -> Tensor:
    """Which tokens are among the ``room_E`` best of those who ask: never more, the first token winning ties.

    An estimated threshold may let in too many; then the first tokens in the batch keep their places.
    """
    if method != "exact":
        above_TE = asks_TE & (scores_TE >= upper_threshold(scores_TE, asks_TE, room_E, method))
        return above_TE & (above_TE.cumsum(0) <= room_E)
    order_TE = torch.where(asks_TE, scores_TE, -torch.inf).sort(dim=0, descending=True, stable=True).indices
    return order_TE.argsort(dim=0) < room_E


def upper_threshold(values_TE: Tensor, counted_TE: Tensor, wanted_E: Tensor, method: str = "exact") -> Tensor:
    """For each column the value that about ``wanted_E`` of its counted entries reach.

    Args:
        values_TE: ``[T, E]`` fp32 or fp64; entries that are not counted may hold anything.
        counted_TE: ``[T, E]`` bool.
        wanted_E: ``[E]`` or scalar, how many; fractions are interpolated.
        method: ``"exact"``: the (wanted + 1)-th largest, between order statistics for a fraction; ``"histogram"``:
            `BINS` equal bins between the column's extremes, linear within a bin; ``"sketch"``: exact on every n-th row,
            with wanted scaled to how many of the sample count.

    Returns:
        ``[E]`` fp64; -inf where no more than ``wanted_E`` entries count, +inf where none is wanted.

    Raises:
        ValueError: an unknown method.
    """
    if method not in ("exact", "histogram", "sketch"):
        raise ValueError(f"method: found {method!r}, need 'exact', 'histogram' or 'sketch'")
    tokens, experts = values_TE.shape
    count_E = counted_TE.sum(0)
    want_E = wanted_E.double().expand(experts)
    all_in_E = want_E >= count_E
    if method == "sketch" and tokens > SAMPLE:
        stride = -(-tokens // SAMPLE)
        values_TE, counted_TE = values_TE[::stride], counted_TE[::stride]
        want_E = want_E * counted_TE.sum(0) / count_E.clamp(min=1)
    if tokens == 0:
        theta_E = want_E.new_full((experts,), -torch.inf)
    elif method == "histogram":
        theta_E = _from_histogram(values_TE, counted_TE, want_E)
    else:
        ordered_TE = torch.where(counted_TE, values_TE, -torch.inf).sort(dim=0, descending=True).values.double()
        place_E = want_E.clamp(min=0, max=ordered_TE.shape[0] - 1)
        low_1E, high_1E = place_E.floor().long()[None], place_E.ceil().long()[None]
        upper_E, lower_E = ordered_TE.gather(0, low_1E)[0], ordered_TE.gather(0, high_1E)[0]
        part_E = place_E - place_E.floor()
        # where the sample ends there is no next value to interpolate with, and -inf * 0 is no number
        theta_E = torch.where((part_E > 0) & lower_E.isfinite(), upper_E + part_E * (lower_E - upper_E), upper_E)
    theta_E = torch.where(want_E <= 0, torch.inf, theta_E)
    return torch.where(all_in_E, -torch.inf, theta_E)


def _from_histogram(values_TE: Tensor, counted_TE: Tensor, want_E: Tensor) -> Tensor:
    experts = values_TE.shape[1]
    top_E = torch.where(counted_TE, values_TE, -torch.inf).amax(0).double()
    low_E = torch.where(counted_TE, values_TE, torch.inf).amin(0).double()
    width_E = ((top_E - low_E) / BINS).clamp(min=1e-30)
    # from the top down, so that the running sum counts what exceeds a bin's lower end
    depth_TE = torch.where(counted_TE, (top_E - values_TE) / width_E, 0.0).clamp_(0, BINS - 1).long()
    flat_TE = depth_TE + BINS * torch.arange(experts, device=values_TE.device)
    counts_N = torch.zeros(experts * BINS, dtype=torch.int32, device=values_TE.device)
    counts_EB = counts_N.index_add_(0, flat_TE.view(-1), counted_TE.int().view(-1)).view(experts, BINS)
    above_EB = counts_EB.cumsum(1, dtype=torch.int64)
    bin_E1 = (above_EB < want_E[:, None]).sum(1, keepdim=True).clamp_(max=BINS - 1)
    inside_E = counts_EB.gather(1, bin_E1)[:, 0]
    before_E = above_EB.gather(1, bin_E1)[:, 0] - inside_E
    part_E = ((want_E - before_E) / inside_E.clamp(min=1)).clamp(0.0, 1.0)
    return top_E - (bin_E1[:, 0] + part_E) * width_E


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "stateless routing: thresholds of a batch make a token's experts depend on the other tokens of its batch, "
        "later ones included; evaluation and decoding use the running thresholds instead"
    )
