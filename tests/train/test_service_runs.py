"""Whole runs whose bias a service solves: they resume to the bit, also after a kill, and leave no process behind."""

from __future__ import annotations

import dataclasses
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

from trine.balance import RecorderReader
from trine.config import BalanceConfig
from trine.train import machine
from trine.train.callbacks import Callback
from trine.train.config import (
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    Stage,
    TrainConfig,
    config_hash,
    train_from_dict,
    train_to_dict,
)
from trine.train.errors import Interrupted
from trine.train.loop import train
from trine.train.metrics import StepRecord
from trine.train.stored import load_run
from trine.train.trainer import Trainer

MODEL = ("width=32", "layers=3", "mla_layers=(2,)", "heads=1", "head_dim=16", "dense_width=48", "latent_width=16",
         "expert_width=16", "q_rank=16", "kv_rank=16", "shared_key_dim=8")  # fmt: skip
STEPS = 8


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"allocator": False, "flush_denormal": False, "threads": torch.get_num_threads()}
    monkeypatch.setattr(machine, "prepare_machine", lambda threads: settings)
    monkeypatch.setattr(machine, "busy_warning", lambda: None)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    texts, draw = tmp_path / "texts", random.Random(1)
    texts.mkdir()
    for number in range(12):
        lines = [f"def {draw.choice('abcdef')}{draw.randrange(99)}(x): return {draw.randrange(9)}" for _ in range(60)]
        (texts / f"program_{number}.py").write_text("\n".join(lines) + "\n")
    return TrainConfig(
        preset="smoke",
        model=MODEL,
        runs=str(tmp_path / "runs"),
        run="straight",
        tokens=STEPS * 256,
        stages=(Stage(length=64, step_tokens=256, micro_tokens=128),),
        optimizer=OptimizerConfig(warmup=0.2),
        balance=BalanceConfig(service="thread"),
        data=DataConfig(source=str(texts), held_out_one_in=4, vocabulary=280),
        eval=EvalConfig(run=False, sample_tokens=0),
        device="cpu",
        threads=1,
        checkpoint_every=2,
    )


class Watch(Callback):
    """Keeps the bias of each step and the service's status; interrupts after a step."""

    name = "watch"

    def __init__(self, stop: int = 0) -> None:
        self.stop = stop
        self.bias: dict[int, torch.Tensor] = {}
        self.status: Any = None
        self.balancer: Any = None

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        assert trainer.router_stats is not None
        self.bias[record.step] = trainer.router_stats.bias_LE.clone()
        self.balancer = trainer.balancer
        self.status = self.balancer.status()
        if record.step == self.stop:
            signal.raise_signal(signal.SIGTERM)


def test_a_run_with_a_service_lags_a_step_and_resumes_to_the_bit(config: TrainConfig) -> None:
    straight, first, second = Watch(), Watch(stop=5), Watch()
    train(config, callbacks=[straight])
    assert not straight.balancer._courier._thread.is_alive(), "nothing runs on when the run is over"
    status = straight.status
    assert (status.mode, status.steps, status.lag, status.fallbacks) == ("thread", STEPS, 1, 0)
    assert not straight.bias[1].any() and straight.bias[2].any()
    cut = dataclasses.replace(config, run="cut")
    with pytest.raises(Interrupted):
        train(cut, callbacks=[first])
    train(dataclasses.replace(cut, resume=True), callbacks=[second])
    assert sorted(first.bias | second.bias) == list(range(1, STEPS + 1)) and min(second.bias) == 6
    for step, bias_LE in {**first.bias, **second.bias}.items():
        assert torch.equal(bias_LE, straight.bias[step]), step
    with RecorderReader(Path(cut.runs) / "cut") as reader:
        assert reader.steps().tolist() == list(range(1, STEPS + 1))


def test_the_service_is_part_of_what_a_run_computes(config: TrainConfig) -> None:
    off = dataclasses.replace(config, balance=BalanceConfig())
    lag_2 = dataclasses.replace(config, balance=BalanceConfig(service="thread", service_lag=2))
    assert len({config_hash(one) for one in (config, off, lag_2)}) == 3
    for values, message in (
        ({"service": "elsewhere"}, "balance.service: found 'elsewhere', need"),
        ({"service_lag": 2}, "balance.service_lag: found 2, need 1"),
        ({"service": "thread", "service_lag": 5}, "balance.service_lag: found 5, need -1 (newest) to 4: older"),
        ({"service": "thread", "policy": "sign"}, "balance.service: found 'thread', need 'off'"),
    ):
        with pytest.raises(ValueError) as error:
            BalanceConfig(**values)
        assert message in str(error.value)


