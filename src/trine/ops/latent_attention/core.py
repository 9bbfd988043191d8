"""Causal attention over padded tiles: out and log-sum-exp are saved, probabilities are computed again in backward.

One query tile at a time (equal tiles of all sequences of a group as one batch), against blocks of keys from the
sequence's start to the tile's end, with the running softmax of the blocks seen so far. Shapes of products follow from a
tile's place in its own sequence. See README.md for the equations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trine.ops._autograd import differentiable_once
from trine.ops.latent_attention.plan import Group, Plan, Tiling, tiles


def _batch_first(x: Tensor, key_heads: int) -> Tensor:
    """[g, L, H, C] -> contiguous [g * key_heads, (H / key_heads) * L, C]: each key head with the queries reading it."""
    size, rows, heads, channels = x.shape
    x = x.unflatten(2, (key_heads, heads // key_heads)).permute(0, 2, 3, 1, 4)
    return x.reshape(size * key_heads, (heads // key_heads) * rows, channels)


def _rows_first(x: Tensor, size: int, key_heads: int, rows: int) -> Tensor:
    """The inverse, as a strided view [g, L, key_heads, H / key_heads, C]."""
    return x.view(size, key_heads, -1, rows, x.shape[-1]).permute(0, 3, 1, 2, 4)


def _key_blocks(end: int, tiling: Tiling) -> Iterator[tuple[int, int]]:
    for start in range(0, end, tiling.key_block):
        yield start, min(start + tiling.key_block, end)


class _Mask:
    """Which scores of a group are not there: keys after the query, and the unused front of a past.

    Selected away, never multiplied or added away, so that nothing a later key holds can reach an earlier query.
    """

    def __init__(self, group: Group, tiling: Tiling, key_heads: int, like: Tensor) -> None:
        self.group, self.tiling = group, tiling
        rows = tiling.largest
        # 0 where the key is not after the query and -inf where it is; added after the later scores were set to zero.
        self.later = torch.full((rows, rows), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)
        self.front: Tensor | None = None
        if any(group.empty_front):
            gaps = torch.tensor(group.empty_front, device=like.device).repeat_interleave(key_heads)
            self.front = (torch.arange(rows, device=like.device) < gaps[:, None]).unsqueeze(1)

    def scores_(self, scores: Tensor, items: slice, tile: tuple[int, int], block: tuple[int, int]) -> None:
        """Put -inf where a score [items, rows, columns] is not there."""
        rows, columns = tile[1] - tile[0], block[1] - block[0]
        if block[1] > self.group.front + tile[0]:
            scores.view(-1, rows, columns).tril_(columns - rows)
            scores.view(-1, rows, columns)[..., columns - rows :].add_(self.later[:rows, :rows])
        if self.front is not None and block[0] == 0:
            scores[..., : self.tiling.largest].masked_fill_(self.front[items], -torch.inf)

    def zero_(self, p: Tensor, items: slice, tile: tuple[int, int], block: tuple[int, int]) -> None:
        """Put 0 where a probability, or the gradient of a score, is not there."""
        rows, columns = tile[1] - tile[0], block[1] - block[0]
        if block[1] > self.group.front + tile[0]:
            p.view(-1, rows, columns).tril_(columns - rows)
        if self.front is not None and block[0] == 0:
            p[..., : self.tiling.largest].masked_fill_(self.front[items], 0.0)


class _Scratch:
    """One flat buffer that the scores of every tile reuse."""

    def __init__(self, like: Tensor) -> None:
        self.flat = like.new_empty(0)

    def take(self, like: Tensor, columns: int) -> Tensor:
        """A view [items, rows, columns] for the items and rows of ``like``; its contents are arbitrary."""
        need = like.shape[0] * like.shape[1] * columns
        if self.flat.numel() < need:
            self.flat = like.new_empty(need)
        return self.flat[:need].view(like.shape[0], like.shape[1], columns)


def _item_slices(items: int, rows: int, end: int, tiling: Tiling) -> Iterator[slice]:
    step = max(1, tiling.scratch // (rows * min(end, tiling.key_block)))
    for start in range(0, items, step):
        yield slice(start, min(start + step, items))


class _Attention(torch.autograd.Function):
    """Padded q [Fq, H, C], k [Fk, G, C], v [Fk, G, V] (``None``: the first V channels of k) -> o [Fq, H, V]."""

    @staticmethod
    def forward(
        ctx: Any, q_FHC: Tensor, k_FGC: Tensor, v_FGV: Tensor | None, plan: Plan, scale: float, value_width: int
    ) -> Tensor:
        heads, key_heads = q_FHC.shape[1], k_FGC.shape[1]
        o_FHV = q_FHC.new_empty(q_FHC.shape[0], heads, value_width)
        lse_list = []
        scratch, tiling = _Scratch(q_FHC), plan.tiling
        for group in plan.groups:
            mask = _Mask(group, tiling, key_heads, q_FHC)
            q_gLHC, o_gLHV = _queries(q_FHC, group), _queries(o_FHV, group)
            k_nLC, v_nLV = _keys(k_FGC, v_FGV, group, value_width)
            for tile in tiles(group.queries, tiling):
                q_nRC = _batch_first(q_gLHC[:, tile[0] : tile[1]] * scale, key_heads)
                o_nRV = q_nRC.new_empty(*q_nRC.shape[:2], value_width)
                lse_nR1 = q_nRC.new_empty(*q_nRC.shape[:2], 1)
                for items in _item_slices(q_nRC.shape[0], q_nRC.shape[1], group.front + tile[1], tiling):
                    _forward_tile(q_nRC, k_nLC, v_nLV, o_nRV, lse_nR1, items, tile, mask, scratch)
                o_tile = o_gLHV[:, tile[0] : tile[1]].unflatten(2, (key_heads, -1))
                o_tile.copy_(_rows_first(o_nRV, group.size, key_heads, tile[1] - tile[0]))
                lse_list.append(lse_nR1)
        ctx.save_for_backward(q_FHC, k_FGC, v_FGV, o_FHV, *lse_list)
        ctx.plan, ctx.scale, ctx.value_width = plan, scale, value_width
        return o_FHV

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do_FHV: Tensor) -> tuple[Tensor | None, ...]:
        q_FHC, k_FGC, v_FGV, o_FHV, *lse_list = ctx.saved_tensors
        scale, value_width = ctx.scale, ctx.value_width
        key_heads = k_FGC.shape[1]
        dq_FHC, dk_FGC = torch.empty_like(q_FHC), torch.zeros_like(k_FGC)
        dv_FGV = None if v_FGV is None else torch.zeros_like(v_FGV)
        own_FH1 = (do_FHV * o_FHV).sum(-1, keepdim=True)  # sum_j P_tj dP_tj
        dead_FH1 = None
        if not bool(torch.isfinite(own_FH1.sum())):
            # Scores of such a query overflowed. Where its output has no gradient it gives none: no 0 * inf to others.
            dead_FH1 = (do_FHV == 0).all(-1, keepdim=True) & ~torch.isfinite(own_FH1)
            q_FHC, own_FH1 = q_FHC.masked_fill(dead_FH1, 0.0), own_FH1.masked_fill(dead_FH1, 0.0)
        scratch, tiling = (_Scratch(q_FHC), _Scratch(q_FHC)), ctx.plan.tiling
        lse_iter = iter(lse_list)
        for group in ctx.plan.groups:
            mask = _Mask(group, tiling, key_heads, q_FHC)
            q_gLHC, do_gLHV, own_gLH1 = (_queries(x, group) for x in (q_FHC, do_FHV, own_FH1))
            dq_gLHC = _queries(dq_FHC, group)
            k_nLC, v_nLV = _keys(k_FGC, v_FGV, group, value_width)
            dk_nLC = k_nLC.new_zeros(k_nLC.shape)
            dv_nLV = dk_nLC[..., :value_width] if v_FGV is None else v_nLV.new_zeros(v_nLV.shape)
            for tile in tiles(group.queries, tiling):
                part = slice(*tile)
                q_nRC = _batch_first(q_gLHC[:, part] * scale, key_heads)
                do_nRV, own_nR1 = _batch_first(do_gLHV[:, part], key_heads), _batch_first(own_gLH1[:, part], key_heads)
                dq_nRC = torch.empty_like(q_nRC)
                lse_nR1 = next(lse_iter)
                if dead_FH1 is not None:
                    lse_nR1 = lse_nR1.masked_fill(_batch_first(_queries(dead_FH1, group)[:, part], key_heads), 0.0)
                saved = (q_nRC, do_nRV, own_nR1, lse_nR1)
                for items in _item_slices(q_nRC.shape[0], q_nRC.shape[1], group.front + tile[1], tiling):
                    _backward_tile(*saved, k_nLC, v_nLV, dq_nRC, dk_nLC, dv_nLV, items, tile, mask, scratch)
                dq_tile = dq_gLHC[:, part].unflatten(2, (key_heads, -1))
                torch.mul(_rows_first(dq_nRC, group.size, key_heads, tile[1] - tile[0]), scale, out=dq_tile)
            _put_keys(dk_FGC, dk_nLC, group)
            if dv_FGV is not None:
                _put_keys(dv_FGV, dv_nLV, group)
        return dq_FHC, dk_FGC, dv_FGV, None, None, None


def _queries(x_FHC: Tensor, group: Group) -> Tensor:
    part = x_FHC[group.first_query : group.first_query + group.size * group.queries]
    return part.unflatten(0, (group.size, group.queries))


def _keys(k_FGC: Tensor, v_FGV: Tensor | None, group: Group, value_width: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a group, [g * G, L, ...] (views where there is one key head)."""
    rows = slice(group.first_key, group.first_key + group.size * group.keys)
    key_heads = k_FGC.shape[1]
    k_nLC = _batch_first(k_FGC[rows].unflatten(0, (group.size, group.keys)), key_heads)
    if v_FGV is None:
        return k_nLC, k_nLC[..., :value_width]
    return k_nLC, _batch_first(v_FGV[rows].unflatten(0, (group.size, group.keys)), key_heads)


