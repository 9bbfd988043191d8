"""Small inputs from a recipe, and what Kimi Delta Attention makes of them in float64.

The definition here is written apart from ``trine.ops.kda``, whose backends are audited too: one matrix a token,
``S_t = (Diag(a_t) - beta_t k_t (a_t k_t)^T) S_{t-1} + beta_t k_t v_t^T``, ``o_t = scale S_t^T q_t`` (K3 report, arXiv
2607.24653, Eq. 1, multiplied out).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NAMES = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial_state")


@dataclass(frozen=True)
class Case:
    """A recipe for one input: everything a probe needs to be run again.

    Attributes:
        lengths: tokens of each sequence. Unless ``packed`` they are equal and the batch rows.
        packed: one row with ``cu_seqlens``.
        heads: H; groups: value heads a key head; key_dim, value_dim: K, V.
        gates: "mixed", "fast", "slow", "still", "saturated", "bound", "zero", "slow-channel", "still-channel",
            "swing", "alternate", "rare-zero" (see ``_gate_inputs``).
        keys: "random", "identical" or "near".
        beta: "random" or "one".
        state: with an initial state.
        lower_bound: of the gate.
        dtype: of q, k and v; "" is the target's main one.
        at: a position (of an edit, of a cut); what: what is done there; more: how many tokens or steps follow.
        seed: of the draw.
    """

    lengths: tuple[int, ...] = (64,)
    packed: bool = False
    heads: int = 2
    groups: int = 1
    key_dim: int = 16
    value_dim: int = 8
    gates: str = "mixed"
    keys: str = "random"
    beta: str = "random"
    state: bool = True
    lower_bound: float = -5.0
    dtype: str = ""
    at: int = 0
    what: str = ""
    more: int = 0
    seed: int = 0

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(changed)})"

    @property
    def tokens(self) -> int:
        """T of the row or rows."""
        return sum(self.lengths) if self.packed else self.lengths[0]

    @property
    def bounds(self) -> list[int]:
        """cu_seqlens of the packed row."""
        out = [0]
        for length in self.lengths:
            out.append(out[-1] + length)
        return out


@dataclass
class Inputs:
    """The tensors of one call, in one of the two forms of :class:`trine.decay.audit.target.Target`."""

    form: str
    tensors: dict[str, Tensor]
    cu_seqlens: tuple[int, ...] | None = None
    lower_bound: float = -5.0
    scale: float | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def with_(self, **tensors: Tensor) -> Inputs:
        """A copy with some tensors replaced."""
        return replace(self, tensors={**self.tensors, **tensors})

    def rows(self, start: int, end: int, state: Tensor | None = None) -> Inputs:
        """Tokens ``start`` to ``end`` of every row as one unpacked call that begins from ``state``."""
        cut = {n: x[:, start:end] if n in ("q", "k", "v", "gate", "beta") else x for n, x in self.tensors.items()}
        cut.pop("initial_state", None)
        if state is not None:
            cut["initial_state"] = state
        return replace(self, tensors=cut, cu_seqlens=None)

    @property
    def sequences(self) -> int:
        """N."""
        return len(self.cu_seqlens) - 1 if self.cu_seqlens is not None else self["q"].shape[0]


def draw(case: Case, form: str, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """The tensors of a case: drawn in float64 on the CPU, then rounded to ``dtype`` and moved.

    A_log, dt_bias, initial states and activated log-decays are float32, as callers have them.
    """
    noise = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    batch, tokens = (1, case.tokens) if case.packed else (len(case.lengths), case.tokens)
    h, hv, dk, dv = case.heads, case.heads * case.groups, case.key_dim, case.value_dim
    q, k, v = normal(batch, tokens, h, dk), normal(batch, tokens, h, dk), normal(batch, tokens, hv, dv)
    if case.keys != "random":
        k = normal(1, 1, h, dk) + (0.05 if case.keys == "near" else 0.0) * k
    x = _gate_inputs(case.gates, normal(batch, tokens, hv, dk))
    b = normal(batch, tokens, hv) if case.beta == "random" else torch.full((batch, tokens, hv), 8.0)
    n = len(case.lengths)
    A_log, dt_bias, state = 0.1 * normal(hv), 0.1 * normal(hv, dk), normal(n, hv, dk, dv)
    q, k, v, x, b = (t.to(dtype) for t in (q, k, v, x, b))
    tensors = {"q": q, "k": k, "v": v, "gate": x, "beta": b}
    if form == "raw":
        tensors |= {"A_log": A_log.float(), "dt_bias": dt_bias.float()}
    else:
        unit = {name: torch.nn.functional.normalize(tensors[name].double(), dim=-1).to(dtype) for name in "qk"}
        one = torch.ones_like(b) if case.beta == "one" else b.double().sigmoid().to(dtype)
        tensors |= {**unit, "gate": (case.lower_bound * x.double().sigmoid()).float(), "beta": one}
    if case.state:
        tensors["initial_state"] = state.float()
    return Inputs(
        form,
        {name: t.to(device) for name, t in tensors.items()},
        cu_seqlens=tuple(case.bounds) if case.packed else None,
        lower_bound=case.lower_bound,
    )


def _gate_inputs(recipe: str, x: Tensor) -> Tensor:
    """Inputs of the bounded gate ``[B, T, HV, K]`` from standard normal ones. With bound -5 the log-decays are

    mixed: about -2.5 in even heads, -0.09 in odd ones; fast: about -2.5; slow: about -0.03; still: about -0.001 in even
    heads, mixed in odd ones; saturated: within 1e-3 of the bound; bound: the bound itself; zero: 0 exactly;
    slow-channel: channel 0 about -0.01, the others saturated; still-channel: channel 0 exactly 0, the others at the
    bound; swing: about -0.001 and saturated by turns; alternate: exactly 0 and the bound by turns; rare-zero: mixed, a
    tenth of the tokens exactly 0.
    """
    far = 1000.0  # the logistic function is 0 or 1 exactly
    mixed = 1.5 * x
    mixed[:, :, 1::2] = 0.7 * x[:, :, 1::2] - 4.0
    simple = {
        "mixed": mixed,
        "fast": x,
        "slow": 0.5 * x - 5.0,
        "saturated": 9.0 + 0.2 * x,
        "bound": torch.full_like(x, far),
        "zero": torch.full_like(x, -far),
    }
    if recipe in simple:
        return simple[recipe]
    if recipe == "still":
        mixed[:, :, ::2] = 0.3 * x[:, :, ::2] - 8.5
    elif recipe == "slow-channel":
        mixed = 9.0 + 0.2 * x
        mixed[..., 0] = -6.0
    elif recipe == "still-channel":
        mixed = torch.full_like(x, far)
        mixed[..., 0] = -far
    elif recipe == "swing":
        mixed = 9.0 + 0.2 * x
        mixed[:, ::2] *= -1.0
    elif recipe == "alternate":
        mixed = torch.full_like(x, far)
        mixed[:, ::2] = -far
    elif recipe == "rare-zero":
        mixed[:, 3::10] = -far
    else:
        raise ValueError(f"gates: found {recipe!r}, need a recipe of Case")
    return mixed


@dataclass(frozen=True)
class Fault:
    """A known misreading of the definition. Once one explains a target, the other probes judge on top of it."""

    scale: bool = False  # the output is not multiplied by K^-1/2
    beta: bool = False  # beta rounded to bfloat16
    gate: str = ""  # "input" or "decay": the gate's input, or the log-decay, rounded to bfloat16
    clamp: bool = False  # the softplus gate clamped at the bound, in place of the scaled logistic function
    early: bool = False  # the value predicted from the state before its decay
    norm: bool = False  # q and k used as they are
    heads: bool = False  # value head h reads key head h % H, not h // (HV / H)


@dataclass
class Result:
    """Output ``[B, T, HV, V]``, final states ``[N, HV, K, V]`` (None: not returned) and gradients by name.

    ``sizes``, of results of the definition: the sizes ``[HV]`` of the terms whose differences or sums the gradients of
    the gate and of its parameters are, which rounding errors have to be measured by.
    """

    out: Tensor
    state: Tensor | None
    grads: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """``sum(weight * output) + sum(weight * final state)`` with fixed random weights.

    ``before`` (a token of every row) and ``sequences`` (of the packed row) restrict it.
    """

    before: int | None = None
    state: bool = True
    documents: tuple[int, ...] | None = None

    def __call__(self, out: Tensor, state: Tensor | None, bounds: tuple[int, ...] | None) -> Tensor:
        """The loss of a result."""
        w = _weights(out.shape, out.dtype).to(out.device)
        if self.before is not None:
            out, w = out[:, : self.before], w[:, : self.before]
        if self.documents is not None:
            assert bounds is not None
            spans = [slice(bounds[n], bounds[n + 1]) for n in self.documents]
            out, w = torch.cat([out[:, s] for s in spans], 1), torch.cat([w[:, s] for s in spans], 1)
        total = (out * w).sum(dtype=torch.float64 if out.dtype == torch.float64 else torch.float32)
        if state is not None and self.state and self.before is None:
            u = _weights(state.shape, state.dtype).to(state.device)
            if self.documents is not None:
                state, u = state[list(self.documents)], u[list(self.documents)]
            total = total + (state * u).sum()
        return total


def _weights(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Weights that every dtype holds exactly and that are a function of the position alone: row by row, so that a
    longer row has those of a shorter one."""
    batch, tokens = shape[0], shape[1]
    noise = torch.Generator().manual_seed(1)
    w = torch.randint(1, 9, (tokens, batch, *shape[2:]), generator=noise).transpose(0, 1) / 8
    sign = torch.where(torch.arange(tokens) % 3 == 0, -1.0, 1.0).view(1, tokens, *([1] * (len(shape) - 2)))
    return (w * sign).to(dtype)


