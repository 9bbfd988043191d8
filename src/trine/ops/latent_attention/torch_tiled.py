"""Latent attention in its two forms over the same tiled core, and the decode step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.ops._autograd import differentiable_once
from trine.ops.latent_attention.core import attention
from trine.ops.latent_attention.linear import head_linear
from trine.ops.latent_attention.plan import Index, make_plan, moved
from trine.ops.latent_attention.state import PAGE, Latents, interleave


class _Place(torch.autograd.Function):
    """Rows moved by an index in which no row occurs twice, so that the gradient is a gather as well."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Index, inverse: Index) -> Tensor:
        ctx.inverse = inverse
        return moved(rows, index)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        return moved(drows, ctx.inverse), None, None


def _place(rows: Tensor, index: Index | None, inverse: Index | None) -> Tensor:
    return rows if index is None or inverse is None else _Place.apply(rows, index, inverse)


def latent_attention_torch(
    q_THC: Tensor,
    rows_TM: Tensor,
    key_up_HKR: Tensor,
    value_up_HVR: Tensor,
    cu_seqlens_N1: Tensor,
    past: Latents | None,
    scale: float,
    form: str,
) -> Tensor:
    """o_THV for packed sequences; all floats of one dtype (past rows are converted), T >= 1."""
    if not bool(torch.isfinite(q_THC.detach().sum() + rows_TM.detach().sum())):
        q_THC, rows_TM, lost_T = _set_aside(q_THC, rows_TM, cu_seqlens_N1)
        o_THV = _finite(q_THC, rows_TM, key_up_HKR, value_up_HVR, cu_seqlens_N1, past, scale, form)
        return torch.where(lost_T[:, None, None], torch.nan, o_THV)
    return _finite(q_THC, rows_TM, key_up_HKR, value_up_HVR, cu_seqlens_N1, past, scale, form)


