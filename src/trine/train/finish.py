"""What a run does when its plan is done: measure what it has learnt beside the yardsticks, and write something."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trine.data import Shards, Tokenizer
from trine.data._files import write_atomically
from trine.data.generated import RECALL, pairs_for
from trine.engine import Sampling, generate
from trine.evals.baselines import baselines
from trine.evals.bits import held_out_bits
from trine.evals.portrait import portrait
from trine.evals.positions import loss_by_position, short_loss
from trine.evals.progress import meter
from trine.evals.tasks import evaluate_recall, evaluate_tasks, plan_tasks
from trine.model import Model
from trine.train.config import EvalConfig
from trine.train.run_folder import FORMAT_VERSION
from trine.train.stored import load_run

if TYPE_CHECKING:
    from rich.console import Console

TEMPERATURE, TOP_P = 0.7, 0.95  # of the sample: lively, without the long tail of a small model's mistakes
PORTRAIT_TOKENS = 2_048  # of the batch whose depth mix and representations are looked at
FEW_PAIRS = 4  # pairs of recall rows that are alike at all lengths
BEYOND = 4  # symbol-level recall is tested to so many times the trained length


def evaluate(
    model: Model,
    shards: Shards,
    config: EvalConfig | None = None,
    *,
    threads: int = 1,
    stages: Sequence[int] = (),
    console: Console | None = None,
) -> dict[str, Any]:
    """Everything that is measured of a model, as ``eval.json`` holds it.

    ``bits_per_byte`` and ``baselines`` leave near-copy families out (they are the numbers to quote);
    ``bits_per_byte_all`` and ``baselines_all`` take every held-out document. Where all are near-copies, the first two
    are those of all. Of a run of symbol-level recall there is ``recall`` instead of yardsticks and tasks.

    Args:
        model: any `trine.Model` of the shards' vocabulary.
        shards: the data; baselines are kept beside them.
        config: context, lengths and yardsticks.
        threads: compressions at the same time.
        stages: row lengths of the run's stages; tasks are asked, and positions looked at, up to the longest, unless
            ``config.lengths`` says otherwise. None asks no tasks and looks at no positions.
        console: where progress is shown.

    Raises:
        DataError: nothing is held out.
    """
    config = config or EvalConfig()
    tokens = sum(shards.documents[i].tokens for i in shards.select("held_out").tolist())
    with meter(console, "held-out text", tokens) as tick:
        report = held_out_bits(
            model, shards, context=config.context, tokens_per_call=max(4096, config.context), tick=tick
        )
    values = report.to_json()
    if values["bits_per_byte"] is None:
        values["bits_per_byte"] = values["bits_per_byte_all"]
    if RECALL in shards.sources:
        return {**values, "baselines": {}, **_recall(model, shards, config.lengths or stages, console)}
    found = baselines(shards, primed=config.primed, threads=threads)
    values["baselines"] = found["held_out"] or found["held_out_all"]
    values["baselines_all"] = found["held_out_all"]
    lengths = sorted(set(config.lengths or stages))
    if lengths:
        with meter(console, "loss by position", tokens) as tick:
            values["by_position"] = loss_by_position(model, shards, lengths[-1], tick=tick)
        if config.task_tokens:
            plan = plan_tasks(lengths, budget=config.task_tokens)
            with meter(console, "tasks", plan.tokens) as tick:
                values["tasks"] = evaluate_tasks(model, shards.tokenizer, plan, tick=tick)
    values["portrait"] = _portrait(model, shards)
    return values


def recall_cases(stages: Sequence[int]) -> list[tuple[int, int, int | None]]:
    """(length, pairs, distance) that a recall run is tested on.

    Few pairs and as many as it was trained with, at each trained length and at four times it; then one question at two
    exact distances beyond the length of the stage before, for each stage but the first, and two beyond the last.
    """
    cases: list[tuple[int, int, int | None]] = []
    for length in sorted({n for stage in stages for n in (stage, BEYOND * stage)}):
        cases += [(length, pairs, None) for pairs in dict.fromkeys((FEW_PAIRS, pairs_for(min(length, stages[-1]))))]
    lengths = [*stages, BEYOND * stages[-1]]
    for before, length in pairwise(lengths):
        cases += [(length, FEW_PAIRS, distance) for distance in (3 * before // 2, length - before // 4)]
    return cases


def _recall(model: Model, shards: Shards, stages: Sequence[int], console: Console | None) -> dict[str, Any]:
    """``recall`` and ``portrait`` of a symbol-level run."""
    cases = recall_cases(stages) if stages else []
    with meter(console, "recall", sum(2 * length for length, _, _ in cases) * 64) as tick:
        found = evaluate_recall(model, shards.tokenizer, cases, tick=tick)
    return {"recall": found, "portrait": _portrait(model, shards)}


def _portrait(model: Model, shards: Shards) -> dict[str, Any]:
    """`trine.evals.portrait.portrait` of the beginnings of held-out documents."""
    tokens: list[int] = []
    bounds = [0]
    for i in shards.select("held_out").tolist():
        if len(tokens) >= PORTRAIT_TOKENS:
            break
        tokens += shards.stream(i)[: PORTRAIT_TOKENS - len(tokens)].tolist()
        bounds.append(len(tokens))
    device = model.head.weight.device
    return portrait(model, torch.tensor(tokens, device=device), torch.tensor(bounds, dtype=torch.int32, device=device))


def short_measure(shards: Shards, length: int) -> tuple[Callable[[Model], float], str]:
    """What the short guard measures at ``length`` tokens, always on the same text, and its unit."""
    if RECALL in shards.sources:

        def loss(model: Model) -> float:
            (cell,) = evaluate_recall(model, shards.tokenizer, [(length, pairs_for(length), None)])
            return float(cell["loss"])

        return loss, "nats an answer"
    return lambda model: short_loss(model, shards, length), "bits per byte"


def evaluate_run(
    path: str | Path, *, lengths: Sequence[int] = (), threads: int = 1, console: Console | None = None
) -> dict[str, Any]:
    """Measure the newest checkpoint of a run and write its ``eval.json``; returns what that holds.

    Args:
        path: the run's folder.
        lengths: tokens of the tasks, in place of the stages' lengths; up to four times the trained length is of use.
            Each family is then asked at every depth, whatever the run's ``eval.task_tokens``.
        threads: see `evaluate`.
        console: where progress is shown.

    Raises:
        RunError: no run, or no checkpoint.
        DataError: its data is gone or damaged, or nothing is held out.
    """
    run = load_run(path)
    shards = Shards.open(run.path / "data")
    config = run.config.eval
    if lengths:
        least = plan_tasks(lengths, samples=1).tokens
        config = replace(config, lengths=tuple(lengths), task_tokens=max(config.task_tokens, least * len(lengths)))
    stages = [stage.length for stage in run.config.stages]
    values = evaluate(run.model, shards, config, threads=threads, stages=stages, console=console)
    store_evaluation(run.path, run.step, values)
    return {"step": run.step, **values}


def store_evaluation(folder: Path, step: int, values: dict[str, Any]) -> Path:
    """Write ``eval.json`` of a run, whole or not at all."""
    path = folder / "eval.json"
    text = json.dumps({"format_version": FORMAT_VERSION, "step": step, **values}, indent=2)
    write_atomically(path, (text + "\n").encode())
    return path


def write(model: Model, tokenizer: Tokenizer, prompt: str, tokens: int, seed: int = 0) -> str:
    """Let a model go on from ``prompt`` for ``tokens`` tokens at most; returns prompt and continuation."""
    start = [tokenizer.eod_id, *tokenizer.encode(prompt)]
    sampling = Sampling(max_tokens=tokens, temperature=TEMPERATURE, top_p=TOP_P, seed=seed)
    (done,) = generate(model, [start], sampling, tokenizer=tokenizer, end_token=tokenizer.eod_id)
    return prompt + done.text
