"""The backward pass of bounded-decay KDA on a GPU: three launches, nothing saved but the inputs.

1. ``prepare_kernel`` (chunk, head): factors W, Q+, K-, A, P of each 32-token chunk from the raw inputs.
2. ``scan_kernel``: state scan and reverse scan as two halves of one grid; they need nothing of each other.
3. ``gradient_kernel`` (chunk, head): every gradient, through L2 norm, gate and beta, and one partial sum a chunk for
   dt_bias and A_log. No atomics: a second, ordered sum finishes those two.

The mathematics stands in the operator's README and in the kernels' docstrings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from trine.ops.kda.triton_backward_gradients import gradient_kernel
from trine.ops.kda.triton_backward_prepare import prepare_kernel
from trine.ops.kda.triton_backward_scan import scan_kernel

CHUNK = 32


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
class Configuration:
    """Launch parameters of the three kernels: channels or value columns a block, warps, pipeline stages."""

    prepare_block: int
    prepare_warps: int
    scan_block: int
    scan_warps: int
    scan_stages: int
    gradient_block: int
    gradient_warps: int


def configuration(dtype: torch.dtype, K: int, V: int) -> Configuration:
    """The committed launch parameters for operand type and head sizes (padded to powers of two)."""
    if dtype == torch.float32:
        return Configuration(min(32, K), 4, min(32, V), 4, 1, min(32, K), 8)
    if K > 128 or V > 128:
        return Configuration(min(64, K), 4, min(64, V), 8, 2, min(64, K), 8)
    return Configuration(min(64, K), 2, min(64, V), 4, 3, min(64, K), 4)


def padded(size: int) -> int:
    """Smallest power of two >= size and >= 32: what a kernel's tile holds, the rest masked."""
    return max(32, 1 << (size - 1).bit_length())


