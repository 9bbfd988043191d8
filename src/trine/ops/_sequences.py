"""Checks shared by every operator that takes packed sequences."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, tokens: int) -> None:
    """Refuse ``cu_seqlens`` that do not describe one packed row of ``tokens`` tokens.

    Values are read only when they lie on the CPU; kernels test those of a CUDA tensor themselves.

    Raises:
        ValueError: not an integer vector of length >= 2, a batch other than 1, a first value other than 0, a decrease,
            or a last value other than ``tokens``.
    """
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens: found dtype {cu_seqlens.dtype}, need int32 or int64")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens: found shape {tuple(cu_seqlens.shape)}, need [N+1] with N >= 1")
    if batch != 1:
        raise ValueError(f"cu_seqlens: packed sequences need batch size 1, found {batch}")
    if cu_seqlens.device.type != "cpu":
        return
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"cu_seqlens: found first value {values[0]}, need 0")
    for i, (a, b) in enumerate(pairwise(values), start=1):
        if b < a:
            raise ValueError(f"cu_seqlens: found a decrease from {a} to {b} at index {i}, need non-decreasing values")
    if values[-1] != tokens:
        raise ValueError(f"cu_seqlens: found last value {values[-1]}, need the number of tokens, {tokens}")
