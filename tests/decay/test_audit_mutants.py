"""One small implementation a fault, with exactly that fault planted: the audit names it, and nothing else.

The implementation without a fault, our definition and our torch path get no finding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trine.decay.audit import Lab, Target, examine, load
from trine.ops.kda import kda_step
from trine.ops.short_conv import short_conv


def small_kda(
    fault: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float = -5.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Any:
    """Chunked KDA, every document cut into tiles from its own start; ``fault`` names what is wrong with it."""
    hv, dk, dv = v.shape[2], q.shape[3], v.shape[3]
    if fault == "assumes contiguous rows":
        v = v.as_strided(v.shape, torch.empty(v.shape, device="meta").stride())
    if fault == "32-bit offset":
        v = with_int32_offsets(v)
    if fault == "no gradient to the initial state" and initial_state is not None:
        initial_state = initial_state.detach()
    if fault in ("transposed state", "state laid out as [V, K]") and initial_state is not None:
        shape = initial_state.shape
        initial_state = (
            initial_state.mT if fault == "transposed state" else initial_state.reshape(shape[0], hv, dv, dk).mT
        )
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    n = q.shape[0] if cu_seqlens is None else len(bounds) - 1
    if initial_state is None:
        initial_state = q.new_zeros(n, hv, dk, dv, dtype=torch.float32)
    outs, finals = [], []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        S = initial_state if cu_seqlens is None else initial_state[i : i + 1]
        if fault == "state leaks into the next document" and finals:
            S = S + finals[-1]
        parts = [t[:, start:end] for t in (q, k, v, gate, beta)]
        if fault == "skips one-token documents" and cu_seqlens is not None and end - start == 1 and end > 1:
            outs.append(torch.zeros_like(parts[2]))
            finals.append(S)
            continue
        out, S = one_document(fault, *parts, S, A_log, dt_bias, lower_bound, q.shape[1])
        outs.append(out)
        finals.append(S)
    out, state = torch.cat(outs, 1), torch.cat(finals)
    if fault == "final states of empty documents left out" and cu_seqlens is not None:
        kept = [f for f, a, b in zip(finals, bounds, bounds[1:], strict=False) if b > a]
        state = torch.cat([*kept, *(torch.zeros_like(finals[0]) for _ in range(n - len(kept)))]) if kept else state
    if fault == "an empty batch forgets its states" and not q.shape[1]:
        state = torch.zeros_like(state)
    if fault != "no scale":
        out = out * (dk**-0.5 if scale is None else scale)
    if fault == "noise":
        out = out * (1 + 1e-7 * torch.randn_like(out))
    if fault == "works in v" and not v.requires_grad:
        v.zero_()
    if fault == "returns heads first":
        return out.transpose(1, 2), state
    if fault == "not a number":
        out = torch.where(torch.arange(out.shape[1]).view(1, -1, 1, 1) == 5, float("nan"), out)
    if fault == "one output buffer for all calls":
        buffer = BUFFERS.setdefault(out.shape, torch.empty(out.shape))
        out = out if out.requires_grad else buffer.copy_(out)
    if fault == "transposed state":
        state = state.mT.contiguous()
    if fault == "state laid out as [V, K]":
        state = state.mT.reshape(state.shape)
    if fault == "unmasked load":
        out = out + 0.0 * past_the_end(v)
    return out.to(v.dtype), state


BUFFERS: dict[Any, Tensor] = {}


def one_document(
    fault: str, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, S: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float, total: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tiles of one document; rows that fill up the last one neither decay nor write."""
    tokens = q.shape[1]
    tile = {"anchor in a later row": 16, "anchor in the first row": 24}.get(fault, 32)
    if fault == "plan chosen by T":
        tile = 16 if total < 128 else 32
    outs = []
    for start in range(0, tokens, tile):
        rows = min(tile, tokens - start)
        pad = tile - rows
        part = [
            F.pad(t[:, start : start + rows].float(), (0, 0) * (t.ndim - 2) + (0, pad)) for t in (q, k, v, gate, beta)
        ]
        if fault == "unmasked tail" and pad:
            part[3] = torch.cat([part[3][:, :rows], part[3][:, rows - 1 : rows].expand(-1, pad, -1, -1)], 1)
        live = (torch.arange(tile) < rows).view(1, tile, 1)
        out, S = one_tile(fault, *part, S, A_log, dt_bias, lower_bound, live)
        outs.append(out[:, :rows])
    if not outs:
        return v.float(), S
    # The state takes part in every gradient, be it with nothing: else autograd would add in another order here.
    return torch.cat(outs, 1) + 0.0 * S.sum(), S


