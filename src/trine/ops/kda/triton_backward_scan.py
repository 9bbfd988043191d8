# mypy: disable-error-code="no-untyped-def,assignment"
"""Second backward kernel: the two state scans of a sequence, forward and reverse, as two halves of one grid."""

from __future__ import annotations

import triton
import triton.language as tl

from trine.ops.kda.triton_backward_common import CHUNK, product, span


@triton.jit
def scan_kernel(
    v,
    d_out,
    w_in,
    q_in,
    k_in,
    a_in,
    p_in,
    decay_in,
    initial,
    d_final,
    cu_seqlens,
    states,
    d_states,
    values,
    dv,
    d_initial,
    tokens,
    sequences,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    DT: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """State entering each chunk and gradient of the state leaving it, both transposed ``[slot, head, VP, KP]``.

    Also the corrected values, transposed ``[slot, head, VP, 32]``, and dv, which is A diag(beta) transposed applied to their
    gradient. The state stays transposed so that
    it, and the corrected values, are register operands of every product on the dependent chain. The halves need nothing
    of each other: dS does not depend on S (chunk adjoint of arXiv 2510.26692 Eq. 9).
    Programs: (sequence, head, value block, direction), direction slowest.
    """
    pid = tl.program_id(0)
    blocks: tl.constexpr = VP // BV
    half = tl.num_programs(0) // 2
    reverse = pid >= half
    pid = tl.where(reverse, pid - half, pid)
    block = pid % blocks
    head = (pid // blocks) % heads
    n = pid // (blocks * heads)
    first_slot, chunks, begin, end = span(cu_seqlens, n, tokens, PACKED)
    i = tl.arange(0, CHUNK)
    key = tl.arange(0, KP)
    value = tl.arange(0, BV)
    e = block * BV + value
    tile_at = i[:, None] * KP + key[None, :]
    square_at = i[:, None] * CHUNK + i[None, :]
    state_at = e[:, None] * KP + key[None, :]
    value_at = e[:, None] * CHUNK + i[None, :]
    outer_at = (n.to(tl.int64) * heads + head) * (K * V) + key[None, :] * V + e[:, None]
    outer_there = (key < K)[None, :] & (e < V)[:, None]
    if not reverse:
        state = tl.zeros([BV, KP], tl.float32)
        if HAS_INITIAL:
            state = tl.load(initial + outer_at, mask=outer_there, other=0.0).to(tl.float32)
        for step in tl.range(0, chunks):
            at = (first_slot + step).to(tl.int64) * heads + head
            row = begin + step * CHUNK + i
            v_tile = tl.load(
                v + (row * heads + head)[:, None] * V + e[None, :],
                mask=(row < end)[:, None] & (e < V)[None, :],
                other=0.0,
            ).to(DT)
            a = tl.load(a_in + at * (CHUNK * CHUNK) + square_at)
            w = tl.load(w_in + at * (CHUNK * KP) + tile_at)
            k = tl.load(k_in + at * (CHUNK * KP) + tile_at)
            decay = tl.load(decay_in + at * KP + key)
            operand = state.to(DT)
            tl.store(states + at * (VP * KP) + state_at, operand)
            new = product(tl.trans(v_tile), tl.trans(a), tl.zeros([BV, CHUNK], tl.float32), DT)
            new -= product(operand, tl.trans(w), tl.zeros([BV, CHUNK], tl.float32), DT)
            new_operand = new.to(DT)
            tl.store(values + at * (VP * CHUNK) + value_at, new_operand)
            state = product(new_operand, k, state * decay[None, :], DT)
    else:
        grad = tl.zeros([BV, KP], tl.float32)
        if HAS_FINAL:
            grad = tl.load(d_final + outer_at, mask=outer_there, other=0.0).to(tl.float32)
        for step in tl.range(0, chunks):
            back = chunks - 1 - step
            at = (first_slot + back).to(tl.int64) * heads + head
            row = begin + back * CHUNK + i
            o_tile = tl.load(
                d_out + (row * heads + head)[:, None] * V + e[None, :],
                mask=(row < end)[:, None] & (e < V)[None, :],
                other=0.0,
            ).to(DT)
            p = tl.load(p_in + at * (CHUNK * CHUNK) + square_at)
            k = tl.load(k_in + at * (CHUNK * KP) + tile_at)
            q = tl.load(q_in + at * (CHUNK * KP) + tile_at)
            w = tl.load(w_in + at * (CHUNK * KP) + tile_at)
            decay = tl.load(decay_in + at * KP + key)
            operand = grad.to(DT)
            tl.store(d_states + at * (VP * KP) + state_at, operand)
            o_turned = tl.trans(o_tile)
            new = product(o_turned, p, tl.zeros([BV, CHUNK], tl.float32), DT)
            new = product(operand, tl.trans(k), new, DT)
            minus = (-new).to(DT)
            grad = product(o_turned, q, grad * decay[None, :], DT)
            grad = product(minus, w, grad, DT)
            a = tl.load(a_in + at * (CHUNK * CHUNK) + square_at)
            u = -product(minus, a, tl.zeros([BV, CHUNK], tl.float32), DT)
            there = (row < end)[None, :] & (e < V)[:, None]
            tl.store(dv + (row * heads + head)[None, :] * V + e[:, None], u, mask=there)
        if HAS_INITIAL:
            tl.store(d_initial + outer_at, grad, mask=outer_there)
