"""The backward pass of bounded-decay KDA on a GPU: five launches, nothing saved but the inputs and the output.

1. ``prepare_kernel`` (chunk, head): factors W, Q+, K-, A, P of each 32-token chunk from the raw inputs.
2. ``scan_kernel``: state scan and reverse scan as two halves of one grid; they need nothing of each other.
3. ``pair_kernel`` (chunk, head): gradients of the 32x32 matrices and sums over value columns.
4. ``gradient_kernel`` (chunk, head, channel block): dq, dk, dgate through L2 norm and gate.
5. ``finish_kernel``: ordered sums over chunks for dt_bias and A_log, over channel blocks for beta. No atomics.

The mathematics stands in the operator's README and in the kernels' docstrings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from trine.ops.kda.triton_backward_gradients import gradient_kernel
from trine.ops.kda.triton_backward_pairs import finish_kernel, pair_kernel
from trine.ops.kda.triton_backward_prepare import prepare_kernel
from trine.ops.kda.triton_backward_scan import scan_kernel
from trine.ops.kda.triton_launch import TRITON_TYPES, Kernel, Options, Variant, type_name
from trine.ops.kda.triton_prepare import even_rows

CHUNK = 32
PREPARE = Kernel(prepare_kernel)
SCAN = Kernel(scan_kernel)
PAIRS = Kernel(pair_kernel)
GRADIENT = Kernel(gradient_kernel)
FINISH = Kernel(finish_kernel)


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
        prepare_block, gradient_block: key channels of one step or program. scan_block, gradient_values: value columns.
        prepare, scan, gradient: how the kernels are compiled.
    """

    operand: torch.dtype
    key_width: int
    value_width: int
    prepare_block: int
    scan_block: int
    gradient_block: int
    gradient_values: int
    pair_values: int
    prepare: Options
    scan: Options
    pairs: Options
    gradient: Options


def _padded(size: int) -> int:
    return max(32, 1 << (size - 1).bit_length())


@cache
def choose_backward(dtype: torch.dtype, K: int, V: int) -> BackwardConfig:
    """The committed launch parameters on Hopper for inputs of ``dtype`` and head sizes K, V up to 256."""
    key, value = _padded(K), _padded(V)
    if dtype == torch.float32:
        blocks = (min(32, key), min(32, value), min(64, key), 32, 32)
        slow = Options(num_warps=4)
        return BackwardConfig(torch.float32, key, value, *blocks, slow, slow, slow, slow)
    blocks = (min(64, key), min(64 if key <= 128 else 32, value), min(64, key), 32, 32)
    return BackwardConfig(
        torch.bfloat16,
        key,
        value,
        *blocks,
        prepare=Options(num_warps=4),
        scan=Options(num_warps=4, num_stages=3 if key <= 128 else 2),
        pairs=Options(num_warps=4, num_stages=2),
        gradient=Options(num_warps=4, num_stages=3),
    )


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
    fast: bool


