"""Runs on disk: where they are, how they were started, and the model they hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trine.config import from_dict
from trine.data import Tokenizer
from trine.model import Model
from trine.train.checkpoint import checkpoint_name, load_model_state, newest_valid, read_state
from trine.train.config import TrainConfig, train_from_dict
from trine.train.errors import RunError
from trine.train.run_folder import free_name, newest_run, read_json


@dataclass(frozen=True)
class StoredRun:
    """A model as a run left it."""

    path: Path
    config: TrainConfig
    model: Model
    tokenizer: Tokenizer
    step: int  # the checkpoint's
    passed_over: tuple[str, ...]  # damaged newer checkpoints, one line each


def run_path(config: TrainConfig) -> Path:
    """The run's folder: the one that ``run`` names, else a free name for a new run and the newest for a resumed one.

    Raises:
        RunError: there is no run to resume.
    """
    runs = Path(config.runs)
    if config.run:
        return runs / config.run
    if not config.resume:
        return runs / free_name(runs, config.preset)
    name = newest_run(runs, config.preset)
    if name is None:
        raise RunError(f"{runs}: holds no run of preset {config.preset!r} to resume")
    return runs / name


def stored_config(path: Path) -> TrainConfig:
    """The configuration that the run in ``path`` was started with.

    Raises:
        RunError: there is no run, or its record is damaged.
    """
    if not (path / "run.json").exists():
        raise RunError(f"{path}: holds no run")
    record = read_json(path / "run.json")
    try:
        config = record["config"]
        # Runs recorded before there was QK-clip had none.
        config["optimizer"].setdefault("qk_clip", 0.0)
        return train_from_dict(config)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path / 'run.json'}: damaged ({error})") from error


def resume_command(config: TrainConfig, name: str) -> str:
    """What to type to go on with a run."""
    runs = "" if config.runs == TrainConfig().runs else f" --runs {config.runs}"
    return f"trine train --run {name}{runs} --resume"


def load_run(path: str | Path, step: int | None = None, device: torch.device | str = "cpu") -> StoredRun:
    """Build the model of a run and fill it from a checkpoint.

    Args:
        path: the run's folder, or one of its checkpoints.
        step: which checkpoint; None takes the newest valid one.
        device: where the model goes.

    Raises:
        RunError: no run, no checkpoint, or a damaged one (passed over when no ``step`` was named).
        DataError: the tokenizer is missing or damaged.
    """
    path = Path(path)
    named: Path | None
    if path.parent.name == "checkpoints" and not (path / "run.json").exists():
        folder, named = path.parent.parent, path
    else:
        folder, named = path, None if step is None else path / "checkpoints" / checkpoint_name(step)
    config = stored_config(folder)
    record = read_json(folder / "run.json")
    passed_over: tuple[str, ...] = ()
    checkpoint = named
    if checkpoint is not None:
        state = read_state(checkpoint)
    else:
        checkpoint, state, damaged = newest_valid(folder / "checkpoints")
        passed_over = tuple(one.reason for one in damaged)
        if checkpoint is None:
            raise RunError(passed_over[0] if passed_over else f"{folder}: has no checkpoint yet")
    model = Model(from_dict(record["model"]))
    if config.precision == "bf16":
        model.to(torch.bfloat16)
    load_model_state(model, checkpoint)
    model.to(device)
    model.eval()
    return StoredRun(folder, config, model, Tokenizer.load(folder / "tokenizer.json"), state["step"], passed_over)