# Results of the definition by content: probes, and targets, ask for the same ones again and again.
_KNOWN: OrderedDict[Any, Result] = OrderedDict()
_KEPT = 4000


def define(
    x: Inputs, loss: Loss | None = None, fault: Fault = Fault(), noise: float = 0.0, noise_seed: int = 0
) -> Result:
    """The definition in float64, on the CPU, from the very tensors a target was given.

    Args:
        x: inputs of either form.
        loss: also return its gradients with respect to every tensor of ``x``.
        fault: a misreading to compute instead.
        noise: relative size of errors put on normalised q, k, on v and on the output, as rounding them would.
        noise_seed: of these errors.
    """
    key = (_digest(x), loss, fault, noise, noise_seed)
    known = _KNOWN.get(key)
    if known is None:
        with torch.enable_grad():
            known = _define(x, loss, fault, noise, noise_seed)
        _KNOWN[key] = known
        if len(_KNOWN) > _KEPT:
            _KNOWN.popitem(last=False)
    return known


def _digest(x: Inputs) -> bytes:
    h = hashlib.blake2b(repr((x.form, x.cu_seqlens, x.lower_bound, x.scale)).encode(), digest_size=16)
    for name, t in x.tensors.items():
        data = t.detach().cpu().contiguous()
        h.update(f"{name}{data.dtype}{tuple(data.shape)}".encode())
        h.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return h.digest()


