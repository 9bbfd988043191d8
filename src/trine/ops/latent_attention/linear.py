"""Linear maps over tokens whose bits do not depend on how many tokens there are.

A matrix product may take another path for another number of rows, and a sum over tokens another grouping. Here rows are
multiplied in blocks of one size, counted from the row's start and filled up with zeros, and gradients of weights add
block after block; so results for earlier tokens keep their bits when later ones change or are appended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.ops import _tiles
from trine.ops._autograd import differentiable_once

_BLOCK, _CARD_BLOCK = 256, 2048  # rows multiplied at a time, on a CPU and on a card


def _blocks(x_TK: Tensor, block: int) -> tuple[Tensor | None, Tensor | None]:
    """Whole blocks [n, block, K] (a view) and the rest as one block [1, block, K] filled up with zeros."""
    tokens, channels = x_TK.shape
    whole = tokens // block
    body = x_TK[: whole * block].unflatten(0, (whole, block)) if whole else None
    if whole * block == tokens:
        return body, None
    tail = x_TK.new_zeros(1, block, channels)
    tail[0, : tokens - whole * block] = x_TK[whole * block :]
    return body, tail


def _apply(x_TK: Tensor, weight_KO: Tensor, out_TO: Tensor, block: int) -> None:
    """out = x @ weight, block by block; ``out`` may be strided."""
    body, tail = _blocks(x_TK, block)
    done = 0
    if body is not None:
        done = body.shape[0] * block
        out_TO[:done] = torch.bmm(body, weight_KO.expand(body.shape[0], -1, -1)).flatten(0, 1)
    if tail is not None:
        out_TO[done:] = torch.bmm(tail, weight_KO.unsqueeze(0))[0, : x_TK.shape[0] - done]


def _filled(x: Tensor, block: int) -> Tensor:
    """``x`` with zeros appended up to ``block`` rows."""
    rest = block - x.shape[0]
    return torch.cat([x, x.new_zeros(rest, *x.shape[1:])]) if rest else x


def _apply_heads(x_THK: Tensor, weight_HKO: Tensor, out_THO: Tensor, block: int) -> None:
    """out[:, h] = x[:, h] @ weight[h]: a product a head, which reads rows in place, or on a card all heads in one."""
    if not _tiles.on_card(x_THK.device):
        for h in range(weight_HKO.shape[0]):
            _apply(x_THK[:, h], weight_HKO[h], out_THO[:, h], block)
        return
    for start in range(0, x_THK.shape[0], block):
        out = out_THO[start : start + block]
        x = _filled(x_THK[start : start + block], block)
        out.copy_(torch.bmm(x.transpose(0, 1), weight_HKO).transpose(0, 1)[: out.shape[0]])


def _weight_gradient(dy_THO: Tensor, x_THK: Tensor, block: int) -> Tensor:
    """sum_t dy[t, h] x[t, h]^T for each head, as a running sum over blocks of tokens."""
    total_HOK = dy_THO.new_zeros(dy_THO.shape[1], dy_THO.shape[2], x_THK.shape[2])
    for start in range(0, dy_THO.shape[0], block):
        dy, x = (_filled(rows[start : start + block], block) for rows in (dy_THO, x_THK))
        total_HOK.baddbmm_(dy.permute(1, 2, 0), x.transpose(0, 1))
    return total_HOK


class _HeadLinear(torch.autograd.Function):
    """y[t, h] = weight[h] x[t, h], or weight[h] x[t] when x has no heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_HOK: Tensor, block: int) -> Tensor:
        heads, out_channels, channels = weight_HOK.shape
        y_THO = x.new_empty(x.shape[0], heads, out_channels)
        if x.ndim == 2:
            _apply(x, weight_HOK.reshape(-1, channels).t(), y_THO.flatten(1), block)
        else:
            _apply_heads(x, weight_HOK.mT, y_THO, block)
        ctx.save_for_backward(x, weight_HOK)
        ctx.block = block
        return y_THO

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_THO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight_HOK = ctx.saved_tensors
        heads, out_channels, channels = weight_HOK.shape
        if not bool(torch.isfinite(x.sum())):
            # A row without gradient gives none to the weights, whatever it holds.
            dead_TH1 = (dy_THO == 0).all(-1, keepdim=True)
            x = x.masked_fill((dead_TH1.all(1) if x.ndim == 2 else dead_TH1) & ~torch.isfinite(x), 0.0)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        dweight = None
        if x.ndim == 2:
            dy_TO = dy_THO.reshape(x.shape[0], heads * out_channels)
            if dx is not None:
                _apply(dy_TO, weight_HOK.reshape(-1, channels), dx, ctx.block)
            if ctx.needs_input_grad[1]:
                dweight = _weight_gradient(dy_TO.unsqueeze(1), x.unsqueeze(1), ctx.block).view_as(weight_HOK)
            return dx, dweight, None
        dy_THO = dy_THO.contiguous()
        if dx is not None:
            _apply_heads(dy_THO, weight_HOK, dx, ctx.block)
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(dy_THO, x, ctx.block)
        return dx, dweight, None


def head_linear(x: Tensor, weight_HOK: Tensor, block: int | None = None) -> Tensor:
    """``y_THO``: ``weight[h] x[t, h]`` for x [T, H, K], ``weight[h] x[t]`` for x [T, K]; ``block`` rows at a time.

    Without ``block`` a size by the kind of device.
    """
    if block is None:
        block = _CARD_BLOCK if _tiles.on_card(x.device) else _BLOCK
    # Rows of a wider tensor are read where they lie; only their channels must be adjacent.
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _HeadLinear.apply(x, weight_HOK.contiguous(), block)
