"""The backward pass of bounded-decay KDA on a GPU: five launches, nothing saved but the inputs and the output.

1. ``prepare`` (chunk, head), the forward's first kernel, in bf16: factors W, Q+, K-, A, P of each 32-token chunk; for
   the states also K- in fp16 and what rounding left of A.
2. ``scan_kernel``: state scan and reverse scan as two halves of one grid; they need nothing of each other.
3. ``pair_kernel`` (chunk, head): gradients of the 32x32 matrices and sums over value columns.
4. ``gradient_kernel`` (chunk, head, channel block): dq, dk, dgate through L2 norm and gate.
5. ``finish_kernel``: ordered sums over chunks for dt_bias and A_log, over channel blocks for beta. No atomics.

The mathematics stands in the operator's README and in the kernels' docstrings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from trine.ops._errors import error_words
from trine.ops.kda.triton_backward_gradients import gradient_kernel
from trine.ops.kda.triton_backward_pairs import finish_kernel, pair_kernel
from trine.ops.kda.triton_backward_scan import join_kernel, scan_kernel, segment_kernel
from trine.ops.kda.triton_config import CHUNK, LOG2E, Config, anchor, choose, segment_length
from trine.ops.kda.triton_launch import TRITON_TYPES, Kernel, Options, Variant, type_name
from trine.ops.kda.triton_prepare import make_problem, prepare
from trine.ops.kda.triton_problem import NOTHING, Cuts, Factors, Kept, cuts_of, even_rows, new_cuts
from trine.ops.kda.triton_replay import Memory, new

SCAN = Kernel(scan_kernel)
SEGMENTS = Kernel(segment_kernel)
JOIN = Kernel(join_kernel)
PAIRS = Kernel(pair_kernel)
GRADIENT = Kernel(gradient_kernel)
FINISH = Kernel(finish_kernel)
MEMORY = Memory()


class Gradients(NamedTuple):
    """Gradients of ``kda`` with respect to its tensor arguments; None where the argument was None."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None


@dataclass(frozen=True)
class BackwardConfig:
    """How the kernels of one call are cut and compiled; a function of operand type and padded head sizes only.

    Attributes:
        operand: dtype of every product's operands and of the buffers between kernels.
        key_width, value_width: K and V padded to powers of two.
        gradient_block: key channels of one program.
        scan_block, gradient_values, pair_values: value columns of one step.
        scan, pairs, gradient: how the kernels are compiled.
    """

    operand: torch.dtype
    key_width: int
    value_width: int
    scan_block: int
    gradient_block: int
    gradient_values: int
    pair_values: int
    scan: Options
    pairs: Options
    gradient: Options


def _padded(size: int) -> int:
    return max(32, 1 << (size - 1).bit_length())


@cache
def choose_backward(dtype: torch.dtype, K: int, V: int, heads: int = 0) -> BackwardConfig:
    """The committed launch parameters on Hopper for inputs of ``dtype``, head sizes K, V up to 256, and value heads.

    From 32 heads on there are programs enough for the scans to walk all 128 value columns in one: 1.03 ms against 1.08
    at 96 heads; the backward pass of 32 takes 1.263 against 1.273.
    """
    key, value = _padded(K), _padded(V)
    if dtype == torch.float32:
        blocks = (min(32, value), min(64, key), 32, 32)
        slow = Options(num_warps=4)
        return BackwardConfig(torch.float32, key, value, *blocks, slow, slow, slow)
    wide = heads >= 32 and key <= 128 and value == 128
    columns = 128 if wide else 64 if key <= 128 else 32
    return BackwardConfig(
        torch.bfloat16,
        key,
        value,
        scan_block=min(columns, value),
        gradient_block=min(64, key),
        gradient_values=min(64, value),
        pair_values=32,
        scan=Options(num_warps=8 if wide else 4, num_stages=3 if key <= 128 else 2),
        pairs=Options(num_warps=1, num_stages=3),
        gradient=Options(num_warps=4, num_stages=3),
    )


@cache
def factor_config(
    heads: int, K: int, V: int, dtype: torch.dtype, value_dtype: torch.dtype, bounded: bool, fine: bool
) -> Config:
    """How the backward makes the factors: all in its operands' dtype. Cached, as configurations compare by identity.

    With ``fine`` 16-bit ones get their second parts, if keys are unit vectors (``bounded``), whose K- fits fp16.
    """
    chosen = choose(heads, K, V, dtype, value_dtype, bounded, "serial,bf16")
    return replace(chosen, value=chosen.factor, fine=fine and bounded and chosen.factor != torch.float32)


