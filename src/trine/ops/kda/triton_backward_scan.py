# mypy: disable-error-code="no-untyped-def,assignment"
"""Backward kernels that walk a sequence: the state scan and the reverse scan, whole or in exact segments.

States are kept transposed, ``[V, K]``, so that they and the corrected values are register operands of every product on
the dependent chain. With the factors of ``triton_prepare`` (which stores -W, and Q+ and P without the output's scale:
gradients here are in units of it)::

    Vn^T  = V^T (A beta)^T - S^T W^T         S^T <- S^T diag(2^G_end) + Vn^T K-
    dVn^T = dO^T P + dS^T K-^T              dS^T <- dS^T diag(2^G_end) + dO^T Q+ - dVn^T W

The directions need nothing of each other: dS does not depend on S. FINE: forward, K- and Vn enter their product in fp16
and A in two bf16 parts, as the states must be those of the forward pass (the README's part on A_log's gradient);
backwards everything stays in bf16, for gradients may be of any size. Segmented (K3 report, arXiv 2607.24653, Eq. 17): a
segment maps the state by ``S_out = M S_in + b`` and its gradient by ``dS_in = M^T dS_out + c``. One launch walks every
segment from zero in both directions and once from the identity, for b, c and M; a second joins them; the third is the
walk proper, from every segment's true states at once. A forward pass that kept its cuts (``Cuts``) leaves of the first
two only c and the way back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trine.ops.kda.triton_backward_common import CHUNK, locate, product, span


@triton.jit
def walk_forward(
    state,
    v,
    w_in,
    k_in,
    a_in,
    a_rest,
    decay_in,
    states,
    values,
    place,
    stride,
    row,
    heads,
    length,
    e,
    real,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    DT: tl.constexpr,
    FINE: tl.constexpr,
    STORE: tl.constexpr,
):
    """Carry ``state`` ``[BV, KP]`` over ``length`` tokens from chunk ``place`` on; STORE what the gradients need.

    ``real`` says which value columns exist; the decay is fetched a step ahead, as it feeds no product and the compiler
    would wait for it.
    """
    i = tl.arange(0, CHUNK)
    key = tl.arange(0, KP)
    tile_at = i[:, None] * KP + key[None, :]
    square_at = i[:, None] * CHUNK + i[None, :]
    row_at = (i * (heads * V))[:, None] + e[None, :]
    chunks = (length + 31) // 32
    decay = tl.load(decay_in + place * KP + key, mask=key < chunks * KP, other=0.0)
    for step in tl.range(0, chunks):
        at = place + step * stride
        seen = (i + step * 32 < length)[:, None] & real[None, :]
        v_tile = tl.load(v + row + step * (stride * (CHUNK * V)) + row_at, mask=seen, other=0.0).to(DT)
        a = tl.load(a_in + at * (CHUNK * CHUNK) + square_at)
        w = tl.load(w_in + at * (CHUNK * KP) + tile_at)
        k = tl.load(k_in + at * (CHUNK * KP * (2 if FINE else 1)) + tile_at)
        ahead = tl.load(decay_in + (at + tl.where(step + 1 < chunks, heads, 0)) * KP + key)
        operand = state.to(DT)
        if STORE:
            tl.store(states + at * (VP * KP) + e[:, None] * KP + key[None, :], operand)
        new = product(tl.trans(v_tile), tl.trans(a), tl.zeros([BV, CHUNK], tl.float32), DT)
        if FINE:
            rest = tl.load(a_rest + at * (CHUNK * CHUNK) + square_at)
            new = product(tl.trans(v_tile), tl.trans(rest), new, DT)
        new = product(operand, tl.trans(w), new, DT)
        if STORE:
            tl.store(values + at * (VP * CHUNK) + e[:, None] * CHUNK + i[None, :], new.to(DT))
        state = product(new.to(k_in.dtype.element_ty), k, state * decay[None, :], DT)
        decay = ahead
    return state


@triton.jit
def walk_back(
    grad,
    d_out,
    w_in,
    q_in,
    k_in,
    p_in,
    decay_in,
    d_states,
    d_values,
    place,
    stride,
    row,
    heads,
    length,
    e,
    real,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    DT: tl.constexpr,
    FINE: tl.constexpr,
    STORE: tl.constexpr,
):
    """Carry the state's gradient ``[BV, KP]`` back over the same chunks, last first."""
    i = tl.arange(0, CHUNK)
    key = tl.arange(0, KP)
    tile_at = i[:, None] * KP + key[None, :]
    square_at = i[:, None] * CHUNK + i[None, :]
    row_at = (i * (heads * V))[:, None] + e[None, :]
    chunks = (length + 31) // 32
    last = place + (tl.maximum(chunks, 1) - 1) * stride
    decay = tl.load(decay_in + last * KP + key, mask=key < chunks * KP, other=0.0)
    for step in tl.range(0, chunks):
        back = chunks - 1 - step
        at = place + back * stride
        seen = (i + back * 32 < length)[:, None] & real[None, :]
        o_tile = tl.load(d_out + row + back * (stride * (CHUNK * V)) + row_at, mask=seen, other=0.0).to(DT)
        p = tl.load(p_in + at * (CHUNK * CHUNK) + square_at)
        k = tl.load(k_in + at * (CHUNK * KP * (2 if FINE else 1)) + tile_at)
        q = tl.load(q_in + at * (CHUNK * KP) + tile_at)
        w = tl.load(w_in + at * (CHUNK * KP) + tile_at)
        ahead = tl.load(decay_in + (at - tl.where(back > 0, heads, 0)) * KP + key)
        operand = grad.to(DT)
        if STORE:
            tl.store(d_states + at * (VP * KP) + e[:, None] * KP + key[None, :], operand)
        o_turned = tl.trans(o_tile)
        new = product(o_turned, p, tl.zeros([BV, CHUNK], tl.float32), DT)
        new_operand = product(operand, tl.trans(k), new, DT).to(DT)
        if STORE:
            tl.store(d_values + at * (VP * CHUNK) + e[:, None] * CHUNK + i[None, :], new_operand)
        grad = product(o_turned, q, grad * decay[None, :], DT)
        grad = product(new_operand, w, grad, DT)
        decay = ahead
    return grad