def _rounded(x: Tensor) -> Tensor:
    """Rounded to bfloat16, differentiated as if it were not."""
    return x + (x.to(torch.bfloat16).to(x.dtype) - x).detach()


def _define(x: Inputs, loss: Loss | None, fault: Fault, noise: float, noise_seed: int) -> Result:
    leaves = {n: t.detach().cpu().double().requires_grad_(loss is not None) for n, t in x.tensors.items()}
    out, final = _recurrence(leaves, x, fault, noise, noise_seed)
    grads: dict[str, Tensor] = {}
    if loss is not None:
        found = torch.autograd.grad(loss(out, final, x.cu_seqlens), list(leaves.values()), allow_unused=True)
        grads = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), found, strict=True)}
    sizes = {} if loss is None else _sizes({n: t.detach() for n, t in leaves.items()}, grads, x)
    return Result(out.detach(), final.detach(), grads, sizes)


# The gate's gradient is the difference of what a row reads and what it is read as; at a saturated gate little is left.
# A decay of exp(-5) leaves 0.7 % of those terms: below a hundredth, errors are measured by the terms.
_LEFT = 1e-2


def _sizes(leaves: Mapping[str, Tensor], grads: Mapping[str, Tensor], x: Inputs) -> dict[str, Tensor]:
    """Sizes a head to measure errors of the gate's gradients by."""
    groups = leaves["v"].shape[2] // leaves["q"].shape[2]
    terms = (leaves["q"] * grads["q"]).abs() + (leaves["k"] * grads["k"]).abs()
    terms = terms.repeat_interleave(groups, dim=2)
    if x.form != "raw":
        return {"gate": _LEFT * terms.transpose(0, 2).flatten(1).norm(dim=1)}
    y = leaves["gate"] + leaves["dt_bias"]
    z = leaves["A_log"].exp()[:, None] * y
    terms = terms * (z.sigmoid() * (-z).sigmoid() * leaves["A_log"].exp()[:, None] * -x.lower_bound)
    by_head = grads["gate"].abs().transpose(0, 2).flatten(1)
    return {
        "gate": _LEFT * terms.transpose(0, 2).flatten(1).norm(dim=1),
        "A_log": (grads["gate"] * y).abs().transpose(0, 2).flatten(1).sum(1) + _LEFT * (terms * y).abs().sum((0, 1, 3)),
        "dt_bias": by_head.sum(1) + _LEFT * terms.sum((0, 1, 3)),
    }


