"""The short context after every stage: measured once a stage, named, and warned of when it got worse."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trine.train.config import Stage
from trine.train.guard import ShortGuard
from trine.train.run_folder import RunFolder
from trine.train.schedule import lay_out
from trine.train.trainer import Trainer

STAGES = [Stage(length=24, share=share, step_tokens=48, micro_tokens=24) for share in (0.5, 0.25, 0.25)]


def run(tiny: SimpleNamespace, folder: Path, values: list[float]) -> tuple[ShortGuard, Any]:
    """Train over three stages with measurements that are known."""
    left = iter(values)
    guard = ShortGuard(lambda model: next(left), "bits per byte", 24)
    with RunFolder(folder) as run_folder:
        trainer = Trainer(tiny.model(), lay_out(STAGES, 48 * 8), tiny.batches, folder=run_folder, callbacks=[guard])
        trainer.run()
    return guard, [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_numbers_before_and_after_each_stage(
    tiny: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trine"):
        guard, events = run(tiny, tmp_path / "run", [2.0, 2.03, 2.2])
    found = [event for event in events if event["kind"] == "short_guard"]
    assert [(one["stage"], one["before"], one["after"], one["worse"]) for one in found] == [
        (0, None, 2.0, False),
        (1, 2.0, 2.03, False),
        (2, 2.03, 2.2, True),
    ]
    assert found[2]["change"] == pytest.approx(2.2 / 2.03 - 1) and found[0]["change"] is None
    assert found[0]["length"] == 24 and found[0]["unit"] == "bits per byte"
    (line,) = [record.getMessage() for record in caplog.records if "stage 3" in record.getMessage()]
    assert "bits per byte at 24 tokens went from 2.0300 to 2.2000 (+8.4 %)" in line
    assert guard.state_dict()["found"][1]["after"] == 2.03


def test_noise_on_a_tiny_loss_is_no_warning(tiny: SimpleNamespace, tmp_path: Path) -> None:
    _, events = run(tiny, tmp_path / "run", [0.01, 0.012, 0.02])
    assert [event["worse"] for event in events if event["kind"] == "short_guard"] == [False, False, True]


def test_a_resumed_run_measures_each_stage_once(tiny: SimpleNamespace) -> None:
    guard = ShortGuard(lambda model: 1.5, "bits per byte", 24)
    plan = lay_out(STAGES, 48 * 8)
    trainer: Any = SimpleNamespace(plan=plan, step=4, model=None, folder=None)
    guard.on_stage(trainer, plan.spans[0])
    assert guard.found == []  # before the first stage there is nothing to lose
    guard.on_stage(trainer, plan.spans[1])
    again = ShortGuard(lambda model: 1.6, "bits per byte", 24)
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    again.on_stage(trainer, plan.spans[1])  # resumed exactly at the transition
    trainer.step = 5
    again.on_stage(trainer, plan.spans[1])  # resumed inside the stage
    again.on_end(trainer)  # interrupted
    assert [(one["stage"], one["after"]) for one in again.found] == [(0, 1.5)]
    trainer.step = 6
    again.on_stage(trainer, plan.spans[2])
    assert [(one["stage"], one["after"], one["worse"]) for one in again.found] == [(0, 1.5, False), (1, 1.6, True)]
    trainer.step = 5
    again.on_rollback(trainer)
    assert [one["stage"] for one in again.found] == [0]
