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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trine.ops._autograd import differentiable_once
from trine.ops.kda._checks import TILE
from trine.ops.kda.chunk import diagonal_blocks, join, join_backward
from trine.ops.kda.gate import compute_dtype, full_precision, sigmoid_
from trine.ops.kda.layout import Layout
from trine.ops.kda.pairwise import end_decays, pair_gradients, pair_products
from trine.ops.kda.scan import running_sum_, scan, scan_back, unit_lower_inverse
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


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass; buffers of tiles and chunks are flat, ``[tiles * H, ..]``."""

    q: Tensor  # inputs in the compute dtype [R, H, K]
    k: Tensor
    gate: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    q_norm: Tensor  # factors of the L2 norms [R, H, 1]
    k_norm: Tensor
    beta: Tensor  # [R, H, 1], and its slope in the logit
    beta_slope: Tensor | None
    reads: Tensor  # tiles: [q~; k~], 32 rows
    w: Tensor  # tiles: w~ (pairs: beta k)
    raw_reads: Tensor | None  # pairs: [s q; k]
    g: Tensor | None  # pairs: log-decays
    grow: Tensor  # exp(G)
    shrink: Tensor  # exp(-G) (pairs: exp(G_last - G))
    slope: Tensor | None  # of the gate
    P_diagonal: Tensor  # tiles: 16 rows, 1 column
    state_reads: Tensor  # chunks: ``reads`` with the decay from the chunk's start
    BA: Tensor  # chunks: [P A; A]
    R: Tensor  # chunks: A^T w-
    y: Tensor
    slots: Tensor


class ChunkedKDA(torch.autograd.Function):
    """KDA on packed rows with its own backward; arguments as ``forward_pass``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        out, final, saved = forward_pass(*args, keep=True)  # type: ignore[misc]
        assert saved is not None
        *tensors, ctx.sequences, ctx.layout, ctx.options = args
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.has_initial = tensors[7] is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return out, final

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = Saved(*ctx.saved_tensors)
        parameters = any(ctx.needs_input_grad[5:7])
        with full_precision(saved.q.device):
            *gradients, d_enter = backward_pass(saved, d_out, d_final, ctx.layout, ctx.options, parameters)
        d_initial = None
        if ctx.has_initial and ctx.needs_input_grad[7]:
            shape = (ctx.sequences, *d_enter.shape[1:])
            d_initial = d_enter.new_zeros(shape) if d_final is None else d_final.clone()
            d_initial[ctx.layout.members] = d_enter
        results = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=False)]
        return (*results, d_initial, None, None, None)


