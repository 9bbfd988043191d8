# mypy: disable-error-code="no-untyped-def,assignment"
"""Backward kernels on the value side: dv, gradients of 32x32 matrices, row sums; and the last ordered sums."""

from __future__ import annotations

import triton
import triton.language as tl

from trine.ops.kda.triton_backward_common import CHUNK, headroom, load_beta, locate, product


@triton.jit
def pair_kernel(
    v,
    beta,
    d_out,
    out,
    cu_seqlens,
    a_in,
    a_rest,
    values,
    d_values,
    dv,
    dp_out,
    dm_out,
    rows_out,
    tokens,
    sequences,
    heads,
    value_blocks,
    top,
    scale,
    beta_max,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    DT: tl.constexpr,
    BETA_LOGIT: tl.constexpr,
    PACKED: tl.constexpr,
    FINE: tl.constexpr,
    FAST: tl.constexpr,
):
    """dP = tril(dO Vn^T) and dM = -tril(U Vn^T), strictly lower, ``[slot, head, 32, 32]``, and sums of a chunk's rows.

    Both are scaled towards 2^top by one exact power of two: beside factors of 2^-115 a gradient of 1e-6 would vanish.
    ``rows_out`` is ``[slot, head, 5, 32]`` fp32: the diagonal of dO Vn^T, q.dq = output.dO, k.dk = 2 U.Vn / beta - U.v,
    U.v, and the power that undoes the scaling. U, which is dv, is A diag(beta) transposed applied to the gradient of
    Vn; FINE adds what rounding left of A, ``a_rest``. One program a (slot, head).
    """
    unit = tl.program_id(0)
    head = unit % heads
    n, _, first, rows = locate(cu_seqlens, unit // heads, tokens, sequences, CHUNK, PACKED)
    i = tl.arange(0, CHUNK)
    exists = i < rows
    token = first + i
    at = unit.to(tl.int64)
    value_row = (token * heads + head) * V
    if PACKED:  # noqa: SIM102  (a compile-time condition around a run-time one)
        if (rows <= 0) | (n == sequences):  # an unused slot, or tokens that no sequence owns
            e = tl.arange(0, VP)
            there = exists[:, None] & (e < V)[None, :]
            tl.store(dv + value_row[:, None] + e[None, :], tl.zeros([CHUNK, VP], tl.float32), mask=there)
            return
    strict = i[:, None] > i[None, :]
    diagonal = i[:, None] == i[None, :]
    square = at * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
    turned = tl.trans(tl.load(a_in + square))
    if FINE:
        turned_rest = tl.trans(tl.load(a_rest + square))
    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    dm = tl.zeros([CHUNK, CHUNK], tl.float32)
    read = tl.zeros([CHUNK], tl.float32)
    u_v = tl.zeros([CHUNK], tl.float32)
    e = tl.arange(0, BV)
    base = (first * heads + head) * V
    row_at = (i * (heads * V))[:, None] + e[None, :]
    value_at = at * (VP * CHUNK) + e[:, None] * CHUNK + i[None, :]
    for block in tl.range(0, value_blocks):
        there = exists[:, None] if V == VP else exists[:, None] & (block * BV + e < V)[None, :]
        shift = base + block * BV
        o_tile = tl.load(d_out + shift + row_at, mask=there, other=0.0).to(DT)
        d_new = tl.load(d_values + value_at + block * (BV * CHUNK))
        new = tl.load(values + value_at + block * (BV * CHUNK))
        v_tile = tl.load(v + shift + row_at, mask=there, other=0.0).to(tl.float32)
        output = tl.load(out + shift + row_at, mask=there, other=0.0).to(tl.float32)
        u = product(turned, tl.trans(d_new), tl.zeros([CHUNK, BV], tl.float32), DT)
        if FINE:
            u = product(turned_rest, tl.trans(d_new), u, DT)
        u *= scale
        tl.store(dv + shift + row_at, u, mask=there)
        read += tl.sum(o_tile.to(tl.float32) * output, 1)
        u_v += tl.sum(u * v_tile, 1)
        dp = product(o_tile, new, dp, DT)
        dm = product(u.to(DT), new, dm, DT)
    b, _ = load_beta(beta, token * heads + head, exists, beta_max, BETA_LOGIT, FAST)
    keep = rows_out + at * (5 * CHUNK) + i
    tl.store(keep, tl.sum(tl.where(diagonal, dp, 0.0), 1))
    tl.store(keep + CHUNK, read / (scale * scale))
    tl.store(keep + 2 * CHUNK, 2.0 * tl.sum(tl.where(diagonal, dm, 0.0), 1) / tl.where(exists, b, 1.0) - u_v)
    tl.store(keep + 3 * CHUNK, u_v)
    dp = tl.where(strict, dp, 0.0)
    dm = tl.where(strict, dm, 0.0)
    up, down = headroom(dp, dm, top)
    tl.store(keep + 4 * CHUNK, tl.zeros([CHUNK], tl.float32) + down)
    tl.store(dp_out + square, (dp * up).to(DT))
    tl.store(dm_out + square, (dm * -up).to(DT))


@triton.jit
def finish_kernel(
    beta,
    cu_seqlens,
    beta_parts,
    bias_parts,
    rate_parts,
    dbeta,
    d_rate,
    d_bias,
    tokens,
    sequences,
    heads,
    slots,
    beta_max,
    K: tl.constexpr,
    KP: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    BETA_LOGIT: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """dbeta from its shares and, in later programs, dt_bias and A_log: ordered sums over all chunks, no atomics.

    Programs: a (slot, head) each for dbeta, then a (head, 16 channels) each.
    """
    pid = tl.program_id(0)
    head = pid % heads
    if pid < slots * heads:
        _, _, first, rows = locate(cu_seqlens, pid // heads, tokens, sequences, CHUNK, PACKED)
        i = tl.arange(0, CHUNK)
        exists = i < rows
        share = tl.zeros([CHUNK], tl.float32)
        for block in tl.static_range(BLOCKS):
            share += tl.load(beta_parts + (pid.to(tl.int64) * BLOCKS + block) * CHUNK + i)
        at = (first + i) * heads + head
        b, slope = load_beta(beta, at, exists, beta_max, BETA_LOGIT, FAST)
        tl.store(dbeta + at, share * slope if BETA_LOGIT else share / tl.where(exists, b, 1.0), mask=exists)
    else:
        group = (pid - slots * heads) // heads
        d = group * 16 + tl.arange(0, 16)
        bias_sum = tl.zeros([16], tl.float32)
        rate_sum = tl.zeros([TILE], tl.float32)
        for begin in tl.range(0, slots, TILE):
            at = (begin + tl.arange(0, TILE)).to(tl.int64) * heads + head
            there = begin + tl.arange(0, TILE) < slots
            if HAS_BIAS:
                parts = tl.load(bias_parts + at[:, None] * KP + d[None, :], mask=there[:, None], other=0.0)
                bias_sum += tl.sum(parts, 0)
            if HAS_A:
                for block in tl.static_range(BLOCKS):
                    rate_sum += tl.load(rate_parts + at * BLOCKS + block, mask=there, other=0.0)
        if HAS_BIAS:
            tl.store(d_bias + head * K + d, bias_sum, mask=d < K)
        if HAS_A:  # noqa: SIM102  (a compile-time condition around a run-time one)
            if group == 0:
                tl.store(d_rate + head, tl.sum(rate_sum, 0))
