"""Live progress in the terminal; plain lines where there is none."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from trine.train.callbacks import Callback
from trine.train.config import share_text
from trine.train.metrics import StepRecord
from trine.train.schedule import StageSpan
from trine.train.trainer import Trainer

_LINE_EVERY = 15.0  # seconds between plain lines
_SMOOTH = 0.9  # of the speed, from which the time left is told


class ShowProgress(Callback):
    """Loss, bits per byte, speed, balance and time left, one line that is redrawn; in a log, a line now and then."""

    name = "progress"

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._seconds_a_token = 0.0
        self._last_line = -_LINE_EVERY

    def on_start(self, trainer: Trainer) -> None:
        """Draw the bar."""
        if self.console.is_terminal:
            columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[line]}"))
            self._bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self._task = self._bar.add_task("", total=trainer.plan.steps, completed=trainer.step, line="first step ...")
            self._bar.start()

    def on_stage(self, trainer: Trainer, span: StageSpan) -> None:
        """One line at a transition: what is, after what was."""
        if span.index > 0 and trainer.step == span.first_step:
            line = transition_line(trainer.plan.spans[span.index - 1], span)
            self.console.print(line, highlight=False, soft_wrap=not self.console.is_terminal)

    def on_rollback(self, trainer: Trainer) -> None:
        """Say so, and set the bar back."""
        self.console.print(f"loss spike: back to step {trainer.step}, see events.jsonl", highlight=False)
        self._last_line = -_LINE_EVERY

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Redraw the bar, or print a line when the last one is old."""
        pace = 1 / record.tokens_per_s if record.tokens_per_s else 0.0
        share = _SMOOTH if self._seconds_a_token else 0.0
        self._seconds_a_token = share * self._seconds_a_token + (1 - share) * pace
        line = progress_line(record, self._seconds_a_token * (trainer.plan.tokens - record.tokens))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record.step, line=line)
        elif time.monotonic() - self._last_line >= _LINE_EVERY or record.step == trainer.plan.steps:
            self._last_line = time.monotonic()
            # Whoever reads a log wants a line a step, however long.
            self.console.print(f"step {record.step}/{trainer.plan.steps}  {line}", highlight=False, soft_wrap=True)

    def on_end(self, trainer: Trainer) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()


def transition_line(before: StageSpan, after: StageSpan) -> str:
    """What changes at a transition, old and new; learning rate, momenta, router bias and data order go on."""
    old, new = before.stage, after.stage
    parts = [f"rows of {old.length:,} -> {new.length:,} tokens"]
    if old.step_tokens != new.step_tokens:
        parts.append(f"{old.step_tokens:,} -> {new.step_tokens:,} tokens a step")
    if old.recompute != new.recompute:
        parts.append("recomputing from here on" if new.recompute else "no recomputing from here on")
    if old.mixture != new.mixture:
        mixtures = (", ".join(map(share_text, one.mixture)) or "all documents" for one in (old, new))
        parts.append("data " + " -> ".join(mixtures))
    return f"stage {after.index + 1} from step {after.first_step + 1}: " + "; ".join(parts)


def progress_line(record: StepRecord, seconds_left: float) -> str:
    """The figures of a step in one line."""
    bits = "" if record.bits_per_byte is None else f"  {record.bits_per_byte:.3f} bits/byte"
    balance = f"  MaxVio {max(record.max_vio):.2f}  dead {record.dead_experts}" if record.max_vio else ""
    minutes, seconds = divmod(round(seconds_left), 60)
    left = f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
    skipped = "" if record.updated else "  [no update]"
    return f"loss {record.loss:.3f}{bits}  {record.tokens_per_s:,.0f} tokens/s{balance}  {left} left{skipped}"
