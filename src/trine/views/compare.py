"""Runs side by side: what was set differently, what came of it, and their curves on one picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trine.train.config import trajectory
from trine.train.stored import stored_config
from trine.views import figures
from trine.views.report import duration, read_lines
from trine.views.tables import Row, size, terminal

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Comparison:
    """Several runs; every list and row has one entry a run, in the order they were given."""

    names: tuple[str, ...]
    differences: dict[str, tuple[Any, ...]]  # field of the trajectory -> its values; None where a run has no such field
    results: dict[
        str, tuple[Any, ...]
    ]  # steps, tokens, loss, held_out_bits_per_byte, seconds, tokens_per_s, peak_bytes
    metrics: tuple[list[dict[str, Any]], ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values, without the curves."""
        return {key: value for key, value in asdict(self).items() if key != "metrics"}


def compare(folders: Sequence[Path]) -> Comparison:
    """Read runs, finished or not, and set them side by side.

    Raises:
        RunError: a folder without a run, or with a damaged record.
        ValueError: fewer than two runs, or one that has recorded no step.
    """
    if len(folders) < 2:
        raise ValueError(f"runs: found {len(folders)}, need at least 2 to compare")
    metrics = [read_lines(folder / "metrics.jsonl") for folder in folders]
    for folder, lines in zip(folders, metrics, strict=True):
        if not lines:
            raise ValueError(f"{folder / 'metrics.jsonl'}: no step recorded yet")
    set_to = [trajectory(stored_config(folder)) for folder in folders]
    fields = sorted({key for one in set_to for key in one})
    differences = {key: tuple(one.get(key) for one in set_to) for key in fields}
    evaluations = [_evaluation(folder) for folder in folders]
    columns: dict[str, list[Any]] = {
        "steps": [lines[-1]["step"] for lines in metrics],
        "tokens": [lines[-1]["tokens"] for lines in metrics],
        "loss": [_last_loss(lines) for lines in metrics],
        "held_out_bits_per_byte": [one.get("bits_per_byte") for one in evaluations],
        "seconds": [sum(line["seconds"] for line in lines) for lines in metrics],
        "tokens_per_s": [float(np.median([line["tokens_per_s"] for line in lines])) for lines in metrics],
        "steps_without_update": [sum(not line.get("updated", True) for line in lines) for lines in metrics],
    }
    return Comparison(
        names=_names(folders),
        differences={key: values for key, values in differences.items() if any(v != values[0] for v in values)},
        results={key: tuple(values) for key, values in columns.items()},
        metrics=tuple(metrics),
    )


def comparison_rows(found: Comparison) -> list[Row]:
    """What differs, then what came of it, as text."""
    rows: list[Row] = [
        (key, *("-" if value is None else str(value) for value in values)) for key, values in found.differences.items()
    ]
    if not rows:
        rows.append(("(nothing is set differently)", *("" for _ in found.names)))
    words: dict[str, Callable[[Any], str]] = {
        "steps": lambda value: f"{value:,}",
        "tokens": figures.short_count,
        "loss": lambda value: f"{value:.3f}",
        "held_out_bits_per_byte": lambda value: f"{value:.3f}",
        "seconds": duration,
        "tokens_per_s": lambda value: f"{value:,.0f}",
        "steps_without_update": str,
    }
    labels = {
        "loss": "loss, mean of the last 20 steps",
        "held_out_bits_per_byte": "bits per byte, held out",
        "seconds": "time of training",
        "tokens_per_s": "tokens a second, median",
        "steps_without_update": "steps without an update",
    }
    for key, values in found.results.items():
        if any(value is not None for value in values):
            rows.append((labels.get(key, key), *("-" if value is None else words[key](value) for value in values)))
    return rows


def forecast_rows(stages: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table of `trine plan`, one row a stage, from `StageForecast` as plain values."""
    rows: list[Row] = []
    for one in stages:
        long_share = "" if one["long_share"] is None else f"{100 * one['long_share']:.0f} %"
        epochs = "; ".join(f"{value:.2f}" for value in one["epochs"].values())
        rows.append(
            (
                f"{one['stage'] + 1}: {one['length']:,} tokens",
                f"{one['steps']:,} x {one['step_tokens']:,}",
                figures.short_count(one["tokens"]),
                ", ".join(one["mixture"]) or "all documents",
                epochs,
                long_share,
                "-" if one["step_seconds"] is None else f"{one['step_seconds']:.2f} s",
                "-" if one["seconds"] is None else duration(one["seconds"]),
                "-" if one["peak_bytes"] is None else size(one["peak_bytes"]),
            )
        )
    return rows


FORECAST_HEADINGS = (
    *("stage", "steps x tokens", "tokens", "mixture", "epochs", "long", "a step", "stage takes", "peak memory"),
)


def forecast_table(found: Mapping[str, Any]) -> Table:
    """What `trine plan` shows of a `Forecast` as plain values."""
    return terminal(FORECAST_HEADINGS, forecast_rows(found["stages"]), forecast_note(found))


def forecast_note(found: Mapping[str, Any]) -> str:
    """The totals, what the columns mean, and every warning on a line of its own."""
    hardware = found["hardware"]
    where = hardware["gpus"][0]["name"] if hardware.get("gpus") else f"{hardware['cpu']}, {hardware['cores']} cores"
    total = f"{found['steps']:,} steps, {figures.short_count(found['tokens'])} tokens"
    if found["seconds"] is not None:
        total += f", about {duration(found['seconds'])} of training"
    if found["peak_bytes"] is not None:
        total += f" and {size(found['peak_bytes'])} of memory"
    lines = [
        f"{total} on {where}.",
        "epochs: passes over each part of the mixture in this stage.",
        "long: share of the tokens from documents longer than the rows of the stage before.",
        *(f"warning: {text}" for text in found["warnings"]),
    ]
    return "\n".join(lines)


def comparison_table(found: Comparison) -> Table:
    """What `trine compare` shows."""
    return terminal(("", *found.names), comparison_rows(found))


def _evaluation(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "eval.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _last_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    losses = [line["loss"] for line in lines[-20:] if line["loss"] is not None]
    return sum(losses) / len(losses) if losses else None


def _names(folders: Sequence[Path]) -> tuple[str, ...]:
    """Names of the folders; with the folder above where two are the same."""
    names = [folder.resolve().name for folder in folders]
    return tuple(
        f"{folder.resolve().parent.name}/{name}" if names.count(name) > 1 else name
        for folder, name in zip(folders, names, strict=True)
    )
