"""`trine balance compare`: which balancer is better, on the same rows of the same text?

Every run of an arm differs from the others' in its `BalanceConfig` alone; runs of one seed share weights at the start
and rows. A difference counts where the mean over seeds of (arm - qb), seed by seed, is more than two of its standard
errors from 0.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trine._log import logger
from trine.balance import sampling_floor
from trine.balance.load_policy import LoadPolicy
from trine.balance.policies import install_policy
from trine.data import Batch, DataError, Shards
from trine.evals.bits import held_out_bits
from trine.model import Model
from trine.ops.router.auxiliary import LoadPressure, relative_loads
from trine.train import machine
from trine.train.compare_config import ARMS, CompareConfig, arm_balance
from trine.train.config import EvalConfig, TrainConfig, train_preset
from trine.train.errors import RunError
from trine.train.loop import choose_device, open_data, stage_plans, stored_batches
from trine.train.schedule import lay_out
from trine.train.stored import load_run
from trine.train.study import alone, result_path, spread, train_arm, training_figures, write_result
from trine.train.study_jobs import Job, run_side_by_side

if TYPE_CHECKING:
    from rich.console import Console

YARDSTICK = "qb"  # what the other arms are compared with
SETTLED = 20  # step from which balance is judged, as in a run's report
IN_A_ROW = 10  # steps that balance has to last to count as reached
NEAR_FLOOR = 2.0  # times the sampling floor of MaxVio that counts as balanced
FORMAT_VERSION = 1
PLAN = "plan.json"

# What is compared, and whether less is better.
FIGURES: Mapping[str, bool] = {
    "loss": True,
    "bits_per_byte": True,
    "max_vio": True,
    "max_vio_p95": True,
    "dead": True,
    "steps_to_balance": True,
    "tokens_per_s": False,
}


def run_compare(config: CompareConfig, console: Console | None = None) -> dict[str, Any]:
    """Run what is missing of a comparison, or of its runs that are asked for, and gather all results.

    Returns:
        What ``compare.json`` in the folder holds: what was run, one result a run, means, deviations and differences an
        arm, and the runs that are not done yet.

    Raises:
        RunError: the folder holds another comparison, or a run that goes side by side with others failed.
        Interrupted: the same command goes on.
        DataError: no data.
    """
    cores = machine.usable_cores() if choose_device(config.device).type == "cpu" else 1
    jobs = min(config.jobs or cores, len(config.runs()))
    settings = machine.prepare_machine(config.threads or int(jobs > 1))
    folder = Path(config.folder)
    fresh = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    say = console.print if console is not None else lambda text: logger.info(text)
    with alone(folder):  # of several commands in one folder, the first one plans and makes the data
        planned = (folder / PLAN).exists()
        plan = _planned(config, folder)
        missing = [run for run in config.runs() if not result_path(folder, *run).exists()]
        try:
            if missing and not (folder / "data" / "manifest.json").exists():
                open_data(_run_config(config, *missing[0], folder), folder / "data")
        except DataError:  # a plan with such data would refuse the next command, which has others
            if not planned:
                (folder / PLAN).unlink()
            if fresh:
                shutil.rmtree(folder)
            raise
    if jobs > 1 and len(missing) > 1:
        todo = [_job(config, arm, seed, settings["threads"]) for arm, seed in missing]
        run_side_by_side(todo, jobs, say, "trine balance compare")
    else:
        for arm, seed in missing:
            say(f"compare: {arm}, seed {seed}, {config.tokens:,} tokens")
            _one_run(config, arm, seed, folder, console, settings["threads"])
    return gather(config, plan, folder)


def gather(config: CompareConfig, plan: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """All results in the folder as ``compare.json``, which is written there."""
    every = [(arm, seed) for arm in ARMS for seed in range(config.seeds)]
    paths = {run: result_path(folder, *run) for run in every}
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths.values() if path.exists()]
    found = {
        "format_version": FORMAT_VERSION,
        **plan,
        "results": results,
        "arms": summarise(results),
        "missing": [f"{arm}-{seed}" for (arm, seed), path in paths.items() if not path.exists()],
    }
    with alone(folder):
        write_result(folder / "compare.json", found)
    return found


def summarise(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each arm: mean and deviation over seeds of each of `FIGURES`, and its difference from the yardstick.

    ``difference`` is the mean over seeds that both have of (arm - yardstick), ``error`` its standard error, ``counts``
    whether the first is more than twice the second. A balance that is never reached counts as all steps of the run.
    """
    by_seed = {(one["arm"], one["seed"]): one for one in results}
    arms: dict[str, dict[str, Any]] = {}
    for arm in dict.fromkeys(one["arm"] for one in results):
        own = [one for one in results if one["arm"] == arm]
        arms[arm] = {
            "seeds": len(own),
            "floor": own[0]["floor"],
            "wire_bytes": own[0]["wire_bytes"],
            "never_balanced": sum(one["steps_to_balance"] is None for one in own),
            "cosine": spread([one["cosine"] for one in own]),
            "max_vio_by_step": [
                statistics.median(values) for values in zip(*(one["max_vios"] for one in own), strict=False)
            ],
        }
        for key in FIGURES:
            arms[arm][key] = spread([_figure(one, key) for one in own])
            pairs = [(one, by_seed[YARDSTICK, one["seed"]]) for one in own if (YARDSTICK, one["seed"]) in by_seed]
            gaps = [_figure(one, key) - _figure(other, key) for one, other in pairs]
            arms[arm][key] |= _difference(gaps)
    return arms


