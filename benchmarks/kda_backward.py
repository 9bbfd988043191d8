"""The backward of KDA on one CUDA card: error against float64, then device time of every kernel, and configurations.

    python benchmarks/kda_backward.py [--parts check,time,sweep] [--only REGEX] [--out FOLDER]

Checks use random inputs with every buffer poisoned by NaN. Times are medians of CUDA events around each launch, and of
CUDA-graph replays for the whole; floors are raw bytes (2308 backward, 3590 forward and backward a token and head) at
4.3 TB/s, measured on an H200. The sweep recompiles with other launch parameters and refuses any whose results move.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trine.ops.kda import triton_backward as backward
from trine.ops.kda.reference import kda_reference
from trine.ops.kda.triton_launch import Options

NAMES = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial_state")
LIMITS = dict(zip(NAMES, (5e-3, 5e-3, 5e-3, 6e-3, 6e-3, 6e-3, 6e-3, 5e-3), strict=True))
SHAPES = {"T8192 H96": (1, 8192, 96), "T8192 H32": (1, 8192, 32), "T65536 H8": (1, 65536, 8)}
KERNELS = {
    "scan": backward.SCAN,
    "segments": backward.SEGMENTS,
    "join": backward.JOIN,
    "pairs": backward.PAIRS,
    "gradient": backward.GRADIENT,
    "finish": backward.FINISH,
}


def draw(
    shape: tuple[int, int, int],
    regime: str,
    *,
    key: int = 128,
    value: int = 128,
    groups: int = 1,
    sequences: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    state: bool = True,
    seed: int = 0,
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Raw inputs of one call, gradient of the output, gradient of the final state (None without state)."""
    B, T, H = shape
    HV = H * groups
    make = torch.Generator("cuda").manual_seed(seed)

    def normal(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*sizes, generator=make, device="cuda").to(dtype)

    k = normal(B, T, H, key)
    if "parallel" in regime:
        k = (normal(B, 1, H, key).float() + 0.1 * k.float()).to(dtype)
    gate, bias = normal(B, T, HV, key), torch.zeros(HV, key, device="cuda")
    if "slow" in regime:
        step = torch.rand(HV, key, generator=make, device="cuda") * math.log(100) + math.log(1e-3)
        bias = step.exp() + (-(-step.exp()).expm1()).log()
        gate = (0.1 * gate.float()).to(dtype)
    elif "mixed" in regime:
        gate[..., 0] = -3.9
    elif "saturated" in regime:
        gate = gate + 9
    elif "wide" in regime:
        gate = gate * 8
    inputs = {
        "q": normal(B, T, H, key),
        "k": k,
        "v": normal(B, T, HV, value),
        "gate": gate,
        "beta": normal(B, T, HV),
        "A_log": 0.1 * normal(HV, dtype=torch.float32),
        "dt_bias": bias,
    }
    if state:
        inputs["initial_state"] = 0.3 * normal(sequences or B, HV, key, value, dtype=torch.float32)
    d_final = 0.3 * normal(sequences or B, HV, key, value, dtype=torch.float32) if state else None
    return inputs, normal(B, T, HV, value), d_final


