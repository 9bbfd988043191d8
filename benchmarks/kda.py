"""KDA on one CUDA card: error against float64, then device time, peak memory, host time and decode, beside its peers.

    python benchmarks/kda.py [--parts check,forward,...] [--seconds 240] [--out FOLDER]

Times are medians of CUDA-graph replays (launch gaps excluded) unless a row says ``wall``. Inputs are random; outputs
are poisoned with NaN before the checks. Floors: the bytes that must move (raw inputs and output once) at 4.3 TB/s,
decode state traffic at 4.24 TB/s, both measured on an H200. Each part stops when its share of the time is used up.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, Record, write_records
from kda_host import BARS as HOST_BARS
from kda_host import calls_of, host_us
from torch import Tensor

BANDWIDTH = 4.3e12
DECODE_BANDWIDTH = 4.24e12
BARS = {
    "fwd B1 T8192 H96": 1.00,
    "fwd B1 T8192 H64": 0.70,
    "fwd B1 T8192 H32": 0.38,
    "fwd B1 T8192 H16": 0.20,
    "fwd B1 T65536 H8": 0.74,
    "fwd B8 T2048 H16": 0.35,
    "fwd+bwd B1 T8192 H96": 4.5,
    "fwd+bwd B1 T8192 H32": 1.6,
    "fwd+bwd B1 T65536 H8": 4.0,
    "decode N256 H32": 0.31,
    "decode N1 H96": 0.015,
}
PARTS = ("check", "forward", "backward", "decode", "packed", "slowest", "host", "fla")


class Clock:
    """Seconds left of a run, so that a run on a lent card ends by itself."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    def left(self) -> float:
        return self.end - time.perf_counter()


def say(text: str) -> None:
    """One line, at once."""
    print(text, flush=True)


def draw(batch: int, tokens: int, heads: int, regime: str, key: int = 128, value: int = 128, seed: int = 0) -> dict:
    """Raw bf16 inputs of one call in a gate regime: ``fast``, ``slow``, ``mixed``, ``saturated`` or ``parallel``.

    fast: gate input N(0,1), mean g -2.5. slow: FLA's layer initialisation, mean g -0.10, channel 0 near -0.01. mixed:
    fast, but channel 0 of each head at g = -0.1. saturated: g = -5. parallel: slow, keys one direction + 0.1 noise.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k = normal(batch, tokens, heads, key), normal(batch, tokens, heads, key)
    v, beta = normal(batch, tokens, heads, value), normal(batch, tokens, heads)
    gate, bias = normal(batch, tokens, heads, key), torch.zeros(heads, key, device="cuda")
    if regime in ("slow", "parallel"):
        step = torch.exp(
            torch.rand(heads, key, generator=generator, device="cuda") * (math.log(0.1) - math.log(1e-3))
            + math.log(1e-3)
        )
        bias = step + torch.log(-torch.expm1(-step))
        bias[:, 0] = -6.0
        gate *= 0.1
    if regime == "parallel":
        k = normal(1, 1, heads, key) + 0.1 * k
    if regime == "mixed":
        gate[..., 0] = math.log(0.02 / 0.98)
    if regime == "saturated":
        gate.fill_(60.0)
    inputs = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta}
    out: dict[str, Tensor] = {name: x.bfloat16() for name, x in inputs.items()}
    return out | {"A_log": torch.zeros(heads, device="cuda"), "dt_bias": bias}


def graph_ms(call: Callable[[], object], calls: int = 4, budget: float = 1.0) -> float:
    """Median milliseconds a call inside a captured graph of ``calls`` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    samples: list[float] = []
    stop = time.perf_counter() + budget
    while len(samples) < 40 and (time.perf_counter() < stop or len(samples) < 5):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        samples.append(a.elapsed_time(b) / calls)
    return statistics.median(samples)


