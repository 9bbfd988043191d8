# mypy: disable-error-code="no-untyped-def,assignment"
"""Pieces that the three backward kernels share: where a chunk lies, the gate, prefix sums, exact powers of two."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK: tl.constexpr = tl.constexpr(32)
"""Tokens a chunk. At |log decay| <= 5 its span is 231 binary digits, which fits fp32 around a constant anchor."""


@triton.jit
def locate(cu_seqlens, slot, tokens, sequences, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Find the piece of SIZE tokens (a chunk or a segment) that owns ``slot``.

    Unpacked, sequence n owns ``cdiv(tokens, SIZE)`` slots. Packed, it owns the slots from ``cu[n] // SIZE + n`` on:
    wide enough for any split of the row, and known without reading a length back to the host. Slots past the last
    sequence belong to a virtual one that covers the tokens after ``cu[N]`` (there are none in a well-formed row).

    Returns:
        ``(n, number, first, rows)``: sequence index (``sequences`` for the virtual one), number of the piece in it,
        first token in the packed or flattened row (int64), and how many of its tokens exist (<= 0: none).
    """
    if PACKED:
        low = slot * 0
        high = low + sequences
        while low < high:
            middle = (low + high + 1) // 2
            begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + middle).to(tl.int64), 0), tokens)
            inside = begin // SIZE + middle <= slot
            low = tl.where(inside, middle, low)
            high = tl.where(inside, high, middle - 1)
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + low).to(tl.int64), 0), tokens)
        end = tl.load(cu_seqlens + tl.minimum(low + 1, sequences)).to(tl.int64)
        end = tl.where(low == sequences, tokens, tl.minimum(tl.maximum(end, 0), tokens))
        number = tl.maximum(slot - (begin // SIZE).to(tl.int32) - low, 0)
        n = low
    else:
        pieces = (tokens + SIZE - 1) // SIZE
        n = slot // pieces
        number = slot - n * pieces
        begin = n.to(tl.int64) * tokens
        end = begin + tokens
    first = begin + number.to(tl.int64) * SIZE
    rows = tl.minimum(end - first, SIZE).to(tl.int32)
    return n, number, first, rows


@triton.jit
def span(cu_seqlens, n, tokens, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """First slot of sequence ``n`` for pieces of SIZE tokens, its first token and its end (int64); see ``locate``."""
    if PACKED:
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), tokens)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1).to(tl.int64), begin), tokens)
        first_slot = (begin // SIZE).to(tl.int32) + n
    else:
        begin = n.to(tl.int64) * tokens
        end = begin + tokens
        first_slot = n * ((tokens + SIZE - 1) // SIZE)
    return first_slot, begin, end


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2**x; ``FAST`` takes the machine instruction without the handling of denormal results."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def fetch_ahead(start, BYTES: tl.constexpr, FAST: tl.constexpr):
    """Ask for ``BYTES`` (a power of two) from ``start`` on, needed later: into the L2 cache, holding no register."""
    if FAST:
        lines = start.to(tl.int64) + tl.arange(0, BYTES // 128) * 128
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def logistic(z, FAST: tl.constexpr):
    """1 / (1 + 2^z) in fp32: sigmoid(x) for z = -log2(e) x."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + exp2(z, FAST)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / (1.0 + exp2(z, FAST))


@triton.jit
def logistic_and_slope(z, FAST: tl.constexpr):
    """``(s, s (1 - s))`` of ``logistic``, where 1 - s is 2^z s: subtracting s from 1 would leave a saturated gate, with
    s = 1 - 1e-4, a slope that is right to 1e-3 only.
    """
    power = exp2(z, FAST)
    if FAST:
        s = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        s = 1.0 / (1.0 + power)
    return s, s * (tl.minimum(power, 1e30) * s)  # an infinite power has s = 0


@triton.jit
def load_beta(beta, at, exists, beta_max, BETA_LOGIT: tl.constexpr, FAST: tl.constexpr):
    """Write strength of 32 tokens: ``(b, 1 - sigmoid)``, the second as the sigmoid of -x; b is 0 in missing rows.

    Strengths are kept at least 2^-24 from zero, the last bit that fp32 shows beside a strength of 1, so that a gradient
    may divide by them.
    """
    raw = tl.load(beta + at, mask=exists, other=0.0).to(tl.float32)
    least: tl.constexpr = 5.960464477539063e-08
    if BETA_LOGIT:
        slope = logistic(raw * 1.4426950408889634, FAST)
        b = beta_max * logistic(raw * -1.4426950408889634, FAST)
    else:
        slope = raw * 0.0 + 1.0
        b = raw
    return tl.where(exists, tl.where((b >= 0) & (b < least), least, b), 0.0), slope


@triton.jit
def product(a, b, acc, DT: tl.constexpr):
    """``acc + a @ b`` with fp32 accumulation; fp32 operands keep fp32-like accuracy (three tf32 products)."""
    if tl.float32 == DT:
        return tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def rounded_product(a, b, acc, DT: tl.constexpr):
    """``product``, whose fp32 operands take plain fp32 arithmetic.

    The matrix unit cuts sums off instead of rounding them, always towards zero. The gradient of A_log adds up so many
    of them that this shows: 1.9e-4 at saturated gates instead of 1.1e-6 (README section 10).
    """
    if tl.float32 == DT:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def turn(x, identity, acc, DT: tl.constexpr):
    """``acc + x^T`` for a loaded 16-bit tile x ``[tokens, channels]``, as a product with the identity.

    It brings the tile into the layout of the products around it, and to fp32, exactly and for fewer instructions than a
    conversion; and it keeps the compiler from computing what follows in two layouts. fp32 tiles are simply added.
    """
    if tl.float32 == DT:
        return acc + tl.trans(x.to(tl.float32))
    else:
        return tl.dot(tl.trans(x), identity.to(x.dtype), acc)


@triton.jit
def token_sum(x, ones, acc, DT: tl.constexpr):
    """``acc + x @ ones`` for a 0/1 matrix over tokens: a sum over tokens on the matrix unit.

    16-bit operands take x as two parts, so 16 of its bits enter; a scan over tokens would cost four times as many
    instructions because its operands change lanes at every step.
    """
    if tl.float32 == DT:
        return tl.dot(x, ones.to(tl.float32), acc, input_precision="ieee")
    else:
        high = x.to(DT)
        low = (x - high.to(tl.float32)).to(DT)
        return tl.dot(low, ones.to(DT), tl.dot(high, ones.to(DT), acc))


@triton.jit
def headroom(a, b, top):
    """Exact powers of two ``(up, down)``, up * down = 1, with the largest |a|, |b| times ``up`` in [2^top, 2^(top+1)).

    Both stay normal numbers whatever the largest is: 0, subnormal or not finite.
    """
    largest = tl.maximum(tl.abs(a), tl.abs(b)).to(
        tl.int32, bitcast=True
    )  # ordered like the numbers, as none is negative
    size: tl.constexpr = a.shape[0] * a.shape[1]
    exponent = (tl.max(tl.reshape(largest, [size]), 0) >> 23) & 255
    up = tl.minimum(tl.maximum(254 + top - exponent, 7), 247)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)
