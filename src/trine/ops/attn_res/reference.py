"""The definition of the depth mix, as written; autograd differentiates it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attn_res_reference(sources: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Softmax mix of depth sources (Attention Residuals, arXiv 2603.15031; K3 report, arXiv 2607.24653, Eq. 8-10).

    ``k_i = V_i / sqrt(mean(V_i^2) + eps) * gain``, ``alpha = softmax_i(k_i . query)``, ``h = sum_i alpha_i V_i``.

    Returns:
        h_...D and alpha_S..., in float64 if an input is float64 and in float32 otherwise.
    """
    tensors = [*sources, query_D, gain_D]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    bank = torch.stack([v.to(dtype) for v in sources])
    keys = bank * torch.rsqrt(bank.square().mean(-1, keepdim=True) + eps) * gain_D.to(dtype)
    alpha = torch.softmax((keys * query_D.to(dtype)).sum(-1), dim=0)
    return (alpha.unsqueeze(-1) * bank).sum(0), alpha
