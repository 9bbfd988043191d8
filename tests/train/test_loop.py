from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from trine.config import SourceShare
from trine.data import DataError, Tokenizer
from trine.train import loop, machine
from trine.train.callbacks import Callback
from trine.train.checkpoint import list_checkpoints, read_tensors
from trine.train.config import DataConfig, EvalConfig, OptimizerConfig, Stage, TrainConfig, train_to_dict
from trine.train.errors import Interrupted, RunError
from trine.train.finish import evaluate_run, write
from trine.train.loop import RunSummary, train
from trine.train.metrics import StepRecord
from trine.train.run_folder import RunFolder
from trine.train.stored import load_run, program, stored_config
from trine.train.trainer import Trainer
from trine.views.report import write_report

MODEL = (
    "layers=3",
    "mla_layers=(1,2)",
    "width=32",
    "heads=2",
    "head_dim=16",
    "dense_width=64",
    "experts=4",
    "kv_rank=8",
)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the process's allocator and threads, nor half a second of watching others, belong into these tests."""
    settings = {"allocator": False, "flush_denormal": False, "threads": torch.get_num_threads()}
    monkeypatch.setattr(machine, "prepare_machine", lambda threads: settings)
    monkeypatch.setattr(machine, "busy_warning", lambda: None)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sixty small programs."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "count", "value", "index", "total", "left", "right"]
    for number in range(60):
        lines = [f"# file {number}, seed {draw.random()}"]
        for _ in range(30):
            a, b, c = (draw.choice(words) for _ in range(3))
            lines.append(f"def {a}_{draw.randrange(100)}({b}):\n    return {b} + {c} * {draw.randrange(1000)}")
        (folder / f"program_{number:02d}.py").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def config(texts: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        preset="smoke",
        model=MODEL,
        runs=str(tmp_path / "runs"),
        tokens=6 * 256,
        stages=(Stage(length=64, step_tokens=256, micro_tokens=128),),
        optimizer=OptimizerConfig(warmup=0.2),
        data=DataConfig(source=str(texts), held_out_one_in=4, vocabulary=300),
        eval=EvalConfig(context=64, primed=False, sample_tokens=8),
        device="cpu",
        checkpoint_every=2,
    )


class StopAfter(Callback):
    """Sends this process SIGINT when a step is done."""

    name = "stop"

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        if record.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def again(config: TrainConfig, **changes: object) -> TrainConfig:
    return dataclasses.replace(config, resume=True, **changes)  # type: ignore[arg-type]


def weights(summary: RunSummary) -> dict[str, torch.Tensor]:
    step, path = list_checkpoints(summary.folder / "checkpoints")[-1]
    assert step == summary.steps
    return read_tensors(path, "model")


def test_a_whole_run_leaves_everything_in_its_folder(config: TrainConfig) -> None:
    file = io.StringIO()
    summary = train(config, Console(file=file, force_terminal=False, width=200))
    folder = summary.folder
    assert folder == Path(config.runs) / "smoke"
    assert (summary.steps, summary.tokens) == (6, 1536) and summary.seconds > 0 and summary.loss > 0  # type: ignore[operator]
    record = json.loads((folder / "run.json").read_text())
    assert record["config"]["data"]["vocabulary"] == 300 and record["model"]["width"] == 32
    assert record["planned_steps"] == 6 and record["seed"] == 0 and record["command"] == sys.argv
    assert record["versions"]["torch"] and record["hardware"]["cpu"] and record["threads"] >= 1
    assert len(record["data"]["hash"]) == 64 and record["data"]["licences"] == ["unknown"]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[-1]["loss"] == summary.loss and metrics[0]["bits_per_byte"] > 0 and len(metrics[0]["max_vio"]) == 2
    evaluation = json.loads((folder / "eval.json").read_text())
    assert evaluation["step"] == 6 and 0 < evaluation["bits_per_byte"] < 12
    assert {"gzip", "xz", "ngram3", "ngram_best"} <= set(evaluation["baselines"])
    assert summary.evaluation is not None and evaluation["bits_per_byte"] == summary.evaluation["bits_per_byte"]
    assert summary.sample is not None and summary.sample.startswith("def ")
    assert (
        folder / "sample.txt"
    ).read_bytes().decode() == summary.sample + "\n"  # to the byte: a sample may end in "\r"
    assert Tokenizer.load(folder / "tokenizer.json").vocab_size == 300
    assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [4, 6]
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds == ["stage", "done"]
    shown = file.getvalue()
    assert f"run {folder}" in shown and "60 documents" not in shown and "held out" in shown
    assert "step 1/6" in shown and "step 6/6" in shown


