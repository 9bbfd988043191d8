"""Expert choice with Quantile Balancing (K3 report, arXiv 2607.24653, section 2.3.3, Eq. 11-14, appendices C and D)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trine.ops.router.grid import SCORE_DOMAINS
from trine.ops.router.quantile import balanced_assignment, check_bias, check_k, check_mask, may_read, solve_bias
from trine.ops.router.select import top_ids
from trine.ops.router.stats import COUNTERS, LayerStats, RouterStats

__all__ = [
    "COUNTERS",
    "LayerStats",
    "RouterStats",
    "Routing",
    "balanced_assignment",
    "route",
    "solve_bias",
]

# half a unit in the last place of 1.0: a sigmoid this close to 0 has a mirror image that is 1.0 in fp32
_HALF_ULP = 2.0**-25
# the same in logits: where an fp32 sigmoid becomes 1, and where it falls below half a unit
_LOGIT_ABOVE, _LOGIT_BELOW = 24 * math.log(2.0), -25 * math.log(2.0)


class Routing(NamedTuple):
    """What `route` decided.

    Attributes:
        ids_TK: ``[T, k]`` int64 experts, by descending biased score; -1 in rows that ``mask_T`` leaves out.
        weights_TK: ``[T, k]`` mixing weights from raw scores, fp32 (fp64 for fp64 logits); 0 in rows left out.
            The gradient of the router flows through them.
        cutoff_T: ``[T]`` the (k+1)-th largest biased score (logit, see ``score_domain``); -inf when k = E, where
            every expert is chosen.
        scores_TE: ``[T, E]`` raw scores, differentiable.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    cutoff_T: Tensor
    scores_TE: Tensor


def route(
    logits_TE: Tensor,
    bias_E: Tensor,
    k: int,
    *,
    score: str = "sigmoid",
    normalize: bool = True,
    scale: float = 1.0,
    stats: LayerStats | None = None,
    mask_T: Tensor | None = None,
    ids_TK: Tensor | None = None,
    score_domain: str = "sigmoid",
) -> Routing:
    """Choose k experts a token by score + bias and weigh them by raw score (K3 report Eq. 11 and 13).

    s = sigmoid(logits); chosen set = top-k of s + b, the lowest id winning ties; w = scale * s / (sum over chosen s
    + 1e-20). The bias decides who is chosen and never enters a weight, so it has no gradient.

    Args:
        logits_TE: ``[T, E]`` floating point; computed in fp32 whatever it is, in fp64 if it is fp64. Finite: a row with
            a NaN or an infinity is routed, left out of the histogram and counted in ``stats`` as dropped. Experts
            cannot be masked by -inf (group-limited routing, README.md): sigmoid(-inf) + b may still be chosen.
        bias_E: ``[E]`` fp32 or fp64, added (b = -beta of the dual problem, the sign of ``e_score_correction_bias``).
        k: experts per token, 1 to E.
        score: ``"sigmoid"`` (K3) or ``"softmax"``.
        normalize: divide by the sum of the chosen scores; false: weights are scale * s.
        scale: factor on the weights (1.0 in K3).
        stats: where loads and required biases are counted, `RouterStats.layer`; None counts nothing. Pass it in
            training only, and once per token: not in evaluation, not in recomputation (see `RouterStats.paused`).
        mask_T: ``[T]`` bool, true for real tokens. Other rows go to no expert and are counted nowhere.
        ids_TK: ``[T, k]`` int64 choices to replay instead of the live ones (reinforcement learning). Weights come from
            the live scores. Loads are counted, required biases are not: a bias learns from live choices only.
        score_domain: ``"sigmoid"``: the bias is added to scores (K3 report; also with softmax). ``"logit"``: to logits,
            weights still from scores: for routers so saturated that scores of different tokens are equal in fp32.

    Returns:
        `Routing`.

    Raises:
        ValueError: bad shape, dtype, device, ``k`` or ``score``; a bias that is not finite, replayed ids out of range
            or twice in a row (values are read on the CPU only).
    """
    if mask_T is not None and ids_TK is not None and ids_TK.shape == (*mask_T.shape, k):
        # recorded choices hold -1 in padding rows; any valid row will do there, its weights become 0 below
        ids_TK = torch.where(mask_T[:, None], ids_TK, torch.arange(k, device=ids_TK.device))
    _check_route(logits_TE, bias_E, k, score, mask_T, ids_TK)
    if score_domain not in SCORE_DOMAINS:
        raise ValueError(f"score_domain: found {score_domain!r}, need one of {list(SCORE_DOMAINS)}")
    if stats is not None and stats.score_domain != score_domain:
        raise ValueError(f"score_domain: found {score_domain!r}, need {stats.score_domain!r}, that of stats")
    experts = logits_TE.shape[1]
    logits_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    if mask_T is not None:  # padding may hold anything, and 0 * NaN would reach the gradient
        logits_TE = torch.where(mask_T[:, None], logits_TE, 0.0)
    scores_TE = torch.sigmoid(logits_TE) if score == "sigmoid" else torch.softmax(logits_TE, dim=1)

    with torch.no_grad():
        base_TE = (scores_TE if score_domain == "sigmoid" else logits_TE).detach()
        biased_TE = base_TE + bias_E.detach().to(base_TE.dtype)
        if score_domain == "logit":
            biased_TE += 0.0  # -0.0 becomes +0.0, as `top_ids` needs it
        live_ids_TN = top_ids(biased_TE, min(k + 1, experts))
        if k < experts:
            cutoff_T = biased_TE.gather(1, live_ids_TN[:, k:]).squeeze(1)
        else:
            cutoff_T = torch.full_like(biased_TE[:, 0], -torch.inf)
        chosen_TK = live_ids_TN[:, :k].contiguous() if ids_TK is None else ids_TK

    chosen_scores_TK = scores_TE.gather(1, chosen_TK)
    weights_TK = chosen_scores_TK
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
    if scale != 1.0:
        weights_TK = weights_TK * scale
    if mask_T is not None:
        weights_TK = torch.where(mask_T[:, None], weights_TK, 0.0)
        chosen_TK = torch.where(mask_T[:, None], chosen_TK, -1)

    if stats is not None:
        counted_T = cutoff_T if k < experts and ids_TK is None else None
        if score_domain == "logit":
            limits = (_LOGIT_BELOW, _LOGIT_ABOVE) if score == "sigmoid" else (-math.inf, math.inf)
        else:
            limits = (_HALF_ULP if score == "sigmoid" else -1.0, 1.0)
        stats.add(chosen_TK, base_TE, counted_T, mask_T, bias_E, *limits, logits_TE.detach())
    return Routing(chosen_TK, weights_TK, cutoff_T, scores_TE)


