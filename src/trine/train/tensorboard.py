"""The metrics of a run for TensorBoard (extra ``log``); the only file that imports it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.train.callbacks import Callback
from trine.train.errors import RunError
from trine.train.metrics import StepRecord
from trine.train.probes import Record, scalars
from trine.train.schedule import StageSpan

if TYPE_CHECKING:
    from trine.train.trainer import Trainer

_SCALARS = ("loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_s", "dead_experts", "mtp_loss", "clipped_heads")


class TensorBoard(Callback):
    """Writes each step's figures, the percentiles of the experts' loads over their mean and the MaxVio of each MoE
    layer into ``RUN/tensorboard``, and what looks inside the model find; steps are those of training.

    Raises:
        RunError: TensorBoard is not installed.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RunError(
                "tensorboard: is not installed; in the clone: .venv/bin/pip install -e '.[log]', "
                "or leave --tensorboard out"
            ) from error
        self._make: Any = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Open the log; steps that will be run again are told to the viewer to forget."""
        self._writer = self._make(str(self._folder), purge_step=trainer.step + 1)

    def on_stage(self, trainer: Trainer, span: StageSpan) -> None:
        """Mark the stage's length."""
        self._writer.add_scalar("stage/length", span.stage.length, trainer.step + 1)

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Write one step."""
        for key in _SCALARS:
            value = getattr(record, key)
            if value is not None:
                self._writer.add_scalar(f"train/{key}", value, record.step)
        for name, value in (record.load_percentiles or {}).items():
            self._writer.add_scalar(f"load/{name}", value, record.step)
        for layer, value in enumerate(record.max_vio):
            self._writer.add_scalar(f"max_vio/{layer}", value, record.step)

    def probe(self, record: Record) -> None:
        """Write what a look inside the model found; a listener of `trine.train.probes.Probes`."""
        if self._writer is not None:
            for name, value in scalars(record).items():
                self._writer.add_scalar(f"inside/{name}", value, record["step"])

    def on_end(self, trainer: Trainer) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
