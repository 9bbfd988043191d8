"""KDA on a GPU, differentiable: the forward and backward kernels as one autograd function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trine.ops.kda.triton_backward import kda_backward
from trine.ops.kda.triton_forward import forward


@dataclass(frozen=True)
class _Options:
    """The arguments of one call that are not tensors."""

    lower_bound: float
    qk_norm: bool
    beta_is_logit: bool
    beta_max: float
    scale: float
    plan: str
    keep_factors: bool


class _TritonKDA(torch.autograd.Function):
    """Saves the inputs and the output; with ``keep_factors`` also what the forward's first kernel made of them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and final state; see ``kda_triton_autograd``."""
        plan = options.plan
        if options.keep_factors and q.dtype == torch.bfloat16 and "," not in plan:
            plan += ",bf16"  # the backward's operands, so that it can take over the forward's factors
        out, final, saved = forward(
            q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=options.lower_bound,
            qk_norm=options.qk_norm, beta_is_logit=options.beta_is_logit, beta_max=options.beta_max,
            scale=options.scale, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens, plan=plan,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, gate, beta, A_log, dt_bias, initial_state, cu_seqlens, out)
        ctx.options = options
        ctx.segment = saved.problem.config.segment
        # Given strengths may be 0, which the backward replaces before it makes factors: not the forward's then.
        operand = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
        same = saved.factors.a.dtype == saved.factors.p.dtype == operand
        ctx.factors = saved.factors if options.keep_factors and options.beta_is_logit and same else None
        return out, final

    @staticmethod
    def backward(ctx: Any, *gradients_out: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the eight tensors; None for ``cu_seqlens`` and the options."""
        d_out, d_final = gradients_out
        q, k, v, gate, beta, A_log, dt_bias, initial_state, cu_seqlens, out = ctx.saved_tensors
        options, factors = ctx.options, ctx.factors
        ctx.factors = None  # freed as soon as the scans are done with them
        gradients = kda_backward(
            q, k, v, gate, beta, out, torch.zeros_like(out) if d_out is None else d_out, d_final, A_log=A_log,
            dt_bias=dt_bias, lower_bound=options.lower_bound, qk_norm=options.qk_norm,
            beta_is_logit=options.beta_is_logit, beta_max=options.beta_max, scale=options.scale,
            initial_state=initial_state, cu_seqlens=cu_seqlens, segment=ctx.segment, factors=factors,
        )  # fmt: skip
        return (*gradients, None, None)


def kda_triton_autograd(
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
    keep_factors: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``(output, final_state)`` of ``trine.ops.kda.kda`` with the bounded gate, differentiable, by GPU kernels.

    Arguments are taken as checked by ``kda`` and must be ones the kernels can take (``triton_forward.unsupported``).
    ``keep_factors`` trades memory for speed: 6 K + 128 bytes a token and head stay from forward to backward, which then
    does not make them again; bf16 inputs then take bf16 factors in the forward too (output error 4.1e-3, not 3.3e-3).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = _Options(lower_bound, qk_norm, beta_is_logit, beta_max, scale, plan, keep_factors)
    out, final = _TritonKDA.apply(q, k, v, gate, beta, A_log, dt_bias, initial_state, cu_seqlens, options)
    return out, final if output_final_state else None
