"""Kimi Delta Attention with a bounded decay gate: the operator, its decode step and the algebra of segments.

Sources: K3 report (arXiv 2607.24653) Eq. 1-5 and 17; Kimi Linear (arXiv 2510.26692) for the unbounded gate.
The derivation, range argument and measurements are in the README of this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trine.ops._backend import _say_once as say_once
from trine.ops._backend import pick
from trine.ops._sequences import check_cu_seqlens
from trine.ops.kda._checks import PLANS, SAVES, TILE, check_factors, check_inputs, need_tensors
from trine.ops.kda._choice import say_slow, traced, why_not_triton
from trine.ops.kda.chunk import tiles_in_chunk
from trine.ops.kda.gate import GATE_KINDS, bounded_gate, compute_dtype, full_precision
from trine.ops.kda.layout import make_layout
from trine.ops.kda.nonfinite import Spoil, looks_sound, separate
from trine.ops.kda.pairwise import kda_pairwise
from trine.ops.kda.reference import kda_reference
from trine.ops.kda.state import advance, compose, zero_state
from trine.ops.kda.step import kda_step
from trine.ops.kda.torch_chunked import ChunkedKDA, Options, forward_pass
from trine.ops.kda.triton_native import NATIVE

__all__ = [
    "GATE_KINDS",
    "PLANS",
    "SAVES",
    "TILE",
    "advance",
    "bounded_gate",
    "compose",
    "kda",
    "kda_pairwise",
    "kda_reference",
    "kda_step",
    "segment_state",
    "zero_state",
]

_CHECKED: set[tuple[object, ...] | None] = set()  # kinds of calls that have passed every check and go to the kernels


def _kind(tensors: tuple[Tensor | None, ...], options: tuple[object, ...]) -> tuple[object, ...] | None:
    """What a call's checks and, if it begins with bytes, its replay depend on.

    None for values of other types, which the checks refuse by name.
    """
    forms: object = None if NATIVE.module is None else NATIVE.module.forms(tensors)
    if forms is None:
        if not all(x is None or isinstance(x, Tensor) for x in tensors):
            return None
        forms = tuple(None if x is None else (x.shape, x.dtype, x.get_device()) for x in tensors)
    return (forms, *options)


def kda(
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
    backend: str = "auto",
    save: str = "inputs",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule with a decay a channel: K3 report (arXiv 2607.24653) Eq. 1.

    For every sequence and value head, from the state S ``[K, V]``::

        S <- Diag(exp g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = scale * S^T q_t

    Everything is computed in float32, or in float64 when q, k, v or gate is float64.

    Args:
        q, k: ``[B, T, H, K]``, any float dtype, any strides.
        v: ``[B, T, HV, V]``, HV a multiple of H: value head h reads key head h // (HV / H).
        gate: ``[B, T, HV, K]``, the input of the gate, see ``gate_kind``.
        beta: ``[B, T, HV]``, the write strength or its logit.
        A_log: ``[HV]``, log of the gate's slope (None: 0).
        dt_bias: ``[HV, K]`` or ``[HV * K]``, the gate's bias (None: 0).
        gate_kind: ``"bounded"``: g = lower_bound * sigmoid(exp(A_log) (gate + dt_bias)), report Eq. 5.
            ``"softplus"``: g = -exp(A_log) softplus(gate + dt_bias), Kimi Linear. ``"log_decay"``: ``gate`` is g <= 0
            itself, -inf to forget all. The last two may take any size; they are exact and strictly causal too, but
            slower (2 to 4 times on a CPU): decays between the rows of a tile are then formed pair by pair instead of by
            a matrix product. On a card they have no kernels of their own and take the chunked torch path, which a
            warning says once.
        lower_bound: in (-5.5, 0), so that a tile of 16 tokens spans less than 88 in log space, the range of float32.
            The kernels' tiles of 32 tokens take [-5.4, 0); below that a card takes the chunked torch path.
        qk_norm: divide q and k by sqrt(sum x^2 + 1e-6) first.
        beta_is_logit: beta -> beta_max * sigmoid(beta).
        scale: factor of the output, default K^-1/2.
        initial_state: ``[N, HV, K, V]`` float32 (float64 when computing in float64), N the number of sequences.
        output_final_state: also return the states after the last tokens.
        cu_seqlens: int32 or int64 ``[N + 1]``: with B = 1, sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1].
            Sequences may be empty; their state passes through. Without it every batch row is a sequence, N = B.
        plan: ``"auto"``, ``"serial"`` or ``"segmented"``: how a backend may cut long sequences. The portable path cuts
            every sequence into tiles of 16 tokens from its own start, whatever the plan, so all plans give the same
            bits there. On a card ``"auto"`` cuts sequences of more than 1,024 to 5,056 tokens, a length that HV
            decides, above 40 value heads none, so that a prefix keeps its bits; where sequences x HV fill the card
            without cuts, ``"serial"`` is faster (B8 T2048 H16 on an H200: forward 0.24 ms for 0.29, with backward 1.40
            for 1.51). With ``",bf16"`` behind it the kernels keep bf16 where they would take fp16 for what is bounded:
            for values v beyond 1e-4 to 1e4, which fp16 does not hold (error of the output 4.0e-3 instead of 3.3e-3).
        backend: ``"auto"``, ``"reference"`` (token by token), ``"torch"`` (chunked, any device) or ``"triton"`` (CUDA).
        save: what the kernels keep for their backward pass. ``"inputs"``: inputs and output, and of a segmented scan
            the states and maps at its cuts (128 KiB a cut and value head at K = V = 128); the rest is made again.
            ``"factors"``, for bf16 and fp32 inputs with ``beta_is_logit`` (others: as ``"inputs"``): also, in bf16,
            8.125 K + 200 bytes a token and value head, K rounded up to a power of two (0.91 GiB a layer of T8192 HV
            96); forward and backward 9 % faster. bf16 inputs then round to bf16 factors in the forward too: errors of
            the output 1.2 to 1.8 times, of the final state 1.8 to 3.7 times, of gradients the same. The other backends
            have one way only, whatever this says: the torch path keeps its factors and chunk states.

    Returns:
        output ``[B, T, HV, V]`` in v's dtype, and the final states ``[N, HV, K, V]`` or None. Differentiable once in
        every tensor but cu_seqlens; a gradient of a gradient raises. Works inside ``torch.compile(fullgraph=True)`` and
        CUDA graphs on the kernels (after one call that compiles them); on a CPU compile without ``fullgraph``, as the
        layout of tiles is made on the host.

    Outputs before t, and gradients of a loss on them, keep every bit when anything at or after t, or in another
    sequence, changes or is appended. On the CPU that includes changes to NaN or infinity, whose outputs are NaN from
    their row on; on a card it holds for finite inputs (README, section 7). A log-decay of -inf is a reset: the state
    before it is forgotten, and its gradient is 0.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or value, by name.
        BackendUnavailable: an explicit backend that cannot run here.
    """
    kind = run = None
    if not traced(q):
        tensors = (q, k, v, gate, beta, A_log, dt_bias, initial_state, cu_seqlens)
        options = (qk_norm, beta_is_logit, beta_max, scale, output_final_state, plan, backend, save)
        kind = _kind(tensors, (gate_kind, lower_bound, *options))
        try:
            call = NATIVE.calls.get(kind)
        except TypeError:  # an option without a hash, which the checks refuse by name
            kind = call = None
        if call is not None:
            return NATIVE.again(call, tensors)
    if kind not in _CHECKED:
        need_tensors({"q": q})
        check_inputs(
            q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind, lower_bound=lower_bound,
            initial_state=initial_state, cu_seqlens=cu_seqlens, plan=plan, save=save,
        )  # fmt: skip
        check_factors(scale, beta_max)
        run = _backend(backend, q, v, gate_kind, lower_bound, k, gate, beta)
        # Where the kernels run nothing that is checked is a value of a tensor, but those of bounds on the host.
        if run is None and kind is not None and (cu_seqlens is None or cu_seqlens.device.type != "cpu"):
            if len(_CHECKED) >= 4096:
                _CHECKED.clear()
            _CHECKED.add(kind)
        else:
            kind = None
    if run is None:
        from trine.ops.kda.triton_entry import kda_triton

        return kda_triton(
            q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, qk_norm=qk_norm,
            beta_is_logit=beta_is_logit, beta_max=beta_max, scale=scale, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, plan=plan, save=save, kind=kind,
        )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with full_precision(q.device):
        return run(
            q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind, lower_bound=lower_bound,
            qk_norm=qk_norm, beta_is_logit=beta_is_logit, beta_max=beta_max, scale=scale,
            initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, plan=plan,
        )  # fmt: skip


