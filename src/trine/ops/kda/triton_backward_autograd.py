"""KDA on a GPU, differentiable: the forward and backward kernels as one node of autograd's graph.

The node is a Python function, or of the second call of a kind on one in C++ (``native.cpp``), whose backward pass
autograd runs without the interpreter. That one asks the Python function for all that it has not recorded.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trine.ops._autograd import differentiable_once, refuse_tangents
from trine.ops.kda.triton_backward import Gradients, kda_backward
from trine.ops.kda.triton_config import Config, choose
from trine.ops.kda.triton_forward import forward
from trine.ops.kda.triton_native import NATIVE
from trine.ops.kda.triton_problem import Kept, in_memory
from trine.ops.kda.triton_replay import ACTIVE


class Settings(NamedTuple):
    """The arguments of one call that are not tensors."""

    lower_bound: float
    qk_norm: bool
    beta_is_logit: bool
    beta_max: float
    scale: float | None
    plan: str
    keep_factors: bool
    final: bool  # whether the final state is wanted


def forward_keeping(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor | None, Kept]:
    """Output, final state if wanted, cuts of a segmented scan, factors if asked for and fit for the backward pass."""
    return forward(
        q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=settings.lower_bound, qk_norm=settings.qk_norm,
        beta_is_logit=settings.beta_is_logit, beta_max=settings.beta_max, scale=settings.scale,
        initial_state=initial_state, output_final_state=settings.final, cu_seqlens=cu_seqlens,
        plan=plan_of(q, v, settings), keep="factors" if factors_fit(q, v, settings) else "cuts",
        fine=factors_fine(q, v, settings),
    )  # fmt: skip


def plan_of(q: Tensor, v: Tensor, settings: Settings) -> str:
    """The forward's plan: bf16 inputs take the backward's operands where it is going to use the factors."""
    used = settings.keep_factors and settings.beta_is_logit and q.dtype == v.dtype == torch.bfloat16
    if used and "," not in settings.plan:
        return settings.plan + ",bf16"
    return settings.plan


def config_of(q: Tensor, v: Tensor, settings: Settings) -> Config:
    """The forward's configuration; heads and head sizes become numbers where they are symbols of a trace."""
    sizes = int(v.shape[2]), int(q.shape[3]), int(v.shape[3])
    return choose(*sizes, q.dtype, v.dtype, settings.qk_norm, plan_of(q, v, settings))


def factors_fit(q: Tensor, v: Tensor, settings: Settings) -> bool:
    """Whether the forward's factors are kept: asked for, and what the backward would make.

    Given strengths may be 0, which the backward replaces before it makes factors: not the forward's then.
    """
    if not (settings.keep_factors and settings.beta_is_logit):
        return False
    config = config_of(q, v, settings)
    operand = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    return config.factor == config.value == operand


def narrow(settings: Settings) -> bool:
    """Whether fp16 may hold what is bounded: nobody asked for bf16's range by the plan."""
    return not settings.plan.endswith(",bf16")


def factors_fine(q: Tensor, v: Tensor, settings: Settings) -> bool:
    """Whether kept factors have the second parts that the backward would make."""
    return factors_fit(q, v, settings) and q.dtype != torch.float32 and settings.qk_norm and narrow(settings)


def backward_from(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    d_out: Tensor | None,
    d_final: Tensor | None,
    kept: Kept,
    settings: Settings,
) -> Gradients:
    """Gradients of the eight tensors, with segments where the forward has them."""
    return kda_backward(
        q, k, v, gate, beta, out, torch.zeros_like(out) if d_out is None else d_out, d_final, A_log=A_log,
        dt_bias=dt_bias, lower_bound=settings.lower_bound, qk_norm=settings.qk_norm,
        beta_is_logit=settings.beta_is_logit, beta_max=settings.beta_max, scale=settings.scale,
        initial_state=initial_state, cu_seqlens=cu_seqlens, segment=config_of(q, v, settings).segment, kept=kept,
        fine=narrow(settings),
    )  # fmt: skip


class TritonKDA(torch.autograd.Function):
    """Saves the inputs, the output and what a segmented scan found at its cuts (128 KiB a cut and head at K = V = 128).

    With ``keep_factors`` also what the forward's first kernel made of the inputs.

    Kept factors trade memory for speed: 8 K + 200 bytes a token and head stay from forward to backward, which then does
    not make them again; bf16 inputs then take bf16 factors in the forward too (output error 4.1e-3, not 3.3e-3).
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Output and final state; arguments as ``forward_keeping``."""
        out, final, kept = forward_keeping(*arguments)
        ctx.set_materialize_grads(False)  # a loss on the output alone needs no zeros for the final state
        ctx.save_for_backward(*arguments[:9], out, *kept.tensors())
        ctx.settings, ctx.replay = arguments[9], ACTIVE.latest
        return out, final

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the eight tensors; None for ``cu_seqlens`` and the settings."""
        if d_out is None and d_final is None:
            return (None,) * 10
        refuse_tangents("gradient of kda", (d_out, d_final))
        d_out, d_final = in_memory(d_out), in_memory(d_final)
        saved = ctx.saved_tensors
        arguments = (*saved[:10], d_out, d_final, Kept.of(saved[10:]), ctx.settings)
        return (*backward_from(*arguments), None, None)


def differentiable(
    tensors: tuple[Tensor | None, ...], settings: Settings, kind: tuple[object, ...] | None
) -> tuple[Tensor, Tensor | None]:
    """Output and final state of the nine ``tensors`` of ``forward_keeping``; ``kind`` as in `Native.know`."""
    result: tuple[Tensor, Tensor | None] = TritonKDA.apply(*tensors, settings)
    NATIVE.know(kind, result[0].grad_fn.replay, partial(_python_backward, settings))  # type: ignore[union-attr]
    return result


def _python_backward(
    settings: Settings, inputs: list[Tensor | None], out: Tensor, kept: list[Tensor | None], d_out: Any, d_final: Any
) -> tuple[tuple[Tensor | None, ...], Any | None]:
    """The backward pass of a node in C++ whose form that has not recorded.

    Returns gradients of all ``inputs`` but the bounds, and the program that repeats this call, if there is one.
    """
    ACTIVE.latest = None
    context = SimpleNamespace(saved_tensors=(*inputs, out, *kept), settings=settings)
    gradients = TritonKDA.backward(context, d_out, d_final)
    return gradients[:8], None if ACTIVE.latest is None else ACTIVE.latest.program()
