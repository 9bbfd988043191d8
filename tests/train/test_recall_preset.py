"""A run of generated rows, small: it trains, guards its short length, resumes to the same bits, and is evaluated."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from trine.train import finish
from trine.train.checkpoint import checkpoint_name
from trine.train.config import Stage, TrainConfig, train_preset
from trine.train.errors import RunError
from trine.train.loop import train
from trine.views.report import write_report


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return replace(
        train_preset("recall"),
        model=("layers=2", "mla_layers=(1,)", "width=32", "heads=1", "experts=4", "dense_width=32"),
        runs=str(tmp_path),
        run="one",
        tokens=6 * 256,
        stages=(
            Stage(length=32, share=0.5, step_tokens=256, micro_tokens=128),
            Stage(length=64, share=0.5, step_tokens=256, micro_tokens=128),
        ),
        device="cpu",
        threads=1,
        checkpoint_every=4,
    )


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_recall_run_from_rows_to_report(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "evaluate_recall", partial(finish.evaluate_recall, rows=4))
    summary = train(config)
    assert summary.steps == 6 and summary.evaluation is not None
    stored = json.loads((summary.folder / "eval.json").read_text())
    assert {cell["length"] for cell in stored["recall"]} == {32, 64, 128, 256} and stored["step"] == 6
    events = [json.loads(line) for line in (summary.folder / "events.jsonl").read_text().splitlines()]
    guard = [(one["stage"], one["length"], one["unit"]) for one in events if one["kind"] == "short_guard"]
    assert guard == [(0, 32, "nats an answer"), (1, 32, "nats an answer")]
    text = write_report(summary.folder).read_text()
    assert "## Recall" in text and "## The short context after each stage" in text and "## Held-out text" not in text
    assert (summary.folder / "plots" / "recall.png").exists()
    # A run of the same seed computes the same; one that begins again at step 4 ends the same.
    other = replace(config, run="two", eval=replace(config.eval, run=False))
    train(other)
    again = losses(summary.folder)
    assert losses(summary.folder.parent / "two") == again
    (summary.folder.parent / "two" / "checkpoints" / checkpoint_name(6)).rename(summary.folder.parent / "away")
    train(replace(other, resume=True))
    assert losses(summary.folder.parent / "two") == again
    assert finish.evaluate_run(summary.folder.parent / "two", lengths=(48,))["recall"][0]["length"] == 48
    with pytest.raises(RunError, match="cannot resume with another plan"):
        train(replace(other, resume=True, seed=1))