def event_ms(call: Callable[[], object], budget: float = 1.0) -> float:
    """Median milliseconds of one call by events around it (launch gaps included)."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    samples: list[float] = []
    stop = time.perf_counter() + budget
    while len(samples) < 50 and (time.perf_counter() < stop or len(samples) < 5):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        call()
        b.record()
        b.synchronize()
        samples.append(a.elapsed_time(b))
    return statistics.median(samples)


def peak_bytes(call: Callable[[], object]) -> int:
    """Device memory a call needs above what is already held, outputs included."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def truth(inputs: dict, **keywords: Any) -> tuple[Tensor, Tensor]:
    """The token recurrence in float64."""
    from trine.ops.kda.reference import kda_reference

    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in (inputs | keywords).items()
    }
    with torch.no_grad():
        out, final = kda_reference(**wide, output_final_state=True)
    assert final is not None
    return out, final


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    gap = float((found.double() - wanted).norm() / wanted.norm())
    return gap if gap == gap else math.inf


def poisoned(call: Callable[[], Any]) -> Any:
    """Run ``call`` with every new buffer filled with NaN first."""
    plain = torch.empty

    def empty(*args: Any, **kw: Any) -> Tensor:
        tensor = plain(*args, **kw)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-7)

    torch.empty = empty  # type: ignore[assignment]
    try:
        return call()
    finally:
        torch.empty = plain


def forward_bytes(batch: int, tokens: int, heads: int, key: int = 128, value: int = 128) -> int:
    """Bytes a fused forward must move: q, k, gate, v, o in bf16 and one beta a token and head."""
    return batch * tokens * heads * (6 * key + 4 * value + 2)


