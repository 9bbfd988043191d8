# mypy: disable-error-code="no-untyped-def,assignment"
"""Main backward kernel: gradients of q, k, gate (and shares of beta, dt_bias, A_log) of one 32-token chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from trine.ops.kda.triton_backward_common import (
    CHUNK,
    exp2,
    fetch_ahead,
    locate,
    logistic,
    logistic_and_slope,
    rounded_product,
    token_sum,
    turn,
)


@triton.jit
def gradient_kernel(
    q,
    k,
    gate,
    d_out,
    A_log,
    dt_bias,
    cu_seqlens,
    rows_in,
    norms,
    dp_in,
    dm_in,
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
    scale,
    lower_bound,
    decay_scale,
    anchor,
    anchor_down,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LOWEST: tl.constexpr,
    DT: tl.constexpr,
    QK_NORM: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """dq, dk, dgate ``[tokens, heads, K]`` and a chunk's shares of the gradients of beta, dt_bias and A_log.

    One program a (slot, value head, channel block). With U = dv, dP and dM from ``pair_kernel``, everything is

        reader of q:  a = exp(G) (dO S^T) + E (dP kB)
        reader of k:  b = -exp(G) (U S^T) + E (dM kB)
        written key:  c = exp(G_end - G) (Vn dS^T) + 1/E (dP^T qA + dM^T kA)
        dq = a + dP_ii k,  dk = b + c + dP_ii q,  beta dbeta = U.v + k.b
        dg = sum from here on of (q a + k b - k c)  +  exp(G_end) rowsum(S dS) + sum (k exp(G_end - G) (Vn dS^T))

    with E = 2^(G + anchor), qA = q E, kA = k E, kB = k / E and q times the output's scale (adjoint of the chunk form of
    arXiv 2510.26692). In dg each pair (reader i, writer j) appears once with either sign, so both sides use the same
    rounded factors: unequal ones leave a residue that the sum over later tokens collects. Pairs i = j do not enter dg.

    Tiles are ``[channels, tokens]``, so that 64 channels fill one warpgroup product and every factor made here is its
    register operand.
    """
    pid = tl.program_id(0)
    block = pid % key_blocks
    unit = pid // key_blocks
    head = unit % heads
    n, _, first, rows = locate(cu_seqlens, unit // heads, tokens, sequences, CHUNK, PACKED)
    i = tl.arange(0, CHUNK)
    exists = i < rows
    at = unit.to(tl.int64)
    r = tl.arange(0, BK)
    d = block * BK + r
    gate += (first * heads + head) * K
    dq += (first * heads + head) * K
    dk += (first * heads + head) * K
    dgate += (first * heads + head) * K
    q += (first * (heads // group) + head // group) * K
    k += (first * (heads // group) + head // group) * K
    row_at = (i * (heads * K))[:, None] + d[None, :]
    key_at = (i * (heads // group * K))[:, None] + d[None, :]
    there = exists[:, None] if K == KP else exists[:, None] & (d < K)[None, :]
    if PACKED:  # noqa: SIM102  (a compile-time condition around a run-time one)
        if (rows <= 0) | (n == sequences):  # an unused slot, or tokens that no sequence owns
            zero = tl.zeros([CHUNK, BK], tl.float32)
            tl.store(dq + row_at, zero, mask=there)
            tl.store(dk + row_at, zero, mask=there)
            tl.store(dgate + row_at, zero, mask=there)
            tl.store(beta_parts + pid.to(tl.int64) * CHUNK + i, tl.zeros([CHUNK], tl.float32))
            if HAS_BIAS:
                tl.store(bias_parts + at * KP + d, tl.zeros([BK], tl.float32))
            if HAS_A:
                tl.store(rate_parts + pid, 0.0)
            return

    # The pairs and the chunk's sums are read after the loop over values, where nothing else hides their latency.
    square_at = at * (CHUNK * CHUNK)
    square_bytes: tl.constexpr = CHUNK * CHUNK * dp_in.dtype.element_ty.primitive_bitwidth // 8
    fetch_ahead(dp_in + square_at, square_bytes, FAST)
    fetch_ahead(dm_in + square_at, square_bytes, FAST)
    fetch_ahead(rows_in + at * (5 * CHUNK), 512, FAST)
    fetch_ahead(rows_in + at * (5 * CHUNK) + 4 * CHUNK, 128, FAST)
    if QK_NORM:
        fetch_ahead(norms + at * (2 * CHUNK), 256, FAST)

    # A missing token's gate is so low that its sigmoid is exactly 0, which nothing has to select again.
    x_raw = tl.load(gate + row_at, mask=there, other=LOWEST)
    q_raw = tl.load(q + key_at, mask=there, other=0.0)
    k_raw = tl.load(k + key_at, mask=there, other=0.0)
    out_q = tl.zeros([BK, CHUNK], tl.float32)
    out_k = tl.zeros([BK, CHUNK], tl.float32)
    out_w = tl.zeros([BK, CHUNK], tl.float32)
    carried = tl.zeros([BK, BK], tl.float32)
    e = tl.arange(0, BV)
    d_out += (first * heads + head) * V
    dv += (first * heads + head) * V
    states += at * (VP * KP) + block * BK
    d_states += at * (VP * KP) + block * BK
    values += at * (VP * CHUNK)
    value_at = (i * (heads * V))[:, None] + e[None, :]
    state_at = e[:, None] * KP + r[None, :]
    new_at = e[:, None] * CHUNK + i[None, :]
    for inner in tl.range(0, value_blocks):
        seen = exists[:, None] if V == VP else exists[:, None] & (inner * BV + e < V)[None, :]
        state = tl.trans(tl.load(states + inner * (BV * KP) + state_at))
        d_state = tl.load(d_states + inner * (BV * KP) + state_at)
        o_tile = tl.load(d_out + inner * BV + value_at, mask=seen, other=0.0).to(DT)
        u = tl.load(dv + inner * BV + value_at, mask=seen, other=0.0).to(DT)
        new = tl.load(values + inner * (BV * CHUNK) + new_at)
        out_q = rounded_product(state, tl.trans(o_tile), out_q, DT)
        out_k = rounded_product(state, tl.trans(u), out_k, DT)
        out_w = rounded_product(tl.trans(d_state), new, out_w, DT)
        # Only the diagonal is wanted, which is no dearer than a loop.
        carried = rounded_product(state, d_state, carried, DT)

    # The channel sums S.dS pass through memory: a loaded vector takes whatever layout its readers have.
    keep = scratch + pid.to(tl.int64) * BK
    tl.store(keep + r, tl.sum(tl.where(r[:, None] == r[None, :], carried, 0.0), 1))
    tl.debug_barrier()

    row = rows_in + at * (5 * CHUNK)
    diagonal = i[:, None] == i[None, :]
    lower = i[:, None] >= i[None, :]
    upper = i[:, None] <= i[None, :]
    zero = tl.zeros([BK, CHUNK], tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias + head * K + d, mask=d < K, other=0.0)
        x = turn(x_raw, diagonal, zero + bias[:, None], DT)
    else:
        x = turn(x_raw, diagonal, zero, DT)
    rate = tl.exp(tl.load(A_log + head)) if HAS_A else 1.0
    if tl.float32 == DT:
        s, slope = logistic_and_slope(x * (rate * -1.4426950408889634), FAST)
    else:  # the difference's 1e-3 at saturated gates does not show here, and two more registers would spill
        s = logistic(x * (rate * -1.4426950408889634), FAST)
    g = decay_scale * s
    total = tl.sum(g, 1)
    summed = token_sum(g, upper, zero + anchor, DT)
    rise = exp2(summed, FAST)
    fall = exp2(-summed, FAST)
    q_tile = turn(q_raw, diagonal, zero, DT)
    k_tile = turn(k_raw, diagonal, zero, DT)
    if QK_NORM:
        norm = norms + at * (2 * CHUNK) + i
        rq = tl.load(norm) * scale
        rk = tl.load(norm + CHUNK)
        q_tile *= rq[None, :]
        k_tile *= rk[None, :]
    else:
        q_tile *= scale
    q_read = (q_tile * rise).to(DT)
    k_read = (k_tile * rise).to(DT)
    k_write = (k_tile * fall).to(DT)
    lift = rise * anchor_down
    down = tl.load(row + 4 * CHUNK)
    own = tl.load(row + i)
    square = square_at + i[:, None] * CHUNK + i[None, :]
    dp = tl.load(dp_in + square)
    dm = tl.load(dm_in + square)

    out_q *= lift
    out_k *= lift

    inside = rounded_product(k_write, tl.trans(dp), zero, DT)
    pairs = q_read.to(tl.float32) * inside
    grad_g = q_tile * out_q
    grad_q = inside * rise * down + out_q + own[None, :] * k_tile
    if QK_NORM:
        q_sum = tl.load(row + CHUNK + i)
        grad_q = rq[None, :] * (grad_q - q_tile * q_sum[None, :])
    else:
        grad_q *= scale
    tl.store(dq + row_at, tl.trans(grad_q), mask=there)

    inside = rounded_product(k_write, tl.trans(dm), zero, DT)
    pairs += k_read.to(tl.float32) * inside
    grad_g -= k_tile * out_k
    grad_k = inside * rise * down - out_k
    share = tl.sum(k_tile * grad_k, 0)
    if block == 0:
        share += tl.load(row + 3 * CHUNK + i)
    tl.store(beta_parts + pid.to(tl.int64) * CHUNK + i, share)

    inside = rounded_product(k_read, dm, rounded_product(q_read, dp, zero, DT), DT)
    out_w *= fall * (exp2(total + anchor, FAST) * scale)[:, None]  # dS comes in units of the scale
    # No token comes after the chunk's last one, so what it writes counts for no decay here: it would be added and taken
    # away. Left out it also leaves no rounding behind: where gates are saturated it is e^5 times the difference.
    written = k_tile * out_w * tl.where(i < rows - 1, 1.0, 0.0)[None, :]
    grad_g = (pairs - k_write.to(tl.float32) * inside) * down + (grad_g - written)
    own = tl.load(row + i)  # read again, like rk below, rather than kept in registers
    grad_k += inside * fall * down + out_w + own[None, :] * q_tile
    if QK_NORM:
        rk = tl.load(norm + CHUNK)
        k_sum = tl.load(row + 2 * CHUNK + i)
        grad_k = rk[None, :] * (grad_k - k_tile * k_sum[None, :])
    tl.store(dk + row_at, tl.trans(grad_k), mask=there)

    last = tl.load(keep + r) * (exp2(total, FAST) * scale) + tl.sum(written, 1)
    grad_g = token_sum(grad_g, lower, zero + last[:, None], DT)
    if tl.float32 == DT:
        grad_x = grad_g * (slope * (lower_bound * rate))
    else:
        grad_x = grad_g * ((s - s * s) * (lower_bound * rate))
    tl.store(dgate + row_at, tl.trans(grad_x), mask=there)
    if HAS_BIAS:
        bias_sum = tl.sum(grad_x, 1)
        tl.store(bias_parts + at * KP + d, bias_sum)
    if HAS_A:
        # The gate's input is turned again, without its bias, rather than kept in registers until here.
        moment = tl.sum(grad_x * turn(x_raw, diagonal, zero, DT), 1)
        if HAS_BIAS:
            moment += bias * bias_sum
        tl.store(rate_parts + pid, tl.sum(moment, 0))
