"""A whole run, from its configuration to its evaluation: `train` is what `trine train` calls."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trine._log import logger
from trine.balance import close_policy, install_policy
from trine.balance.alerts import rules_for
from trine.balance.exporters import check_port, check_webhook
from trine.balance.service import check_service
from trine.config import to_dict
from trine.data import Batch, DataError, Shards, prepare
from trine.data._files import write_atomically
from trine.data.generated import RECALL, RecallRows, open_recall
from trine.data.mixture import MixturePlan
from trine.model import Model
from trine.train import machine
from trine.train.callbacks import Callback, RecordBalance, SaveEvery, WriteMetrics
from trine.train.config import Stage, TrainConfig, config_hash, first_difference, train_to_dict
from trine.train.errors import Interrupted, RunError, no_run
from trine.train.finish import evaluate, short_measure, store_evaluation, write
from trine.train.guard import ShortGuard
from trine.train.probes import Probes, ProbeText, probe_text
from trine.train.progress import ShowProgress
from trine.train.run_data import sources_of
from trine.train.run_folder import RunFolder, read_json
from trine.train.schedule import Plan, StageSpan, lay_out
from trine.train.spikes import SpikeGuard
from trine.train.stored import resume_command, run_path, stored_config, stored_tokenizer
from trine.train.tensorboard import TensorBoard
from trine.train.trainer import Batches, Trainer

if TYPE_CHECKING:
    from rich.console import Console

SPARE_STEPS = 32  # of rows beyond a stage's own, more than rollbacks can leave out


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    folder: Path
    steps: int
    tokens: int
    seconds: float  # of training in this process
    loss: float | None  # of the last step, nats a token; None when there was nothing left to train
    evaluation: dict[str, Any] | None  # what ``eval.json`` holds
    sample: str | None  # what ``sample.txt`` holds
    peak_memory_bytes: int | None
    warnings: tuple[str, ...] = ()


def train(config: TrainConfig, console: Console | None = None, callbacks: Sequence[Callback] = ()) -> RunSummary:
    """Train a model as ``config`` says, evaluate it, and leave everything in the run's folder.

    Args:
        config: the run.
        console: where progress is shown; None shows nothing.
        callbacks: called after the built-in ones.

    Raises:
        RunError: exit code 1: the folder is in use or holds another run, a damaged checkpoint, a full disk.
        NumericStop: exit code 3.
        Interrupted: exit code 130; everything up to the last whole step is saved, the message says how to go on.
        ValueError: a value that cannot work, or no data (`trine.data.DataError`).
    """
    settings = machine.prepare_machine(config.threads)
    device = choose_device(config.device)
    path = run_path(config)

    def say(line: str) -> None:
        if console is not None:  # a log keeps a line a line
            console.print(line, soft_wrap=not console.is_terminal)

    with RunFolder(path) as folder:
        _check_folder(config, folder)
        _check_outside(config)
        say(f"run {path}")
        began = time.perf_counter()
        shards = open_data(config, path / "data")
        say(f"data: {_in_words(shards)}, ready in {time.perf_counter() - began:.0f} s")
        measured = config.eval.run and shards.select("held_out").size > 0
        if config.eval.run and not measured:
            say("[yellow]warning:[/] nothing is held out, so the model will not be measured at the end")
        plan = lay_out(config.stages, config.tokens)
        if plan.tokens != config.tokens:
            say(f"tokens: {config.tokens:,} asked for, {plan.tokens:,} in whole steps")
        if config.data.source == RECALL:
            batches = recall_batches(config, plan, shards)
        else:
            plans = stage_plans(config, plan, shards)
            for line in (line for rows in plans for line in rows.report().warnings):
                say(f"[yellow]warning:[/] {line}")
            batches = stored_batches(plans)
        text = probe_text(shards, lambda: batches(plan.spans[0], 0)[0]) if config.probe_every else None
        model = build_model(config, device)
        policy = install_policy(model, config.balance)
        trainer = Trainer(
            *(model, plan, batches, config.optimizer),
            balancer=policy,
            folder=folder,
            callbacks=[*_callbacks(config, path, console, text, callbacks), *_short_guard(plan, shards)],
            keep=config.keep,
            identity={"config": config_hash(config), "data": shards.hash},
            workers=settings["threads"],
            background=config.background_save,
        )
        if config.resume:
            resumed = trainer.resume()
            folder.event("resume", checkpoint=resumed.name if resumed else None, step=trainer.step, **settings)
            left = "" if trainer.step < plan.steps else ": nothing left to train"
            say(f"resumed at step {trainer.step} of {plan.steps}{left}")
            restore_tokenizer(path, shards)
        else:
            # The record comes last: a folder with one is a run that can be resumed.
            shards.tokenizer.save(path / "tokenizer.json")
            folder.write_json("run.json", _record(config, plan, shards, settings))
        warning = machine.busy_warning() if trainer.step < plan.steps else None
        if warning and console is not None:
            say(f"[yellow]warning:[/] {warning}")
        elif warning:
            logger.warning(warning)
        began = time.perf_counter()
        try:
            last = trainer.run()
        except Interrupted as error:
            raise Interrupted(f"{error}; go on with: {resume_command(config, path.name)}") from None
        finally:
            close_policy(policy)
        seconds = time.perf_counter() - began
        evaluation, sample = None, None
        if measured:
            say("evaluating on held-out documents and tasks")
            stages = [stage.length for stage in config.stages]
            evaluation = evaluate(
                model, shards, config.eval, threads=settings["threads"], stages=stages, console=console
            )
            store_evaluation(path, trainer.step, evaluation)
        if config.eval.run and config.eval.sample_tokens:
            sample = write(model, shards.tokenizer, config.eval.prompt, config.eval.sample_tokens, config.seed)
            folder.write_text("sample.txt", sample + "\n")
        folder.event("done", step=trainer.step, seconds=round(seconds, 1))
        return RunSummary(
            folder=path,
            steps=trainer.step,
            tokens=plan.tokens_before(trainer.step),
            seconds=seconds,
            loss=None if last is None else last.loss,
            evaluation=evaluation,
            sample=sample,
            peak_memory_bytes=machine.peak_memory_bytes(),
            warnings=(warning,) if warning else (),
        )


def _check_folder(config: TrainConfig, folder: RunFolder) -> None:
    """Refuse to overwrite a run, to resume none, and to resume one that was planned otherwise."""
    if not config.resume:
        if folder.has_run:
            raise RunError(
                f"{folder.path}: holds a run already; add --resume to go on with it, or choose another --run"
            )
        return
    if not folder.has_run:
        raise no_run(folder.path, folder.path.parent)
    difference = first_difference(config, stored_config(folder.path))
    if difference is not None:
        raise RunError(f"{folder.path}: cannot resume with another plan: {difference}; start a new run for it")


def open_data(config: TrainConfig, folder: Path) -> Shards:
    """The data of a run in ``folder``, made there when it is not.

    A run that is resumed takes what is there: its sources may be elsewhere by now, or named from another folder.

    Raises:
        DataError: no data, or other data in the folder.
    """
    if config.data.source == RECALL:
        return open_recall(folder)
    if config.resume and (folder / "manifest.json").exists():
        return _own_data(folder)
    return prepare(folder, sources_of(config.data), config.model_config().vocab_size, config.data.held_out_one_in)


def _own_data(folder: Path) -> Shards:
    """The shards beside a run's record, which names them by their hash."""
    shards = Shards.open(folder)
    wanted = read_json(folder.parent / "run.json").get("data", {}).get("hash")
    if wanted is not None and shards.hash != wanted:
        raise DataError(f"shards {folder}: not the data that this run began with (its hash was {wanted[:16]})")
    return shards


