"""A run through several stages: what changes at a transition, what does not, and kills at the worst moments."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from trine.config import SourceShare
from trine.data import DataError
from trine.train import machine
from trine.train.callbacks import Callback
from trine.train.checkpoint import list_checkpoints, read_tensors
from trine.train.config import DataConfig, EvalConfig, OptimizerConfig, Stage, TrainConfig, train_to_dict
from trine.train.loop import build_model, open_data, stage_plans, stored_batches, train
from trine.train.metrics import StepRecord
from trine.train.schedule import StageSpan, lay_out
from trine.train.trainer import Trainer

MODEL = (
    *("layers=3", "mla_layers=(1,2)", "width=32", "heads=2", "head_dim=16"),
    *("dense_width=64", "experts=4", "kv_rank=8"),
)
STAGES = (
    Stage(length=32, share=0.5, step_tokens=256, micro_tokens=128),
    Stage(length=64, share=0.25, step_tokens=256, micro_tokens=128, mixture=(SourceShare("*", longest=1_000),)),
    Stage(length=128, share=0.25, step_tokens=256, micro_tokens=128, recompute=True),
)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"allocator": False, "flush_denormal": False, "threads": 1}
    monkeypatch.setattr(machine, "prepare_machine", lambda threads: settings)
    monkeypatch.setattr(machine, "busy_warning", lambda: None)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    for number in range(40):
        lines = [f"value_{draw.randrange(50)} = {draw.choice('abcdef') * 3} + {draw.randrange(99)}" for _ in range(40)]
        (folder / f"program_{number:02d}.py").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def config(texts: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        preset="smoke",
        model=MODEL,
        runs=str(tmp_path / "runs"),
        tokens=12 * 256,
        stages=STAGES,
        optimizer=OptimizerConfig(warmup=0.2),
        data=DataConfig(source=str(texts), held_out_one_in=4, vocabulary=300),
        eval=EvalConfig(run=False),
        device="cpu",
        checkpoint_every=2,
    )


def weights(config: TrainConfig, name: str) -> dict[str, torch.Tensor]:
    step, path = list_checkpoints(Path(config.runs) / name / "checkpoints")[-1]
    assert step == 12
    return {**read_tensors(path, "model"), **read_tensors(path, "optimizer")}


def same(config: TrainConfig, one: str, other: str) -> None:
    mine, others = weights(config, one), weights(config, other)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        assert torch.equal(value, others[name]), name


def lines(config: TrainConfig, name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.runs) / name / file).read_text().splitlines()]


class Stop(Callback):
    name = "stop"

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        if record.step == 6:
            raise KeyboardInterrupt


def test_a_transition_is_told_and_nothing_restarts(config: TrainConfig) -> None:
    file = io.StringIO()
    train(dataclasses.replace(config, run="live"), Console(file=file, force_terminal=False, width=300))
    shown = file.getvalue()
    assert "stage 2 from step 7: rows of 32 -> 64 tokens; data all documents -> *=1@0-1000" in shown
    assert "stage 3 from step 10: rows of 64 -> 128 tokens; recomputing from here on" in shown
    stages = [one for one in lines(config, "live", "events.jsonl") if one["kind"] == "stage"]
    assert [(one["step"], one["stage"], one["length"]) for one in stages] == [(1, 0, 32), (7, 1, 64), (10, 2, 128)]
    assert "before" not in stages[0]
    assert stages[1]["before"] == {"stage": 0, "length": 32, "step_tokens": 256, "recompute": False, "mixture": []}
    assert stages[1]["mixture"] == ["*=1@0-1000"] and stages[2]["before"]["length"] == 64
    records = lines(config, "live", "metrics.jsonl")
    # One cosine over the whole plan: warm-up over 2.4 steps' tokens, then down to 0 as if there were no stages.
    peak, total, warm = config.optimizer.rates.muon, 12 * 256, int(12 * 256 * 0.2)
    for number, record in enumerate(records):
        before = 256 * number
        rise = min(1.0, (before + 256) / warm)
        fall = 0.5 * (1 + math.cos(math.pi * (before - warm) / (total - warm)))
        assert record["lr"] == pytest.approx(peak * (rise if before < warm else fall), rel=1e-12)
        assert record["tokens"] == before + 256


def test_crossing_a_stage_by_resume_is_crossing_it_live(config: TrainConfig) -> None:
    train(dataclasses.replace(config, run="live"))
    with pytest.raises(KeyboardInterrupt):
        train(
            dataclasses.replace(config, run="cut"), callbacks=[Stop()]
        )  # the last thing saved is step 6, stage 1's end
    train(dataclasses.replace(config, run="cut", resume=True))
    same(config, "live", "cut")
    told = [one["loss"] for one in lines(config, "cut", "metrics.jsonl")]
    assert told == [one["loss"] for one in lines(config, "live", "metrics.jsonl")]


def test_rows_beyond_a_stage_are_new_ones_of_its_last_mixture(config: TrainConfig, tmp_path: Path) -> None:
    """What a rollback leaves out is replaced by rows that the stage had not reached."""
    plan = lay_out(config.stages, config.tokens)
    plans = stage_plans(config, plan, open_data(config, tmp_path / "data"))
    batches = stored_batches(plans)
    span = plan.spans[1]

    def tokens(step: int) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for batch in batches(span, step):
            assert batch.document_N is not None and batch.start_N is not None
            found |= {(d, s) for d, s in zip(batch.document_N.tolist(), batch.start_N.tolist(), strict=True) if d >= 0}
        return found

    own = set().union(*(tokens(step) for step in range(span.steps)))
    more = tokens(span.steps)
    assert more and not more & own and tokens(span.steps) == more


def test_no_document_sees_another_at_any_stage(config: TrainConfig, tmp_path: Path) -> None:
    """The perturbation probe, on real rows of every stage: another token in one document moves no other one."""
    stages = tuple(dataclasses.replace(stage, micro_tokens=256) for stage in config.stages)  # two rows of the longest
    plan = lay_out(stages, config.tokens)
    batches = stored_batches(stage_plans(config, plan, open_data(config, tmp_path / "data")))
    model = build_model(config, torch.device("cpu")).double().eval()
    for span in plan:
        every = [batch for step in range(span.steps) for batch in batches(span, step)]
        batch = next(one for one in every if int((one.source_N >= 0).sum()) > 1)
        first, second = batch.cu_seqlens_N1[1:3].tolist()
        assert second > first and batch.cu_seqlens_N1[-1] >= span.stage.length
        edited_T = batch.tokens_T.clone()
        edited_T[first - 1] = (edited_T[first - 1] + 1) % 300
        with torch.no_grad():
            before_TD, after_TD = (model(one, batch.cu_seqlens_N1) for one in (batch.tokens_T, edited_T))
        assert float((before_TD[first - 1] - after_TD[first - 1]).abs().max()) > 1e-3
        torch.testing.assert_close(after_TD[first:], before_TD[first:], rtol=0, atol=1e-11)


def test_a_source_that_would_be_read_too_often_is_refused(config: TrainConfig) -> None:
    long = dataclasses.replace(config, tokens=200 * 4_096, run="long")
    with pytest.raises(DataError, match=r"would be read .* times .* need at most 4: add data, lower its share"):
        train(long)
    with pytest.raises(DataError, match=r"no source 'nothing', the data has"):
        train(dataclasses.replace(config, stages=(Stage(mixture=(SourceShare("nothing"),)),), run="none"))


def test_every_rank_takes_its_slice_of_one_order(config: TrainConfig, tmp_path: Path) -> None:
    """1 -> 2 -> 1 processes over gloo: the samples of each step are those of one process, in the same order."""
    data = tmp_path / "data"
    plan = lay_out(config.stages, config.tokens)
    plans = stage_plans(config, plan, open_data(config, data))

    def alone(span: StageSpan, step: int) -> list[list[int]]:
        return [batch.tokens_T.tolist() for batch in plans[span.index].micro_batches(step)]

    values = json.dumps(train_to_dict(config))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, values, str(data), str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    out = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    both = json.loads(out[0])  # steps 4 to 7 of the plan, across the first transition
    for step in range(12):
        span = plan.at(step)
        inside = step - span.first_step
        wanted = alone(span, inside)
        assert len(wanted) == 2
        if 4 <= step < 8:
            assert both[step - 4] == wanted


RANK = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from trine.data import Shards
from trine.train.config import train_from_dict
from trine.train.loop import stage_plans
from trine.train.schedule import lay_out
config, rank = train_from_dict(json.loads(sys.argv[1])), int(sys.argv[4])
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
plan = lay_out(config.stages, config.tokens)
plans = stage_plans(config, plan, Shards.open(sys.argv[2]))
found = []
for step in range(4, 8):
    span = plan.at(step)
    mine = [b.tokens_T.tolist() for b in plans[span.index].micro_batches(step - span.first_step, rank, 2)]
    every = [None, None]
    dist.all_gather_object(every, mine)
    found.append([one for pair in zip(*every) for one in pair])
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""

# Sends itself a signal at the n-th of some moments: a flush inside a save, a micro-batch, a stage's beginning.
KILLED = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from trine.train import checkpoint, machine
from trine.train.callbacks import Callback
from trine.train.config import train_from_dict
from trine.train.errors import Interrupted
from trine.train.loop import train
from trine.model import Model

where, left, number = sys.argv[2], [int(sys.argv[3])], int(sys.argv[4])

def moment(name):
    if name == where:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)

def before(name, work):
    def first(*args, **more):
        moment(name)
        return work(*args, **more)
    return first

class Stages(Callback):
    name = "stages"
    def on_stage(self, trainer, span):
        if span.index:
            moment("transition")

checkpoint._flush = before("save", checkpoint._flush)
Model.loss = before("window", Model.loss)
machine.busy_warning = lambda: None
machine.prepare_machine = lambda threads: {"allocator": False, "flush_denormal": False, "threads": 1}
try:
    train(train_from_dict(json.loads(sys.argv[1])), callbacks=[Stages()])
except Interrupted as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
MOMENTS = {"save": 5 * 7, "window": 2 * 12, "transition": 2}  # how often each comes in the run of these tests


def killed(config: TrainConfig, where: str, number: int, by: signal.Signals = signal.SIGKILL) -> bool:
    """Go on with a run until the n-th of these moments ends it; whether it was reached."""
    resume = (Path(config.runs) / config.run / "run.json").exists()
    values = json.dumps(train_to_dict(dataclasses.replace(config, resume=resume)))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, values, where, str(number), str(int(by))], capture_output=True, text=True
    )
    ended = -9 if by == signal.SIGKILL else 130
    assert done.returncode in (0, ended), done.stderr
    return done.returncode == ended


def whole(config: TrainConfig) -> None:
    """No half checkpoint under a checkpoint's name, and the record complete."""
    for _, path in list_checkpoints(Path(config.runs) / config.run / "checkpoints"):
        assert (path / "state.json").exists()
    steps = [one["step"] for one in lines(config, config.run, "metrics.jsonl")]
    assert steps == list(range(1, 13))


