"""One step after another: accumulate, check, clip, update, balance, record; where text comes from is not known here."""

from __future__ import annotations

import base64
import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trine._log import logger
from trine.balance import BalancePolicy, WindowLoads
from trine.data import IGNORE_INDEX, Batch
from trine.model import Model
from trine.ops.router import RouterStats
from trine.train import checkpoint
from trine.train.callbacks import Callback
from trine.train.config import OptimizerConfig
from trine.train.errors import Interrupted, NumericStop, RunError
from trine.train.metrics import StepRecord, bits_per_byte, load_figures
from trine.train.optimizers import Optimizers, first_non_finite
from trine.train.run_folder import RunFolder
from trine.train.schedule import Plan, Schedule, StageSpan
from trine.train.workers import Workers

NON_FINITE_LIMIT = 3  # steps in a row without an update that end a run

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
        balancer: what updates the router bias; None leaves it.
        folder: where to save and report; None keeps nothing.
        callbacks: see `Callback`.
        keep: newest checkpoints that are kept.
        identity: stored in checkpoints (hashes of configuration and data); a checkpoint with another one is refused.
        workers: micro-batches computed at the same time, each by one thread (float32 models on a CPU).
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
        self._batches = batches
        self._device = next(model.parameters()).device
        self._workers: Workers | None = None
        parallel = workers > 1 and self._device.type == "cpu" and not self.optimizers.has_masters
        if parallel and isinstance(model, Model):
            self._workers = Workers(model, workers)
        self._signal: int | None = None
        self._window: dict[str, Any] | None = None  # router statistics and random numbers at the window's beginning

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
        batches = self._batches(span, self.step - span.first_step)
        before, step_tokens = self.plan.tokens_before(self.step), sum(batch.tokens_T.numel() for batch in batches)
        self.optimizers.set_factor(self.schedule.factor(before, span.stage.step_tokens))
        weight = sum(supervised_weight(batch) for batch in batches)
        self._window = self._volatile_state()
        losses = self._accumulate(batches, weight)
        loss_sum, norm = _read(losses, self.optimizers.grad_norm())
        finite = math.isfinite(loss_sum) and math.isfinite(norm)
        updated = finite and weight > 0
        if updated:
            self.optimizers.clip(norm, self.config.clip)
            self.optimizers.step()
        elif finite:
            self._event("no_supervised_token", step=self.step + 1)
        else:
            self._event("non_finite", step=self.step + 1, tensor=self._first_bad(losses))
        max_vio, dead, percentiles = load_figures(self._close_window(updated))
        self.optimizers.zero_grad()
        self._window = None
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
        )

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

    def _close_window(self, updated: bool) -> Tensor:
        """Let the router bias follow an update, zero the statistics; returns the loads they held, ``[L, E]``."""
        stats = self.router_stats
        if stats is None:
            return torch.zeros(0, 1)
        if updated and self.balancer is not None:
            return self.balancer.step(stats).loads_LE.cpu()
        loads_LE = WindowLoads.of(stats).loads_LE.cpu()
        stats.zero_()
        return loads_LE

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
            NumericStop: see `train_step`; the state with all good updates is saved.
            RunError: the disk is full.
        """
        until = self.plan.steps if steps is None else min(self.plan.steps, self.step + steps)
        record = None
        with self._signals():
            for callback in self.callbacks:
                callback.on_start(self)
            try:
                stage = -1
                while self.step < until:
                    span = self.plan.at(self.step)
                    if span.index != stage:
                        stage = span.index
                        self._event("stage", step=self.step + 1, stage=stage, length=span.stage.length)
                        for callback in self.callbacks:
                            callback.on_stage(self, span)
                    record = self.train_step()
                    for callback in self.callbacks:
                        callback.on_step(self, record)
                    if self.non_finite_in_row >= NON_FINITE_LIMIT:
                        self.save()
                        raise NumericStop(
                            f"step {self.step}: loss or gradient not finite {self.non_finite_in_row} steps in a row; "
                            "none of them changed the model, and events.jsonl names the tensor"
                        )
                self._heed_signals()
                self.save()
            except _Stop:
                self.abandon_window()
                self.save()
                self._event("interrupted", step=self.step, signal=self._signal)
                raise Interrupted(f"interrupted; step {self.step} of {self.plan.steps} is saved") from None
            finally:
                for callback in self.callbacks:
                    callback.on_end(self)
        return record

    def abandon_window(self) -> None:
        """Go back to the beginning of an accumulation window that was left half-way."""
        self.optimizers.zero_grad()
        if self._window is not None:
            window, self._window = self._window, None
            self._restore_volatile(window)

    def _event(self, kind: str, **details: Any) -> None:
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
        return {"router": {} if stats is None else dict(stats.state_dict()), "rng": _random_state()}

    def _restore_volatile(self, state: Mapping[str, Any]) -> None:
        if self.router_stats is not None:
            self.router_stats.load_state_dict(state["router"])
        _set_random_state(state["rng"])

    def save(self) -> Path | None:
        """Write the checkpoint of the last whole step and remove old ones; None without a folder.

        Raises:
            RunError: the disk is full; older checkpoints are intact.
        """
        if self.folder is None:
            return None
        volatile = self._window or self._volatile_state()
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
            "identity": self.identity,
            "rng": volatile["rng"],
            "balancer": {name: value for name, value in balancer.items() if not isinstance(value, Tensor)},
            "callbacks": {callback.name: callback.state_dict() for callback in self.callbacks},
        }
        tensors = {"model": self.model.state_dict(), "optimizer": other}
        path = checkpoint.save_checkpoint(self.folder.checkpoints, self.step, tensors, state)
        checkpoint.prune(self.folder.checkpoints, self.keep)
        for callback in self.callbacks:
            callback.on_save(self, path)
        return path

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
        for one in damaged:
            logger.warning("%s; passed over", one.reason)
            self._event("damaged_checkpoint", path=one.path.name, reason=one.reason)
        if path is None:
            if damaged:
                raise RunError(f"{self.folder.checkpoints}: no valid checkpoint; {damaged[0].reason}")
            return None
        self.load(path)
        return path

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


def supervised_weight(batch: Batch) -> float:
    """Sum of the weights of a micro-batch's targets: its part of the divisor of the step's objective."""
    return float(batch.weights_T[batch.targets_T != IGNORE_INDEX].sum(dtype=torch.float64))


def _read(losses: Sequence[Tensor], norm: Tensor) -> tuple[float, float]:
    """(sum of losses, norm) with one transfer from the device."""
    values = torch.stack([*losses, norm.to(losses[0].device) if losses else norm]).tolist()
    return math.fsum(values[:-1]) if all(map(math.isfinite, values[:-1])) else math.nan, values[-1]


def _random_state() -> dict[str, Any]:
    """The generators a model or callback could draw from, JSON-ready."""

    def text(tensor: Tensor) -> str:
        return base64.b64encode(tensor.cpu().numpy().tobytes()).decode()

    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    return {
        "torch": text(torch.get_rng_state()),
        "cuda": [text(one) for one in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    def tensor(text: str) -> Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

    torch.set_rng_state(tensor(state["torch"]))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([tensor(one) for one in state["cuda"]])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))
