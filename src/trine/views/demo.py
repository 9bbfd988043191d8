"""A synthesised run to look at the dashboard without training: 92 layers of 896 experts, written by the real recorder.

Nothing in it was measured. Loads are Poisson counts around popularities that a bias evens out, with a few incidents:
a layer whose experts die and come back, a change of the data, a bias that overshoots, a router that saturates; losses
have a spike, a step that is not finite, and steps taken back.
`python -m trine.views.demo FOLDER` writes it, with torch, which is why the dashboard lets a process of its own do it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trine.balance.record_format import MARGIN_LEVELS, Array
from trine.data._files import write_atomically

DONE = "demo.json"
"""Name of the file that says a demo is whole."""
DEMO_VERSION = 2
"""Another one whenever a demo made anew would show something else: those of another version are."""
_PROBITS = (-2.3263, -1.6449, 0.0, 1.6449, 2.3263)  # normal quantiles at MARGIN_LEVELS


@dataclass(frozen=True)
class DemoSize:
    """How large a demo is."""

    layers: int = 92  # that have experts
    experts: int = 896
    top_k: int = 16
    steps: int = 2000
    keep: int = 1000  # steps that are kept one by one
    tokens: int = 65_536  # a step
    ranks: int = 8
    settle: float = 12.0  # steps in which the bias takes away most of an imbalance
    rest: float = 0.0  # imbalance that stays (standard deviation of log load)
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.layers, self.experts, self.steps, self.tokens) < 1 or not 1 <= self.top_k <= self.experts:
            raise ValueError(f"demo: found {self}, need numbers of 1 or more, and top_k not above experts")


class Incidents(NamedTuple):
    """Steps at which something happens to the losses; 0 in a run too short for it."""

    spike: int
    non_finite: int
    back: int  # from which steps are taken back
    to: int  # the step gone back to

    @classmethod
    def of(cls, steps: int) -> Incidents:
        """Those of a run of so many steps."""
        if steps < 40:
            return cls(0, 0, 0, 0)
        back = round(0.86 * steps)
        return cls(round(0.27 * steps), round(0.52 * steps), back, back - max(1, steps // 40))


class Loads:
    """Loads, biases and counters of successive steps."""

    def __init__(self, size: DemoSize) -> None:
        self.size = size
        self._random = np.random.Generator(np.random.SFC64(size.seed))
        shape = (size.layers, size.experts)
        depth_L = np.linspace(0.7, 1.3, size.layers)[:, None].astype(np.float32)
        self._wish_LE = self._normal(shape) * 0.9 * depth_L  # log popularity without a bias
        self._bias_LE = np.zeros(shape, dtype=np.float32)  # in units of log load, what the bias takes away
        self._rest_LE = self._normal(shape) * size.rest * depth_L
        self._scale_L = 0.045 * np.linspace(1.2, 0.8, size.layers).astype(np.float32)

    def _normal(self, shape: tuple[int, ...]) -> Array:
        return self._random.standard_normal(shape, dtype=np.float32)

    def step(self, number: int) -> dict[str, Array]:
        """Arrays of a `HostWindow`, of step ``number`` from 1; call it for every step in order."""
        size = self.size
        part = number / size.steps
        sick, shaken, wild, blunt = (min(size.layers - 1, int(at * size.layers)) for at in (0.4, 0.6, 0.85, 0.2))
        gain_L1 = np.full((size.layers, 1), 1.0 / size.settle, dtype=np.float32)
        if 0.72 <= part < 0.80:
            gain_L1[wild] = 2.02  # overshoots, and turns back at every step
        if number == round(0.6 * size.steps) + 1:
            self._wish_LE += self._normal(self._wish_LE.shape) * 0.5  # other data
        self._wish_LE += self._normal(self._wish_LE.shape) * 0.004
        log_LE = self._wish_LE - self._bias_LE + self._rest_LE
        if 0.35 <= part < 0.43:
            dead = slice(int(0.45 * size.experts), int(0.45 * size.experts) + max(1, size.experts // 20))
            log_LE[sick, dead] = -30.0
            log_LE[sick + 1 : shaken : 7, : max(1, size.experts // 100)] += 1.0
        np.exp(log_LE, out=log_LE)
        mean_LE = log_LE * (size.tokens * size.top_k / log_LE.sum(-1, keepdims=True))
        loads_LE = np.rint(mean_LE + np.sqrt(mean_LE) * self._normal(mean_LE.shape))
        np.maximum(loads_LE, 0.0, out=loads_LE)
        bias_LE = (-self._bias_LE * self._scale_L[:, None]).astype(np.float32)
        seen_LE = np.clip(np.log((loads_LE + 0.5) / (size.tokens * size.top_k / size.experts)), -3.0, 3.0)
        self._bias_LE += gain_L1 * (seen_LE - self._rest_LE).astype(np.float32)
        self._bias_LE -= self._bias_LE.mean(-1, keepdims=True)
        return {"loads_LE": loads_LE.astype(np.int64), "bias_LE": bias_LE, **self._counters(part, blunt, bias_LE)}

    def _counters(self, part: float, blunt: int, bias_LE: Array) -> dict[str, Array]:
        size = self.size
        layers = size.layers
        share_L = np.full(layers, 2e-5)
        if 0.5 <= part < 0.62:
            share_L[blunt : blunt + 4] = 0.03 * math.sin(math.pi * (part - 0.5) / 0.12)
        cells = size.tokens * size.experts
        spread_L = (0.16 + 0.05 * np.sin(np.linspace(0, 5, layers)))[:, None]
        cutoff = -math.sqrt(2) * 1.4845 if size.top_k * 50 < size.experts else _PROBITS[1]  # normal quantile at k / E
        margins_LQ = bias_LE.mean(-1, keepdims=True) + spread_L * (np.array(_PROBITS) - cutoff)
        return {
            "tokens_L": np.full(layers, size.tokens, dtype=np.int64),
            "dropped_L": np.zeros(layers, dtype=np.int64),
            "saturated_L": (share_L * cells).astype(np.int64),
            "overflow_L": np.zeros(layers, dtype=np.int64),
            "margins_LQ": margins_LQ.reshape(layers, len(MARGIN_LEVELS)),
        }


def training_record(number: int, size: DemoSize, loads_LE: Array, random: np.random.Generator) -> dict[str, Any]:
    """A line of ``metrics.jsonl`` as a run would write it."""
    part = number / size.steps
    loss = 3.1 * (1 + number / 40) ** -0.22 + 0.25 + 0.02 * random.standard_normal()
    loss += 0.35 * math.exp(-(part - 0.6) * size.steps / 25) if part > 0.6 else 0.0
    incidents = Incidents.of(size.steps)
    shock = math.exp((incidents.spike - number) / 5) if 0 < incidents.spike <= number else 0.0
    loss += 1.4 * shock
    finite = number != incidents.non_finite
    mean_L = loads_LE.mean(-1)
    stage = min(2, int(3 * part))
    seconds = 1.9 * (1 + 0.35 * stage) * (1 + 0.02 * random.standard_normal())
    norm = float(0.6 + 2.0 * math.exp(-number / 60) + 0.08 * random.gamma(2.0) + 9.0 * shock)
    warm, late = min(1.0, number / (0.05 * size.steps)), min(1.0, (1 - part) / 0.2)
    return {
        "step": number,
        "stage": stage,
        "tokens": number * size.tokens,
        "loss": loss if finite else None,
        "bits_per_byte": loss / math.log(2) / 3.9 if finite else None,
        "lr": 0.02 * warm * max(0.05, late),
        "grad_norm": norm if finite else None,
        "tokens_per_s": size.tokens / seconds,
        "max_vio": [float(f"{one:.4g}") for one in loads_LE.max(-1) / mean_L - 1.0],
        "dead_experts": int((loads_LE == 0).sum()),
        "seconds": seconds,
        "load_percentiles": None,
        "updated": finite,
        "mtp_loss": None,
        "clipped_heads": 0,
    }


def happenings(number: int, steps: int, loss: float | None, usual: float) -> list[tuple[str, dict[str, Any]]]:
    """Events of a step, kind and fields, as a run would write them; ``usual`` is the loss before.

    What steps that are taken back had said is gone from a run's files, so their events come before they are done again.
    """
    at = Incidents.of(steps)
    if number == at.spike:
        return [("spike", {"step": number, "loss": loss, "usual": usual})]
    if number == at.non_finite:
        return [("non_finite", {"step": number, "tensor": "gradient of layers.3.feed_forward.router.weight"})]
    if at.back and number == at.to + 1:
        checkpoint = f"step-{at.to:06d}"
        return [
            ("spike", {"step": at.back, "loss": 2.6 * usual, "usual": usual}),
            ("rollback", {"step": at.back, "to_step": at.to, "checkpoint": checkpoint, "left_out": []}),
        ]
    return []


def write_demo(folder: Path, size: DemoSize, name: str, policy: str, pause: float = 0.0) -> float:
    """Write a demo run; what was in the folder's files is replaced.

    Args:
        folder: made when absent.
        size: how large.
        name: of the run, as its page shows it.
        policy: in words, for ``run.json``.
        pause: seconds to wait after each step, to look like training.

    Returns:
        Seconds it took.

    Raises:
        ValueError: something else than a demo lies there.
    """
    import torch

    from trine.balance.alerts import Alerts
    from trine.balance.record_format import FILE_NAME, Frame
    from trine.balance.recorder import Recorder
    from trine.balance.window import Window

    torch.set_num_threads(1)
    begun = time.perf_counter()
    _clear(folder)
    folder.mkdir(parents=True)
    write_atomically(folder / "run.json", json.dumps(_run_json(size, name, policy), indent=2).encode())
    random = np.random.default_rng(size.seed)
    alerts = Alerts(size.layers, size.experts, size.top_k, size.ranks)
    loads = Loads(size)
    with contextlib.ExitStack() as stack:
        metrics = stack.enter_context(open(folder / "metrics.jsonl", "w", encoding="utf-8"))
        events = stack.enter_context(open(folder / "events.jsonl", "w", encoding="utf-8"))

        def event(kind: str, **details: Any) -> None:
            events.write(json.dumps({"time": "2026-01-01T00:00:00Z", "kind": kind, **details}) + "\n")
            events.flush()

        def look(frame: Frame) -> None:
            for alert in alerts.step(frame):
                event("balance_alert", **alert.to_json())

        sizes = {"layers": size.layers, "experts": size.experts, "top_k": size.top_k, "ranks": size.ranks}
        recorder = Recorder(folder / FILE_NAME, **sizes, keep=size.keep, listeners=[look])
        stack.callback(recorder.close, 60.0)
        stage, usual = -1, 0.0
        for number in range(1, size.steps + 1):
            window = loads.step(number)
            record = training_record(number, size, window["loads_LE"], random)
            if record["stage"] != stage:
                stage = record["stage"]
                event("stage", step=number, stage=stage, length=8192 * 4**stage, step_tokens=size.tokens)
            for kind, details in happenings(number, size.steps, record["loss"], usual):
                event(kind, **details)
            usual = record["loss"] or usual
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
            recorder.record(number, Window(**{key: torch.from_numpy(one) for key, one in window.items()}))
            if number % 16 == 0:
                recorder.flush(60.0)
            if pause:
                time.sleep(pause)
        recorder.flush(60.0)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("trine.views.demo_probes").write(folder, size.steps, size.seed)
    seconds = time.perf_counter() - begun
    done = {"format_version": 1, "demo_version": DEMO_VERSION, "steps": size.steps, "seconds": round(seconds, 1)}
    write_atomically(folder / DONE, json.dumps(done).encode())
    return seconds


def _clear(folder: Path) -> None:
    """Remove a demo that lies there, and nothing else."""
    if not folder.exists():
        return
    try:
        found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if any(folder.iterdir()) and not (isinstance(found, dict) and found.get("demo")):
        raise ValueError(f"{folder}: found something else than a demo, need an empty or absent folder")
    shutil.rmtree(folder)


def _run_json(size: DemoSize, name: str, policy: str) -> dict[str, Any]:
    # the first layer has no experts, as in K3
    sizes = {"layers": size.layers + 1, "dense_layers": 1, "experts": size.experts, "experts_per_token": size.top_k}
    model = {"preset": "demo", **sizes}
    return {
        "format_version": 1,
        "name": name,
        "demo": "synthesised, nothing in it was measured",
        "config": {"steps": size.steps, "policy": policy, "optimizer": {"clip": 1.0}},
        "plan": [
            {"first_step": -(-stage * size.steps // 3) or 1, "stage": {"length": 8192 * 4**stage}} for stage in range(3)
        ],
        "model": model,
    }


def demo_sizes(small: bool = False) -> dict[str, tuple[DemoSize, str]]:
    """The two runs of a demo by their folders' names: one that balances, and one that lags behind."""
    size = DemoSize(layers=6, experts=64, top_k=4, steps=60, tokens=8192) if small else DemoSize()
    other = replace(size, settle=90.0, rest=0.12, seed=1, steps=max(1, size.steps // 4), keep=max(20, size.keep // 8))
    return {"demo-quantile": (size, "Quantile Balancing"), "demo-sign": (other, "signs of the violations")}


def is_done(folder: Path, steps: int) -> bool:
    """Whether a whole demo of so many steps lies there."""
    try:
        found = json.loads((folder / DONE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and (found.get("demo_version"), found.get("steps")) == (DEMO_VERSION, steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m trine.views.demo FOLDER [--small] [--pause SECONDS]``: writes those that are not whole yet."""
    parser = argparse.ArgumentParser(prog="python -m trine.views.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="6 layers of 64 experts, 60 steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step")
    options = parser.parse_args(arguments)
    for name, (size, policy) in demo_sizes(options.small).items():
        folder = options.folder / name
        if not is_done(folder, size.steps):
            seconds = write_demo(folder, size, name, policy, options.pause)
            sys.stderr.write(f"{folder}: {size.steps} steps in {seconds:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
