from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from trine.train import machine, study
from trine.train.config import TRAIN_PRESETS, DataConfig, EvalConfig, TrainConfig
from trine.train.errors import RunError
from trine.train.study import run_study, summarise
from trine.train.study_config import ARMS, StudyConfig, arm_stages
from trine.views.study import study_headings, study_rows, write_study


@pytest.mark.parametrize("longest", [1_024, 4_096, 16_384])
def test_arms_differ_in_rows_and_mixture_only(longest: int) -> None:
    arms = {arm: arm_stages(arm, longest) for arm in ARMS}
    for stages in arms.values():
        assert {stage.step_tokens for stage in stages} == {longest}
        assert sum(stage.share for stage in stages) == pytest.approx(1.0)
        assert stages[-1].length == longest
    assert [s.length for s in arms["longest"]] == [longest]
    assert [s.length for s in arms["staged"]] == [x for x in (128, 1_024, 4_096, 16_384) if x <= longest]
    plain = [dataclasses.replace(stage, mixture=()) for stage in arms["staged-mixture"]]
    assert tuple(plain) == arms["staged"] and all(not stage.mixture for stage in arms["staged"])
    assert [bool(stage.mixture) for stage in arms["staged-mixture"]] == [i > 0 for i in range(len(plain))]
    with pytest.raises(ValueError, match="arm: found 'other', need one of staged-mixture"):
        arm_stages("other", longest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"longest": 512}, "longest: found 512, need one of 1024, 4096, 16384"),
        ({"seeds": 0}, "seeds: found 0, need at least 1"),
        ({"tokens": -1}, "tokens: found -1, need 0"),
        ({"budget": 0.0}, "budget: found 0.0, need more than 0 minutes"),
    ],
)
def test_bad_values_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudyConfig(**change)


def test_means_and_deviations() -> None:
    results = [
        {"arm": "a", "tokens_per_s": 10.0, "seconds": 1.0, "loss": x, "bits_by_context": {"128": x + 1}}
        for x in (1.0, 3.0)
    ]
    results.append({"arm": "b", "tokens_per_s": 5.0, "seconds": 2.0, "loss": 4.0, "bits_by_context": {"128": 2.0}})
    arms = summarise(results)
    assert arms["a"]["loss"] == {"mean": 2.0, "deviation": pytest.approx(2**0.5)}
    assert arms["a"]["bits_by_context"]["128"]["mean"] == 3.0 and arms["a"]["seeds"] == 2
    assert arms["b"]["loss"] == {"mean": 4.0, "deviation": None}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyConfig:
    """A study of a minute model: 128 and 1,024 tokens, two steps a run."""
    settings = {"allocator": False, "flush_denormal": False, "threads": 1}
    monkeypatch.setattr(machine, "prepare_machine", lambda threads: settings)
    monkeypatch.setattr(machine, "busy_warning", lambda: None)
    folder, draw = tmp_path / "texts", random.Random(0)
    folder.mkdir()
    for number in range(24):
        count = 20 if number % 2 else 300
        lines = [
            f"value_{draw.randrange(50)} = {draw.choice('abcdef') * 3} + {draw.randrange(99)}" for _ in range(count)
        ]
        (folder / f"program_{number:02d}.py").write_text("\n".join(lines) + "\n")
    plan = TrainConfig(
        preset="smoke",
        model=("layers=2", "mla_layers=(1,)", "width=32", "heads=2", "head_dim=16", "dense_width=64", "experts=4"),
        data=DataConfig(source=str(folder), held_out_one_in=4, vocabulary=300),
        eval=EvalConfig(run=False),
    )
    monkeypatch.setitem(TRAIN_PRESETS, "smoke", plan)
    return StudyConfig(
        folder=str(tmp_path / "study"), preset="smoke", longest=1_024, seeds=1, tokens=2_048, device="cpu"
    )


def test_a_study_runs_what_is_missing_and_no_more(small: StudyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = study.train
    monkeypatch.setattr(study, "TASK_TOKENS", 0)

    def counted(config: TrainConfig, console: Any) -> Any:
        asked.append(config.run)
        return real(config, console)

    monkeypatch.setattr(study, "train", counted)
    found = run_study(small)
    assert asked == [f"{arm}-0" for arm in ARMS]
    assert [one["tokens"] for one in found["results"]] == [2_048] * 3
    assert [len(one["seconds_by_stage"]) for one in found["results"]] == [2, 2, 1]
    assert set(found["arms"]["longest"]["bits_by_context"]) == {"128", "1024"}
    assert json.loads((Path(small.folder) / "study.json").read_text())["tokens"] == 2_048
    # One of three is gone: only that one is run again, with the same plan.
    (Path(small.folder) / "staged-0" / "result.json").unlink()
    again = run_study(dataclasses.replace(small, tokens=0))
    assert asked[3:] == ["staged-0"]
    assert again["arms"]["staged"]["bits_by_context"] == found["arms"]["staged"]["bits_by_context"]
    rows = study_rows(found)
    assert [len(row) for row in rows] == [len(study_headings(found))] * 3
    page = write_study(found, Path(small.folder))
    text = page.read_text()
    assert "staged, longer documents in longer stages" in text and "bits/byte, context 1,024" in text
    assert (Path(small.folder) / "study.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(RunError, match="holds a study of 2048 tokens a run, found 4096"):
        run_study(dataclasses.replace(small, tokens=4_096))
    with pytest.raises(RunError, match="holds a study with longest 1024, found 4096"):
        run_study(dataclasses.replace(small, longest=4_096))


def test_a_budget_becomes_tokens_once(small: StudyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen:
        seconds, tokens = 2.0, 1_000  # 500 tokens a second in every arm

    monkeypatch.setattr(study, "forecast", lambda config: Seen)
    plan = study._planned(dataclasses.replace(small, tokens=0, budget=1.0, seeds=2), _made(small), lambda text: None)
    # 51 s for two seeds of three arms at 2 ms a token: 4,250 tokens, four steps of 1,024
    assert plan["tokens"] == 4 * 1_024
    monkeypatch.setattr(study, "forecast", None)
    assert study._planned(dataclasses.replace(small, tokens=0, budget=9.0), _made(small), None) == plan


def _made(config: StudyConfig) -> Path:
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_what_a_model_is_asked_after_its_run(small: StudyConfig) -> None:
    from trine.model import Model
    from trine.train.loop import open_data

    config = study._run_config(small, "longest", 0, _made(small), 2_048)
    shards = open_data(config, Path(small.folder) / "data")
    found = study.measure(Model(config.model_config()), shards, 1_024, 30_000)
    assert set(found) == {"bits_by_context", "recall_by_length", "chance_by_length", "gap_by_length"}
    assert set(found["recall_by_length"]) == {"1024"} and 0 <= found["recall_by_length"]["1024"] < 0.5
    assert 0 < found["chance_by_length"]["1024"] < 1 and abs(found["gap_by_length"]["1024"]) < 0.5
    assert found["bits_by_context"]["1024"] > 4
    arms = summarise([{"arm": "a", "tokens_per_s": 1.0, "seconds": 1.0, "loss": 1.0, **found}])
    page = {"arms": arms, "tokens": 1, "config": {"longest": 1_024, "preset": "smoke"}}
    headings, (row,) = study_headings(page), study_rows(page)
    assert headings[3:5] == ("recall (chance), 1,024 tokens", "evidence gap, 1,024 tokens") and len(row) == len(
        headings
    )
