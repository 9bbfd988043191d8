from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trine._options import parse_study
from trine.train import machine, study, study_jobs
from trine.train.config import TRAIN_PRESETS, DataConfig, EvalConfig, TrainConfig
from trine.train.errors import Interrupted, RunError
from trine.train.study import run_study, summarise
from trine.train.study_config import ARMS, StudyConfig, arm_stages, chosen_runs
from trine.train.study_jobs import run_side_by_side
from trine.views.study import study_headings, study_note, study_rows, write_study


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
        ({"arms": ("staged", "short")}, "arm: found 'short', need one of staged-mixture, staged, longest"),
        ({"seed": (0, 3)}, r"seed: found \(0, 3\), need numbers from 0 to 2"),
        ({"jobs": -1}, "jobs: found -1, need 0"),
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
        folder=str(tmp_path / "study"), preset="smoke", longest=1_024, seeds=1, tokens=2_048, jobs=1, device="cpu"
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
    assert study_headings(found) == ("", "staged with mixtures", "staged", "longest from the start")
    assert {len(row) for row in rows} == {4} and [row[0] for row in rows][:2] == [
        "bits/byte, context 128",
        "bits/byte, context 1,024",
    ]
    assert rows[1][3] == f"{found['arms']['longest']['bits_by_context']['1024']['mean']:.3f}"
    page = write_study(found, Path(small.folder))
    text = page.read_text()
    assert "longest from the start" in text and "bits/byte, context 1,024" in text
    assert (Path(small.folder) / "study.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(RunError, match="holds a study of 2048 tokens a run, found 4096"):
        run_study(dataclasses.replace(small, tokens=4_096))
    with pytest.raises(RunError, match="holds a study with longest 1024, found 4096"):
        run_study(dataclasses.replace(small, longest=4_096))


def test_a_budget_becomes_tokens_once(small: StudyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen:
        seconds, tokens = 2.0, 1_000  # 2 ms a token in every arm

    monkeypatch.setattr(study, "forecast", lambda config: Seen)
    monkeypatch.setattr(study, "_held_out_tokens", lambda shards: 500)
    monkeypatch.setattr(study, "TASK_TOKENS", 1_000)
    wanted = dataclasses.replace(small, tokens=0, budget=1.0, seeds=2)
    # A core has 0.85 x 60 s; two seeds share it: 25.5 s for three runs. Each reads 2 x 500 + 1,000 tokens at 0.4 of
    # 2 ms after its training: 1.6 s. 20.7 s at 6 ms for a token of all three are 3,450 tokens: three steps, too few.
    with pytest.raises(
        RunError, match=r"budget: found 1 minutes, which leaves 3,072 tokens a run; need at least 8,192"
    ):
        study._planned(wanted, _made(small), lambda text: None)
    # Four side by side: 102 - 4.8 s are 16,200 tokens, fifteen steps of 1,024.
    plan = study._planned(wanted, _made(small), lambda text: None, 4)
    assert plan["tokens"] == 15 * 1_024
    monkeypatch.setattr(study, "forecast", None)
    assert study._planned(dataclasses.replace(small, tokens=0, budget=9.0), _made(small), None) == plan


def test_runs_are_picked_apart_and_put_together(small: StudyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command an arm and seed in the same folder, as on many cores; the last one holds all."""
    monkeypatch.setattr(study, "TASK_TOKENS", 0)
    two = dataclasses.replace(small, seeds=2)
    assert chosen_runs(two) == [(arm, seed) for seed in (0, 1) for arm in ARMS]
    part = run_study(dataclasses.replace(two, arms=("staged",), seed=(1,)))
    assert part["missing"] == ["staged-mixture-0", "staged-0", "longest-0", "staged-mixture-1", "longest-1"]
    assert part["arms"].keys() == {"staged"} and "Not done yet: staged-mixture-0" in study_note(part)
    run_study(dataclasses.replace(two, arms=("longest", "staged-mixture")))
    with monkeypatch.context() as patch:
        patch.setattr(study, "_one_run", None)  # nothing of these is run again
        run_study(dataclasses.replace(two, arms=("longest",)))
    whole = run_study(dataclasses.replace(two, arms=("staged",), seed=(0,)))
    assert whole["missing"] == [] and list(whole["arms"]) == list(ARMS)
    assert [arm["seeds"] for arm in whole["arms"].values()] == [2, 2, 2]
    assert "Not done yet" not in study_note(whole) and "2 seeds" in study_note(whole)
    seen = [one["loss"] for one in whole["results"] if one["arm"] == "staged"]
    assert len(set(seen)) == 2 and whole["arms"]["staged"]["loss"]["deviation"] > 0


def test_side_by_side_by_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    config = StudyConfig(folder=str(tmp_path), seeds=2)
    script = "import sys, time; time.sleep(0.4); print('said', sys.argv[1]); sys.exit(int(sys.argv[2]))"
    code = {"staged": 0, "longest": 0, "staged-mixture": 0}
    monkeypatch.setattr(
        study_jobs, "command", lambda c, arm, seed, tokens, threads: [sys.executable, "-c", script, arm, str(code[arm])]
    )
    runs = [(arm, seed) for seed in (0, 1) for arm in ("staged", "longest")]
    run_side_by_side(study_jobs.study_jobs(config, runs, 7, 1), 2, said.append)
    begun = [line for line in said if not line.endswith("done")]
    assert begun == [f"study: {arm}, seed {seed}" for arm, seed in runs]
    assert said.index("study: staged, seed 1") > min(i for i, s in enumerate(said) if s.endswith("done"))
    assert (tmp_path / "longest-1.log").read_text() == "said longest\n"
    code["longest"] = 1
    with pytest.raises(RunError, match=r"study: longest, seed 0 failed \(said longest\); .*longest-0\.log"):
        run_side_by_side(study_jobs.study_jobs(config, runs, 7, 1), 2, said.append)


def test_a_signal_ends_all_that_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import signal, sys, time\nsignal.signal(15, lambda *_: (print('saved'), sys.exit(130)))\n"
    script += "print('up', flush=True)\ntime.sleep(60)"
    monkeypatch.setattr(study_jobs, "command", lambda *_: [sys.executable, "-c", script])
    config, runs = StudyConfig(folder=str(tmp_path)), [("staged", 0), ("longest", 0)]
    logs = [tmp_path / f"{arm}-0.log" for arm, _ in runs]

    def ours_when_both_are_up() -> None:
        while not all(log.exists() and "up" in log.read_text() for log in logs):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ours_when_both_are_up, daemon=True).start()
    with pytest.raises(Interrupted, match="go on with the same `trine study` command"):
        run_side_by_side(study_jobs.study_jobs(config, runs, 7, 1), 2, lambda text: None)
    assert [log.read_text() for log in logs] == ["up\nsaved\n"] * 2


def test_the_command_of_one_run_is_that_run(tmp_path: Path) -> None:
    config = StudyConfig(folder=str(tmp_path), source="stdlib", longest=1_024, seeds=2, more=("tasks:9x99", "stdlib"))
    words = study_jobs.command(config, "staged", 1, 9_216, 1)
    assert words[1:5] == ["-m", "trine.cli", "study", "curriculum"]
    wanted = dataclasses.replace(config, arms=("staged",), seed=(1,), jobs=1, threads=1, tokens=9_216)
    assert parse_study(words[4:]) == wanted


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
    assert 3.5 < found["bits_by_context"]["1024"] < 4.5  # of the files alone: tasks' filler is other text
    arms = summarise([{"arm": "a", "tokens_per_s": 1.0, "seconds": 1.0, "loss": 1.0, **found}])
    page = {"arms": arms, "tokens": 1, "config": {"longest": 1_024, "preset": "smoke"}}
    rows = dict(study_rows(page))
    assert rows["recall (chance), 1,024 tokens"].endswith(f"({100 * found['chance_by_length']['1024']:.1f})")
    assert rows["evidence gap, 1,024 tokens"] == f"{found['gap_by_length']['1024']:,.3f}"
