"""`report.md`: a run on one page, made from the files in its folder and from nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trine.config import from_dict
from trine.data._files import write_atomically
from trine.model import info
from trine.train.errors import no_run
from trine.train.stored import program
from trine.views import figures
from trine.views.balance_charts import floors
from trine.views.chart import Chart
from trine.views.report_charts import run_charts, run_figures, step_tokens
from trine.views.report_eval import evaluation_figures, evaluation_sections
from trine.views.report_inside import inside_charts, inside_figures, inside_section
from trine.views.run_series import by_step
from trine.views.tables import (
    EVALUATION_HEADINGS,
    MODEL_HEADINGS,
    Row,
    evaluation_note,
    evaluation_rows,
    markdown,
    memory_line,
    model_rows,
    size,
)

Record = Mapping[str, Any]

# From this step on the balance is judged: before it the routers move faster than any balancer follows.
SETTLED = 20
GOOD_MAX_VIO = 0.3


def write_report(run: str | Path) -> Path:
    """Write `report.md` and `plots/*.png` into a run's folder, from what the run has recorded so far.

    A run that is still going, or was stopped early, gets a report without the parts it has not reached.

    Args:
        run: the run's folder.

    Returns:
        Path of the report.

    Raises:
        RunError: there is no run in the folder.
        ValueError: it has recorded no step; a file cannot be read or written.
    """
    folder = Path(run)
    record = _read_run(folder)
    metrics = by_step(read_lines(folder / "metrics.jsonl"))
    if not metrics:
        raise ValueError(f"{folder / 'metrics.jsonl'}: no step recorded yet")
    evaluation = _read_json(folder / "eval.json")
    sample = folder / "sample.txt"
    facts = info(from_dict(record["model"]))
    events = read_lines(folder / "events.jsonl")
    inside = inside_charts(folder)
    plots = _draw(folder, record, metrics, evaluation, facts, inside)
    sections = [
        f"# {folder.name}",
        summary_line(record, metrics, facts),
        _picture("The run at a glance", plots.get("overview")),
        _result(record, metrics, evaluation),
        *evaluation_sections(evaluation or {}, events, plots),
        _writing(sample.read_text(encoding="utf-8") if sample.exists() else None),
        _balance(metrics, record["model"], plots.get("load")),
        _training(metrics, plots),
        inside_section(inside, plots),
        f"## Model\n\n{markdown(MODEL_HEADINGS, model_rows(facts))}\n\n{memory_line(facts)}",
        _plan(record),
        _machine(record),
        _next(folder),
    ]
    path = folder / "report.md"
    write_atomically(path, ("\n\n".join(section for section in sections if section) + "\n").encode())
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file with one JSON object a line; lines that were cut off while being written are left out."""
    records = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                records.append(value)
    return records


def summary_line(record: Record, metrics: Sequence[Record], facts: Record) -> str:
    """Model, tokens, time and machine in one sentence."""
    hardware = record["hardware"]
    where = hardware["gpus"][0]["name"] if hardware.get("gpus") else hardware["cpu"]
    done, planned = metrics[-1]["step"], record["planned_steps"]
    threads = record["threads"]
    return (
        f"Preset `{record['config']['preset']}`: {parameters(facts['total'])} parameters with a vocabulary of "
        f"{record['model']['vocab_size']:,}, {parameters(facts['active'])} used by a token. {done} of {planned} steps, "
        f"{figures.short_count(metrics[-1]['tokens'])} tokens, {duration(sum(_seconds(metrics)))} of training "
        f"on {where}, {threads} thread{'' if threads == 1 else 's'}."
    )


def parameters(count: float) -> str:
    """A number of parameters as the README's table of presets has it: 501408 as "0.50 M"."""
    return f"{count / 1e6:.2f} M" if count < 1e6 else figures.short_count(count)


