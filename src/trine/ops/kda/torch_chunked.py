"""Chunked KDA in plain PyTorch with a hand-written backward: the fast portable path.

The README of this folder derives every equation. In short, with tiles of 16 tokens, G the running sum of the log-decays
inside a tile, D = exp(G of its last row) and c an exact power of two that halves the range of the factors:

    q~ = c s q exp(G)      k~ = c k exp(G)      w~ = beta k exp(-G) / c          factors
    P = tril(q~ w~^T)      M = stril(k~ w~^T)      A = (I + M)^-1                  tile products
    w- = c D w~            R = A^T w-              B = P A
    e = v - k~ S / c       S' = D S + R^T e                                       scan over tiles
    y = A e                o = q~ S / c + B e                                     all tiles at once

and backwards, from do and the gradient dS' of the state that leaves the tile:

    de = B^T do + R dS'    dS = D dS' + q~^T do / c - k~^T de / c                 reverse scan over tiles
    [dP; dM] = stril([do; -de] y^T)
    [dq~; dk~] = [do; -de] S^T / c + [dP; dM] w~      dw~ = c D (y dS'^T) + [dP; dM]^T [q~; k~]

"Write keys" w carry beta, so beta never scales anything else. The diagonal of P is left out of dP and its gradients are
added without a decay factor: exp(G_i - G_i) = 1 must not reach the gate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trine.ops.kda._checks import TILE
from trine.ops.kda.gate import compute_dtype, sigmoid_
from trine.ops.kda.layout import Layout
from trine.ops.kda.pairwise import end_decays, pair_gradients, pair_products
from trine.ops.kda.scan import scan, scan_back, unit_lower_inverse
from trine.ops.kda.tile_gate import TileGate


@dataclass(frozen=True)
class Options:
    """What a call fixes besides its tensors; ``pairs`` selects the position-pair form of the tiles."""

    gate_kind: str
    lower_bound: float
    qk_norm: bool
    beta_is_logit: bool
    beta_max: float
    scale: float
    pairs: bool

    @property
    def shift(self) -> float:
        """The power of two c that centres the factors: exp of half a tile's span; 1 for pairs (factors <= 1)."""
        return 1.0 if self.pairs else 2.0 ** round(TILE * -self.lower_bound / 2 * math.log2(math.e))