def true_gradients(
    inputs: dict[str, Tensor], d_out: Tensor, d_final: Tensor | None, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of the token recurrence in float64 by autograd."""
    leaves = {name: x.double().requires_grad_() for name, x in inputs.items()}
    out, final = kda_reference(**leaves, output_final_state=True, **options)
    loss = (out * d_out.double()).sum()
    if d_final is not None and final is not None:
        loss = loss + (final * d_final.double()).sum()
    return out.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def run(
    inputs: dict[str, Tensor], out: Tensor, d_out: Tensor, d_final: Tensor | None, **options: Any
) -> dict[str, Tensor]:
    """Our gradients by name."""
    tensors = [inputs[name] for name in NAMES[:5]]
    rest = {name: inputs.get(name) for name in NAMES[5:]}
    found = backward.kda_backward(*tensors, out, d_out, d_final, **rest, **options)
    return {name: x for name, x in zip(NAMES, found, strict=True) if x is not None}


def error(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; NaN stays NaN."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison with float64; ``options`` go to the operator."""

    name: str
    shape: tuple[int, int, int]
    regime: str
    limit: float = 0.0  # for every gradient; 0: LIMITS
    key: int = 128
    value: int = 128
    groups: int = 1
    lengths: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    gain: float = 1.0
    segment: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    def form(self) -> backward._Form:
        """Which compiled kernels the case needs."""
        options = dict(self.options)
        index = torch.int32 if self.lengths else None
        norm, logit = options.get("qk_norm", True), options.get("beta_is_logit", True)
        types, fine = (self.dtype,) * 7, norm and self.dtype != torch.float32
        flags = (norm, logit, True, True, True, True, self.groups > 1)
        return backward._Form(types, index, self.key, self.value, *flags, self.segment, fine, True)


SMALL = (1, 300, 4)
CASES = [
    *(Case(regime, SMALL, regime) for regime in ("fast", "slow", "mixed", "saturated", "wide")),
    *(Case(regime, SMALL, regime, 1.2e-2) for regime in ("slow parallel", "fast parallel")),
    Case("fast, gradients x 1e-8", SMALL, "fast", gain=1e-8),
    Case("slow, gradients x 1e-8", SMALL, "slow", gain=1e-8),
    Case("slow, gradients x 1e6", SMALL, "slow", gain=1e6),
    Case("K60 V100, batch", (2, 97, 3), "fast", key=60, value=100),
    Case("K256 V256", (1, 130, 2), "fast", key=256, value=256),
    Case("K32 V64", (1, 130, 2), "slow", key=32, value=64),
    Case("groups of 3", (1, 130, 2), "fast", groups=3),
    Case("packed", (1, 261, 2), "fast", lengths=(0, 1, 31, 32, 33, 0, 100, 64, 0)),
    Case("slow, segments of 64", SMALL, "slow", segment=64),
    Case("slow parallel, segments of 64", SMALL, "slow parallel", 1.2e-2, segment=64),
    Case("packed, segments of 64", (1, 561, 2), "slow", lengths=(0, 1, 31, 132, 133, 0, 200, 64, 0), segment=64),
    Case("given beta with 0 and 1", SMALL, "fast", options=(("beta_is_logit", False),)),
    Case("raw keys", (1, 100, 2), "fast", key=32, value=32, options=(("beta_is_logit", False), ("qk_norm", False))),
    Case("fp32 fast", (1, 130, 2), "fast", 1e-4, dtype=torch.float32),
    Case("fp32 slow parallel", (1, 130, 2), "slow parallel", 1e-4, dtype=torch.float32),
    Case("fp32 saturated", (1, 130, 2), "saturated", 1e-3, dtype=torch.float32),
]


def check() -> None:
    """Every case, twice for bits, with buffers full of NaN; errors are printed in 1e-3."""
    for case in CASES:
        options: dict[str, Any] = dict(case.options)
        if case.lengths:
            bounds = torch.tensor(case.lengths).cumsum(0).tolist()
            options["cu_seqlens"] = torch.tensor([0, *bounds], dtype=torch.int32, device="cuda")
        inputs, d_out, d_final = draw(
            case.shape,
            case.regime,
            key=case.key,
            value=case.value,
            groups=case.groups,
            sequences=len(case.lengths),
            dtype=case.dtype,
        )
        if not options.get("beta_is_logit", True):
            inputs["beta"] = inputs["beta"].float().sigmoid().to(case.dtype)
            inputs["beta"][:, ::7] = 0
            inputs["beta"][:, 3::7] = 1
        if not options.get("qk_norm", True):
            inputs["k"] *= 0.17
        d_out = (d_out.float() * case.gain).to(case.dtype)
        assert d_final is not None
        d_final = d_final * case.gain
        out, expected = true_gradients(inputs, d_out, d_final, **options)
        out = out.to(case.dtype)
        torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN
        found = run(inputs, out, d_out, d_final, segment=case.segment, **options)
        again = run(inputs, out, d_out, d_final, segment=case.segment, **options)
        torch.use_deterministic_algorithms(False)
        errors = {key: error(found[key], value) for key, value in expected.items()}
        good = all(errors[key] <= (case.limit or LIMITS[key]) for key in errors)
        same = all(torch.equal(found[key], again[key]) for key in errors)
        line = " ".join(f"{key[:4]} {1e3 * value:.3g}" for key, value in errors.items())
        note = "" if same else " NOT REPEATABLE"
        print(f"{'ok  ' if good and same else 'FAIL'} {case.name:30s} {line}{note}", flush=True)
        ROWS.append({"case": case.name, "errors": errors, "repeatable": same, "ok": good and same})


@contextmanager
def clocked(times: dict[str, list[tuple[Any, Any]]]) -> Iterator[None]:
    """Record a pair of events around every launch of the backward's own kernels, and around the forward's first one."""
    plain = {name: kernel.launch for name, kernel in KERNELS.items()}
    prepare = backward.prepare

    def clock(name: str) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            plain[name](*args)
            pair[1].record()
            times.setdefault(name, []).append(pair)

        return launch

    def clocked_prepare(problem: Any) -> Any:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        factors = prepare(problem)
        pair[1].record()
        times.setdefault("prepare", []).append(pair)
        return factors

    for name, kernel in KERNELS.items():
        kernel.launch = clock(name)  # type: ignore[method-assign]
    backward.prepare = clocked_prepare
    try:
        yield
    finally:
        backward.prepare = prepare
        for name, kernel in KERNELS.items():
            kernel.launch = plain[name]  # type: ignore[method-assign]


def kernel_times(call: Callable[[], object], repeats: int = 9) -> dict[str, float]:
    """Median milliseconds of each kernel of ``call``."""
    call()
    times: dict[str, list[tuple[Any, Any]]] = {}
    with clocked(times):
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in times.items()}


