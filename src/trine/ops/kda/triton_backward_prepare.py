# mypy: disable-error-code="no-untyped-def,assignment"
"""First backward kernel: the factors of one 32-token chunk from raw inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from trine.ops.kda.triton_backward_common import (
    CHUNK,
    exp2,
    load_beta,
    locate,
    logistic,
    product,
    spread,
    triangular_sum,
)


@triton.jit
def unit_lower_inverse(m, scratch, DT: tl.constexpr):
    """Inverse of I + m for strictly lower triangular m ``[32, 32]`` fp32.

    Four 8x8 diagonal blocks by forward substitution, a lane a column, on values read back from ``scratch`` (512 floats
    owned by this program); then two levels of block merges X <- X - X (m_off X). Never a product of powers of m, whose
    intermediate values explode for parallel keys.
    """
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    near = (i // 8) == (j // 8)
    place = (i // 8) * 64 + (i % 8) * 8 + (j % 8)
    tl.store(scratch + place, m, mask=near)
    tl.debug_barrier()
    lane = tl.arange(0, 32)
    block = scratch + (lane // 8) * 64
    c = lane % 8
    x0 = tl.where(c == 0, 1.0, 0.0)
    x1 = tl.where(c == 1, 1.0, 0.0) - tl.load(block + 8) * x0
    x2 = tl.where(c == 2, 1.0, 0.0) - tl.load(block + 16) * x0 - tl.load(block + 17) * x1
    x3 = tl.where(c == 3, 1.0, 0.0) - tl.load(block + 24) * x0 - tl.load(block + 25) * x1 - tl.load(block + 26) * x2
    x4 = tl.where(c == 4, 1.0, 0.0) - tl.load(block + 32) * x0 - tl.load(block + 33) * x1 - tl.load(block + 34) * x2
    x4 -= tl.load(block + 35) * x3
    x5 = tl.where(c == 5, 1.0, 0.0) - tl.load(block + 40) * x0 - tl.load(block + 41) * x1 - tl.load(block + 42) * x2
    x5 = x5 - tl.load(block + 43) * x3 - tl.load(block + 44) * x4
    x6 = tl.where(c == 6, 1.0, 0.0) - tl.load(block + 48) * x0 - tl.load(block + 49) * x1 - tl.load(block + 50) * x2
    x6 = x6 - tl.load(block + 51) * x3 - tl.load(block + 52) * x4 - tl.load(block + 53) * x5
    x7 = tl.where(c == 7, 1.0, 0.0) - tl.load(block + 56) * x0 - tl.load(block + 57) * x1 - tl.load(block + 58) * x2
    x7 = x7 - tl.load(block + 59) * x3 - tl.load(block + 60) * x4 - tl.load(block + 61) * x5 - tl.load(block + 62) * x6
    out = block + 256 + c
    tl.store(out, x0)
    tl.store(out + 8, x1)
    tl.store(out + 16, x2)
    tl.store(out + 24, x3)
    tl.store(out + 32, x4)
    tl.store(out + 40, x5)
    tl.store(out + 48, x6)
    tl.store(out + 56, x7)
    tl.debug_barrier()
    x = tl.load(scratch + 256 + place, mask=near, other=0.0)
    precision: tl.constexpr = "tf32x3" if tl.float32 == DT else "tf32"
    off = tl.where(((i // 16) == (j // 16)) & ((i // 8) != (j // 8)), m, 0.0)
    x -= tl.dot(x, tl.dot(off, x, input_precision=precision), input_precision=precision)
    off = tl.where((i // 16) != (j // 16), m, 0.0)
    x -= tl.dot(x, tl.dot(off, x, input_precision=precision), input_precision=precision)
    return x


@triton.jit
def prepare_kernel(
    q,
    k,
    gate,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    w_out,
    q_out,
    k_out,
    a_out,
    p_out,
    decay_out,
    norm_out,
    scratch,
    tokens,
    sequences,
    heads,
    group,
    scale,
    decay_scale,
    anchor,
    anchor_down,
    beta_max,
    K: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    SCRATCH: tl.constexpr,
    DT: tl.constexpr,
    QK_NORM: tl.constexpr,
    BETA_LOGIT: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """W, Q+, K- ``[slot, head, 32, KP]``, A diag(beta), P ``[slot, head, 32, 32]``, decay and row norms of a chunk.

    One program a (slot, value head). ``scratch`` is w_out seen as fp32, SCRATCH numbers a program: the inverse works in the
    memory that W takes last.
    """
    pid = tl.program_id(0)
    head = pid % heads
    slot = pid // heads
    _, first, rows = locate(cu_seqlens, slot, tokens, sequences, PACKED)
    if rows <= 0:
        return
    i = tl.arange(0, CHUNK)
    exists = i < rows
    token = first + i
    at = pid.to(tl.int64)
    key_row = (token * (heads // group) + head // group) * K
    gate_row = (token * heads + head) * K
    b, _ = load_beta(beta, token * heads + head, exists, beta_max, BETA_LOGIT, FAST)
    rate = tl.exp(tl.load(A_log + head)) if HAS_A else 1.0

    if QK_NORM:
        qq = tl.zeros([CHUNK], tl.float32)
        kk = tl.zeros([CHUNK], tl.float32)
        for block in tl.static_range(KP // BK):
            d = block * BK + tl.arange(0, BK)
            there = exists[:, None] & (d < K)[None, :]
            q_raw = tl.load(q + key_row[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
            k_raw = tl.load(k + key_row[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
            qq += tl.sum(q_raw * q_raw, 1)
            kk += tl.sum(k_raw * k_raw, 1)
        rq = 1.0 / tl.sqrt(qq + 1e-6)
        rk = 1.0 / tl.sqrt(kk + 1e-6)
        tl.store(norm_out + at * (2 * CHUNK) + i, rq)
        tl.store(norm_out + at * (2 * CHUNK) + CHUNK + i, rk)
        rq *= scale
    else:
        rq = tl.zeros([CHUNK], tl.float32) + scale
        rk = tl.zeros([CHUNK], tl.float32) + 1.0

    lower = i[:, None] >= i[None, :]
    strict = i[:, None] > i[None, :]
    tile = at * (CHUNK * KP) + i[:, None] * KP
    p = tl.zeros([CHUNK, CHUNK], tl.float32)
    m = tl.zeros([CHUNK, CHUNK], tl.float32)
    diagonal = i[:, None] == i[None, :]
    zero = tl.zeros([CHUNK, BK], tl.float32)
    readers = ()
    for block in tl.static_range(KP // BK):
        d = block * BK + tl.arange(0, BK)
        there = exists[:, None] & (d < K)[None, :]
        x = zero
        if HAS_BIAS:
            x += tl.load(dt_bias + head * K + d, mask=d < K, other=0.0)[None, :]
        x = spread(tl.load(gate + gate_row[:, None] + d[None, :], mask=there, other=0.0), diagonal, x, DT)
        g = tl.where(exists[:, None], decay_scale * logistic(x * (rate * -1.4426950408889634), FAST), 0.0)
        total = tl.sum(g, 0)
        tl.store(decay_out + at * KP + d, exp2(total, FAST))
        summed = triangular_sum(lower, g, zero + anchor, DT)
        rise = exp2(summed, FAST)
        q_read = tl.load(q + key_row[:, None] + d[None, :], mask=there, other=0.0)
        q_read = spread(q_read, diagonal, zero, DT) * rq[:, None] * rise
        tl.store(q_out + tile + d[None, :], (q_read * anchor_down).to(DT))
        k_tile = tl.load(k + key_row[:, None] + d[None, :], mask=there, other=0.0)
        k_tile = spread(k_tile, diagonal, zero, DT) * rk[:, None]
        k_write = k_tile * exp2(-summed, FAST)
        tl.store(k_out + tile + d[None, :], (k_write * exp2(total + anchor, FAST)[None, :]).to(DT))
        writer = tl.trans(k_write.to(DT))
        reader = (k_tile * rise).to(DT)
        p = product(q_read.to(DT), writer, p, DT)
        m = product(reader, writer, m, DT)
        readers = readers + (reader,)  # noqa: RUF005  (the compiler knows no unpacking)

    square = at * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
    tl.store(p_out + square, tl.where(lower, p, 0.0).to(DT))
    m = tl.where(strict, b[:, None] * m, 0.0)
    a = unit_lower_inverse(m, scratch + at * SCRATCH, DT)
    a = (a * b[None, :]).to(DT)
    tl.store(a_out + square, a)
    for block in tl.static_range(KP // BK):
        d = block * BK + tl.arange(0, BK)
        w = product(a, readers[block], tl.zeros([CHUNK, BK], tl.float32), DT)
        tl.store(w_out + tile + d[None, :], (w * anchor_down).to(DT))
