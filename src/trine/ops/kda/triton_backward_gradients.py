"""Third backward kernel: every gradient of one 32-token chunk, down to the raw inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from trine.ops.kda.triton_backward_common import CHUNK, exp2, headroom, locate, product, sigmoid, triangular_sum
from trine.ops.kda.triton_backward_prepare import load_beta


@triton.jit(do_not_specialize=["tokens", "sequences"])
def gradient_kernel(
    q,
    k,
    v,
    gate,
    beta,
    d_out,
    A_log,
    dt_bias,
    cu_seqlens,
    a_in,
    norm_in,
    states,
    d_states,
    values,
    d_values,
    dq,
    dk,
    dv,
    dgate,
    dbeta,
    bias_parts,
    rate_parts,
    tokens,
    sequences,
    scale,
    lower_bound,
    decay_scale,
    anchor,
    anchor_down,
    beta_max,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    BK: tl.constexpr,
    DT: tl.constexpr,
    QK_NORM: tl.constexpr,
    BETA_LOGIT: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    SEARCH: tl.constexpr,
    FAST: tl.constexpr,
):
    """dq, dk ``[tokens, HV, K]``, dv, dgate, dbeta, and this chunk's share of the gradients of dt_bias and A_log.

    One program a (slot, value head). With U = A diag(beta) transposed applied to the values' gradient, everything is

        dV = U,  dP = s tril(dO Vn^T),  dM = -tril(U Vn^T)                    (strictly lower; i = j apart)
        reader of q:  a = s exp(G) (dO S^T) + E (dP kB)
        reader of k:  b = -exp(G) (U S^T) + E (dM kB)
        written key:  c = exp(G_end - G) (Vn dS^T) + 1/E (dP^T qA + dM^T kA)
        dq = a + s dP_ii k,  dk = b + c + s dP_ii q,  beta dbeta = U.v + k.b
        dg = sum from here on of (q a + k b - k c)  +  exp(G_end) rowsum(S dS) + sum (k exp(G_end - G) (Vn dS^T))

    with E = 2^(G + anchor), qA = q E, kA = k E, kB = k / E (adjoint of the chunk form of arXiv 2510.26692). In dg each pair
    (reader i, writer j) appears once with either sign, so both sides use the same rounded factors: unequal ones leave a
    residue that the sum over later tokens collects. dP and dM are scaled into [128, 256) by an exact power of two: beside
    factors of 2^-115 a gradient of 1e-6 would vanish.
    """
    pid = tl.program_id(0)
    head = pid % HV
    slot = pid // HV
    n, first, rows = locate(cu_seqlens, slot, tokens, sequences, PACKED, SEARCH)
    if rows <= 0:
        return
    i = tl.arange(0, CHUNK)
    exists = i < rows
    token = first + i
    at = pid.to(tl.int64)
    key_row = (token * (HV // GROUP) + head // GROUP) * K
    gate_row = (token * HV + head) * K
    value_row = (token * HV + head) * V
    e = tl.arange(0, VP)
    value_there = exists[:, None] & (e < V)[None, :]
    if PACKED:
        if n == sequences:  # tokens that no sequence owns
            for block in tl.static_range(KP // BK):
                d = block * BK + tl.arange(0, BK)
                there = exists[:, None] & (d < K)[None, :]
                nothing = tl.zeros([CHUNK, BK], tl.float32)
                tl.store(dq + gate_row[:, None] + d[None, :], nothing, mask=there)
                tl.store(dk + gate_row[:, None] + d[None, :], nothing, mask=there)
                tl.store(dgate + gate_row[:, None] + d[None, :], nothing, mask=there)
                tl.store(bias_parts + at * KP + d, tl.zeros([BK], tl.float32))
            tl.store(dv + value_row[:, None] + e[None, :], tl.zeros([CHUNK, VP], tl.float32), mask=value_there)
            tl.store(dbeta + token * HV + head, tl.zeros([CHUNK], tl.float32), mask=exists)
            tl.store(rate_parts + at, 0.0)
            return

    lower = i[:, None] >= i[None, :]
    strict = i[:, None] > i[None, :]
    b, beta_slope = load_beta(beta, token * HV + head, exists, beta_max, BETA_LOGIT, FAST)
    rate = tl.exp(tl.load(A_log + head)) if HAS_A else 1.0
    if QK_NORM:
        rq = tl.load(norm_in + at * (2 * CHUNK) + i)
        rk = tl.load(norm_in + at * (2 * CHUNK) + CHUNK + i)

    a = tl.load(a_in + at * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :])
    value_at = at * (VP * CHUNK) + e[:, None] * CHUNK + i[None, :]
    d_value = tl.trans(tl.load(d_values + value_at))
    u = product(tl.trans(a), d_value, tl.zeros([CHUNK, VP], tl.float32), DT)
    tl.store(dv + value_row[:, None] + e[None, :], u, mask=value_there)
    v_tile = tl.load(v + value_row[:, None] + e[None, :], mask=value_there, other=0.0).to(tl.float32)
    beta_sum = tl.sum(u * v_tile, 1)
    u = u.to(DT)
    o_tile = tl.load(d_out + value_row[:, None] + e[None, :], mask=value_there, other=0.0).to(DT)
    new = tl.load(values + value_at)
    dp = product(o_tile, new, tl.zeros([CHUNK, CHUNK], tl.float32), DT) * scale
    dm = product(u, new, tl.zeros([CHUNK, CHUNK], tl.float32), DT)
    own = tl.sum(tl.where(i[:, None] == i[None, :], dp, 0.0), 1)
    dp = tl.where(strict, dp, 0.0)
    dm = tl.where(strict, -dm, 0.0)
    up, down = headroom(tl.max(tl.max(tl.maximum(tl.abs(dp), tl.abs(dm)), 1), 0))
    dp = (dp * up).to(DT)
    dm = (dm * up).to(DT)
    new = tl.trans(new)

    rate_sum = tl.zeros([CHUNK], tl.float32)
    q_sum = tl.zeros([CHUNK], tl.float32)
    k_sum = tl.zeros([CHUNK], tl.float32)
    q_grads = ()
    k_grads = ()
    for block in tl.static_range(KP // BK):
        d = block * BK + tl.arange(0, BK)
        there = exists[:, None] & (d < K)[None, :]
        x = tl.load(gate + gate_row[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(dt_bias + head * K + d, mask=d < K, other=0.0)[None, :]
        s = sigmoid(rate * x, FAST)
        g = tl.where(there, decay_scale * s, 0.0)
        total = tl.sum(g, 0)
        summed = triangular_sum(lower, g, tl.zeros([CHUNK, BK], tl.float32) + anchor, DT)
        rise = exp2(summed, FAST)
        fall = exp2(-summed, FAST)
        q_tile = tl.load(q + key_row[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
        k_tile = tl.load(k + key_row[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
        if QK_NORM:
            q_tile *= rq[:, None]
            k_tile *= rk[:, None]
        q_read = (q_tile * rise).to(DT)
        k_read = (k_tile * rise).to(DT)
        k_write = (k_tile * fall).to(DT)
        state_at = at * (VP * KP) + e[:, None] * KP + d[None, :]
        state = tl.load(states + state_at)
        d_state = tl.load(d_states + state_at)
        carried = exp2(total, FAST) * tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 0)
        zero = tl.zeros([CHUNK, BK], tl.float32)
        lift = rise * anchor_down
        out_q = product(o_tile, state, zero, DT) * (lift * scale)
        out_k = -product(u, state, zero, DT) * lift
        out_w = product(new, d_state, zero, DT) * (fall * exp2(total + anchor, FAST)[None, :])
        in_q = product(dp, k_write, zero, DT)
        in_k = product(dm, k_write, zero, DT)
        in_w = product(tl.trans(dm), k_read, product(tl.trans(dp), q_read, zero, DT), DT)
        grad_q = out_q + in_q * rise * down + own[:, None] * k_tile
        grad_b = out_k + in_k * rise * down
        grad_k = grad_b + out_w + in_w * fall * down + own[:, None] * q_tile
        beta_sum += tl.sum(k_tile * grad_b, 1)
        written = k_tile * out_w
        inside = q_read.to(tl.float32) * in_q + k_read.to(tl.float32) * in_k - k_write.to(tl.float32) * in_w
        grad_g = inside * down + q_tile * out_q + k_tile * out_k - written
        last = carried + tl.sum(written, 0)
        grad_g = triangular_sum(tl.trans(lower), grad_g, zero + last[None, :], DT)
        grad_x = grad_g * s * (1.0 - s) * (lower_bound * rate)
        grad_x = tl.where(there, grad_x, 0.0)
        tl.store(dgate + gate_row[:, None] + d[None, :], grad_x, mask=there)
        if HAS_BIAS:
            tl.store(bias_parts + at * KP + d, tl.sum(grad_x, 0))
        if HAS_A:
            rate_sum += tl.sum(grad_x * x, 1)
        if QK_NORM:
            q_sum += tl.sum(q_tile * grad_q, 1)
            k_sum += tl.sum(k_tile * grad_k, 1)
            q_grads = q_grads + (grad_q,)  # noqa: RUF005  (the compiler knows no unpacking)
            k_grads = k_grads + (grad_k,)  # noqa: RUF005
        else:
            tl.store(dq + gate_row[:, None] + d[None, :], grad_q, mask=there)
            tl.store(dk + gate_row[:, None] + d[None, :], grad_k, mask=there)

    tl.store(dbeta + token * HV + head, beta_sum * beta_slope if BETA_LOGIT else beta_sum / b, mask=exists)
    if HAS_A:
        tl.store(rate_parts + at, tl.sum(rate_sum, 0))
    if QK_NORM:
        for block in tl.static_range(KP // BK):
            d = block * BK + tl.arange(0, BK)
            there = exists[:, None] & (d < K)[None, :]
            q_tile = tl.load(q + key_row[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
            k_tile = tl.load(k + key_row[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
            grad_q = rq[:, None] * (q_grads[block] - q_tile * (rq * q_sum)[:, None])
            grad_k = rk[:, None] * (k_grads[block] - k_tile * (rk * k_sum)[:, None])
            tl.store(dq + gate_row[:, None] + d[None, :], grad_q, mask=there)
            tl.store(dk + gate_row[:, None] + d[None, :], grad_k, mask=there)