class Bench:
    """One run: what to measure, and the records so far."""

    def __init__(self, clock: Clock, shapes: list[str]) -> None:
        from trine.ops.kda.triton_forward import forward

        self.clock = clock
        self.forward = forward
        self.records: list[Record] = []
        self.shapes = shapes

    def keep(self, case: str, impl: str, floor: float | None = None, **fields: Any) -> None:
        ms = fields.get("ms")
        record = Record(
            benchmark="kda", case=case, impl=impl, floor_fraction=floor / ms if floor and ms else None, **fields
        )
        self.records.append(record)
        bar = next((b for name, b in BARS.items() if case.startswith(name + " ") or case == name), None)
        parts = [f"{case:44s} {record.gates or '-':9s} {impl:14s}"]
        parts += [f"{ms:8.4f} ms"] if ms is not None else []
        parts += [f"bar {bar:g}"] if bar and ms is not None else []
        parts += [f"floor {record.floor_fraction:5.1%}"] if record.floor_fraction else []
        parts += [f"err {record.error:.2e}"] if record.error is not None else []
        parts += [f"peak {record.peak_bytes / 2**30:.2f} GiB"] if record.peak_bytes is not None else []
        parts += [record.note] if record.note else []
        say("  ".join(parts))

    def check(self) -> None:
        """Errors in the five regimes, then awkward shapes; raises on a wrong result."""
        limits = {"parallel": (1.1e-2, 1.2e-2)}
        for regime in ("fast", "slow", "mixed", "saturated", "parallel"):
            inputs = draw(1, 1024, 4, regime)
            start = torch.randn(1, 4, 128, 128, device="cuda")
            wanted, wanted_state = truth(inputs, initial_state=start)
            for plan in ("serial", "segmented:256", "serial,bf16"):
                out, state, _ = poisoned(
                    lambda i=inputs, s=start, p=plan: self.forward(
                        **i, initial_state=s, output_final_state=True, plan=p
                    )
                )
                gap, state_gap = error(out, wanted), error(state, wanted_state)
                self.keep(
                    "fwd error B1 T1024 H4 K128 V128 bf16",
                    f"trine {plan}",
                    gates=regime,
                    error=gap,
                    note=f"state {state_gap:.2e}",
                )
                limit = limits.get(regime, (4.8e-3, 3.5e-3))
                if not (gap <= limit[0] and state_gap <= limit[1]):
                    say(f"OUT OF BOUNDS: {regime} {plan} o {gap:.2e} state {state_gap:.2e}")
        self.check_shapes()

    def check_shapes(self) -> None:
        """Ragged, packed, grouped, odd head sizes, dtypes and strides against float64."""
        cases: list[tuple[str, dict, dict]] = []
        for key, value, heads, groups, dtype in (
            (60, 100, 2, 2, torch.bfloat16),
            (100, 60, 3, 1, torch.float16),
            (64, 64, 4, 1, torch.bfloat16),
            (256, 256, 2, 1, torch.bfloat16),
            (32, 128, 2, 1, torch.float16),
            (128, 128, 2, 1, torch.float32),
            (60, 100, 2, 2, torch.float32),
            (256, 64, 1, 1, torch.float32),
        ):
            x = draw(2, 300, heads * groups, "slow", key, value, seed=key)
            x = {n: (t.to(dtype) if n not in ("A_log", "dt_bias") else t) for n, t in x.items()}
            x["q"], x["k"] = x["q"][:, :, :heads], x["k"][:, :, :heads]
            name = f"K{key} V{value} H{heads} HV{heads * groups} {str(dtype)[6:]}"
            x["initial_state"] = torch.randn(2, heads * groups, key, value, device="cuda")
            cases.append((f"B2 T300 {name}", x, {}))
        lengths = [0, 1, 31, 32, 33, 0, 64, 127, 500, 0]
        cut = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda")
        for dtype, plan in ((torch.bfloat16, "serial"), (torch.float32, "segmented:64")):
            x = draw(1, sum(lengths), 4, "slow")
            x = {n: (t.to(dtype) if n not in ("A_log", "dt_bias") else t) for n, t in x.items()}
            x["initial_state"] = torch.randn(len(lengths), 4, 128, 128, device="cuda")
            cases.append((f"packed {plan} {str(dtype)[6:]}", x, {"cu_seqlens": cut, "plan": plan}))
        for name, x, keywords in cases:
            if self.clock.left() < 5:
                say("check: out of time")
                return
            out, state, _ = poisoned(lambda x=x, kw=keywords: self.forward(**x, output_final_state=True, **kw))
            wanted, wanted_state = truth(x, **{k: v for k, v in keywords.items() if k != "plan"})
            gap, state_gap = error(out, wanted), error(state, wanted_state)
            exact = x["q"].dtype == torch.float32
            self.keep(f"fwd error {name}", "trine", error=gap, gates="slow", note=f"state {state_gap:.2e}")
            limit = 2e-5 if exact else 5e-3
            if not (gap <= limit and state_gap <= limit):
                say(f"OUT OF BOUNDS: {name}")

    def time_forward(self) -> None:
        for shape in self.shapes:
            batch, tokens, heads = (int(part[1:]) for part in shape.split())
            floor = 1e3 * forward_bytes(batch, tokens, heads) / BANDWIDTH
            for regime in ("slow", "fast"):
                if self.clock.left() < 5:
                    say("forward: out of time")
                    return
                inputs = draw(batch, tokens, heads, regime)
                for plan in ("auto", "serial") if batch > 1 else ("auto",):
                    call = lambda i=inputs, p=plan: self.forward(**i, plan=p)  # noqa: E731
                    self.keep(
                        f"fwd {shape} K128 V128 bf16",
                        "trine" if plan == "auto" else f"trine plan={plan}",
                        floor,
                        ms=graph_ms(call),
                        gates=regime,
                        peak_bytes=peak_bytes(call) if regime == "slow" else None,
                    )
                del inputs, call
                torch.cuda.empty_cache()

    def time_backward(self) -> None:
        """Forward and backward through the public function, keeping inputs only or the factors of the tiles too."""
        from trine.ops.kda import kda

        for shape in [s for s in self.shapes if s in ("B1 T8192 H96", "B1 T8192 H32", "B1 T65536 H8")]:
            batch, tokens, heads = (int(part[1:]) for part in shape.split())
            floor = 1e3 * batch * tokens * heads * 3590 / BANDWIDTH
            for save in ("inputs", "factors"):
                for regime in ("slow", "fast"):
                    if self.clock.left() < 10:
                        say("backward: out of time")
                        return
                    inputs = {n: x.requires_grad_() for n, x in draw(batch, tokens, heads, regime).items()}
                    upstream = torch.randn(batch, tokens, heads, 128, device="cuda", dtype=torch.bfloat16)

                    def call(inputs: dict = inputs, upstream: Tensor = upstream, save: str = save) -> object:
                        out, _ = kda(**inputs, backend="triton", save=save)
                        return torch.autograd.grad(out, list(inputs.values()), upstream)

                    self.keep(
                        f"fwd+bwd {shape} K128 V128 bf16", f"trine save={save}", floor, ms=graph_ms(call, calls=2),
                        gates=regime, peak_bytes=peak_bytes(call),
                    )  # fmt: skip

    def time_slowest(self) -> None:
        """Time against the slowest channel's log-decay: a kernel with a special case for slow channels has a cliff."""
        for decay in (-4.9, -2.5, -1.0, -0.3, -0.15, -0.05, -0.01, -1e-4):
            inputs = draw(1, 8192, 32, "fast")
            inputs["gate"][..., 0] = math.log(decay / (-5.0 - decay))
            call = lambda i=inputs: self.forward(**i)  # noqa: E731
            self.keep(f"fwd B1 T8192 H32, slowest channel g = {decay:g}", "trine", ms=graph_ms(call))

    def time_decode(self) -> None:
        from trine.ops.kda.reference import kda_reference
        from trine.ops.kda.triton_decode import kda_step_triton

        for count, heads, dtype in (
            (256, 32, torch.float32),
            (1, 96, torch.float32),
            (64, 32, torch.float32),
            (256, 32, torch.bfloat16),
        ):
            if self.clock.left() < 5:
                say("decode: out of time")
                return
            x = draw(count, 1, heads, "slow")
            state = torch.randn(count, heads, 128, 128, device="cuda").to(dtype)
            step = {n: (x[n][:, 0] if n in ("q", "k", "v", "gate", "beta") else x[n]) for n in x}
            few = min(count, 8)
            small = {n: (t[:few].double() if t.shape[0] == count and t.ndim > 1 else t.double()) for n, t in x.items()}
            small["dt_bias"] = x["dt_bias"].double()
            wanted, wanted_state = kda_reference(**small, initial_state=state[:few].double(), output_final_state=True)
            out, after = kda_step_triton(
                *(step[n] for n in ("q", "k", "v", "gate", "beta")),
                state,
                A_log=x["A_log"],
                dt_bias=x["dt_bias"],
            )
            assert wanted_state is not None
            gap, state_gap = error(out[:few], wanted[:, 0]), error(after[:few], wanted_state)
            moved = 2 * state.numel() * state.element_size() + sum(t.numel() * 2 for t in step.values() if t.ndim > 2)
            tensors = [step[n] for n in ("q", "k", "v", "gate", "beta")]

            def call(tensors: list[Tensor] = tensors, state: Tensor = state, x: dict = x) -> object:
                return kda_step_triton(*tensors, state, A_log=x["A_log"], dt_bias=x["dt_bias"], inplace=True)

            self.keep(
                f"decode N{count} H{heads}" + ("" if dtype == torch.float32 else " bf16 state"),
                "trine",
                1e3 * moved / DECODE_BANDWIDTH,
                ms=graph_ms(call, calls=10),
                error=gap,
                note=f"state {state_gap:.2e}",
            )

    def time_packed(self) -> None:
        """Ten documents in one row, even and skewed, against one document of the same length."""
        tokens, heads = 8192, 32
        layouts = {
            "one": [8192],
            "even": [820] * 9 + [812],
            "skewed": [4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 16],
            "many": [32] * 256,
        }
        inputs = draw(1, tokens, heads, "slow")
        for name, lengths in layouts.items():
            if self.clock.left() < 3:
                say("packed: out of time")
                return
            bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda", dtype=torch.int32)
            ms = graph_ms(lambda b=bounds: self.forward(**inputs, cu_seqlens=b))
            floor = 1e3 * forward_bytes(1, tokens, heads) / BANDWIDTH
            self.keep(f"fwd packed {name} T{tokens} H{heads} K128 V128 bf16", "trine", floor, ms=ms, gates="slow")

    def time_host(self) -> None:
        """Rows of ``benchmarks/kda_host.py``, which says how."""
        from trine.ops.kda.triton_native import NATIVE

        NATIVE.load()
        for name, call in calls_of(1, 64, 8, 128, "cuda").items():
            if name.startswith("kda "):
                median = statistics.median(host_us(call, 50, 200, torch.cuda.synchronize))
                note = f"wall; bar {1e-3 * HOST_BARS[name]:.3f}" if name in HOST_BARS else "wall"
                self.keep(f"host B1 T64 H8, {name}", "trine", ms=1e-3 * median, note=note)

    def time_fla(self) -> None:
        """fla-core in the same run, its errors first; its autotuner compiles for about a minute a head count."""
        if importlib.util.find_spec("fla") is None:
            say("fla-core is not importable here: no row for it")
            return
        from fla.ops.kda import chunk_kda

        def forward(x: dict) -> tuple[Tensor, Tensor]:
            return chunk_kda(
                x["q"], x["k"], x["v"], x["gate"], x["beta"], A_log=x["A_log"], dt_bias=x["dt_bias"].flatten(),
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                safe_gate=True, lower_bound=-5.0, output_final_state=True,
            )  # fmt: skip

        for shape in ("B1 T8192 H96", "B1 T8192 H32"):
            batch, tokens, heads = (int(part[1:]) for part in shape.split())
            if self.clock.left() < 60:
                say("fla: out of time")
                return
            x = draw(batch, tokens, heads, "slow")
            floor = 1e3 * forward_bytes(batch, tokens, heads) / BANDWIDTH
            with torch.no_grad():
                ms = event_ms(lambda x=x: forward(x))
            self.keep(f"fwd {shape} K128 V128 bf16", "fla-core", floor, ms=ms, gates="slow", note="wall")
            leaves = {n: t.requires_grad_() for n, t in x.items()}
            upstream = torch.randn_like(x["v"])

            def both(leaves: dict = leaves, upstream: Tensor = upstream) -> object:
                return torch.autograd.grad(forward(leaves)[0], list(leaves.values()), upstream)

            ms = event_ms(both)
            floor = 1e3 * batch * tokens * heads * 3590 / BANDWIDTH
            self.keep(
                f"fwd+bwd {shape} K128 V128 bf16", "fla-core", floor, ms=ms, gates="slow", note="wall",
                peak_bytes=peak_bytes(both),
            )  # fmt: skip
        for regime in ("fast", "slow", "parallel"):
            x = draw(1, 1024, 4, regime)
            wanted, state = truth(x)
            with torch.no_grad():
                out, final = forward(x)
            note = f"state {error(final, state):.2e}"
            self.keep(
                "fwd error B1 T1024 H4 K128 V128 bf16", "fla-core", gates=regime, error=error(out, wanted), note=note
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS[:-1]))
    parser.add_argument("--shapes", default=",".join(c[4:] for c in BARS if c.startswith("fwd ")))
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--out", default=os.environ.get("OUT", str(RESULTS)))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/kda.py needs a CUDA card, found none")
        return
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        raise SystemExit(f"--parts: found {sorted(unknown)}, need some of {list(PARTS)}")
    bench = Bench(Clock(options.seconds), options.shapes.split(","))
    work = {
        "check": bench.check,
        "forward": bench.time_forward,
        "backward": bench.time_backward,
        "decode": bench.time_decode,
        "packed": bench.time_packed,
        "slowest": bench.time_slowest,
        "host": bench.time_host,
        "fla": bench.time_fla,
    }
    name = torch.cuda.get_device_name()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    say(f"{name}, torch {torch.__version__}, {count} multiprocessors")
    for part in options.parts.split(","):
        start = time.perf_counter()
        work[part]()
        say(f"-- {part}: {time.perf_counter() - start:.1f} s")
        path = write_records(
            "kda", bench.records, packages=("triton", "fla-core"), device=name, folder=Path(options.out)
        )
    say(f"records: {path}")


if __name__ == "__main__":
    main()
