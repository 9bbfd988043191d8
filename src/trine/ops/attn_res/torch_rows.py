"""Depth mix without a stacked bank: each source is read where it lies, forward and backward.

Rows are worked on in tiles: small enough for a CPU's cache, so that the passes over a source after the first are cheap,
large enough for few launches on a card.
The equations of the backward pass are derived in README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trine.ops._autograd import differentiable_once
from trine.ops._tiles import row_tiles


def _dot(a_RD: Tensor, b_RD: Tensor) -> Tensor:
    return (a_RD * b_RD).sum(-1)


def _weights(blocks: Sequence[Tensor], direction_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """rstd, logits and softmax weights, each [S, R], of one block of rows of every source."""
    rows, width = blocks[0].shape
    rstd_SR = direction_D.new_empty(len(blocks), rows)
    logits_SR = torch.empty_like(rstd_SR)
    for i, v_RD in enumerate(blocks):
        torch.linalg.vector_norm(v_RD, dim=-1, out=rstd_SR[i])
        torch.mv(v_RD, direction_D, out=logits_SR[i])
    rstd_SR.square_().div_(width).add_(eps).rsqrt_()
    logits_SR.mul_(rstd_SR)
    return rstd_SR, logits_SR, torch.softmax(logits_SR, 0)


class _AttnRes(torch.autograd.Function):
    """Saves references to the sources and two scalars a source and token (rstd and logit)."""

    @staticmethod
    def forward(ctx: Any, query_D: Tensor, gain_D: Tensor, eps: float, *sources: Tensor) -> Tensor:
        dtype = query_D.dtype
        direction_D = query_D * gain_D
        tokens, width = sources[0].shape
        h_TD = torch.empty(tokens, width, dtype=dtype, device=direction_D.device)
        rstd_ST = torch.empty(len(sources), tokens, dtype=dtype, device=direction_D.device)
        logits_ST = torch.empty_like(rstd_ST)
        for rows in row_tiles(tokens, width, direction_D.device):
            blocks = [v[rows].to(dtype) for v in sources]
            rstd_SR, logits_SR, alpha_SR = _weights(blocks, direction_D, eps)
            rstd_ST[:, rows], logits_ST[:, rows] = rstd_SR, logits_SR
            h_RD = h_TD[rows]
            torch.mul(blocks[0], alpha_SR[0].unsqueeze(-1), out=h_RD)
            for v_RD, alpha_R in zip(blocks[1:], alpha_SR[1:], strict=True):
                h_RD.addcmul_(v_RD, alpha_R.unsqueeze(-1))
        ctx.save_for_backward(query_D, gain_D, rstd_ST, logits_ST, *sources)
        return h_TD

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dh_TD: Tensor) -> tuple[Tensor | None, ...]:
        query_D, gain_D, rstd_ST, logits_ST, *sources = ctx.saved_tensors
        dtype = query_D.dtype
        direction_D = query_D * gain_D
        tokens, width = sources[0].shape
        need = ctx.needs_input_grad[3:]
        grads = [
            torch.empty_like(v, memory_format=torch.contiguous_format) if n else None
            for v, n in zip(sources, need, strict=True)
        ]
        ddirection_D = torch.zeros_like(direction_D)
        for rows in row_tiles(tokens, width, direction_D.device):
            blocks = [v[rows].to(dtype) for v in sources]
            dh_RD = dh_TD[rows].to(dtype)
            rstd_SR, logits_SR = rstd_ST[:, rows], logits_ST[:, rows]
            alpha_SR = torch.softmax(logits_SR, 0)
            dalpha_SR = torch.stack([_dot(dh_RD, v_RD) for v_RD in blocks])
            dlogits_SR = alpha_SR * (dalpha_SR - (alpha_SR * dalpha_SR).sum(0))
            along_SR = dlogits_SR * rstd_SR  # coefficient of query * gain
            own_SR = along_SR * logits_SR * rstd_SR / -width  # coefficient of the source itself
            for i, v_RD in enumerate(blocks):
                ddirection_D.addmv_(v_RD.t(), along_SR[i])
                grad = grads[i]
                if grad is None:
                    continue
                dv_RD = grad[rows] if grad.dtype == dtype else torch.empty_like(dh_RD)
                torch.mul(dh_RD, alpha_SR[i].unsqueeze(-1), out=dv_RD)
                dv_RD.addcmul_(v_RD, own_SR[i].unsqueeze(-1)).addr_(along_SR[i], direction_D)
                if grad.dtype != dtype:
                    grad[rows] = dv_RD
        return ddirection_D * gain_D, ddirection_D * query_D, None, *grads


def attn_res_torch(sources: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """Mix equal-shaped sources [T, D]; query and gain in the working dtype. Returns h_TD in the working dtype."""
    return _AttnRes.apply(query_D, gain_D, eps, *sources)


def attn_res_weights_torch(sources: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """The mix's weights alone, alpha_ST; no gradient."""
    with torch.no_grad():
        direction_D = query_D * gain_D
        tokens, width = sources[0].shape
        parts = [
            _weights([v[rows].to(query_D.dtype) for v in sources], direction_D, eps)[2]
            for rows in row_tiles(tokens, width, direction_D.device)
        ]
        return torch.cat(parts, 1) if parts else direction_D.new_zeros(len(sources), 0)