def _put_keys(out_FGC: Tensor, part_nLC: Tensor, group: Group) -> None:
    rows = slice(group.first_key, group.first_key + group.size * group.keys)
    key_heads = out_FGC.shape[1]
    target = out_FGC[rows].unflatten(0, (group.size, group.keys)).unsqueeze(3)
    target.copy_(_rows_first(part_nLC, group.size, key_heads, group.keys))


def _forward_tile(
    q_nRC: Tensor,
    k_nLC: Tensor,
    v_nLV: Tensor,
    o_nRV: Tensor,
    lse_nR1: Tensor,
    items: slice,
    tile: tuple[int, int],
    mask: _Mask,
    scratch: _Scratch,
) -> None:
    """One query tile of some items: o and log-sum-exp, by a running softmax over blocks of keys."""
    q = q_nRC[items]
    peak, total, o = q.new_full((*q.shape[:2], 1), -torch.inf), q.new_zeros(0), q.new_zeros(0)
    for block in _key_blocks(mask.group.front + tile[1], mask.tiling):
        k, v = k_nLC[items, block[0] : block[1]], v_nLV[items, block[0] : block[1]]
        p = torch.bmm(q, k.mT, out=scratch.take(q, block[1] - block[0]))
        mask.scores_(p, items, tile, block)
        top = torch.maximum(p.amax(-1, keepdim=True), peak)
        p.sub_(top).exp_()
        if block[0] == 0:
            total, o = p.sum(-1, keepdim=True), torch.bmm(p, v)
        else:
            shrink = (peak - top).exp_()
            total.mul_(shrink).add_(p.sum(-1, keepdim=True))
            o.mul_(shrink).add_(torch.bmm(p, v))
        peak = top
    torch.div(o, total, out=o_nRV[items])
    torch.add(peak, total.log(), out=lse_nR1[items])


