# mypy: disable-error-code="no-untyped-def,assignment"
"""The kernel of ``triton_prepare`` once more in Gluon, one warp a tile: same inputs, same outputs, fewer instructions.

Plain Triton stages every product's operands through shared memory and repeats per-row work in each warp. Here a thread
owns 4 consecutive tokens x 8 consecutive channels, which is, up to the order of rows and channels, exactly how the
matrix unit wants both operands: ``k`` of one thread serves as left and as right operand from its registers. Rows of
products come out in lane order (row 8m + t holds token 4t + m) and go back to token order where they are stored, which
again costs nothing. One warp has no barriers to wait for and computes everything per row once.

Tiles are made from the last to the first, and W, Q+ and K- are stored as what leaves the L2 cache last: the walk that
follows over a sequence begins with the tiles that were made last.

Only 16-bit inputs and factors, K padded to 64, 128 or 256; everything else takes ``triton_prepare``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2


@gluon.jit
def exp2(x):
    """2^x, the card's instruction."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    """1/x, the card's instruction."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def from_line(x, line):
    """The value that the lane of tokens 4 line to 4 line + 3 holds, for every lane of the same channels."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 source; mov.u32 source, %laneid; and.b32 source, source, 3; mad.lo.s32 source, $2, 4, source; "
        "shfl.sync.idx.b32 $0, $1, source, 31, 0xffffffff; }",
        "=f,f,r",
        [x, line],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def from_before(x, LANES: gl.constexpr):
    """The value of the lane LANES before; the lane's own where there is none."""
    return gl.inline_asm_elementwise(
        "shfl.sync.up.b32 $0, $1, " + LANES + ", 0, 0xffffffff;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def running_sum(x, TILE: gl.constexpr, LINES: gl.constexpr):
    """Sum over tokens up to and with each, of ``[32 tokens, 32 channels]``, and its four planes (token % 4).

    Nothing of a token depends on a later one: not even the rounding.
    """
    PLANE: gl.constexpr = gl.SliceLayout(1, LINES)
    line = gl.arange(0, 8, layout=gl.SliceLayout(1, PLANE))[:, None]
    planes = gl.reshape(gl.permute(gl.reshape(x, [8, 4, 32]), [0, 2, 1]), [8, 32, 2, 2])
    even, odd = gl.split(planes)
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    s0 = gl.convert_layout(s0, PLANE, assert_trivial=True)
    s1 = s0 + gl.convert_layout(s1, PLANE, assert_trivial=True)
    s2 = s1 + gl.convert_layout(s2, PLANE, assert_trivial=True)
    s3 = s2 + gl.convert_layout(s3, PLANE, assert_trivial=True)
    lines = s3
    lines = gl.where(line >= 1, lines + from_before(lines, "4"), lines)
    lines = gl.where(line >= 2, lines + from_before(lines, "8"), lines)
    lines = gl.where(line >= 4, lines + from_before(lines, "16"), lines)
    before = gl.where(line >= 1, from_before(lines, "4"), 0.0)
    s0 = s0 + before
    s1 = s1 + before
    s2 = s2 + before
    s3 = s3 + before
    joined = gl.join(gl.join(s0, s2), gl.join(s1, s3))
    whole = gl.permute(gl.reshape(joined, [8, 32, 4]), [0, 2, 1])
    return gl.convert_layout(gl.reshape(whole, [32, 32]), TILE, assert_trivial=True), s0, s1, s2, s3


@gluon.jit
def as_left(x, MMA: gl.constexpr):
    """``[32 tokens, 32 channels]`` as left operand; a relabelling of registers."""
    x = gl.reshape(x, [8, 4, 4, 2, 2, 2])
    x = gl.permute(x, [1, 0, 3, 4, 2, 5])
    return gl.convert_layout(gl.reshape(x, [32, 32]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def as_right(x, MMA: gl.constexpr):
    """``[32 tokens, 32 channels]``, transposed, as right operand; a relabelling of registers."""
    x = gl.reshape(x, [8, 4, 4, 2, 2, 2])
    x = gl.permute(x, [3, 4, 2, 5, 1, 0])
    return gl.convert_layout(gl.reshape(x, [32, 32]), gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def in_token_order(x, TILE: gl.constexpr):
    """A product ``[32, 32]`` whose rows and columns are in lane order, in token order; a relabelling of registers."""
    x = gl.permute(gl.reshape(x, [4, 8, 4, 8]), [1, 0, 3, 2])
    return gl.convert_layout(gl.reshape(x, [32, 32]), TILE, assert_trivial=True)


@gluon.jit
def fetch(target, row, K: gl.constexpr, BK: gl.constexpr, TILE: gl.constexpr):
    """Start copying rows into shared memory ``[BK / 32, 32, 32]``: ``row`` points at each row's first channel.

    Channels from K on become zero.
    """
    col = gl.arange(0, 32, layout=gl.SliceLayout(0, TILE))[None, :]
    for p in gl.static_range(BK // 32):
        if p * 32 + 32 <= K:
            async_copy.async_copy_global_to_shared(target.index(p), row + (p * 32 + col))
        else:
            async_copy.async_copy_global_to_shared(target.index(p), row + (p * 32 + col), mask=p * 32 + col < K)


@gluon.jit
def fp32_part(source, p, SHARED: gl.constexpr, TILE: gl.constexpr):
    """Channels 32 p to 32 p + 31 in fp32. A shift and a mask part a bf16 pair; a cast takes three instructions."""
    if source.dtype == gl.bfloat16:
        PAIRS: gl.constexpr = gl.BlockedLayout([4, 4], [8, 4], [1, 1], [1, 0])
        WORDS: gl.constexpr = gl.SharedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 8], [4, 0], [1, 4], [2, 8], [8, 0], [16, 0]]
        )
        x = source.index(p)._reinterpret(gl.int32, [32, 16], WORDS).load(PAIRS)
        low = (x << 16).to(gl.float32, bitcast=True)
        high = (x & -65536).to(gl.float32, bitcast=True)
        y = gl.convert_layout(gl.reshape(gl.join(low, high), [32, 32]), TILE, assert_trivial=True)
    else:
        y = source.index(p).load(TILE).to(gl.float32)
    return y


@gluon.jit
def squares(x, MMA: gl.constexpr, acc0, acc1):
    """Adds the products of rows with themselves (on the diagonals of two 16x16 blocks): sums of squares of rows."""
    left = gl.permute(gl.reshape(x, [8, 4, 4, 2, 2, 2]), [1, 0, 3, 4, 2, 5])
    left = gl.permute(gl.reshape(left, [2, 16, 32]), [1, 2, 0])
    right = gl.permute(gl.reshape(x, [8, 4, 4, 2, 2, 2]), [3, 4, 2, 5, 1, 0])
    right = gl.permute(gl.reshape(right, [32, 2, 16]), [0, 2, 1])
    left0, left1 = gl.split(left)
    right0, right1 = gl.split(right)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    left0 = gl.convert_layout(left0, LEFT, assert_trivial=True)
    left1 = gl.convert_layout(left1, LEFT, assert_trivial=True)
    right0 = gl.convert_layout(right0, RIGHT, assert_trivial=True)
    right1 = gl.convert_layout(right1, RIGHT, assert_trivial=True)
    return mma_v2(left0, right0, acc0), mma_v2(left1, right1, acc1)


@gluon.jit
def row_norms(acc0, acc1, MMA: gl.constexpr, TILE: gl.constexpr):
    """Reciprocal L2 norms of the 32 rows, in token order along the rows of layout TILE, from ``squares``."""
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))[:, None]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, MMA))[None, :]
    top = gl.sum(gl.where(r == c, acc0, 0.0), axis=1)
    bottom = gl.sum(gl.where(r == c, acc1, 0.0), axis=1)
    both = gl.reshape(gl.permute(gl.join(top, bottom), [1, 0]), [4, 8])
    both = gl.reshape(gl.permute(both, [1, 0]), [32])
    return gl.convert_layout(gl.rsqrt(both + 1e-6), gl.SliceLayout(1, TILE))


