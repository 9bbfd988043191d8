"""What a look inside the model costs: processor time of a look beside that of a training step.

    python benchmarks/probe_cpu.py [--threads 0] [--allow-busy] [--dry-run]

Of the smoke and the laptop preset: a step of the first stage (forward, backward, optimizer, balancer), a look
(`trine.train.probes.look_inside`), and with the plan's own steps and interval the share of all looks in the run's time.
A look takes one thread.
Times are processor time (``time.process_time``) of all threads, which other work moves less than what a clock says.
The bar is 1 %. The part of docs/dashboard.md between ``<!-- probes -->`` and what closes it is written from the record.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _common as common
import numpy as np
import torch
from curriculum_pages import DOCS, put

from trine.balance import QuantileBalancing
from trine.data import Batch
from trine.train.config import train_preset
from trine.train.loop import build_model
from trine.train.probes import LENGTH, TOKENS, ProbeText, interval, look_inside
from trine.train.schedule import StageSpan, lay_out
from trine.train.trainer import Trainer
from trine.views.tables import markdown

STEPS, LOOKS = 8, 12


def times(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Least and median processor time of a call, in ms; a first one is not counted."""
    taken = []
    for _ in range(repeats + 1):
        began = time.process_time()
        call()
        taken.append(1e3 * (time.process_time() - began))
    return min(taken[1:]), float(np.median(taken[1:]))


def records_of(name: str, count: int, quiet: bool) -> list[common.Record]:
    """A step and a look of one preset."""
    config = train_preset(name)
    stage = replace(config.stages[0], share=1.0)
    vocabulary = config.model_config().vocab_size

    def batches(span: StageSpan, step: int) -> Sequence[Batch]:
        generator = torch.Generator().manual_seed(step)
        bounds = torch.arange(0, stage.micro_tokens + 1, stage.length, dtype=torch.int32)
        sources = torch.zeros(len(bounds) - 1, dtype=torch.int64)
        rows = [
            torch.randint(vocabulary, (stage.micro_tokens,), generator=generator)
            for _ in range(stage.step_tokens // stage.micro_tokens)
        ]
        return [Batch(row, row, torch.ones(len(row)), bounds, sources, supervised_bytes=1) for row in rows]

    model = build_model(config, torch.device("cpu"))
    balancer = QuantileBalancing(config.model_config().top_k)
    plan = lay_out([stage], stage.step_tokens * (STEPS + 2))
    trainer = Trainer(model, plan, batches, config.optimizer, balancer=balancer, workers=count)
    bounds = torch.arange(0, TOKENS + 1, LENGTH, dtype=torch.int32)
    text = ProbeText(torch.randint(vocabulary, (TOKENS,)), bounds, "random symbols")
    step, median_step = times(trainer.train_step, STEPS)
    look, median_look = times(lambda: look_inside(model, text), LOOKS)
    steps = lay_out(config.stages, config.tokens).steps
    every = interval(config.probe_every, steps)
    looks = len({*range(0, steps + 1, every), steps})
    note = f"{looks} looks in {steps} steps, one every {every}: {looks * median_look / (steps * median_step):.2%}"
    more = {"quiet": quiet, "threads": count}
    return [
        common.Record("probe_cpu", f"step {name}", "trine", ms=step, median_ms=median_step, **more),
        common.Record("probe_cpu", f"look {name}", "trine", ms=look, median_ms=median_look, note=note, **more),
    ]


def page(records: Sequence[common.Record]) -> str:
    """The part of docs/dashboard.md."""
    rows = []
    for step, look in zip(records[::2], records[1::2], strict=True):
        plan, share = str(look.note).split(": ")
        rows.append((step.case.split()[1], f"{step.median_ms:.0f} ms", f"{look.median_ms:.0f} ms", plan, share))
    return markdown(("preset", "a step", "a look", "plan", "share of all looks"), rows)


def main() -> None:
    """Measure, print, record."""
    options = common.arguments(__doc__).parse_args()
    count = common.threads(options.threads)
    quiet = common.require_quiet(count, options.allow_busy)
    records = [record for name in ("smoke", "laptop") for record in records_of(name, count, quiet)]
    print(common.table(records))
    print(page(records))
    if not options.dry_run:
        print(common.write_records("probe_cpu", records))
        put(DOCS / "dashboard.md", "probes", f"Processor time on {common.hardware()}:\n\n{page(records)}")


if __name__ == "__main__":
    main()
