"""What a transition and a resume cost: a short run of the laptop's model through two lengths, stopped and resumed.

    python benchmarks/transition_cpu.py [--threads 0] [--allow-busy] [--dry-run]

- `transition`: from the end of the last step of rows of 128 tokens to the beginning of the first of 1,024, the
  measurement of the short context in between included.
- `resume`: from the call to the beginning of the first step, everything included: data, model, plan, checkpoint.

Both have a bar of five seconds, the resume's beyond loading.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _common as common

from trine.train.callbacks import Callback
from trine.train.config import EvalConfig, Stage, TrainConfig, default_mixture, train_preset
from trine.train.loop import train
from trine.train.metrics import StepRecord
from trine.train.trainer import Trainer


class _Clock(Callback):
    """When each step began and ended; ends the run after step ``last``."""

    name = "clock"

    def __init__(self, last: int) -> None:
        self.last = last
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        now = time.perf_counter()
        self.began[record.step], self.ended[record.step] = now - record.seconds, now
        if record.step == self.last:
            raise KeyboardInterrupt


def plan(folder: str, threads: int) -> TrainConfig:
    """Two steps of each length; a checkpoint after every second step."""
    sizes = {"step_tokens": 8_192, "micro_tokens": 4_096}
    stages = (
        Stage(length=128, share=0.5, **sizes),
        Stage(length=1_024, share=0.5, mixture=default_mixture(1, 1_024), **sizes),
    )
    return replace(
        train_preset("laptop"),
        tokens=4 * 8_192,
        stages=stages,
        runs=folder,
        run="run",
        threads=threads,
        device="cpu",
        eval=EvalConfig(run=False),
        checkpoint_every=2,
    )


def main() -> None:
    """Measure, print, record."""
    options = common.arguments(__doc__).parse_args()
    count = common.threads(options.threads)
    quiet = common.require_quiet(count, options.allow_busy)
    with tempfile.TemporaryDirectory() as folder:
        config = plan(folder, count)
        first, again = _Clock(3), _Clock(99)
        with contextlib.suppress(KeyboardInterrupt):
            train(config, callbacks=[first])
        called = time.perf_counter()
        train(replace(config, resume=True), callbacks=[again])
    taken = {
        "transition rows 128 to 1024": first.began[3] - first.ended[2],
        "resume": again.began[min(again.began)] - called,
    }
    records = [
        common.Record("transition_cpu", case, "trine", ms=1e3 * value, quiet=quiet, threads=count)
        for case, value in taken.items()
    ]
    print(common.table(records))
    if not options.dry_run:
        print(common.write_records("transition_cpu", records))


if __name__ == "__main__":
    main()