@dataclass(frozen=True)
class _Form:
    """What decides which compiled kernels a call needs, besides its configuration."""

    dtypes: tuple[torch.dtype, ...]  # q, k, v, gate, beta, output, d_output
    index: torch.dtype | None  # of cu_seqlens; None: unpacked
    K: int
    V: int
    norm: bool
    logit: bool
    rate: bool
    bias: bool
    initial: bool
    final: bool
    grouped: bool
    segment: int  # tokens of a segment of the scans, 0: whole sequences
    fine: bool  # the factors have their second parts
    kept: bool  # the forward pass left its cuts
    fast: bool


class Variants(NamedTuple):
    """One compiled form of each kernel, in launch order; the segments' are used when segments are."""

    scan: Variant
    segments: Variant
    join: Variant
    pairs: Variant
    gradient: Variant
    finish: Variant


@cache
def variants(config: BackwardConfig, form: _Form) -> Variants:
    """The compiled forms of the kernels that are the backward's own."""
    q, k, v, gate, beta, output, d_output = ("*" + type_name(dtype) for dtype in form.dtypes)
    x, f, index = "*" + type_name(config.operand), "*fp32", "*" + type_name(form.index or torch.int32)
    operand, packed = TRITON_TYPES[config.operand], form.index is not None
    key, value = config.key_width, config.value_width
    dq = f if form.grouped else q
    widths = (form.K, form.V, key, value, config.scan_block, form.segment, operand, form.initial, form.final, packed)
    walk = (v, d_output, x, x, x, x, x, "*fp16" if form.fine else x, x, f, f, f, index, f, f)
    scan = Variant((*walk, x, x, x, x, f, *["i32"] * 3, "fp32"), (*widths, form.fine), config.scan)
    segments = Variant((*walk, f, *["i32"] * 3, "fp32"), (*widths, form.fine, form.kept), config.scan)
    precision = "tf32x3" if config.operand == torch.float32 else "tf32"
    join = Variant(
        (index, f, f, f, *["i32"] * 2),
        (form.V, key, value, min(128, key), 16, form.segment, packed, precision, form.kept),
        Options(num_warps=4, num_stages=2),
    )
    pairs = Variant(
        (v, beta, d_output, output, index, x, x, x, x, v, x, x, f, *["i32"] * 5, *["fp32"] * 2),
        (form.V, value, min(config.pair_values, value), operand, form.logit, packed, form.fine, form.fast),
        config.pairs,
    )
    gradient = Variant(
        (
            *(q, k, gate, d_output, f, f, index, f, f, x, x, x, x, x, v, dq, dq, gate, f, f, f, f),
            *(*["i32"] * 6, *["fp32"] * 5),
        ),
        (
            *(form.K, form.V, key, value, config.gradient_block, config.gradient_values),
            *(-6e4 if form.dtypes[3] == torch.float16 else -1e30, operand),
            *(form.norm, form.rate, form.bias, packed, form.fast),
        ),
        config.gradient,
    )
    blocks = key // config.gradient_block
    finish = Variant(
        (beta, index, f, f, f, beta, f, f, *["i32"] * 4, "fp32"),
        (form.K, key, blocks, 256, form.logit, form.rate, form.bias, packed, form.fast),
        Options(num_warps=4),
    )
    return Variants(scan, segments, join, pairs, gradient, finish)


