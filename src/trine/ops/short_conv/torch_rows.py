"""Short convolution by shifted rows: portable, with a hand-written backward.

Every row of the packed input is convolved as if the row were one sequence; then the first W-1 rows of each sequence,
the only ones whose taps reach over a boundary, are computed again from the carried window. See README.md for the
derivation and for why SiLU is written with ``exp`` and why sums over tokens run over fixed blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 256  # rows summed at a time; fixed, so that appended rows never regroup a sum


def _sigmoid(z: Tensor) -> Tensor:
    """Logistic function as 1 / (1 + e^-z): unlike ``torch.sigmoid`` its bits do not depend on an element's position."""
    return torch.exp(-z).add_(1.0).reciprocal_()


def _sum_of_products(a_TC: Tensor, b_TC: Tensor) -> Tensor:
    """sum_t a_t * b_t per channel, in fixed blocks added in order: zero rows appended change nothing."""
    tokens, channels = a_TC.shape
    total_C = a_TC.new_zeros(channels)
    for start in range(0, tokens, _BLOCK):
        part = a_TC[start : start + _BLOCK] * b_TC[start : start + _BLOCK]
        if part.shape[0] < _BLOCK:
            part = torch.cat([part, part.new_zeros(_BLOCK - part.shape[0], channels)])
        total_C += part.sum(0)
    return total_C


def _heads(cu_seqlens_N1: Tensor, tokens: int, reach: int) -> Tensor:
    """Row numbers of the first ``reach`` tokens of each sequence, [N, reach]; ``tokens`` (one past the end) if none."""
    cu = cu_seqlens_N1.long()
    rows_NW = cu[:-1, None] + torch.arange(reach, device=cu.device)
    return torch.where(rows_NW < cu[1:, None], rows_NW, tokens)


def _take(rows_TC: Tensor, index: Tensor) -> Tensor:
    """Gather rows; an index one past the end gives zeros (by a select, so that no value can leak)."""
    tokens = rows_TC.shape[0]
    got = rows_TC.index_select(0, index.flatten().clamp_max(tokens - 1)).view(*index.shape, -1)
    return torch.where((index < tokens).unsqueeze(-1), got, 0.0)


class _ShortConv(torch.autograd.Function):
    """y = act(conv(x)); saves the pre-activation, the inputs and the small per-sequence heads."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TC: Tensor,
        weight_CW: Tensor,
        window_NWC: Tensor | None,
        cu_seqlens_N1: Tensor,
        activation: str | None,
    ) -> Tensor:
        tokens, channels = x_TC.shape
        taps = weight_CW.shape[1]
        reach = taps - 1
        weight_WC = weight_CW.t().contiguous()
        # One spare row past the end takes the writes of sequences shorter than the reach.
        buffer = x_TC.new_empty(tokens + 1, channels)
        z_TC = buffer[:tokens]
        torch.mul(x_TC, weight_WC[-1], out=z_TC)
        for lag in range(1, min(taps, tokens)):
            z_TC[lag:].addcmul_(x_TC[:-lag], weight_WC[reach - lag])
        rows_NW = ext_NEC = None
        if reach:
            rows_NW = _heads(cu_seqlens_N1, tokens, reach)
            first_NWC = _take(x_TC, rows_NW)
            before = torch.zeros_like(first_NWC) if window_NWC is None else window_NWC
            ext_NEC = torch.cat([before, first_NWC], 1)
            head_NWC = ext_NEC[:, reach:] * weight_WC[-1]
            for lag in range(1, taps):
                head_NWC.addcmul_(ext_NEC[:, reach - lag : 2 * reach - lag], weight_WC[reach - lag])
            buffer.index_copy_(0, rows_NW.flatten(), head_NWC.flatten(0, 1))
        ctx.save_for_backward(x_TC, weight_WC, rows_NW, ext_NEC, z_TC if activation else None)
        ctx.has_window = window_NWC is not None
        if activation is None:
            return z_TC
        return _sigmoid(z_TC).mul_(z_TC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_WC, rows_NW, ext_NEC, z_TC = ctx.saved_tensors
        tokens, channels = x_TC.shape
        taps = weight_WC.shape[0]
        reach = taps - 1
        buffer = x_TC.new_empty(tokens + 1, channels)
        dz_TC = buffer[:tokens]
        if z_TC is None:
            dz_TC.copy_(dy_TC)
        else:
            # silu'(z) = s + z s (1 - s) = s (1 + z (1 - s))
            s_TC = _sigmoid(z_TC)
            torch.sub(1.0, s_TC, out=dz_TC)
            dz_TC.mul_(z_TC).add_(1.0).mul_(s_TC).mul_(dy_TC)
        dx = dweight = dwindow = None
        need_x, need_weight, need_window = ctx.needs_input_grad[:3]
        if reach:
            # The heads' gradient is taken out of the row, so that the shifted products below cross no boundary.
            dhead_NWC = _take(dz_TC, rows_NW)
            buffer.index_fill_(0, rows_NW.flatten(), 0.0)
        if need_x or need_window:
            dx_buffer = torch.empty_like(buffer)
            dx = dx_buffer[:tokens]
            torch.mul(dz_TC, weight_WC[-1], out=dx)
            for lag in range(1, min(taps, tokens)):
                dx[:-lag].addcmul_(dz_TC[lag:], weight_WC[reach - lag])
            if reach:
                dext_NEC = torch.zeros_like(ext_NEC)
                for lag in range(taps):
                    dext_NEC[:, reach - lag : 2 * reach - lag].addcmul_(dhead_NWC, weight_WC[reach - lag])
                dx_buffer.index_add_(0, rows_NW.flatten(), dext_NEC[:, reach:].flatten(0, 1))
                dwindow = dext_NEC[:, :reach] if ctx.has_window else None
        if need_weight:
            dweight = torch.empty_like(weight_WC)
            for lag in range(taps):
                total_C = _sum_of_products(dz_TC[lag:], x_TC[: tokens - lag]) if tokens > lag else 0.0
                if reach:
                    source_NWC = ext_NEC[:, reach - lag : 2 * reach - lag]
                    total_C = total_C + _sum_of_products(dhead_NWC.flatten(0, 1), source_NWC.flatten(0, 1))
                dweight[reach - lag] = total_C
            dweight = dweight.t()
        return dx, dweight, dwindow, None, None


def short_conv_torch(
    x_TC: Tensor, weight_CW: Tensor, cu_seqlens_N1: Tensor, window_NWC: Tensor | None, activation: str | None
) -> Tensor:
    """Packed short convolution; all tensors of one dtype, T >= 1, N >= 1. Returns y_TC in that dtype."""
    return _ShortConv.apply(x_TC.contiguous(), weight_CW, window_NWC, cu_seqlens_N1, activation)


def short_conv_one(x_NC: Tensor, weight_CW: Tensor, window_NWC: Tensor | None, activation: str | None) -> Tensor:
    """One token for each of N sequences: the decode step. Same arguments, N tokens; plain differentiable operations."""
    taps = weight_CW.shape[1]
    z_NC = x_NC * weight_CW[:, -1]
    if window_NWC is not None:
        for lag in range(1, taps):
            z_NC = torch.addcmul(z_NC, window_NWC[:, taps - 1 - lag], weight_CW[:, taps - 1 - lag])
    if activation is None:
        return z_NC
    return z_NC * (1.0 + torch.exp(-z_NC)).reciprocal()
