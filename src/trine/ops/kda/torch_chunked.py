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
from trine.ops.kda.gate import compute_dtype, sigmoid_, softplus
from trine.ops.kda.layout import Layout
from trine.ops.kda.pairwise import end_decays, pair_gradients, pair_products


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
    groups: int

    @property
    def shift(self) -> float:
        """The power of two c that centres the factors: exp of half a tile's span; 1 for pairs (factors <= 1)."""
        return 1.0 if self.pairs else 2.0 ** round(TILE * -self.lower_bound / 2 * math.log2(math.e))


def _triangle(dtype: torch.dtype, device: torch.device, value: float, upper: bool) -> Tensor:
    ones = torch.full((TILE, TILE), value, dtype=dtype, device=device)
    return ones.triu_() if upper else ones.tril_()


def _causal_mask(device: torch.device, strict: bool) -> Tensor:
    """``[32, 16]``: entries of [P; M] to blank; P keeps its diagonal unless ``strict``, M never does."""
    above = torch.ones(TILE, TILE, dtype=torch.bool, device=device).triu_(1)
    on_and_above = torch.ones(TILE, TILE, dtype=torch.bool, device=device).triu_()
    return torch.cat([on_and_above if strict else above, on_and_above])


def unit_lower_inverse(M: Tensor) -> Tensor:
    """(I + M)^-1 for strictly lower triangular M ``[tiles, 16, 16]`` by forward substitution.

    The tiles are the last axis while it works, so each of the 15 elimination steps is one operation over all tiles.
    """
    tiles, size, _ = M.shape
    m = M.permute(1, 2, 0).contiguous()
    x = m.new_zeros(size, size, tiles)
    x.diagonal(dim1=0, dim2=1).fill_(1.0)
    for j in range(size - 1):
        x[j + 1 :, : j + 1].addcmul_(m[j + 1 :, j : j + 1], x[j : j + 1, : j + 1], value=-1.0)
    return x.permute(2, 0, 1).contiguous()