def test_interrupted_and_resumed_equals_uninterrupted(config: TrainConfig) -> None:
    quick = dataclasses.replace(config, eval=EvalConfig(run=False))
    straight = train(dataclasses.replace(quick, run="straight"))
    with pytest.raises(Interrupted) as error:
        train(dataclasses.replace(quick, run="cut"), callbacks=[StopAfter(3)])
    command = f"{program()} train --run cut --runs {config.runs} --resume"
    assert str(error.value) == f"interrupted; step 3 of 6 is saved; go on with: {command}"
    resumed = train(again(quick, run="cut"))
    assert resumed.steps == 6
    other = weights(resumed)
    for name, value in weights(straight).items():
        assert torch.equal(value, other[name]), name
    events = [json.loads(line) for line in (resumed.folder / "events.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["kind"] == "resume")
    assert (event["checkpoint"], event["step"]) == ("step-000003", 3)
    steps = [json.loads(line)["step"] for line in (resumed.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_resumes_to_its_evaluation(config: TrainConfig) -> None:
    done = train(dataclasses.replace(config, eval=EvalConfig(run=False)))
    before = weights(done)
    evaluated = train(again(config))
    assert evaluated.folder == done.folder and evaluated.loss is None and evaluated.evaluation is not None
    assert all(torch.equal(value, before[name]) for name, value in weights(evaluated).items())


def test_nothing_is_overwritten(config: TrainConfig) -> None:
    quick = dataclasses.replace(config, eval=EvalConfig(run=False), tokens=256)
    first, second = train(quick), train(quick)
    assert (first.folder.name, second.folder.name) == ("smoke", "smoke-2")
    with pytest.raises(RunError) as error:
        train(dataclasses.replace(quick, run="smoke"))
    assert (
        str(error.value)
        == f"{first.folder}: holds a run already; add --resume to go on with it, or choose another --run"
    )
    with pytest.raises(RunError) as error:
        train(again(quick, run="smoke", seed=4))
    assert str(error.value) == (
        f"{first.folder}: cannot resume with another plan: seed: found 4, the stored run has 0; start a new run for it"
    )
    with pytest.raises(RunError, match="tokens: found 512, the stored run has 256"):
        train(again(quick, run="smoke", tokens=512))
    with pytest.raises(RunError, match=r"run: found no run in .*/none; .* has smoke, smoke-2"):
        train(again(quick, run="none"))
    assert not (first.folder.parent / "none").exists()
    with pytest.raises(RunError, match=r"run: found no run of preset 'laptop' in .*; .* has smoke, smoke-2"):
        train(again(quick, preset="laptop", model=()))


def test_two_runs_in_one_folder(config: TrainConfig) -> None:
    with RunFolder(Path(config.runs) / "busy"), pytest.raises(RunError, match="busy: in use by process"):
        train(dataclasses.replace(config, run="busy"))


def shown_by(config: TrainConfig, width: int = 200) -> tuple[RunSummary, str]:
    """A run, and what it prints into a file."""
    file = io.StringIO()
    summary = train(config, Console(file=file, force_terminal=False, width=width))
    return summary, file.getvalue()


def test_two_steps_then_everything_that_reads_a_run(config: TrainConfig) -> None:
    """Trained, stopped, resumed, evaluated and asked to write, with a mixture, all through the run's folder."""
    stage = dataclasses.replace(config.stages[0], mixture=(SourceShare("*", 1.0, 0.5),))
    plan = dataclasses.replace(config, stages=(stage,), tokens=2 * 256, eval=EvalConfig(run=False), run="two")
    with pytest.raises(Interrupted):
        train(plan, callbacks=[StopAfter(1)])
    folder = Path(plan.runs) / "two"
    kept = stored_config(folder)
    assert kept == plan
    summary, text = shown_by(dataclasses.replace(kept, resume=True))
    assert summary.steps == 2 and "resumed at step 1 of 2\n" in text
    found = evaluate_run(folder)
    assert found["step"] == 2 and 0 < found["bits_per_byte"] < 12
    run = load_run(folder)
    assert write(run.model, run.tokenizer, "def ", 3).startswith("def ")
    _, text = shown_by(dataclasses.replace(kept, resume=True))
    assert "resumed at step 2 of 2: nothing left to train\n" in text


def test_nothing_held_out_is_said_before_training_and_the_run_still_ends_well(config: TrainConfig) -> None:
    data = dataclasses.replace(config.data, held_out_one_in=100_000)
    summary, text = shown_by(dataclasses.replace(config, data=data, tokens=512))
    assert text.index("nothing is held out, so the model will not be measured") < text.index("step 1/2")
    assert summary.steps == 2 and summary.evaluation is None and summary.sample
    assert json.loads((summary.folder / "run.json").read_text())["data"]["held_out"] == 0
    assert not (summary.folder / "eval.json").exists()
    assert "no document is held out" in write_report(summary.folder).read_text()


def test_tokens_are_rounded_to_whole_steps_aloud_and_a_log_keeps_a_line_a_line(config: TrainConfig) -> None:
    quick = dataclasses.replace(config, eval=EvalConfig(run=False))
    _, text = shown_by(dataclasses.replace(quick, tokens=10), width=40)
    assert "tokens: 10 asked for, 256 in whole steps\n" in text
    (line,) = (line for line in text.splitlines() if line.startswith("step 1/1 "))
    assert line.endswith(" left") and len(line) > 40
    assert "in whole steps" not in shown_by(dataclasses.replace(quick, tokens=512))[1]


def test_a_crash_before_the_record_is_whole_leaves_no_run_and_resuming_restores_the_tokenizer(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is the last file of a beginning, so what has one has all."""
    quick, seen = dataclasses.replace(config, eval=EvalConfig(run=False), tokens=256), []
    true_write = RunFolder.write_json

    def write_json(folder: RunFolder, name: str, value: Any) -> None:
        seen.append((folder.path / "tokenizer.json").exists())
        true_write(folder, name, value)

    monkeypatch.setattr(RunFolder, "write_json", write_json)
    path = train(quick).folder
    assert seen == [True]
    before = (path / "tokenizer.json").read_bytes()
    (path / "tokenizer.json").unlink()
    train(again(quick))
    assert (path / "tokenizer.json").read_bytes() == before
    Tokenizer.train(["abc abd abe"] * 3, 260).save(path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer.json: found 260 ids, the run's model has 300"):
        train(again(quick))


def test_a_run_is_resumed_from_another_folder(
    config: TrainConfig, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source was named from where the run began; its data is in the run."""
    data = dataclasses.replace(config.data, source=texts.name)
    quick = dataclasses.replace(config, data=data, eval=EvalConfig(run=False), tokens=512)
    monkeypatch.chdir(texts.parent)
    with pytest.raises(Interrupted):
        train(quick, callbacks=[StopAfter(1)])
    monkeypatch.chdir(tmp_path)
    assert train(again(quick)).steps == 2
    record = Path(quick.runs) / "smoke" / "run.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "data": {**values["data"], "hash": "0" * 64}}))
    with pytest.raises(DataError, match="not the data that this run began with"):
        train(again(quick))


def test_no_data_is_named(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy_warning", lambda: "the machine is busy: 40%")
    file = io.StringIO()
    console = Console(file=file, force_terminal=False, width=200)
    with pytest.raises(DataError, match="neither 'stdlib', nor a name in the store, nor an existing path"):
        train(dataclasses.replace(config, data=DataConfig(source=str(tmp_path / "nowhere"), vocabulary=300)), console)
    assert list(tmp_path.iterdir()) == []
    assert "busy" not in file.getvalue()  # that is about training, which has not begun


def test_a_card_that_is_not_there_is_named(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match="device: found 'cuda', but torch sees no CUDA card"):
        train(dataclasses.replace(config, device="cuda"))


def test_a_busy_machine_is_said(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy_warning", lambda: "the machine is busy: 40%")
    file = io.StringIO()
    quick = dataclasses.replace(config, eval=EvalConfig(run=False), tokens=256)
    summary = train(quick, Console(file=file, force_terminal=False, width=200))
    assert summary.warnings == ("the machine is busy: 40%",)
    assert "warning: the machine is busy: 40%" in file.getvalue()


def test_bf16_trains(config: TrainConfig) -> None:
    summary = train(dataclasses.replace(config, precision="bf16", eval=EvalConfig(run=False)))
    stored = weights(summary)
    assert stored["embed.weight"].dtype == torch.bfloat16
    assert {v.dtype for k, v in stored.items() if k.endswith(("A_log", "dt_bias", "conv.weight"))} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_card_trains_saves_and_resumes(config: TrainConfig, precision: str) -> None:
    quick = dataclasses.replace(config, device="cuda", precision=precision, eval=EvalConfig(run=False), tokens=40 * 256)
    with pytest.raises(Interrupted):
        train(quick, callbacks=[StopAfter(20)])
    summary = train(again(quick))
    metrics = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(1, 41)) and all(m["updated"] for m in metrics)
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]
    evaluated = train(again(config, device="cuda", precision=precision, tokens=40 * 256))
    assert evaluated.evaluation is not None and evaluated.sample


def test_the_commit_is_known_in_a_checkout_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert loop._git_commit() is None or len(loop._git_commit() or "") == 40
    monkeypatch.setattr(loop, "__file__", str(tmp_path / "a" / "b" / "c" / "loop.py"))
    assert loop._git_commit() is None


RUN = """
import json, sys
from trine.train.config import train_from_dict
from trine.train.loop import train
train(train_from_dict(json.loads(sys.argv[1])))
"""


@pytest.mark.slow
def test_kill_nine_at_any_moment_loses_nothing(config: TrainConfig) -> None:
    """B022: killed again and again, also inside saves, a run ends with the bits of one that never was."""
    quick = dataclasses.replace(
        config, eval=EvalConfig(run=False), tokens=80 * 256, checkpoint_every=1, threads=torch.get_num_threads()
    )
    folder, draw, kills = Path(config.runs) / "killed", random.Random(1), 0
    metrics = folder / "metrics.jsonl"

    def start(name: str = "killed") -> subprocess.Popen[str]:
        resume = (Path(config.runs) / name / "run.json").exists()
        values = train_to_dict(dataclasses.replace(quick, run=name, resume=resume))
        return subprocess.Popen([sys.executable, "-c", RUN, json.dumps(values)], stderr=subprocess.PIPE, text=True)

    start("straight").communicate()
    for _ in range(8):
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        process = start()
        while process.poll() is None and (not metrics.exists() or metrics.stat().st_mtime_ns == before):
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.5))
        if process.poll() is None:
            process.kill()
            kills += 1
        process.communicate()
    process = start()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert kills >= 3
    found, straight = (
        read_tensors(Path(config.runs) / name / "checkpoints" / "step-000080", "model")
        for name in ("killed", "straight")
    )
    for name, value in straight.items():
        assert torch.equal(value, found[name]), name
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 81))