def next_commands(run: str | Path) -> list[tuple[str, str]]:
    """Commands to try after a run, each with what it shows.

    Training it again with one thing changed repeats what the run was started with; where that is not known (it was no
    `trine train`, or the options of a resumed run are in its record), or the model was set already, it is left out.

    Raises:
        RunError: there is no run in the folder.
    """
    folder = Path(run)
    record, trine = _read_run(folder), program()
    commands = [
        (
            f'{trine} generate {folder} --prompt "class " --temperature 0.8 --stream',
            "lets the model write; another `--seed` writes something else.",
        ),
        (
            f"{trine} eval {folder}",
            "measures the newest checkpoint on the held-out files again.",
        ),
    ]
    options = _options(record.get("command"))
    if options is not None:
        again = shlex.join([*options, "--run", f"{folder.name}-plain", "--model", "residual=plain"])
        why = "trains the same model with an ordinary residual stream, to see what depth attention is worth."
        commands.append((f"{trine} train {again}", why))
    return commands


def _options(command: Any) -> list[str] | None:
    """Options of the `trine train` that began a run, less its name; None where they do not say all of it."""
    if not isinstance(command, list) or command[1:2] != ["train"]:
        return None
    options: list[str] = []
    words = iter(command[2:])
    for word in words:
        name = word.partition("=")[0]
        if name == "--resume" or name == "--model" or name.startswith("--model."):
            return None
        if word == "--run":
            next(words, None)
        elif name != "--run":
            options.append(word)
    return options


