"""Trine's KDA under the argument names of flash-linear-attention, so that code written for it runs on ours.

    from trine.interop.fla import chunk_kda  # where it said: from fla.ops.kda import chunk_kda

Names and meanings are those of ``fla.ops.kda`` in fla-core 0.6.0 (github.com/fla-org/flash-linear-attention), which is
neither needed nor imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trine.ops.kda import kda, kda_step


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """``trine.ops.kda.kda`` as fla's ``chunk_kda``; K3 report (arXiv 2607.24653) Eq. 1. Differentiable.

    Args:
        q, k: ``[B, T, H, K]``. v: ``[B, T, HV, V]``. beta: ``[B, T, HV]``.
        g: ``[B, T, HV, K]``: log decays, or with ``use_gate_in_kernel`` the gate's input. Only the latter with a
            ``lower_bound`` runs on our fast kernels; the others are exact on the slower path.
        scale: of the output, default K^-1/2.
        initial_state: float32 ``[N, HV, K, V]``, with ``state_v_first`` ``[N, HV, V, K]``; the final state alike.
        use_qk_l2norm_in_kernel: our ``qk_norm``.
        use_gate_in_kernel: ``lower_bound`` given: our ``bounded`` gate; otherwise ``softplus``, which needs ``A_log``.
        use_beta_sigmoid_in_kernel: our ``beta_is_logit``; ``allow_neg_eigval`` then doubles it (``beta_max`` 2).
        safe_gate: a promise that log decays are bounded. Ours are exact without it; with ``use_gate_in_kernel`` it
            needs ``lower_bound``, as there.
        disable_recompute: our ``save="factors"``, which needs ``use_beta_sigmoid_in_kernel``.
        cu_seqlens: ``[N + 1]``, B = 1. ``cu_seqlens_cpu``, ``use_graph``, ``max_num_seqs`` and ``chunk_size`` change
            nothing: our kernels read the bounds on the device, can always be captured, and have one tile size.
        A_log: ``[HV]``. dt_bias: ``[HV * K]`` or ``[HV, K]``. Both count with ``use_gate_in_kernel`` only, as there.
        backend: as in :func:`trine.ops.kda.kda`.

    Returns:
        output ``[B, T, HV, V]`` and the final state or None.

    Raises:
        ValueError: arguments that do not fit together, and what we do not have: intermediate states, fla's own context
            parallelism.
    """
    if cp_context is not None:
        raise ValueError(
            "cp_context: found a context of fla's, need None; sequences over several cards are not its way"
        )
    if return_intermediate_states:
        raise ValueError("return_intermediate_states: found True, need False: states inside a sequence are not kept")
    options = _options(
        A_log, dt_bias, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, safe_gate, lower_bound,
    )  # fmt: skip
    options["save"] = "factors" if disable_recompute else "inputs"
    options |= {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens, "backend": backend}
    state = _turned(initial_state, state_v_first)
    with _named_as_there(state_v_first):
        out, final = kda(q, k, v, g, beta, initial_state=state, **options)
    return out, _turned(final, state_v_first)


@torch.no_grad()
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """fla's ``fused_recurrent_kda``, without gradients: one token a sequence is a decode step, more a chunked pass.

    Arguments, results and errors as :func:`chunk_kda`.
    """
    options = _options(
        A_log, dt_bias, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, False, lower_bound,
    )  # fmt: skip
    state = _turned(initial_state, state_v_first)
    final: Tensor | None
    if q.ndim != 4:
        raise ValueError(f"q: found shape {tuple(q.shape)}, need [B, T, H, K]")
    options["backend"] = backend
    with _named_as_there(state_v_first):
        if q.shape[1] == 1 and cu_seqlens is None and state is not None:
            row = (*(x[:, 0] for x in (q, k, v, g, beta)), state)
            out, final = kda_step(*row, **options)
            out = out[:, None]
        else:
            options |= {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
            out, final = kda(q, k, v, g, beta, initial_state=state, **options)
    return out, _turned(final, state_v_first) if output_final_state else None


@contextmanager
def _named_as_there(state_v_first: bool) -> Iterator[None]:
    """Errors inside name fla's arguments."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        name, colon, rest = text.partition(":")
        if name == "gate":
            rest = rest.replace("with gate_kind='log_decay'", "without use_gate_in_kernel")
            raise ValueError(f"g{colon}{rest}") from error
        if name == "lower_bound":
            rest = rest.replace("gate_kind='log_decay'", "g as log decays, without use_gate_in_kernel,")
            raise ValueError(f"{name}{colon}{rest}") from error
        if name in ("initial_state", "state"):
            turned = " (as seen after state_v_first=True turned [V, K] into [K, V])" if state_v_first else ""
            raise ValueError(f"initial_state{colon}{rest}{turned}") from error
        raise


def _turned(state: Tensor | None, v_first: bool) -> Tensor | None:
    """A state between ``[N, HV, K, V]`` and ``[N, HV, V, K]``."""
    if state is not None and v_first and state.ndim != 4:
        raise ValueError(f"initial_state: found shape {tuple(state.shape)}, need [N, HV, V, K] with state_v_first=True")
    return state.mT.contiguous() if state is not None and v_first else state


def _options(
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float | None,
    norm: bool,
    gate: bool,
    sigmoid: bool,
    doubled: bool,
    safe: bool,
    lower_bound: float | None,
) -> dict[str, Any]:
    """Keywords of ``kda`` and ``kda_step``."""
    if doubled and not sigmoid:
        raise ValueError("allow_neg_eigval: found True, need use_beta_sigmoid_in_kernel=True with it")
    options: dict[str, Any] = {"qk_norm": norm, "scale": scale, "beta_is_logit": sigmoid}
    options["beta_max"] = 2.0 if doubled else 1.0
    if not gate:
        return options | {"gate_kind": "log_decay"}
    if lower_bound is None:
        if safe:
            raise ValueError("lower_bound: found None, need a number with safe_gate=True and use_gate_in_kernel=True")
        if A_log is None:
            raise ValueError("A_log: found None, need [HV] with use_gate_in_kernel=True and no lower_bound")
        return options | {"gate_kind": "softplus", "A_log": A_log, "dt_bias": dt_bias}
    return options | {"gate_kind": "bounded", "lower_bound": lower_bound, "A_log": A_log, "dt_bias": dt_bias}
