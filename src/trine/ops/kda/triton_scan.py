# mypy: disable-error-code="no-untyped-def,assignment"
"""Second KDA kernel: the walk over tiles that carries the state, whole or in exact segments.

The state is kept transposed, ``S^T [V, K]``, so that it and the corrected values are the left operand of every product
and nothing on the dependent chain leaves registers. With the tile's factors of ``triton_prepare``::

    Vn^T = V^T (A beta)^T - S^T W^T        O^T = scale (S^T Q+^T + Vn^T P^T)        S^T = S^T diag(2^G_last) + Vn^T K-

Segmented (K3 report, arXiv 2607.24653, Eq. 17): a segment maps the state affinely, ``S_out = M S_in + b``. One launch
walks every inner segment twice over, from zero for b and from the identity without values for M (the first segment of a
sequence starts from its true state and needs no M); a second joins them in order; a third walks all segments with
output from their true starting states. Segments are cut every ``segment`` tokens from a sequence's start.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from trine.ops.kda.triton_config import Config
from trine.ops.kda.triton_launch import TRITON_TYPES, Kernel, Variant, type_name
from trine.ops.kda.triton_problem import Cuts, Factors, Problem, cuts_of, new_cuts
from trine.ops.kda.triton_replay import new


@triton.jit
def find_sequence(n, cu_ptr, tokens, tiles_a_sequence, PACKED: tl.constexpr):
    """Sequence n: (first token, end, first tile slot, row of the batch)."""
    if PACKED:
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), tokens).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(cu_ptr + n + 1), start), tokens).to(tl.int32)
        slot = start // 32 + n
        row = n * 0
    else:
        start = n * 0
        end = start + tokens
        slot = n * tiles_a_sequence
        row = n
    return start, end, slot, row


@triton.jit
def find_cut(cut, cu_ptr, tokens, sequences, steps, cuts_a_sequence, segment, PACKED: tl.constexpr):
    """Sequence of cut slot ``cut``, and which of its cuts that is; cut j lies behind its segment j.

    Packed, sequence n owns the slots from ``start // segment`` on, which hold all its cuts and overlap with nobody's:
    there are tokens // segment slots in all, however many sequences. The caller tests that the cut is really there.
    """
    if PACKED:
        low = cut * 0
        high = low + sequences
        for _ in range(steps):
            middle = (low + high) // 2
            start = tl.minimum(tl.maximum(tl.load(cu_ptr + middle), 0), tokens).to(tl.int32)
            goes_up = start // segment <= cut
            low = tl.where(goes_up, middle, low)
            high = tl.where(goes_up, high, middle)
        n = low
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), tokens).to(tl.int32)
        j = cut - start // segment
    else:
        n = cut // cuts_a_sequence
        j = cut - n * cuts_a_sequence
    return n, j


@triton.jit
def scan_kernel(
    v_ptr,
    wqk_ptr,
    p_ptr,
    a_ptr,
    decay_ptr,
    cu_ptr,
    initial_ptr,
    enter_ptr,
    map_ptr,
    out_ptr,
    final_ptr,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    tokens,
    sequences,
    steps,
    tiles_a_sequence,
    cuts_a_sequence,
    segment,
    slots,
    heads,
    scale,
    K: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAPS: tl.constexpr,
    FACTOR: tl.constexpr,
    VALUE: tl.constexpr,
    ALIGN: tl.constexpr,
    PACKED: tl.constexpr,
    SEGMENTED: tl.constexpr,
    OUTPUT: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    FINE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Walk one sequence, or one segment of it, for BV value channels of one head.

    Grid: places x heads x (BLOCKS + MAPS), blocks fastest. OUTPUT walks from the true state and writes o (and the final
    state at a sequence's end); its first places are the sequences' first segments, further ones (SEGMENTED) lie behind
    cut ``place - sequences``. Without OUTPUT a place is a cut: it walks the segment before it and writes the state that
    one leaves to ``enter_ptr`` (``[cuts, heads, V, BK]``) and, blocks from BLOCKS on, BV rows of its transposed
    transition to ``map_ptr`` (``[cuts, heads, BK, BK]``). ``steps`` halvings find one of ``sequences``.
    """
    C: tl.constexpr = 32
    pid = tl.program_id(0)
    block = pid % (BLOCKS + MAPS)
    rest = pid // (BLOCKS + MAPS)
    hv = rest % heads
    place = rest // heads
    n = place
    cut = place
    if not SEGMENTED:
        number = 0
    elif OUTPUT:
        number = place * 0
        if place >= sequences:
            cut = place - sequences
            n, j = find_cut(cut, cu_ptr, tokens, sequences, steps, cuts_a_sequence, segment, PACKED)
            number = j + 1
    else:
        n, number = find_cut(cut, cu_ptr, tokens, sequences, steps, cuts_a_sequence, segment, PACKED)
    start, end, slot, row = find_sequence(n, cu_ptr, tokens, tiles_a_sequence, PACKED)
    is_map = block >= BLOCKS
    first = start
    stop = end
    if SEGMENTED:
        first = start + number * segment
        stop = tl.minimum(first + segment, end)
        if OUTPUT:
            # A cut slot that nobody uses; an empty sequence still has its first segment.
            if (first >= end) & (number > 0):
                return
        else:
            # No cut here, or a first segment, whose map is never used: its start is known.
            if (stop >= end) | (is_map & (number == 0)):
                return

    value = (block - tl.where(is_map, BLOCKS, 0)) * BV + tl.arange(0, BV)
    key = tl.arange(0, BK)
    inside = (value[:, None] < V) & (key[None, :] < K)
    one = cut.to(tl.int64) * heads + hv
    state = tl.zeros([BV, BK], tl.float32)
    if HAS_INITIAL:  # noqa: SIM102  a compile-time branch around a run-time one, here and below
        if number == 0:
            source = initial_ptr + (n.to(tl.int64) * heads + hv) * (K * V)
            state = tl.load(source + key[None, :] * V + value[:, None], mask=inside, other=0.0)
    if OUTPUT:
        if SEGMENTED:  # noqa: SIM102
            if number > 0:
                source = enter_ptr + one * (V * BK)
                state = tl.load(source + value[:, None] * BK + key[None, :], mask=value[:, None] < V, other=0.0)
    else:
        if is_map:
            state = tl.where(value[:, None] == key[None, :], 1.0, 0.0)

    rows = tl.arange(0, C)
    keys = rows[:, None] * BK + key[None, :]
    square = rows[:, None] * C + rows[None, :]
    plane = slots.to(tl.int64) * heads * (C * BK)
    v_row = v_ptr + (row.to(tl.int64) * v_stride_b + first.to(tl.int64) * v_stride_t + hv * v_stride_h) * ALIGN
    o_row = out_ptr
    if OUTPUT:
        o_row = out_ptr + ((row.to(tl.int64) * tokens + first) * heads + hv) * V
    tile0 = (slot + (first - start) // C).to(tl.int64) * heads + hv
    real = (value < V) & (block < BLOCKS)
    count = (stop - first + (C - 1)) // C
    # The compiler pipelines loads that feed products; the decay is fetched two steps ahead by hand, at the end of a
    # step. One step is less than its latency, and where it is asked for at the beginning of a step, the step waits for
    # it at once, because loads share the hardware's few scoreboards.
    decay = tl.load(decay_ptr + tile0 * BK + key, mask=(key < BK) & (count > 0), other=0.0)
    decay_next = tl.load(decay_ptr + (tile0 + heads) * BK + key, mask=(key < BK) & (count > 1), other=0.0)
    for i in tl.range(0, count):
        tile = tile0 + i * heads
        w_tile = wqk_ptr + tile * (C * BK)
        w = tl.load(w_tile + keys)
        k_minus = tl.load(w_tile + 2 * plane + (tile * (C * BK) if FINE else 0) + keys)
        a = tl.load(a_ptr + tile * (C * C) + square)
        seen = (rows[:, None] < stop - first - i * C) & real[None, :]
        v = tl.load(v_row + (i * C + rows[:, None]) * v_stride_t * ALIGN + value[None, :], mask=seen, other=0.0)
        operand = state.to(FACTOR)
        state = state * decay[None, :]
        new = tl.dot(tl.trans(v.to(VALUE)), tl.trans(a), input_precision=PRECISION)
        new = tl.dot(operand, tl.trans(w), new, input_precision=PRECISION).to(FACTOR)
        if OUTPUT:
            q_plus = tl.load(w_tile + plane + keys)
            p = tl.load(p_ptr + tile * (C * C) + square)
            o = tl.dot(operand, tl.trans(q_plus), input_precision=PRECISION)
            o = tl.dot(new, tl.trans(p), o, input_precision=PRECISION) * scale
            target = o_row + (i * C + rows[:, None]).to(tl.int64) * heads * V + value[None, :]
            # Streamed past the cache, which is for the factors.
            tl.store(target, tl.trans(o).to(out_ptr.dtype.element_ty), mask=seen, cache_modifier=".cs")
        state = tl.dot(new, k_minus, state, input_precision=PRECISION)
        # (A plain copy here would make the compiler give up pipelining the loop.)
        decay = tl.where(i + 1 < count, decay_next, 0.0)
        ahead = tile + 2 * heads
        decay_next = tl.load(decay_ptr + ahead * BK + key, mask=(key < BK) & (i + 2 < count), other=0.0)

    if OUTPUT:
        if HAS_FINAL:  # noqa: SIM102
            if stop >= end:
                target = final_ptr + (n.to(tl.int64) * heads + hv) * (K * V)
                tl.store(target + key[None, :] * V + value[:, None], state, mask=inside)
    else:
        if is_map:
            target = map_ptr + one * (BK * BK)
            tl.store(target + value[:, None] * BK + key[None, :], state, mask=value[:, None] < BK)
        else:
            target = enter_ptr + one * (V * BK)
            tl.store(target + value[:, None] * BK + key[None, :], state, mask=value[:, None] < V)


@triton.jit
def combine_kernel(
    cu_ptr,
    enter_ptr,
    map_ptr,
    tokens,
    cuts_a_sequence,
    segment,
    heads,
    BK: tl.constexpr,
    PART: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Join a sequence's segments in order, in place: the offset of segment j becomes the state that segment leaves.

    ``S_j^T = S_{j-1}^T M_j^T + b_j^T`` from j = 1 on; the first segment's entry is a true state already. Grid:
    sequences x heads x BLOCKS of BV value rows.
    """
    pid = tl.program_id(0)
    block = pid % BLOCKS
    rest = pid // BLOCKS
    hv = rest % heads
    n = rest // heads
    if PACKED:
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), tokens).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(cu_ptr + n + 1), start), tokens).to(tl.int32)
        cut = start // segment
        length = end - start
    else:
        cut = n * cuts_a_sequence
        length = n * 0 + tokens
    inner = (length + segment - 1) // segment - 1
    value = block * BV + tl.arange(0, BV)
    key = tl.arange(0, PART)
    inside = value[:, None] < V
    states = value[:, None] * BK + key[None, :]
    maps = key[:, None] * BK + key[None, :]
    one = cut.to(tl.int64) * heads + hv
    if inner > 1:
        # BK is one part or, where a whole transition would not fit in shared memory, two.
        low = tl.load(enter_ptr + one * (V * BK) + states, mask=inside, other=0.0)
        if BK > PART:
            high = tl.load(enter_ptr + one * (V * BK) + states + PART, mask=inside, other=0.0)
        for j in tl.range(1, inner):
            here = one + j * heads
            offset = enter_ptr + here * (V * BK) + states
            transition = map_ptr + here * (BK * BK) + maps
            new = tl.load(offset, mask=inside, other=0.0)
            new = tl.dot(low, tl.load(transition), new, input_precision=PRECISION)
            if BK > PART:
                new = tl.dot(high, tl.load(transition + PART * BK), new, input_precision=PRECISION)
                new_high = tl.load(offset + PART, mask=inside, other=0.0)
                new_high = tl.dot(low, tl.load(transition + PART), new_high, input_precision=PRECISION)
                high = tl.dot(high, tl.load(transition + PART * BK + PART), new_high, input_precision=PRECISION)
                tl.store(offset + PART, high, mask=inside)
            low = new
            tl.store(offset, low, mask=inside)


SCAN = Kernel(scan_kernel)
COMBINE = Kernel(combine_kernel)


@cache
def scan_variant(
    config: Config,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    index_dtype: torch.dtype | None,
    key_width: int,
    value_width: int,
    align: int,
    segmented: bool,
    output: bool,
    has_initial: bool,
    has_final: bool,
) -> Variant:
    """The compiled form of ``scan_kernel``; ``dtype`` is that of v."""
    factor, value = "*" + type_name(config.factor), "*" + type_name(config.value)
    index = "*" + type_name(index_dtype or torch.int32)
    types = (
        *("*" + type_name(dtype), factor, factor, value, "*fp32", index),
        *("*fp32", "*fp32", "*fp32", "*" + type_name(out_dtype), "*fp32"),
        *("i64", "i64", "i64"),
        *(["i32"] * 8),
        "fp32",
    )
    constants = (
        key_width,
        config.key_block,
        value_width,
        config.value_block,
        -(-value_width // config.value_block),
        0 if output else -(-config.key_block // config.value_block),
        TRITON_TYPES[config.factor],
        TRITON_TYPES[config.value],
        align,
        index_dtype is not None,
        segmented,
        output,
        has_initial,
        has_final,
        config.fine,
        config.precision,
    )
    return Variant(types, constants, config.scan if output else config.transition)


@cache
def combine_variant(config: Config, index_dtype: torch.dtype | None, value_width: int) -> Variant:
    """The compiled form of ``combine_kernel``."""
    types = ("*" + type_name(index_dtype or torch.int32), "*fp32", "*fp32", *(["i32"] * 4))
    constants = (
        config.key_block,
        min(128, config.key_block),
        value_width,
        config.combine_block,
        -(-value_width // config.combine_block),
        index_dtype is not None,
        config.precision,
    )
    return Variant(types, constants, config.combine)


def scan(
    problem: Problem, factors: Factors, initial: Tensor | None, output_final: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Cuts | None]:
    """Launch the walk: output ``[B, T, HV, V]``, final states ``[N, HV, K, V]`` fp32 if asked for, and cuts if any."""
    config, device = problem.config, problem.q.device
    heads, width = problem.heads, problem.value_width
    batch = problem.v.shape[0]
    index = problem.cu.dtype if problem.cu is not None else None
    out = new((batch, problem.tokens, heads, width), out_dtype, device)
    final = None
    if output_final:
        final = new((problem.sequences, heads, problem.key_width, width), torch.float32, device)
    segment = config.segment
    cuts = cuts_of(problem.tokens, problem.sequences, segment, index is not None)
    segmented = 0 < segment < problem.tokens
    per_sequence = -(-problem.tokens // segment) - 1 if segmented else 0
    found = new_cuts(cuts, heads, width, config.key_block, device) if segmented else None
    enter, maps = (None, None) if found is None else (found.states, found.maps)
    v, align = problem.v, problem.align
    v0, v1, v2, _ = v.stride()
    args = (
        *(v, factors.wqk, factors.p, factors.a, factors.decay, problem.cu, initial, enter, maps, out, final),
        *(v0 // align, v1 // align, v2 // align),
        *(problem.tokens, problem.sequences, problem.sequences.bit_length(), problem.tiles_a_sequence),
        *(per_sequence, segment, problem.slots, heads),
        problem.scale,
    )
    shape = (config, v.dtype, out_dtype, index, problem.key_width, width, align, segmented)
    blocks = -(-width // config.value_block)
    if segmented:
        variant = scan_variant(*shape, False, initial is not None, False)
        maps_blocks = -(-config.key_block // config.value_block)
        SCAN.launch(cuts * heads * (blocks + maps_blocks), args, variant, device)
        COMBINE.launch(
            problem.sequences * heads * -(-width // config.combine_block),
            (problem.cu, enter, maps, problem.tokens, per_sequence, segment, heads),
            combine_variant(config, index, width),
            device,
        )
    variant = scan_variant(*shape, True, initial is not None, output_final)
    SCAN.launch((problem.sequences + cuts) * heads * blocks, args, variant, device)
    return out, final, found