KILLED = """
import json, os, signal, sys
from trine.train import machine
from trine.train.callbacks import Callback
from trine.train.config import train_from_dict
from trine.train.loop import train

class Kill(Callback):
    name = "kill"
    def on_step(self, trainer, record):
        if record.step == 5:
            print(trainer.balancer._courier.link.process.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

machine.busy_warning = lambda: None
machine.prepare_machine = lambda threads: {"allocator": False, "flush_denormal": False, "threads": 1}
train(train_from_dict(json.loads(sys.argv[1])), callbacks=[Kill()])
"""


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_service_and_its_run_goes_on(config: TrainConfig) -> None:
    """SIGKILL after step 5; the child process ends, the record is readable, and the resumed run equals one not cut."""
    config = dataclasses.replace(config, balance=BalanceConfig(service="process"))
    straight, rest = Watch(), Watch()
    train(config, callbacks=[straight])
    cut = dataclasses.replace(config, run="cut")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(train_to_dict(cut))], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert train_from_dict(train_to_dict(cut)) == cut
    limit = time.monotonic() + 60
    while Path(f"/proc/{done.stdout.split()[-1]}").exists():
        assert time.monotonic() < limit, "the child process outlives its trainer"
        time.sleep(0.01)
    with RecorderReader(Path(cut.runs) / "cut") as reader:
        assert set(reader.steps().tolist()) <= set(range(1, 6))
    train(dataclasses.replace(cut, resume=True), callbacks=[rest])
    assert max(rest.bias) == STEPS and min(rest.bias) in (3, 5)
    for step, bias_LE in rest.bias.items():
        assert torch.equal(bias_LE, straight.bias[step]), step
    assert rest.status.mode == "process" and rest.status.fallbacks == 0
    bias_LE = load_run(Path(cut.runs) / "cut").model.router_stats.bias_LE
    assert torch.equal(bias_LE, straight.bias[STEPS])
    with RecorderReader(Path(cut.runs) / "cut") as reader:
        assert reader.steps().tolist()[-1] == STEPS


RANK = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path
import torch
from torch import distributed as dist
from trine.balance import AsyncBalancing, QuantileBalancing, Recorder, RankChecked
from trine.ops.router import RouterStats, route

rank, folder, die_at, place = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
stats = RouterStats.allocate(2, 16, 100)
inner = AsyncBalancing(QuantileBalancing(2), "thread", lag=1, seconds=60.0)
policy, begin, saved = RankChecked(inner, 1), 1, folder / "state.pt"
recorder = Recorder(folder / "balance.sqlite", layers=2, experts=16, top_k=2) if rank == 0 else None
if saved.exists():
    state = torch.load(saved, weights_only=True)
    stats.load_state_dict(state["stats"])
    policy.load_state_dict(state["policy"])
    begin = state["step"] + 1
for step in range(begin, 11):
    logits_LTE = torch.randn(2, 200, 16, generator=torch.Generator().manual_seed(step)) + torch.linspace(-1, 1, 16)
    for i in range(2):
        route(logits_LTE[i, rank::2], stats.bias_LE[i], 2, stats=stats.layer(i))
    if rank == 1 and step == die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    window = policy.step(stats)
    state = {"stats": stats.state_dict(), "policy": policy.state_dict(), "step": step}
    if rank == 0:
        recorder.record(step, window)
        torch.save(state, folder / "new.pt")
        os.replace(folder / "new.pt", saved)
if recorder is not None:
    recorder.close()
torch.save(stats.bias_LE, folder / f"bias{rank}.pt")
dist.destroy_process_group()
"""


def ranks(folder: Path, die_at: int, number: int) -> list[int]:
    """Run two ranks to their end; their exit codes."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK]
    both = [
        subprocess.Popen([*command, str(r), str(folder), str(die_at), str(folder / f"place{number}")], env=environment,
                         stderr=subprocess.DEVNULL)
        for r in range(2)
    ]  # fmt: skip
    return [process.wait(timeout=300) for process in both]


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_run_resumes(tmp_path: Path) -> None:
    """Rank 1 is killed in step 6: rank 0 ends with an error and no half step; both go on from step 5, to the bit."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    assert ranks(whole, 0, 0) == [0, 0]
    codes = ranks(cut, 6, 0)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, -signal.SIGKILL)
    assert torch.load(cut / "state.pt", weights_only=True)["step"] == 5
    with RecorderReader(cut / "balance.sqlite") as reader:
        assert set(reader.steps().tolist()) <= set(range(1, 6))
    assert ranks(cut, 0, 1) == [0, 0]
    found = [torch.load(cut / f"bias{r}.pt", weights_only=True) for r in range(2)]
    expected = torch.load(whole / "bias0.pt", weights_only=True)
    assert expected.any() and all(torch.equal(one, expected) for one in found)
    with RecorderReader(cut / "balance.sqlite") as reader:
        assert reader.steps().tolist()[-1] == 10