def _recurrence(
    leaves: Mapping[str, Tensor], x: Inputs, fault: Fault, noise: float, noise_seed: int
) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(noise_seed)

    def shaken(t: Tensor) -> Tensor:
        return t * (1 + noise * (2 * torch.rand(t.shape, generator=source, dtype=t.dtype) - 1)) if noise else t

    q, k, v, gate, beta = (leaves[n] for n in ("q", "k", "v", "gate", "beta"))
    if x.form == "raw":
        if not fault.norm:
            q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
        gate = _rounded(gate) if fault.gate == "input" else gate
        slope, y = leaves["A_log"].exp()[:, None], gate + leaves["dt_bias"]
        if fault.clamp:
            g = (-slope * torch.nn.functional.softplus(y)).clamp(min=x.lower_bound)
        else:
            g = x.lower_bound * torch.sigmoid(slope * y)
        beta = beta.sigmoid()
    else:
        g = gate
    g = _rounded(g) if fault.gate == "decay" else g
    beta = _rounded(beta) if fault.beta else beta
    groups = v.shape[2] // q.shape[2]
    scale = (1.0 if fault.scale else q.shape[-1] ** -0.5) if x.scale is None else x.scale

    def shared(t: Tensor) -> Tensor:
        return t.repeat(1, 1, groups, 1) if fault.heads else t.repeat_interleave(groups, dim=2)

    q, k, v, a = shared(shaken(q)) * scale, shared(shaken(k)), shaken(v), g.exp()
    write = beta.unsqueeze(-1) * k
    # [B, T, HV, K, K] and [B, T, HV, K, V]: the affine map of each token on the state.
    M = torch.diag_embed(a) - write.unsqueeze(-1) * (k if fault.early else a * k).unsqueeze(-2)
    W = write.unsqueeze(-1) * v.unsqueeze(-2)
    _batch, tokens, heads, dk = k.shape
    start = leaves.get("initial_state")
    if start is None:
        start = v.new_zeros(x.sequences, heads, dk, v.shape[-1])
    if x.cu_seqlens is None:
        states, final = _walk(M, W, start)
    else:
        parts = [_walk(M[:, a:b], W[:, a:b], start[n : n + 1]) for n, (a, b) in enumerate(pairwise(x.cu_seqlens))]
        states, final = torch.cat([s for s, _ in parts], 1), torch.cat([f for _, f in parts])
    out = (q.unsqueeze(-2) @ states).squeeze(-2) if tokens else v * 0.0
    return shaken(out), final


def _walk(M: Tensor, W: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """All states ``[B, T, H, K, V]`` and the last."""
    if not M.shape[1]:
        return W, start
    flat, states = start.flatten(0, 1), []
    for m, w in zip(M.transpose(1, 2).flatten(0, 1).unbind(1), W.transpose(1, 2).flatten(0, 1).unbind(1), strict=True):
        flat = torch.baddbmm(w, m, flat)
        states.append(flat)
    b, _, h = W.shape[:3]
    return torch.stack(states, 1).unflatten(0, (b, h)).transpose(1, 2), flat.unflatten(0, (b, h))
