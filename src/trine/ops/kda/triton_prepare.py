# mypy: disable-error-code="no-untyped-def,assignment"
"""First KDA kernel: everything of a 32-token tile that does not need the state.

For one tile of one value head (Kimi Linear, arXiv 2510.26692, and K3 report, arXiv 2607.24653, Eq. 1-5), with
``sigma = sigmoid(exp(A_log) (x + dt_bias))``, ``G_i = lower_bound log2(e) sum_{l<=i} sigma_l`` counted from the tile's
first row and c half the span a tile can reach (an integer, so that scaling by 2^c is exact)::

    E = 2^(G + c)      Ei = 2^(-c - G)                      both within 2^+-116 for 32 steps of g >= -5
    M_ij = beta_i (k E)_i . (k Ei)_j   (i > j)              P_ij = (q E)_i . (k Ei)_j   (i >= j)
    A = (I + M)^-1                                          forward substitution in fp32, 16 rows, one merge
    W = A diag(beta) K+,  K+ = 2^G k,  Q+ = 2^G q,  K- = 2^(G_last - G) k

Stored a tile: -W, Q+, K- ``[32, K]``, P and A diag(beta) ``[32, 32]``, the decay 2^G_last ``[K]``; for the backward
pass also what made the rows of q and k unit vectors, ``[2, 32]``. The anchor c is a constant, so nothing of a row
depends on a later row; masked products are selected away, never multiplied by zero.
FINE adds what a walk over states must not have in bf16 alone: K- once more in fp16, and what is left of A diag(beta).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from trine.ops.kda.triton_config import CHUNK, LOG2E, Config, anchor
from trine.ops.kda.triton_launch import TRITON_TYPES, Kernel, Options, Variant, type_name
from trine.ops.kda.triton_problem import Factors, Problem, alignment, even_rows, parameter
from trine.ops.kda.triton_replay import new


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2^x in fp32; the card's own instruction when FAST (the interpreter has none)."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    """1/x in fp32."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def find_tile(slot, cu_ptr, table_ptr, tokens, tiles_a_sequence, PACKED: tl.constexpr):
    """Where tile ``slot`` lies: (sequence, first token, end of its sequence, row of the batch).

    Packed: sequence n owns the slots from ``start // 32 + n`` on, which never overlap and need no prefix sum. A slot
    that no sequence uses comes back with first token >= end.
    """
    if PACKED:
        n = tl.load(table_ptr + slot)
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), tokens).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(cu_ptr + n + 1), start), tokens).to(tl.int32)
        first = start + (slot - (start // 32 + n)) * 32
        row = n * 0
    else:
        n = slot // tiles_a_sequence
        first = (slot - n * tiles_a_sequence) * 32
        end = first * 0 + tokens
        row = n
    return n, first, end, row


@triton.jit
def table_kernel(cu_ptr, table_ptr, error_ptr, tokens, sequences, steps, slots, BLOCK: tl.constexpr):
    """Sequence of every tile slot of a packed row, by binary search; flags bad ``cu_seqlens`` in the error word."""
    pid = tl.program_id(0)
    slot = pid * BLOCK + tl.arange(0, BLOCK)
    low = slot * 0
    high = low + sequences
    for _ in range(steps):
        middle = (low + high) // 2
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + middle), 0), tokens).to(tl.int32)
        goes_up = start // 32 + middle <= slot
        low = tl.where(goes_up, middle, low)
        high = tl.where(goes_up, high, middle)
    tl.store(table_ptr + slot, low, mask=slot < slots)
    # Every program tests its share of the sequences: slots are at least as many as sequences.
    mine = slot < sequences
    a = tl.load(cu_ptr + slot, mask=mine, other=0)
    b = tl.load(cu_ptr + slot + 1, mask=mine, other=0)
    bad = mine & ((b < a) | ((slot == 0) & (a != 0)) | ((slot == sequences - 1) & (b != tokens)))
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        tl.store(error_ptr, 1)


