"""Runs on disk: where they are, how they were started, and the model they hold."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trine.config import from_dict
from trine.data import DataError, Tokenizer
from trine.model import Model
from trine.train.checkpoint import checkpoint_name, load_model_state, newest_valid, read_state
from trine.train.config import TrainConfig, train_from_dict
from trine.train.errors import RunError, no_run
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
        raise no_run(runs, runs, config.preset)
    return runs / name


def stored_config(path: Path) -> TrainConfig:
    """The configuration that the run in ``path`` was started with.

    Raises:
        RunError: there is no run, or its record is damaged.
    """
    if not (path / "run.json").exists():
        raise no_run(path, path.parent)
    config = read_json(path / "run.json").get("config")
    if not isinstance(config, dict):
        raise RunError(f"{path / 'run.json'}: damaged (config: found {type(config).__name__}, need an object)")
    if isinstance(config.get("optimizer"), dict):
        # Runs recorded before there was QK-clip had none.
        config["optimizer"].setdefault("qk_clip", 0.0)
    # Runs recorded before there were policies had the report's Quantile Balancing.
    old = {"policy": "qb", "estimator": "report", "score_domain": "sigmoid", "ema": 0.0, "adaptive_gain": False}
    config.setdefault("balance", old)
    try:
        return train_from_dict(config)
    except ValueError as error:  # anything else is a fault of ours and keeps its traceback
        raise RunError(f"{path / 'run.json'}: damaged ({error})") from error


def resume_command(config: TrainConfig, name: str) -> str:
    """What to type to go on with a run."""
    runs = "" if config.runs == TrainConfig().runs else f" --runs {config.runs}"
    return f"{program()} train --run {name}{runs} --resume"


def program() -> str:
    """How the command line is called from here: by its name where the shell finds it, else by its path.

    The path is the one this process was started by, or that of the script beside the interpreter.
    """
    called, found = Path(sys.argv[0]), shutil.which("trine")
    script = called if called.name == "trine" and called.is_file() else Path(sys.executable).with_name("trine")
    if not script.exists() or (found is not None and os.path.samefile(found, script)):
        return "trine"
    here = Path.cwd()
    return str(script.relative_to(here)) if script.is_relative_to(here) else str(script)


def load_run(path: str | Path, step: int | None = None, device: torch.device | str = "cpu") -> StoredRun:
    """Build the model of a run and fill it from a checkpoint.

    Args:
        path: the run's folder, or one of its checkpoints.
        step: which checkpoint; None takes the newest valid one.
        device: where the model goes.

    Raises:
        RunError: no run, no checkpoint, or a damaged one (passed over when no ``step`` was named).
        DataError: the tokenizer is missing, damaged, or another one than the run was trained with.
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
    tokenizer = stored_tokenizer(folder, record)
    if config.precision == "bf16":
        model.to(torch.bfloat16)
    load_model_state(model, checkpoint)
    model.to(device)
    model.eval()
    return StoredRun(folder, config, model, tokenizer, state["step"], passed_over)


def stored_tokenizer(folder: Path, record: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a run.

    Args:
        folder: of the run.
        record: its ``run.json``; one from before there was ``data.tokenizer`` knows only the size of the vocabulary.

    Raises:
        DataError: it is missing, damaged, or not the run's.
    """
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.load(path)
    need = record["model"]["vocab_size"]
    if tokenizer.vocab_size != need:
        raise DataError(f"tokenizer {path}: found {tokenizer.vocab_size} ids, the run's model has {need}")
    wanted = record.get("data", {}).get("tokenizer")
    if wanted is not None and hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
        raise DataError(f"tokenizer {path}: not the one that the run was trained with (its checksum does not fit)")
    return tokenizer
