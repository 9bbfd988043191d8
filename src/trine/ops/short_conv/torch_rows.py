"""Short convolution by shifted rows: portable, with a hand-written backward.

Every row of the packed input is convolved as if the row were one sequence; then the first W-1 rows of each sequence,
the only ones whose taps reach over a boundary, are computed again from the carried window. See README.md for the
derivation and for why SiLU is written with ``exp`` and why sums over tokens run over fixed blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.ops import _tiles
from trine.ops._autograd import differentiable_once

# Rows summed at a time on a CPU, and at most so many on a card; fixed, so that appended rows never regroup a sum.
_BLOCK, _CARD_BLOCK = 256, 4096


def _sigmoid(z: Tensor) -> Tensor:
    """Logistic function as 1 / (1 + e^-z): unlike ``torch.sigmoid`` its bits do not depend on an element's position."""
    return torch.neg(z).exp_().add_(1.0).reciprocal_()


def _silu(z: Tensor, out: Tensor) -> Tensor:
    """out = z sigmoid(z)."""
    return torch.mul(_sigmoid(z), z, out=out)


def _silu_backward(z: Tensor, dy: Tensor, out: Tensor) -> None:
    """out = dy (s + z s (1 - s)), s = sigmoid(z)."""
    s = _sigmoid(z)
    torch.sub(1.0, s, out=out).mul_(z).add_(1.0).mul_(s).mul_(dy)


def _sum_over_rows(d_RC: Tensor, windows_RWC: Tensor) -> Tensor:
    """sum_r d[r] * windows[r, j] for each tap j, [W, C].

    Fixed blocks, filled up with zeros and added in order: rows with zero ``d`` that follow change no bit.
    """
    taps, channels = windows_RWC.shape[1:]
    block = _BLOCK
    if _tiles.on_card(d_RC.device):
        block = min(_CARD_BLOCK, _tiles.tile_rows(taps * channels, d_RC.device))
    total_WC = d_RC.new_zeros(taps, channels)
    for start in range(0, d_RC.shape[0], block):
        part = windows_RWC[start : start + block] * d_RC[start : start + block].unsqueeze(1)
        if part.shape[0] < block:
            part = torch.cat([part, part.new_zeros(block - part.shape[0], taps, channels)])
        total_WC += part.sum(0)
    return total_WC


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
        z_buffer = x_TC.new_empty(tokens + 1, channels)
        y_buffer = torch.empty_like(z_buffer) if activation else z_buffer
        for rows in _tiles.row_tiles(
            tokens, channels, x_TC.device
        ):  # elementwise, so the size of a tile touches no bit
            start, stop = rows.start, rows.stop
            z = z_buffer[rows]
            torch.mul(x_TC[rows], weight_WC[-1], out=z)
            for lag in range(1, min(taps, stop)):
                skip = max(lag - start, 0)
                z[skip:].addcmul_(x_TC[start + skip - lag : stop - lag], weight_WC[reach - lag])
            if activation:
                _silu(z, y_buffer[rows])
        rows_NW = ext_NEC = None
        if reach:
            rows_NW = _heads(cu_seqlens_N1, tokens, reach)
            first_NWC = _take(x_TC, rows_NW)
            before = torch.zeros_like(first_NWC) if window_NWC is None else window_NWC
            ext_NEC = torch.cat([before, first_NWC], 1)
            head_NWC = ext_NEC[:, reach:] * weight_WC[-1]
            for lag in range(1, taps):
                head_NWC.addcmul_(ext_NEC[:, reach - lag : 2 * reach - lag], weight_WC[reach - lag])
            z_buffer.index_copy_(0, rows_NW.flatten(), head_NWC.flatten(0, 1))
            if activation:
                y_buffer.index_copy_(0, rows_NW.flatten(), _silu(head_NWC, torch.empty_like(head_NWC)).flatten(0, 1))
        ctx.save_for_backward(x_TC, weight_WC, rows_NW, ext_NEC, z_buffer[:tokens] if activation else None)
        ctx.has_window = window_NWC is not None
        return y_buffer[:tokens]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_WC, rows_NW, ext_NEC, z_TC = ctx.saved_tensors
        tokens, channels = x_TC.shape
        taps = weight_WC.shape[0]
        reach = taps - 1
        need_x, need_weight, need_window = ctx.needs_input_grad[:3]
        dz_buffer = x_TC.new_empty(tokens + 1, channels)
        dz_TC = dz_buffer[:tokens]
        for rows in _tiles.row_tiles(tokens, channels, x_TC.device):
            if z_TC is None:
                dz_TC[rows] = dy_TC[rows]
            else:
                _silu_backward(z_TC[rows], dy_TC[rows], dz_TC[rows])
        if not bool(torch.isfinite(x_TC.sum())):
            # A row without gradient gives none, whatever it holds: 0 * inf must not reach earlier rows or the weights.
            dz_TC.masked_fill_(dy_TC == 0, 0.0)
            x_TC, ext_NEC = (None if r is None else r.masked_fill(~torch.isfinite(r), 0.0) for r in (x_TC, ext_NEC))
        dx = dweight = dwindow = None
        if reach:
            # The heads' gradient is taken out of the row, so that the shifted products below cross no boundary.
            dhead_NWC = _take(dz_TC, rows_NW)
            dz_buffer.index_fill_(0, rows_NW.flatten(), 0.0)
        if need_x or need_window:
            dx_buffer = torch.empty_like(dz_buffer)
            dx = dx_buffer[:tokens]
            for rows in _tiles.row_tiles(tokens, channels, x_TC.device):
                start, stop = rows.start, rows.stop
                torch.mul(dz_TC[rows], weight_WC[-1], out=dx[rows])
                for lag in range(1, taps):
                    source = dz_TC[start + lag : stop + lag]
                    dx[start : start + source.shape[0]].addcmul_(source, weight_WC[reach - lag])
            if reach:
                dext_NEC = torch.zeros_like(ext_NEC)
                for lag in range(taps):
                    dext_NEC[:, reach - lag : 2 * reach - lag].addcmul_(dhead_NWC, weight_WC[reach - lag])
                dx_buffer.index_add_(0, rows_NW.flatten(), dext_NEC[:, reach:].flatten(0, 1))
                dwindow = dext_NEC[:, :reach] if ctx.has_window else None
        if need_weight:
            # Rows before W-1 have no whole window in x, but they are heads, whose gradient has been taken out.
            dweight = torch.zeros_like(weight_WC)
            if tokens > reach:
                dweight += _sum_over_rows(dz_TC[reach:], x_TC.unfold(0, taps, 1).transpose(1, 2))
            if reach:
                windows = ext_NEC.unfold(1, taps, 1).transpose(2, 3)
                dweight += _sum_over_rows(dhead_NWC.flatten(0, 1), windows.flatten(0, 1))
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
