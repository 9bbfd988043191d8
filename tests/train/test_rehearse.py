from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from trine.config import SourceShare
from trine.data import DataError
from trine.train import machine
from trine.train.config import DataConfig, EvalConfig, Stage, TrainConfig, train_preset
from trine.train.loop import train
from trine.train.rehearse import forecast
from trine.views.compare import FORECAST_HEADINGS, forecast_note, forecast_rows


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"allocator": False, "flush_denormal": False, "threads": 1}
    monkeypatch.setattr(machine, "prepare_machine", lambda threads: settings)
    monkeypatch.setattr(machine, "busy_warning", lambda: "the machine is busy: 40%")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    folder, draw = tmp_path / "texts", random.Random(0)
    folder.mkdir()
    for number in range(40):
        count = 10 if number % 2 else 60
        lines = [
            f"value_{draw.randrange(50)} = {draw.choice('abcdef') * 3} + {draw.randrange(99)}" for _ in range(count)
        ]
        (folder / f"program_{number:02d}.py").write_text("\n".join(lines) + "\n")
    return TrainConfig(
        preset="smoke",
        model=("layers=2", "mla_layers=(1,)", "width=32", "heads=2", "head_dim=16", "dense_width=64", "experts=4"),
        runs=str(tmp_path / "runs"),
        tokens=16 * 256,
        stages=(
            Stage(length=32, share=0.75, step_tokens=256, micro_tokens=64),
            Stage(length=128, share=0.25, step_tokens=512, micro_tokens=256, mixture=(SourceShare("*", shortest=200),)),
        ),
        data=DataConfig(source=str(folder), held_out_one_in=4, vocabulary=300),
        eval=EvalConfig(run=False),
        device="cpu",
    )


def test_the_table_says_what_will_be_read_and_what_it_takes(config: TrainConfig, tmp_path: Path) -> None:
    found = forecast(config)
    first, second = found.stages
    assert (first.steps, second.steps, found.steps, found.tokens) == (12, 2, 14, 12 * 256 + 2 * 512)
    assert (first.length, second.length, second.step_tokens) == (32, 128, 512)
    assert second.mixture == ("*=1@200-",) and first.mixture == ()
    assert first.long_share is None and second.long_share == 1.0
    assert 0 < first.epochs["all documents"] < 4 and second.epochs["*=1@200-"] > 0
    assert second.epochs_in_all["*=1@200-"] > second.epochs["*=1@200-"]
    assert first.step_seconds and second.step_seconds and found.seconds
    assert found.seconds == pytest.approx(12 * first.step_seconds + 2 * second.step_seconds)
    assert found.peak_bytes and found.peak_bytes > 1e8
    assert found.warnings[0] == "the machine is busy: 40%"
    assert not (tmp_path / "runs").exists()
    rows = forecast_rows(found.to_json()["stages"])
    assert all(len(row) == len(FORECAST_HEADINGS) for row in rows)
    assert rows[1][:6] == (
        *("2: 128 tokens", "2 x 512", "1.02 K", "*=1@200-"),
        *(f"{second.epochs['*=1@200-']:.2f}", "100 %"),
    )
    note = forecast_note(found.to_json())
    assert note.startswith("14 steps, 4.1 K tokens, about ") and "warning: the machine is busy: 40%" in note


def test_without_measuring_no_model_is_built(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trine.train.rehearse.build_model", None)
    found = forecast(config, measure=False)
    assert found.seconds is None and found.stages[0].step_seconds is None and found.peak_bytes is None
    assert found.warnings == ()
    assert forecast_rows(found.to_json()["stages"])[0][-3:] == ("-", "-", "-")


def test_a_stage_without_long_texts_is_warned_of_and_repeats_are_refused(config: TrainConfig) -> None:
    short = (SourceShare("*", longest=200),)
    stages = (
        Stage(length=32, share=0.5, step_tokens=256, micro_tokens=64),
        Stage(length=256, share=0.25, step_tokens=512, micro_tokens=256),
        Stage(length=512, share=0.25, step_tokens=512, micro_tokens=512, mixture=short),
    )
    found = forecast(dataclasses.replace(config, stages=stages), measure=False)
    assert found.stages[2].long_share == 0.0
    assert any("0% of the tokens come from documents longer than the 256 tokens" in text for text in found.warnings)
    often = dataclasses.replace(config, tokens=config.tokens * 50)
    with pytest.raises(DataError, match="need at most 4"):
        forecast(often, measure=False)
    assert forecast(dataclasses.replace(often, allow_repeats=True), measure=False).steps == 700


def test_the_data_of_a_run_that_exists_is_used(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    one = (dataclasses.replace(config.stages[0], share=1.0),)
    quick = dataclasses.replace(config, run="there", tokens=256, stages=one)
    train(quick)
    monkeypatch.setattr("tempfile.TemporaryDirectory", None)
    assert forecast(dataclasses.replace(quick, resume=True), measure=False).steps == 1


def test_rows_made_while_they_are_read_have_no_epochs(tmp_path: Path) -> None:
    found = forecast(dataclasses.replace(train_preset("recall"), runs=str(tmp_path / "runs")), measure=False)
    assert [one.epochs for one in found.stages] == [{} for _ in found.stages] and found.steps > 100
    assert forecast_rows(found.to_json()["stages"])[0][3:6] == ("all documents", "", "")
