"""The short context stays learned: the same short measurement after every stage, compared with the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trine._log import logger
from trine.train.callbacks import Callback
from trine.train.schedule import StageSpan

if TYPE_CHECKING:
    from trine.train.trainer import Trainer

WORSE = 0.02  # relative growth of the loss from which a stage is said to have hurt
NOISE = 0.005  # and the least growth that is said to be one


class ShortGuard(Callback):
    """Measure a loss at the shortest stage's length after each stage; say before, after, and whether it got worse.

    Its events are ``short_guard`` with ``stage`` (the one that has ended), ``length``, ``before`` (None after the first
    stage), ``after``, ``change`` (relative) and ``worse``. The model is read, never changed.

    Args:
        measure: model -> loss, where less is better; the same text every time.
        unit: of the loss, for the record.
        length: tokens of the measured context, for the record.
    """

    name = "short_guard"

    def __init__(self, measure: Callable[[Any], float], unit: str, length: int) -> None:
        self.measure, self.length, self.unit = measure, length, unit
        self.found: list[dict[str, Any]] = []

    def on_stage(self, trainer: Trainer, span: StageSpan) -> None:
        """The stage before has just ended."""
        if span.index > 0 and trainer.step == span.first_step:
            self._look(trainer, span.index - 1)

    def on_end(self, trainer: Trainer) -> None:
        """The last stage has ended, unless the run was interrupted."""
        if trainer.step == trainer.plan.steps:
            self._look(trainer, trainer.plan.spans[-1].index)

    def on_rollback(self, trainer: Trainer) -> None:
        """Forget stages that have not ended any more."""
        ended = {span.index for span in trainer.plan if span.first_step + span.steps <= trainer.step}
        self.found = [one for one in self.found if one["stage"] in ended]

    def _look(self, trainer: Trainer, stage: int) -> None:
        if any(one["stage"] == stage for one in self.found):
            return
        before = self.found[-1]["after"] if self.found else None
        after = self.measure(trainer.model)
        change = None if before is None else after / before - 1
        worse = before is not None and after > before * (1 + WORSE) and after > before + NOISE
        one = {"stage": stage, "before": before, "after": after, "change": change, "worse": worse}
        self.found.append(one)
        if trainer.folder is not None:
            trainer.folder.event("short_guard", length=self.length, unit=self.unit, **one)
        if worse:
            logger.warning(
                "stage %d: %s at %d tokens went from %.4f to %.4f (%+.1f %%); keep a larger share of short rows",
                *(stage + 1, self.unit, self.length, before, after, 100 * (change or 0.0)),
            )

    def state_dict(self) -> dict[str, Any]:
        """What was measured so far."""
        return {"found": self.found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.found = [dict(one) for one in state["found"]]