def segment_state(
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
    cu_seqlens: Tensor | None = None,
    plan: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The affine map of each sequence's tokens on its state: K3 report (arXiv 2607.24653) Eq. 17.

    Arguments are those of :func:`kda`. An empty sequence has the identity and a zero offset.

    Returns:
        transition ``[N, HV, K, K]`` and offset ``[N, HV, K, V]`` with ``S_out = transition @ S_in + offset``;
        differentiable. Join the maps of neighbouring segments with :func:`compose`.

    Raises:
        ValueError: as :func:`kda`.
    """
    sizes = check_inputs(
        None, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind, lower_bound=lower_bound,
        initial_state=None, cu_seqlens=cu_seqlens, plan=plan,
    )  # fmt: skip
    # One run over V + K value columns: the offset starts from zero, the transition from the identity with values 0.
    dtype = compute_dtype(k, v, gate)
    n, hv, dk, dv = sizes.sequences, sizes.value_heads, sizes.key_dim, sizes.value_dim
    wide_v = torch.cat([v.to(dtype), v.new_zeros(*v.shape[:-1], dk, dtype=dtype)], dim=-1)
    start = torch.cat([v.new_zeros(dk, dv, dtype=dtype), torch.eye(dk, dtype=dtype, device=v.device)], dim=-1)
    _, final = kda(
        k, k, wide_v, gate, beta, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind, lower_bound=lower_bound,
        qk_norm=qk_norm, beta_is_logit=beta_is_logit, beta_max=beta_max, scale=1.0,
        initial_state=start.expand(n, hv, dk, dv + dk).contiguous(), output_final_state=True,
        cu_seqlens=cu_seqlens, plan=plan, backend=backend,
    )  # fmt: skip
    assert final is not None
    offset, transition = final.split([dv, dk], dim=-1)
    return transition, offset


def _backend(
    name: str, q: Tensor, v: Tensor, gate_kind: str, lower_bound: float, *others: Tensor
) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The implementation to call with checked arguments; None means the kernels. ``others`` are k, gate and beta."""
    triton = why_not_triton(q, v, gate_kind, lower_bound, *others)
    if triton is None and name in ("auto", "triton"):
        if name == "auto" and not torch.compiler.is_compiling():  # the log would break the graph
            say_once("kda", "triton", "cuda")
        return None
    chosen = pick("kda", name, q.device.type, {"triton": triton, "torch": None, "reference": None})
    if triton is not None and name == "auto" and q.device.type == "cuda":
        say_slow("kda", triton)
    return kda_reference if chosen == "reference" else _run_torch


def _run_torch(
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
    pairs: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The chunked portable path with checked arguments."""
    batch, tokens, heads, channels = q.shape
    hv, values = v.shape[2:]
    groups = hv // heads
    if groups > 1:
        q, k = q.repeat_interleave(groups, dim=2), k.repeat_interleave(groups, dim=2)
    if cu_seqlens is not None and cu_seqlens.device.type != "cpu":
        # This path lays out tiles on the host, so it has to read the bounds; they have not been checked yet.
        cu_seqlens = cu_seqlens.cpu()
        check_cu_seqlens(cu_seqlens, batch, tokens)
    lengths = [tokens] * batch if cu_seqlens is None else cu_seqlens.diff().tolist()
    if not any(lengths):
        dtype = compute_dtype(q, k, v, gate)
        final = (
            v.new_zeros(len(lengths), hv, channels, values, dtype=dtype)
            if initial_state is None
            else initial_state.clone()
        )
        return v.clone(), final if output_final_state else None
    options = Options(
        gate_kind=gate_kind,
        lower_bound=lower_bound,
        qk_norm=qk_norm,
        beta_is_logit=beta_is_logit,
        beta_max=beta_max,
        scale=channels**-0.5 if scale is None else scale,
        pairs=pairs or gate_kind != "bounded",
    )
    rows = batch * tokens
    tensors = (
        q.reshape(rows, hv, channels),
        k.reshape(rows, hv, channels),
        v.reshape(rows, hv, values),
        gate.reshape(rows, hv, channels),
        beta.reshape(rows, hv),
    )
    others = (A_log, dt_bias, initial_state)
    layout = make_layout(lengths, tiles_in_chunk(channels, values), q.device)

    def run(*tensors: Any) -> tuple[Tensor, Tensor]:
        arguments = (*tensors, len(lengths), layout, options)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return ChunkedKDA.apply(*arguments)  # type: ignore[no-any-return]
        out, final, _ = forward_pass(*arguments, keep=False)  # type: ignore[misc]
        return out, final

    out, final = run(*tensors, *others)
    if not looks_sound(out):
        cleaned, spoilt, lost = separate(tensors, gate_kind, beta_is_logit, lengths)
        if bool(spoilt.any()):
            out, final = Spoil.apply(*run(*cleaned, *others), spoilt, lost)
    return out.view(batch, tokens, hv, values), final if output_final_state else None
