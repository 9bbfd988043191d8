"""KDA forward on a GPU from raw q, k, v, gate input and beta logits, in two launches (four when segmented)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trine._log import logger
from trine.ops.kda.triton_config import MAX_CHANNELS, MAX_DECAY, choose
from trine.ops.kda.triton_launch import check_errors, error_word
from trine.ops.kda.triton_prepare import Factors, Problem, make_problem, prepare
from trine.ops.kda.triton_scan import scan

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(slots=True)
class Saved:
    """What a backward pass may keep of a forward pass.

    Attributes:
        problem: the inputs as the kernels took them.
        factors: every tile's W, Q+, K-, P, A diag(beta) and decay; large, a backward pass may drop and rebuild them.
        initial: the initial states as the kernels took them.
        segments: transposed states at the cuts between segments ``[cuts, HV, V, BK]`` fp32, None for a serial walk.
    """

    problem: Problem
    factors: Factors
    initial: Tensor | None
    segments: Tensor | None


def unsupported(q: Tensor, v: Tensor, gate_kind: str, lower_bound: float) -> str | None:
    """Why these kernels cannot take this call: a sentence with what is needed and what was found, or None."""
    if gate_kind != "bounded":
        return f"the kernels need gate_kind 'bounded', found {gate_kind!r}"
    if not -MAX_DECAY <= lower_bound < 0:
        return f"the kernels need lower_bound in [-{MAX_DECAY}, 0), found {lower_bound}"
    if max(q.shape[-1], v.shape[-1]) > MAX_CHANNELS:
        return f"the kernels need K and V up to {MAX_CHANNELS}, found K={q.shape[-1]}, V={v.shape[-1]}"
    if q.dtype not in _DTYPES or v.dtype not in _DTYPES:
        return f"the kernels need bfloat16, float16 or float32, found {q.dtype} and {v.dtype}"
    return None


@cache
def _say_slow(reason: str) -> None:
    logger.warning("kda: %s; this call and others like it take the slower chunked torch path on the GPU", reason)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    qk_norm: bool = True,
    beta_is_logit: bool = True,
    beta_max: float = 1.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    plan: str = "auto",
) -> tuple[Tensor, Tensor | None, Saved]:
    """Chunked KDA with the bounded gate (K3 report, arXiv 2607.24653, Eq. 1-5), no autograd.

    Shapes as in ``trine.ops.kda.kda``: q, k ``[B,T,H,K]``, v ``[B,T,HV,V]``, gate ``[B,T,HV,K]``, beta ``[B,T,HV]``,
    states ``[N,HV,K,V]`` fp32, one sequence a batch row or ``cu_seqlens [N+1]`` with B = 1. Returns the output in v's
    dtype, the final states in fp32 if asked for, and what a backward pass may keep. Arguments are taken as checked;
    values of ``cu_seqlens`` on the GPU are tested there (``trine.ops.kda.triton_launch.check_errors`` reads the result;
    with ``TRINE_CHECK=1`` in the environment it is read at once).
    """
    heads, key_width = v.shape[2], q.shape[3]
    if q.is_cuda and q.device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(q.device):
            return forward(
                *(q, k, v, gate, beta),
                A_log=A_log,
                dt_bias=dt_bias,
                lower_bound=lower_bound,
                qk_norm=qk_norm,
                beta_is_logit=beta_is_logit,
                beta_max=beta_max,
                scale=scale,
                initial_state=initial_state,
                output_final_state=output_final_state,
                cu_seqlens=cu_seqlens,
                plan=plan,
            )
    config = choose(heads, key_width, v.shape[3], q.dtype, v.dtype, qk_norm, plan)
    problem = make_problem(
        *(q, k, v, gate, beta),
        a_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        qk_norm=qk_norm,
        beta_is_logit=beta_is_logit,
        beta_max=beta_max,
        scale=key_width**-0.5 if scale is None else scale,
        cu_seqlens=cu_seqlens,
        config=config,
        error=None if cu_seqlens is None else error_word(q.device),
    )
    factors = prepare(problem)
    initial = None if initial_state is None else initial_state.float().contiguous()
    out, final, segments = scan(problem, factors, initial, output_final_state, v.dtype)
    if cu_seqlens is not None and os.environ.get("TRINE_CHECK") == "1":
        check_errors(q.device)
    return out, final, Saved(problem, factors, initial, segments)


def kda_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    gate_kind: str = "bounded",
    lower_bound: float = -5.0,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """``(output, final_state)`` with the arguments of ``trine.ops.kda.kda``, see ``forward``.

    What the kernels cannot take (the ``softplus`` and ``log_decay`` gates, whose decay has no floor and so no anchor; a
    lower bound below -5.4; float64; more than 256 channels) runs on the chunked torch path, which a warning says once.
    """
    reason = unsupported(q, v, gate_kind, lower_bound)
    inputs = (q, k, v, gate, beta, *keywords.values())
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        # This entry builds no graph: a silent detour would train on missing gradients.
        reason = reason or "gradients are needed, which this entry of the kernels does not carry yet"
    if reason is not None:
        from trine.ops.kda import kda

        _say_slow(reason)
        return kda(q, k, v, gate, beta, gate_kind=gate_kind, lower_bound=lower_bound, backend="torch", **keywords)
    out, final, _ = forward(q, k, v, gate, beta, lower_bound=lower_bound, **keywords)
    return out, final
