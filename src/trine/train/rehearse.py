"""What a plan will read, take and need on this machine, before any of it is trained: `trine plan`."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trine.balance import close_policy, install_policy
from trine.data import Shards
from trine.data.generated import RECALL
from trine.model import Model
from trine.train import machine
from trine.train.config import TrainConfig, share_text
from trine.train.loop import build_model, choose_device, open_data, recall_batches, stage_plans, stored_batches
from trine.train.schedule import Plan, lay_out
from trine.train.stored import run_path
from trine.train.trainer import Batches, Trainer


@dataclass(frozen=True)
class StageForecast:
    """One stage: what it reads, and what it takes here. Times and memory are None when nothing was measured."""

    stage: int
    length: int
    steps: int
    tokens: int
    step_tokens: int
    micro_tokens: int
    recompute: bool
    mixture: tuple[str, ...]  # in the form that `parse_share` reads; empty: every document
    epochs: dict[str, float]  # passes over each part of the mixture in this stage
    epochs_in_all: dict[str, float]  # the same with the stages before
    long_share: float | None  # of the targets: from documents longer than the rows of the stage before
    padding_share: float | None
    step_seconds: float | None
    seconds: float | None
    peak_bytes: int | None  # of the process on a CPU, of its allocations on a card, up to the end of this stage


@dataclass(frozen=True)
class Forecast:
    """A whole plan."""

    stages: tuple[StageForecast, ...]
    steps: int
    tokens: int
    seconds: float | None  # of training; the evaluation at the end is not in it
    peak_bytes: int | None
    hardware: dict[str, Any]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)


def forecast(config: TrainConfig, *, measure: bool = True) -> Forecast:
    """Lay a run out and, with ``measure``, time one or two micro-batches of each stage and its memory. Nothing is kept.

    A step's time is that of as many micro-batches as run side by side, times how often they fit into a step, plus an
    update of the optimizers. Memory is the peak seen while these ran in the order of the stages, which is what a run
    would reach: a step's other micro-batches reuse it.

    Args:
        config: the run.
        measure: run micro-batches; without it only the data is looked at.

    Raises:
        DataError: no data, a mixture that names nothing, a source that would be read too often.
        RunError: a card that is not there.
    """
    settings = machine.prepare_machine(config.threads)
    warning = machine.busy_warning() if measure else None
    with _data(config) as shards:
        plan = lay_out(config.stages, config.tokens)
        made = config.data.source == RECALL  # rows made while they are read: nothing to count
        plans = [] if made else stage_plans(config, plan, shards)
        reports = [rows.report() for rows in plans]
        batches = recall_batches(config, plan, shards) if made else stored_batches(plans)
        measured = _measure(config, plan, batches, settings["threads"]) if measure else [(None, None)] * len(plan.spans)
        stages = []
        for span, (step_seconds, peak) in zip(plan, measured, strict=True):
            stage, report = span.stage, None if made else reports[span.index]
            names = [share_text(part) for part in stage.mixture] or ["all documents"]
            parts = {} if report is None else dict(zip(names, report.parts, strict=True))
            stages.append(
                StageForecast(
                    stage=span.index,
                    length=stage.length,
                    steps=span.steps,
                    tokens=span.steps * stage.step_tokens,
                    step_tokens=stage.step_tokens,
                    micro_tokens=stage.micro_tokens,
                    recompute=stage.recompute,
                    mixture=tuple(share_text(part) for part in stage.mixture),
                    epochs={name: part.epochs for name, part in parts.items()},
                    epochs_in_all={name: part.epochs_in_all for name, part in parts.items()},
                    long_share=None if report is None else report.long_share,
                    padding_share=None if report is None else report.padding_share,
                    step_seconds=step_seconds,
                    seconds=None if step_seconds is None else step_seconds * span.steps,
                    peak_bytes=peak,
                )
            )
        warnings = [*([warning] if warning else []), *(text for one in reports for text in one.warnings)]
    return Forecast(
        stages=tuple(stages),
        steps=plan.steps,
        tokens=plan.tokens,
        seconds=sum(one.seconds or 0.0 for one in stages) if measure else None,
        peak_bytes=max((one.peak_bytes or 0 for one in stages), default=0) or None,
        hardware=machine.hardware(),
        warnings=tuple(warnings),
    )


@contextlib.contextmanager
def _data(config: TrainConfig) -> Iterator[Shards]:
    """The run's own data when it exists, else data made for the moment: a plan leaves nothing behind."""
    folder = run_path(config) / "data"
    if (folder / "manifest.json").exists():
        yield open_data(config, folder)
        return
    with tempfile.TemporaryDirectory(prefix="trine-plan-") as name:
        yield open_data(config, Path(name) / "data")


def _measure(config: TrainConfig, plan: Plan, batches: Batches, threads: int) -> list[tuple[float | None, int | None]]:
    """(seconds a step, peak bytes so far) of each stage."""
    device = choose_device(config.device)
    model: Model = build_model(config, device)
    policy = install_policy(model, config.balance)
    trainer = Trainer(
        *(model, plan, batches, config.optimizer),
        balancer=policy,
        workers=threads,
    )
    found: list[tuple[float | None, int | None]] = []
    try:
        for span in plan:
            some, update = trainer.rehearse(span)
            together = min(trainer.side_by_side, span.stage.step_tokens // span.stage.micro_tokens)
            rounds = math.ceil(span.stage.step_tokens / span.stage.micro_tokens / together)
            found.append((some * rounds + update, _peak(device)))
    finally:
        close_policy(policy)
    return found


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else machine.peak_memory_bytes()