class ChunkedKDA(torch.autograd.Function):
    """KDA on packed rows with its own backward; arguments as ``forward_pass``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        out, final, saved = forward_pass(*args, keep=True)
        *tensors, ctx.sequences, ctx.layout, ctx.options = args
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.bias_shape = None if tensors[6] is None else tensors[6].shape
        ctx.has_initial = tensors[7] is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[5:7], *saved)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        parameters = any(ctx.needs_input_grad[5:7])
        A_log, dt_bias, *saved = ctx.saved_tensors
        *gradients, d_enter = backward_pass(
            tuple(saved), d_out, d_final, A_log, dt_bias, ctx.layout, ctx.options, parameters
        )
        d_initial = None
        if ctx.has_initial and ctx.needs_input_grad[7]:
            shape = (ctx.sequences, *d_enter.shape[1:])
            d_initial = d_enter.new_zeros(shape) if d_final is None else d_final.clone()
            d_initial[ctx.layout.members] = d_enter
        results = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=False)]
        if results[6] is not None:
            results[6] = results[6].view(ctx.bias_shape)
        return (*results, d_initial, None, None, None)


def _norm_factor(x: Tensor) -> Tensor:
    """(sum x^2 + 1e-6)^-1/2 over channels, kept as the last dimension."""
    return x.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_()


def _mask(device: torch.device, strict: bool) -> Tensor:
    """``[32, 16]``: entries of [P; M] to blank; P keeps its diagonal unless ``strict``, M never does."""
    above = torch.ones(TILE, TILE, dtype=torch.bool, device=device).triu_(0 if strict else 1)
    return torch.cat([above, torch.ones_like(above).triu_()])


def _running_sum(like: Tensor, value: float, reverse: bool) -> Tensor:
    """Triangle that sums rows up to and with a row (``reverse``: from a row on), times ``value``, for every tile."""
    ones = torch.full((TILE, TILE), value, dtype=like.dtype, device=like.device)
    return (ones.triu_() if reverse else ones.tril_()).expand(like.shape[0], -1, -1)


def forward_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    sequences: int,
    layout: Layout,
    options: Options,
    keep: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Outputs, final states and what the backward pass needs.

    Args:
        q, k, gate: ``[R, H, K]``, R packed rows, H value heads; v: ``[R, H, V]``; beta: ``[R, H]``. Any float dtypes.
        A_log, dt_bias, initial_state: as in ``kda``.
        sequences: N, empty ones included.
        layout, options: of this call.
        keep: the backward pass will come.
    """
    dtype = compute_dtype(q, k, v, gate)
    q, k, v_RHV, gate, beta = (t.to(dtype) for t in (q, k, v, gate, beta))
    rows, heads, channels = q.shape
    values = v.shape[-1]
    shift, grid, tiles = options.shift, layout.grid, layout.tiles * heads
    beta_slope = None
    beta = beta.unsqueeze(-1)
    if options.beta_is_logit:
        logit, beta = beta, sigmoid_(beta.neg()).mul_(options.beta_max)
        beta_slope = sigmoid_(logit.clone()).mul_(beta) if keep else None
    rq = _norm_factor(q) if options.qk_norm else torch.ones_like(beta)
    rk = _norm_factor(k) if options.qk_norm else torch.ones_like(beta)

    # Factors of the tile products. Queries and read keys share a buffer, so that they share products.
    reads = q.new_empty(*grid, heads, 2, TILE, channels)
    w = q.new_empty(*grid, heads, TILE, channels)
    tiled_k = layout.tiled(k)
    torch.mul(layout.tiled(q), layout.tiled(rq * (options.scale * shift)), out=reads.select(-3, 0))
    torch.mul(tiled_k, layout.tiled(rk * shift), out=reads.select(-3, 1))
    torch.mul(tiled_k, layout.tiled(rk * beta / shift), out=w)
    reads, w = reads.view(tiles, 2 * TILE, channels), w.view(tiles, TILE, channels)
    gates = TileGate(options.gate_kind, options.lower_bound, A_log, dt_bias, gate)
    y_gate, slope = gates.forward(layout.tiled(gate), layout, keep)
    y_gate = y_gate.view(tiles, TILE, channels)
    raw_reads = g = None
    if options.pairs:
        g = y_gate if gates.scale == 1.0 else y_gate * gates.scale
        grow, shrink = end_decays(g)
        products = pair_products(reads, w, g)
        raw_reads, reads = reads, (reads.view(tiles, 2, TILE, channels) * grow.unsqueeze(1)).view_as(reads)
        w_end = w * shrink
    else:
        grow = torch.bmm(_running_sum(y_gate, gates.scale, reverse=False), y_gate).exp_()
        shrink = grow.reciprocal()
        reads.view(tiles, 2, TILE, channels).mul_(grow.unsqueeze(1))
        w.mul_(shrink)
        products = torch.bmm(reads, w.mT)
        w_end = w * (grow[:, -1:] * shift)

    # Tile products.
    products.masked_fill_(_mask(w.device, strict=False), 0.0)
    P_diagonal = products[:, :TILE].diagonal(dim1=1, dim2=2).unsqueeze(-1).clone() if keep else None
    A = unit_lower_inverse(products[:, TILE:])
    BA = torch.cat([torch.bmm(products[:, :TILE], A), A], dim=1)
    R = torch.bmm(A.mT, w_end)

    # Scan over tiles.
    e = v_RHV.new_empty(*grid, heads, 2, TILE, values)
    e.select(-3, 0).zero_()
    e.select(-3, 1).copy_(layout.tiled(v_RHV))
    e = e.view(tiles, 2 * TILE, values)
    members = layout.active[0]
    if initial_state is None:
        state = e.new_zeros(members, heads, channels, values)
    else:
        state = initial_state if layout.all_members else initial_state[layout.members]
    slots, last = scan(
        layout, heads, reads, grow[:, -1].unsqueeze(-1), R.mT, e, state.reshape(-1, channels, values), 1 / shift, keep
    )

    # Outputs.
    oy = torch.bmm(BA, e[:, TILE:])
    out = v.new_empty(rows, heads, values)
    o = (oy[:, :TILE] - e[:, :TILE]).view(*grid, heads, TILE, values)
    out.view(*layout.row_shape, heads, values).copy_(layout.by_row(o))
    if initial_state is None:
        final = last.new_zeros(sequences, heads, channels, values)
    else:
        final = initial_state.clone(memory_format=torch.contiguous_format)
    final[layout.members] = last.view(members, heads, channels, values)
    if not keep:
        return out, final, ()
    saved = (
        q, k, gate, rq, rk, beta, beta_slope, reads, w, raw_reads, g, grow, shrink, y_gate if options.pairs else None,
        slope, P_diagonal, BA, R, oy, slots,
    )  # fmt: skip
    return out, final, saved