def _ordered_sum(x: Tensor) -> Tensor:
    """Sum of ``[N, ..., X]`` over the first axis in a tree of fixed groups of 16: appended zeros change no bit."""
    shape = x.shape[1:]
    x = x.reshape(x.shape[0], -1)
    while x.shape[0] > 1:
        n = -(-x.shape[0] // 16)
        if n * 16 != x.shape[0]:
            x = torch.cat([x, x.new_zeros(n * 16 - x.shape[0], x.shape[1])])
        x = torch.bmm(x.new_ones(n, 1, 16), x.view(n, 16, -1)).squeeze(1)
    return x.view(shape)


class _Gate:
    """The gate on tile buffers: log-decays g = slope * y with y kept for the backward pass."""

    def __init__(
        self,
        options: Options,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        heads: int,
        channels: int,
        dtype: torch.dtype,
    ):
        self.options = options
        self.bias = None if dt_bias is None else dt_bias.to(dtype).view(heads, 1, channels)
        self.rate = None if A_log is None else A_log.to(dtype).exp().view(heads, 1, 1)

    def forward(self, x: Tensor, out: Tensor, layout: Layout) -> tuple[Tensor, float]:
        """Fill ``out`` with y, pads 0; return it with the constant L of g = L * y."""
        kind = self.options.gate_kind
        if kind == "log_decay":
            return out.copy_(x), 1.0
        if kind == "softplus":
            y = softplus(x if self.bias is None else x + self.bias)
            torch.neg(y if self.rate is None else y * self.rate, out=out)
            return layout.fill_pads_(out), 1.0
        rate = x.new_ones(()) if self.rate is None else self.rate
        if self.bias is None:
            torch.mul(x, -rate, out=out)
        else:
            torch.addcmul(-rate * self.bias, x, -rate, out=out)
        return layout.fill_pads_(sigmoid_(out)), self.options.lower_bound

    def backward(self, dy: Tensor, y: Tensor, x: Tensor, layout: Layout) -> Tensor:
        """From the gradient of y to that of the gate's input (in place where it can)."""
        kind = self.options.gate_kind
        if kind == "log_decay":
            return dy
        if kind == "softplus":
            dz = sigmoid_((x if self.bias is None else x + self.bias).neg()).mul_(dy).neg_()
            return layout.fill_pads_(dz if self.rate is None else dz.mul_(self.rate))
        dz = torch.ops.aten.sigmoid_backward(dy, y)
        return dz if self.rate is None else dz.mul_(self.rate)

    def parameter_gradients(
        self, dx: Tensor, dy: Tensor, y: Tensor, x: Tensor, layout: Layout, channels: int
    ) -> tuple[Tensor, Tensor]:
        """Gradients of A_log ``[H]`` and dt_bias ``[H, K]``; sums run tile by tile, then along each sequence, in a
        fixed tree."""
        heads = dx.shape[-3]
        ones = dx.new_ones(1, 1, TILE)
        if self.options.gate_kind == "softplus":
            dA_terms = dy * y
        else:
            dA_terms = dx * (x if self.bias is None else x + self.bias)
        both = torch.stack([dx, dA_terms]).view(-1, TILE, channels)
        sums = torch.bmm(ones.expand(both.shape[0], -1, -1), both).view(2, layout.tiles, heads * channels)
        totals = [_ordered_sum(_ordered_sum(layout.by_sequence(s).transpose(0, 1))) for s in sums]
        dbias, dA = (t.view(heads, channels) for t in totals)
        return dA.sum(-1), dbias


def _norm_factor(x: Tensor) -> Tensor:
    """(sum x^2 + 1e-6)^-1/2 over channels, kept as the last dimension."""
    return x.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_()


class ChunkedKDA(torch.autograd.Function):
    """All of KDA on packed rows: q, k ``[R, HV, K]``, v ``[R, HV, V]``, gate ``[R, HV, K]``, beta ``[R, HV]``."""

    @staticmethod
    def forward(
        ctx: Any,
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
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(q, k, v, gate)
        q_RHK, k_RHK, v_RHV, x_RHK = (t.to(dtype) for t in (q, k, v, gate))
        rows, heads, channels = q_RHK.shape
        values = v.shape[-1]
        shift, grid, tiles = options.shift, layout.grid, layout.tiles * heads
        beta_RH1 = beta.to(dtype).unsqueeze(-1)
        if options.beta_is_logit:
            beta_RH1 = sigmoid_(beta_RH1.neg()).mul_(options.beta_max)
        rq_RH1 = _norm_factor(q_RHK) if options.qk_norm else q_RHK.new_ones(rows, heads, 1)
        rk_RH1 = _norm_factor(k_RHK) if options.qk_norm else k_RHK.new_ones(rows, heads, 1)

        # Factors. Queries and read keys share one buffer, so that they share products.
        reads = q_RHK.new_empty(*grid, heads, 2, TILE, channels)
        w = q_RHK.new_empty(*grid, heads, TILE, channels)
        tiled_k = layout.tiled(k_RHK)
        torch.mul(layout.tiled(q_RHK), layout.tiled(rq_RH1 * (options.scale * shift)), out=reads.select(-3, 0))
        torch.mul(tiled_k, layout.tiled(rk_RH1 * shift), out=reads.select(-3, 1))
        torch.mul(tiled_k, layout.tiled(rk_RH1 * beta_RH1 / shift), out=w)
        gates = _Gate(options, A_log, dt_bias, heads, channels, dtype)
        y_gate, slope = gates.forward(layout.tiled(x_RHK), torch.empty_like(w), layout)
        reads, w, y_gate = (t.view(-1, t.shape[-2] * (1 + (t is reads)), channels) for t in (reads, w, y_gate))
        raw_reads = None
        if options.pairs:
            g = y_gate if slope == 1.0 else y_gate * slope
            grow, gend = end_decays(g)
            products = pair_products(reads, w, g)
            raw_reads = reads
            reads = (reads.view(tiles, 2, TILE, channels) * grow[:, None]).view_as(reads)
            w_end = w * gend
            shrink, w = gend, w
        else:
            running = _triangle(dtype, w.device, slope, upper=False).expand(tiles, -1, -1)
            grow = torch.bmm(running, y_gate).exp_()
            shrink = grow.reciprocal()
            reads.view(tiles, 2, TILE, channels).mul_(grow[:, None])
            w.mul_(shrink)
            products = torch.bmm(reads, w.mT)
            w_end = w * (grow[:, -1:] * shift)
        decay = grow[:, -1].unsqueeze(-1)

        # Tile products.
        products.masked_fill_(_causal_mask(w.device, strict=False), 0.0)
        A = unit_lower_inverse(products[:, TILE:])
        B = torch.bmm(products[:, :TILE], A)
        R = torch.bmm(A.mT, w_end)

        # Scan over tiles.
        q_tilde, k_tilde = reads[:, :TILE], reads[:, TILE:]
        e = v_RHV.new_empty(*grid, heads, TILE, values)
        e = e.copy_(layout.tiled(v_RHV)).view(tiles, TILE, values)
        first = layout.active[0]
        slots = e.new_empty(first + layout.tiles, heads, channels, values)
        if initial_state is None:
            slots[:first] = 0.0
        else:
            slots[:first] = initial_state if layout.all_members else initial_state[layout.members]
        _scan(layout, heads, e, k_tilde, decay, R, slots, 1 / shift)

        # Outputs.
        y = torch.bmm(A, e)
        entering = layout.entering(slots).view(tiles, channels, values)
        o = torch.bmm(B, e).baddbmm_(q_tilde, entering, alpha=1 / shift)
        out = v.new_empty(rows, heads, values)
        out.view(*layout.row_shape, heads, values).copy_(layout.by_row(o.view(*grid, heads, TILE, values)))
        if initial_state is None:
            final = slots.new_zeros(sequences, heads, channels, values)
        else:
            final = initial_state.clone()
        final[layout.members] = layout.last(slots)

        ctx.layout, ctx.options, ctx.slope, ctx.gates = layout, options, slope, gates
        ctx.dtypes = (q.dtype, k.dtype, v.dtype, gate.dtype, beta.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            q_RHK, k_RHK, x_RHK, rq_RH1, rk_RH1, beta_RH1, reads, w, raw_reads, grow, shrink, y_gate, B, R, y,
            slots, A_log, dt_bias, initial_state,
        )  # fmt: skip
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        (
            q_RHK, k_RHK, x_RHK, rq_RH1, rk_RH1, beta_RH1, reads, w, raw_reads, grow, shrink, y_gate, B, R, y,
            slots, A_log, dt_bias, initial_state,
        ) = ctx.saved_tensors  # fmt: skip
        layout, options = ctx.layout, ctx.options
        rows, heads, channels = q_RHK.shape
        values = y.shape[-1]
        shift, grid, tiles = options.shift, layout.grid, layout.tiles * heads
        q_tilde, k_tilde = reads[:, :TILE], reads[:, TILE:]
        decay = grow[:, -1].unsqueeze(-1)

        # Reverse scan.
        X = y.new_empty(*grid, heads, 2, TILE, values)
        if d_out is None:
            X.zero_()
        else:
            X.select(-3, 0).copy_(layout.tiled(d_out.to(y.dtype).reshape(rows, heads, values)))
        X = X.view(tiles, 2 * TILE, values)
        do = X[:, :TILE]
        de = torch.bmm(B.mT, do)
        first = layout.active[0]
        d_slots = slots.new_zeros(slots.shape)
        d_enter = torch.bmm(q_tilde.mT, do).mul_(1 / shift).view(layout.tiles, heads, channels, values)
        if layout.enter is None:
            d_slots[: layout.tiles] = d_enter
        else:
            d_slots[layout.enter] = d_enter
        if d_final is not None:
            d_last = d_final.to(y.dtype)[layout.members]
            if layout.leave is None:
                d_slots[-first:] = d_last
            else:
                d_slots[layout.leave] = d_last
        _scan_back(layout, heads, de, k_tilde, decay, R, d_slots, 1 / shift)

        # Tile gradients.
        torch.neg(de, out=X[:, TILE:])
        entering = layout.entering(slots).view(tiles, channels, values)
        d_leaving = layout.leaving(d_slots).view(tiles, channels, values)
        d_products = torch.bmm(X, y.mT)
        dP_diag = d_products[:, :TILE].diagonal(dim1=1, dim2=2).unsqueeze(-1).clone()
        d_products.masked_fill_(_causal_mask(y.device, strict=True), 0.0)
        d_reads = torch.bmm(X, entering.mT).mul_(1 / shift)
        dw = torch.bmm(y, d_leaving.mT)
        four = (tiles, 2, TILE, channels)
        if options.pairs:
            g = y_gate if ctx.slope == 1.0 else y_gate * ctx.slope
            t_reads, t_w = pair_gradients(d_products, raw_reads, w, g)
            d_reads.view(four).mul_(grow[:, None])
            d_reads += t_reads
            dw.mul_(shrink).add_(t_w)
            dG = (raw_reads * d_reads).view(four).sum(1).addcmul_(w, dw, value=-1.0)
        else:
            d_reads.baddbmm_(d_products, w)
            dw.mul_(grow[:, -1:] * shift).baddbmm_(d_products.mT, reads)
            dG = (reads * d_reads).view(four).sum(1).addcmul_(w, dw, value=-1.0)
            d_reads.view(four).mul_(grow[:, None])
            dw.mul_(shrink)
        dG[:, -1] += (layout.leaving(slots) * layout.leaving(d_slots)).sum(-1).view(tiles, channels)
        reverse = _triangle(y.dtype, y.device, ctx.slope, upper=True).expand(tiles, -1, -1)
        dy_gate = torch.bmm(reverse, dG).view(*grid, heads, TILE, channels)

        # Back to token-major inputs.
        def by_row(t: Tensor) -> Tensor:
            return layout.by_row(t.view(*grid, heads, TILE, t.shape[-1])).reshape(rows, heads, t.shape[-1])

        diag = by_row(dP_diag)
        qn, kn = q_RHK * rq_RH1, k_RHK * rk_RH1
        d_qn = by_row(d_reads[:, :TILE]) * (options.scale * shift) + diag * beta_RH1 * options.scale * kn
        d_wn = by_row(dw) / shift + diag * options.scale * qn
        d_kn = by_row(d_reads[:, TILE:]) * shift + d_wn * beta_RH1
        d_beta = (d_wn * kn).sum(-1)
        if options.beta_is_logit:
            b = beta_RH1.squeeze(-1)
            d_beta = d_beta * b * (1 - b / options.beta_max)
        dq, dk = d_qn, d_kn
        if options.qk_norm:
            dq = rq_RH1 * (d_qn - qn * (qn * d_qn).sum(-1, keepdim=True))
            dk = rk_RH1 * (d_kn - kn * (kn * d_kn).sum(-1, keepdim=True))
        gates = ctx.gates
        tiled_x = layout.tiled(x_RHK)
        y_gate = y_gate.view(*grid, heads, TILE, channels)
        dx = gates.backward(dy_gate, y_gate, tiled_x, layout)
        dA = dbias = None
        if (A_log is not None and ctx.needs_input_grad[5]) or (dt_bias is not None and ctx.needs_input_grad[6]):
            dA, dbias = gates.parameter_gradients(dx, dy_gate, y_gate, tiled_x, layout, channels)
        d_gate = layout.by_row(dx).reshape(rows, heads, channels)
        d_initial = None
        if initial_state is not None and ctx.needs_input_grad[7]:
            d_initial = torch.zeros_like(initial_state) if d_final is None else d_final.clone()
            d_initial[layout.members] = d_slots[:first]
        tq, tk, tv, tg, tb = ctx.dtypes
        return (
            dq.to(tq),
            dk.to(tk),
            by_row(de).to(tv),
            d_gate.to(tg),
            d_beta.to(tb),
            None if A_log is None or dA is None else dA.to(A_log.dtype),
            None if dt_bias is None or dbias is None else dbias.to(dt_bias.dtype).view_as(dt_bias),
            d_initial,
            None,
            None,
            None,
        )


def _scan(
    layout: Layout, heads: int, e: Tensor, k_tilde: Tensor, decay: Tensor, R: Tensor, slots: Tensor, unshift: float
) -> None:
    """Run the state through the tiles: ``e`` becomes v - k~ S / c, ``slots`` get every tile's leaving state."""
    sizes = [n * heads for n in layout.active]
    flat = slots.view(-1, *slots.shape[2:])
    parts = [t.split(sizes) for t in (e, k_tilde, decay, R.mT, flat[sizes[0] :])]
    state = flat[: sizes[0]]
    for e_s, k_s, decay_s, write_s, leaving in zip(*parts, strict=True):
        if len(leaving) != len(state):
            state = state[: len(leaving)]
        e_s.baddbmm_(k_s, state, alpha=-unshift)
        torch.mul(state, decay_s, out=leaving)
        state = leaving.baddbmm_(write_s, e_s)


def _scan_back(
    layout: Layout, heads: int, de: Tensor, k_tilde: Tensor, decay: Tensor, R: Tensor, d_slots: Tensor, unshift: float
) -> None:
    """The transpose of ``_scan``: ``de`` gains R dS', entering slots gain D dS' - k~^T de / c."""
    sizes = [n * heads for n in layout.active]
    flat = d_slots.view(-1, *d_slots.shape[2:])
    leaving = flat[sizes[0] :].split(sizes)
    entering = [flat[: sizes[0]], *leaving[:-1]]
    parts = [t.split(sizes) for t in (de, k_tilde.mT, decay, R)]
    for de_s, k_s, decay_s, read_s, d_out, d_in in reversed(list(zip(*parts, leaving, entering, strict=True))):
        de_s.baddbmm_(read_s, d_out)
        d_state = d_in[: len(d_out)]
        d_state.addcmul_(d_out, decay_s)
        d_state.baddbmm_(k_s, de_s, alpha=-unshift)
