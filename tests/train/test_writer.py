from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trine.train import checkpoint
from trine.train.callbacks import Callback, SaveEvery
from trine.train.errors import RunError
from trine.train.run_folder import RunFolder
from trine.train.trainer import Trainer
from trine.train.writer import Writer


def test_what_is_written_is_what_was_there_when_the_save_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), checkpoint.save_checkpoint

    def slow(*arguments: Any) -> Path:
        go.wait(10)
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "save_checkpoint", slow)
    writer, tensor, note = Writer(tmp_path, 2), torch.arange(4.0), {"list": [1]}
    writer.save(3, {"model": {"a": tensor}}, {"note": note})
    tensor.fill_(-1.0)
    note["list"].append(2)
    assert writer.finished() is None
    go.set()
    path = writer.finished(wait=True)
    assert path == tmp_path / "step-000003"
    assert checkpoint.read_tensors(path, "model")["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert checkpoint.read_state(path)["note"] == {"list": [1]}
    assert writer.finished(wait=True) is None


class Saved(Callback):
    name = "saved"

    def __init__(self) -> None:
        self.paths: list[str] = []

    def on_save(self, trainer: Trainer, path: Path) -> None:
        assert (path / checkpoint.STATE).exists()
        self.paths.append(path.name)


def test_saves_come_in_order_and_all_are_told(tiny: SimpleNamespace, tmp_path: Path) -> None:
    saved = Saved()
    with RunFolder(tmp_path / "run") as folder:
        trainer = Trainer(
            *(tiny.model(), tiny.plan(7), tiny.batches, tiny.optimizer()),
            folder=folder,
            callbacks=[SaveEvery(2), saved],
            background=True,
        )
        trainer.run()
        names = [path.name for _, path in checkpoint.list_checkpoints(folder.checkpoints)]
    assert saved.paths == ["step-000002", "step-000004", "step-000006", "step-000007"]
    assert names == ["step-000006", "step-000007"]


def test_in_the_background_and_at_once_write_the_same(tiny: SimpleNamespace, tmp_path: Path) -> None:
    for name, background in (("one", False), ("two", True)):
        with RunFolder(tmp_path / name) as folder:
            trainer = Trainer(
                *(tiny.model(), tiny.plan(4), tiny.batches, tiny.optimizer()),
                folder=folder,
                balancer=tiny.balancer(),
                background=background,
            )
            trainer.run()
    files = [sorted(p for p in (tmp_path / name / "checkpoints").rglob("*") if p.is_file()) for name in ("one", "two")]
    assert [p.name for p in files[0]] == ["model.safetensors", "optimizer.safetensors", "state.json"]
    for mine, other in zip(*files, strict=True):
        assert mine.read_bytes() == other.read_bytes(), mine.name


def test_a_save_that_fails_is_told_at_the_next_step(
    tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.save_checkpoint

    def full(folder: Path, step: int, *rest: Any) -> Path:
        if step == 4:
            raise RunError("step-000004: cannot be saved (No space left on device); step-000002 is intact")
        return real(folder, step, *rest)

    monkeypatch.setattr(checkpoint, "save_checkpoint", full)
    with RunFolder(tmp_path / "run") as folder:
        trainer = Trainer(
            *(tiny.model(), tiny.plan(9), tiny.batches, tiny.optimizer()),
            folder=folder,
            callbacks=[SaveEvery(2)],
            background=True,
        )
        with pytest.raises(RunError, match=r"No space left on device.*step-000002 is intact"):
            trainer.run()
        assert 4 <= trainer.step <= 6
        names = [path.name for _, path in checkpoint.list_checkpoints(folder.checkpoints)]
    assert names == ["step-000002"]
