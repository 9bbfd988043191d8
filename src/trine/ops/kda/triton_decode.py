# mypy: disable-error-code="no-untyped-def,assignment"
"""KDA decode step on a GPU: norm, gate, state update and read-out of one token a sequence in one launch.

With S' = Diag(exp g) S (K3 report, arXiv 2607.24653, Eq. 1) the read-out needs no second pass over the new state::

    u = beta (v - S'^T k)      S = S' + k u^T      o = scale (S'^T q + (k . q) u)

The state is read once and written once; everything else is arithmetic in fp32, whatever dtype the state is stored in.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from trine.ops._errors import check_at_once, error_words
from trine.ops.kda.triton_config import LOG2E, MAX_CHANNELS
from trine.ops.kda.triton_launch import Kernel, Options, Variant, type_name
from trine.ops.kda.triton_prepare import exp2, reciprocal
from trine.ops.kda.triton_problem import alignment, even_rows, parameter

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GATES = {"bounded": 0, "softplus": 1, "log_decay": 2}


@triton.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    index_ptr,
    state_ptr,
    next_ptr,
    out_ptr,
    error_ptr,
    q_stride_n,
    q_stride_h,
    k_stride_n,
    k_stride_h,
    v_stride_n,
    v_stride_h,
    g_stride_n,
    g_stride_h,
    b_stride_n,
    b_stride_h,
    s_stride_n,
    s_stride_h,
    s_stride_k,
    d_stride_n,
    d_stride_h,
    d_stride_k,
    pool,
    heads,
    group,
    bound,
    beta_max,
    scale,
    K: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGN: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INDEXED: tl.constexpr,
    FAST: tl.constexpr,
):
    """One sequence, one value head, BV value channels. Grid: sequences x heads x BLOCKS, blocks fastest.

    An index outside [0, pool) marks padding: its output is 0 and no state is touched; one other than -1 also sets the
    second error word.
    """
    pid = tl.program_id(0)
    block = pid % BLOCKS
    rest = pid // BLOCKS
    hv = rest % heads
    n = (rest // heads).to(tl.int64)
    h = hv // group
    value = block * BV + tl.arange(0, BV)
    key = tl.arange(0, BK)
    there = value < V
    known = key < K
    target = out_ptr + (n * heads + hv) * V + value
    entry = n
    if INDEXED:
        entry = tl.load(index_ptr + n).to(tl.int64)
        if (entry < 0) | (entry >= pool):
            if entry != -1:
                tl.store(error_ptr + 1, 1)
            tl.store(target, tl.zeros([BV], tl.float32).to(out_ptr.dtype.element_ty), mask=there)
            return
    cell = known[:, None] & there[None, :]
    source = state_ptr + (entry * s_stride_n + hv * s_stride_h) * ALIGN
    state = tl.load(source + key[:, None] * s_stride_k * ALIGN + value[None, :], mask=cell, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + n * k_stride_n + h * k_stride_h + key, mask=known, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + n * q_stride_n + h * q_stride_h + key, mask=known, other=0.0).to(tl.float32)
    x = tl.load(gate_ptr + n * g_stride_n + hv * g_stride_h + key, mask=known, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + n * v_stride_n + hv * v_stride_h + value, mask=there, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + n * b_stride_n + hv * b_stride_h).to(tl.float32)
    if LOGIT:
        beta = beta_max * reciprocal(1.0 + exp2(beta * (-1.4426950408889634), FAST), FAST)
    if NORM:
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        q = q * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6)
    if HAS_BIAS:
        x += tl.load(bias_ptr + hv * K + key, mask=known, other=0.0)
    if GATE == 2:
        g = x * 1.4426950408889634
    else:
        slope = 1.0
        if HAS_A:
            slope = exp2(tl.load(a_log_ptr + hv) * 1.4426950408889634, FAST)
        if GATE == 0:
            g = bound * reciprocal(1.0 + exp2(x * slope * (-1.4426950408889634), FAST), FAST)
        else:
            # log2(e) softplus(x) = max(x', 0) + log2(1 + 2^-|x'|), x' = log2(e) x
            y = x * 1.4426950408889634
            g = -slope * (tl.maximum(y, 0.0) + tl.log2(1.0 + exp2(-tl.abs(y), FAST)))
    state = state * exp2(g, FAST)[:, None]
    read = tl.sum(state * q[:, None], axis=0)
    guess = tl.sum(state * k[:, None], axis=0)
    both = tl.sum(k * q, axis=0)
    update = beta * (v - guess)
    state += k[:, None] * update[None, :]
    goal = next_ptr + (entry * d_stride_n + hv * d_stride_h) * ALIGN
    goal += key[:, None] * d_stride_k * ALIGN + value[None, :]
    tl.store(goal, state.to(next_ptr.dtype.element_ty), mask=cell)
    tl.store(target, (scale * (read + both * update)).to(out_ptr.dtype.element_ty), mask=there)


DECODE = Kernel(decode_kernel)


@cache
def decode_variant(
    dtypes: tuple[torch.dtype, ...],
    state_dtype: torch.dtype,
    index_dtype: torch.dtype | None,
    key_width: int,
    value_width: int,
    align: int,
    gate: int,
    norm: bool,
    logit: bool,
    has_a: bool,
    has_bias: bool,
    value_block: int = 64,
    options: Options = Options(num_warps=4),  # noqa: B008  frozen
) -> Variant:
    """The compiled form of ``decode_kernel``; ``dtypes`` are those of q, k, v, gate, beta."""
    state = "*" + type_name(state_dtype)
    types = (
        *("*" + type_name(dtype) for dtype in dtypes),
        *("*fp32", "*fp32", "*" + type_name(index_dtype or torch.int32), state, state, "*" + type_name(dtypes[2])),
        "*i32",
        *(["i64"] * 16),
        *("i32", "i32", "i32", "fp32", "fp32", "fp32"),
    )
    constants = (
        key_width,
        max(16, 1 << (key_width - 1).bit_length()),
        value_width,
        value_block,
        -(-value_width // value_block),
        align,
        gate,
        norm,
        logit,
        has_a,
        has_bias,
        index_dtype is not None,
        not DECODE.interpreted,
    )
    return Variant(types, constants, options)


def unsupported(tensors: tuple[Tensor | None, ...], gate_kind: str, needs_grad: bool, inplace: bool) -> str | None:
    """Why the kernel cannot take this step: what is needed and what was found, or None.

    ``tensors`` are q, k, v, gate, beta, state and two that may have any float type.
    """
    if needs_grad:
        return "the kernel needs inputs without gradient, found one that requires it"
    if gate_kind not in _GATES:
        return f"the kernel needs a gate kind out of {sorted(_GATES)}, found {gate_kind!r}"
    q, v, state = tensors[0], tensors[2], tensors[5]
    assert q is not None and v is not None and state is not None
    if inplace and state.stride(-1) != 1:
        return f"the kernel needs states with contiguous rows for a step in place, found a stride of {state.stride(-1)}"
    if q.shape[-1] > MAX_CHANNELS or v.shape[-1] > MAX_CHANNELS:
        return f"the kernel needs K and V up to {MAX_CHANNELS}, found K={q.shape[-1]}, V={v.shape[-1]}"
    for tensor in tensors[:6]:
        if tensor is not None and tensor.dtype not in _DTYPES:
            return f"the kernel needs bfloat16, float16 or float32, found {tensor.dtype}"
    return None


def kda_step_triton(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    gate: Tensor,
    beta: Tensor,
    state_NHKV: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_kind: str = "bounded",
    lower_bound: float = -5.0,
    qk_norm: bool = True,
    beta_is_logit: bool = True,
    beta_max: float = 1.0,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of N sequences, arguments and results as ``trine.ops.kda.kda_step``, on a GPU, without autograd.

    q, k ``[N,H,K]``, v ``[N,HV,V]``, gate ``[N,HV,K]``, beta ``[N,HV]``; states ``[N,HV,K,V]`` or with
    ``state_indices [N]`` a pool ``[P,HV,K,V]``, in fp32 or bf16 (computed in fp32, rounded once when stored). With
    ``inplace`` and after one warm-up call it launches one kernel, allocates the output only, and can be captured in a
    CUDA graph; otherwise the states are copied first.

    Raises:
        ValueError: more than 256 channels, a state dtype other than fp32 or bf16, or an in-place state whose rows are
            not contiguous or not 16-byte aligned.
    """
    sequences, heads, value_width = v_NHV.shape
    key_width = q_NHK.shape[-1]
    if max(key_width, value_width) > MAX_CHANNELS:
        raise ValueError(f"q, v: found K={key_width} and V={value_width}, need at most {MAX_CHANNELS} on a GPU")
    if state_NHKV.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state: found dtype {state_NHKV.dtype}, need float32 or bfloat16")
    source = even_rows(state_NHKV)
    if inplace:
        if source is not state_NHKV:
            raise ValueError("state: an in-place step needs contiguous rows at a 16-byte aligned address")
        target = state_NHKV
    elif state_indices is not None:
        target = source = source.clone(memory_format=torch.contiguous_format)
    else:
        target = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    q, k, v, gate = even_rows(q_NHK), even_rows(k_NHK), even_rows(v_NHV), even_rows(gate)
    out = torch.empty(sequences, heads, value_width, dtype=v.dtype, device=v.device)
    a_log, bias = parameter(A_log), parameter(dt_bias)
    align = alignment(source, target)
    variant = decode_variant(
        (q.dtype, k.dtype, v.dtype, gate.dtype, beta.dtype),
        source.dtype,
        None if state_indices is None else state_indices.dtype,
        key_width,
        value_width,
        align,
        _GATES[gate_kind],
        qk_norm,
        beta_is_logit,
        a_log is not None,
        bias is not None,
    )
    DECODE.launch(
        sequences * heads * -(-value_width // 64),
        (
            *(q, k, v, gate, beta, a_log, bias, state_indices, source, target, out),
            None if state_indices is None else error_words(q.device),
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *gate.stride()[:2], *beta.stride()),
            *(s // align for s in source.stride()[:3]),
            *(s // align for s in target.stride()[:3]),
            *(source.shape[0], heads, heads // q.shape[1]),
            *(lower_bound * LOG2E, beta_max, key_width**-0.5 if scale is None else scale),
        ),
        variant,
        q.device,
    )
    if state_indices is not None:
        check_at_once(q.device)
    return out, target
