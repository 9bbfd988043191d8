"""Loss spikes: seen, written down and, if wanted, undone by going back without the batches that came with them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trine.train.callbacks import Callback
from trine.train.errors import NumericStop
from trine.train.metrics import StepRecord
from trine.train.schedule import StageSpan

if TYPE_CHECKING:
    from trine.train.trainer import Trainer

WINDOW, LEAST = 32, 12  # losses looked back at, at most and at least
RECENT = 8  # of these, the last ones, whose median is the usual loss
DEVIATIONS, SHARE = 8.0, 0.2  # a spike lies above the usual by so many deviations, and by this share of it
ROLLBACK_LIMIT = 5  # of a run; more means that the cause is not the data


class SpikeGuard(Callback):
    """Compares each step's loss with those of the last `WINDOW` steps of its stage.

    A spike is an event. With ``rollback`` the run also returns to its last checkpoint and leaves out the batches of the
    spike's step and of the step before it: the loss of a step is that of weights which the batch before it made.

    Args:
        rollback: go back; without it a spike is only written down.
    """

    name = "spikes"

    def __init__(self, rollback: bool) -> None:
        self.rollback = rollback
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._stage = -1

    def on_start(self, trainer: Trainer) -> None:
        """With rollback, see to it that there is a checkpoint to go back to."""
        if self.rollback and trainer.step == 0:
            trainer.save()

    def on_stage(self, trainer: Trainer, span: StageSpan) -> None:
        """Another stage has other texts: begin anew."""
        if span.index != self._stage:
            self._stage = span.index
            self._losses.clear()

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Look at one loss.

        Raises:
            NumericStop: another spike after `ROLLBACK_LIMIT` rollbacks.
        """
        if not record.updated:
            return
        usual = statistics.median(list(self._losses)[-RECENT:]) if len(self._losses) >= LEAST else None
        if usual is None or not self._is_spike(record.loss, usual):
            self._losses.append(record.loss)
            return
        trainer.event("spike", step=record.step, loss=record.loss, usual=usual)
        if not self.rollback:
            self._losses.append(record.loss)
            return
        if trainer.rollbacks >= ROLLBACK_LIMIT:
            trainer.save()
            raise NumericStop(
                f"step {record.step}: loss {record.loss:.3f}, usual {usual:.3f}; {ROLLBACK_LIMIT} rollbacks did not "
                "help, so the data is not the cause: lower the rates, or look at events.jsonl"
            )
        trainer.roll_back([step for step in (record.step - 1, record.step) if step > 0])

    def _is_spike(self, loss: float, usual: float) -> bool:
        # From step to step, so that a loss that falls steadily does not look like one that scatters.
        changes = [abs(b - a) for a, b in pairwise(self._losses)]
        spread = 1.4826 * statistics.median(changes) / math.sqrt(2)
        return loss - usual > max(DEVIATIONS * spread, SHARE * usual)

    def state_dict(self) -> dict[str, Any]:
        """The losses looked back at."""
        return {"losses": list(self._losses), "stage": self._stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._stage = state["stage"]
