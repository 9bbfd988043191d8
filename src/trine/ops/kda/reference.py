"""The definition, token by token, in any dtype up to float64: obviously right, slow, differentiable by autograd."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from trine.ops.kda._checks import check_inputs
from trine.ops.kda.gate import compute_dtype, log_decay, sigmoid


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_kind: str = "bounded",
    lower_bound: float = -5.0,
    qk_norm: bool = True,
    beta_is_logit: bool = True,
    beta_max: float = 1.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    plan: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule, K3 report (arXiv 2607.24653) Eq. 1, one token after the other.

    For every sequence and value head, with the state S ``[K, V]``::

        S <- Diag(exp g_t) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale * S^T q_t

    Arguments, shapes, results and errors are those of :func:`trine.ops.kda.kda`; ``plan`` has no meaning here.
    """
    check_inputs(
        q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind, lower_bound=lower_bound,
        initial_state=initial_state, cu_seqlens=cu_seqlens, plan=plan,
    )  # fmt: skip
    dtype = compute_dtype(q, k, v, gate)
    groups = v.shape[2] // q.shape[2]
    q_BTHK, k_BTHK, v_BTHV = q.to(dtype), k.to(dtype), v.to(dtype)
    if qk_norm:
        q_BTHK, k_BTHK = l2_normalize(q_BTHK), l2_normalize(k_BTHK)
    q_BTHK = q_BTHK.repeat_interleave(groups, dim=2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    k_BTHK = k_BTHK.repeat_interleave(groups, dim=2)
    decay_BTHK = log_decay(gate.to(dtype), A_log, dt_bias, gate_kind, lower_bound).exp().to(dtype)
    beta_BTH = beta.to(dtype)
    beta_BTH = beta_max * sigmoid(beta_BTH) if beta_is_logit else beta_BTH

    batch, tokens, heads, channels = decay_BTHK.shape
    if cu_seqlens is None:
        spans = [(slice(0, batch), 0, tokens)]
    else:
        bounds = cu_seqlens.tolist()
        spans = [(slice(0, 1), a, b) for a, b in pairwise(bounds)]
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    for n, (rows, start, end) in enumerate(spans):
        if initial_state is None:
            size = rows.stop - rows.start
            S = v_BTHV.new_zeros(size, heads, channels, v.shape[-1])
        else:
            S = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        for t in range(start, end):
            S = S * decay_BTHK[rows, t].unsqueeze(-1)
            k_t = k_BTHK[rows, t].unsqueeze(-1)
            error = v_BTHV[rows, t].unsqueeze(-2) - k_t.mT @ S
            S = S + (beta_BTH[rows, t, :, None, None] * k_t) @ error
            outputs.append((q_BTHK[rows, t].unsqueeze(-2) @ S).squeeze(-2))
        finals.append(S)
    output = torch.stack(outputs, 1) if outputs else v_BTHV.clone()
    return output.to(v.dtype), torch.cat(finals) if output_final_state else None
