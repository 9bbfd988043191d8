from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trine.train.errors import RunError
from trine.train.probes import Record
from trine.train.tensorboard import TensorBoard
from trine.train.trainer import Trainer


class Log:
    """Stands in for TensorBoard's writer, which an extra installs."""

    made: list[Log]

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.scalars: list[tuple[str, float, int]] = []
        Log.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def _log(monkeypatch: pytest.MonkeyPatch) -> None:
    Log.made = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Log))


def run(tiny: SimpleNamespace, folder: Path, steps: int) -> Any:
    trainer = Trainer(
        *(tiny.model(), tiny.plan(3), tiny.batches, tiny.optimizer()),
        balancer=tiny.balancer(),
        callbacks=[TensorBoard(folder)],
    )
    return trainer.run(steps)


@pytest.mark.usefixtures("_log")
def test_what_a_look_inside_found_is_in_the_log(tiny: SimpleNamespace, tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    record: Record = {
        "step": 7,
        "layers": {"labels": ["0", "head"], "tokens_alike": [0.1, None], "next_alike": [0.9]},
        "activations": {"stream": {"max": [3.0, 4.0], "rms": [1.0, 1.0]}, "attention": {"max": [None], "rms": [None]}},
        "gates": [{"layer": 0, "memory": [[1, 5, 9], [2, 7, 9]], "at_g_min": [0.25, 0.75], "at_zero": None}],
        "openness": [{"layer": 0, "mean": [0.5, 0.7]}],
    }
    board.probe(record)  # before the run begins there is no log
    trainer = Trainer(tiny.model(), tiny.plan(1), tiny.batches, tiny.optimizer(), callbacks=[board])
    board.on_start(trainer)
    board.probe(record)
    board.on_end(trainer)
    (log,) = Log.made
    assert set(log.scalars) == {
        *(("inside/tokens_alike/0", 0.1, 7), ("inside/next_alike/0", 0.9, 7), ("inside/activation_max/stream", 4.0, 7)),
        *(("inside/memory_tokens/0", 6.0, 7), ("inside/at_g_min/0", 0.5, 7), ("inside/openness/0", 0.6, 7)),
    }


@pytest.mark.usefixtures("_log")
def test_every_figure_is_in_the_log(tiny: SimpleNamespace, tmp_path: Path) -> None:
    last = run(tiny, tmp_path, 3)
    (log,) = Log.made
    assert log.closed and log.purge_step == 1 and log.folder == str(tmp_path)
    names = {name for name, _, _ in log.scalars}
    assert names == {
        *("train/loss", "train/bits_per_byte", "train/lr", "train/grad_norm", "train/tokens_per_s"),
        *("train/dead_experts", "train/clipped_heads", "max_vio/0", "stage/length"),
        *("load/p1", "load/p5", "load/p50", "load/p95", "load/p99"),
    }
    losses = [(value, step) for name, value, step in log.scalars if name == "train/loss"]
    assert [step for _, step in losses] == [1, 2, 3] and losses[-1][0] == last.loss
    assert ("stage/length", 24, 1) in log.scalars


def test_without_the_extra_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        RunError, match=r"tensorboard: is not installed; in the clone: \.venv/bin/pip install -e '\.\[log\]'"
    ):
        TensorBoard(tmp_path)
