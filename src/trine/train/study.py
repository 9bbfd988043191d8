"""`trine study curriculum`: does it pay to train short before long, and to change the data with the length?

Three arms see the same number of tokens in steps of the same size, and differ in nothing else but what the name says:
`staged-mixture` (short rows first, and each longer stage draws a share of its tokens from longer documents), `staged`
(the same lengths, every document alike), `longest` (the longest rows from the first step on). Each arm is run with
several seeds; a run that is done is not run again, one that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine._log import logger
from trine.data import Shards
from trine.data._files import write_atomically
from trine.evals.bits import held_out_bits
from trine.evals.tasks import evaluate_tasks, plan_tasks
from trine.model import Model
from trine.train import machine
from trine.train.config import EvalConfig, TrainConfig, train_preset
from trine.train.errors import Interrupted, RunError
from trine.train.loop import choose_device, open_data, train
from trine.train.rehearse import forecast
from trine.train.stored import load_run
from trine.train.study_config import ARMS, LENGTHS, StudyConfig, arm_stages, chosen_runs
from trine.train.study_jobs import run_side_by_side, study_jobs

if TYPE_CHECKING:
    from rich.console import Console

RESERVE = 0.85  # of the budget that is planned; starts and slow minutes take the rest
TASK_TOKENS = 98_304  # that the questions after each run may take
FORWARD = 0.4  # seconds of a token that is only read, beside one that is trained on
FORMAT_VERSION = 1


def run_study(config: StudyConfig, console: Console | None = None) -> dict[str, Any]:
    """Run what is missing of a study, or of its runs that are asked for, and gather the results of all that are done.

    Returns:
        What ``study.json`` in the folder holds: the plan, one result a run, means and deviations an arm, and the runs
        that are not done yet.

    Raises:
        RunError: the folder holds another study, or a run that goes side by side with others failed.
        Interrupted: the same command goes on.
        DataError: no data.
    """
    jobs = side_by_side(config)
    settings = machine.prepare_machine(config.threads or int(jobs > 1))
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    say = console.print if console is not None else lambda text: logger.info(text)
    with alone(folder):  # of several commands in one folder, the first one plans and makes the data
        plan = _planned(config, folder, say, jobs)
        missing = [run for run in chosen_runs(config) if not result_path(folder, *run).exists()]
        if missing and not (folder / "data" / "manifest.json").exists():
            open_data(_run_config(config, *missing[0], folder, plan["tokens"]), folder / "data")
    if jobs > 1 and len(missing) > 1:
        run_side_by_side(study_jobs(config, missing, plan["tokens"], settings["threads"]), jobs, say)
    else:
        for arm, seed in missing:
            say(f"study: {arm}, seed {seed}, {plan['tokens']:,} tokens")
            _one_run(config, plan, arm, seed, folder, console, settings["threads"])
    return gather(config, plan, folder)


def gather(config: StudyConfig, plan: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """All results in the folder as ``study.json``, which is written there."""
    every = [(arm, seed) for seed in range(config.seeds) for arm in ARMS]
    paths = {run: result_path(folder, *run) for run in every}
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths.values() if path.exists()]
    found = {
        "format_version": FORMAT_VERSION,
        **plan,
        "results": results,
        "arms": summarise(sorted(results, key=lambda one: ARMS.index(one["arm"]))),
        "missing": [f"{arm}-{seed}" for (arm, seed), path in paths.items() if not path.exists()],
    }
    with alone(folder):
        write_result(folder / "study.json", found)
    return found


def side_by_side(config: StudyConfig) -> int:
    """How many runs go at a time."""
    count = len(chosen_runs(config))
    if config.jobs:
        return min(config.jobs, count)
    return 1 if choose_device(config.device).type == "cuda" else min(machine.usable_cores(), count)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other command plans in the folder; the system drops the lock of one that dies."""
    with open(folder / "lock", "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def result_path(folder: Path, arm: str, seed: int) -> Path:
    """Where a run of a study leaves what it found, when it is done."""
    return folder / f"{arm}-{seed}" / "result.json"


def summarise(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean and standard deviation over the seeds of every number of an arm's results (deviation None for one seed)."""
    arms: dict[str, dict[str, Any]] = {}
    for arm in dict.fromkeys(one["arm"] for one in results):
        own = [one for one in results if one["arm"] == arm]
        arms[arm] = {"seeds": len(own)}
        for key in ("tokens_per_s", "seconds", "loss"):
            arms[arm][key] = spread([one[key] for one in own])
        for key in ("bits_by_context", "recall_by_length", "chance_by_length", "gap_by_length"):
            names = list(dict.fromkeys(name for one in own for name in one.get(key, {})))
            arms[arm][key] = {name: spread([one[key][name] for one in own if name in one[key]]) for name in names}
    return arms


def spread(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
    }


def _planned(config: StudyConfig, folder: Path, say: Any, jobs: int = 1) -> dict[str, Any]:
    """The study's plan as it was first made, so that its runs see the same tokens whenever they are run."""
    wanted = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(config).items()
        if key in ("preset", "longest", "source", "more")
    }
    path = folder / "plan.json"
    if path.exists():
        plan = dict(json.loads(path.read_text(encoding="utf-8")))
        for key, value in wanted.items():
            if plan["config"][key] != value:
                raise RunError(
                    f"{folder}: holds a study with {key} {plan['config'][key]!r}, "
                    f"found {value!r}; need another --folder"
                )
        if config.tokens and config.tokens != plan["tokens"]:
            raise RunError(
                f"{folder}: holds a study of {plan['tokens']} tokens a run, found {config.tokens}; "
                "need another --folder"
            )
        return plan
    tokens = config.tokens
    if not tokens:
        say("study: measuring how many tokens fit")
        tokens = _affordable(config, folder, jobs)
    plan = {
        "config": wanted,
        "tokens": tokens,
        "device": choose_device(config.device).type,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_result(path, plan)
    return plan


def _affordable(config: StudyConfig, folder: Path, jobs: int) -> int:
    """Tokens of each run, so that training and measuring all of them takes the budget on this machine."""
    open_data(_run_config(config, ARMS[0], 0, folder, config.longest), folder / "data")
    shards = Shards.open(folder / "data")
    read = len([one for one in LENGTHS if one <= config.longest]) * _held_out_tokens(shards) + TASK_TOKENS
    paces = []
    for arm in ARMS:
        seen = forecast(dataclasses.replace(_run_config(config, arm, 0, folder, 1_000_000)))
        paces.append((seen.seconds or 0.0) / seen.tokens)
    seconds = RESERVE * 60 * config.budget * jobs / config.seeds - len(ARMS) * read * FORWARD * max(paces)
    tokens = int(seconds / sum(paces)) // config.longest * config.longest
    if tokens < 8 * config.longest:
        raise RunError(
            f"budget: found {config.budget:g} minutes, which leaves {max(0, tokens):,} tokens a run; need at least "
            f"{8 * config.longest:,} (8 steps): a larger --budget, a smaller --longest or --preset, or --tokens"
        )
    return tokens


def _held_out_tokens(shards: Shards) -> int:
    """Of the first source: what bits per byte are measured on."""
    chosen = shards.select("held_out", source=shards.sources[0]).tolist()
    return sum(shards.documents[i].tokens for i in chosen)


def _run_config(config: StudyConfig, arm: str, seed: int, folder: Path, tokens: int) -> TrainConfig:
    base = train_preset(config.preset)
    data = dataclasses.replace(base.data, source=config.source or base.data.source, more=config.more)
    return dataclasses.replace(
        base,
        run=f"{arm}-{seed}",
        runs=str(folder),
        seed=seed,
        tokens=tokens,
        stages=arm_stages(arm, config.longest),
        data=data,
        eval=EvalConfig(run=False),
        device=config.device,
        threads=config.threads,
        checkpoint_every=50,
        keep=1,
        allow_repeats=True,
    )


def _one_run(
    config: StudyConfig,
    plan: Mapping[str, Any],
    arm: str,
    seed: int,
    folder: Path,
    console: Console | None,
    threads: int,
) -> None:
    """Train one arm with one seed, measure it, and write its ``result.json``."""
    run = folder / f"{arm}-{seed}"
    wanted = _run_config(config, arm, seed, folder, plan["tokens"])
    began = time.perf_counter()
    lines = train_arm(wanted, folder / "data", console, "trine study")
    stored = load_run(run, device=choose_device(wanted.device))
    result = {
        "arm": arm,
        "seed": seed,
        **training_figures(lines, last=10),
        "seconds_by_stage": _by_stage(lines),
        **measure(stored.model, Shards.open(run / "data"), config.longest, TASK_TOKENS),
        "threads": threads,
        "in_all_seconds": round(time.perf_counter() - began, 1),
    }
    write_result(run / "result.json", result)


def train_arm(config: TrainConfig, data: Path, console: Console | None, again: str) -> list[dict[str, Any]]:
    """Train one run of a study on data that all its runs share, or go on with it; returns the lines of its metrics.

    Raises:
        Interrupted: saying that the command ``again`` goes on.
    """
    run = Path(config.runs) / config.run
    if not (run / "data").exists():
        link_data(data, run / "data")
    try:
        train(dataclasses.replace(config, resume=(run / "run.json").exists()), console)
    except Interrupted as error:
        raise Interrupted(f"{str(error).partition(';')[0]}; go on with the same `{again}` command") from None
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def training_figures(lines: Sequence[Mapping[str, Any]], last: int) -> dict[str, Any]:
    """Steps, tokens, seconds, speed, and the mean loss of the ``last`` steps, from the lines of a run's metrics."""
    tokens, seconds = lines[-1]["tokens"], sum(line["seconds"] for line in lines)
    return {
        "steps": lines[-1]["step"],
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "loss": statistics.fmean(line["loss"] for line in lines[-last:] if line["loss"] is not None),
    }


def measure(model: Model, shards: Shards, longest: int, task_tokens: int) -> dict[str, Any]:
    """What a longer context is worth to a model.

    Returns:
        ``bits_by_context``: bits per byte of the first source's held-out documents, with contexts from the shortest
        row to the longest;
        ``recall_by_length``, ``chance_by_length``: share of the answers' tokens that are right, over all task families,
        and what guessing gives; ``gap_by_length``: nats an answer token between evidence swapped and in place.
    """
    lengths = [length for length in LENGTHS if length <= longest]
    bits = {}
    for context in lengths:
        report = held_out_bits(
            model, shards, context=context, tokens_per_call=max(4096, context), source=shards.sources[0]
        )
        bits[str(context)] = report.bits_per_byte if report.bits_per_byte is not None else report.bits_per_byte_all
    found: dict[str, Any] = {"bits_by_context": bits}
    if task_tokens:
        asked = evaluate_tasks(model, shards.tokenizer, plan_tasks(lengths[1:], budget=task_tokens))
        cells = [cell for family in asked["families"].values() for cell in family]
        for name, key in (("recall", "token_accuracy"), ("chance", "chance"), ("gap", "gap")):
            found[f"{name}_by_length"] = {
                str(length): statistics.fmean(cell[key] for cell in cells if cell["length"] == length)
                for length in sorted({cell["length"] for cell in cells})
            }
    return found


def _by_stage(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    stages = sorted({line["stage"] for line in lines})
    return [sum(line["seconds"] for line in lines if line["stage"] == stage) for stage in stages]


def link_data(source: Path, target: Path) -> None:
    """The same data for another run, without a copy where the file system has links."""
    temporary = target.with_name(f".data-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, temporary, copy_function=link_or_copy)
    temporary.rename(target)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_result(path: Path, value: Mapping[str, Any]) -> None:
    """As JSON, whole or not at all."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())