@pytest.mark.parametrize("moments", [(("save", 8), ("transition", 1)), (("window", 9), ("save", 3))])
def test_killed_and_resumed_equals_uninterrupted(config: TrainConfig, moments: tuple[tuple[str, int], ...]) -> None:
    """Inside a save, at a transition, inside an accumulation window."""
    train(dataclasses.replace(config, run="straight"))
    cut = dataclasses.replace(config, run="cut")
    for where, number in moments:
        assert killed(cut, where, number)
    train(dataclasses.replace(cut, resume=True))
    whole(cut)
    same(config, "straight", "cut")


@pytest.mark.parametrize(("where", "number"), [("save", 9), ("transition", 1), ("window", 15)])
def test_a_polite_end_saves_and_loses_nothing(config: TrainConfig, where: str, number: int) -> None:
    """SIGTERM inside the second save, as the second stage begins, between the micro-batches of step 8."""
    train(dataclasses.replace(config, run="straight"))
    cut = dataclasses.replace(config, run="cut", background_save=where != "save")
    assert killed(cut, where, number, signal.SIGTERM)
    steps = [step for step, _ in list_checkpoints(Path(cut.runs) / "cut" / "checkpoints")]
    assert steps[-1] == {"save": 4, "transition": 6, "window": 7}[where]
    (event,) = [one for one in lines(cut, "cut", "events.jsonl") if one["kind"] == "interrupted"]
    assert (event["signal"], event["step"]) == (15, steps[-1])
    train(dataclasses.replace(cut, resume=True))
    whole(cut)
    same(config, "straight", "cut")


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_fills_while_a_run_saves(config: TrainConfig, background: bool) -> None:
    """The kernel refuses to let files grow beyond a limit in the middle of the save of step 4; with room it goes on."""
    train(dataclasses.replace(config, run="straight"))
    cut = dataclasses.replace(config, run="cut", background_save=background)
    values = json.dumps(train_to_dict(cut))
    done = subprocess.run([sys.executable, "-c", FULL, values], capture_output=True, text=True, cwd=config.runs)
    assert done.returncode == 1, done.stderr
    assert "step-000004: cannot be saved (" in done.stderr and "step-000002 is intact" in done.stderr
    folder = Path(cut.runs) / "cut" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-000002"]
    train(dataclasses.replace(cut, resume=True))
    whole(cut)
    same(config, "straight", "cut")


