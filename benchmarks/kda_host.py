"""Host time of KDA's calls on a card: microseconds until the call returns, while the device works behind it.

    python benchmarks/kda_host.py [--repeats 600] [--one-core] [--profile] [--out FOLDER]
    python benchmarks/kda_host.py --fake      on a CPU with triton: launches, one by one, do nothing; nothing is written

Medians of single asynchronous calls, replayed in C++ (``native.cpp``, built first) and, where it says so, in Python.
All calls take turns, round after round, so that a busy spell of a shared host falls on all of them alike.
``autograd alone`` is a Python function of as many tensors that allocates gradients and launches nothing;
``one product`` is torch's own multiplication by a number: mostly handing the backward pass to the device's thread.
``one thread`` runs the backward pass on the calling thread (``torch.autograd.set_multithreading_enabled(False)``).
``a layer of 8`` is an eighth of a chain of eight calls, each taking the output of the one before as its v: what a call
costs in a model, where autograd starts once for all of them. ``--one-core`` keeps the process on one core, so that
nothing waits for another core to wake up.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import os
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import RESULTS, Record, write_records
from torch import Tensor

SHAPES = ((1, 64, 8, 128), (1, 1024, 16, 128))  # batch, tokens, heads, K = V
IN_PYTHON = ", replayed in Python"
LAYERS = 8
ROUNDS = 12
BARS = {"kda forward": 60, "kda forward + backward": 200}


def fake() -> None:
    """Let CPU tensors take the kernels' path, with launchers that only look at their arguments."""
    from trine.ops import kda as package
    from trine.ops.kda import triton_native, triton_replay
    from trine.ops.kda.triton_launch import Kernel

    def launcher(*_: Any) -> None:
        return None

    def load(self: Kernel, variant: Any, index: int) -> tuple[Any, ...]:
        return (launcher, 0, (), False, False, (None,) * len(variant.constants))

    Kernel._load = load  # type: ignore[method-assign]
    Kernel.handle = lambda self, variant, index: (0, 32, 0)  # type: ignore[method-assign]
    nothing = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value  # 0, success, for the handle 0 of a launch
    functions = dict.fromkeys(triton_native.FUNCTIONS, nothing)
    triton_replay.driver = lambda: functions  # type: ignore[assignment]
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined]
    package._choice.why_no_card = lambda q: None


class Timed(NamedTuple):
    """What is timed; ``parts`` equal calls follow one another in it, and their time is that of one."""

    run: Callable[[], object]
    parts: int = 1


