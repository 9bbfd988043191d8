"""Whole runs under each balance policy: they train, are recorded, resume to the bit, and keep their policy."""

from __future__ import annotations

import dataclasses
import json
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trine._options import Usage, parse_train
from trine.balance import QuantileBalancing, exporters, install_policy
from trine.balance.service_protocol import ServiceError
from trine.balance.service_server import serve
from trine.config import BalanceConfig
from trine.model import Model
from trine.train import loop, machine
from trine.train.callbacks import Callback
from trine.train.config import (
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    Stage,
    TrainConfig,
    config_hash,
    load_toml,
    train_from_dict,
    train_preset,
    train_to_dict,
    trajectory,
)
from trine.train.errors import RunError
from trine.train.loop import train
from trine.train.metrics import StepRecord
from trine.train.stored import load_run, stored_config
from trine.train.trainer import Trainer

MODEL = ("width=32", "layers=2", "mla_layers=(1,)", "heads=1", "head_dim=16", "dense_width=48", "latent_width=16",
         "expert_width=16", "q_rank=16", "kv_rank=16", "shared_key_dim=8")  # fmt: skip
POLICIES = {
    "qb": BalanceConfig(estimator="signed_log", adaptive_gain=True, batch_rounds=2),
    "logit": BalanceConfig(score_domain="logit"),
    "sign": BalanceConfig(policy="sign", sign_step=0.01),
    "aux": BalanceConfig(policy="aux", aux_weight=0.1),
    "load_quantile": BalanceConfig(policy="load_quantile", load_window=2, load_band=1.0),
    "drop": BalanceConfig(policy="stateless", mode="drop", quantile="histogram"),
    "dual": BalanceConfig(policy="stateless", mode="dual", ema=0.5),
    "freeze": BalanceConfig(policy="freeze"),
    "replay": BalanceConfig(policy="replay"),
}
KEY = b"sixteen bytes key"
STILL = {"aux", "freeze", "replay"}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the process's allocator and threads, nor half a second of watching others, belong into these tests."""
    settings = {"allocator": False, "flush_denormal": False, "threads": torch.get_num_threads()}
    monkeypatch.setattr(machine, "prepare_machine", lambda threads: settings)
    monkeypatch.setattr(machine, "busy_warning", lambda: None)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(1)
    words = ["alpha", "beta", "gamma", "delta", "result", "value", "total", "index"]
    for number in range(12):
        lines = [f"def {draw.choice(words)}_{draw.randrange(99)}({draw.choice(words)}): pass" for _ in range(60)]
        (folder / f"program_{number}.py").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def config(texts: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        preset="smoke",
        model=MODEL,
        runs=str(tmp_path / "runs"),
        tokens=4 * 256,
        stages=(Stage(length=64, step_tokens=256, micro_tokens=256),),
        optimizer=OptimizerConfig(warmup=0.2),
        data=DataConfig(source=str(texts), held_out_one_in=4, vocabulary=280),
        eval=EvalConfig(run=False, sample_tokens=0),
        device="cpu",
        threads=1,
        checkpoint_every=0,
        recorder=False,
    )


class Look(Callback):
    """Keeps what each step's window held, and ends the run's first process after ``stop`` steps."""

    name = "look"

    def __init__(self) -> None:
        self.loads: list[Tensor] = []
        self.bias: list[Tensor] = []
        self.balancer: Any = None

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        assert trainer.window is not None and trainer.router_stats is not None
        self.loads.append(trainer.window.loads_LE.clone())
        self.bias.append(trainer.router_stats.bias_LE.clone())
        self.balancer = trainer.balancer


@pytest.mark.parametrize("name", POLICIES)
def test_steps_under_each_policy(config: TrainConfig, name: str) -> None:
    look = Look()
    summary = train(dataclasses.replace(config, balance=POLICIES[name]), callbacks=[look])
    assert summary.steps == 4 and summary.loss is not None and 0 < summary.loss < 7
    assert len(look.loads) == 4 and all(int(loads.sum()) <= 2 * 256 for loads in look.loads)
    assert all(bool(bias.isfinite().all()) for bias in look.bias)
    assert any(bool(bias.any()) for bias in look.bias) == (name not in STILL)
    served = int(torch.stack(look.loads).sum()) / (4 * 2 * 256)
    assert served == 1.0 if name != "drop" else 0.6 < served < 1.0
    record = json.loads((summary.folder / "run.json").read_text())
    assert record["config"]["balance"] == POLICIES[name].dials()
    assert record["model"]["score_domain"] == POLICIES[name].score_domain
    assert stored_config(summary.folder).balance == POLICIES[name]
    loaded = load_run(summary.folder).model
    assert torch.equal(loaded.router_stats.bias_LE, look.bias[-1])
    assert loaded.router_stats.score_domain == POLICIES[name].score_domain