def _set_aside(q_THC: Tensor, rows_TM: Tensor, cu_seqlens_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros in the place of tokens that are not finite, and which outputs they make NaN.

    A product with a masked probability, 0 * inf, would carry such a token to the queries before it. It may reach only
    its own output (from its query) and those from itself on to the end of its sequence (from its row).
    """
    good_query_T = torch.isfinite(q_THC.detach()).flatten(1).all(1)
    good_row_T = torch.isfinite(rows_TM.detach()).all(1)
    bad_N = torch.nn.functional.pad((~good_row_T).cumsum(0), (1, 0))
    starts_N = cu_seqlens_N1[:-1].long().to(bad_N.device)
    before_T = torch.repeat_interleave(bad_N[starts_N], cu_seqlens_N1.diff().to(bad_N.device))
    lost_T = ~good_query_T | (bad_N[1:] > before_T)
    q_THC = torch.where(good_query_T[:, None, None], q_THC, 0.0)
    return q_THC, torch.where(good_row_T[:, None], rows_TM, 0.0), lost_T


def _finite(
    q_THC: Tensor,
    rows_TM: Tensor,
    key_up_HKR: Tensor,
    value_up_HVR: Tensor,
    cu_seqlens_N1: Tensor,
    past: Latents | None,
    scale: float,
    form: str,
) -> Tensor:
    lengths = cu_seqlens_N1.diff().tolist()
    pasts = [0] * len(lengths) if past is None else past.lengths_N.tolist()
    heads, content, rank = key_up_HKR.shape
    if form == "absorbed" and max(lengths) == 1 and past is not None and not _wants_grad(q_THC, rows_TM, past):
        return _decode(q_THC, rows_TM, key_up_HKR, value_up_HVR, lengths, past, scale)
    joined_LM = rows_TM
    if past is not None and any(pasts):
        cu_seqlens_N1 = cu_seqlens_N1.to(past.device)
        joined_LM, _ = interleave(past.rows_PM.to(rows_TM.dtype), past.cu_seqlens_N1, rows_TM, cu_seqlens_N1)
    plan = make_plan(lengths, pasts, q_THC.device)
    query_maps, key_maps = (plan.query_rows, plan.query_places), (plan.key_rows, plan.key_places)
    if form == "absorbed":
        mapped_THR = head_linear(q_THC[..., :content], key_up_HKR.mT)
        q_FHM = _place(torch.cat([mapped_THR, q_THC[..., content:]], -1), *query_maps)
        k_F1M = _place(joined_LM, *key_maps).unsqueeze(1)
        o_FHR = attention(q_FHM, k_F1M, None, plan, scale, rank)
        return head_linear(_place(o_FHR, *query_maps[::-1]), value_up_HVR)
    latent_LR, shared_LS = joined_LM[:, :rank], joined_LM[:, rank:]
    up_HWR = torch.cat([key_up_HKR, value_up_HVR], 1)
    key_LHK, value_LHV = head_linear(latent_LR, up_HWR).tensor_split((content,), -1)
    key_LHC = torch.cat([key_LHK, shared_LS.unsqueeze(1).expand(-1, heads, -1)], -1)
    o_FHV = attention(
        _place(q_THC, *query_maps).contiguous(),
        _place(key_LHC, *key_maps),
        _place(value_LHV, *key_maps),
        plan,
        scale,
        value_up_HVR.shape[1],
    )
    return _place(o_FHV, *query_maps[::-1])


def _wants_grad(q_THC: Tensor, rows_TM: Tensor, past: Latents) -> bool:
    return torch.is_grad_enabled() and (q_THC.requires_grad or rows_TM.requires_grad or past.requires_grad())


def _decode(
    q_THC: Tensor,
    rows_TM: Tensor,
    key_up_HKR: Tensor,
    value_up_HVR: Tensor,
    lengths: list[int],
    past: Latents,
    scale: float,
) -> Tensor:
    """At most one new token a sequence, in latent space: queries are mapped once, past rows are read as they lie.

    Pages of the padded buffer are visited in order with a running softmax that starts from the new token itself, so a
    sequence's bits depend on its own length only; sequences that end before a page drop out of it.
    """
    content, rank = key_up_HKR.shape[1:]
    mapped_THR = head_linear(q_THC[..., :content], key_up_HKR.mT, 16)
    q_THM = torch.cat([mapped_THR, q_THC[..., content:]], -1) * scale
    peak_TH1 = (q_THM * rows_TM.unsqueeze(1)).sum(-1, keepdim=True)
    total_TH1 = torch.ones_like(peak_TH1)
    o_THR = rows_TM[:, None, :rank].expand(-1, q_THC.shape[1], -1).clone()
    buffer_NLM, lengths_N = past.padded()
    owner_T = torch.tensor([n for n, new in enumerate(lengths) if new])
    seen_T = lengths_N[owner_T]
    for start in range(0, int(seen_T.max()) if owner_T.numel() else 0, PAGE):
        alive = (seen_T > start).nonzero().squeeze(1)
        page = buffer_NLM[:, start : start + PAGE]
        everyone = alive.numel() == buffer_NLM.shape[0]
        at = alive.to(q_THC.device)
        if not everyone:
            page = page.index_select(0, owner_T[alive].to(page.device))
        rows_nLM = page.to(q_THC.dtype)
        there_nL = torch.arange(start, start + PAGE) < seen_T[alive, None]
        q, peak, total, o = (x if everyone else x[at] for x in (q_THM, peak_TH1, total_TH1, o_THR))
        if not bool(there_nL.all()):
            there_nL = there_nL.to(q.device)
            rows_nLM = torch.where(there_nL.unsqueeze(-1), rows_nLM, 0.0)
            scores = torch.bmm(q, rows_nLM.mT).masked_fill_(~there_nL.unsqueeze(1), -torch.inf)
        else:
            scores = torch.bmm(q, rows_nLM.mT)
        top = torch.maximum(scores.amax(-1, keepdim=True), peak)
        shrink = (peak - top).exp_()
        scores.sub_(top).exp_()
        total = total * shrink + scores.sum(-1, keepdim=True)
        o = o * shrink + torch.bmm(scores, rows_nLM[..., :rank])
        if everyone:
            peak_TH1, total_TH1, o_THR = top, total, o
        else:
            peak_TH1[at], total_TH1[at], o_THR[at] = top, total, o
    return head_linear(o_THR / total_TH1, value_up_HVR, 16)
