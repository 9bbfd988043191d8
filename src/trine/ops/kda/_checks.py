"""Argument checks of the public functions. Each message names the argument, what was found and what is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from trine.ops._sequences import check_cu_seqlens
from trine.ops.kda.gate import GATE_KINDS, compute_dtype

PLANS = ("auto", "serial", "segmented", "auto,bf16", "serial,bf16", "segmented,bf16")
SAVES = ("inputs", "factors")
TILE = 16
SPAN_LIMIT = 88.0  # exp(88) still fits float32
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call: ``sequences`` is N, ``tokens`` is T of the packed row or of each batch row."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    sequences: int


def need_tensors(required: Mapping[str, object], **optional: object) -> None:
    """Raise unless all of ``required``, and of ``optional`` those that are not None, are tensors."""
    for name, value in (*required.items(), *((n, x) for n, x in optional.items() if x is not None)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}: found {_shown(value)}, need a tensor")


def _shown(value: object) -> str:
    """A value as a message names it: numbers plainly, everything else so that its type shows, in one short line."""
    text = str(value) if isinstance(value, Real) else " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def need_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raise unless ``tensor`` has exactly ``shape``."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: found shape {tuple(tensor.shape)}, need {meaning} = {shape}")


def _need_floats(device: torch.device, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name}: found dtype {tensor.dtype}, need one of float16, bfloat16, float32, float64")
        if tensor.device != device:
            raise ValueError(f"{name}: found device {tensor.device}, need that of q, {device}")


def check_gate(
    kind: str, lower_bound: float | None, A_log: Tensor | None, dt_bias: Tensor | None, hv: int, k: int
) -> None:
    """Raise unless the gate's kind, bound and parameters fit ``hv`` value heads of ``k`` channels."""
    if kind not in GATE_KINDS:
        raise ValueError(f"gate_kind: found {kind!r}, need one of {list(GATE_KINDS)}")
    if kind == "bounded":
        if lower_bound is None:
            raise ValueError(
                "lower_bound: found None; gate_kind='bounded' needs the gate's lower bound, use gate_kind='softplus' "
                "or 'log_decay' for gates without one"
            )
        if not isinstance(lower_bound, Real):
            raise ValueError(f"lower_bound: found {_shown(lower_bound)}, need a number")
        if not -SPAN_LIMIT / TILE < lower_bound < 0:
            raise ValueError(
                f"lower_bound: found {lower_bound}, need a value in ({-SPAN_LIMIT / TILE}, 0): a tile of {TILE} tokens "
                f"may span less than {SPAN_LIMIT:.0f} in log space; gate_kind='log_decay' takes decays of any size"
            )
    if kind == "log_decay":
        for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
            if tensor is not None:
                raise ValueError(f"{name}: found a tensor, need None: with gate_kind='log_decay' the gate is the decay")
    if A_log is not None:
        need_shape("A_log", A_log, (hv,), "[HV]")
    if dt_bias is not None and dt_bias.shape not in ((hv, k), (hv * k,)):
        raise ValueError(f"dt_bias: found shape {tuple(dt_bias.shape)}, need [HV, K] = {(hv, k)} or flattened")


def check_state(name: str, state: Tensor, n: int, hv: int, k: int, v: int, dtype: torch.dtype) -> None:
    """Raise unless ``state`` is ``[n, hv, k, v]`` in the compute dtype; a transposed one is named as such."""
    if tuple(state.shape) != (n, hv, k, v):
        hint = "; it looks transposed, [V, K] instead of [K, V]" if tuple(state.shape) == (n, hv, v, k) else ""
        raise ValueError(f"{name}: found shape {tuple(state.shape)}, need [N, HV, K, V] = {(n, hv, k, v)}{hint}")
    if state.dtype != dtype:
        raise ValueError(f"{name}: found dtype {state.dtype}, need {dtype}: states are kept in full precision")


