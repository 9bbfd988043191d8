"""The auxiliary load-balancing loss over the global batch: a gradient on the scores, where other rules move a bias."""

from __future__ import annotations

import torch
from torch import Tensor


class LoadPressure:
    """What an auxiliary loss pulls on: how loaded each expert was in the last whole step, on all ranks.

    A balance policy writes it between optimizer steps, MoE layers read it; replicas of a model share it.

    Attributes:
        weight: of the loss; with even loads the loss itself is 1.
        relative_LE: ``[L, E]`` fp32, load over mean load; None before the first step, which stands for 1 everywhere.
    """

    def __init__(self, weight: float) -> None:
        """Raises ValueError unless the weight is a finite number above 0."""
        if not 0 < weight < float("inf"):
            raise ValueError(f"weight: found {weight}, need a finite number above 0")
        self.weight = weight
        self.relative_LE: Tensor | None = None

    def layer(self, index: int) -> Tensor | None:
        """``[E]`` relative loads of one layer, None before the first step."""
        return None if self.relative_LE is None else self.relative_LE[index]


def relative_loads(loads_LE: Tensor) -> Tensor:
    """Load over mean load, ``[..., E]`` fp32; 1 everywhere in a layer without any token.

    Args:
        loads_LE: ``[..., E]`` integer tokens of each expert.
    """
    loads_LE = loads_LE.double()
    mean = loads_LE.mean(-1, keepdim=True)
    return torch.where(mean > 0, loads_LE / mean.clamp(min=1e-300), 1.0).float()


def auxiliary_loss(scores_TE: Tensor, relative_E: Tensor | None) -> Tensor:
    """Each token's part of the auxiliary loss: sum over j of f_j p_ij with p_ij = s_ij / (sum over j' of s_ij').

    The loss of a batch is the mean over its tokens, E/k * sum over j of (share of assignments) * (mean of p) in the
    usual writing (Switch Transformer, arXiv 2101.03961, Eq. 4-6; with sigmoid scores DeepSeek-V3, arXiv 2412.19437,
    Eq. 17-20): 1 when loads are even, at most E. The gradient flows through p alone; f is a constant. Over the global
    batch (arXiv 2501.11873) f comes from all tokens of a step, so a domain may keep experts of its own, which a loss
    over each micro-batch forbids.

    Args:
        scores_TE: ``[T, E]`` raw scores, positive, fp32 or fp64, differentiable.
        relative_E: ``[E]`` f, load over mean load (`relative_loads`); None stands for 1 everywhere: the loss is 1 and
            its gradient exactly 0.

    Returns:
        ``[T]``.

    Raises:
        ValueError: another number of experts.
    """
    experts = scores_TE.shape[-1]
    if relative_E is None:
        return (scores_TE * 0.0).sum(-1) + 1.0
    if relative_E.shape != (experts,):
        raise ValueError(f"relative_E: found shape {tuple(relative_E.shape)}, need [{experts}], one value an expert")
    pulled_T = scores_TE @ relative_E.to(scores_TE.dtype)
    return pulled_T / (scores_TE.sum(-1) + 1e-20)
