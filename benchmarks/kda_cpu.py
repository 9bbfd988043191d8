"""KDA on the CPU beside its peers: ``python benchmarks/kda_cpu.py``.

Times forward + backward and forward of trine's chunked path, and its peers in the same process, round after round:
trine's token-by-token definition under autograd, the position-pair form that a bounded gate makes unnecessary,
fla-core's ``naive_chunk_kda`` and the eager chunk form of transformers' ``kimi_linear`` (the last two where installed:
``pip install --no-deps fla-core==0.6.0 einops`` and ``pip install transformers``). All start from the same raw inputs:
the L2 norm, the gate and the logistic function of beta are part of what is timed, and gradients go to the same tensors.

The machine is checked before and after; on a busy one the benchmark refuses, or marks its records (``--allow-busy``).
"""

from __future__ import annotations

import argparse
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import _common as common

BENCHMARK = "kda_cpu"


@dataclass(frozen=True)
class Case:
    """``documents`` of equal length packed in one row of ``tokens``."""

    tokens: int
    documents: int
    heads: int
    key: int
    value: int

    @property
    def name(self) -> str:
        packed = f" docs{self.documents}" if self.documents > 1 else ""
        return f"B1 T{self.tokens}{packed} H{self.heads} K{self.key} V{self.value} fp32"


CASES = {"long": Case(2048, 1, 4, 64, 64), "packed": Case(4096, 16, 4, 32, 32), "wide": Case(1024, 1, 4, 128, 128)}


def main() -> None:
    """Parse arguments, run the cases, print a table and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "decode"], default=["long", "packed", "decode"])
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 takes all that this process may use")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of the fast entries")
    parser.add_argument("--slow-repeats", type=int, default=3, help="rounds of entries that take about a second")
    parser.add_argument("--ours-only", action="store_true", help="leave the slow peers out")
    parser.add_argument("--allow-busy", action="store_true", help="run on a busy machine and mark the records")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    count = common.threads(options.threads)
    quiet = common.require_quiet(count, options.allow_busy)
    records: list[common.Record] = []
    for name in options.cases:
        if name == "decode":
            records += decode_records(options.repeats, count)
        else:
            slow = 0 if options.ours_only else options.slow_repeats
            records += chunk_records(CASES[name], options.repeats, slow, count)
    quiet = common.require_quiet(count, True) and quiet
    records = [common.Record(**{**vars(r), "quiet": quiet}) for r in records]
    print(common.table(records))
    for line in ratios(records):
        print(line)
    if not options.no_write:
        print(common.write_records(BENCHMARK, records, packages=("fla-core", "transformers")))


def ratios(records: list[common.Record]) -> list[str]:
    """How many times longer each peer takes than trine, by best repeat."""
    lines = []
    for case in dict.fromkeys(r.case for r in records):
        times = {r.impl: r.ms for r in records if r.case == case and r.ms is not None}
        ours = times.pop("trine", None)
        if ours is not None and times:
            lines.append(f"{case}: " + ", ".join(f"{name} {ms / ours:.1f}x" for name, ms in times.items()))
    return lines


def chunk_records(case: Case, repeats: int, slow_repeats: int, threads: int) -> list[common.Record]:
    """Forward + backward of every implementation, and our forward."""
    import torch

    from trine.ops.kda import kda

    torch.manual_seed(0)
    leaves = inputs(case)
    weights = torch.randn(1, case.tokens, case.heads, case.value)
    entries = implementations(case, leaves, slow_repeats > 0)
    with torch.no_grad():
        wide = {name: x.double() for name, x in leaves.items()}
        exact, _ = kda(**wide, cu_seqlens=cu_seqlens(case), backend="reference")
        errors = {name: relative(run(), exact) for name, run in entries.items()}
    for name, error in errors.items():
        if not error < 1e-4:
            raise SystemExit(f"{name} disagrees with the definition by {error:.1e}: nothing to time")

    def both(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run(), list(leaves.values()), weights)

    @torch.no_grad()
    def forward() -> object:
        return entries["trine"]()

    calls: dict[str, Callable[[], object]] = {name: both(run) for name, run in entries.items()}
    fast = ("trine", "trine pairs")
    turns = {name: repeats if name in fast else slow_repeats for name in calls}
    timings = common.time_interleaved({**calls, "forward": forward}, {**turns, "forward": repeats})
    records = [
        common.Record(
            BENCHMARK,
            f"fwd+bwd {case.name}",
            name,
            ms=timings[name].best_ms,
            median_ms=timings[name].median_ms,
            gates="mixed",
            peak_bytes=common.peak_bytes(calls[name]) if name in fast else None,
            error=errors[name],
            threads=threads,
        )
        for name in entries
    ]
    best = timings["forward"]
    records.append(
        common.Record(
            BENCHMARK,
            f"fwd {case.name}",
            "trine",
            ms=best.best_ms,
            median_ms=best.median_ms,
            gates="mixed",
            error=errors["trine"],
            threads=threads,
        )
    )
    return records


def inputs(case: Case) -> dict[str, object]:
    """Raw inputs that require gradients: keys and queries before the norm, the gate's input, logits of beta."""
    import torch

    t, h, k, v = case.tokens, case.heads, case.key, case.value
    leaves = {
        "q": torch.randn(1, t, h, k),
        "k": torch.randn(1, t, h, k),
        "v": torch.randn(1, t, h, v),
        "gate": 2 * torch.randn(1, t, h, k),
        "beta": torch.randn(1, t, h),
        "A_log": torch.zeros(h),
        "dt_bias": torch.empty(h, k).uniform_(-7, 0),
    }
    return {name: x.requires_grad_() for name, x in leaves.items()}