def check_inputs(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate_kind: str,
    lower_bound: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    plan: str,
    save: str = "inputs",
) -> Sizes:
    """Check the arguments of ``kda`` (``q`` None: those of ``segment_state``) and return their sizes.

    Raises:
        ValueError: the first argument that does not fit, by name.
    """
    named = {"k": k, "v": v, "gate": gate, "beta": beta}
    keys = k if q is None else q
    name = "k" if q is None else "q"
    need_tensors(
        named if q is None else {"q": q, **named},
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    if keys.ndim != 4:
        raise ValueError(f"{name}: found shape {tuple(keys.shape)}, need [B, T, H, K]")
    if v.ndim != 4:
        raise ValueError(f"v: found shape {tuple(v.shape)}, need [B, T, HV, V]")
    b, t, h, dk = keys.shape
    hv, dv = v.shape[2:]
    if min(h, dk, hv, dv) < 1 or b < 1:
        raise ValueError(f"{name}, v: found shapes {tuple(keys.shape)}, {tuple(v.shape)}, need B, H, K, HV, V >= 1")
    need_shape("k", k, (b, t, h, dk), "[B, T, H, K]")
    need_shape("v", v, (b, t, hv, dv), "[B, T, HV, V]")
    if hv % h:
        raise ValueError(f"v: found {hv} value heads, need a multiple of the {h} key heads")
    need_shape("gate", gate, (b, t, hv, dk), "[B, T, HV, K]")
    need_shape("beta", beta, (b, t, hv), "[B, T, HV]")
    check_gate(gate_kind, lower_bound, A_log, dt_bias, hv, dk)
    _need_floats(
        keys.device, q=q, k=k, v=v, gate=gate, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state
    )
    if gate_kind == "log_decay" and gate.device.type == "cpu" and gate.numel():
        check_decay(gate)
    if plan not in PLANS:
        raise ValueError(f"plan: found {plan!r}, need one of {list(PLANS)}")
    if save not in SAVES:
        raise ValueError(f"save: found {save!r}, need one of {list(SAVES)}")
    n = b
    if cu_seqlens is not None:
        if cu_seqlens.device != keys.device and cu_seqlens.device.type != "cpu":
            raise ValueError(f"cu_seqlens: found device {cu_seqlens.device}, need {keys.device}")
        check_cu_seqlens(cu_seqlens, b, t)
        n = cu_seqlens.numel() - 1
    if initial_state is not None:
        check_state("initial_state", initial_state, n, hv, dk, dv, compute_dtype(q, k, v, gate))
    return Sizes(b, t, h, hv, dk, dv, n)


def check_factors(scale: float | None, beta_max: float) -> None:
    """Raise unless the factors of output and write strength are numbers that mean something."""
    if scale is not None and not (isinstance(scale, Real) and math.isfinite(scale)):
        raise ValueError(f"scale: found {_shown(scale)}, need a finite number")
    if not (isinstance(beta_max, Real) and 0 < beta_max < math.inf):
        raise ValueError(f"beta_max: found {_shown(beta_max)}, need a finite number > 0")


def check_decay(gate: Tensor) -> None:
    """Raise when a log-decay is above 0 (read on the CPU only, where it costs no synchronisation)."""
    largest = gate.detach().max().item()
    if largest > 0:
        raise ValueError(f"gate: found a log-decay of {largest:g}, need values <= 0 with gate_kind='log_decay'")


def check_step(
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
    lower_bound: float | None,
    state_indices: Tensor | None,
) -> None:
    """Check the arguments of ``kda_step``.

    Raises:
        ValueError: the first argument that does not fit, by name.
    """
    need_tensors(
        {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "state": state},
        A_log=A_log, dt_bias=dt_bias, state_indices=state_indices,
    )  # fmt: skip
    if q.ndim != 3:
        raise ValueError(f"q: found shape {tuple(q.shape)}, need [N, H, K]")
    if v.ndim != 3:
        raise ValueError(f"v: found shape {tuple(v.shape)}, need [N, HV, V]")
    n, h, dk = q.shape
    hv, dv = v.shape[1:]
    need_shape("k", k, (n, h, dk), "[N, H, K]")
    need_shape("v", v, (n, hv, dv), "[N, HV, V]")
    if h < 1 or hv % h:
        raise ValueError(f"v: found {hv} value heads, need a multiple of the {h} key heads")
    need_shape("gate", gate, (n, hv, dk), "[N, HV, K]")
    need_shape("beta", beta, (n, hv), "[N, HV]")
    check_gate(gate_kind, lower_bound, A_log, dt_bias, hv, dk)
    _need_floats(q.device, q=q, k=k, v=v, gate=gate, beta=beta, A_log=A_log, dt_bias=dt_bias, state=state)
    if gate_kind == "log_decay" and gate.device.type == "cpu" and gate.numel():
        check_decay(gate)
    # A state stored in bf16 is computed with in full precision and rounded once.
    dtype = torch.bfloat16 if state.dtype == torch.bfloat16 else compute_dtype(q, k, v, gate)
    if state_indices is None:
        check_state("state", state, n, hv, dk, dv, dtype)
        return
    check_state("state", state, state.shape[0] if state.ndim else 0, hv, dk, dv, dtype)
    if state_indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"state_indices: found dtype {state_indices.dtype}, need int32 or int64")
    need_shape("state_indices", state_indices, (n,), "[N]")
    if state_indices.device != q.device:
        raise ValueError(f"state_indices: found device {state_indices.device}, need that of q, {q.device}")
    if state_indices.device.type == "cpu":
        check_entries(state_indices, state.shape[0])


def check_inplace(state: Tensor, needs_grad: bool) -> None:
    """Raise where new states cannot be written into ``state``."""
    if needs_grad:
        raise ValueError("inplace: found inputs that require a gradient, need torch.no_grad() for in-place steps")
    if any(size > 1 and step == 0 for size, step in zip(state.shape, state.stride(), strict=True)):
        raise ValueError("state: found an expanded tensor, whose states share memory; need one of its own for inplace")


def check_entries(state_indices: Tensor, entries: int) -> None:
    """Raise unless the indices are -1 or each another entry of the pool (read on the CPU only)."""
    used = [i for i in state_indices.tolist() if i != -1]
    for i in used:
        if not 0 <= i < entries:
            raise ValueError(f"state_indices: found {i}, need -1 (padding) or 0 .. {entries - 1}")
    if len(set(used)) != len(used):
        raise ValueError("state_indices: found one state twice, need each at most once")
