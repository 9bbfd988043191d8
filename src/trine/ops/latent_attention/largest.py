"""The largest attention score of each head on a batch: bounded first, and computed only where the bound is too high."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_ROWS, _COLUMNS = 256, 2048  # queries and keys of one product


@torch.no_grad()
def largest_scores(
    q_THC: Tensor,
    latent_TR: Tensor,
    shared_key_TS: Tensor,
    key_up_HKR: Tensor,
    cu_seqlens_N1: Tensor | None = None,
    *,
    scale: float | None = None,
    enough: float = -torch.inf,
) -> Tensor:
    """max over t and j <= t of one sequence of scale q_h,t . key_h,j, with the keys of `latent_attention`.

    The product of the largest norms bounds it (Cauchy and Schwarz) at the cost of making the keys. Where no head's
    bound exceeds ``enough`` the bounds are returned; else the true maxima of all heads.

    Args:
        q_THC: queries, content channels first.
        latent_TR, shared_key_TS, key_up_HKR: as in `latent_attention`.
        cu_seqlens_N1: bounds of packed sequences; None means one.
        scale: of the scores; C^-1/2 if None.
        enough: a bound up to this is as good as the value.

    Returns:
        ``[H]`` in float32 (float64 if an input is); NaN for a head with a score that is none.
    """
    dtype = torch.promote_types(torch.promote_types(q_THC.dtype, key_up_HKR.dtype), torch.float32)
    q_HTC = q_THC.to(dtype).transpose(0, 1)
    heads, tokens, channels = q_HTC.shape
    scale = channels**-0.5 if scale is None else scale
    if not tokens:
        return q_HTC.new_full((heads,), -torch.inf)
    content_HTK = latent_TR.to(dtype) @ key_up_HKR.to(dtype).mT
    shared_HTS = shared_key_TS.to(dtype).expand(heads, -1, -1)
    key_HTC = torch.cat((content_HTK, shared_HTS), -1)
    bound_H = scale * q_HTC.norm(dim=-1).amax(1) * key_HTC.norm(dim=-1).amax(1)
    if bool((bound_H <= enough).all()):
        return bound_H
    bounds = [0, tokens] if cu_seqlens_N1 is None else cu_seqlens_N1.tolist()
    peak_H = q_HTC.new_full((heads,), -torch.inf)
    for first, end in pairwise(bounds):
        for row in range(first, end, _ROWS):
            last = min(row + _ROWS, end)
            for column in range(first, last, _COLUMNS):
                stop = min(column + _COLUMNS, last)
                scores_HRL = q_HTC[:, row:last] @ key_HTC[:, column:stop].mT
                if stop > row + 1:  # some keys lie after some queries
                    later_RL = torch.ones(last - row, stop - column, dtype=torch.bool, device=q_HTC.device)
                    scores_HRL.masked_fill_(later_RL.triu_(row - column + 1), -torch.inf)
                peak_H = torch.maximum(peak_H, scores_HRL.amax((1, 2)))
    return scale * peak_H
