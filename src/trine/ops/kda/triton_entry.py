"""What ``kda`` and ``kda_step`` call on a card: launches at once when running, registered operators when traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.ops._autograd import refuse_tangents
from trine.ops.kda._choice import traced
from trine.ops.kda.triton_backward_autograd import Settings, differentiable
from trine.ops.kda.triton_decode import kda_step_triton
from trine.ops.kda.triton_forward import forward
from trine.ops.kda.triton_native import NATIVE
from trine.ops.kda.triton_problem import in_memory
from trine.ops.kda.triton_replay import ACTIVE


def _in_memory(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(in_memory(x) for x in tensors)


def kda_triton(
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
    save: str = "inputs",
    kind: tuple[object, ...] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(output, final_state)`` of ``trine.ops.kda.kda`` with the bounded gate; arguments as checked by it.

    ``kind``: what `kda` knows this call by, if a call of its kind may be replayed.
    """
    tensors = (q, k, v, gate, beta, A_log, dt_bias, initial_state, cu_seqlens)
    tracing = traced(q)
    if not tracing:
        refuse_tangents("kda", tensors)
        q, k, v, gate, beta, A_log, dt_bias, initial_state, cu_seqlens = tensors = _in_memory(tensors)
    if tracing or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)):
        settings = Settings(
            lower_bound, qk_norm, beta_is_logit, beta_max, scale, plan, save == "factors", output_final_state
        )
        if tracing:
            from trine.ops.kda.triton_library import kda_registered

            return kda_registered(*tensors, settings)
        return differentiable(tensors, settings, kind)
    out, final, _ = forward(
        q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, qk_norm=qk_norm,
        beta_is_logit=beta_is_logit, beta_max=beta_max, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, plan=plan,
    )  # fmt: skip
    NATIVE.know(kind, ACTIVE.latest, None)
    return out, final


def step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate_kind: str,
    lower_bound: float,
    qk_norm: bool,
    beta_is_logit: bool,
    beta_max: float,
    scale: float | None,
    state_indices: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """``(output, state)`` of ``trine.ops.kda.kda_step``; arguments are taken as checked by it.

    Raises:
        ValueError: a state that cannot be written in place.
    """
    if traced(q):
        from trine.ops.kda.triton_library import kda_step_registered

        return kda_step_registered(
            *(q, k, v, gate, beta, state, A_log, dt_bias, state_indices),
            *(gate_kind, lower_bound, qk_norm, beta_is_logit, beta_max, scale),
            inplace=inplace,
        )
    refuse_tangents("kda_step", (q, k, v, gate, beta, state, A_log, dt_bias))
    given = state
    q, k, v, gate, beta, state, A_log, dt_bias = _in_memory((q, k, v, gate, beta, state, A_log, dt_bias))
    if inplace and state is not given:
        raise ValueError(
            "state: found a negated view or zeros without memory, need a tensor that can be written in place"
        )
    return kda_step_triton(
        q, k, v, gate, beta, state, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind, lower_bound=lower_bound,
        qk_norm=qk_norm, beta_is_logit=beta_is_logit, beta_max=beta_max, scale=scale, state_indices=state_indices,
        inplace=inplace,
    )  # fmt: skip
