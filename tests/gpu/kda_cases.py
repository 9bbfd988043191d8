"""Inputs, limits and comparisons of the KDA tests on a card."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trine.ops.kda import kda

CARD = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STREAMS = ("q", "k", "v", "gate", "beta")
NAMES = (*STREAMS, "A_log", "dt_bias", "initial_state")

Data = dict[str, Tensor]
RANDOM = dict(
    zip((*NAMES, "out", "final"), (5e-3, 5e-3, 5e-3, 6e-3, 6e-3, 6e-3, 6e-3, 5e-3, 4.8e-3, 3.5e-3), strict=True)
)
PARALLEL = dict.fromkeys(RANDOM, 1.2e-2) | {"out": 1.1e-2}
FULL = dict.fromkeys(RANDOM, 1e-4) | {"out": 2e-5, "final": 2e-5}
HALF = dict.fromkeys(RANDOM, 1e-2) | {"out": 3.5e-3, "final": 3.5e-3}


@dataclass(frozen=True)
class Case:
    """One comparison with float64. ``shape`` is batch, tokens, key heads; ``options`` go to the operator."""

    shape: tuple[int, int, int]
    regime: str = "fast"
    key: int = 128
    value: int = 128
    groups: int = 1
    lengths: tuple[int, ...] = ()
    dtype: torch.dtype = BF16
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        B, T, H = self.shape
        parts = [f"B{B} T{T} H{H} K{self.key} V{self.value} {str(self.dtype)[6:]} {self.regime}"]
        parts += [f"groups of {self.groups}"] if self.groups > 1 else []
        parts += ["packed"] if self.lengths else []
        return ", ".join(parts + [f"{name}={value}" for name, value in self.options])

    @property
    def limits(self) -> dict[str, float]:
        if self.dtype == FP32:
            return FULL
        long = "parallel" in self.regime or self.regime == "no decay"  # every token's rounding stays in the state
        return HALF if self.dtype == FP16 else PARALLEL if long else RANDOM


def packed(*lengths: int, **rest: Any) -> Case:
    return Case((1, sum(lengths), 4), lengths=lengths, **rest)


FACTORS = (("save", "factors"),)
EDGES = (0, 1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65, 127, 128, 129, 0)
CASES = [
    # bf16, K = V = 128: every plan that ships, long enough for three segments where it has any
    *(Case((1, 2400, 16), regime) for regime in ("fast", "slow", "mixed", "saturated", "wide", "no decay")),
    *(Case((1, 2400, 16), regime) for regime in ("slow parallel", "fast parallel")),
    Case((1, 1100, 96)),
    Case((1, 600, 64), "slow"),
    Case((1, 4200, 32), "slow"),
    Case((1, 2800, 20), "slow"),
    Case((1, 3400, 24)),
    Case((1, 10200, 8), "slow"),
    Case((1, 4200, 2), "slow"),
    Case((1, 1100, 4), "slow", options=(("plan", "serial"),)),
    Case((1, 4200, 48), options=(("plan", "segmented"),)),
    Case((1, 2400, 16), "slow", options=FACTORS),
    Case((1, 1100, 96), options=FACTORS),
    # other head sizes, groups, batches
    Case((16, 63, 1), key=64, value=64),
    Case((4, 500, 8), "slow", key=64, value=64),
    Case((2, 500, 3), key=60, value=60),
    Case((2, 97, 3), key=60, value=100),
    Case((3, 300, 4), "slow", key=100, value=100),
    Case((2, 300, 4), "slow", key=32, value=64),
    Case((1, 300, 2), "slow", key=256, value=256),
    Case((1, 300, 2), key=100, value=256),
    Case((2, 500, 2), groups=4),
    Case((2, 300, 2), "slow", key=64, value=64, groups=3),
    # packed
    packed(*EDGES),
    packed(*EDGES, regime="slow", key=64, value=64),
    packed(0, 1, 31, 1132, 133, 0, 1200, 64, 0, regime="slow"),
    packed(15, 85, 200, 900, 800, key=100, value=100),
    packed(100, 200, 900, 0, 700, regime="slow", key=256, value=256),
    packed(*EDGES, regime="slow", options=FACTORS),
    # strengths and keys as given
    Case((1, 300, 4), options=(("beta_is_logit", False),)),
    Case((1, 300, 4), "slow", options=(("beta_max", 2.0),)),
    Case((1, 100, 2), key=32, value=32, options=(("beta_is_logit", False), ("qk_norm", False))),
    Case((1, 300, 4), "slow", options=(("lower_bound", -1.0), ("scale", 0.25))),
    # fp32 and fp16
    *(Case((1, 1250, 16), regime, dtype=FP32) for regime in ("fast", "slow", "slow parallel", "saturated")),
    Case((1, 1250, 16), "slow", dtype=FP32, options=FACTORS),
    Case((2, 97, 3), key=60, value=100, dtype=FP32),
    Case((1, 130, 2), "slow", key=256, value=256, dtype=FP32),
    packed(*EDGES, regime="slow", key=64, value=64, dtype=FP32),
    Case((1, 2400, 16), dtype=FP16),
    Case((2, 97, 3), "slow", key=60, value=100, dtype=FP16),
]


def draw(case: Case, device: torch.device = CARD, seed: int = 0) -> tuple[Data, Tensor, Tensor]:
    """Raw inputs, gradient of the output and gradient of the final state."""
    B, T, H = case.shape
    HV, K, V, dtype = H * case.groups, case.key, case.value, case.dtype
    N = len(case.lengths) or B
    make = torch.Generator(device).manual_seed(seed)
    options = dict(case.options)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=make, device=device)

    k, gate, bias = normal(B, T, H, K), normal(B, T, HV, K), torch.zeros(HV, K, device=device)
    if "parallel" in case.regime:
        k = normal(B, 1, H, K) + 0.1 * k
    if "slow" in case.regime:  # a time step log-uniform in [1e-3, 0.1], as layers are initialised
        dt = torch.exp(math.log(1e-3) + math.log(100) * torch.rand(HV, K, generator=make, device=device))
        gate, bias = 0.1 * gate, dt + torch.log(-torch.expm1(-dt))
    elif case.regime == "mixed":  # one slow channel among fast ones
        gate[..., 0] = -3.9
    elif case.regime == "saturated":
        gate = gate + 9
    elif case.regime == "wide":
        gate = gate * 8
    elif case.regime == "no decay":
        gate = gate - 200
    beta = normal(B, T, HV)
    if not options.get("beta_is_logit", True):
        beta = beta.sigmoid()
        beta[:, ::7], beta[:, 3::7] = 0, 1
    if not options.get("qk_norm", True):
        k = 0.17 * k
    streams = {"q": normal(B, T, H, K), "k": k, "v": normal(B, T, HV, V), "gate": gate, "beta": beta}
    data = {name: x.to(dtype) for name, x in streams.items()}
    data |= {"A_log": 0.1 * normal(HV), "dt_bias": bias, "initial_state": 0.3 * normal(N, HV, K, V)}
    return data, normal(B, T, HV, V).to(dtype), 0.3 * normal(N, HV, K, V)


def bounds_of(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype, device=CARD)


def options_of(case: Case) -> dict[str, Any]:
    return dict(case.options) | ({"cu_seqlens": bounds_of(case.lengths)} if case.lengths else {})


def run(data: Data, d_out: Tensor, d_final: Tensor | None, **options: Any) -> Data:
    """Output, final state and every gradient of a linear loss on both."""
    leaves = {name: x.detach().requires_grad_() for name, x in data.items()}
    out, final = kda(**leaves, output_final_state=True, **options)
    assert final is not None
    loss = (out * d_out.to(out.dtype)).sum()
    if d_final is not None:
        loss = loss + (final * d_final.to(final.dtype)).sum()
    found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return found | {"out": out.detach(), "final": final.detach()}


def truth(data: Data, d_out: Tensor, d_final: Tensor | None, **options: Any) -> Data:
    """The same in float64."""
    options = {name: x for name, x in options.items() if name not in ("plan", "save")}
    return run({name: x.double() for name, x in data.items()}, d_out, d_final, backend="torch", **options)


def error(found: Tensor, wanted: Tensor, size: Tensor | None = None) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    norm = wanted.double().norm() if size is None else size
    gap = ((found.double() - wanted.double()).norm() / norm.clamp_min(1e-20)).item()
    return gap if gap == gap else math.inf


def errors(found: Data, wanted: Data, data: Data) -> dict[str, float]:
    """By name. A_log's gradient is one number a head, the sum of gate' (gate + dt_bias) over its tokens and channels.

    Where that sum nearly cancels, its own size says nothing of the error that the terms' roundings must leave: it is
    measured by the root of the sum of the terms' squares then, which is what independent roundings would add up to.
    """
    gaps = {name: error(found[name], x) for name, x in wanted.items()}
    terms = wanted["gate"].double() * (data["gate"].double() + data["dt_bias"].double())
    gaps["A_log"] = error(found["A_log"], wanted["A_log"], torch.maximum(wanted["A_log"].norm(), terms.norm()))
    return gaps


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
