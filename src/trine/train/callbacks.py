"""Everything optional in training is a callback, and what it must remember is saved with the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.train.metrics import StepRecord
from trine.train.schedule import StageSpan

if TYPE_CHECKING:
    from trine.train.trainer import Trainer


class Callback:
    """Called by the trainer in the order the callbacks were given. Override what is needed.

    State is JSON-ready and is stored in checkpoints under ``name``, which must differ between the callbacks of a run;
    a resumed run hands it back before `on_start`.
    """

    name = ""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step of this process."""

    def on_stage(self, trainer: Trainer, span: StageSpan) -> None:
        """Before the first step of a stage, also when a run is resumed inside it."""

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """After every step, when the model is updated; saving from here is safe."""

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """After a checkpoint was written."""

    def on_rollback(self, trainer: Trainer) -> None:
        """After the run went back to a checkpoint; the trainer stands where that was saved."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step of this process, also when it was interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """What to store in a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class WriteMetrics(Callback):
    """One line of ``metrics.jsonl`` a step."""

    name = "metrics"

    def on_start(self, trainer: Trainer) -> None:
        """Drop lines of steps that will be run again."""
        if trainer.folder is not None:
            trainer.folder.forget_metrics_after(trainer.step)

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Append the record."""
        if trainer.folder is not None:
            trainer.folder.metric(record.to_json())

    def on_rollback(self, trainer: Trainer) -> None:
        """Drop the lines of the steps that were taken back."""
        self.on_start(trainer)


class SaveEvery(Callback):
    """A checkpoint every ``steps`` steps; 0 never saves from here."""

    name = "save"

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Save when the step's number is a multiple; the last step is saved by the trainer."""
        if self.steps and record.step % self.steps == 0 and record.step < trainer.plan.steps:
            trainer.save()