def _scaled(reads: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Both halves of ``[tiles, 32, K]`` times ``[tiles, 16, K]``."""
    pairs = (-1, 2, TILE, reads.shape[-1])
    into = torch.empty_like(reads) if out is None else out
    torch.mul(reads.view(pairs), rows.unsqueeze(1), out=into.view(pairs))
    return into


def _norm_factor(x: Tensor) -> Tensor:
    """(sum x^2 + 1e-6)^-1/2 over channels, kept as the last dimension."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_()


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
) -> tuple[Tensor, Tensor, Saved | None]:
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
    shift, grid, split, chunks = options.shift, layout.grid, layout.split, layout.chunks * heads
    size = split * TILE
    beta_slope = None
    beta = beta.unsqueeze(-1)
    if options.beta_is_logit:
        logit, beta = beta, sigmoid_(beta.neg()).mul_(options.beta_max)
        beta_slope = sigmoid_(logit.clone()).mul_(beta) if keep else None
    q_norm = _norm_factor(q) if options.qk_norm else torch.ones_like(beta)
    k_norm = _norm_factor(k) if options.qk_norm else torch.ones_like(beta)

    # Factors of the tile products. Queries and read keys share a buffer, so that they share products.
    reads = q.new_empty(*grid, heads, split, 2, TILE, channels)
    w = q.new_empty(*grid, heads, split, TILE, channels)
    tiled_k = layout.tiled(k)
    torch.mul(layout.tiled(q), layout.tiled(q_norm * (options.scale * shift)), out=reads.select(-3, 0))
    torch.mul(tiled_k, layout.tiled(k_norm * shift), out=reads.select(-3, 1))
    torch.mul(tiled_k, layout.tiled(k_norm * beta / shift), out=w)
    reads, w = reads.view(-1, 2 * TILE, channels), w.view(-1, TILE, channels)
    gates = TileGate(options.gate_kind, options.lower_bound, A_log, dt_bias, gate)
    g, slope = gates.forward(layout.tiled(gate), layout, keep)
    g = g.view(-1, TILE, channels)
    raw_reads = None
    if options.pairs:
        grow, shrink = end_decays(g)
        products = pair_products(reads, w, g)
        raw_reads, reads = reads, _scaled(reads, grow)
        end = w * shrink
    else:
        grow = running_sum_(g).exp_()
        shrink = grow.reciprocal()
        _scaled(reads, grow, out=reads)
        w.mul_(shrink)
        products = torch.bmm(reads, w.mT)
        end = w * (grow[:, -1:] * shift)

    # Tile products, joined to those of the chunk.
    P = products[:, :TILE].tril_()
    P_diagonal = P.diagonal(dim1=1, dim2=2).unsqueeze(-1).clone()
    A = unit_lower_inverse(products[:, TILE:])
    decay = grow[:, -1].view(chunks, split, channels)
    end, state_reads = end.view(chunks, size, channels), reads.view(chunks, 2 * size, channels)
    if split > 1:
        P, A, state_reads = join(reads.view(chunks, split, 2 * TILE, channels), end, decay, P, A, 1 / shift)
        state_reads = state_reads.view(chunks, 2 * size, channels)
    BA = torch.cat([torch.bmm(P, A), A], dim=1)
    R = torch.bmm(A.mT, end)

    # Scan over chunks.
    if initial_state is None:
        state = reads.new_zeros(layout.active[0], heads, channels, values)
    else:
        state = initial_state if layout.in_order else initial_state[layout.members]
    chunk_decay = (decay[:, 0] if split == 1 else decay.prod(1)).unsqueeze(-1)
    predicted, e, slots, last = scan(
        layout, heads, state_reads, chunk_decay, R, layout.tiled(v_RHV), state.reshape(-1, channels, values), 1 / shift,
        keep,
    )  # fmt: skip

    # Outputs.
    oy = torch.bmm(BA, e)
    out = v_RHV.new_empty(rows, heads, values)
    inside = layout.by_row(oy[:, :size].view(*grid, heads, split, TILE, values))
    outside = layout.by_row(predicted.view(*grid, heads, split, 2, TILE, values).select(-3, 0))
    torch.add(inside, outside, alpha=1 / shift, out=out.view(*layout.row_shape, heads, values))
    if initial_state is None:
        final = last.new_zeros(sequences, heads, channels, values)
    else:
        final = initial_state.clone(memory_format=torch.contiguous_format)
    final[layout.members] = last.view(-1, heads, channels, values)
    saved = None
    if keep:
        assert slots is not None
        saved = Saved(
            q=q, k=k, gate=gate, A_log=A_log, dt_bias=dt_bias, q_norm=q_norm, k_norm=k_norm, beta=beta,
            beta_slope=beta_slope, reads=reads, w=w, raw_reads=raw_reads, g=g if options.pairs else None, grow=grow,
            shrink=shrink, slope=slope, P_diagonal=P_diagonal, state_reads=state_reads, BA=BA, R=R, y=oy[:, size:],
            slots=slots,
        )  # fmt: skip
    return out.to(v.dtype), final, saved


