"""What recording costs: time of a training step of the laptop preset, bytes of a frame, size of a long run's file.

    python benchmarks/recorder_cpu.py [--threads 0] [--allow-busy] [--dry-run]

- `step laptop`: a step of the preset's first stage without a recorder, and what recording adds to it: once the time
  that training itself spends (`hand over`), once all of it as if nothing ran side by side (`all of it`: figures,
  alerts, packing, the transaction), which is the bound on what it can cost. The bar is 1 % of the step.
- `frame 92x896`: bytes and time of one step of K3's size. Loads are Poisson around the mean (`even`), or around means
  spread log-normally (`spread`), biases spread by 0.08 with a step's noise of 0.003. The bar is 200 000 bytes.
- `run`: bytes of the file after a million steps, from the mean sizes of frames of one, ten and a hundred steps.

Bytes are in ``note``; ``error`` is the largest relative error of a load.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _common as common
import numpy as np
import torch

from trine.balance import QuantileBalancing, Recorder, RecorderReader, Window
from trine.balance.record_format import PRECISIONS, Arrays, HostWindow, Shape, pack_summary, pack_to_fit
from trine.balance.summary import Summaries
from trine.data import Batch
from trine.train.callbacks import RecordBalance
from trine.train.config import train_preset
from trine.train.loop import build_model
from trine.train.schedule import StageSpan, lay_out
from trine.train.trainer import Trainer

STEPS = 24
K3 = (92, 896, 16)


def step_records(count: int, quiet: bool) -> list[common.Record]:
    """Steps with a recorder, each timed in parts."""
    config = train_preset("laptop")
    stage = replace(config.stages[0], share=1.0)
    plan = lay_out([stage], stage.step_tokens * (STEPS + 2))
    vocabulary = config.model_config().vocab_size

    def batches(span: StageSpan, step: int) -> Sequence[Batch]:
        generator = torch.Generator().manual_seed(step)
        made = []
        for _ in range(stage.step_tokens // stage.micro_tokens):
            ids_T = torch.randint(vocabulary, (stage.micro_tokens,), generator=generator)
            bounds = torch.arange(0, stage.micro_tokens + 1, stage.length, dtype=torch.int32)
            sources = torch.zeros(len(bounds) - 1, dtype=torch.int64)
            made.append(Batch(ids_T, ids_T, torch.ones(stage.micro_tokens), bounds, sources, supervised_bytes=1))
        return made

    with tempfile.TemporaryDirectory() as folder:
        model = build_model(config, torch.device("cpu"))
        recording = RecordBalance(Path(folder), config.model_config().top_k)
        balancer = QuantileBalancing(config.model_config().top_k)
        trainer = Trainer(model, plan, batches, config.optimizer, balancer=balancer, workers=count)
        recording.on_start(trainer)
        assert recording.recorder is not None
        taken = []
        for _ in range(STEPS + 2):
            began = time.perf_counter()
            record = trainer.train_step()
            stepped = time.perf_counter()
            recording.on_step(trainer, record)
            handed = time.perf_counter()
            recording.recorder.flush()
            taken.append((stepped - began, handed - stepped, time.perf_counter() - stepped))
        recording.on_end(trainer)
    step, hand, whole = 1e3 * np.median(np.array(taken[2:]), axis=0)
    rows = (("step laptop", "without", step), ("step laptop", "hand over", hand), ("step laptop", "all of it", whole))
    return [
        common.Record(
            *("recorder_cpu", case, impl),
            ms=float(ms),
            quiet=quiet,
            threads=count,
            note=None if impl == "without" else f"{ms / step:.3%} of the step",
        )
        for case, impl, ms in rows
    ]


def k3_window(mean: float, spread: float, seed: int, bias_LE: np.ndarray) -> HostWindow:
    """A step at 92 x 896: noise of sampling on given means."""
    layers, experts, top_k = K3
    rng = np.random.default_rng(seed)
    means_LE = mean * np.exp(np.random.default_rng(0).normal(0, spread, (layers, experts)))
    loads_LE = rng.poisson(means_LE).astype(np.int64)
    zero_L = np.zeros(layers, dtype=np.int64)
    bias_LE = (bias_LE + rng.normal(0, 0.003, bias_LE.shape)).astype(np.float32)
    return HostWindow(
        *(loads_LE, bias_LE, loads_LE.sum(1) // top_k, zero_L, zero_L, zero_L),
        np.sort(rng.normal(0, 0.1, (layers, 5)), axis=1),
    )


def frame_records(count: int, quiet: bool) -> list[common.Record]:
    """Bytes, time and error of single frames."""
    layers, experts, top_k = K3
    bias_LE = np.random.default_rng(1).normal(0, 0.08, (layers, experts))
    records = []
    for name, mean, spread in (
        *(("even, 146 a load", 146.0, 0.0), ("even, 1500 a load", 1500.0, 0.0), ("even, 75000 a load", 75_000.0, 0.0)),
        *(("spread, 1500 a load", 1500.0, 1.0), ("spread, 75000 a load", 75_000.0, 1.0)),
    ):
        summaries = Summaries(layers, experts, top_k)
        windows = [k3_window(mean, spread, seed, bias_LE) for seed in range(6)]
        times, number = [], 0
        for i, window in enumerate(windows, 1):
            began = time.perf_counter()
            frame = summaries.step(i, window)
            blob, number = pack_to_fit(frame, number)
            summary = pack_summary(frame.summary_KLM)
            times.append(time.perf_counter() - began)
        found_LE = Arrays.of(blob, Shape(layers, experts)).loads()
        error = float(np.abs(found_LE / np.maximum(frame.loads_LE, 1) - (frame.loads_LE > 0)).max())
        kept = PRECISIONS[number]
        note = f"{len(blob) + len(summary)} bytes, {kept.loads} bits of load, {kept.bias} of bias"
        timing = {"ms": 1e3 * min(times), "median_ms": 1e3 * float(np.median(times))}
        case = f"frame 92x896 {name}"
        records.append(
            common.Record("recorder_cpu", case, "trine", error=error, quiet=quiet, threads=count, note=note, **timing)
        )
    return records


def run_record(case: str, sizes: tuple[int, int, int], windows: Sequence[HostWindow], steps: int) -> common.Record:
    """Size of the file after a million steps: ``steps`` steps are recorded, and frames of each tier weighed."""
    layers, experts, top_k = sizes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r"
        recorder = Recorder(path, layers=layers, experts=experts, top_k=top_k, keep=20, depth=8)
        for step in range(1, steps + 1):
            one = windows[step % len(windows)]
            tensors = {name: torch.from_numpy(getattr(one, name)) for name in one.__dataclass_fields__}
            recorder.record(step, Window(**tensors))
            if step % 8 == 0:
                recorder.flush(60)
        recorder.flush(60)
        assert recorder.counts.dropped == recorder.counts.failed == 0
        recorder.close()
        file = path.stat().st_size
        with RecorderReader(path) as reader:
            means = reader._rows(
                "SELECT tier, avg(length(arrays) + length(summary)), count(*) FROM frames GROUP BY tier"
            )
    share = file / sum(mean * count for _, mean, count in means)  # pages hold more than their blobs
    one, many = means[0][1], means[-1][1]
    total = share * 1000 * (one + 3 * many)
    note = f"{total / 1e6:.1f} MB after a million steps; frames of one step {one:.0f}, of many {many:.0f} bytes"
    return common.Record("recorder_cpu", case, "trine", note=f"{note}; pages over blobs {share:.2f}")


def main() -> None:
    """Measure, print, record."""
    options = common.arguments(__doc__).parse_args()
    count = common.threads(options.threads)
    quiet = common.require_quiet(count, options.allow_busy)
    records = step_records(count, quiet) + frame_records(count, quiet)
    bias_LE = np.random.default_rng(1).normal(0, 0.08, K3[:2])
    records.append(run_record("run 92x896", K3, [k3_window(1500.0, 0.0, seed, bias_LE) for seed in range(5)], 121))
    config = train_preset("laptop").model_config()
    moe = build_model(train_preset("laptop"), torch.device("cpu")).router_stats.layers
    small = [
        replace(
            k3_window(1820.0, 0.1, seed, bias_LE),
            **{
                name: getattr(k3_window(1820.0, 0.1, seed, bias_LE), name)[:moe, : config.experts].copy()
                for name in ("loads_LE", "bias_LE")
            },
            **{
                name: getattr(k3_window(1820.0, 0.1, seed, bias_LE), name)[:moe].copy()
                for name in ("tokens_L", "dropped_L", "saturated_L", "overflow_L", "margins_LQ")
            },
        )
        for seed in range(5)
    ]
    records.append(run_record(f"run laptop {moe}x{config.experts}", (moe, config.experts, config.top_k), small, 321))
    print(common.table(records))
    for record in records:
        if record.note:
            print(f"{record.case} {record.impl}: {record.note}")
    if not options.dry_run:
        print(common.write_records("recorder_cpu", records))


if __name__ == "__main__":
    main()