@gluon.jit
def solve_rows(m, x, FIRST: gl.constexpr):
    """Rows FIRST to FIRST + 15 of the inverse of I + m within their diagonal block: forward substitution, fp32.

    One lane a column; four entries of m are one broadcast read.
    """
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])
    QUAD: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    ONE: gl.constexpr = gl.SliceLayout(1, COLUMNS)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, COLUMNS))[None, :]
    rows = (gl.where(column == 0, 1.0, 0.0),)
    for i in gl.static_range(1, 16):
        new = gl.where(column == i, 1.0, 0.0)
        for g in gl.static_range((i + 3) // 4):
            quad = m.slice(FIRST + i, 1, 0).slice(FIRST + g * 4, 4, 1).load(QUAD)
            even, odd = gl.split(gl.reshape(quad, [1, 2, 2]))
            m0, m2 = gl.split(even)
            m1, m3 = gl.split(odd)
            new -= gl.convert_layout(m0, ONE)[:, None] * rows[g * 4]
            if g * 4 + 1 < i:
                new -= gl.convert_layout(m1, ONE)[:, None] * rows[g * 4 + 1]
            if g * 4 + 2 < i:
                new -= gl.convert_layout(m2, ONE)[:, None] * rows[g * 4 + 2]
            if g * 4 + 3 < i:
                new -= gl.convert_layout(m3, ONE)[:, None] * rows[g * 4 + 3]
        rows = rows + (new,)  # noqa: RUF005
    # One store of all rows: the bits of the row number become dimensions, the highest first.
    bit3 = ()
    for i in gl.static_range(8):
        bit3 = bit3 + (gl.join(rows[i], rows[i + 8]),)  # noqa: RUF005
    bit2 = ()
    for i in gl.static_range(4):
        bit2 = bit2 + (gl.join(bit3[i], bit3[i + 4]),)  # noqa: RUF005
    bit1 = (gl.join(bit2[0], bit2[2]), gl.join(bit2[1], bit2[3]))
    whole = gl.reshape(gl.join(bit1[0], bit1[1]), [16, 16])
    x.slice(FIRST, 16, 0).slice(FIRST, 16, 1).store(gl.permute(whole, [1, 0]))


@gluon.jit
def invert(m, x, MMA: gl.constexpr):
    """x = (I + m)^-1 for a strictly lower triangular m, both 32x32 fp32 in shared memory.

    Two 16-row blocks by forward substitution, then ``-A22 m21 A11`` for the block below.
    """
    solve_rows(m, x, 0)
    solve_rows(m, x, 16)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 1)
    zero = gl.zeros([16, 16], gl.float32, MMA)
    x.slice(0, 16, 0).slice(16, 16, 1).store(zero)
    a22 = x.slice(16, 16, 0).slice(16, 16, 1).load(LEFT)
    m21 = m.slice(16, 16, 0).slice(0, 16, 1).load(RIGHT)
    a11 = x.slice(0, 16, 0).slice(0, 16, 1).load(RIGHT)
    z = mma_v2(a22, m21, zero, input_precision="tf32")
    a21 = mma_v2(gl.convert_layout(z, LEFT), a11, zero, input_precision="tf32")
    x.slice(16, 16, 0).slice(0, 16, 1).store(-a21)


