"""Inputs, runs and norms shared by the KDA tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trine.ops import _errors
from trine.ops.kda import bounded_gate, kda_reference, native_build
from trine.ops.kda.reference import l2_normalize

# Without a C++ compiler native.cpp is not there to test: calls are replayed in Python, see test_triton_replay.py.
collect_ignore = ["test_native_build.py", "test_triton_native.py"] if native_build.lacking() else []

sys.path.insert(0, str(Path(__file__).parent))  # for driver_stand_in.py

Inputs = dict[str, Tensor]
Function = Callable[..., tuple[Tensor, Tensor | None]]


def draw(
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 2,
    value_heads: int | None = None,
    key: int = 24,
    value: int = 20,
    sequences: int | None = None,
    regime: str = "random",
    seed: int = 0,
    state: bool = True,
) -> Inputs:
    """float64 inputs whose values are float32 numbers. ``regime`` names the gates and keys."""
    generator = torch.Generator().manual_seed(seed)
    hv = value_heads or heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = normal(batch, tokens, heads, key), normal(batch, tokens, heads, key), normal(batch, tokens, hv, value)
    gate, beta = 3 * normal(batch, tokens, hv, key), normal(batch, tokens, hv)
    A_log, dt_bias = 0.3 * normal(hv), normal(hv, key)
    fast, slow = 30.0, -8.0
    if regime == "saturated":
        gate, dt_bias = torch.full_like(gate, fast), torch.zeros_like(dt_bias)
    elif regime == "parallel keys":
        k, gate, beta = normal(1, 1, heads, key) + 0.01 * k, torch.full_like(gate, slow), torch.full_like(beta, 20.0)
    elif regime == "identical keys":
        k = normal(1, 1, heads, key).expand_as(k).contiguous()
        gate, beta = torch.full_like(gate, slow), torch.full_like(beta, 20.0)
    elif regime == "one slow channel":
        gate = torch.full_like(gate, fast)
        gate[..., 0] = slow
    elif regime == "fast and slow channels":
        gate = torch.where(torch.rand(gate.shape, generator=generator) < 0.5, slow, fast) + gate
    elif regime == "alternating":
        gate = torch.full_like(gate, fast)
        gate[:, ::2] = -fast
    elif regime == "zero rows":
        q[:, 3:7], k[:, 5:9], v[:, 8:12] = 0, 0, 0
    inputs = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    if state:
        inputs["initial_state"] = normal(sequences or batch, hv, key, value)
    return {name: x.double() for name, x in inputs.items()}


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """All inputs in one dtype, cut from any graph."""
    return {name: x.detach().to(dtype) for name, x in inputs.items()}


def cu(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """cu_seqlens of the given lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)


def run(function: Function, inputs: Inputs, *, final: bool = True, seed: int = 7, **options: Any) -> Inputs:
    """Output, final state and the gradients of a random linear loss on both, one entry each."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out, state = function(**leaves, output_final_state=final, **options)
    generator = torch.Generator().manual_seed(seed)
    loss = (out * torch.randn(out.shape, generator=generator).to(out.dtype)).sum()
    if state is not None:
        loss = loss + (state * torch.randn(state.shape, generator=generator).to(state.dtype)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results = {"out": out.detach(), **{"d_" + name: g for name, g in zip(leaves, gradients, strict=True)}}
    if state is not None:
        results["final"] = state.detach()
    return results


def gate_terms(inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """Sizes of the terms whose sums are the gradients of gate, A_log and dt_bias.

    The log-decay's gradient is a difference of sums of q dq and k dk; at saturation it is far smaller than they are.
    Each is multiplied by the slope of the gate to compare with the gradient of the gate's input.
    """
    data = cast(inputs, torch.float64)
    kind = options.pop("gate_kind", "bounded")
    A_log, dt_bias = data.pop("A_log", None), data.pop("dt_bias", None)
    x = data["gate"].requires_grad_()
    if kind == "bounded":
        g = bounded_gate(x, A_log, dt_bias)
    elif kind == "softplus":
        assert A_log is not None and dt_bias is not None
        g = -A_log.exp()[:, None] * torch.nn.functional.softplus(x + dt_bias)
    else:
        g = x * 1.0
    (slope,) = torch.autograd.grad(g.sum(), x)
    data["gate"] = g.detach()
    if options.pop("qk_norm", True):
        data["q"], data["k"] = l2_normalize(data["q"]), l2_normalize(data["k"])
    rows = run(kda_reference, data, qk_norm=False, gate_kind="log_decay", **options)
    groups = g.shape[2] // data["q"].shape[2]
    terms = (data["q"] * rows["d_q"]).abs() + (data["k"] * rows["d_k"]).abs()
    terms = terms.repeat_interleave(groups, 2) * slope.abs()
    sizes = {"d_gate": terms}
    if dt_bias is not None:
        sizes["d_dt_bias"] = terms.sum((0, 1)).reshape(dt_bias.shape)
    if A_log is not None:
        # dz/dA_log is z for the bounded gate and y / (dy/dz) for softplus; |x| + |bias| bounds the former.
        reach = x.detach().abs() + (0.0 if dt_bias is None else dt_bias.abs())
        sizes["d_A_log"] = (terms * (1.0 + reach)).sum((0, 1, 3))
    return sizes


def relative_errors(found: Inputs, expected: Inputs, sizes: dict[str, Tensor] | None = None) -> dict[str, float]:
    """Frobenius norm of the difference over that of ``expected``, or of ``sizes`` where given; 0 / 0 is 0."""
    errors = {}
    for name, value in expected.items():
        size = value if sizes is None or name not in sizes else sizes[name]
        difference = (found[name].double() - value.double()).norm().item()
        errors[name] = difference / max(size.double().norm().item(), 1e-30)
    return errors


def check(
    function: Function, inputs: Inputs, dtype: torch.dtype, *, tolerance: float | None = None, **options: Any
) -> dict[str, float]:
    """Compare ``function`` in ``dtype`` with the definition in float64; everything within 1e-10, or 1e-5 in float32."""
    expected = run(kda_reference, inputs, **options)
    found = run(function, cast(inputs, dtype), **options)
    unbounded = options.get("gate_kind") == "log_decay"  # its gradient vanishes like the decay itself
    sizes = gate_terms(inputs, **options) if dtype == torch.float32 or unbounded else None
    errors = relative_errors(found, expected, sizes)
    limit = tolerance or {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    assert all(torch.isfinite(x).all() for x in found.values())
    assert max(errors.values()) <= limit, {name: f"{e:.1e}" for name, e in errors.items() if e > limit}
    assert {name: x.dtype for name, x in found.items()} == dict.fromkeys(found, dtype)
    return errors


@pytest.fixture(autouse=True)
def _own_errors() -> Iterator[None]:
    """Error words belong to the process: what one test provokes, a run trained by the next must not find."""
    yield
    for word in _errors._words.values():
        word.zero_()


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The functions of this file."""
    return SimpleNamespace(
        draw=draw, cast=cast, cu=cu, run=run, gate_terms=gate_terms, relative_errors=relative_errors, check=check
    )
