"""Checkpoints: a folder ``step-000123`` of safetensors files and a ``state.json``, whole and checked or not there.

A checkpoint is written under a temporary name, flushed to the disk, and renamed; the rename is the moment it exists.
``state.json`` holds the size and SHA-256 of every tensor file and one of itself. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trine.train.errors import RunError

FORMAT_VERSION = 1
STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})")
_TEMPORARY = ".writing-"


class CheckpointError(RunError):
    """A checkpoint that is absent, half-written, damaged or of another model."""


class NewerFormatError(CheckpointError):
    """A checkpoint written by a newer version; passing over it would quietly undo training."""


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that was passed over."""

    path: Path
    reason: str


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint taken when ``step`` steps are done."""
    return f"step-{step:06d}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything in ``folder`` that is named like a checkpoint, oldest first; nothing is read."""
    found = []
    if folder.is_dir():
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
    return sorted(found)


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of ``step`` into ``folder``, replacing nothing: one that is there and valid is kept.

    Args:
        folder: holds all checkpoints of a run; made when absent.
        step: steps done.
        tensors: file stem (``"model"``, ``"optimizer"``) to tensors by name.
        state: JSON-ready values.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: the disk is full or not writable; older checkpoints are untouched and nothing is left behind.
    """
    final = folder / checkpoint_name(step)
    if final.exists():
        try:
            read_state(final)
            return final
        except NewerFormatError:
            raise
        except CheckpointError:
            shutil.rmtree(final)
    temporary = folder / f"{_TEMPORARY}{checkpoint_name(step)}-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        files = {}
        for stem, named in tensors.items():
            path = temporary / f"{stem}.safetensors"
            # A leading copy-free pass to the CPU; safetensors refuses tensors that are not contiguous.
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}, path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": _hash_file(path)}
            _flush(path)
        complete = {**state, "format_version": FORMAT_VERSION, "step": step, "files": files}
        complete["sha256"] = _hash_state(complete)
        path = temporary / STATE
        path.write_text(json.dumps(complete, indent=1), encoding="utf-8")
        _flush(path)
        _flush(temporary)
        temporary.rename(final)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else str(error).removeprefix("Error while serializing: ")
        raise RunError(f"{final}: cannot be saved ({reason}); {_what_is_left(folder)}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _what_is_left(folder: Path) -> str:
    before = list_checkpoints(folder)
    return f"{before[-1][1].name} is intact" if before else "there is no earlier checkpoint"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_state(state: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in state.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_state(path: Path, contents: bool = True) -> dict[str, Any]:
    """Check a whole checkpoint, tensor files included, and return its ``state.json``.

    Args:
        path: the checkpoint's folder.
        contents: read the tensor files and compare their checksums; without it only their sizes are looked at.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
        NewerFormatError: a format this version does not know.
    """
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path}: does not exist")
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path}: half-written, {STATE} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path}: {STATE} is damaged ({error})") from error
    version = state.get("format_version") if isinstance(state, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise NewerFormatError(
            f"checkpoint {path}: format_version {version} is newer than {FORMAT_VERSION}, the newest this version reads"
        )
    if version != FORMAT_VERSION or state.get("sha256") != _hash_state(state):
        raise CheckpointError(f"checkpoint {path}: {STATE} is damaged (its checksum does not fit)")
    for name, entry in state["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path}: half-written, {name} is missing")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"checkpoint {path}: {name} is damaged ({size} bytes, need {entry['bytes']})")
        if contents and _hash_file(file) != entry["sha256"]:
            raise CheckpointError(f"checkpoint {path}: {name} is damaged (its checksum does not fit)")
    return dict(state)


def read_tensors(path: Path, stem: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, on the CPU.

    Raises:
        CheckpointError: the file is absent or damaged.
    """
    file = path / f"{stem}.safetensors"
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path}: {file.name} is damaged or missing ({error})") from error


def newest_valid(folder: Path) -> tuple[Path | None, dict[str, Any], list[Damaged]]:
    """Find the newest checkpoint that is whole.

    Returns:
        Its path and state (None and {} when there is none), and the newer ones that had to be passed over.

    Raises:
        NewerFormatError: a newer version has written here.
    """
    damaged: list[Damaged] = []
    for _, path in reversed(list_checkpoints(folder)):
        try:
            return path, read_state(path), damaged
        except NewerFormatError:
            raise
        except CheckpointError as error:
            damaged.append(Damaged(path, str(error)))
    return None, {}, damaged


def set_aside(damaged: Sequence[Damaged]) -> list[Path]:
    """Rename checkpoints that were passed over to ``step-000030-damaged``; they are kept, but no checkpoints any more.

    Returns:
        Where they are now.
    """
    moved = []
    for one in damaged:
        number, target = 1, one.path.with_name(f"{one.path.name}-damaged")
        while target.exists():
            number += 1
            target = one.path.with_name(f"{one.path.name}-damaged-{number}")
        one.path.rename(target)
        moved.append(target)
    return moved


def prune(folder: Path, keep: int, written: Path | None = None) -> None:
    """Remove what is older than the ``keep`` newest checkpoints, and what unfinished saves left behind.

    Only checkpoints that are whole count, so that damaged ones never push out good ones; files are not read for that,
    their sizes are compared. ``written``, just saved, stays in any case.
    """
    whole = 0
    for _, path in reversed(list_checkpoints(folder)):
        if whole >= keep and path != written:
            shutil.rmtree(path, ignore_errors=True)
        elif path == written or _looks_whole(path):
            whole += 1
    sweep(folder)


def _looks_whole(path: Path) -> bool:
    try:
        read_state(path, contents=False)
    except CheckpointError:
        return False
    return True


def sweep(folder: Path) -> None:
    """Remove what saves that never finished left behind; only the run that holds the folder may do this."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def load_model_state(model: torch.nn.Module, path: Path) -> None:
    """Put a checkpoint's model tensors into ``model``: every name present, none unknown, shapes and dtypes equal.

    Raises:
        CheckpointError: listing the exact names that do not fit.
    """
    tensors = read_tensors(path, "model")
    needed = model.state_dict()
    for what, names in (("missing", needed.keys() - tensors.keys()), ("unknown", tensors.keys() - needed.keys())):
        if names:
            raise CheckpointError(f"checkpoint {path}: {what} tensors: {', '.join(sorted(names))}")
    for name, tensor in tensors.items():
        if tensor.shape != needed[name].shape or tensor.dtype != needed[name].dtype:
            found, need = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (tensor, needed[name]))
            raise CheckpointError(f"checkpoint {path}: {name}: found {found}, need {need}")
    model.load_state_dict(tensors)