@triton.jit
def scan_kernel(
    v,
    d_out,
    w_in,
    q_in,
    k_in,
    a_in,
    p_in,
    k_fine,
    a_rest,
    decay_in,
    initial,
    d_final,
    cu_seqlens,
    leaving,
    d_leaving,
    states,
    d_states,
    values,
    d_values,
    d_initial,
    tokens,
    sequences,
    heads,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT: tl.constexpr,
    DT: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
    FINE: tl.constexpr,
):
    """State entering each chunk and gradient of the state leaving it, transposed ``[slot, head, VP, KP]``.

    Also the corrected values Vn and their gradients, transposed ``[slot, head, VP, 32]``. ``k_fine`` and ``a_rest`` are
    K- for the walk forward and what rounding left of A, or K- and nothing. Programs: (place, head, value
    block, direction), direction slowest; a place is a sequence, or a segment of one if SEGMENT > 0, which starts from
    the state at the cut before it, in ``leaving`` ``[cut, head, V, KP]``, and ``d_leaving`` ``[place, head, VP, KP]``.
    """
    pid = tl.program_id(0)
    blocks: tl.constexpr = VP // BV
    half = tl.num_programs(0) // 2
    reverse = pid >= half
    pid = tl.where(reverse, pid - half, pid)
    e = pid % blocks * BV + tl.arange(0, BV)
    head = (pid // blocks) % heads
    place = pid // (blocks * heads)
    key = tl.arange(0, KP)
    if SEGMENT > 0:
        n, number, first, length = locate(cu_seqlens, place, tokens, sequences, SEGMENT, PACKED)
        if (n == sequences) | ((length <= 0) & (number > 0)):
            return
        slot, _, end = span(cu_seqlens, n, tokens, CHUNK, PACKED)
        slot += number * (SEGMENT // CHUNK)
    else:
        n = place
        slot, first, end = span(cu_seqlens, n, tokens, CHUNK, PACKED)
        length = (end - first).to(tl.int32)
    outer_at = (n.to(tl.int64) * heads + head) * (K * V) + key[None, :] * V + e[:, None]
    outer_there = (key < K)[None, :] & (e < V)[:, None]
    inner_at = (place.to(tl.int64) * heads + head) * (VP * KP) + e[:, None] * KP + key[None, :]
    chunk = slot.to(tl.int64) * heads + head
    stride = chunk * 0 + heads
    row = (first * heads + head) * V
    real = e < V
    if not reverse:
        state = tl.zeros([BV, KP], tl.float32)
        if SEGMENT > 0:
            cut = ((place - n - 1).to(tl.int64) * heads + head) * (V * KP)
            inside = (number > 0) & real[:, None]
            state = tl.load(leaving + cut + e[:, None] * KP + key[None, :], mask=inside, other=0.0)
        if HAS_INITIAL:
            mask = outer_there & (number == 0) if SEGMENT > 0 else outer_there
            state += tl.load(initial + outer_at, mask=mask, other=0.0).to(tl.float32)
        walk_forward(
            state, v, w_in, k_fine, a_in, a_rest, decay_in, states, values,
            chunk, stride, row, heads, length, e, real, V, KP, VP, BV, DT, FINE, True,
        )  # fmt: skip
    else:
        grad = tl.zeros([BV, KP], tl.float32)
        if SEGMENT > 0:
            after = heads * (VP * KP)
            grad = tl.load(d_leaving + inner_at + after, mask=(first + length < end) & (e >= 0)[:, None], other=0.0)
        if HAS_FINAL:
            mask = outer_there & (first + length >= end) if SEGMENT > 0 else outer_there
            grad += tl.load(d_final + outer_at, mask=mask, other=0.0).to(tl.float32) / scale
        grad = walk_back(
            grad, d_out, w_in, q_in, k_in, p_in, decay_in, d_states, d_values,
            chunk, stride, row, heads, length, e, real, V, KP, VP, BV, DT, FINE, True,
        )  # fmt: skip
        if HAS_INITIAL:
            mask = outer_there & (number == 0) if SEGMENT > 0 else outer_there
            tl.store(d_initial + outer_at, grad * scale, mask=mask)


@triton.jit
def segment_kernel(
    v,
    d_out,
    w_in,
    q_in,
    k_in,
    a_in,
    p_in,
    k_fine,
    a_rest,
    decay_in,
    initial,
    d_final,
    cu_seqlens,
    leaving,
    d_leaving,
    maps,
    tokens,
    sequences,
    heads,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT: tl.constexpr,
    DT: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
    FINE: tl.constexpr,
    KEPT: tl.constexpr,
):
    """b and the transposed map M^T of every segment at the cut behind it, c at its place ``[place, head, VP, KP]``.

    The first segment's b starts from the true initial state and the last one's c from the true final gradient, so
    neither needs a map. Programs: (place, head, block): VP / BV blocks of b, KP / BV of the map, VP / BV of c; KEPT
    ones, whose forward pass left states and maps, only have those of c.
    """
    pid = tl.program_id(0)
    value_blocks: tl.constexpr = VP // BV
    onward_blocks: tl.constexpr = 0 if KEPT else value_blocks + KP // BV
    blocks: tl.constexpr = onward_blocks + value_blocks
    block = pid % blocks
    head = (pid // blocks) % heads
    place = pid // (blocks * heads)
    n, number, first, length = locate(cu_seqlens, place, tokens, sequences, SEGMENT, PACKED)
    if (n == sequences) | (length <= 0):
        return
    slot, _, end = span(cu_seqlens, n, tokens, CHUNK, PACKED)
    onward = block < onward_blocks
    is_map = onward & (block >= value_blocks)
    is_last = first + length >= end
    # The last segment's state is nobody's start, nor is the first one's gradient.
    if (is_last & onward) | ((number == 0) & (is_map | (block >= onward_blocks))):
        return
    chunk = (slot + number * (SEGMENT // CHUNK)).to(tl.int64) * heads + head
    stride = chunk * 0 + heads
    row = (first * heads + head) * V
    key = tl.arange(0, KP)
    one = place.to(tl.int64) * heads + head
    outer = (n.to(tl.int64) * heads + head) * (K * V)
    if not KEPT:  # noqa: SIM102  (a compile-time condition around a run-time one)
        if onward:
            e = tl.where(is_map, block - value_blocks, block) * BV + tl.arange(0, BV)
            state = tl.where(is_map & (e[:, None] == key[None, :]), 1.0, 0.0)
            real = (e < V) & (is_map == 0)
            if HAS_INITIAL:
                there = (number == 0) & (key < K)[None, :] & real[:, None]
                state += tl.load(initial + outer + key[None, :] * V + e[:, None], mask=there, other=0.0)
            state = walk_forward(
                state, v, w_in, k_fine, a_in, a_rest, decay_in, v, v,
                chunk, stride, row, heads, length, e, real, V, KP, VP, BV, DT, FINE, False,
            )  # fmt: skip
            cut = one - n.to(tl.int64) * heads
            target = leaving + cut * (V * KP)
            if is_map:
                target = maps + cut * (KP * KP)
            tl.store(target + e[:, None] * KP + key[None, :], state, mask=(real | is_map)[:, None])
            return
    e = (block - onward_blocks) * BV + tl.arange(0, BV)
    grad = tl.zeros([BV, KP], tl.float32)
    if HAS_FINAL:
        there = is_last & (key < K)[None, :] & (e < V)[:, None]
        grad = tl.load(d_final + outer + key[None, :] * V + e[:, None], mask=there, other=0.0) / scale
    grad = walk_back(
        grad, d_out, w_in, q_in, k_in, p_in, decay_in, v, v,
        chunk, stride, row, heads, length, e, e < V, V, KP, VP, BV, DT, FINE, False,
    )  # fmt: skip
    tl.store(d_leaving + one * (VP * KP) + e[:, None] * KP + key[None, :], grad)


@triton.jit
def join_kernel(
    cu_seqlens,
    leaving,
    d_leaving,
    maps,
    tokens,
    heads,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    PART: tl.constexpr,
    BJ: tl.constexpr,
    SEGMENT: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Join a sequence's segments in place: b becomes the state each segment leaves, c the gradient at each one's start.

    Programs: (sequence, head, BJ value rows, direction), direction slowest; KEPT ones all go back. A map of more than
    PART channels does not fit into shared memory and is taken in PART by PART pieces, with the state in global memory.
    """
    pid = tl.program_id(0)
    blocks: tl.constexpr = VP // BJ
    if KEPT:
        reverse = True
    else:
        half = tl.num_programs(0) // 2
        reverse = pid >= half
        pid = tl.where(reverse, pid - half, pid)
    e = pid % blocks * BJ + tl.arange(0, BJ)
    head = (pid // blocks) % heads
    n = pid // (blocks * heads)
    place, begin, end = span(cu_seqlens, n, tokens, SEGMENT, PACKED)
    last = ((end - begin + SEGMENT - 1) // SEGMENT).to(tl.int32) - 1
    if last < 2:
        return
    one = place.to(tl.int64) * heads + head
    cut = one - n.to(tl.int64) * heads  # of the first segment, like its place
    stride = one * 0 + heads
    real = (e < V)[:, None]
    key = tl.arange(0, PART)
    state_at = e[:, None] * KP + key[None, :]
    map_at = key[:, None] * KP + key[None, :]
    if PART < KP:
        for j in tl.range(1, last):
            for to in tl.static_range(KP // PART):
                if reverse:
                    at = d_leaving + (one + (last - j) * stride) * (VP * KP)
                    transition = maps + (cut + (last - j) * stride) * (KP * KP)
                    joined = tl.load(at + to * PART + state_at)
                    for source in tl.static_range(KP // PART):
                        part = tl.load(at + stride * (VP * KP) + source * PART + state_at)
                        piece = tl.load(transition + to * PART * KP + source * PART + map_at)
                        joined = tl.dot(part, tl.trans(piece), joined, input_precision=PRECISION)
                    tl.store(at + to * PART + state_at, joined)
                else:
                    at = leaving + (cut + j * stride) * (V * KP)
                    transition = maps + (cut + j * stride) * (KP * KP)
                    joined = tl.load(at + to * PART + state_at, mask=real, other=0.0)
                    for source in tl.static_range(KP // PART):
                        part = tl.load(at - stride * (V * KP) + source * PART + state_at, mask=real, other=0.0)
                        piece = tl.load(transition + source * PART * KP + to * PART + map_at)
                        joined = tl.dot(part, piece, joined, input_precision=PRECISION)
                    tl.store(at + to * PART + state_at, joined, mask=real)
            tl.debug_barrier()
    elif not reverse:
        state = tl.load(leaving + cut * (V * KP) + state_at, mask=real, other=0.0)
        for j in tl.range(1, last):
            at = cut + j * stride
            transition = tl.load(maps + at * (KP * KP) + map_at)
            offset = tl.load(leaving + at * (V * KP) + state_at, mask=real, other=0.0)
            state = tl.dot(state, transition, offset, input_precision=PRECISION)
            tl.store(leaving + at * (V * KP) + state_at, state, mask=real)
    else:
        grad = tl.load(d_leaving + (one + last * stride) * (VP * KP) + state_at)
        for j in tl.range(1, last):
            at = one + (last - j) * stride
            transition = tl.load(maps + (cut + (last - j) * stride) * (KP * KP) + map_at)
            offset = tl.load(d_leaving + at * (VP * KP) + state_at)
            grad = tl.dot(grad, tl.trans(transition), offset, input_precision=PRECISION)
            tl.store(d_leaving + at * (VP * KP) + state_at, grad)