def one_tile(
    fault: str, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, S: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float, live: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The chunkwise form (Kimi Linear, arXiv 2510.26692) of one tile, decays between rows formed pair by pair."""
    groups = v.shape[2] // q.shape[2]
    if fault != "no norm":
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    wrong_heads = fault == "reads key head h % H"
    q, k = (t.repeat(1, 1, groups, 1) if wrong_heads else t.repeat_interleave(groups, 2) for t in (q, k))
    if fault == "gate through bf16":
        gate = gate.bfloat16().float()
    z = A_log.exp()[:, None] * (gate + dt_bias)
    g = lower_bound * z.sigmoid()
    if fault == "clamp instead of sigmoid":
        g = (-A_log.exp()[:, None] * F.softplus(gate + dt_bias)).clamp(min=lower_bound)
    if fault == "gate through bf16 after the sigmoid":
        g = g.bfloat16().float()
    b = beta.sigmoid()
    if fault == "beta through bf16":
        b = b.bfloat16().float()
    if fault == "wrong gradient of beta":
        b = 0.9 * b + 0.1 * b.detach()
    if fault == "rows without decay taken for padding":
        b = b * (g != 0).any(-1)
    b = b * live
    if fault != "unmasked tail":
        g = g * live.unsqueeze(-1)
    q, k, v, g, b = (t.transpose(1, 2) for t in (q, k, v, g, b.unsqueeze(-1)))  # [B, H, tile, X]
    if fault == "diagonal in the gate's gradient":
        g = LeavesDiagonal.apply(g, q, k)
    G, size = g.cumsum(-2), q.shape[-2]
    keep = torch.ones(size, size, dtype=torch.bool).tril().unsqueeze(-1)
    if fault == "anchor in a later row":
        R = G[..., 8:9, :]
        D = torch.where(keep, (G - R).exp().unsqueeze(-2) * (R - G).exp().unsqueeze(-3), 0.0)
    elif fault == "anchor in the first row":
        D = torch.where(keep, G.exp().unsqueeze(-2) * (-G).exp().unsqueeze(-3), 0.0)
    else:
        D = torch.where(keep, G.unsqueeze(-2) - G.unsqueeze(-3), -torch.inf).exp()
    P = pairs(q, k, D)
    M = b * pairs(k, k, D).tril(-1)
    read = k * (G - g if fault == "predicts before the decay" else G).exp()
    X = b * (v - read @ S)
    if fault == "predicts before the decay":
        D = torch.where(keep, (G - g).unsqueeze(-2) - G.unsqueeze(-3), -torch.inf).exp()
        M = b * pairs(k, k, D).tril(-1)
    eye = torch.eye(size)
    if fault == "Neumann inverse":
        inverse, power = eye - M, M @ M
        for _ in range(4):
            inverse, power = inverse + inverse @ power, power @ power
        X = inverse @ X
    else:
        X = torch.linalg.solve_triangular(eye + M, X, upper=False, unitriangular=True)
    out = (q * G.exp()) @ S + P @ X
    last = G[..., -1:, :]
    kept = last.mT.exp() * S
    if fault == "forgets by the mean decay":
        kept = torch.where(last.mean(-1, keepdim=True) < -30.0, 0.0, kept)
    return out.transpose(1, 2), kept + (k * (last - G).exp()).mT @ X


def pairs(q: Tensor, k: Tensor, D: Tensor) -> Tensor:
    """``sum_d q_id k_jd D_ijd``, ``[B, H, tile, tile]``."""
    return (q.unsqueeze(-2) * k.unsqueeze(-3) * D).sum(-1)


class LeavesDiagonal(torch.autograd.Function):
    """Adds to the gate's gradient what row and column sums of the diagonal leave when rounded apart."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return g.clone()

    @staticmethod
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor, None, None]:
        q, k = ctx.saved_tensors
        return dg + 3e-6 * (q * k) * (dg != 0).any(-1, keepdim=True), None, None


def with_int32_offsets(v: Tensor) -> Tensor:
    """Rows gathered by offsets that wrap around at 2^31."""
    flat = v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0)
    place = sum(
        (torch.arange(n).view(*(-1 if i == d else 1 for i in range(v.ndim))) * s).int()
        for d, (n, s) in enumerate(zip(v.shape, v.stride(), strict=True))
    )
    assert isinstance(place, Tensor)
    return flat[(place + v.storage_offset()).long() % flat.numel()] if v.numel() else v