def graph_time(call: Callable[[], object], repeats: int = 9) -> float:
    """Median milliseconds of a CUDA-graph replay of ``call``."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    samples = []
    for _ in range(repeats + 2):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        samples.append(a.elapsed_time(b))
    return statistics.median(samples[2:])


def measure() -> None:
    """Kernel times, whole times with and without the forward, and peak memory, slow and fast gates."""
    from trine.ops.kda.triton_forward import forward

    for name, shape in SHAPES.items():
        for regime in ("fast", "slow"):
            inputs, d_out, _ = draw(shape, regime, state=False)
            out = forward(**inputs)[0]
            torch.cuda.synchronize()

            def alone(inputs: Any = inputs, out: Tensor = out, d_out: Tensor = d_out) -> object:
                return run(inputs, out, d_out, None)

            def both(inputs: Any = inputs, d_out: Tensor = d_out) -> object:
                return run(inputs, forward(**inputs)[0], d_out, None)

            parts = kernel_times(alone)
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            both()
            peak = torch.cuda.max_memory_allocated() - base
            whole, total = graph_time(alone), graph_time(both)
            floor = shape[0] * shape[1] * shape[2] / 4.3e9
            row = {
                "case": name, "gates": regime, "parts": parts, "backward_ms": whole, "both_ms": total,
                "peak_gib": peak / 2**30, "floor_fraction": 3590 * floor / total,
            }  # fmt: skip
            ROWS.append(row)
            line = " ".join(f"{key} {value:.3f}" for key, value in parts.items())
            print(
                f"{name:10s} {regime:5s} {line} | bwd {whole:.3f} ({2308 * floor / whole:.0%}) fwd+bwd {total:.3f} "
                f"({3590 * floor / total:.0%}) peak {peak / 2**30:.2f} GiB",
                flush=True,
            )


def choices() -> dict[str, dict[str, Any]]:
    """Launch parameters to try, by name."""
    found: dict[str, dict[str, Any]] = {"shipped": {}}
    for block, warps, stages, registers in ((64, 4, 3, None), (128, 8, 3, None), (64, 4, 2, 168), (64, 4, 3, 168)):
        found[f"scan block {block} warps {warps} stages {stages} registers {registers}"] = {
            "scan_block": block,
            "scan": Options(num_warps=warps, num_stages=stages, maxnreg=registers),
        }
    for values, warps, stages in ((32, 1, 2), (32, 1, 3), (32, 2, 3), (32, 4, 2), (64, 2, 2)):
        found[f"pairs values {values} warps {warps} stages {stages}"] = {
            "pair_values": values,
            "pairs": Options(num_warps=warps, num_stages=stages),
        }
    for values, stages in ((64, 2), (32, 3), (32, 4)):
        found[f"gradient values {values} stages {stages}"] = {
            "gradient_values": values,
            "gradient": Options(num_warps=4, num_stages=stages),
        }
    return found


def compile_all(names: list[str], cases: list[Case]) -> None:
    """Fill the compiler's cache with every choice, on all cores, before this process touches the card."""
    base = backward.choose_backward(torch.bfloat16, 128, 128)
    timed = Case("", (1, 1, 1), "").form()
    timed = dataclasses.replace(timed, initial=False, final=False)
    jobs = []
    for name in names:
        made = backward.variants(dataclasses.replace(base, **choices()[name]), timed)
        jobs += [(i, made[i]) for i, kind in enumerate(KERNELS) if name == "shipped" or name.startswith(kind)]
    timed_forms = {dataclasses.replace(timed, segment=4096)} if names else set()
    for form in {case.form() for case in cases} | timed_forms:
        config = backward.choose_backward(form.dtypes[0], form.K, form.V)
        jobs += list(enumerate(backward.variants(config, form)))
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.starmap(compile_one, jobs, chunksize=1)