def backward_pass(
    saved: tuple[Any, ...],
    d_out: Tensor | None,
    d_final: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    layout: Layout,
    options: Options,
    parameters: bool,
) -> tuple[Any, ...]:
    """Gradients of q, k, v, gate, beta, A_log, dt_bias (these two if ``parameters``) and the members' first states."""
    (
        q, k, gate, rq, rk, beta, beta_slope, reads, w, raw_reads, g, grow, shrink, y_gate, slope, P_diagonal, BA, R, oy,
        slots,
    ) = saved  # fmt: skip
    rows, heads, channels = q.shape
    values = oy.shape[-1]
    shift, grid, tiles = options.shift, layout.grid, layout.tiles * heads
    four = (tiles, 2, TILE, channels)

    # Reverse scan and the gradients that need states.
    X = oy.new_empty(*grid, heads, 2, TILE, values)
    if d_out is None:
        X.zero_()
    else:
        X.select(-3, 0).copy_(layout.tiled(d_out.to(oy.dtype)))
    X = X.view(tiles, 2 * TILE, values)
    y = oy[:, TILE:]
    dv = torch.bmm(BA[:, :TILE].mT, X[:, :TILE])
    d_last = None if d_final is None else d_final.to(oy.dtype)[layout.members].view(-1, channels, values)
    d_reads, dw, d_end, d_enter = scan_back(
        layout, heads, reads, grow[:, -1].unsqueeze(-1), R, y, slots, X, dv, d_last, 1 / shift
    )

    # Tile products.
    d_products = torch.bmm(X, y.mT)
    dP_diagonal = d_products[:, :TILE].diagonal(dim1=1, dim2=2).unsqueeze(-1).clone()
    d_products.masked_fill_(_mask(y.device, strict=True), 0.0)
    if options.pairs:
        d_tile_reads, d_tile_w = pair_gradients(d_products, raw_reads, w, g)
        d_reads.view(four).mul_(grow.unsqueeze(1))
        d_reads += d_tile_reads
        dw.mul_(shrink).add_(d_tile_w)
        weighted = (raw_reads * d_reads).view(four)
    else:
        d_reads.baddbmm_(d_products, w)
        dw.mul_(grow[:, -1:] * shift).baddbmm_(d_products.mT, reads)
        weighted = (reads * d_reads).view(four)
    dots = weighted.sum(-1, keepdim=True) if options.qk_norm else None
    dG = torch.add(weighted[:, 0], weighted[:, 1]).addcmul_(w, dw, value=-1.0)
    dG[:, -1] += d_end
    if not options.pairs:
        d_reads.view(four).mul_(grow.unsqueeze(1))
        dw.mul_(shrink)

    # Gate.
    gates = TileGate(options.gate_kind, options.lower_bound, A_log, dt_bias, gate)
    dy = torch.bmm(_running_sum(dG, gates.scale, reverse=True), dG)
    dy_y = dy * y_gate if parameters and options.gate_kind == "softplus" else None
    dz = gates.backward(dy.view(*grid, heads, TILE, channels), slope)
    dA = dbias = None
    if parameters:
        dA, dbias = gates.parameter_gradients(dz, dy_y, layout.tiled(gate), layout)

    # Back to token-major rows: dq, dk and dbeta from the gradients of the three factors.
    def by_row(t: Tensor) -> Tensor:
        return layout.by_row(t.view(*grid, heads, TILE, t.shape[-1]))

    def rowed(t: Tensor) -> Tensor:
        return t.view(*layout.row_shape, heads, t.shape[-1])

    q, k, rq, rk, beta = (rowed(t) for t in (q, k, rq, rk, beta))
    d_gate, dq, dk, dw_rows = (torch.empty_like(q) for _ in range(4))
    if gates.rate is None:
        d_gate.copy_(layout.by_row(dz))
    else:
        torch.mul(layout.by_row(dz), gates.rate.squeeze(-1), out=d_gate)
    # The diagonal of P carries no decay: its gradients come in here, by row.
    dP = by_row(dP_diagonal)
    torch.mul(by_row(d_reads[:, :TILE]), rq * (options.scale * shift), out=dq)
    dq.addcmul_(k, dP * beta * rq * rk * options.scale)
    torch.mul(by_row(dw), rk.new_full((), 1 / shift), out=dw_rows)
    dw_rows.addcmul_(q, dP * rq * options.scale)
    d_beta = (dw_rows * k).sum(-1, keepdim=True) * rk
    torch.mul(by_row(d_reads[:, TILE:]), rk * shift, out=dk)
    dk.addcmul_(dw_rows, rk * beta)
    if dots is not None:
        diagonal = dP * by_row(P_diagonal)
        dq.addcmul_(q, rq.square() * (by_row(dots[:, 0]) + diagonal), value=-1.0)
        dk.addcmul_(k, rk.square() * (by_row(dots[:, 1]) + beta * d_beta), value=-1.0)
    if beta_slope is not None:
        d_beta = d_beta * rowed(beta_slope)

    def flat(t: Tensor) -> Tensor:
        return t.reshape(rows, heads, -1)

    dv_rows = flat(by_row(dv))
    d_beta = flat(d_beta).squeeze(-1)
    return (
        flat(dq), flat(dk), dv_rows, flat(d_gate), d_beta, dA if A_log is not None else None,
        dbias if dt_bias is not None else None, d_enter.view(-1, heads, channels, values),
    )  # fmt: skip