FULL = """
import json, resource, sys
import torch
torch.set_num_threads(1)
from trine.train import machine
from trine.train.callbacks import Callback
from trine.train.config import train_from_dict
from trine.train.errors import RunError
from trine.train.loop import train

class Full(Callback):
    name = "full"
    def on_save(self, trainer, path):
        size = (path / "optimizer.safetensors").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))

machine.busy_warning = lambda: None
machine.prepare_machine = lambda threads: {"allocator": False, "flush_denormal": False, "threads": 1}
try:
    train(train_from_dict(json.loads(sys.argv[1])), callbacks=[Full()])
except RunError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_twenty_random_kills(config: TrainConfig, background: bool) -> None:
    config = dataclasses.replace(config, background_save=background)
    train(dataclasses.replace(config, run="straight"))
    draw, kills = random.Random(5 + background), 0
    for number in range(10):
        cut = dataclasses.replace(config, run=f"cut-{number}")
        for _ in range(2):  # the second kill meets what the first has left
            where = draw.choice(list(MOMENTS))
            kills += killed(cut, where, draw.randint(1, MOMENTS[where]))
        train(dataclasses.replace(cut, resume=(Path(cut.runs) / cut.run / "run.json").exists()))
        whole(cut)
        same(config, "straight", cut.run)
    assert kills >= 10
