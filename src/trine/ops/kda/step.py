"""One token of N sequences at once: the decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops.kda._checks import check_step
from trine.ops.kda.gate import compute_dtype, log_decay, sigmoid
from trine.ops.kda.reference import l2_normalize


def kda_step(
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
    """Advance N sequences by one token, K3 report (arXiv 2607.24653) Eq. 1; equal to ``kda`` with T = 1.

    Args:
        q_NHK, k_NHK: ``[N, H, K]``, any float dtype.
        v_NHV: ``[N, HV, V]``.
        gate: ``[N, HV, K]``; beta: ``[N, HV]``. Both are used in float32 whatever their dtype: beta is never rounded.
        state_NHKV: float32 (float64 with float64 inputs) ``[N, HV, K, V]``; with ``state_indices`` a pool ``[P, HV, K,
            V]``.
        state_indices: int32 or int64 ``[N]``: the pool's entry of each sequence; -1 marks padding, whose output is 0
            and which touches no state.
        inplace: write the new states into ``state_NHKV`` (no gradient through it). Otherwise it is left as it was.
        Other keywords: see :func:`trine.ops.kda.kda`.

    Returns:
        output ``[N, HV, V]`` in v's dtype, and the new states or pool.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or value, by name.
    """
    check_step(
        q_NHK, k_NHK, v_NHV, gate, beta, state_NHKV, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind,
        lower_bound=lower_bound, state_indices=state_indices,
    )  # fmt: skip
    if (
        inplace
        and torch.is_grad_enabled()
        and any(
            t is not None and t.requires_grad for t in (q_NHK, k_NHK, v_NHV, gate, beta, state_NHKV, A_log, dt_bias)
        )
    ):
        raise ValueError("inplace: found inputs that require a gradient, need torch.no_grad() for in-place steps")
    dtype = compute_dtype(q_NHK, k_NHK, v_NHV, gate)
    groups = v_NHV.shape[1] // q_NHK.shape[1]
    q, k, v = q_NHK.to(dtype), k_NHK.to(dtype), v_NHV.to(dtype)
    if qk_norm:
        q, k = l2_normalize(q), l2_normalize(k)
    if groups > 1:
        q, k = q.repeat_interleave(groups, dim=1), k.repeat_interleave(groups, dim=1)
    decay = log_decay(gate.to(dtype), A_log, dt_bias, gate_kind, lower_bound).exp()
    b = beta.to(dtype)
    b = beta_max * sigmoid(b) if beta_is_logit else b
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    keep = index = None
    state = state_NHKV
    if state_indices is not None:
        keep = state_indices >= 0
        index = state_indices.clamp(min=0).long()
        state = state_NHKV[index]
    n, heads, channels = q.shape
    values = v.shape[-1]
    S = (state * decay.unsqueeze(-1)).view(n * heads, channels, values)
    flat = (n * heads, 1, channels)
    error = torch.baddbmm(v.reshape(n * heads, 1, values), k.reshape(flat), S, alpha=-1.0)
    S = torch.baddbmm(S, (k * b.unsqueeze(-1)).reshape(flat).mT, error)
    out = torch.bmm((q * scale).reshape(flat), S).view(n, heads, values)
    new = S.view(n, heads, channels, values)
    if keep is not None and index is not None:
        out = torch.where(keep[:, None, None], out, 0.0)
        pool = state_NHKV if inplace else state_NHKV.clone()
        return out.to(v_NHV.dtype), pool.index_put_((index[keep],), new[keep])
    return out.to(v_NHV.dtype), state_NHKV.copy_(new) if inplace else new
