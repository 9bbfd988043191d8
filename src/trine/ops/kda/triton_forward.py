"""KDA forward on a GPU from raw q, k, v, gate input and beta logits, in two launches (four when segmented)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from trine.ops._errors import check_at_once, error_words
from trine.ops.kda.triton_config import MAX_CHANNELS, MAX_DECAY, choose, refined
from trine.ops.kda.triton_prepare import make_problem, prepare
from trine.ops.kda.triton_problem import Kept
from trine.ops.kda.triton_replay import ACTIVE, Memory
from trine.ops.kda.triton_scan import scan

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


MEMORY = Memory()


def unsupported(q: Tensor, v: Tensor, gate_kind: str, lower_bound: float, *others: Tensor) -> str | None:
    """Why these kernels cannot take this call: a sentence with what is needed and what was found, or None.

    ``others`` are k, gate and beta.
    """
    if gate_kind != "bounded":
        return f"the kernels need gate_kind 'bounded', found {gate_kind!r}"
    if not -MAX_DECAY <= lower_bound < 0:
        return f"the kernels need lower_bound in [-{MAX_DECAY}, 0), found {lower_bound}"
    if q.shape[-1] > MAX_CHANNELS or v.shape[-1] > MAX_CHANNELS:
        return f"the kernels need K and V up to {MAX_CHANNELS}, found K={q.shape[-1]}, V={v.shape[-1]}"
    for tensor in (q, v, *others):
        if tensor.dtype not in _DTYPES:
            return f"the kernels need bfloat16, float16 or float32, found {tensor.dtype}"
    return None


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
    keep: Literal["nothing", "cuts", "factors"] = "nothing",
    fine: bool = False,
) -> tuple[Tensor, Tensor | None, Kept]:
    """Chunked KDA with the bounded gate (K3 report, arXiv 2607.24653, Eq. 1-5), no autograd.

    Shapes as in ``trine.ops.kda.kda``: q, k ``[B,T,H,K]``, v ``[B,T,HV,V]``, gate ``[B,T,HV,K]``, beta ``[B,T,HV]``,
    states ``[N,HV,K,V]`` fp32, one sequence a batch row or ``cu_seqlens [N+1]`` with B = 1. Returns the output in v's
    dtype, the final states in fp32 if asked for, and what ``keep`` says a backward pass may use: what a segmented scan
    found at its cuts, or that and what the first kernel made of every tile (``fine``: with second parts, see
    ``Factors``). Arguments are taken as checked; values of
    ``cu_seqlens`` on the GPU are tested there (``trine.check_errors`` reads the result; at once with ``TRINE_CHECK=1``
    in the environment, except while a CUDA graph is captured). The second call of a kind replays the first one's
    launches (``triton_replay``).
    """
    device = q.device
    error = None if cu_seqlens is None else error_words(device)

    def plain() -> tuple[Tensor, Tensor | None, Kept]:
        heads, key_width = v.shape[2], q.shape[3]
        config = choose(heads, key_width, v.shape[3], q.dtype, v.dtype, qk_norm, plan)
        if fine:
            config = refined(config)
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
            error=error,
        )
        factors = prepare(problem)
        initial = None if initial_state is None else initial_state.float().contiguous()
        out, final, cuts = scan(problem, factors, initial, output_final_state, v.dtype)
        return out, final, Kept(factors if keep == "factors" else None, None if keep == "nothing" else cuts)

    if q.is_cuda and device.index != torch._C._cuda_getDevice():
        ACTIVE.latest = None
        with torch.cuda.device(device):
            found = plain()
    else:
        found, replayed = MEMORY.call(
            (lower_bound, qk_norm, beta_is_logit, beta_max, scale, output_final_state, plan, keep, fine),
            (q, k, v, gate, beta, A_log, dt_bias, initial_state, cu_seqlens, error),
            plain,
            _flat,
        )
        if replayed is not None:
            made: Any = replayed  # tensors where the plain call gave tensors
            found = made[0], made[1], Kept.of(made[2:])
    if cu_seqlens is not None:
        check_at_once(device)
    return found  # type: ignore[no-any-return]


def _flat(found: tuple[Tensor, Tensor | None, Kept]) -> list[Tensor | None]:
    return [found[0], found[1], *found[2].tensors()]
