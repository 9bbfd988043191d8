# mypy: disable-error-code="no-untyped-def,assignment"
"""Third backward kernel: every gradient of one 32-token chunk, down to the raw inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from trine.ops.kda.triton_backward_common import CHUNK, exp2, headroom, locate, product, sigmoid, spread, triangular_sum
from trine.ops.kda.triton_backward_prepare import load_beta


@triton.jit
def gradient_kernel(
    q,
    k,
    v,
    gate,
    beta,
    d_out,
    out,
    A_log,
    dt_bias,
    cu_seqlens,
    norm_in,
    states,
    d_states,
    values,
    dv,
    dq,
    dk,
    dgate,
    scratch,
    beta_parts,
    bias_parts,
    rate_parts,
    tokens,
    sequences,
    heads,
    group,
    key_blocks,
    value_blocks,
    top,
    scale,
    lower_bound,
    decay_scale,
    anchor,
    anchor_down,
    beta_max,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DT: tl.constexpr,
    QK_NORM: tl.constexpr,
    BETA_LOGIT: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """dq, dk ``[tokens, heads, K]``, dv, dgate, dbeta, and this chunk's share of the gradients of dt_bias and A_log.

    One program a (slot, value head). With U = A diag(beta) transposed applied to the values' gradient, everything is

        dV = U,  dP = tril(dO Vn^T),  dM = -tril(U Vn^T)                      (strictly lower; i = j apart)
        reader of q:  a = exp(G) (dO S^T) + E (dP kB)
        reader of k:  b = -exp(G) (U S^T) + E (dM kB)
        written key:  c = exp(G_end - G) (Vn dS^T) + 1/E (dP^T qA + dM^T kA)
        dq = a + dP_ii k,  dk = b + c + dP_ii q,  beta dbeta = U.v + k.b
        dg = sum from here on of (q a + k b - k c)  +  exp(G_end) rowsum(S dS) + sum (k exp(G_end - G) (Vn dS^T))

    for q times the output's scale. The L2 norms need q.dq = output.dO and k.dk = 2 U.Vn / beta - U.v, which no channel
    block has to wait for.

    with E = 2^(G + anchor), qA = q E, kA = k E, kB = k / E (adjoint of the chunk form of arXiv 2510.26692). In dg each pair
    (reader i, writer j) appears once with either sign, so both sides use the same rounded factors: unequal ones leave a
    residue that the sum over later tokens collects. dP and dM are scaled towards 2^top by an exact power of two: beside
    factors of 2^-115 a gradient of 1e-6 would vanish.
    """
    pid = tl.program_id(0)
    block = pid % key_blocks
    unit = pid // key_blocks
    head = unit % heads
    slot = unit // heads
    n, first, rows = locate(cu_seqlens, slot, tokens, sequences, PACKED)
    i = tl.arange(0, CHUNK)
    exists = i < rows
    token = first + i
    at = unit.to(tl.int64)
    key_row = (token * (heads // group) + head // group) * K
    gate_row = (token * heads + head) * K
    value_row = (token * heads + head) * V
    d = block * BK + tl.arange(0, BK)
    if PACKED:
        if (rows <= 0) | (n == sequences):  # an unused slot, or tokens that no sequence owns
            there = exists[:, None] & (d < K)[None, :]
            zero = tl.zeros([CHUNK, BK], tl.float32)
            tl.store(dq + gate_row[:, None] + d[None, :], zero, mask=there)
            tl.store(dk + gate_row[:, None] + d[None, :], zero, mask=there)
            tl.store(dgate + gate_row[:, None] + d[None, :], zero, mask=there)
            e = tl.arange(0, VP)
            there = exists[:, None] & (e < V)[None, :]
            tl.store(dv + value_row[:, None] + e[None, :], tl.zeros([CHUNK, VP], tl.float32), mask=there)
            tl.store(beta_parts + pid.to(tl.int64) * CHUNK + i, tl.zeros([CHUNK], tl.float32))
            if HAS_BIAS:
                tl.store(bias_parts + at * KP + d, tl.zeros([BK], tl.float32))
            if HAS_A:
                tl.store(rate_parts + pid, 0.0)
            return

    lower = i[:, None] >= i[None, :]
    strict = i[:, None] > i[None, :]
    diagonal = i[:, None] == i[None, :]

    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    dm = tl.zeros([CHUNK, CHUNK], tl.float32)
    out_q = tl.zeros([CHUNK, BK], tl.float32)
    out_k = tl.zeros([CHUNK, BK], tl.float32)
    out_w = tl.zeros([CHUNK, BK], tl.float32)
    carried = tl.zeros([BV, BK], tl.float32)
    q_tile = tl.zeros([CHUNK, BV], tl.float32)
    v_tile = tl.zeros([CHUNK, BV], tl.float32)
    state_at = at * (VP * KP) + tl.arange(0, BV)[:, None] * KP + d[None, :]
    value_at = at * (VP * CHUNK) + tl.arange(0, BV)[:, None] * CHUNK + i[None, :]
    there = exists[:, None] & (d < K)[None, :]
    x_raw = tl.load(gate + gate_row[:, None] + d[None, :], mask=there, other=0.0)
    q_raw = tl.load(q + key_row[:, None] + d[None, :], mask=there, other=0.0)
    k_raw = tl.load(k + key_row[:, None] + d[None, :], mask=there, other=0.0)
    for inner in tl.range(0, value_blocks):
        e = inner * BV + tl.arange(0, BV)
        value_there = exists[:, None] & (e < V)[None, :]
        state = tl.load(states + state_at + inner * (BV * KP))
        d_state = tl.load(d_states + state_at + inner * (BV * KP))
        o_tile = tl.load(d_out + value_row[:, None] + e[None, :], mask=value_there, other=0.0).to(DT)
        u = tl.load(dv + value_row[:, None] + e[None, :], mask=value_there, other=0.0).to(DT)
        new = tl.load(values + value_at + inner * (BV * CHUNK))
        v_tile += u.to(tl.float32) * tl.load(v + value_row[:, None] + e[None, :], mask=value_there, other=0.0).to(
            tl.float32
        )
        if QK_NORM:
            output = tl.load(out + value_row[:, None] + e[None, :], mask=value_there, other=0.0).to(tl.float32)
            q_tile += o_tile.to(tl.float32) * output
        carried += state.to(tl.float32) * d_state.to(tl.float32)
        dp = product(o_tile, new, dp, DT)
        dm = product(u, new, dm, DT)
        out_q = product(o_tile, state, out_q, DT)
        out_k = product(u, state, out_k, DT)
        out_w = product(tl.trans(new), d_state, out_w, DT)

    # Row and channel sums pass through memory: a loaded vector takes whatever layout its readers have.
    keep = scratch + pid.to(tl.int64) * (4 * CHUNK + BK)
    tl.store(keep + i[:, None] + i[None, :] * 0, dp, mask=diagonal)
    tl.store(keep + CHUNK + i[:, None] + i[None, :] * 0, dm, mask=diagonal)
    tl.store(keep + 2 * CHUNK + i, tl.sum(v_tile, 1))
    tl.store(keep + 3 * CHUNK + i, tl.sum(q_tile, 1))
    tl.store(keep + 4 * CHUNK + tl.arange(0, BK), tl.sum(carried, 0))
    dp = tl.where(strict, dp, 0.0)
    dm = tl.where(strict, dm, 0.0)
    up, down = headroom(dp, dm, top)
    dp = (dp * up).to(DT)
    dm = (dm * -up).to(DT)
    tl.debug_barrier()
    own = tl.load(keep + i)
    beta_sum = tl.load(keep + 2 * CHUNK + i)
    if QK_NORM:
        rq = tl.load(norm_in + at * (2 * CHUNK) + i) * scale
        rk = tl.load(norm_in + at * (2 * CHUNK) + CHUNK + i)
        q_sum = tl.load(keep + 3 * CHUNK + i) / (scale * scale)
        b, _ = load_beta(beta, token * heads + head, exists, beta_max, BETA_LOGIT, FAST)
        k_sum = 2.0 * tl.load(keep + CHUNK + i) / tl.where(exists, b, 1.0) - beta_sum

    zero = tl.zeros([CHUNK, BK], tl.float32)
    x = zero
    if HAS_BIAS:
        x += tl.load(dt_bias + head * K + d, mask=d < K, other=0.0)[None, :]
    x = spread(x_raw, diagonal, x, DT)
    rate = tl.exp(tl.load(A_log + head)) if HAS_A else 1.0
    s = sigmoid(rate * x, FAST)
    g = tl.where(exists[:, None], decay_scale * s, 0.0)
    total = tl.sum(g, 0)
    summed = triangular_sum(lower, g, zero + anchor, DT)
    rise = exp2(summed, FAST)
    fall = exp2(-summed, FAST)
    q_tile = spread(q_raw, diagonal, zero, DT)
    k_tile = spread(k_raw, diagonal, zero, DT)
    if QK_NORM:
        q_tile *= rq[:, None]
        k_tile *= rk[:, None]
    else:
        q_tile *= scale
    q_read = (q_tile * rise).to(DT)
    k_read = (k_tile * rise).to(DT)
    k_write = (k_tile * fall).to(DT)
    lift = rise * anchor_down

    inside = product(dp, k_write, zero, DT)
    pairs = q_read.to(tl.float32) * inside
    out_q *= lift
    grad_g = q_tile * out_q
    grad_q = inside * rise * down + out_q + own[:, None] * k_tile
    if QK_NORM:
        grad_q = rq[:, None] * (grad_q - q_tile * q_sum[:, None])
    else:
        grad_q *= scale
    tl.store(dq + gate_row[:, None] + d[None, :], grad_q, mask=there)

    inside = product(dm, k_write, zero, DT)
    pairs += k_read.to(tl.float32) * inside
    out_k *= lift
    grad_g -= k_tile * out_k
    grad_k = inside * rise * down - out_k
    share = tl.sum(k_tile * grad_k, 1)
    if block == 0:
        share += beta_sum
    tl.store(beta_parts + pid.to(tl.int64) * CHUNK + i, share)

    inside = product(tl.trans(dm), k_read, product(tl.trans(dp), q_read, zero, DT), DT)
    pairs -= k_write.to(tl.float32) * inside
    out_w *= fall * exp2(total + anchor, FAST)[None, :]
    written = k_tile * out_w
    grad_g = pairs * down + (grad_g - written)
    grad_k += inside * fall * down + out_w + own[:, None] * q_tile
    if QK_NORM:
        grad_k = rk[:, None] * (grad_k - k_tile * k_sum[:, None])
    tl.store(dk + gate_row[:, None] + d[None, :], grad_k, mask=there)

    last = tl.load(keep + 4 * CHUNK + tl.arange(0, BK)) * exp2(total, FAST) + tl.sum(written, 0)
    grad_g = triangular_sum(tl.trans(lower), grad_g, zero + last[None, :], DT)
    grad_x = tl.where(exists[:, None], grad_g * ((s - s * s) * (lower_bound * rate)), 0.0)
    tl.store(dgate + gate_row[:, None] + d[None, :], grad_x, mask=there)
    if HAS_BIAS:
        tl.store(bias_parts + at * KP + d, tl.sum(grad_x, 0))
    if HAS_A:
        tl.store(rate_parts + pid, tl.sum(tl.reshape(grad_x * x, [CHUNK * BK]), 0))


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
        n, first, rows = locate(cu_seqlens, pid // heads, tokens, sequences, PACKED)
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
                bias_sum += tl.sum(
                    tl.load(bias_parts + at[:, None] * KP + d[None, :], mask=there[:, None], other=0.0), 0
                )
            if HAS_A:
                for block in tl.static_range(BLOCKS):
                    rate_sum += tl.load(rate_parts + at * BLOCKS + block, mask=there, other=0.0)
        if HAS_BIAS:
            tl.store(d_bias + head * K + d, bias_sum, mask=d < K)
        if HAS_A:
            if group == 0:
                tl.store(d_rate + head, tl.sum(rate_sum, 0))