def duration(seconds: float) -> str:
    """Seconds as a person says them: 754 as "12 min 34 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _draw(
    folder: Path,
    record: Record,
    metrics: Sequence[Record],
    evaluation: Record | None,
    facts: Record,
    inside: list[Chart],
) -> dict[str, str]:
    """All plots of the report; returns their paths relative to it."""
    size_of = f"{parameters(facts['total'])} parameters (vocabulary {record['model']['vocab_size']:,})"
    title = f"{folder.name}: {size_of}, {duration(sum(_seconds(metrics)))}"
    drawn = run_figures(run_charts(folder), title)
    stages = [span["stage"]["length"] for span in record["plan"]]
    drawn |= evaluation_figures(evaluation or {}, stages) | inside_figures(inside)
    (folder / "plots").mkdir(exist_ok=True)
    for name, figure in drawn.items():
        figures.save(figure, folder / "plots" / f"{name}.png")
    return {name: f"plots/{name}.png" for name in drawn}


def _result(record: Record, metrics: Sequence[Record], evaluation: Record | None) -> str:
    if evaluation is None:
        reason = "the run has not reached its end"
        if record["data"].get("held_out") == 0:
            reason = "no document is held out (`data.held_out_one_in`)"
        elif metrics[-1]["step"] >= record["planned_steps"]:
            reason = "`trine eval` does it"
        return f"## Held-out text\n\nNot evaluated: {reason}."
    if not evaluation.get("baselines"):
        return ""
    notes = [
        evaluation_note(evaluation),
        "The n-grams are Witten-Bell interpolated byte models fitted on the training files; compressors see the "
        "held-out files joined.",
    ]
    if evaluation["baselines"].get("xz_primed") is not None:
        notes.append("The last row can look up every line it has read, which is a different skill from predicting.")
    if record["config"]["preset"] == "smoke":
        notes.append(
            f"A model this small is not expected to beat gzip in so few steps ({record['planned_steps']}): this run "
            "shows that every part works."
        )
    table = markdown(EVALUATION_HEADINGS, evaluation_rows(evaluation))
    return f"## Held-out text\n\n{table}\n\n{' '.join(notes)}"


def _writing(sample: str | None) -> str:
    if sample is None:
        return ""
    fence = "```"
    while fence in sample:
        fence += "`"
    return f"## What it writes\n\n{fence}text\n{sample.rstrip()}\n{fence}"


def _balance(metrics: Sequence[Record], model: Record, plot: str | None) -> str:
    worst = {record["step"]: max(vio) for record in metrics if (vio := [v for v in record["max_vio"] if v is not None])}
    if not worst:
        return ""
    settled = [value for step, value in worst.items() if step >= SETTLED]
    dead = sum(record["dead_experts"] > 0 for record in metrics)
    tokens = step_tokens(metrics)
    sizes = sorted({int(one) for one in tokens[[0, -1]] if np.isfinite(one)})
    dice = [
        f"{floor:.2f} with {size:,}"
        for size, floor in zip(sizes, floors(np.array(sizes), model["top_k"], model["experts"])[1], strict=True)
    ]
    first = {record["step"] for record in metrics if record.get("stage", 0) == metrics[0].get("stage", 0)}
    lines = [f"Steps in which an expert got no token: {dead} of {len(metrics)}."]
    if settled:
        share = 100 * sum(value <= GOOD_MAX_VIO for value in settled) / len(settled)
        lines.append(
            f"From step {SETTLED} on the largest MaxVio of any layer was at most {GOOD_MAX_VIO} in {share:.0f} % "
            f"of the steps, and {max(settled):.2f} at worst."
        )
        early = [value for step, value in worst.items() if step >= SETTLED and step in first]
        if early and len(early) < len(settled):
            share = 100 * sum(value <= GOOD_MAX_VIO for value in early) / len(early)
            lines.append(
                f"In rows of the first stage that is {share:.0f} %, and {max(early):.2f} at worst: a step of longer "
                "rows holds fewer texts, and the tokens of one text go the same way."
            )
    else:
        lines.append(f"The largest MaxVio of any layer was {max(worst.values()):.2f}.")
    if dice:
        lines.append(f"Fair dice would give about {' and '.join((f'{dice[0]} tokens a step', *dice[1:]))}.")
    return f"## Balance of the experts\n\n{' '.join(lines)}\n\n{_picture('Load of the experts', plot)}".rstrip()


def _training(metrics: Sequence[Record], plots: Mapping[str, str]) -> str:
    skipped = sum(not record.get("updated", True) for record in metrics)
    rates = sorted(record["tokens_per_s"] for record in metrics if record.get("tokens_per_s") is not None)
    speed = f"Median {rates[len(rates) // 2]:,.0f} tokens a second. " if rates else ""
    picture = _picture("Loss, learning rate and norm of the gradient", plots.get("optimizer"))
    return f"## Training\n\n{speed}Steps whose update was not applied: {skipped}.\n\n{picture}".rstrip()


def _plan(record: Record) -> str:
    config = record["config"]
    rows: list[Row] = [
        (
            str(i + 1),
            f"{span['stage']['length']:,}",
            f"{span['steps']:,}",
            f"{span['stage']['step_tokens']:,}",
            f"{span['stage']['micro_tokens']:,}",
        )
        for i, span in enumerate(record["plan"])
    ]
    stages = markdown(("stage", "row length", "steps", "tokens a step", "tokens a pass"), rows)
    optimizer = config["optimizer"]
    rates = ", ".join(f"{name} {value:g}" for name, value in optimizer["rates"].items())
    data = record["data"]
    return (
        f"## Plan\n\n{stages}\n\n"
        f"- peak rates: {rates}; warm-up {100 * optimizer['warmup']:g} % of the tokens, then a cosine to "
        f"{100 * optimizer['final']:g} %; weight decay {optimizer['weight_decay']:g}, gradient norm clipped at "
        f"{optimizer['clip']:g}\n"
        f"- precision {config['precision']}, seed {record['seed']}\n"
        f"- data: {', '.join(data['sources'])} ({', '.join(data['licences'])}), manifest `{data['hash'][:16]}`"
    )


def _machine(record: Record) -> str:
    hardware = record["hardware"]
    rows: list[Row] = [
        ("system", hardware["system"]),
        ("processor", f"{hardware['cpu']}, {hardware['cores']} usable cores"),
        ("memory", size(hardware["memory_bytes"]) if hardware.get("memory_bytes") else "unknown"),
        *(("card", f"{gpu['name']}, {size(gpu['memory_bytes'])}") for gpu in hardware.get("gpus", ())),
        ("threads", str(record["threads"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items())),
        ("commit", record.get("git_commit") or "not run from a checkout"),
        ("command", " ".join(record["command"])),
        ("started", record["started"]),
    ]
    return f"## Machine\n\n{markdown(('', 'found'), rows)}"


def _next(folder: Path) -> str:
    steps = "\n\n".join(f"```\n{command}\n```\n{why}" for command, why in next_commands(folder))
    return f"## Next\n\n{steps}"


def _picture(label: str, path: str | None) -> str:
    return f"![{label}]({path})" if path else ""


def _seconds(metrics: Sequence[Record]) -> list[float]:
    return [record["seconds"] for record in metrics if record.get("seconds") is not None]


def _read_run(folder: Path) -> dict[str, Any]:
    record = _read_json(folder / "run.json")
    if record is None:
        raise no_run(folder, folder.parent)
    return record


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: damaged (found {type(value).__name__}, need an object)")
    return value
