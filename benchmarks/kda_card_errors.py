"""Errors of KDA on a CUDA card, gradients included, beside a peer's and the floor of bf16 operands.

    python benchmarks/kda_card_errors.py [--out FOLDER]

Relative (Frobenius) error against float64 of output, final state and every gradient of a random linear loss on both, in
each regime of gates and keys, for the kernels, for fla-core where it is importable, and for the floor: the portable
path in float64 but for the operands of its matrix products, which are rounded to bf16, and its results, rounded to the
types in which kernels return them. All take the same inputs in one run. fla-core's autotuner needs a few minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, Record, write_records
from kda import draw, error, say
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trine.ops.kda import kda

BENCHMARK = "kda_card_errors"
REGIMES = ("fast", "slow", "mixed", "saturated", "parallel")
TOKENS, HEADS = 1024, 4
NAMES = ("out", "final", "q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial_state")


class BF16Operands(TorchDispatchMode):
    """Rounds the operands of batched matrix products to bf16; everything else stays in the precision it has."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_):
            args = (*args[:-2], *(x.bfloat16().to(x.dtype) for x in args[-2:]))
        return function(*args, **(kwargs or {}))


def run(call: Callable[..., tuple[Tensor, Tensor]], data: dict[str, Tensor], ups: tuple[Tensor, Tensor]) -> dict:
    """Output, final state and gradients of ``(out * ups[0]).sum() + (final * ups[1]).sum()``."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in data.items()}
    out, final = call(**leaves)
    ups = ups[0].to(out), ups[1].to(final)
    gradients = torch.autograd.grad((out, final), list(leaves.values()), ups)
    return {"out": out.detach(), "final": final.detach(), **dict(zip(leaves, gradients, strict=True))}


def portable(data: dict[str, Tensor], ups: tuple[Tensor, Tensor], bf16_operands: bool) -> dict[str, Tensor]:
    """The portable path in float64 on the CPU, where a dispatch mode sees the backward pass too."""
    wide = {name: x.cpu().double() for name, x in data.items()}
    ups = ups[0].cpu(), ups[1].cpu()

    def call(**x: Tensor) -> tuple[Tensor, Tensor]:
        out, final = kda(**x, output_final_state=True, backend="torch")
        assert final is not None
        return out, final

    if not bf16_operands:
        return run(call, wide, ups)
    with BF16Operands():
        found = run(call, wide, ups)
    kinds = {name: x.dtype for name, x in data.items()} | {"out": data["v"].dtype, "final": torch.float32}
    return {name: x.to(kinds[name]) for name, x in found.items()}


def implementations() -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """Name -> call with kda's tensor arguments, returning output and final state."""

    def ours(save: str) -> Callable[..., tuple[Tensor, Tensor]]:
        def call(**x: Tensor) -> tuple[Tensor, Tensor]:
            out, final = kda(**x, output_final_state=True, backend="triton", save=save)  # type: ignore[arg-type]
            assert final is not None
            return out, final

        return call

    found = {f"trine save={save}": ours(save) for save in ("inputs", "factors")}
    if importlib.util.find_spec("fla") is None:
        say("fla-core is not importable here: no rows for it")
        return found
    from fla.ops.kda import chunk_kda

    def fla(**x: Tensor) -> tuple[Tensor, Tensor]:
        out, final = chunk_kda(
            x["q"], x["k"], x["v"], x["gate"], x["beta"], A_log=x["A_log"], dt_bias=x["dt_bias"].flatten(),
            initial_state=x["initial_state"], use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0, output_final_state=True,
        )  # fmt: skip
        return out, final

    return found | {"fla-core": fla}


def main() -> None:
    """Measure, print and write; the record is written after every regime."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.environ.get("OUT", str(RESULTS)))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/kda_card_errors.py needs a CUDA card, found none")
        return
    name = torch.cuda.get_device_name()
    calls = implementations()
    records: list[Record] = []
    for regime in REGIMES:
        data = draw(1, TOKENS, HEADS, regime)
        make = torch.Generator("cuda").manual_seed(1)
        data["A_log"] = 0.1 * torch.randn(HEADS, generator=make, device="cuda")
        data["initial_state"] = 0.3 * torch.randn(1, HEADS, 128, 128, generator=make, device="cuda")
        ups = (
            torch.randn(1, TOKENS, HEADS, 128, generator=make, device="cuda").bfloat16(),
            0.3 * torch.randn(1, HEADS, 128, 128, generator=make, device="cuda"),
        )
        exact = portable(data, ups, bf16_operands=False)
        results = {"bf16 operands": portable(data, ups, bf16_operands=True)}
        for impl, call in calls.items():
            try:
                results[impl] = run(call, data, ups)
            except Exception as problem:  # a peer's failure is a row that says so, not the end of ours
                say(f"{regime}, {impl}: {type(problem).__name__}: {str(problem)[:200]}")
        for impl, found in results.items():
            for what in NAMES:
                gap = error(found[what].cpu(), exact[what])
                records.append(Record(BENCHMARK, f"B1 T{TOKENS} H{HEADS} bf16 {what}", impl, gates=regime, error=gap))
            say(f"{regime:10} {impl:20} " + " ".join(f"{r.error:.2e}" for r in records[-len(NAMES) :]))
        path = write_records(BENCHMARK, records, packages=("triton", "fla-core"), device=name, folder=Path(options.out))
    print(path)


if __name__ == "__main__":
    main()