@gluon.jit
def gluon_prepare_kernel(
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
    K: gl.constexpr,
    BK: gl.constexpr,
    FACTOR: gl.constexpr,
    VALUE: gl.constexpr,
    TILE_TYPE: gl.constexpr,
    ALIGN: gl.constexpr,
    NORM: gl.constexpr,
    LOGIT: gl.constexpr,
    HAS_A: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PACKED: gl.constexpr,
    FINE: gl.constexpr,
):
    """One 32-token tile of one value head by one warp; arguments and results as ``triton_prepare.prepare_kernel``."""
    C: gl.constexpr = 32
    TILE: gl.constexpr = gl.BlockedLayout([4, 8], [8, 4], [1, 1], [1, 0])
    # Rows 4 apart share a 128-byte line and chunks are exchanged by the row's low bits: no bank conflict, neither for
    # threads reading their own tokens nor for the matrix unit reading columns.
    SHARED: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [4, 0], [1, 8], [2, 16], [8, 0], [16, 0]]
    )
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4, 8], [8, 1, 4], [1, 1, 1], [2, 1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    pid = gl.program_id(0)
    slot = slots - 1 - pid // heads
    hv = pid % heads
    if PACKED:
        n = gl.load(table_ptr + slot)
        start = gl.minimum(gl.maximum(gl.load(cu_ptr + n), 0), tokens).to(gl.int32)
        end = gl.minimum(gl.maximum(gl.load(cu_ptr + n + 1), start), tokens).to(gl.int32)
        first = start + (slot - (start // 32 + n)) * 32
        batch = (n * 0).to(gl.int64)
    else:
        n = slot // tiles_a_sequence
        first = (slot - n * tiles_a_sequence) * 32
        end = tokens
        batch = n.to(gl.int64)
    left = end - first
    if left <= 0:
        return
    tile = slot.to(gl.int64) * heads + hv
    plane = slots.to(gl.int64) * heads * (C * BK)
    w_tile = factors_ptr + tile * (C * BK)
    k_tile = factors_ptr + plane * 2 + tile * (C * BK * (2 if FINE else 1))
    first64 = first.to(gl.int64)
    h = hv // group
    q_row = q_ptr + (batch * q_stride_b + first64 * q_stride_t + h * q_stride_h) * ALIGN
    k_row = k_ptr + (batch * k_stride_b + first64 * k_stride_t + h * k_stride_h) * ALIGN
    g_row = gate_ptr + (batch * g_stride_b + first64 * g_stride_t + hv * g_stride_h) * ALIGN

    row = gl.arange(0, C, layout=gl.SliceLayout(1, TILE))
    col = gl.arange(0, 32, layout=gl.SliceLayout(0, TILE))[None, :]
    # Rows behind the end read the last row again, which is always there, and are scaled to zero below.
    near = gl.minimum(row, left - 1)[:, None]
    k_all = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [BK // 32, C, 32], SHARED)
    q_all = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [BK // 32, C, 32], SHARED)
    g_all = gl.allocate_shared_memory(gate_ptr.dtype.element_ty, [BK // 32, C, 32], SHARED)
    fetch(k_all, k_row + near * (k_stride_t.to(gl.int32) * ALIGN), K, BK, TILE)
    fetch(q_all, q_row + near * (q_stride_t.to(gl.int32) * ALIGN), K, BK, TILE)
    async_copy.commit_group()
    fetch(g_all, g_row + near * (g_stride_t.to(gl.int32) * ALIGN), K, BK, TILE)
    bias_all = gl.allocate_shared_memory(gl.float32, [BK // 32, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if HAS_BIAS:
        FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
        for p in gl.static_range(BK // 32):
            channel = p * 32 + gl.arange(0, 32, layout=FOUR)
            if p * 32 + 32 <= K:
                async_copy.async_copy_global_to_shared(bias_all.index(p), bias_ptr + hv * K + channel)
            else:
                async_copy.async_copy_global_to_shared(bias_all.index(p), bias_ptr + hv * K + channel, mask=channel < K)
    async_copy.commit_group()
    beta_at = beta_ptr + batch * b_stride_b + hv * b_stride_h
    beta = gl.load(beta_at + (first64 + row) * b_stride_t, mask=row < left, other=0.0).to(gl.float32)
    sharp = -1.4426950408889634
    if HAS_A:
        sharp = exp2(gl.load(a_log_ptr + hv) * 1.4426950408889634) * (-1.4426950408889634)
    live = gl.where(row < left, 1.0, 0.0)
    async_copy.wait_group(1)
    gl.thread_barrier()
    if NORM:
        zero16 = gl.zeros([16, 16], gl.float32, MMA)
        k0 = zero16
        k1 = zero16
        q0 = zero16
        q1 = zero16
        for p in range(BK // 32):
            k0, k1 = squares(k_all.index(p).load(TILE), MMA, k0, k1)
            q0, q1 = squares(q_all.index(p).load(TILE), MMA, q0, q1)
        k_scale = row_norms(k0, k1, MMA, TILE)
        q_scale = row_norms(q0, q1, MMA, TILE)
        gl.store(norms_ptr + tile * (2 * C) + row, q_scale)
        gl.store(norms_ptr + tile * (2 * C) + C + row, k_scale)
        k_scale = (k_scale * live)[:, None]
        q_scale = (q_scale * live)[:, None]
    else:
        k_scale = live[:, None]
        q_scale = live[:, None]
    async_copy.wait_group(0)
    gl.thread_barrier()

    m = gl.zeros([C, C], gl.float32, MMA)
    scores = gl.zeros([C, C], gl.float32, MMA)
    place = row[:, None] * BK + col
    lines = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(1, LINES)))[:, None]
    channels = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LINES)))[None, :]
    line3 = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, LINES)))[:, None, None]
    step3 = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LINES)))[None, :, None]
    channel3 = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LINES)))[None, None, :]
    place3 = (line3 * 4 + step3) * BK + channel3
    for p in range(BK // 32):
        z = fp32_part(g_all, p, SHARED, TILE) * sharp
        if HAS_BIAS:
            z = z + (bias_all.index(p).load(gl.SliceLayout(0, TILE)) * sharp)[None, :]
        sigma = reciprocal(1.0 + exp2(z))
        g, s0, s1, s2, tail = running_sum(sigma, TILE, LINES)
        # The sum up to the last row, where it lies: rows behind it count a copy of its gate, which nobody reads.
        if left < C:
            step = (left - 1) % 4
            tail = gl.where(step == 0, s0, gl.where(step == 1, s1, gl.where(step == 2, s2, tail)))
        tail = gl.convert_layout(tail, gl.SliceLayout(1, LINES), assert_trivial=True)
        leave = exp2(from_line(tail, (gl.minimum(left, C) - 1) // 4 + lines * 0 + channels * 0) * bound + shift)
        up = exp2(g * bound + shift)
        down = exp2(g * (-bound) - shift)
        kx = fp32_part(k_all, p, SHARED, TILE) * k_scale
        k_up = kx * up
        k_down = kx * down
        k_minus = gl.convert_layout(gl.reshape(k_down, [8, 4, 32]), LINES, assert_trivial=True) * leave[:, None, :]
        gl.store(k_tile + place3 + p * 32, k_minus.to(FACTOR), eviction_policy="evict_last")
        if FINE:
            gl.store(k_tile + C * BK + place3 + p * 32, k_minus.to(gl.float16).to(FACTOR, bitcast=True))
        gl.store(decay_ptr + tile * BK + (p * 32 + channels + lines * 0), leave * back, mask=channels + lines * 32 < 32)
        rows = gl.permute(gl.reshape((k_up * back).to(FACTOR), [4, 2, 2, 2, 32]), [1, 2, 0, 3, 4])
        k_all.index(p)._reinterpret(FACTOR, [C, 32], SHARED).store(gl.reshape(rows, [C, 32]))
        right = as_right(k_down.to(TILE_TYPE), MMA)
        m = mma_v2(as_left(k_up.to(TILE_TYPE), MMA), right, m)
        q_up = fp32_part(q_all, p, SHARED, TILE) * q_scale * up
        gl.store(w_tile + plane + place + p * 32, (q_up * back).to(FACTOR), eviction_policy="evict_last")
        scores = mma_v2(as_left(q_up.to(TILE_TYPE), MMA), right, scores)

    if LOGIT:
        beta = beta_max * reciprocal(1.0 + exp2(beta * (-1.4426950408889634)))
    beta = gl.where(row < left, beta, 0.0)
    m = gl.where(row[:, None] > col, in_token_order(m, TILE) * beta[:, None], 0.0)
    scores = gl.where(row[:, None] >= col, in_token_order(scores, TILE), 0.0)
    gl.store(p_ptr + tile * (C * C) + row[:, None] * C + col, scores.to(FACTOR))
    # The gate's and the queries' memory is free by now.
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    m_all = g_all._reinterpret(gl.float32, [BK // 64, C, C], PLAIN).index(0)
    x_all = q_all._reinterpret(gl.float32, [BK // 64, C, C], PLAIN).index(0)
    m_all.store(m)
    invert(m_all, x_all, MMA)
    solved = x_all.load(TILE) * gl.convert_layout(beta, gl.SliceLayout(0, TILE))[None, :]
    gl.store(a_ptr + tile * (C * C) + row[:, None] * C + col, solved.to(VALUE))
    if FINE:
        rest = solved - solved.to(VALUE).to(gl.float32)
        rest_tile = a_ptr + (slots.to(gl.int64) * heads + tile) * (C * C)
        gl.store(rest_tile + row[:, None] * C + col, rest.to(VALUE))
    minus = as_left((-solved).to(FACTOR), MMA)
    out_row = gl.arange(0, C, layout=gl.SliceLayout(1, OUT))[:, None]
    out_col = gl.arange(0, 32, layout=gl.SliceLayout(0, OUT))[None, :]
    for p in range(BK // 32):
        written = k_all.index(p)._reinterpret(FACTOR, [C, 32], SHARED).load(gl.DotOperandLayout(1, MMA, 2))
        w = mma_v2(minus, written, gl.zeros([C, 32], gl.float32, MMA)).to(FACTOR)
        w = gl.reshape(gl.permute(gl.reshape(w, [4, 8, 32]), [1, 0, 2]), [C, 32])
        gl.store(w_tile + out_row * BK + (p * 32 + out_col), gl.convert_layout(w, OUT), eviction_policy="evict_last")