@cache
def variants(config: BackwardConfig, form: _Form) -> tuple[Variant, Variant, Variant, Variant, Variant]:
    """The compiled forms of the five kernels, in launch order."""
    q, k, v, gate, beta, output, d_output = ("*" + type_name(dtype) for dtype in form.dtypes)
    x, f, index = "*" + type_name(config.operand), "*fp32", "*" + type_name(form.index or torch.int32)
    operand, packed = TRITON_TYPES[config.operand], form.index is not None
    key, value = config.key_width, config.value_width
    dq = f if form.grouped else q
    flags = (form.norm, form.logit, form.rate, form.bias, packed, form.fast)
    scratch = CHUNK * key * config.operand.itemsize // 4
    prepare = Variant(
        (q, k, gate, beta, f, f, index, x, x, x, x, x, f, f, f, *["i32"] * 4, *["fp32"] * 5),
        (form.K, key, config.prepare_block, scratch, operand, *flags),
        config.prepare,
    )
    scan = Variant(
        (v, d_output, x, x, x, x, x, f, f, f, index, x, x, x, v, f, *["i32"] * 3),
        (form.K, form.V, key, value, config.scan_block, operand, form.initial, form.final, packed),
        config.scan,
    )
    pairs = Variant(
        (v, beta, d_output, output, index, x, v, x, x, f, *["i32"] * 5, *["fp32"] * 2),
        (form.V, value, min(config.pair_values, value), operand, form.logit, packed, form.fast),
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
    return prepare, scan, pairs, gradient, finish


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

    Returns:
        Gradients in the types of their inputs; those of states in fp32.

    Raises:
        ValueError: ``output`` or ``d_output`` of another shape than ``v``.
    """
    for name, tensor in (("output", output), ("d_output", d_output)):
        if tensor.shape != v.shape:
            raise ValueError(f"{name}: found shape {tuple(tensor.shape)}, need that of v, {tuple(v.shape)}")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    device = q.device
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    scale = K**-0.5 if scale is None else scale
    config = choose_backward(q.dtype, K, V) if config is None else config
    operand, KP, VP = config.operand, config.key_width, config.value_width
    slots = B * -(-T // CHUNK) if cu_seqlens is None else T // CHUNK + N + 1
    q, k, v, gate, beta, output, d_output = (even_rows(x.contiguous()) for x in (q, k, v, gate, beta, output, d_output))
    state = None if initial_state is None else initial_state.float().contiguous()
    d_final = None if d_final_state is None else d_final_state.float().contiguous()
    rate = None if A_log is None else A_log.float().contiguous()
    bias = None if dt_bias is None else dt_bias.float().contiguous()
    cu = None if cu_seqlens is None else cu_seqlens.to(device).contiguous()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    form = _Form(
        (q.dtype, k.dtype, v.dtype, gate.dtype, beta.dtype, output.dtype, d_output.dtype),
        None if cu is None else cu.dtype, K, V, qk_norm, beta_is_logit, rate is not None, bias is not None,
        state is not None, d_final is not None, HV != H, device.type == "cuda",
    )  # fmt: skip
    prepare, scan, pairs, gradient, finish = variants(config, form)
    decay_scale = lower_bound * math.log2(math.e)
    anchor = round(-decay_scale * CHUNK / 2)
    powers = (decay_scale, float(anchor), 2.0**-anchor, beta_max)

    w, q_plus, k_minus = (empty(slots, HV, CHUNK, KP, dtype=operand) for _ in range(3))
    a, p = (empty(slots, HV, CHUNK, CHUNK, dtype=operand) for _ in range(2))
    decay, norms = empty(slots, HV, KP), empty(slots, HV, 2, CHUNK)
    PREPARE.launch(
        slots * HV,
        (
            *(q, k, gate, beta, rate, bias, cu, w, q_plus, k_minus, a, p, decay, norms, w.view(torch.float32)),
            *(T, N, HV, HV // H, scale, *powers),
        ),
        prepare,
        device,
    )
    states, d_states = (empty(slots, HV, VP, KP, dtype=operand) for _ in range(2))
    values, dv = empty(slots, HV, VP, CHUNK, dtype=operand), torch.empty_like(v)
    d_state = None if state is None else torch.empty_like(state)
    SCAN.launch(
        2 * N * HV * (VP // config.scan_block),
        (
            *(v, d_output, w, q_plus, k_minus, a, p, decay, state, d_final, cu),
            *(states, d_states, values, dv, d_state, T, N, HV),
        ),
        scan,
        device,
    )
    del w, q_plus, k_minus, a, p, decay  # the allocator gives their memory to the gradients
    top = 120 - anchor - (0 if qk_norm else 8)
    dp, dm = (empty(slots, HV, CHUNK, CHUNK, dtype=operand) for _ in range(2))
    rows = empty(slots, HV, 5, CHUNK)
    PAIRS.launch(
        slots * HV,
        (
            *(v, beta, d_output, output, cu, values, dv, dp, dm, rows),
            *(T, N, HV, VP // min(config.pair_values, VP), top, scale, beta_max),
        ),
        pairs,
        device,
    )
    blocks = KP // config.gradient_block
    dq = empty(B, T, HV, K, dtype=torch.float32 if HV != H else q.dtype)
    dk, dgate, dbeta = torch.empty_like(dq), torch.empty_like(gate), torch.empty_like(beta)
    scratch, beta_parts = empty(slots, HV, KP), empty(slots, HV, blocks, CHUNK)
    bias_parts, rate_parts = empty(slots, HV, KP), empty(slots, HV, blocks)
    GRADIENT.launch(
        slots * HV * blocks,
        (
            *(q, k, gate, d_output, rate, bias, cu, norms, rows, dp, dm, states, d_states, values, dv),
            *(dq, dk, dgate, scratch, beta_parts, bias_parts, rate_parts),
            *(T, N, HV, HV // H, blocks, VP // config.gradient_values, scale, lower_bound, *powers[:3]),
        ),
        gradient,
        device,
    )
    d_rate = None if rate is None else torch.empty_like(rate)
    d_bias = None if bias is None else torch.empty_like(bias)
    sums = KP // 16 if bias is not None else int(rate is not None)
    FINISH.launch(
        (slots + sums) * HV,
        (beta, cu, beta_parts, bias_parts, rate_parts, dbeta, d_rate, d_bias, T, N, HV, slots, beta_max),
        finish,
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
