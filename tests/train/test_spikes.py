from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trine.train import spikes
from trine.train.callbacks import SaveEvery, WriteMetrics
from trine.train.errors import NumericStop, RunError
from trine.train.run_folder import RunFolder
from trine.train.spikes import SpikeGuard
from trine.train.trainer import Trainer

BAD = 33  # step of the data, from 0, whose targets belong to other inputs


def poisoned(tiny: SimpleNamespace, bad: frozenset[int] = frozenset({BAD})) -> Any:
    def batches(span: Any, step: int) -> Sequence[Any]:
        found = tiny.batches(span, step)
        if step not in bad:
            return found
        return [dataclasses.replace(one, targets_T=(one.tokens_T * 5 + 11) % 29) for one in found]

    return batches


def trainer_of(tiny: SimpleNamespace, folder: RunFolder | None, batches: Any, steps: int = 48, **more: Any) -> Trainer:
    more.setdefault("callbacks", [WriteMetrics(), SpikeGuard(rollback=True), SaveEvery(10)])
    return Trainer(
        *(tiny.model(), tiny.plan(steps), batches, tiny.optimizer()), balancer=tiny.balancer(), folder=folder, **more
    )


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("background", [False, True])
def test_a_spike_goes_back_and_leaves_its_batches_out(tiny: SimpleNamespace, tmp_path: Path, background: bool) -> None:
    with RunFolder(tmp_path / "run") as folder:
        trainer = trainer_of(tiny, folder, poisoned(tiny), background=background)
        trainer.run()
    events = lines(folder.path, "events.jsonl")
    assert [one["kind"] for one in events] == ["stage", "spike", "rollback", "stage"]
    back = events[2]
    assert (back["step"], back["to_step"], back["checkpoint"]) == (34, 30, "step-000030")
    assert back["left_out"] == [{"stage": 0, "step_of_data": 32}, {"stage": 0, "step_of_data": 33}]
    assert [one["step"] for one in lines(folder.path, "metrics.jsonl")] == list(range(1, 49))

    # The same as a run that never had these batches.
    asked: list[int] = []

    def without(span: Any, step: int) -> Sequence[Any]:
        asked.append(step if step < 32 else step + 2)
        return tiny.batches(span, asked[-1])

    clean = trainer_of(tiny, None, without, callbacks=[])
    clean.run()
    assert asked == [*range(32), *range(34, 50)]
    for name, value in clean.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name


def test_what_was_left_out_is_left_out_after_a_resume(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "whole") as folder:
        whole = trainer_of(tiny, folder, poisoned(tiny))
        whole.run()
    with RunFolder(tmp_path / "cut") as folder:
        trainer_of(tiny, folder, poisoned(tiny)).run(40)
        again = trainer_of(tiny, folder, poisoned(tiny))
        again.resume()
        assert (again.left_out, again.rollbacks) == ({0: [32, 33]}, 1)
        again.run()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_without_rollback_a_spike_is_written_down_and_training_goes_on(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        trainer_of(tiny, folder, poisoned(tiny), callbacks=[SpikeGuard(rollback=False)]).run()
    kinds = [one["kind"] for one in lines(folder.path, "events.jsonl")]
    assert kinds == ["stage", "spike"]


def test_a_run_that_spikes_again_and_again_is_stopped(tiny: SimpleNamespace, tmp_path: Path) -> None:
    bad = frozenset(range(30, 60, 2))
    with RunFolder(tmp_path / "run") as folder:
        trainer = trainer_of(tiny, folder, poisoned(tiny, bad))
        with pytest.raises(NumericStop, match="5 rollbacks did not help"):
            trainer.run()
    assert trainer.rollbacks == spikes.ROLLBACK_LIMIT == 5


def test_a_rollback_needs_a_checkpoint(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="keeps no checkpoints"):
        trainer_of(tiny, None, tiny.batches).roll_back([1])
    with RunFolder(tmp_path / "run") as folder:
        trainer = trainer_of(tiny, folder, tiny.batches)
        with pytest.raises(RunError, match="no valid checkpoint to go back to"):
            trainer.roll_back([1])


def test_what_counts_as_a_spike() -> None:
    guard = SpikeGuard(rollback=False)
    guard.load_state_dict({"losses": [2.0, 2.1, 1.9, 2.0] * 4, "stage": 0})
    # Changes of 0.1, 0.2, 0.1, 0: their median is 0.1, a deviation 0.1 * 1.4826 / sqrt 2 = 0.1048; eight are 0.839.
    assert not guard._is_spike(2.83, 2.0) and guard._is_spike(2.85, 2.0)
    guard.load_state_dict({"losses": [2.0] * 16, "stage": 0})
    assert not guard._is_spike(2.39, 2.0) and guard._is_spike(2.41, 2.0)
    assert guard.state_dict() == {"losses": [2.0] * 16, "stage": 0}
