"""One token of N sequences at once: the decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops._backend import pick
from trine.ops.kda._checks import check_factors, check_inplace, check_step
from trine.ops.kda._choice import say_slow, why_no_card
from trine.ops.kda.gate import compute_dtype, full_precision, log_decay, sigmoid


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Advance N sequences by one token, K3 report (arXiv 2607.24653) Eq. 1; equal to ``kda`` with T = 1.

    Args:
        q_NHK, k_NHK: ``[N, H, K]``, any float dtype.
        v_NHV: ``[N, HV, V]``.
        gate: ``[N, HV, K]``; beta: ``[N, HV]``. Both are used in float32 whatever their dtype: beta is never rounded.
        state_NHKV: float32 (float64 with float64 inputs) ``[N, HV, K, V]``; with ``state_indices`` a pool ``[P, HV, K,
            V]``. bfloat16 states are computed with in float32 and rounded once a step.
        state_indices: int32 or int64 ``[N]``: the pool's entry of each sequence; -1 marks padding, whose output is 0
            and which touches no state. Entries of a CUDA tensor are not read back: one outside the pool is treated as
            padding and reported by ``trine.check_errors``; one used twice there gets either result.
        inplace: write the new states into ``state_NHKV`` (no gradient through it). Otherwise it is left as it was.
        backend: ``"auto"``, ``"torch"`` (any device) or ``"triton"`` (CUDA, one launch, no gradient; steps ``inplace``
            can be captured in a CUDA graph after one call that compiles them). ``"auto"`` takes it where it can.
        Other keywords: see :func:`trine.ops.kda.kda`.

    Returns:
        output ``[N, HV, V]`` in v's dtype, and the new states or pool.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or value, by name.
        BackendUnavailable: an explicit backend that cannot run here.
    """
    check_step(
        q_NHK, k_NHK, v_NHV, gate, beta, state_NHKV, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind,
        lower_bound=lower_bound, state_indices=state_indices,
    )  # fmt: skip
    check_factors(scale, beta_max)
    tensors = (q_NHK, k_NHK, v_NHV, gate, beta, state_NHKV, A_log, dt_bias)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if inplace:
        check_inplace(state_NHKV, needs_grad)
    if state_indices is not None and not state_NHKV.shape[0]:
        return torch.zeros_like(v_NHV), state_NHKV if inplace else state_NHKV.clone()  # all is padding
    if _on_kernel(backend, tensors, gate_kind, needs_grad, inplace):
        from trine.ops.kda.triton_entry import step_triton

        return step_triton(
            q_NHK, k_NHK, v_NHV, gate, beta, state_NHKV, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind,
            lower_bound=lower_bound, qk_norm=qk_norm, beta_is_logit=beta_is_logit, beta_max=beta_max, scale=scale,
            state_indices=state_indices, inplace=inplace,
        )  # fmt: skip
    if state_NHKV.dtype == torch.bfloat16:
        wide = state_NHKV.to(compute_dtype(q_NHK, k_NHK, v_NHV, gate))
        out, new = kda_step(
            q_NHK, k_NHK, v_NHV, gate, beta, wide, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind,
            lower_bound=lower_bound, qk_norm=qk_norm, beta_is_logit=beta_is_logit, beta_max=beta_max, scale=scale,
            state_indices=state_indices, backend="torch",
        )  # fmt: skip
        return out, state_NHKV.copy_(new) if inplace else new.to(torch.bfloat16)
    dtype = compute_dtype(q_NHK, k_NHK, v_NHV, gate)
    groups = v_NHV.shape[1] // q_NHK.shape[1]
    qk, v = torch.stack([q_NHK.to(dtype), k_NHK.to(dtype)]), v_NHV.to(dtype)
    if qk_norm:
        qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + 1e-6)
    if groups > 1:
        qk = qk.repeat_interleave(groups, dim=2)
    q, k = qk.unbind()
    decay = log_decay(gate.to(dtype), A_log, dt_bias, gate_kind, lower_bound).exp().unsqueeze(-1)
    b = beta.to(dtype)
    b = (beta_max * sigmoid(b) if beta_is_logit else b).unsqueeze(-1)
    n, heads, channels = q.shape
    scale = channels**-0.5 if scale is None else scale

    def update(state: Tensor, owned: bool) -> tuple[Tensor, Tensor]:
        """Output and new states of ``state``, in place if it is ours to change."""
        S = state.mul_(decay) if owned else state * decay
        flat = S.reshape(n * heads, channels, v.shape[-1])
        read, value = k.reshape(n * heads, 1, channels), v.reshape(n * heads, 1, v.shape[-1])
        write = (k * b).reshape(n * heads, channels, 1)
        with full_precision(state.device):
            error = torch.baddbmm(value, read, flat, alpha=-1.0)
            flat = torch.addcmul(flat, write, error) if needs_grad else flat.addcmul_(write, error)
            out = torch.bmm((q * scale).reshape(n * heads, 1, channels), flat)
        return out.view(n, heads, v.shape[-1]).to(v_NHV.dtype), flat.view_as(state)

    if state_indices is None:
        own = inplace and state_NHKV.is_contiguous()
        out, new = update(state_NHKV, owned=own)
        return out, new if not inplace else state_NHKV if own else state_NHKV.copy_(new)
    keep = state_indices >= 0
    if state_indices.device.type == "cpu" and bool(keep.all()):
        out, new = update(state_NHKV[state_indices], owned=not needs_grad)
        index = state_indices.long()
    else:
        # Padding works on the first used entry and writes what that entry gets, or, where none is used, what stood
        # there: no state is touched, no two writes differ, and nothing is read back from the device.
        first = keep.int().argmax()
        index = torch.where(keep, state_indices, state_indices[first].clamp(min=0)).long()
        old = state_NHKV[index]
        out, new = update(old, owned=False)
        out = torch.where(keep[:, None, None], out, torch.zeros_like(out))
        if needs_grad:
            index, new = index[keep], new[keep]
        else:
            instead = torch.where(keep[first], new[first], old[first])
            new = torch.where(keep[:, None, None, None], new, instead)
    pool = state_NHKV if inplace else state_NHKV.clone()
    return out, pool.index_put_((index,), new)


def _on_kernel(
    backend: str, tensors: tuple[Tensor | None, ...], gate_kind: str, needs_grad: bool, inplace: bool
) -> bool:
    """Whether the one-launch kernel takes this step; ``tensors`` are those of ``kda_step`` in order.

    Raises:
        ValueError: an unknown backend.
        BackendUnavailable: the kernel was asked for and cannot run.
    """
    q, v, state = tensors[0], tensors[2], tensors[5]
    assert q is not None and v is not None and state is not None
    reason = why_no_card(q)
    if reason is None:
        from trine.ops.kda.triton_decode import unsupported

        reason = unsupported(tensors, gate_kind, needs_grad, inplace)
    if reason is None and backend in ("auto", "triton") and torch.compiler.is_compiling():
        return True  # the log would break the graph
    chosen = pick("kda_step", backend, q.device.type, {"triton": reason, "torch": None})
    if chosen == "torch" and backend == "auto" and q.device.type == "cuda" and not needs_grad:
        assert reason is not None
        say_slow("kda_step", reason)
    return chosen == "triton"