def kda_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    output: Tensor,
    d_output: Tensor,
    d_final_state: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    qk_norm: bool = True,
    beta_is_logit: bool = True,
    beta_max: float = 1.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    segment: int | None = None,
    kept: Kept = NOTHING,
    fine: bool = True,
    config: BackwardConfig | None = None,
) -> Gradients:
    """Every gradient of ``kda`` with the bounded gate (K3 report, arXiv 2607.24653, Eq. 1-5), recomputed from inputs.

    Arguments are taken as checked by ``kda``.

    Args:
        q, k: raw ``[B, T, H, K]``, bf16, fp16 or fp32. fp32 keeps fp32-like accuracy; 16-bit types use bf16 operands.
        v: ``[B, T, HV, V]``. gate: raw ``[B, T, HV, K]``. beta: ``[B, T, HV]``.
        output: what the forward pass returned, ``[B, T, HV, V]`` (the L2 norm of q needs q.dq = output.d_output).
        d_output: gradient of the output ``[B, T, HV, V]``.
        d_final_state: gradient of the final state ``[N, HV, K, V]`` or None.
        A_log: ``[HV]`` or None (rate 1). dt_bias: ``[HV, K]``, also flattened, or None.
        lower_bound: bound of the log decay in [-5.4, 0).
        initial_state: ``[N, HV, K, V]`` or None. cu_seqlens: int32 or int64 ``[N+1]`` with B = 1, read on the device
            only; gradients of tokens that it leaves out are zero.
        segment: tokens of a segment of the scans, a multiple of 32, 0 for whole sequences; None chooses by heads and
            head sizes, never by T or data.
        kept: what the forward pass kept: what ``prepare`` made of the same inputs with bf16 factors (fp32 for fp32), to
            save making it again; states and transitions at the cuts of the same segments, to save walking to them.
        fine: walk the states with K- and corrected values in fp16 and A in two parts where 16-bit factors are made here
            and keys are unit vectors, as the forward does. It asks values v to be between about 1e-4 and 1e4.

    Returns:
        Gradients in the types of their inputs; those of states in fp32.

    Raises:
        ValueError: ``output`` or ``d_output`` of another shape than ``v``.
    """
    for name, tensor in (("output", output), ("d_output", d_output)):
        if tensor.shape != v.shape:
            raise ValueError(f"{name}: found shape {tuple(tensor.shape)}, need that of v, {tuple(v.shape)}")
    error = None if cu_seqlens is None else error_words(q.device)

    def plain() -> Gradients:
        return _plain_backward(
            *(q, k, v, gate, beta, output, d_output, d_final_state),
            A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, qk_norm=qk_norm, beta_is_logit=beta_is_logit,
            beta_max=beta_max, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, segment=segment,
            kept=kept, fine=fine, config=config, error=error,
        )  # fmt: skip

    found, replayed = MEMORY.call(
        (lower_bound, qk_norm, beta_is_logit, beta_max, scale, segment, fine, config),
        (
            q,
            k,
            v,
            gate,
            beta,
            output,
            d_output,
            d_final_state,
            A_log,
            dt_bias,
            initial_state,
            cu_seqlens,
            error,
            *kept.tensors(),
        ),
        plain,
        tuple,
    )
    return found if replayed is None else Gradients(*replayed)  # type: ignore[no-any-return,arg-type]


