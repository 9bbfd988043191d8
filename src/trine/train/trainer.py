"""One step after another: accumulate, check, clip, update, balance, record; where text comes from is not known here."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trine._log import logger
from trine.balance import BalancePolicy, RankMismatch, Window
from trine.data import IGNORE_INDEX, Batch
from trine.model import Model
from trine.ops._errors import check_errors
from trine.ops.router import RouterStats
from trine.train import checkpoint
from trine.train.callbacks import Callback, hint_to_record
from trine.train.config import OptimizerConfig, share_text
from trine.train.errors import Interrupted, NumericStop, RunError
from trine.train.metrics import StepRecord, bits_per_byte, load_figures
from trine.train.optimizers import Optimizers, first_non_finite
from trine.train.qk_clip import qk_clip, watch_heads
from trine.train.random_state import random_state, set_random_state
from trine.train.run_folder import RunFolder
from trine.train.schedule import Plan, Schedule, StageSpan
from trine.train.workers import Workers
from trine.train.writer import Writer

NON_FINITE_LIMIT = 3  # steps in a row without an update that end a run
REHEARSED_TWICE = 3.0  # seconds below which a rehearsal is repeated: the first round also fills caches

Batches = Callable[[StageSpan, int], Sequence[Batch]]
"""(stage, step inside the stage, from 0) -> the micro-batches of that step: a pure function."""


class _Stop(Exception):
    """A signal was seen between two micro-batches."""


class Trainer:
    """Trains a model along a plan.

    The objective of a step is the weighted sum of token losses over all its micro-batches divided by the step's sum of
    weights, so cutting a step into other micro-batches changes nothing beyond rounding. A step without any supervised
    token changes nothing. When the loss or a gradient is not finite the update is not applied and the router bias
    stays; the step counts as done, and `NON_FINITE_LIMIT` of them in a row stop the run.

    A checkpoint is always that of the last whole step. Saved inside an accumulation window it holds the state at the
    window's beginning, router statistics and random numbers included: the window is run again.

    Args:
        model: ``model.loss(batch) -> (loss_sum, weight_sum)``; if it has ``router_stats`` they are read and reset, if
            it has ``recompute`` the stage sets it. Already in its final dtype and on its device.
        plan: all steps of the run.
        batches: see `Batches`.
        optimizer: rates and constants.
        balancer: what updates the router bias (`trine.balance.install_policy`); None leaves it.
        folder: where to save and report; None keeps nothing.
        callbacks: see `Callback`.
        keep: newest checkpoints that are kept.
        identity: stored in checkpoints (hashes of configuration and data); a checkpoint with another one is refused.
        workers: micro-batches computed at the same time, each by one thread (float32 models on a CPU).
        background: write checkpoints in a thread while training goes on; a save that fails is told at the next step.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        batches: Batches,
        optimizer: OptimizerConfig | None = None,
        *,
        balancer: BalancePolicy | None = None,
        folder: RunFolder | None = None,
        callbacks: Sequence[Callback] = (),
        keep: int = 2,
        identity: Mapping[str, str] | None = None,
        workers: int = 1,
        background: bool = False,
    ) -> None:
        names = [callback.name for callback in callbacks]
        if len(set(names)) != len(names):
            raise ValueError(f"callbacks: found the names {names}, need each name once")
        self.model: Any = model
        self.plan, self.balancer = plan, balancer
        self.config = optimizer or OptimizerConfig()
        self.folder, self.callbacks, self.keep = folder, list(callbacks), keep
        self.identity = dict(identity or {})
        self.optimizers = Optimizers(model, self.config)
        self.schedule = Schedule(plan.tokens, int(plan.tokens * self.config.warmup), self.config.final)
        self.step = 0  # whole steps done
        self.non_finite_in_row = 0
        self.left_out: dict[int, list[int]] = {}  # stage -> steps of its data that a rollback has left out
        self.rollbacks = 0
        self.window: Window | None = None  # what the routers saw in the last step; None without MoE layers
        self._batches = batches
        self._writer = Writer(folder.checkpoints, keep) if folder is not None and background else None
        watch_heads(model, self.config.qk_clip)
        self._device = next(model.parameters()).device
        parallel = workers > 1 and self._device.type == "cpu" and not self.optimizers.has_masters
        self._workers = Workers(model, workers) if parallel and isinstance(model, Model) else None
        self._signal: int | None = None
        self._window_start: dict[str, Any] | None = None  # router statistics and random numbers at its beginning

    # -- the router's statistics -------------------------------------------------------------------------------------

    @property
    def router_stats(self) -> RouterStats | None:
        """The model's, when it has MoE layers."""
        return getattr(self.model, "router_stats", None)

    # -- one step ----------------------------------------------------------------------------------------------------

    def train_step(self) -> StepRecord:
        """Run the next step of the plan.

        Raises:
            NumericStop: the third step in a row without a finite loss and gradient.
            ValueError: the plan is done.
        """
        began = time.perf_counter()
        span = self.plan.at(self.step)
        if hasattr(self.model, "recompute"):
            self.model.recompute = span.stage.recompute
        self.model.train()
        self._take_saved()
        batches = self._batches(span, self.data_step(self.step))
        before, step_tokens = self.plan.tokens_before(self.step), sum(batch.tokens_T.numel() for batch in batches)
        self.optimizers.set_factor(self.schedule.factor(before, span.stage.step_tokens))
        weight = sum(supervised_weight(batch) for batch in batches)
        self._window_start = self._volatile_state()
        for observer in self._observers():
            observer.zero_()
        losses = self._accumulate(batches, weight)
        loss_sum, norm = _read(losses, self.optimizers.grad_norm())
        check_errors(self._device)  # what kernels found wrong with values they were given; free after the read above
        finite = math.isfinite(loss_sum) and math.isfinite(norm)
        updated, clipped = finite and weight > 0, []
        if updated:
            self.optimizers.clip(norm, self.config.clip)
            self.optimizers.step()
            clipped = qk_clip(self.model, self.optimizers)
        elif finite:
            self.event("no_supervised_token", step=self.step + 1)
        else:
            self.event("non_finite", step=self.step + 1, tensor=self._first_bad(losses))
        if clipped:
            self.event("qk_clip", step=self.step + 1, heads=[asdict(one) for one in clipped])
        max_vio, dead, percentiles = load_figures(self._close_window(updated))
        self.optimizers.zero_grad()
        self._window_start = None
        self.step += 1
        self.non_finite_in_row = 0 if finite else self.non_finite_in_row + 1
        seconds = time.perf_counter() - began
        return StepRecord(
            step=self.step,
            stage=span.index,
            tokens=self.plan.tokens_before(self.step),
            loss=loss_sum / weight if weight > 0 else 0.0,
            bits_per_byte=bits_per_byte(loss_sum, sum(batch.supervised_bytes for batch in batches)),
            lr=self.optimizers.lr,
            grad_norm=norm,
            tokens_per_s=step_tokens / seconds,
            max_vio=max_vio,
            dead_experts=dead,
            seconds=seconds,
            load_percentiles=percentiles,
            updated=updated,
            mtp_loss=_mtp_loss(self.model),
            clipped_heads=len(clipped),
        )

    def data_step(self, step: int) -> int:
        """Which step of its stage's data step ``step`` (of the plan, from 0) takes: those left out are passed over."""
        span = self.plan.at(step)
        wanted = step - span.first_step
        for bad in sorted(self.left_out.get(span.index, ())):
            wanted += bad <= wanted
        return wanted

    def _observers(self) -> list[Any]:
        return self.model.observers() if hasattr(self.model, "observers") else []

    def _accumulate(self, batches: Sequence[Batch], weight: float) -> list[Tensor]:
        """Gradients of the step's objective into the optimizers; returns the loss sum of each micro-batch."""
        if self._workers is not None and len(batches) > 1:
            return self._workers.accumulate(batches, weight, self._heed_signals)
        losses = []
        for batch in batches:
            self._heed_signals()
            loss_sum, _ = self.model.loss(batch.to(self._device))
            if weight > 0:
                (loss_sum / weight).backward()
            losses.append(loss_sum.detach().double())
        return losses

    @property
    def side_by_side(self) -> int:
        """Micro-batches that are computed at the same time."""
        return 1 if self._workers is None else self._workers.count

    def rehearse(self, span: StageSpan) -> tuple[float, float]:
        """Time a few micro-batches of a stage and an update at rate 0; the model learns nothing.

        Returns:
            Seconds of as many micro-batches as run side by side (the faster of two rounds where one is short), seconds
            of clipping and of the optimizers' step.
        """
        if hasattr(self.model, "recompute"):
            self.model.recompute = span.stage.recompute
        self.model.train()
        batches = self._batches(span, 0)[: self.side_by_side]
        weight = sum(supervised_weight(batch) for batch in batches)
        self.optimizers.set_factor(0.0)
        rounds: list[float] = []
        while not rounds or (len(rounds) < 2 and rounds[0] < REHEARSED_TWICE):
            self.optimizers.zero_grad()
            began = time.perf_counter()
            self._accumulate(batches, weight)
            self._settle()
            rounds.append(time.perf_counter() - began)
        began = time.perf_counter()
        self.optimizers.clip(float(self.optimizers.grad_norm()), self.config.clip)
        self.optimizers.step()
        self._settle()
        update = time.perf_counter() - began
        self.optimizers.zero_grad()
        if self.router_stats is not None:
            self.router_stats.zero_()
        return min(rounds), update

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _close_window(self, updated: bool) -> Tensor:
        """Let the router bias follow an update, zero the statistics; returns the loads they held, ``[L, E]``.

        Raises:
            RunError: the ranks of the run hold different biases.
        """
        stats = self.router_stats
        if stats is None:
            return torch.zeros(0, 1)
        if updated and self.balancer is not None:
            try:
                self.window = self.balancer.step(stats)
            except RankMismatch as error:
                raise RunError(f"step {self.step + 1}: {error}") from error
        else:
            self.window = Window.of(stats)
            stats.zero_()
        return self.window.loads_LE.cpu()

    def _first_bad(self, losses: Sequence[Tensor]) -> str:
        """Where a non-finite number was first seen: parameters, then losses, then gradients."""
        name = first_non_finite(dict(self.model.named_parameters()))
        if name is not None:
            return f"parameter {name}"
        for index, loss in enumerate(losses):
            if not math.isfinite(float(loss)):
                return f"loss of micro-batch {index}"
        name = first_non_finite(self.optimizers.gradients())
        return "norm of the gradient" if name is None else f"gradient of {name}"

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self, steps: int | None = None) -> StepRecord | None:
        """Train to the end of the plan, or for ``steps`` more steps; saves at the end.

        Returns:
            The last step's record; None when there was nothing left to do.

        Raises:
            Interrupted: SIGINT or SIGTERM came; the last whole step is saved.
            NumericStop: see `train_step`; the state with all good updates is saved. Also when an update has made the
                model's own numbers not finite: then nothing is saved and the checkpoints before stay.
            RunError: the disk is full.
        """
        until = self.plan.steps if steps is None else min(self.plan.steps, self.step + steps)
        record = None
        hint_to_record(self)
        with self._signals():
            for callback in self.callbacks:
                callback.on_start(self)
            try:
                stage = -1
                while self.step < until:
                    span = self.plan.at(self.step)
                    if span.index != stage:
                        self._announce(span, crossed=stage >= 0)
                        stage = span.index
                        for callback in self.callbacks:
                            callback.on_stage(self, span)
                    record = self.train_step()
                    for callback in self.callbacks:
                        callback.on_step(self, record)
                        if self.step != record.step:  # rolled back: this step has not happened
                            stage = -1
                            break
                    if self.non_finite_in_row >= NON_FINITE_LIMIT:
                        self._stop_non_finite()
                self._heed_signals()
                self._save_now()
            except _Stop:
                self.abandon_window()
                self._save_now()
                self.event("interrupted", step=self.step, signal=self._signal)
                raise Interrupted(f"interrupted; step {self.step} of {self.plan.steps} is saved") from None
            finally:
                self._let_writer_end()
                for callback in self.callbacks:
                    callback.on_end(self)
        return record

    def _stop_non_finite(self) -> NoReturn:
        """Save what is good, and end the run."""
        what = f"step {self.step}: loss or gradient not finite {self.non_finite_in_row} steps in a row"
        bad = self._first_bad_state()
        if bad is not None:
            raise NumericStop(f"{what}; {self._unsavable(bad)}")
        self._save_now()
        raise NumericStop(f"{what}; none of them changed the model, and events.jsonl names the tensor")

    def _first_bad_state(self) -> str | None:
        """The first parameter or optimizer state that is not finite, in words."""
        name = first_non_finite(dict(self.model.named_parameters()))
        if name is not None:
            return f"parameter {name}"
        name = first_non_finite(self.optimizers.state_tensors())
        return None if name is None else f"optimizer state {name}"

    def _unsavable(self, bad: str) -> str:
        """Why nothing is saved, and what there is instead."""
        self._take_saved(wait=True)
        folder = None if self.folder is None else self.folder.checkpoints
        path = None if folder is None else checkpoint.newest_valid(folder)[0]
        last = f"the last good checkpoint is {path.name}" if path is not None else "there is no good checkpoint"
        return f"an earlier update made {bad} not finite, so this state is not saved; {last}"

    def _announce(self, span: StageSpan, crossed: bool) -> None:
        """An event for the stage that begins or goes on; at a transition with what changes beside what was."""
        details = _in_words(span)
        if crossed:
            before = self.plan.spans[span.index - 1]
            details |= {"before": _in_words(before), "planned_steps": self.plan.steps}
        self.event("stage", step=self.step + 1, **details)

    def roll_back(self, steps: Sequence[int]) -> Path:
        """Return to the newest valid checkpoint and leave out the batches that ``steps`` were made of.

        Args:
            steps: numbers of steps done, from 1 as in `StepRecord`; those the checkpoint holds are kept.

        Returns:
            The checkpoint.

        Raises:
            RunError: there is none.
        """
        if self.folder is None:
            raise RunError("rollback: this run keeps no checkpoints, need a run folder")
        self._take_saved(wait=True)
        path, state, damaged = checkpoint.newest_valid(self.folder.checkpoints)
        if path is None:
            raise RunError(f"{self.folder.checkpoints}: no valid checkpoint to go back to")
        self._tell_damaged(damaged, [one.name for one in checkpoint.set_aside(damaged)])
        named: dict[int, list[int]] = {}
        for step in steps:
            if step > state["step"]:
                named.setdefault(self.plan.at(step - 1).index, []).append(self.data_step(step - 1))
        left_out = {stage: list(bad) for stage, bad in self.left_out.items()}
        for stage, bad in named.items():
            left_out[stage] = sorted({*left_out.get(stage, ()), *bad})
        rollbacks, at = self.rollbacks + 1, self.step
        self.load(path)
        self.left_out, self.rollbacks = left_out, rollbacks
        batches = [{"stage": stage, "step_of_data": one} for stage, bad in named.items() for one in bad]
        self.event("rollback", step=at, to_step=self.step, checkpoint=path.name, left_out=batches)
        for callback in self.callbacks:
            callback.on_rollback(self)
        return path

    def abandon_window(self) -> None:
        """Go back to the beginning of an accumulation window that was left half-way."""
        self.optimizers.zero_grad()
        if self._window_start is not None:
            window, self._window_start = self._window_start, None
            self._restore_volatile(window)

    def event(self, kind: str, **details: Any) -> None:
        """Log, and append to the run's events."""
        logger.info("%s %s", kind, details)
        if self.folder is not None:
            self.folder.event(kind, **details)

    def _heed_signals(self) -> None:
        if self._signal is not None:
            raise _Stop

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the running micro-batch; a second one falls to the old handler."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signal = number
            signal.signal(number, old[number])

        self._signal = None
        old: dict[int, Any] = {}
        try:
            for one in (signal.SIGINT, signal.SIGTERM):
                old[one] = signal.signal(one, note)
        except ValueError:  # only the main thread may set handlers; elsewhere signals are not ours to handle
            pass
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    # -- state -------------------------------------------------------------------------------------------------------

    def _volatile_state(self) -> dict[str, Any]:
        """What an accumulation window changes before it ends: statistics and random numbers, as copies."""
        stats = self.router_stats
        return {"router": {} if stats is None else dict(stats.state_dict()), "rng": random_state()}

    def _restore_volatile(self, state: Mapping[str, Any]) -> None:
        if self.router_stats is not None:
            self.router_stats.load_state_dict(state["router"])
        set_random_state(state["rng"])

    def save(self) -> Path | None:
        """Write the checkpoint of the last whole step and remove old ones; None without a folder.

        In the background only a copy is made here: the path returned is that of the checkpoint to be.

        Raises:
            RunError: the disk is full; older checkpoints are intact.
            NumericStop: a parameter or an optimizer's state is not finite; nothing is written, nothing removed.
        """
        if self.folder is None:
            return None
        self._take_saved(wait=True)
        bad = self._first_bad_state()
        if bad is not None:
            self.event("non_finite", step=self.step, tensor=bad)
            raise NumericStop(f"step {self.step}: {self._unsavable(bad)}")
        volatile = self._window_start or self._volatile_state()
        balancer = {} if self.balancer is None else self.balancer.state_dict()
        other = {f"router/{name}": tensor for name, tensor in volatile["router"].items()}
        other |= {f"balancer/{name}": value for name, value in balancer.items() if isinstance(value, Tensor)}
        other |= {f"optimizer/{name}": tensor for name, tensor in self.optimizers.state_tensors().items()}
        state = {
            "tokens": self.plan.tokens_before(self.step),
            "planned_tokens": self.plan.tokens,
            "planned_steps": self.plan.steps,
            "stage": self.plan.at(min(self.step, self.plan.steps - 1)).index,
            "non_finite_in_row": self.non_finite_in_row,
            "left_out": {str(stage): bad for stage, bad in self.left_out.items()},
            "rollbacks": self.rollbacks,
            "identity": self.identity,
            "rng": volatile["rng"],
            "balancer": {name: value for name, value in balancer.items() if not isinstance(value, Tensor)},
            "callbacks": {callback.name: callback.state_dict() for callback in self.callbacks},
        }
        tensors = {"model": self.model.state_dict(), "optimizer": other}
        if self._writer is not None:
            self._writer.save(self.step, tensors, state)
            return self.folder.checkpoints / checkpoint.checkpoint_name(self.step)
        path = checkpoint.save_checkpoint(self.folder.checkpoints, self.step, tensors, state)
        checkpoint.prune(self.folder.checkpoints, self.keep, path)
        self._tell_saved(path)
        return path

    def _save_now(self) -> None:
        self.save()
        self._take_saved(wait=True)

    def _take_saved(self, wait: bool = False) -> None:
        """Tell the callbacks of a checkpoint that was written meanwhile; raises RunError if it could not be."""
        path = self._writer.finished(wait) if self._writer is not None else None
        if path is not None:
            self._tell_saved(path)

    def _tell_saved(self, path: Path) -> None:
        for callback in self.callbacks:
            callback.on_save(self, path)

    def _let_writer_end(self) -> None:
        """Whatever ended the run, the folder is given back only when nobody writes in it any more."""
        if self._writer is not None:
            try:
                self._writer.finished(wait=True)
            except RunError as error:
                logger.warning("%s", error)

    def resume(self) -> Path | None:
        """Restore the newest valid checkpoint of the folder; damaged ones are passed over, each with an event.

        Returns:
            The checkpoint, or None when the run has none yet (it then begins at step 0).

        Raises:
            RunError: every checkpoint is damaged, one is of a newer format or of another plan, model or data.
        """
        if self.folder is None:
            raise ValueError("folder: found None, need a run folder to resume from")
        path, _, damaged = checkpoint.newest_valid(self.folder.checkpoints)
        if path is None:
            self._tell_damaged(damaged)
            if damaged:
                raise RunError(f"{self.folder.checkpoints}: no valid checkpoint; {damaged[0].reason}")
            return None
        self.load(path)
        # Only now: a checkpoint that does not fit this run changes nothing on disk.
        self._tell_damaged(damaged, [one.name for one in checkpoint.set_aside(damaged)])
        return path

    def _tell_damaged(self, damaged: Sequence[checkpoint.Damaged], names: Sequence[str | None] = ()) -> None:
        for one, name in zip_longest(damaged, names):
            logger.warning("%s; passed over", one.reason)
            self.event("damaged_checkpoint", path=one.path.name, reason=one.reason, renamed=name)

    def load(self, path: Path) -> None:
        """Restore one checkpoint.

        Raises:
            RunError: it is damaged, or of another plan, model or data; the message names what differs.
        """
        state = checkpoint.read_state(path)
        here = {**self.identity, "planned_tokens": self.plan.tokens, "planned_steps": self.plan.steps}
        there = {
            **state["identity"],
            "planned_tokens": state["planned_tokens"],
            "planned_steps": state["planned_steps"],
        }
        for key in sorted(here.keys() | there.keys()):
            if here.get(key) != there.get(key):
                raise RunError(f"checkpoint {path}: {key}: found {there.get(key)}, this run has {here.get(key)}")
        tensors = checkpoint.read_tensors(path, "optimizer")

        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}

        checkpoint.load_model_state(self.model, path)
        self.optimizers.load_state_tensors(under("optimizer/"))
        try:
            self._restore_volatile({"router": under("router/"), "rng": state["rng"]})
            if self.balancer is not None:
                self.balancer.load_state_dict({**state["balancer"], **under("balancer/")})
        except (ValueError, KeyError) as error:
            raise checkpoint.CheckpointError(f"checkpoint {path}: {error}") from error
        for callback in self.callbacks:
            if callback.name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.name])
        self.step, self.non_finite_in_row = state["step"], state["non_finite_in_row"]
        self.left_out = {int(stage): list(bad) for stage, bad in state.get("left_out", {}).items()}
        self.rollbacks = state.get("rollbacks", 0)


def supervised_weight(batch: Batch) -> float:
    """Sum of the weights of a micro-batch's targets: its part of the divisor of the step's objective."""
    return float(batch.weights_T[batch.targets_T != IGNORE_INDEX].sum(dtype=torch.float64))


def _in_words(span: StageSpan) -> dict[str, Any]:
    stage = span.stage
    return {
        "stage": span.index,
        "length": stage.length,
        "step_tokens": stage.step_tokens,
        "recompute": stage.recompute,
        "mixture": [share_text(one) for one in stage.mixture],
    }


def _mtp_loss(model: Any) -> float | None:
    """Nats a token of the MTP layer in this step; None without one."""
    layer = getattr(model, "mtp", None)
    if layer is None or not layer.weight:
        return None
    loss, weight = layer.seen.sums_2.tolist()
    return loss / weight if weight else None


def _read(losses: Sequence[Tensor], norm: Tensor) -> tuple[float, float]:
    """(sum of losses, norm) with one transfer from the device."""
    values = torch.stack([*losses, norm.to(losses[0].device) if losses else norm]).tolist()
    return math.fsum(values[:-1]) if all(map(math.isfinite, values[:-1])) else math.nan, values[-1]
