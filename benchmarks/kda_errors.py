"""Rounding of KDA's float32 paths against the definition in float64: ``python benchmarks/kda_errors.py``.

For every kind of gate and key one record for the worst of outputs, states and gradients but the gate's, and one for the
gate's gradient, relative to the size of the terms it is a difference of (q dq and k dk times the slope of the gate).
Deterministic for a processor and a version of torch; needs no quiet machine.
"""

from __future__ import annotations

import argparse

import _common as common
import torch
from torch import Tensor

from trine.ops.kda import bounded_gate, kda, kda_pairwise, kda_reference
from trine.ops.kda.reference import l2_normalize

BENCHMARK = "kda_errors"
KINDS = ("random", "slow, identical keys", "saturated", "fast and slow channels", "one slow channel")
TOKENS, HEADS = 512, 2


def draw(kind: str, key: int, value: int) -> dict[str, Tensor]:
    """float64 inputs with float32 values; ``kind`` sets gates and keys."""
    q, k, v = (torch.randn(1, TOKENS, HEADS, size) for size in (key, key, value))
    gate, beta = 3 * torch.randn(1, TOKENS, HEADS, key), torch.randn(1, TOKENS, HEADS)
    if kind == "slow, identical keys":
        k, gate, beta = k[:, :1].expand_as(k), torch.full_like(gate, -8.0), torch.full_like(beta, 20.0)
    elif kind == "saturated":
        gate = torch.full_like(gate, 12.0)
    elif kind == "fast and slow channels":
        gate = gate + torch.where(torch.rand_like(gate) < 0.5, -8.0, 12.0)
    elif kind == "one slow channel":
        gate = torch.full_like(gate, 12.0)
        gate[..., 0] = -8.0
    state = torch.randn(1, HEADS, key, value)
    inputs = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "initial_state": state}
    return {name: x.double() for name, x in inputs.items()}


def run(function: object, inputs: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """Outputs, final state and gradients of a fixed random linear loss on both."""
    assert callable(function)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out, final = function(**leaves, output_final_state=True, **options)
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in (out, final))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out.detach(), "final": final.detach(), **dict(zip(leaves, gradients, strict=True))}


def gate_terms(inputs: dict[str, Tensor]) -> Tensor:
    """Size of the terms of the gate's gradient."""
    x = inputs["gate"].clone().requires_grad_()
    g = bounded_gate(x)
    (slope,) = torch.autograd.grad(g.sum(), x)
    q, k = l2_normalize(inputs["q"]), l2_normalize(inputs["k"])
    plain = run(kda_reference, {**inputs, "q": q, "k": k, "gate": g.detach()}, gate_kind="log_decay", qk_norm=False)
    return ((q * plain["q"]).abs() + (k * plain["k"]).abs()) * slope.abs()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    common.threads(1)
    records = []
    for key, value in ((32, 32), (64, 64), (128, 128)):
        for kind in KINDS:
            torch.manual_seed(0)
            inputs = draw(kind, key, value)
            exact, size = run(kda_reference, inputs), gate_terms(inputs).norm()
            for name, function in (("trine", kda), ("trine pairs", kda_pairwise)):
                found = run(function, {n: x.float() for n, x in inputs.items()})
                errors = {n: ((found[n].double() - x).norm() / x.norm()).item() for n, x in exact.items()}
                del errors["gate"]
                gate = ((found["gate"].double() - exact["gate"]).norm() / size).item()
                case = f"fwd+bwd B1 T{TOKENS} H{HEADS} K{key} V{value} fp32"
                records.append(common.Record(BENCHMARK, case, name, gates=kind, error=max(errors.values())))
                records.append(common.Record(BENCHMARK, f"{case} gate gradient", name, gates=kind, error=gate))
    print(common.table(records))
    if not options.no_write:
        print(common.write_records(BENCHMARK, records))


if __name__ == "__main__":
    main()
