"""Grouped experts and router on the CPU, beside a plain loop over experts and a stable sort.

    python benchmarks/experts_cpu.py [--cases small tiny-896] [--threads 0] [--allow-busy] [--dry-run]

`loop` is the operator's own `reference` backend: masks, `.any()`, one product an expert, autograd. `trine` is the
default path; `trine one-by-one` and `trine together` force a product an expert and one product for all, the two ends
between which the default chooses. Errors are relative RMS of output and gradients against the loop in fp64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _common as common
import torch
from torch import Tensor

from trine.ops.experts import grouped_experts, torch_grouped
from trine.ops.router import RouterStats, route


class Case(NamedTuple):
    """Sizes; ``skew`` is the standard deviation of the experts' popularity (0: balanced up to sampling noise)."""

    tokens: int
    experts: int
    k: int
    latent: int
    inner: int
    skew: float = 0.0
    loop: bool = True


CASES = {
    "smoke": Case(4096, 16, 2, 32, 32),
    "small": Case(4096, 56, 2, 64, 64),
    "small-skewed": Case(4096, 56, 2, 64, 64, skew=0.1),
    "small-step": Case(1, 56, 2, 64, 64),
    "small-8": Case(8, 56, 2, 64, 64),
    "tiny-896-k2": Case(4096, 896, 2, 32, 32),
    "tiny-896": Case(4096, 896, 16, 32, 32),
    "tiny-896-skewed": Case(4096, 896, 16, 32, 32, skew=0.05),
    "130m": Case(512, 64, 4, 384, 320),
}
ROUTERS = {"small": (4096, 56, 2), "k3": (4096, 896, 16)}


def make(case: Case, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor, Tensor]:
    """Inputs that require gradients, expert ids, upstream gradient; the same numbers for every dtype."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()

    popularity_E = case.skew * torch.randn(case.experts, generator=generator)
    ids_TK = (torch.rand(case.tokens, case.experts, generator=generator) + popularity_E).topk(case.k).indices
    values = [
        normal(case.tokens, case.latent),
        torch.rand(case.tokens, case.k, generator=generator).to(dtype).requires_grad_(),
        normal(case.experts, case.inner, case.latent, std=case.latent**-0.5),
        normal(case.experts, case.inner, case.latent, std=case.latent**-0.5),
        normal(case.experts, case.latent, case.inner, std=case.inner**-0.5),
    ]
    return values, ids_TK, normal(case.tokens, case.latent).detach()


def step(values: list[Tensor], ids_TK: Tensor, upstream_TL: Tensor, backend: str) -> list[Tensor]:
    """Output and all gradients."""
    y_TL = grouped_experts(values[0], ids_TK, *values[1:], backend=backend)
    return [y_TL.detach(), *torch.autograd.grad(y_TL, values, upstream_TL)]


def with_call_cost(cost: int | None, call: Callable[[], object]) -> Callable[[], object]:
    """The call with the division into products forced to one end, or as it is."""

    def wrapped() -> object:
        usual = torch_grouped._CALL
        try:
            torch_grouped._CALL = usual if cost is None else cost
            return call()
        finally:
            torch_grouped._CALL = usual

    return wrapped


def experts(name: str, case: Case, repeats: int, quiet: bool, threads: int) -> list[common.Record]:
    """Forward, and forward with backward, of one case."""
    values, ids_TK, upstream_TL = make(case)
    exact = step(*make(case, torch.float64), "reference") if case.loop else None
    shape = f"{name} T{case.tokens} E{case.experts} k{case.k} L{case.latent} F{case.inner} fp32"
    ends = {"trine": ("torch", None), "trine one-by-one": ("torch", -1), "trine together": ("torch", 1 << 60)}
    if case.loop:
        ends["loop"] = ("reference", None)
    records = []
    for direction in ("fwd", "fwd+bwd"):
        entries: dict[str, Callable[[], object]] = {}
        for impl, (backend, cost) in ends.items():

            def call(backend: str = backend) -> object:
                if direction == "fwd+bwd":  # noqa: B023
                    return step(values, ids_TK, upstream_TL, backend)
                with torch.no_grad():
                    return grouped_experts(values[0], ids_TK, *values[1:], backend=backend)

            entries[impl] = with_call_cost(cost, call)
        rounds = {impl: 2 if impl == "loop" else repeats for impl in entries}
        for impl, timing in common.time_interleaved(entries, rounds).items():
            error = None
            if exact is not None and direction == "fwd+bwd":
                found = entries[impl]()
                assert isinstance(found, list)
                error = max(
                    float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)
                )
            records.append(
                common.Record(
                    "experts_cpu",
                    f"{direction} {shape}",
                    impl,
                    ms=timing.best_ms,
                    median_ms=timing.median_ms,
                    error=error,
                    quiet=quiet,
                    threads=threads,
                )
            )
    return records


def routers(name: str, repeats: int, quiet: bool, threads: int) -> list[common.Record]:
    """Routing, routing with statistics, and the solve."""
    tokens, count, k = ROUTERS[name]
    logits_TE, stats = torch.randn(tokens, count), RouterStats.allocate(1, count)
    bias_E = stats.bias_LE[0]

    def sort() -> object:
        biased_TE = torch.sigmoid(logits_TE) + bias_E
        return torch.sort(biased_TE, dim=1, descending=True, stable=True).indices[:, : k + 1].clone()

    def counted() -> object:
        return route(logits_TE, bias_E, k, stats=stats.layer(0))

    def solve() -> object:
        return stats.solve_(k)

    counted()
    shape = f"{name} T{tokens} E{count} k{k} fp32"
    entries: dict[str, dict[str, Callable[[], object]]] = {
        f"fwd route {shape}": {"trine": lambda: route(logits_TE, bias_E, k), "stable sort": sort},
        f"fwd route with statistics {shape}": {"trine": counted},
        f"fwd solve {shape}": {"trine": solve},
    }
    records = []
    for case, calls in entries.items():
        if "solve" in case:
            stats.zero_()
            counted()
        for impl, timing in common.time_interleaved(calls, repeats).items():
            records.append(
                common.Record(
                    "experts_cpu",
                    case,
                    impl,
                    ms=timing.best_ms,
                    median_ms=timing.median_ms,
                    quiet=quiet,
                    threads=threads,
                )
            )
        stats.zero_()
        stats.bias_LE.zero_()
    return records


def main() -> None:
    """Measure, print, and write the records."""
    parser = common.arguments(__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    threads = common.threads(options.threads)
    quiet = common.require_quiet(threads, options.allow_busy)
    records = [record for name in ROUTERS for record in routers(name, options.repeats, quiet, threads)]
    for name in options.cases:
        records += experts(name, CASES[name], options.repeats, quiet, threads)
    print(common.table(records))
    if not options.dry_run:
        print(common.write_records("experts_cpu", records))


if __name__ == "__main__":
    main()