def backward_pass(
    saved: Saved, d_out: Tensor | None, d_final: Tensor | None, layout: Layout, options: Options, parameters: bool
) -> tuple[Any, ...]:
    """Gradients of q, k, v, gate, beta, A_log, dt_bias (these two None unless ``parameters``), and of the states that
    enter the member sequences."""
    s, y = saved, saved.y
    rows, heads, channels = s.q.shape
    values = y.shape[-1]
    shift, grid, split, chunks = options.shift, layout.grid, layout.split, layout.chunks * heads
    size = split * TILE

    # Reverse scan and the gradients that need states.
    X = y.new_empty(*grid, heads, split, 2, TILE, values)
    if d_out is None:
        X.zero_()
        dv = torch.zeros_like(y)
    else:
        X.select(-3, 0).copy_(layout.tiled(d_out.to(y.dtype)))
        do = X.view(chunks, split, 2, TILE, values).select(2, 0).reshape(chunks, size, values)
        dv = torch.bmm(s.BA[:, :size].mT, do)
    X = X.view(chunks, 2 * size, values)
    d_last = None if d_final is None else d_final.to(y.dtype)[layout.members].view(-1, channels, values)
    decay = s.grow[:, -1].view(chunks, split, channels)
    chunk_decay = (decay[:, 0] if split == 1 else decay.prod(1)).unsqueeze(-1)
    d_reads, d_end, d_decay, d_enter = scan_back(
        layout, heads, s.state_reads, chunk_decay, s.R, y, s.slots, X, dv, d_last, 1 / shift
    )

    # Products of chunks, then of tiles.
    d_products = torch.bmm(X, y.mT)
    end_decay = s.shrink if options.pairs else s.grow[:, -1:] * shift
    if split > 1:
        join_backward(
            s.reads.view(chunks, split, 2 * TILE, channels), (s.w * end_decay).view(chunks, size, channels), decay,
            d_products, d_reads.view(chunks, split, 2 * TILE, channels), d_end, 1 / shift,
        )  # fmt: skip
        d_products = diagonal_blocks(d_products, split).reshape(-1, 2 * TILE, TILE)
    d_reads, dw = d_reads.view(-1, 2 * TILE, channels), d_end.view(-1, TILE, channels).mul_(end_decay)
    dP_diagonal = d_products[:, :TILE].diagonal(dim1=1, dim2=2).unsqueeze(-1).clone()
    d_products.view(-1, TILE, TILE).tril_(-1)
    if options.pairs:
        assert s.raw_reads is not None and s.g is not None
        d_tile_reads, d_tile_w = pair_gradients(d_products, s.raw_reads, s.w, s.g)
        _scaled(d_reads, s.grow, out=d_reads).add_(d_tile_reads)
        dw += d_tile_w
        factors = s.raw_reads
    else:
        d_reads.baddbmm_(d_products, s.w)
        dw.baddbmm_(d_products.mT, s.reads)
        factors = s.reads
    # Gradient of the running sums G: each factor times its gradient.
    dG = factors[:, :TILE] * d_reads[:, :TILE]
    q_dots = dG.sum(-1, keepdim=True) if options.qk_norm else None
    k_terms = factors[:, TILE:] * d_reads[:, TILE:]
    k_dots = k_terms.sum(-1, keepdim=True) if options.qk_norm else None
    dG.add_(k_terms).addcmul_(s.w, dw, value=-1.0)
    dG.view(chunks, size, channels)[:, -1].add_(d_decay)
    if not options.pairs:
        _scaled(d_reads, s.grow, out=d_reads)
        dw.mul_(s.shrink)

    # Gate.
    gates = TileGate(options.gate_kind, options.lower_bound, s.A_log, s.dt_bias, s.gate)
    dg = running_sum_(dG, reverse=True).view(chunks, split, TILE, channels)
    for tile in range(split - 2, -1, -1):
        dg[:, tile].add_(dg[:, tile + 1, :1])
    dg = dg.view(*grid, heads, split, TILE, channels)
    d_gate, dA, dbias = gates.backward(dg, s.slope, s.g, layout.tiled(s.gate), layout, parameters)

    # Back to token-major rows: dq, dk and dbeta from the gradients of the three factors.
    def by_row(t: Tensor) -> Tensor:
        return layout.by_row(t.view(*grid, heads, split, TILE, t.shape[-1]))

    def rowed(t: Tensor) -> Tensor:
        return t.view(*layout.row_shape, heads, t.shape[-1])

    q, k, q_norm, k_norm, beta = (rowed(t) for t in (s.q, s.k, s.q_norm, s.k_norm, s.beta))
    dq, dk, dw_rows = (torch.empty_like(q) for _ in range(3))
    # The diagonal of P carries no decay: its gradients come in here. dw_rows is c times the gradient of the write key.
    dP = by_row(dP_diagonal) * options.scale
    torch.mul(by_row(d_reads[:, :TILE]), q_norm * (options.scale * shift), out=dq)
    dq.addcmul_(k, dP * beta * q_norm * k_norm)
    dw_rows.copy_(by_row(dw)).addcmul_(q, dP * q_norm * shift)
    d_beta = (dw_rows * k).sum(-1, keepdim=True) * k_norm / shift
    torch.mul(by_row(d_reads[:, TILE:]), k_norm * shift, out=dk)
    dk.addcmul_(dw_rows, k_norm * beta / shift)
    if q_dots is not None and k_dots is not None:
        # x / |x|: take out what is along x.
        diagonal = by_row(dP_diagonal * s.P_diagonal)
        dq.addcmul_(q, q_norm.square() * (by_row(q_dots) + diagonal), value=-1.0)
        dk.addcmul_(k, k_norm.square() * (by_row(k_dots) + beta * d_beta), value=-1.0)
    if s.beta_slope is not None:
        d_beta = d_beta * rowed(s.beta_slope)

    def flat(t: Tensor) -> Tensor:
        return t.reshape(rows, heads, -1)

    return (
        flat(dq), flat(dk), flat(by_row(dv)), flat(layout.by_row(d_gate)), flat(d_beta).squeeze(-1), dA, dbias,
        d_enter.view(-1, heads, channels, values),
    )  # fmt: skip