def _figure(result: Mapping[str, Any], key: str) -> float:
    value = result[key]
    return float(result["steps"] if key == "steps_to_balance" and value is None else value)


def _difference(gaps: Sequence[float]) -> dict[str, Any]:
    if len(gaps) < 2:
        return {"difference": gaps[0] if gaps else None, "error": None, "counts": False}
    mean, error = statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    return {"difference": mean, "error": error, "counts": abs(mean) > 2.0 * error and mean != 0.0}


def steps_to_balance(max_vios: Sequence[float], floor: float) -> int | None:
    """The first step (from 1) from which MaxVio stays within `NEAR_FLOOR` times its floor for `IN_A_ROW` steps."""
    run = 0
    for step, value in enumerate(max_vios, start=1):
        run = run + 1 if value <= NEAR_FLOOR * floor else 0
        if run == IN_A_ROW:
            return step - IN_A_ROW + 1
    return None


def interference(model: Model, batches: Sequence[Batch]) -> float:
    """Cosine between the gradient of the loss and that of the auxiliary loss, over all parameters.

    The auxiliary loss presses by the loads of these very batches. Near 0: what it asks for has nothing to do with what
    the loss asks for; negative: it works against it. Parameters and bias stay as they are; counts, gradients and what
    balancing did in the forward pass are gone.
    """
    model.train()
    model.set_balance()
    main = _gradient(model, batches)
    pressure = LoadPressure(1e2)  # large, so that the difference of two gradients below is not all rounding
    pressure.relative_LE = relative_loads(model.router_stats.loads_LE.long())
    model.router_stats.zero_()
    model.set_balance(pressure=pressure)
    both = _gradient(model, batches)
    model.set_balance()
    model.router_stats.zero_()
    return float(torch.nn.functional.cosine_similarity(main, both - main, dim=0))