class Alone(torch.autograd.Function):
    """As many tensors in and out as the operator has, gradients allocated, nothing else."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        out = torch.empty_like(tensors[2])
        ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:7])


def calls_of(batch: int, tokens: int, heads: int, width: int, device: str) -> dict[str, Timed]:
    """The calls to time, by name."""
    from trine.ops.kda import kda
    from trine.ops.kda.triton_backward import kda_backward
    from trine.ops.kda.triton_forward import forward

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    streams = [normal(batch, tokens, heads, width) for _ in range(4)]
    data = dict(zip(("q", "k", "v", "gate"), streams, strict=True)) | {"beta": normal(batch, tokens, heads)}
    data |= {"A_log": torch.zeros(heads, device=device), "dt_bias": torch.zeros(heads, width, device=device)}
    leaves = {name: x.clone().requires_grad_() for name, x in data.items()}
    upstream, wanted = normal(batch, tokens, heads, width), list(leaves.values())
    out = normal(batch, tokens, heads, width)
    parameters = {name: data[name] for name in ("A_log", "dt_bias")}
    bounds = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32, device=device)

    def both(**options: Any) -> object:
        return torch.autograd.grad(kda(**leaves, **options)[0], wanted, upstream)

    layers = [{name: x.clone().requires_grad_() for name, x in data.items() if name != "v"} for _ in range(LAYERS)]
    chained = [leaves["v"], *(x for layer in layers for x in layer.values())]

    def chain() -> object:
        out = leaves["v"]
        for layer in layers:
            out = kda(v=out, **layer)[0]
        return torch.autograd.grad(out, chained, upstream)

    def one_thread() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return both()

    def product() -> object:
        return torch.autograd.grad(2 * leaves["beta"], leaves["beta"], data["beta"])

    return {
        "kernels forward": Timed(lambda: forward(**data)),
        "kda forward": Timed(lambda: kda(**data)),
        "kda forward packed": Timed(lambda: kda(**data, cu_seqlens=bounds)),
        "kda forward, to be differentiated": Timed(lambda: kda(**leaves)),
        "kernels backward": Timed(lambda: kda_backward(*streams, data["beta"], out, upstream, **parameters)),
        "kda forward + backward": Timed(both),
        "kda forward + backward, one thread": Timed(one_thread),
        f"kda forward + backward, a layer of {LAYERS}": Timed(chain, LAYERS),
        "kda forward + backward, save=factors": Timed(lambda: both(save="factors")),
        "one product, forward + backward": Timed(product),
        "autograd alone, in Python": Timed(lambda: torch.autograd.grad(Alone.apply(*wanted), wanted, upstream)),
    }


def host_us(timed: Timed, warm_up: int, repeats: int, wait: Callable[[], None]) -> list[float]:
    """Microseconds of every one of ``repeats`` runs; the device catches up every 16 runs, outside the time."""
    for _ in range(warm_up):
        timed.run()
    samples = []
    for i in range(repeats):
        if i % 16 == 0:
            wait()
        start = time.perf_counter()
        timed.run()
        samples.append(1e6 * (time.perf_counter() - start) / timed.parts)
    wait()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=600, help=f"timed calls of each kind, a multiple of {ROUNDS}")
    parser.add_argument("--one-core", action="store_true", help="keep the process on one core")
    parser.add_argument("--fake", action="store_true", help="no-op launches on the CPU")
    parser.add_argument("--profile", action="store_true", help="also where the time goes, by function")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.repeats < ROUNDS or options.repeats % ROUNDS:
        parser.error(f"--repeats: found {options.repeats}, need a multiple of {ROUNDS}")
    from trine.ops.kda._choice import triton_is_there

    if not triton_is_there():
        parser.error("needs triton: pip install -e '.[gpu]'")
    if options.fake:
        fake()
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA card, or --fake")
    from trine.ops.kda.triton_native import NATIVE

    module = NATIVE.load()
    wait = (lambda: None) if options.fake else torch.cuda.synchronize
    if options.one_core:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
    records = []
    for shape in SHAPES:
        case = "host B{} T{} H{} K{}".format(*shape) + (", one core" if options.one_core else "")
        calls = calls_of(*shape, device="cpu" if options.fake else "cuda")
        samples: dict[str, list[float]] = {name: [] for name in (*calls, *(name + IN_PYTHON for name in BARS))}
        for turn in range(ROUNDS):
            for name, times in samples.items():
                call = calls[name.removesuffix(IN_PYTHON)]
                NATIVE.module, NATIVE.wanted = (None, False) if name.endswith(IN_PYTHON) else (module, True)
                times += host_us(call, 10 if turn else 50, options.repeats // ROUNDS, wait)
        NATIVE.module, NATIVE.wanted = module, True
        for name, times in samples.items():
            best, median = min(times), statistics.median(times)
            bar = f"   bar {BARS[name]}" if name in BARS else ""
            print(f"{case:34s} {name:43s} median {median:7.1f} us   best {best:7.1f}{bar}", flush=True)
            note = "wall time of an asynchronous call" + (f"; bar {BARS[name]} us" if name in BARS else "")
            records.append(Record("kda_host", case, name, ms=best / 1e3, median_ms=median / 1e3, note=note))
            if options.profile and name in BARS:
                profile = cProfile.Profile()
                profile.enable()
                for _ in range(options.repeats):
                    calls[name].run()
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    if options.one_core:  # torch's threads and the interpreter's end race for one core, and abort the process
        os.sched_setaffinity(0, cores)
    if not options.fake:
        card = torch.cuda.get_device_name(0)
        print(write_records("kda_host", records, packages=("torch", "triton"), device=card, folder=options.out))


if __name__ == "__main__":
    main()
