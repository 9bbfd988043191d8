"""Everything optional in training is a callback, and what it must remember is saved with the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from trine._log import logger
from trine.balance.alerts import DEFAULT_RULES, Alerts, Rule, Signals
from trine.balance.exporters import Prometheus, Webhook
from trine.balance.freeze import Replay
from trine.balance.rank_check import unchecked
from trine.balance.record_format import FILE_NAME, Frame, RecordError
from trine.balance.recorder import Recorder
from trine.train.errors import RunError
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


WATCHED_EXPERTS = 128
"""Experts of a layer above which averages hide what happens to single ones."""


class RecordBalance(Callback):
    """Load and bias of every expert at every step into ``balance.sqlite``, and alerts when balance is lost.

    Only the first rank does anything, and only for models with MoE layers. Alerts go to the log, to ``events.jsonl``,
    and where they are asked for to a webhook and to Prometheus; all of it in the recorder's thread. Evaluation closes
    no window and so is never recorded, nor are steps whose experts were replayed.

    A file that cannot be gone on with (damaged, another model's, of a newer format) is renamed, and a new one begun.

    Args:
        folder: of the run.
        top_k: experts a token.
        ranks: expert-parallel ranks.
        keep: frames that each tier keeps, see `Recorder`.
        rules: what to watch.
        webhook: address that alerts are posted to; none by default.
        prometheus: port of 127.0.0.1 that serves ``/metrics``; 0 serves nothing.

    Raises:
        RunError: the webhook's address is none, prometheus_client is missing, or its port is taken.
    """

    name = "recorder"

    def __init__(
        self,
        folder: Path,
        top_k: int,
        *,
        ranks: int = 1,
        keep: int = 1000,
        rules: Sequence[Rule] = DEFAULT_RULES,
        webhook: str = "",
        prometheus: int = 0,
    ) -> None:
        self.path, self.top_k, self.ranks, self.keep = folder / FILE_NAME, top_k, ranks, keep
        self.rules = tuple(rules)
        self.recorder: Recorder | None = None
        self.alerts: Alerts | None = None
        self._addresses = (webhook, prometheus)
        self._webhook: Webhook | None = None
        self._prometheus: Prometheus | None = None
        self._saved: dict[str, Any] = {}
        self._trainer: Trainer | None = None
        self._first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        if self._first:
            self._connect()

    def _connect(self) -> None:
        webhook, port = self._addresses
        try:
            if webhook and self._webhook is None:
                self._webhook = Webhook(webhook)
            if port and self._prometheus is None:
                self._prometheus = Prometheus(port)
        except ValueError as error:
            raise RunError(str(error)) from error

    def on_start(self, trainer: Trainer) -> None:
        """Open the file and drop what will be recorded again."""
        stats = trainer.router_stats
        if not self._first or stats is None or not stats.layers:
            return
        self._connect()
        if self._prometheus is not None:
            dense = getattr(getattr(trainer.model, "config", None), "dense_layers", None)
            self._prometheus.layers = () if dense is None else range(dense, dense + stats.layers)
        self._trainer = trainer
        self.alerts = Alerts(stats.layers, stats.experts, self.top_k, self.ranks, self.rules)
        self._take_saved()
        sizes = {"layers": stats.layers, "experts": stats.experts, "top_k": self.top_k, "ranks": self.ranks}
        try:
            self.recorder = Recorder(self.path, **sizes, keep=self.keep, listeners=[self._look])
        except RecordError as error:
            renamed = self._set_aside()
            if renamed is None:
                logger.warning("%s; nothing is recorded", error)
                return
            logger.warning("%s; renamed to %s, a new one is begun", error, renamed.name)
            trainer.event("recorder_set_aside", reason=str(error), renamed=renamed.name)
            self.recorder = Recorder(self.path, **sizes, keep=self.keep, listeners=[self._look])
        self.recorder.forget_after(trainer.step)

    def _set_aside(self) -> Path | None:
        number = 1
        while (to := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        try:
            self.path.rename(to)
            for journal in ("-wal", "-shm"):
                beside = self.path.with_name(self.path.name + journal)
                if beside.exists():
                    beside.rename(to.with_name(to.name + journal))
        except OSError:
            return None
        return to

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Hand the step's window over."""
        replayed = isinstance(unchecked(trainer.balancer), Replay)
        if self.recorder is not None and trainer.window is not None and not replayed:
            self.recorder.record(record.step, trainer.window)

    def _look(self, frame: Frame) -> None:
        """Judge and publish one step; the recorder's thread calls it."""
        trainer, alerts, recorder = self._trainer, self.alerts, self.recorder
        if trainer is None or alerts is None:
            return
        for alert in alerts.step(frame, _signals(trainer.balancer)):
            details = alert.to_json()
            (logger.warning if alert.begins else logger.info)("balance: step %d: %s", alert.step, alert.text)
            if trainer.folder is not None:
                trainer.folder.event("balance_alert", **details)
            if self._webhook is not None:
                self._webhook.send({"run": self.path.parent.name, **details})
        if self._prometheus is not None:
            counts = recorder.counts if recorder is not None else None
            fates = {} if counts is None else {"written": counts.written, "dropped": counts.dropped}
            if counts is not None:
                fates["failed"] = counts.failed
            self._prometheus.update(frame, alerts.active, fates)

    def on_rollback(self, trainer: Trainer) -> None:
        """Drop the steps that were taken back; alerts stand where the checkpoint had them."""
        if self.recorder is not None:
            self.recorder.forget_after(trainer.step)
            self.recorder.flush()
            self._take_saved()

    def on_end(self, trainer: Trainer) -> None:
        """Write what is left."""
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None
        if self._webhook is not None:
            self._webhook.close()
            self._webhook = None
        if self._prometheus is not None:
            self._prometheus.close()
            self._prometheus = None

    def state_dict(self) -> dict[str, Any]:
        """Where the alerts stand after the last step."""
        if self.alerts is None:
            return self._saved
        if self.recorder is not None:
            self.recorder.flush(2.0)
        return self.alerts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it for `on_start` or `on_rollback`."""
        self._saved = state

    def _take_saved(self) -> None:
        if self.alerts is not None and self._saved:
            try:
                self.alerts.load_state_dict(self._saved)
            except ValueError as error:
                logger.warning("alerts begin afresh: %s", error)
            self._saved = {}


def _signals(balancer: Any) -> Signals:
    """What a policy that is served from elsewhere says of its controller."""
    status = getattr(unchecked(balancer), "status", None)
    status = status() if callable(status) else status
    return Signals(stale_steps=int(getattr(status, "missed", 0)))


def hint_to_record(trainer: Trainer) -> bool:
    """Say once that quantiles should be watched when a layer has many experts and nothing records them; whether so."""
    stats = trainer.router_stats
    many = stats is not None and bool(stats.layers) and stats.experts > WATCHED_EXPERTS
    if not many or any(isinstance(one, RecordBalance) for one in trainer.callbacks):
        return False
    assert stats is not None
    logger.warning(
        "%d experts a layer and no recorder: averages hide dead and crowded experts; watch the quantiles of their load "
        "(recorder = true, or the callback RecordBalance)",
        stats.experts,
    )
    return True