def restore_tokenizer(path: Path, shards: Shards) -> None:
    """Put a run's ``tokenizer.json`` back from its data where it is missing.

    Raises:
        DataError: it is there, but not the run's.
    """
    if not (path / "tokenizer.json").exists():
        write_atomically(path / "tokenizer.json", (Path(shards.folder) / "tokenizer.json").read_bytes())
    stored_tokenizer(path, read_json(path / "run.json"))


def build_model(config: TrainConfig, device: torch.device) -> Model:
    """The untrained model of a run, in its precision, on its device."""
    torch.manual_seed(config.seed)
    model = Model(config.model_config())
    if config.precision == "bf16":
        model.to(torch.bfloat16)
    if model.mtp is not None:
        model.mtp.weight = config.mtp
    return model.to(device)


def stage_plans(config: TrainConfig, plan: Plan, shards: Shards) -> list[MixturePlan]:
    """The rows of each stage; what a stage has read is read again by later ones only when all else is used up.

    Raises:
        DataError: a mixture that names no source or document, or a source that would be read too often.
    """
    plans: list[MixturePlan] = []
    for span in plan:
        plans.append(
            _rows(
                *(shards, span.stage, plans),
                steps=span.steps,
                seed=config.seed,
                number=span.index,
                allow_repeats=config.allow_repeats,
            )
        )
    return plans


def _rows(
    shards: Shards,
    stage: Stage,
    before: Sequence[MixturePlan],
    *,
    steps: int,
    seed: int,
    number: int,
    allow_repeats: bool,
) -> MixturePlan:
    return MixturePlan(
        shards,
        stage.mixture,
        row_length=stage.length,
        tokens_per_step=stage.step_tokens,
        micro_batch_tokens=stage.micro_tokens,
        steps=steps,
        seed=seed,
        stage=number,
        before=tuple(before),
        allow_repeats=allow_repeats,
    )