@pytest.mark.parametrize("name", ["aux", "load_quantile"])
def test_a_run_that_is_cut_resumes_to_the_bit(config: TrainConfig, name: str) -> None:
    plan = dataclasses.replace(config, balance=POLICIES[name], tokens=6 * 256, checkpoint_every=3)
    straight = Look()
    train(dataclasses.replace(plan, run="straight"), callbacks=[straight])

    class Cut(Callback):
        name = "cut"

        def on_step(self, trainer: Trainer, record: StepRecord) -> None:
            if record.step == 5:
                raise RunError("cut")

    with pytest.raises(RunError, match="cut"):
        train(dataclasses.replace(plan, run="cut"), callbacks=[Cut()])
    rest = Look()
    train(dataclasses.replace(plan, run="cut", resume=True), callbacks=[rest])
    assert len(rest.bias) == 3
    for one, other in zip(rest.bias + rest.loads, straight.bias[3:] + straight.loads[3:], strict=True):
        assert torch.equal(one, other)


def test_another_policy_or_dial_is_another_plan(config: TrainConfig) -> None:
    plan = dataclasses.replace(config, balance=POLICIES["sign"], tokens=256, run="one")
    train(plan)
    for balance, message in (
        (BalanceConfig(), "balance.policy: found 'qb', the stored run has 'sign'"),
        (BalanceConfig(policy="sign"), "balance.sign_step: found 0.001, the stored run has 0.01"),
        (BalanceConfig(policy="aux"), "balance.aux_weight: found 0.01, the stored run has None"),
    ):
        with pytest.raises(RunError, match=f"cannot resume with another plan: {message}"):
            train(dataclasses.replace(plan, balance=balance, resume=True))
    again = dataclasses.replace(POLICIES["sign"], check_every=7)  # changes no number
    assert train(dataclasses.replace(plan, balance=again, resume=True)).steps == 1


def test_default_is_what_runs_had_before_there_were_policies(tmp_path: Path) -> None:
    plan = train_preset("laptop")
    assert not [key for key in trajectory(plan) if key.startswith("balance") or key.endswith("score_domain")]
    values = train_to_dict(plan)
    del values["balance"]
    (tmp_path / "run.json").write_text(json.dumps({"format_version": 1, "config": values}))
    stored = stored_config(tmp_path)
    assert stored.balance == BalanceConfig(estimator="report") and config_hash(stored) == config_hash(plan)
    other = dataclasses.replace(plan, balance=BalanceConfig(policy="sign"))
    assert config_hash(other) != config_hash(plan)
    policy = install_policy(Model(dataclasses.replace(plan, preset="smoke").model_config()), plan.balance)
    assert isinstance(policy, QuantileBalancing) and (policy.ema, policy.adaptive_gain) == (0.0, False)