def past_the_end(v: Tensor) -> Tensor:
    """The value after the last one in memory, where memory goes on."""
    end, room = v.storage_offset() + v.numel(), v.untyped_storage().nbytes() // v.element_size()
    return v.as_strided((1,), (1,), end) if v.is_contiguous() and end < room else torch.zeros(1)


def make_step(fault: str) -> Callable[..., tuple[Tensor, Tensor]]:
    calls = [0]

    def step(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor, **keywords: Any) -> Any:
        calls[0] += 1
        if fault == "step lacks the scale":
            keywords["scale"] = 1.0
        if fault == "step rounds beta":
            b = torch.special.logit(beta.float().sigmoid().bfloat16().double()).float()
            return kda_step(q, k, v, gate, b, state, **keywords)
        out, new = kda_step(q, k, v, gate, beta, state, inplace=fault == "step writes into its state", **keywords)
        if fault == "state stored in bf16 now and then" and calls[0] % 100 == 0:
            new = new.bfloat16().float()
        return out, new

    return step


def make_conv(fault: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def conv(x: Tensor, weight: Tensor, window: Tensor | None) -> Any:
        window = None if fault == "convolution forgets its window" else window
        return short_conv(x, weight, window_NWC=window, output_window=True)

    return conv


MUTANTS = {
    "returns heads first": "contract",
    "not a number": "contract",
    "noise": "determinism",
    "works in v": "mutation",
    "step writes into its state": "mutation",
    "transposed state": "state-layout",
    "state laid out as [V, K]": "state-layout",
    "predicts before the decay": "definition",
    "no norm": "definition",
    "reads key head h % H": "definition",
    "no scale": "scale",
    "clamp instead of sigmoid": "gate-formula",
    "beta through bf16": "beta-rounding",
    "step rounds beta": "beta-rounding",
    "gate through bf16": "gate-rounding",
    "gate through bf16 after the sigmoid": "gate-rounding",
    "unmasked tail": "lengths",
    "anchor in a later row": "causality",
    "plan chosen by T": "append",
    "anchor in the first row": "range",
    "Neumann inverse": "parallel-keys",
    "forgets by the mean decay": "slow-channel",
    "rows without decay taken for padding": "zero-decay",
    "wrong gradient of beta": "gradients",
    "diagonal in the gate's gradient": "gate-gradient",
    "state leaks into the next document": "neighbours",
    "skips one-token documents": "documents",
    "final states of empty documents left out": "empty-documents",
    "an empty batch forgets its states": "all-empty",
    "no gradient to the initial state": "split",
    "step lacks the scale": "decode",
    "state stored in bf16 now and then": "decode-drift",
    "one output buffer for all calls": "stale-memory",
    "unmasked load": "stale-memory",
    "assumes contiguous rows": "views",
    "32-bit offset": "offsets",
    "convolution forgets its window": "conv-window",
}


# Second faults of a probe that has another one above.
SECOND = {
    "not a number",
    "step writes into its state",
    "state laid out as [V, K]",
    "no norm",
    "reads key head h % H",
    "step rounds beta",
    "gate through bf16 after the sigmoid",
}


def target(fault: str) -> Target:
    return Target(
        fault or "no fault",
        functools.partial(small_kda, fault),
        form="raw",
        step=make_step(fault),
        conv=make_conv(fault),
    )


def findings(subject: Target) -> dict[str, str]:
    verdicts = list(examine(Lab(subject, quick=True), shrink_seconds=0.0))
    return {v.probe: f"{v.text} {v.case}" for v in verdicts if v.verdict == "finding"}


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] if f in SECOND else []) for f in MUTANTS])
def test_the_fault_is_named_and_nothing_else(fault: str) -> None:
    found = findings(target(fault))
    assert list(found) == [MUTANTS[fault]], found


def test_the_implementation_without_a_fault_has_no_finding() -> None:
    assert findings(target("")) == {}


@pytest.mark.parametrize("name", ["trine:reference", "trine:torch"])
def test_our_own_paths_have_no_finding(name: str) -> None:
    assert findings(load(name)) == {}


def test_every_probe_of_a_cpu_has_a_mutant() -> None:
    from trine.decay.audit import PROBES

    assert {p.name for p in PROBES} - set(MUTANTS.values()) == {"diagonal-launches", "decay-cliff"}