def compile_one(index: int, variant: Any) -> None:
    """Compile one kernel."""
    list(KERNELS.values())[index].compile(variant)


def sweep(names: list[str]) -> None:
    """Time each kernel under other launch parameters; a choice whose gradients move by more than 2e-3 is refused."""
    cases = {}
    for name in ("T8192 H96", "T8192 H32"):
        inputs, d_out, _ = draw(SHAPES[name], "fast", state=False)
        cases[name] = (inputs, inputs["v"], d_out)
    base = backward.choose_backward(torch.bfloat16, 128, 128)
    small, d_small, _ = draw(SMALL, "slow", state=False)
    expected = run(small, small["v"], d_small, None)
    for name in names:
        config = dataclasses.replace(base, **choices()[name])
        found = run(small, small["v"], d_small, None, config=config)
        moved = max(error(found[key], expected[key]) for key in found)
        row: dict[str, Any] = {"choice": name, "moved": moved}
        for case, (inputs, out, d_out) in cases.items():
            times = kernel_times(lambda i=inputs, o=out, d=d_out, c=config: run(i, o, d, None, config=c), repeats=5)
            row[case] = times if name == "shipped" else {name.split()[0]: times[name.split()[0]]}
        ROWS.append(row)
        line = " | ".join(f"{c} " + " ".join(f"{k} {v:.3f}" for k, v in row[c].items()) for c in cases)
        print(f"{'REFUSED ' if not moved < 2e-3 else ''}{name:50s} {line}", flush=True)


ROWS: list[dict[str, Any]] = []


def main() -> None:
    """Run the parts asked for and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="check,time,sweep")
    parser.add_argument("--only", default=".", help="regular expression on the sweep's choices")
    parser.add_argument("--out", type=Path, default=Path("."))
    arguments = parser.parse_args()
    names = [name for name in choices() if name == "shipped" or re.search(arguments.only, name)]
    start = time.perf_counter()
    compile_all(names if "sweep" in arguments.parts else ["shipped"], CASES if "check" in arguments.parts else [])
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for part in arguments.parts.split(","):
        if part == "check":
            check()
        elif part == "time":
            measure()
        elif part == "sweep":
            sweep(names)
        else:
            raise SystemExit(f"--parts: found {part!r}, need check, time or sweep")
        print(f"{part}: {time.perf_counter() - start:.0f} s so far", flush=True)
        (arguments.out / "kda_backward.json").write_text(json.dumps(ROWS, indent=1))


if __name__ == "__main__":
    main()