def stored_batches(plans: Sequence[MixturePlan]) -> Batches:
    """The trainer's source of batches: a stage's rows and, where a rollback has left some out, as many more.

    The rows more are those a stage of the last mixture would read next.
    """
    more: dict[int, MixturePlan] = {}

    def batches(span: StageSpan, step: int) -> Sequence[Batch]:
        if step < span.steps:
            return plans[span.index].micro_batches(step)
        if span.index not in more:
            last = [
                replace(one, weight=one.weight if one.end is None else one.end, end=None)
                for one in span.stage.mixture
                if one.end != 0
            ]
            stage = replace(span.stage, mixture=tuple(last))
            own = plans[span.index]
            more[span.index] = _rows(
                *(own.shards, stage, plans[: span.index + 1]),
                steps=SPARE_STEPS,
                seed=own.seed,
                number=len(plans) + span.index,
                allow_repeats=True,
            )
        return more[span.index].micro_batches(step - span.steps)

    return batches


def recall_batches(config: TrainConfig, plan: Plan, shards: Shards) -> Batches:
    """The trainer's source of batches for symbol-level recall: made while they are read, as many as are asked for."""
    rows = [
        RecallRows(
            *(shards.tokenizer, span.stage.length, span.stage.step_tokens, span.stage.micro_tokens, config.seed),
            stage=span.index,
            shorter=tuple(dict.fromkeys(earlier.stage.length for earlier in plan.spans[: span.index])),
        )
        for span in plan
    ]

    def batches(span: StageSpan, step: int) -> Sequence[Batch]:
        return rows[span.index].micro_batches(step)

    return batches


def _short_guard(plan: Plan, shards: Shards) -> list[Callback]:
    """What watches the shortest length while others are trained, when there is something held out to measure on."""
    if len(plan.spans) < 2 or not shards.select("held_out").size:
        return []
    length = min(span.stage.length for span in plan)
    return [ShortGuard(*short_measure(shards, length), length)]


def choose_device(wanted: str) -> torch.device:
    """Where a run computes: ``auto``, ``cpu`` or ``cuda``; auto takes a card when torch sees one.

    Raises:
        RunError: a card is asked for and not there.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RunError("device: found 'cuda', but torch sees no CUDA card; `trine doctor` says why")
    use = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if use else "cpu")


def _check_outside(config: TrainConfig) -> None:
    """Refuse now what could not be reached once the data are made, which takes a while.

    Raises:
        RunError: an address or a port that cannot be had.
        trine.balance.service_protocol.ServiceError: no balancing service at its address, or another key.
    """
    if os.environ.get("RANK", "0") != "0":  # the first of several processes alone is going to use them
        return
    webhook = os.environ.get("TRINE_WEBHOOK", "")
    try:
        if config.recorder and webhook:
            check_webhook(webhook)
    except ValueError as error:
        raise RunError(f"TRINE_WEBHOOK: {error}") from error
    try:
        if config.recorder and config.prometheus:
            check_port(config.prometheus)
        check_service(config.balance.service)
    except ValueError as error:
        raise RunError(str(error)) from error


def _callbacks(
    config: TrainConfig, path: Path, console: Console | None, text: ProbeText | None, more: Sequence[Callback]
) -> list[Callback]:
    shown: list[Callback] = [ShowProgress(console)] if console is not None else []
    board = TensorBoard(path / "tensorboard") if config.tensorboard else None
    if board is not None:
        shown.append(board)
    if text is not None:
        shown.append(Probes(path, config.probe_every, text, [] if board is None else [board.probe]))
    if config.recorder:
        webhook = os.environ.get("TRINE_WEBHOOK", "")  # not in the configuration: such addresses often are secrets
        top_k, port = config.model_config().top_k, config.prometheus
        rules = rules_for(config.balance.score_domain)
        shown.append(RecordBalance(path, top_k, rules=rules, webhook=webhook, prometheus=port))
    # A spike is looked at before its step could be saved.
    guard = SpikeGuard(rollback=config.on_spike == "rollback")
    return [WriteMetrics(), *shown, guard, SaveEvery(config.checkpoint_every), *more]


def _in_words(shards: Shards) -> str:
    train, held_out = ([shards.documents[i] for i in shards.select(split).tolist()] for split in ("train", "held_out"))
    size = sum(document.bytes for document in train) / 1e6
    tokens = sum(document.tokens for document in train) / 1e6
    return f"{len(train)} documents, {size:.1f} MB, {tokens:.2f} M tokens; {len(held_out)} held out"


def _record(config: TrainConfig, plan: Plan, shards: Shards, settings: dict[str, Any]) -> dict[str, Any]:
    """``run.json``: everything that is needed to do the run again."""
    return {
        "config": train_to_dict(config),
        "model": to_dict(config.model_config()),
        "config_hash": config_hash(config),
        "plan": [{"stage": asdict(span.stage), "steps": span.steps, "first_step": span.first_step} for span in plan],
        "planned_steps": plan.steps,
        "planned_tokens": plan.tokens,
        "seed": config.seed,
        "command": sys.argv,
        "git_commit": _git_commit(),
        "versions": machine.versions(),
        "hardware": machine.hardware(),
        **settings,
        "data": {
            "hash": shards.hash,
            "tokenizer": shards.tokenizer.sha256,
            "held_out": int(shards.select("held_out").size),
            "sources": list(shards.sources),
            "licences": list(shards.licences),
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _git_commit() -> str | None:
    """Commit of the checkout this package runs from; None when it is installed otherwise."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
