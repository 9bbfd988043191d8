"""Linear layer and cross-entropy in one: logits exist for one chunk of tokens at a time.

The gradients are made in the forward pass, while a chunk's exponentials are at hand, so that the backward pass is one
multiplication by the incoming gradient. See README.md for the scaling that saves a pass over the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.ops._autograd import differentiable_once


def _chunk_losses(hidden_RD: Tensor, weight_VD: Tensor, targets_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """nll_R, the exponentials e_RV = exp(z - max) and their sums z_R1, for one chunk of tokens."""
    exps_RV = hidden_RD @ weight_VD.t()
    top_R1 = exps_RV.amax(-1, keepdim=True)
    aimed_R1 = exps_RV.gather(1, targets_R1)
    exps_RV.sub_(top_R1).exp_()
    sums_R1 = exps_RV.sum(-1, keepdim=True)
    nll_R = (top_R1 - aimed_R1 + sums_R1.log()).squeeze(1)
    return nll_R, exps_RV, sums_R1


class _LinearCrossEntropy(torch.autograd.Function):
    """(sum_t w_t nll_t, nll_T); every token counts. Float32 or float64 inputs of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, weights_T: Tensor, targets_T: Tensor, chunk: int
    ) -> Tensor:
        need_hidden, need_weight, need_weights = ctx.needs_input_grad[:3]
        dhidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        dweight_VD = torch.zeros_like(weight_VD) if need_weight else None
        nll_T = torch.empty_like(weights_T)
        for start in range(0, hidden_TD.shape[0], chunk):
            part = slice(start, start + chunk)
            hidden_RD, targets_R1 = hidden_TD[part], targets_T[part].unsqueeze(1)
            nll_T[part], exps_RV, sums_R1 = _chunk_losses(hidden_RD, weight_VD, targets_R1)
            if not (need_hidden or need_weight):
                continue
            # d loss_t / d z = w (e / sum - onehot) = (e - sum onehot) w / sum; the factor goes to the narrow operands.
            exps_RV.scatter_add_(1, targets_R1, -sums_R1)
            factor_R1 = weights_T[part].unsqueeze(1) / sums_R1
            if dhidden_TD is not None:
                torch.mm(exps_RV, weight_VD, out=dhidden_TD[part]).mul_(factor_R1)
            if dweight_VD is not None:
                dweight_VD.addmm_(exps_RV.t(), hidden_RD * factor_R1)
        ctx.save_for_backward(dhidden_TD, dweight_VD, nll_T if need_weights else None)
        # Summed in float64: the sum of many tokens would lose digits that one token's loss still has.
        return (nll_T.double() * weights_T.double()).sum().to(hidden_TD.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if saved is None else saved * dloss for saved in ctx.saved_tensors]
        return (*grads, None, None)


def linear_cross_entropy_torch(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, weights_T: Tensor, chunk: int
) -> Tensor:
    """Weighted loss sum over tokens that all count; one float dtype throughout."""
    return _LinearCrossEntropy.apply(hidden_TD, weight_VD, weights_T, targets_T, chunk)


@torch.no_grad()
def token_losses_torch(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk: int) -> Tensor:
    """Negative log-likelihood of each token, nll_T in nats; no gradient."""
    nll_T = hidden_TD.new_empty(hidden_TD.shape[0])
    for start in range(0, hidden_TD.shape[0], chunk):
        part = slice(start, start + chunk)
        nll_T[part] = _chunk_losses(hidden_TD[part], weight_VD, targets_T[part].unsqueeze(1))[0]
    return nll_T