def check(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, d_output: Tensor) -> None:
    """Refuse shapes and types that the kernels do not take.

    Raises:
        ValueError: naming the tensor, what was found and what is needed.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    wanted = {
        "k": (k, (B, T, H, K)),
        "v": (v, (B, T, HV, V)),
        "gate": (gate, (B, T, HV, K)),
        "beta": (beta, (B, T, HV)),
        "d_output": (d_output, (B, T, HV, V)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: found shape {tuple(tensor.shape)}, need {shape}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: found device {tensor.device}, need {q.device} like q")
    if HV % H:
        raise ValueError(f"v: found {HV} value heads, need a multiple of the {H} key heads")
    if max(K, V) > 256:
        raise ValueError(f"q, v: found head sizes K={K}, V={V}, need at most 256")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"q: found dtype {q.dtype}, need bfloat16, float16 or float32")


def kda_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
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
    config: Configuration | None = None,
) -> Gradients:
    """Every gradient of ``kda(..., gate_kind="bounded")`` (K3 report, arXiv 2607.24653, Eq. 1-5), recomputed from inputs.

    Args:
        q, k: raw ``[B, T, H, K]``, bf16, fp16 or fp32. fp32 inputs keep fp32-like accuracy; 16-bit ones use bf16 operands.
        v: ``[B, T, HV, V]``. gate: raw ``[B, T, HV, K]``. beta: ``[B, T, HV]``.
        d_output: gradient of the output ``[B, T, HV, V]``.
        d_final_state: gradient of the final state ``[N, HV, K, V]`` or None.
        A_log: ``[HV]`` or None (rate 1). dt_bias: ``[HV, K]``, also flattened, or None.
        lower_bound: bound of the log decay in [-5, 0).
        initial_state: ``[N, HV, K, V]`` or None. cu_seqlens: int32 or int64 ``[N+1]`` with B = 1, read on the device only.

    Returns:
        Gradients in the types of their inputs; states' fp32.

    Raises:
        ValueError: a shape, type or bound that does not fit, named with what was found.
    """
    check(q, k, v, gate, beta, d_output)
    if not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"lower_bound: found {lower_bound}, need a value in [-5, 0)")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    packed = cu_seqlens is not None
    N = cu_seqlens.numel() - 1 if cu_seqlens is not None else B
    scale = K**-0.5 if scale is None else scale
    operand = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    KP, VP = padded(K), padded(V)
    config = configuration(operand, KP, VP) if config is None else config
    slots = T // CHUNK + N + 1 if packed else B * -(-T // CHUNK)
    device = q.device
    q, k, v, gate, beta, d_output = (x.contiguous() for x in (q, k, v, gate, beta, d_output))
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if d_final_state is not None:
        d_final_state = d_final_state.contiguous()
    if dt_bias is not None:
        dt_bias = dt_bias.contiguous()

    d_initial = torch.empty(N, HV, K, V, dtype=torch.float32, device=device) if initial_state is not None else None
    if B * T == 0:
        empty = [torch.zeros_like(x) for x in (q, k, v, gate, beta)]
        if d_initial is not None:
            d_initial = d_initial.zero_() if d_final_state is None else d_final_state.float().clone()
        d_rate = None if A_log is None else torch.zeros_like(A_log)
        return Gradients(*empty, d_rate, None if dt_bias is None else torch.zeros_like(dt_bias), d_initial)

    def buffer(*shape: int, dtype: torch.dtype = operand) -> Tensor:
        return torch.empty(slots, HV, *shape, dtype=dtype, device=device)

    decay_scale = lower_bound * math.log2(math.e)
    anchor = float(round(-decay_scale * CHUNK / 2))
    search = N.bit_length() if packed else 0
    fast = device.type == "cuda"
    flags = {
        "HV": HV, "GROUP": HV // H, "K": K, "KP": KP, "QK_NORM": qk_norm, "BETA_LOGIT": beta_is_logit,
        "HAS_A": A_log is not None, "HAS_BIAS": dt_bias is not None, "PACKED": packed, "SEARCH": search, "FAST": fast,
    }  # fmt: skip
    DT = _triton_type(operand)
    w, q_plus, k_minus = buffer(CHUNK, KP), buffer(CHUNK, KP), buffer(CHUNK, KP)
    a, p = buffer(CHUNK, CHUNK), buffer(CHUNK, CHUNK)
    decay, norms = buffer(KP, dtype=torch.float32), buffer(2, CHUNK, dtype=torch.float32)
    scratch = w.view(torch.float32)
    prepare_kernel[(slots * HV,)](
        q, k, gate, beta, A_log, dt_bias, cu_seqlens, w, q_plus, k_minus, a, p, decay, norms, scratch,
        T, N, scale, decay_scale, anchor, 2.0**-anchor, beta_max,
        BK=min(config.prepare_block, KP), SCRATCH=scratch[0, 0].numel(), DT=DT, num_warps=config.prepare_warps, **flags,
    )  # fmt: skip
    states, d_states = buffer(VP, KP), buffer(VP, KP)
    values, d_values = buffer(VP, CHUNK), buffer(VP, CHUNK)
    BV = min(config.scan_block, VP)
    scan_kernel[(2 * N * HV * (VP // BV),)](
        v, d_output, w, q_plus, k_minus, a, p, decay, initial_state, d_final_state, cu_seqlens,
        states, d_states, values, d_values, d_initial, T, N,
        HV=HV, K=K, V=V, KP=KP, VP=VP, BV=BV, DT=DT, HAS_INITIAL=initial_state is not None,
        HAS_FINAL=d_final_state is not None, PACKED=packed,
        num_warps=config.scan_warps, num_stages=config.scan_stages,
    )  # fmt: skip
    del w, q_plus, k_minus, p, scratch  # their memory serves the gradients
    grouped = HV != H
    wide = torch.float32 if grouped else q.dtype
    dq = torch.empty(B, T, HV, K, dtype=wide, device=device)
    dk = torch.empty_like(dq)
    dv, dgate, dbeta = torch.empty_like(v), torch.empty_like(gate), torch.empty_like(beta)
    make = torch.zeros if packed else torch.empty  # unused slots of a packed row must add nothing
    bias_parts = make(slots, HV, KP, dtype=torch.float32, device=device) if dt_bias is not None else None
    rate_parts = make(slots, HV, dtype=torch.float32, device=device) if A_log is not None else None
    gradient_kernel[(slots * HV,)](
        q, k, v, gate, beta, d_output, A_log, dt_bias, cu_seqlens, a, norms, states, d_states, values, d_values,
        dq, dk, dv, dgate, dbeta, bias_parts, rate_parts,
        T, N, scale, lower_bound, decay_scale, anchor, 2.0**-anchor, beta_max,
        V=V, VP=VP, BK=min(config.gradient_block, KP), DT=DT, num_warps=config.gradient_warps, **flags,
    )  # fmt: skip
    if grouped:
        dq = dq.view(B, T, H, HV // H, K).sum(3).to(q.dtype)
        dk = dk.view(B, T, H, HV // H, K).sum(3).to(k.dtype)
    d_rate = None if rate_parts is None or A_log is None else rate_parts.sum(0).to(A_log.dtype).view_as(A_log)
    d_bias = None
    if bias_parts is not None and dt_bias is not None:
        d_bias = bias_parts.sum(0)[:, :K].to(dt_bias.dtype).reshape(dt_bias.shape)
    return Gradients(dq, dk, dv, dgate, dbeta, d_rate, d_bias, d_initial)


def _triton_type(dtype: torch.dtype) -> triton.language.dtype:
    """The compiler's name of an operand type."""
    return triton.language.float32 if dtype == torch.float32 else triton.language.bfloat16
