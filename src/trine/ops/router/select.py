"""Top-(k+1) with one answer: the largest values first, the lowest expert id among equal ones, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF
_CHUNK = 1 << 17  # elements whose keys (8 bytes each) are alive at one time on the CPU
_FEW = 4  # up to this many, repeated argmax beats a sort of any kind


def _keys(values_TE: Tensor) -> Tensor:
    """fp32 values to int64 keys that sort the same way and never tie: order-preserving bits above, reversed id below.

    Reversing the id makes the lowest one the largest key. Negative zero never reaches this point: scores are >= +0.0,
    and x + b is -0.0 only if both are.
    """
    bits_TE = values_TE.view(torch.int32)
    # two's complement order of negative floats runs backwards: flip all but the sign bit
    bits_TE = bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)
    rank_E = _LOW_32 - torch.arange(values_TE.shape[1], device=values_TE.device)
    return (bits_TE.long() << 32) | rank_E


def top_ids(values_TE: Tensor, n: int) -> Tensor:
    """Ids of the ``n`` largest values of each row, in descending order; among equal values the lowest id comes first.

    ``torch.topk`` leaves the order of equal values to the device, and equal scores do occur: a zero-initialised
    router, or a saturated sigmoid.

    Args:
        values_TE: ``[T, E]`` fp32 or fp64, without -0.0; rows may hold NaN, whose places are then the first.
        n: 1 to E.

    Returns:
        ``[T, n]`` int64.
    """
    tokens, experts = values_TE.shape
    if n <= _FEW and tokens:
        # -inf marks what is picked, so a value of -inf becomes the lowest number: it may be picked once, not twice
        left_TE, picked = values_TE.clamp(min=torch.finfo(values_TE.dtype).min), []
        for _ in range(n):
            id_T1 = left_TE.argmax(1, keepdim=True)  # documented to return the first of equal maxima
            picked.append(id_T1)
            left_TE.scatter_(1, id_T1, -torch.inf)
        return torch.cat(picked, dim=1)
    if values_TE.dtype == torch.float64:  # the oracle's precision: no room for the id in a 64-bit key
        return torch.sort(values_TE, dim=1, descending=True, stable=True).indices[:, :n]
    rows = max(1, _CHUNK // experts) if values_TE.device.type == "cpu" else max(1, tokens)
    parts = [torch.topk(_keys(part_TE.contiguous()), n, dim=1).values for part_TE in values_TE.split(rows)]
    keys_TN = parts[0] if len(parts) == 1 else torch.cat(parts)
    return _LOW_32 - (keys_TN & _LOW_32)