def _gradient(model: Model, batches: Sequence[Batch]) -> Tensor:
    """Of the mean loss of all batches, flat, fp64."""
    model.zero_grad(set_to_none=True)
    weights = 0.0
    for batch in batches:
        loss, weight = model.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        weights += float(weight)
    flat = [p.grad.double().flatten() / weights for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(flat)


def wire_bytes(arm: str, model: Model) -> int:
    """Bytes that a rank puts into the all-reduce of a step: with histograms, or loads and counters alone.

    The model's routers follow the arm from here on.
    """
    policy = install_policy(model, arm_balance(arm))
    stats = model.router_stats
    numbers = stats.counts.numel() - (stats.histograms_LEB.numel() if isinstance(policy, LoadPolicy) else 0)
    return numbers * stats.counts.element_size()


def _planned(config: CompareConfig, folder: Path) -> dict[str, Any]:
    """What is compared, as it was first asked for, so that all runs in a folder can be compared."""
    wanted = {name: getattr(config, name) for name in ("preset", "tokens", "source")}
    path = folder / PLAN
    if path.exists():
        plan = dict(json.loads(path.read_text(encoding="utf-8")))
        for key, value in wanted.items():
            if plan["config"][key] != value:
                held = plan["config"][key]
                raise RunError(
                    f"{folder}: holds a comparison with {key} {held!r}, found {value!r}; need another --folder"
                )
        return plan
    plan = {
        "config": wanted,
        "balance": {arm: arm_balance(arm).dials() for arm in ARMS},
        "device": choose_device(config.device).type,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_result(path, plan)
    return plan


def _run_config(config: CompareConfig, arm: str, seed: int, folder: Path) -> TrainConfig:
    base = train_preset(config.preset)
    return dataclasses.replace(
        base,
        run=f"{arm}-{seed}",
        runs=str(folder),
        seed=seed,
        tokens=config.tokens,
        data=dataclasses.replace(base.data, source=config.source or base.data.source),
        balance=arm_balance(arm),
        eval=EvalConfig(run=False),
        device=config.device,
        threads=config.threads,
        checkpoint_every=50,
        keep=1,
        allow_repeats=True,
    )


def _job(config: CompareConfig, arm: str, seed: int, threads: int) -> Job:
    words = [sys.executable, "-m", "trine.cli", "balance", "compare", "--arms", arm, "--seed", str(seed)]
    for name in ("folder", "preset", "tokens", "seeds", "device"):
        words += [f"--{name}", str(getattr(config, name))]
    words += ["--source", config.source] if config.source else []
    return Job(
        f"{arm}, seed {seed}",
        [*words, "--jobs", "1", "--threads", str(threads)],
        Path(config.folder) / f"{arm}-{seed}.log",
    )


def _one_run(config: CompareConfig, arm: str, seed: int, folder: Path, console: Console | None, threads: int) -> None:
    """Train one arm with one seed, measure it, and write its ``result.json``."""
    run = folder / f"{arm}-{seed}"
    wanted = _run_config(config, arm, seed, folder)
    lines = train_arm(wanted, folder / "data", console, "trine balance compare")
    stored = load_run(run, device=choose_device(wanted.device))
    shards = Shards.open(run / "data")
    plan = lay_out(wanted.stages, wanted.tokens)
    batches = stored_batches(stage_plans(wanted, plan, shards))(plan.spans[-1], plan.spans[-1].steps - 1)
    bits = held_out_bits(stored.model, shards, context=512, tokens_per_call=4096, source=shards.sources[0])
    max_vios = [max(line["max_vio"]) for line in lines]
    late = sorted(max_vios[SETTLED:] or max_vios)
    tokens = lines[-1]["tokens"] // lines[-1]["step"]
    floor = sampling_floor(tokens, stored.model.config.top_k, stored.model.config.experts).max_violation
    result = {
        "arm": arm,
        "seed": seed,
        **training_figures(lines, last=20),
        "bits_per_byte": bits.bits_per_byte if bits.bits_per_byte is not None else bits.bits_per_byte_all,
        "floor": floor,
        "max_vio": statistics.median(late),
        "max_vio_p95": late[math.ceil(0.95 * len(late)) - 1],
        "dead": sum(line["dead_experts"] > 0 for line in lines[SETTLED:]) / max(1, len(lines[SETTLED:])),
        "steps_to_balance": steps_to_balance(max_vios, floor),
        "cosine": interference(stored.model, [batch.to(choose_device(wanted.device)) for batch in batches]),
        "wire_bytes": wire_bytes(arm, stored.model),
        "max_vios": [round(value, 4) for value in max_vios],
        "threads": threads,
    }
    write_result(run / "result.json", result)
