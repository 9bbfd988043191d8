"""The definition of latent attention: one query after another, any dtype up to float64, slow."""

from __future__ import annotations

import torch
from torch import Tensor


def latent_attention_reference(
    q_THC: Tensor,
    latent_TR: Tensor,
    shared_key_TS: Tensor,
    key_up_HKR: Tensor,
    value_up_HVR: Tensor,
    bounds: list[int],
    past_rows_PM: Tensor | None,
    past_bounds: list[int] | None,
    scale: float,
) -> Tensor:
    """Causal softmax attention of each packed sequence over its past and itself (K3 report, arXiv 2607.24653, Eq. 7).

    ``key_h,j = [key_up_h latent_j ; shared_j]``, ``value_h,j = value_up_h latent_j``,
    ``o_h,t = sum_{j <= t} softmax_j(scale q_h,t . key_h,j) value_h,j``. No positions anywhere.

    Returns:
        o_THV, float64 if an input is float64 and float32 otherwise.
    """
    tensors = [q_THC, latent_TR, shared_key_TS, key_up_HKR, value_up_HVR]
    tensors += [] if past_rows_PM is None else [past_rows_PM]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    q_THC, key_up_HKR, value_up_HVR = q_THC.to(dtype), key_up_HKR.to(dtype), value_up_HVR.to(dtype)
    rows_TM = torch.cat([latent_TR.to(dtype), shared_key_TS.to(dtype)], -1)
    rank = latent_TR.shape[1]
    outputs = []
    for n in range(len(bounds) - 1):
        rows = rows_TM[bounds[n] : bounds[n + 1]]
        before = 0
        if past_rows_PM is not None and past_bounds is not None:
            past = past_rows_PM[past_bounds[n] : past_bounds[n + 1]].to(dtype)
            before = past.shape[0]
            rows = torch.cat([past, rows])
        latent_LR, shared_LS = rows[:, :rank], rows[:, rank:]
        content_LHK = torch.einsum("lr,hkr->lhk", latent_LR, key_up_HKR)
        value_LHV = torch.einsum("lr,hvr->lhv", latent_LR, value_up_HVR)
        key_LHC = torch.cat([content_LHK, shared_LS.unsqueeze(1).expand(-1, key_up_HKR.shape[0], -1)], -1)
        for t in range(bounds[n + 1] - bounds[n]):
            seen = before + t + 1
            scores_LH = scale * (key_LHC[:seen] * q_THC[bounds[n] + t]).sum(-1)
            outputs.append((torch.softmax(scores_LH, 0).unsqueeze(-1) * value_LHV[:seen]).sum(0))
    if not outputs:
        return q_THC.new_zeros(0, value_up_HVR.shape[0], value_up_HVR.shape[1])
    return torch.stack(outputs)