def cu_seqlens(case: Case) -> object:
    """Bounds of the documents."""
    import torch

    return torch.arange(0, case.tokens + 1, case.tokens // case.documents)


def relative(found: object, exact: object) -> float:
    """Frobenius norm of the difference over that of ``exact``."""
    return ((found.double() - exact).norm() / exact.norm()).item()  # type: ignore[attr-defined]


def implementations(case: Case, leaves: dict[str, object], peers: bool) -> dict[str, Callable[[], object]]:
    """Name -> forward call that returns the output ``[1, T, H, V]``."""
    import torch

    from trine.ops.kda import bounded_gate, kda, kda_pairwise

    packed = cu_seqlens(case)
    runs: dict[str, Callable[[], object]] = {
        "trine": lambda: kda(**leaves, cu_seqlens=packed, backend="torch")[0],
        "trine pairs": lambda: kda_pairwise(**leaves, cu_seqlens=packed)[0],
    }
    if not peers:
        return runs
    rows = (case.documents, case.tokens // case.documents)
    per_token = ("q", "k", "v", "gate", "beta")

    def reference() -> torch.Tensor:
        """Equal documents as batch rows: the token loop is as long as one document."""
        batch = {n: x.view(*rows, *x.shape[2:]) if n in per_token else x for n, x in leaves.items()}
        return kda(**batch, backend="reference")[0].view(1, case.tokens, case.heads, -1)

    runs["trine reference"] = reference

    def prepared() -> tuple[torch.Tensor, ...]:
        """What the peers take: normalised q and k, log-decays, beta; equal documents as batch rows."""
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (leaves["q"], leaves["k"]))
        g = bounded_gate(leaves["gate"], leaves["A_log"], leaves["dt_bias"])
        return tuple(x.view(*rows, *x.shape[2:]) for x in (q, k, leaves["v"], g, leaves["beta"].sigmoid()))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fla.ops.kda.naive import naive_chunk_kda

        runs["fla naive_chunk_kda"] = lambda: naive_chunk_kda(*prepared())[0].view(1, case.tokens, case.heads, -1)
    except ImportError as error:
        print(f"fla-core left out: {error}", file=sys.stderr)
    try:
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

        # The public name hands over to fla's GPU kernel where fla is installed; below it lies the eager form.
        eager = inspect.unwrap(chunk_kimi_delta_attention)
        runs["transformers kimi_linear"] = lambda: eager(*prepared())[0].view(1, case.tokens, case.heads, -1)
    except ImportError as error:
        print(f"transformers left out: {error}", file=sys.stderr)
    return runs


def decode_records(repeats: int, threads: int) -> list[common.Record]:
    """One token of N sequences: the decode step beside one step of the definition."""
    import torch

    from trine.ops.kda import kda, kda_step

    records = []
    for n in (1, 16, 64):
        torch.manual_seed(0)
        h, k, v = 4, 32, 32
        tensors = [torch.randn(n, h, k), torch.randn(n, h, k), torch.randn(n, h, v), torch.randn(n, h, k)]
        tensors.append(torch.randn(n, h))
        state, gate = torch.randn(n, h, k, v), {"A_log": torch.zeros(h), "dt_bias": torch.zeros(h, k)}
        mine = state.clone()

        @torch.no_grad()
        def step(tensors: list[torch.Tensor] = tensors, gate: dict = gate, mine: torch.Tensor = mine) -> object:
            return kda_step(*tensors, mine, **gate, inplace=True)

        @torch.no_grad()
        def whole(tensors: list[torch.Tensor] = tensors, gate: dict = gate, state: torch.Tensor = state) -> object:
            rows = [x.unsqueeze(1) for x in tensors]
            return kda(*rows, **gate, initial_state=state, output_final_state=True, backend="reference")

        found, exact = kda_step(*tensors, state, **gate)[0], whole()[0].squeeze(1)
        timings = common.time_interleaved({"trine": step, "trine reference": whole}, 20 * repeats, warmup=20)
        for name, timing in timings.items():
            records.append(
                common.Record(
                    BENCHMARK,
                    f"decode N{n} H{h} K{k} V{v} fp32",
                    name,
                    ms=timing.best_ms,
                    median_ms=timing.median_ms,
                    error=relative(found, exact.double()) if name == "trine" else None,
                    threads=threads,
                )
            )
    return records


if __name__ == "__main__":
    main()
