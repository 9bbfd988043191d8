"""The definition of the loss: all logits at once, autograd differentiates it. For tests and small inputs only."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cross_entropy_reference(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, weights_T: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """``sum_t w_t (logsumexp_v z_tv - z_t,target)`` in nats with ``z = hidden weight^T``, and ``sum_t w_t``.

    Tokens whose target is ``ignore_index`` count in neither sum. Float64 if an input is float64, else float32.
    """
    dtype = torch.float64 if torch.float64 in (hidden_TD.dtype, weight_VD.dtype) else torch.float32
    counted = targets_T != ignore_index
    logits = hidden_TD[counted].to(dtype) @ weight_VD.to(dtype).t()
    nll = torch.logsumexp(logits, -1) - logits.gather(1, targets_T[counted].unsqueeze(1)).squeeze(1)
    weights = torch.ones_like(nll) if weights_T is None else weights_T[counted].to(dtype)
    return (weights * nll).sum(), weights.sum()