def _walk(
    factors: Factors,
    v: Tensor,
    d_output: Tensor,
    state: Tensor | None,
    d_final: Tensor | None,
    cu: Tensor | None,
    cuts: Cuts | None,
    slots: int,
    segment: int,
    scale: float,
    config: BackwardConfig,
    forms: Variants,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """States before each chunk, their gradients after it, values and their gradients, gradient of the initial state."""
    (B, T, HV, V), device = v.shape, v.device
    N = B if cu is None else cu.numel() - 1
    KP, VP = config.key_width, config.value_width
    k_minus, k_fine = factors.keys()
    fine = (k_minus, None) if k_fine is None else (k_fine, factors.a[1])
    states, d_states = (new((slots, HV, VP, KP), config.operand, device) for _ in range(2))
    values, d_values = (new((slots, HV, VP, CHUNK), config.operand, device) for _ in range(2))
    d_state = None if state is None else new(state.shape, state.dtype, device)
    places, leaving, maps, d_leaving = N, None, None, None
    matrices = (factors.wqk[0], factors.wqk[1], k_minus, factors.a, factors.p, *fine, factors.decay)
    data = (v, d_output, *matrices, state, d_final, cu)
    if segment:
        places = B * -(-T // segment) if cu is None else T // segment + N
        d_leaving = new((places, HV, VP, KP), torch.float32, device)
        made = new_cuts(cuts_of(T, N, segment, cu is not None), HV, V, KP, device) if cuts is None else cuts
        leaving, maps = made.states, made.maps
        onward = VP + KP if cuts is None else 0
        SEGMENTS.launch(
            places * HV * ((onward + VP) // config.scan_block),
            (*data, leaving, d_leaving, maps, T, N, HV, scale),
            forms.segments,
            device,
        )
        directions = 2 if cuts is None else 1
        JOIN.launch(directions * N * HV * (VP // 16), (cu, leaving, d_leaving, maps, T, HV), forms.join, device)
    SCAN.launch(
        2 * places * HV * (VP // config.scan_block),
        (*data, leaving, d_leaving, states, d_states, values, d_values, d_state, T, N, HV, scale),
        forms.scan,
        device,
    )
    return states, d_states, values, d_values, d_state


def _plain_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    output: Tensor,
    d_output: Tensor,
    d_final_state: Tensor | None,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    qk_norm: bool,
    beta_is_logit: bool,
    beta_max: float,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    segment: int | None,
    kept: Kept,
    fine: bool,
    config: BackwardConfig | None,
    error: Tensor | None,
) -> Gradients:
    """``kda_backward`` with every decision taken anew."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    device = q.device
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    scale = K**-0.5 if scale is None else scale
    config = choose_backward(q.dtype, K, V, HV) if config is None else config
    operand, KP, VP = config.operand, config.key_width, config.value_width
    slots = B * -(-T // CHUNK) if cu_seqlens is None else T // CHUNK + N + 1
    q, k, v, gate, beta, output, d_output = (even_rows(x.contiguous()) for x in (q, k, v, gate, beta, output, d_output))
    state = None if initial_state is None else initial_state.float().contiguous()
    d_final = None if d_final_state is None else d_final_state.float().contiguous()
    rate = None if A_log is None else A_log.float().contiguous()
    bias = None if dt_bias is None else dt_bias.float().contiguous()
    cu = None if cu_seqlens is None else cu_seqlens.to(device).contiguous()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return new(shape, dtype, device)

    length = segment_length(HV, K, V) if segment is None else segment
    segment = length if length < T else 0
    if not beta_is_logit:
        # A strength of 0 becomes 2^-24, which does not show beside 1, so that its gradient may divide by it.
        beta = torch.where(beta.abs() < 2.0**-24, 2.0**-24, beta)
    factors, cuts = kept.factors, kept.cuts if segment else None
    if factors is None:
        problem = make_problem(
            *(q, k, v, gate, beta),
            a_log=rate, dt_bias=bias, lower_bound=lower_bound, qk_norm=qk_norm, beta_is_logit=beta_is_logit,
            beta_max=beta_max, scale=scale, cu_seqlens=cu,
            config=factor_config(HV, K, V, q.dtype, v.dtype, qk_norm, fine), error=error,
        )  # fmt: skip
        factors = prepare(problem)
    form = _Form(
        (q.dtype, k.dtype, v.dtype, gate.dtype, beta.dtype, output.dtype, d_output.dtype),
        None if cu is None else cu.dtype, K, V, qk_norm, beta_is_logit, rate is not None, bias is not None,
        state is not None, d_final is not None, HV != H, segment, factors.fine, cuts is not None, not SCAN.interpreted,
    )  # fmt: skip
    forms = variants(config, form)
    a, norms = factors.a, factors.norms
    states, d_states, values, d_values, d_state = _walk(
        factors, v, d_output, state, d_final, cu, cuts, slots, segment, scale, config, forms
    )
    del factors  # the allocator gives their memory, but for these two's, to the gradients
    shift = anchor(lower_bound)
    top = 120 - shift - (0 if qk_norm else 8)
    dp, dm = (empty(slots, HV, CHUNK, CHUNK, dtype=operand) for _ in range(2))
    rows, dv = empty(slots, HV, 5, CHUNK), new(v.shape, v.dtype, device)
    PAIRS.launch(
        slots * HV,
        (
            *(v, beta, d_output, output, cu, a[0], a[1] if form.fine else None),
            *(values, d_values, dv, dp, dm, rows),
            *(T, N, HV, VP // min(config.pair_values, VP), top, scale, beta_max),
        ),
        forms.pairs,
        device,
    )
    del a, d_values
    blocks = KP // config.gradient_block
    dq = empty(B, T, HV, K, dtype=torch.float32 if HV != H else q.dtype)
    dk, dgate, dbeta = (new(x.shape, x.dtype, device) for x in (dq, gate, beta))
    scratch, beta_parts = empty(slots, HV, KP), empty(slots, HV, blocks, CHUNK)
    bias_parts, rate_parts = empty(slots, HV, KP), empty(slots, HV, blocks)
    GRADIENT.launch(
        slots * HV * blocks,
        (
            *(q, k, gate, d_output, rate, bias, cu, rows, norms, dp, dm, states, d_states, values, dv),
            *(dq, dk, dgate, scratch, beta_parts, bias_parts, rate_parts),
            *(T, N, HV, HV // H, blocks, VP // config.gradient_values, scale),
            *(lower_bound, lower_bound * LOG2E, float(shift), 2.0**-shift),
        ),
        forms.gradient,
        device,
    )
    d_rate = None if rate is None else new(rate.shape, rate.dtype, device)
    d_bias = None if bias is None else new(bias.shape, bias.dtype, device)
    sums = KP // 16 if bias is not None else int(rate is not None)
    FINISH.launch(
        (slots + sums) * HV,
        (beta, cu, beta_parts, bias_parts, rate_parts, dbeta, d_rate, d_bias, T, N, HV, slots, beta_max),
        forms.finish,
        device,
    )
    if HV != H:
        dq = dq.view(B, T, H, HV // H, K).sum(3).to(q.dtype)
        dk = dk.view(B, T, H, HV // H, K).sum(3).to(k.dtype)
    return Gradients(
        dq, dk, dv, dgate, dbeta,
        None if d_rate is None or A_log is None else d_rate.to(A_log.dtype),
        None if d_bias is None or dt_bias is None else d_bias.to(dt_bias.dtype),
        d_state,
    )  # fmt: skip
