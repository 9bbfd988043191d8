"""The definitions, token by token in plain Python: obviously right, slow, any dtype. Tests compare against them."""

from __future__ import annotations

import torch
from torch import Tensor


def route_reference(logits_TE: Tensor, bias_E: Tensor, k: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the experts of each token by (score + bias, then lowest id); see `route`. Differentiable in the logits.

    Returns:
        ids ``[T, k]``, weights ``[T, k]``, cutoffs ``[T]`` (-inf when k = E).
    """
    scores_TE = torch.sigmoid(logits_TE)
    ids, weights, cutoffs = [], [], []
    for scores_E in scores_TE:
        biased = (scores_E.detach() + bias_E).tolist()
        order = sorted(range(len(biased)), key=lambda e: (-biased[e], e))
        chosen_K = scores_E[order[:k]]
        ids.append(order[:k])
        weights.append(scale * chosen_K / (chosen_K.sum() + 1e-20))
        cutoffs.append(biased[order[k]] if k < len(biased) else -torch.inf)
    if not ids:
        empty_TK = scores_TE[:, :k]
        return torch.empty(0, k, dtype=torch.int64), empty_TK, empty_TK[:, 0].detach()
    return torch.tensor(ids), torch.stack(weights), torch.tensor(cutoffs, dtype=scores_TE.dtype)


def required_bias_reference(scores_TE: Tensor, bias_E: Tensor, k: int) -> list[list[float]]:
    """For each expert, its required biases cutoff_i - s_ij in ascending order (K3 report Eq. 13)."""
    tokens = [sorted((scores_E + bias_E).tolist(), reverse=True)[k] for scores_E in scores_TE]
    columns = scores_TE.t().tolist()
    return [sorted(cutoff - s for cutoff, s in zip(tokens, column, strict=True)) for column in columns]


def solve_bias_reference(scores_TE: Tensor, bias_E: Tensor, k: int) -> Tensor:
    """The (q+1)-th smallest required bias of each expert, q = m k / E interpolated, minus the mean (Eq. 14), fp64."""
    tokens, experts = scores_TE.shape
    whole, rest = divmod(tokens * k, experts)
    solved = []
    for required in required_bias_reference(scores_TE, bias_E, k):
        low, high = required[min(whole, tokens - 1)], required[min(whole + 1, tokens - 1)]
        solved.append(low + (high - low) * rest / experts)
    mean = sum(solved) / experts
    return torch.tensor([value - mean for value in solved], dtype=torch.float64)


def histogram_reference(scores_TE: Tensor, bias_E: Tensor, k: int, edges_2: Tensor, bins: int) -> Tensor:
    """Counts ``[E, bins]`` of required biases, one at a time (K3 report, appendix D)."""
    low, width = edges_2.tolist()
    counts = torch.zeros(scores_TE.shape[1], bins, dtype=torch.int64)
    for e, required in enumerate(required_bias_reference(scores_TE, bias_E, k)):
        for value in required:
            counts[e, min(max(int((value - low) / width), 0), bins - 1)] += 1
    return counts