def test_rounds_within_a_batch_reach_the_statistics_and_change_the_plan() -> None:
    plan = train_preset("smoke")
    model = Model(plan.model_config())
    install_policy(model, BalanceConfig(estimator="signed_log", batch_rounds=4))
    assert (model.router_stats.batch_rounds, model.router_stats.estimator) == (4, "signed_log")
    assert model.to(torch.float64).router_stats.batch_rounds == 4
    install_policy(model, BalanceConfig(estimator="signed_log"))
    assert model.router_stats.batch_rounds == 1
    more = dataclasses.replace(plan, balance=BalanceConfig(batch_rounds=4))
    assert trajectory(more)["balance.batch_rounds"] == 4 and config_hash(more) != config_hash(plan)
    for bad in (0, 2.5, 101):
        with pytest.raises(ValueError, match=rf"balance.batch_rounds: found {bad}, need a whole number from 1 to 100"):
            BalanceConfig(batch_rounds=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_rounds: found 0, need a whole number of at least 1"):
        model.set_balance(estimator="report", batch_rounds=0)
    assert model.router_stats.estimator == "signed_log"
    with pytest.raises(ValueError, match=r"balance.batch_rounds: found 4, need 1, as the policy 'sign' does not read"):
        BalanceConfig(policy="sign", batch_rounds=4)


def test_command_line_and_toml_name_the_policy(tmp_path: Path) -> None:
    config = parse_train(["--preset", "smoke", "--balance.policy", "sign", "--balance.sign-step", "0.02"])
    assert config.balance == BalanceConfig(policy="sign", sign_step=0.02)
    path = tmp_path / "plan.toml"
    path.write_text('preset = "smoke"\n[balance]\npolicy = "stateless"\nmode = "drop"\ncapacity = 2\n')
    assert load_toml(path).balance == BalanceConfig(policy="stateless", mode="drop", capacity=2.0)
    for balance in POLICIES.values():
        one = dataclasses.replace(config, balance=balance)
        assert train_from_dict(json.loads(json.dumps(train_to_dict(one)))) == one
    with pytest.raises(Usage, match=r"--balance.policy: found 'sing', need one of .*; did you mean 'sign'\?"):
        parse_train(["--preset", "smoke", "--balance.policy", "sing"])
    with pytest.raises(ValueError, match=r"balance.ema: found 0.5, need 0.0, as the policy 'sign' does not read it"):
        parse_train(["--preset", "smoke", "--balance.policy", "sign", "--balance.ema", "0.5"])
    with pytest.raises(ValueError, match=r"model.score_domain: found 'logit', need balance.score_domain to set it"):
        TrainConfig(preset="smoke", model=("score_domain=logit",))


def test_biases_of_scores_and_of_logits_are_not_mixed() -> None:
    model = Model(TrainConfig(preset="smoke", balance=BalanceConfig(score_domain="logit")).model_config())
    assert model.router_stats.score_domain == "logit"
    with pytest.raises(ValueError, match=r"balance.score_domain: found 'sigmoid', need 'logit', the model's"):
        install_policy(model, BalanceConfig(policy="freeze"))


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"policy": "qbb"}, r"balance.policy: found 'qbb', need one of qb, sign, .*; did you mean 'qb'\?"),
        ({"estimator": "exact"}, "balance.estimator: found 'exact', need one of report, signed_log"),
        ({"ema": 1.0}, "balance.ema: found 1.0, need 0 to below 1"),
        ({"policy": "sign", "sign_step": 0.0}, "balance.sign_step: found 0.0, need more than 0"),
        ({"policy": "aux", "aux_weight": float("nan")}, "balance.aux_weight: found nan, need a finite number"),
        ({"policy": "load_quantile", "load_window": 0}, "balance.load_window: found 0, need at least 1"),
        ({"policy": "load_quantile", "load_band": -1.0}, "balance.load_band: found -1.0, need 0 or more"),
        (
            {"policy": "stateless", "capacity": 1.5},
            "balance.capacity: found 1.5, need 1.0, as the mode 'dual' does not read it",
        ),
        (
            {"policy": "stateless", "mode": "drop", "rounds": 5},
            "balance.rounds: found 5, need 3, as the mode 'drop' does not read it",
        ),
        ({"policy": "stateless", "rounds": 0}, "balance.rounds: found 0, need at least 1"),
        ({"check_every": -1}, r"balance.check_every: found -1, need 0 \(never\) or more"),
        ({"mode": "drop"}, "balance.mode: found 'drop', need 'dual', as the policy 'qb' does not read it"),
        ({"policy": "stateless", "score_domain": "logit"}, "balance.score_domain: found 'logit', need 'sigmoid', as"),
    ],
)
def test_bad_dials_are_named(dials: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BalanceConfig(**dials)


def test_what_cannot_be_reached_is_told_before_the_data_are_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They were prepared first, for twenty seconds."""
    monkeypatch.setattr(loop, "open_data", lambda *_: pytest.fail("the data were made first"))
    monkeypatch.setattr(exporters, "_client", lambda: None)
    plan = dataclasses.replace(train_preset("smoke"), runs=str(tmp_path / "runs"))
    monkeypatch.setenv("TRINE_WEBHOOK", "file:///etc/passwd")
    with pytest.raises(RunError, match="TRINE_WEBHOOK: webhook: found an address that begins with 'file', need http"):
        train(plan)
    monkeypatch.delenv("TRINE_WEBHOOK")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"prometheus: cannot serve on 127.0.0.1:{port}"):
            train(dataclasses.replace(plan, prometheus=port))
    address = f"unix:{tmp_path / 'socket'}"
    served = threading.Event()
    arguments = {"address": address.removeprefix("unix:"), "key": KEY, "on_ready": lambda _: served.set()}
    threading.Thread(target=serve, kwargs=arguments, daemon=True).start()
    assert served.wait(30)
    away = dataclasses.replace(plan, balance=BalanceConfig(service=address))
    monkeypatch.delenv("TRINE_BALANCE_KEY", raising=False)
    with pytest.raises(RunError, match="key: found none"):
        train(away)
    monkeypatch.setenv("TRINE_BALANCE_KEY", "another key of some length")
    with pytest.raises(ServiceError, match="the key is not the service's"):
        train(away)