def _backward_tile(
    q_nRC: Tensor,
    do_nRV: Tensor,
    own_nR1: Tensor,
    lse_nR1: Tensor,
    k_nLC: Tensor,
    v_nLV: Tensor,
    dq_nRC: Tensor,
    dk_nLC: Tensor,
    dv_nLV: Tensor,
    items: slice,
    tile: tuple[int, int],
    mask: _Mask,
    scratch: tuple[_Scratch, _Scratch],
) -> None:
    """One query tile of some items: dq whole, and its share of dk and dv (added to what earlier tiles gave)."""
    q, do, own, lse = q_nRC[items], do_nRV[items], own_nR1[items], lse_nR1[items]
    dq = dq_nRC[items]
    for block in _key_blocks(mask.group.front + tile[1], mask.tiling):
        columns = slice(*block)
        k, v = k_nLC[items, columns], v_nLV[items, columns]
        width = block[1] - block[0]
        p = torch.bmm(q, k.mT, out=scratch[0].take(q, width)).sub_(lse).exp_()
        mask.zero_(p, items, tile, block)
        ds = torch.bmm(do, v.mT, out=scratch[1].take(q, width)).sub_(own).mul_(p)
        mask.zero_(ds, items, tile, block)
        if block[0] == 0:
            torch.bmm(ds, k, out=dq)
        else:
            dq.add_(torch.bmm(ds, k))
        dk_nLC[items, columns].add_(torch.bmm(ds.mT, q))
        dv_nLV[items, columns].add_(torch.bmm(p.mT, do))


def attention(q_FHC: Tensor, k_FGC: Tensor, v_FGV: Tensor | None, plan: Plan, scale: float, value_width: int) -> Tensor:
    """Causal softmax attention in the padded layouts of ``plan``; G key heads, each read by H/G query heads."""
    return _Attention.apply(q_FHC, k_FGC, v_FGV, plan, scale, value_width)