@triton.jit
def invert_tile(m, scratch_in, scratch_out, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + m)^-1 for a strictly lower triangular 32x32 ``m`` in fp32.

    Two 16-row blocks by forward substitution, one lane a column, m read back from scratch; then
    ``X - X (m_off X)`` joins them. Never a product of powers of m, whose terms grow to thousands where the inverse
    stays below one.
    """
    rr = tl.arange(0, C)[:, None]
    cc = tl.arange(0, C)[None, :]
    same = (rr // 16) == (cc // 16)
    place = (rr // 16) * 256 + (rr % 16) * 16 + (cc % 16)
    tl.store(scratch_in + place, m, mask=same)
    tl.debug_barrier()
    lane = tl.arange(0, 32)
    column = lane % 16
    block_in = scratch_in + (lane // 16) * 256
    block_out = scratch_out + (lane // 16) * 256 + column
    x = tl.where(column == 0, 1.0, 0.0)
    tl.store(block_out, x)
    xs = (x,)
    for i in tl.static_range(1, 16):
        x = tl.where(column == i, 1.0, 0.0)
        for l in tl.static_range(i):
            x -= tl.load(block_in + (i * 16 + l)) * xs[l]
        tl.store(block_out + i * 16, x)
        xs = xs + (x,)  # noqa: RUF005  Triton knows no starred expressions
    tl.debug_barrier()
    inverse = tl.load(scratch_out + place, mask=same, other=0.0)
    tl.debug_barrier()
    below = tl.where((rr // 16) > (cc // 16), m, 0.0)
    joined = tl.dot(below, inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, joined, input_precision=PRECISION)


@triton.jit
def prepare_kernel(
    q_ptr,
    k_ptr,
    gate_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    cu_ptr,
    table_ptr,
    factors_ptr,
    p_ptr,
    a_ptr,
    p_scratch_ptr,
    a_scratch_ptr,
    decay_ptr,
    norms_ptr,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    b_stride_b,
    b_stride_t,
    b_stride_h,
    tokens,
    tiles_a_sequence,
    slots,
    heads,
    group,
    bound,
    shift,
    back,
    beta_max,
    K: tl.constexpr,
    BK: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    SQUARE: tl.constexpr,
    FINE: tl.constexpr,
    FAST: tl.constexpr,
):
    """One 32-token tile of one value head; see the module's docstring. Grid: slots x heads, heads fastest.

    Elementwise work runs on ``[ROWS, 32/ROWS, PART]`` blocks: a thread holds consecutive tokens of its channels, so the
    cumulative sum stays in registers but for one prefix over ROWS. SQUARE = fp32 words of a 32x32 tile in its dtype.
    """
    C: tl.constexpr = 32
    EACH: tl.constexpr = C // ROWS
    pid = tl.program_id(0)
    slot = pid // heads
    hv = pid - slot * heads
    _n, first, end, batch = find_tile(slot, cu_ptr, table_ptr, tokens, tiles_a_sequence, PACKED)
    if first >= end:
        return
    tile = pid.to(tl.int64)
    plane = slots.to(tl.int64) * heads * (C * BK)
    w_tile = factors_ptr + tile * (C * BK)
    q_tile = w_tile + plane
    k_tile = q_tile + plane + (tile * (C * BK) if FINE else 0)
    batch = batch.to(tl.int64)
    first64 = first.to(tl.int64)
    h = hv // group
    q_row = q_ptr + (batch * q_stride_b + first64 * q_stride_t + h * q_stride_h) * ALIGN
    k_row = k_ptr + (batch * k_stride_b + first64 * k_stride_t + h * k_stride_h) * ALIGN
    g_row = gate_ptr + (batch * g_stride_b + first64 * g_stride_t + hv * g_stride_h) * ALIGN
    q_step = q_stride_t.to(tl.int32) * ALIGN
    k_step = k_stride_t.to(tl.int32) * ALIGN
    g_step = g_stride_t.to(tl.int32) * ALIGN

    line = tl.arange(0, ROWS)[:, None]
    r3 = line[:, :, None] * EACH + tl.arange(0, EACH)[None, :, None]
    channel = tl.arange(0, PART)
    c3 = channel[None, None, :]
    live = r3 < end - first

    if NORM:
        for p in tl.static_range(BK // PART):
            seen = live if p * PART + PART <= K else live & (p * PART + c3 < K)
            kx = tl.load(k_row + r3 * k_step + (p * PART + c3), mask=seen, other=0.0).to(tl.float32)
            qx = tl.load(q_row + r3 * q_step + (p * PART + c3), mask=seen, other=0.0).to(tl.float32)
            if p == 0:
                k_square = kx * kx
                q_square = qx * qx
            else:
                k_square += kx * kx
                q_square += qx * qx
        k_norm = tl.rsqrt(tl.sum(k_square, axis=2) + 1e-6)
        q_norm = tl.rsqrt(tl.sum(q_square, axis=2) + 1e-6)
        norm = norms_ptr + tile * (2 * C) + line * EACH + tl.arange(0, EACH)[None, :]
        tl.store(norm, q_norm)
        tl.store(norm + C, k_norm)
        k_norm = k_norm[:, :, None]
        q_norm = q_norm[:, :, None]

    # exp2 argument of sigmoid(a (x + bias)) is -log2(e) a (x + bias).
    sharp = -1.4426950408889634
    if HAS_A:
        sharp = exp2(tl.load(a_log_ptr + hv) * 1.4426950408889634, FAST) * (-1.4426950408889634)
    rows = tl.arange(0, C)
    beta = tl.load(
        beta_ptr + batch * b_stride_b + (first64 + rows) * b_stride_t + hv * b_stride_h,
        mask=rows < end - first,
        other=0.0,
    ).to(tl.float32)
    if LOGIT:
        beta = beta_max * reciprocal(1.0 + exp2(beta * (-1.4426950408889634), FAST), FAST)
    beta = tl.where(rows < end - first, beta, 0.0)

    m = tl.zeros([C, C], tl.float32)
    scores = tl.zeros([C, C], tl.float32)
    written = ()
    for p in tl.static_range(BK // PART):
        seen = live if p * PART + PART <= K else live & (p * PART + c3 < K)
        x = tl.load(g_row + r3 * g_step + (p * PART + c3), mask=seen, other=0.0).to(tl.float32)
        kx = tl.load(k_row + r3 * k_step + (p * PART + c3), mask=seen, other=0.0).to(tl.float32)
        qx = tl.load(q_row + r3 * q_step + (p * PART + c3), mask=seen, other=0.0).to(tl.float32)
        if HAS_BIAS:
            if p * PART + PART <= K:
                bias = tl.load(bias_ptr + hv * K + (p * PART + channel))
            else:
                bias = tl.load(bias_ptr + hv * K + (p * PART + channel), mask=p * PART + channel < K, other=0.0)
            z = x * sharp + (bias * sharp)[None, None, :]
        else:
            z = x * sharp
        sigma = tl.where(live, reciprocal(1.0 + exp2(z, FAST), FAST), 0.0)
        # Prefix over a thread's own tokens, then over the ROWS lines before it. The exclusive prefix is a shifted copy,
        # not a difference: subtracting a line's own sum would let its later tokens change its earlier ones' rounding.
        inner = tl.cumsum(sigma, axis=1)
        lines = tl.cumsum(tl.sum(sigma, axis=1), axis=0)
        before = tl.gather(lines, tl.broadcast_to(tl.maximum(line - 1, 0), (ROWS, PART)), 0)
        g = inner + tl.where(line > 0, before, 0.0)[:, None, :]
        last = tl.gather(lines, tl.full((ROWS, PART), ROWS - 1, tl.int32), 0)
        up = exp2(g * bound + shift, FAST)
        down = exp2(g * (-bound) - shift, FAST)
        leave = exp2(last * bound + shift, FAST)
        place = r3 * BK + (p * PART + c3)
        if NORM:
            kx = kx * k_norm
        k_up = kx * up
        k_down = kx * down
        k_minus = k_down * leave[:, None, :]
        tl.store(k_tile + place, k_minus.to(FACTOR))
        if FINE:
            tl.store(k_tile + C * BK + place, k_minus.to(tl.float16).to(FACTOR, bitcast=True))
        tl.store(
            decay_ptr + tile * BK + (p * PART + channel[None, :] + line * 0),
            leave * back,
            mask=tl.broadcast_to(line == 0, (ROWS, PART)),
        )
        written = written + (tl.reshape((k_up * back).to(FACTOR), [C, PART]),)  # noqa: RUF005
        right = tl.trans(tl.reshape(k_down.to(TILE), [C, PART]))
        m = tl.dot(tl.reshape(k_up.to(TILE), [C, PART]), right, m, input_precision=PRECISION)
        if NORM:
            qx = qx * q_norm
        q_up = qx * up
        tl.store(q_tile + place, (q_up * back).to(FACTOR))
        scores = tl.dot(tl.reshape(q_up.to(TILE), [C, PART]), right, scores, input_precision=PRECISION)

    rr = rows[:, None]
    cc = rows[None, :]
    square = tile * SQUARE
    m = tl.where(rr > cc, m * beta[:, None], 0.0)
    inverse = invert_tile(m, p_scratch_ptr + square, a_scratch_ptr + square, C, PRECISION)
    tl.store(p_ptr + tile * (C * C) + rr * C + cc, tl.where(rr >= cc, scores, 0.0).to(FACTOR))
    solved = inverse * beta[None, :]
    tl.store(a_ptr + tile * (C * C) + rr * C + cc, solved.to(VALUE))
    if FINE:
        rest = solved - solved.to(VALUE).to(tl.float32)
        tl.store(a_ptr + (slots.to(tl.int64) * heads + tile) * (C * C) + rr * C + cc, rest.to(VALUE))
    minus = (-solved).to(FACTOR)
    for p in tl.static_range(BK // PART):
        w = tl.dot(minus, written[p], input_precision=PRECISION)
        tl.store(w_tile + rr * BK + (p * PART + channel[None, :]), w.to(FACTOR))


TABLE = Kernel(table_kernel)
PREPARE = Kernel(prepare_kernel)


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    qk_norm: bool,
    beta_is_logit: bool,
    beta_max: float,
    scale: float,
    cu_seqlens: Tensor | None,
    config: Config,
    error: Tensor | None,
) -> Problem:
    """Gather one call's inputs; builds the tile table of a packed row on the device.

    Shapes as in ``trine.ops.kda.kda``. ``error`` is the device's error word (int32), needed with ``cu_seqlens``.
    """
    batch, tokens, key_heads, key_width = q.shape
    heads, value_width = v.shape[2], v.shape[3]
    q, k, v, gate = even_rows(q), even_rows(k), even_rows(v), even_rows(gate)
    a_log, dt_bias = parameter(a_log), parameter(dt_bias)
    table = None
    if cu_seqlens is None:
        sequences, per_sequence = batch, -(-tokens // CHUNK)
        slots = batch * per_sequence
    else:
        cu_seqlens = cu_seqlens.to(q.device).contiguous()
        sequences, per_sequence = cu_seqlens.numel() - 1, 0
        slots = tokens // CHUNK + sequences
        table = new((slots,), torch.int32, q.device)
        TABLE.launch(
            -(-slots // 256),
            (cu_seqlens, table, error, tokens, sequences, sequences.bit_length(), slots),
            _table_variant(cu_seqlens.dtype),
            q.device,
        )
    return Problem(
        q=q,
        k=k,
        v=v,
        gate=gate,
        beta=beta,
        a_log=a_log,
        bias=dt_bias,
        cu=cu_seqlens,
        table=table,
        tokens=tokens,
        sequences=sequences,
        slots=slots,
        tiles_a_sequence=per_sequence,
        heads=heads,
        group=heads // key_heads,
        key_width=key_width,
        value_width=value_width,
        align=alignment(q, k, gate, v),
        norm=qk_norm,
        logit=beta_is_logit,
        bound=lower_bound,
        beta_max=beta_max,
        scale=scale,
        config=config,
    )


@cache
def _table_variant(index_dtype: torch.dtype) -> Variant:
    index = "*" + type_name(index_dtype)
    return Variant((index, "*i32", "*i32", "i32", "i32", "i32", "i32"), (256,), Options(num_warps=4))


@cache
def prepare_variant(
    config: Config,
    dtypes: tuple[torch.dtype, ...],
    index_dtype: torch.dtype | None,
    key_width: int,
    align: int,
    norm: bool,
    logit: bool,
    has_a: bool,
    has_bias: bool,
) -> Variant:
    """The compiled form of ``prepare_kernel`` for these inputs; ``dtypes`` are those of q, k, gate and beta."""
    factor, value = "*" + type_name(config.factor), "*" + type_name(config.value)
    index = "*" + type_name(index_dtype or torch.int32)
    types = (
        *("*" + type_name(dtype) for dtype in dtypes),
        *("*fp32", "*fp32", index, "*i32", factor, factor, value, "*fp32", "*fp32", "*fp32", "*fp32"),
        *(["i64"] * 12),
        *(["i32"] * 5),
        *(["fp32"] * 4),
    )
    constants = (
        key_width,
        config.key_block,
        min(64, config.key_block),
        4 * config.prepare.num_warps if config.prepare.num_warps <= 8 else 32,
        TRITON_TYPES[config.factor],
        TRITON_TYPES[config.value],
        TRITON_TYPES[config.tile],
        align,
        norm,
        logit,
        has_a,
        has_bias,
        index_dtype is not None,
        config.precision,
        CHUNK * CHUNK * config.factor.itemsize // 4,
        config.fine,
        not PREPARE.interpreted,
    )
    return Variant(types, constants, config.prepare)


@cache
def _single_warp() -> Kernel | None:
    """The Gluon kernel, or None where this Triton has no Gluon or kernels are interpreted."""
    if PREPARE.interpreted:
        return None
    try:
        from trine.ops.kda.gluon_prepare import gluon_prepare_kernel
    except ImportError:
        return None
    return Kernel(gluon_prepare_kernel)


@cache
def single_warp_variant(
    config: Config,
    dtypes: tuple[torch.dtype, ...],
    index_dtype: torch.dtype | None,
    key_width: int,
    align: int,
    norm: bool,
    logit: bool,
    has_a: bool,
    has_bias: bool,
) -> Variant:
    """The compiled form of ``gluon_prepare_kernel``, arguments as ``prepare_variant``."""
    factor, value = "*" + type_name(config.factor), "*" + type_name(config.value)
    types = (
        *("*" + type_name(dtype) for dtype in dtypes),
        *("*fp32", "*fp32", "*" + type_name(index_dtype or torch.int32), "*i32"),
        *(factor, factor, value, "*fp32", "*fp32"),
        *(["i64"] * 12),
        *(["i32"] * 5),
        *(["fp32"] * 4),
    )
    constants = (
        *(key_width, config.key_block),
        *(TRITON_TYPES[config.factor], TRITON_TYPES[config.value], TRITON_TYPES[config.tile]),
        *(align, norm, logit, has_a, has_bias, index_dtype is not None, config.fine),
    )
    return Variant(types, constants, Options(num_warps=1))


def prepare(problem: Problem) -> Factors:
    """Launch the first kernel. Allocates 6 K + 136 bytes a token and head in 16-bit factors, 8 K + 200 in fine ones."""
    config, device = problem.config, problem.q.device
    slots, heads, key_block = problem.slots, problem.heads, config.key_block
    wqk = new((4 if config.fine else 3, slots, heads, CHUNK, key_block), config.factor, device)
    p = new((slots, heads, CHUNK, CHUNK), config.factor, device)
    a = new((2 if config.fine else 1, slots, heads, CHUNK, CHUNK), config.value, device)
    decay = new((slots, heads, key_block), torch.float32, device)
    norms = new((slots, heads, 2, CHUNK), torch.float32, device) if problem.norm else None
    align, shift = problem.align, float(anchor(problem.bound))
    q, k, gate, beta = problem.q, problem.k, problem.gate, problem.beta
    half = q.dtype.itemsize == k.dtype.itemsize == gate.dtype.itemsize == 2
    kernel = _single_warp() if config.single_warp and align == 8 and half else None
    scratch: tuple[Tensor, ...] = (p, a)
    if kernel is not None:
        scratch = ()
    elif PREPARE.interpreted:
        scratch = (p.view(torch.float32), a.view(torch.float32))
    variant = (prepare_variant if kernel is None else single_warp_variant)(
        config,
        (q.dtype, k.dtype, gate.dtype, beta.dtype),
        problem.cu.dtype if problem.cu is not None else None,
        problem.key_width,
        align,
        problem.norm,
        problem.logit,
        problem.a_log is not None,
        problem.bias is not None,
    )
    (q0, q1, q2, _), (k0, k1, k2, _), (g0, g1, g2, _) = q.stride(), k.stride(), gate.stride()
    (kernel or PREPARE).launch(
        slots * heads,
        (
            *(q, k, gate, beta, problem.a_log, problem.bias, problem.cu, problem.table),
            *(wqk, p, a, *scratch, decay, norms),
            *(q0 // align, q1 // align, q2 // align, k0 // align, k1 // align, k2 // align),
            *(g0 // align, g1 // align, g2 // align, *beta.stride()),
            *(problem.tokens, problem.tiles_a_sequence, slots, heads, problem.group),
            *(problem.bound * LOG2E, shift, 2.0**-shift, problem.beta_max),
        ),
        variant,
        device,
    )
    return Factors(wqk, p, a, decay, norms)