def _check_route(
    logits_TE: Tensor, bias_E: Tensor, k: int, score: str, mask_T: Tensor | None, ids_TK: Tensor | None
) -> None:
    if logits_TE.ndim != 2 or logits_TE.shape[1] < 1 or not logits_TE.is_floating_point():
        raise ValueError(
            f"logits_TE: found shape {tuple(logits_TE.shape)} of {logits_TE.dtype}, need a floating-point [T, E]"
        )
    tokens, experts = logits_TE.shape
    check_bias(bias_E, experts)
    if may_read(bias_E) and not bool(bias_E.isfinite().all()):
        raise ValueError("bias_E: found a non-finite value, need finite biases")
    check_k(k, experts)
    if score not in ("sigmoid", "softmax"):
        raise ValueError(f"score: found {score!r}, need 'sigmoid' or 'softmax'")
    if mask_T is not None:
        check_mask(mask_T, tokens)
    if ids_TK is not None:
        if ids_TK.shape != (tokens, k) or ids_TK.dtype != torch.int64:
            raise ValueError(f"ids_TK: found shape {tuple(ids_TK.shape)} of {ids_TK.dtype}, need [{tokens}, {k}] int64")
        if ids_TK.device.type == "cpu" and ids_TK.numel():
            ordered_TK = ids_TK.sort(dim=1).values
            low, high = int(ordered_TK[:, 0].min()), int(ordered_TK[:, -1].max())
            if low < 0 or high >= experts:
                raise ValueError(f"ids_TK: found {low if low < 0 else high}, need 0 <= id < {experts}")
            if bool((ordered_TK[:, 1:] == ordered_TK[:, :-1]).any()):
                raise ValueError("ids_TK: found an expert twice in one row, need different experts")
    for name, tensor in (("bias_E", bias_E), ("mask_T", mask_T), ("ids_TK", ids_TK)):
        if tensor is not None and tensor.device != logits_TE.device:
            raise ValueError(f"{name}: found device {tensor.device}, need {logits_TE.device}, that of logits_TE")
