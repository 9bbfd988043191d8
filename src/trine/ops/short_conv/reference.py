"""The definition of the short convolution: one token after another, any dtype up to float64, slow."""

from __future__ import annotations

import torch
from torch import Tensor


def short_conv_reference(
    x_TC: Tensor, weight_CW: Tensor, bounds: list[int], window_NWC: Tensor | None, activation: str | None
) -> Tensor:
    """Convolve each sequence ``bounds[n]:bounds[n+1]`` of a packed row, token by token.

    ``y_t = act( sum_j w_j * x_{t-W+1+j} )`` (K3 report, arXiv 2607.24653, Eq. 2; Kimi Linear, arXiv
    2510.26692), where inputs before a sequence's first token come from its carried window, or are zero.

    Args:
        x_TC: inputs, packed.
        weight_CW: one filter of W taps a channel, oldest tap first.
        bounds: N+1 non-decreasing offsets from 0 to T.
        window_NWC: the W-1 inputs before each sequence, oldest first; ``None`` means zeros.
        activation: ``"silu"`` or ``None``.

    Returns:
        y_TC, float64 if any input is float64 and float32 otherwise.
    """
    tensors = [x_TC, weight_CW] + ([] if window_NWC is None else [window_NWC])
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    channels, taps = weight_CW.shape
    weight_CW = weight_CW.to(dtype)
    rows = []
    for n in range(len(bounds) - 1):
        if window_NWC is None:
            seen = [torch.zeros(channels, dtype=dtype, device=x_TC.device) for _ in range(taps - 1)]
        else:
            seen = [window_NWC[n, i].to(dtype) for i in range(taps - 1)]
        for t in range(bounds[n], bounds[n + 1]):
            seen.append(x_TC[t].to(dtype))
            z_C = sum((weight_CW[:, j] * seen[len(seen) - taps + j] for j in range(taps)), torch.zeros_like(seen[-1]))
            rows.append(z_C * torch.sigmoid(z_C) if activation == "silu" else z_C)
    if not rows:
        return x_TC.to(dtype)[:0]
    return torch.stack(rows)
