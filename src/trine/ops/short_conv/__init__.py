"""Causal depthwise convolution over a few tokens, with the carried window that streaming and packing need."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops._backend import pick
from trine.ops._sequences import check_cu_seqlens
from trine.ops.short_conv.reference import short_conv_reference
from trine.ops.short_conv.torch_rows import short_conv_one, short_conv_torch

__all__ = ["short_conv"]

_REASONS = {
    "torch": None,
    "reference": None,
    "triton": "short_conv has no triton kernel; found only 'torch' and 'reference'",
}


def _check(
    x_BTC: Tensor,
    weight_CW: Tensor,
    cu_seqlens: Tensor | None,
    window_NWC: Tensor | None,
    activation: str | None,
) -> int:
    """Refuse arguments that do not fit together; returns the number of sequences N."""
    for name, tensor in (("x_BTC", x_BTC), ("weight_CW", weight_CW), ("window_NWC", window_NWC)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: found dtype {tensor.dtype}, need a floating dtype")
        if tensor.device != x_BTC.device:
            raise ValueError(f"{name}: found device {tensor.device}, need that of x_BTC, {x_BTC.device}")
    if x_BTC.ndim != 3:
        raise ValueError(f"x_BTC: found shape {tuple(x_BTC.shape)}, need [B, T, C]")
    batch, tokens, channels = x_BTC.shape
    if weight_CW.ndim != 2 or weight_CW.shape[0] != channels or weight_CW.shape[1] < 1:
        raise ValueError(f"weight_CW: found shape {tuple(weight_CW.shape)}, need [C, W] = [{channels}, W >= 1]")
    if activation not in ("silu", None):
        raise ValueError(f"activation: found {activation!r}, need 'silu' or None")
    sequences = batch
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, tokens)
        if cu_seqlens.device != x_BTC.device:
            raise ValueError(f"cu_seqlens: found device {cu_seqlens.device}, need that of x_BTC, {x_BTC.device}")
        sequences = cu_seqlens.numel() - 1
    if window_NWC is not None:
        need = (sequences, weight_CW.shape[1] - 1, channels)
        if tuple(window_NWC.shape) != need:
            raise ValueError(f"window_NWC: found shape {tuple(window_NWC.shape)}, need [N, W-1, C] = {list(need)}")
    return sequences


def _last_inputs(x_TC: Tensor, cu_seqlens_N1: Tensor, window_NWC: Tensor | None, reach: int) -> Tensor:
    """The last ``reach`` rows of [window ; sequence] for each sequence, [N, reach, C], oldest first; differentiable."""
    cu = cu_seqlens_N1.long()
    place_NW = (cu[1:] - cu[:-1])[:, None] + torch.arange(reach, device=cu.device)  # in the joined sequence
    sequences, channels = place_NW.shape[0], x_TC.shape[1]
    if window_NWC is None:
        window_NWC = x_TC.new_zeros(sequences, reach, channels)
    dtype = torch.promote_types(x_TC.dtype, window_NWC.dtype)
    old = place_NW < reach
    kept = window_NWC.gather(1, place_NW.clamp_max(max(reach - 1, 0)).unsqueeze(-1).expand(-1, -1, channels))
    if x_TC.shape[0] == 0 or reach == 0:
        return kept.to(dtype)
    rows_NW = torch.where(old, 0, cu[:-1, None] + place_NW - reach)
    new = x_TC.index_select(0, rows_NW.flatten()).view(sequences, reach, channels)
    return torch.where(old.unsqueeze(-1), kept.to(dtype), new.to(dtype))


def short_conv(
    x_BTC: Tensor,
    weight_CW: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    window_NWC: Tensor | None = None,
    activation: str | None = "silu",
    output_window: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution with SiLU: ``y_t = silu( sum_j w_j * x_{t-W+1+j} )``, j = 0..W-1.

    K3 report (arXiv 2607.24653) Eq. 2 and Kimi Linear (arXiv 2510.26692): W = 4, no bias, applied to the projections
    of queries, keys and values. Under this operator outputs before t, and gradients of a loss on them, keep their bits
    whatever happens at or after t.

    Args:
        x_BTC: inputs, any floating dtype; B = 1 when packed.
        weight_CW: a filter of W taps a channel, oldest tap first, so ``weight_CW[:, -1]`` meets the present token. Kept
            in float32 by contract.
        cu_seqlens: int32 or int64 [N+1] offsets of the sequences packed in the row, empty ones allowed; ``None`` means
            N = B sequences of T tokens.
        window_NWC: the W-1 inputs that precede each sequence, oldest first; ``None`` means zeros.
        activation: ``"silu"`` or ``None``.
        output_window: also return the window to carry on with.
        backend: ``"auto"``, ``"torch"`` or ``"reference"``.

    Returns:
        y_BTC in the dtype of x (sums in float32, or float64 if an input is float64), and window_NWC (the last W-1
        inputs of each sequence; one shorter than that keeps older entries of the incoming window) or ``None``. The
        window's dtype is the wider one of x and the incoming window.

    Raises:
        ValueError: a shape, dtype, device, ``cu_seqlens`` or activation that does not fit; the message names it.
        BackendUnavailable: an explicit backend that cannot run.
    """
    sequences = _check(x_BTC, weight_CW, cu_seqlens, window_NWC, activation)
    path = pick("short_conv", backend, x_BTC.device.type, _REASONS)
    batch, tokens, channels = x_BTC.shape
    taps = weight_CW.shape[1]
    x_TC = x_BTC.reshape(batch * tokens, channels)
    cu_seqlens_N1 = cu_seqlens
    if cu_seqlens_N1 is None:
        cu_seqlens_N1 = torch.arange(batch + 1, device=x_BTC.device) * tokens
    floats = [x_BTC, weight_CW] + ([] if window_NWC is None else [window_NWC])
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in floats) else torch.float32

    if sequences == 0 or x_TC.shape[0] == 0:
        y_TC = x_TC.to(dtype)
    elif path == "reference":
        y_TC = short_conv_reference(x_TC, weight_CW, cu_seqlens_N1.tolist(), window_NWC, activation)
    else:
        window = None if window_NWC is None else window_NWC.to(dtype)
        one_each = tokens == 1 if cu_seqlens is None else _one_each(cu_seqlens, tokens)
        if one_each:
            y_TC = short_conv_one(x_TC.to(dtype), weight_CW.to(dtype), window, activation)
        else:
            y_TC = short_conv_torch(x_TC.to(dtype), weight_CW.to(dtype), cu_seqlens_N1, window, activation)
    y_BTC = y_TC.to(x_BTC.dtype).view(batch, tokens, channels)
    if not output_window:
        return y_BTC, None
    return y_BTC, _last_inputs(x_TC, cu_seqlens_N1, window_NWC, taps - 1)


def _one_each(cu_seqlens: Tensor, tokens: int) -> bool:
    """Whether each sequence has exactly one token (only looked at where the values lie on the CPU)."""
    if cu_seqlens.device.type != "cpu" or cu_seqlens.numel() != tokens + 1:
        return False
    return bool((cu_seqlens[1:] - cu_seqlens[:-1] == 1).all())
