"""What every policy must do alike: corner cases, resuming, ranks; and how a configuration becomes one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trine.balance import (
    AuxiliaryBalancing,
    BalancePolicy,
    Freeze,
    LoadQuantileBalancing,
    QuantileBalancing,
    Replay,
    SignBalancing,
    StatelessThresholds,
    install_policy,
    make_policy,
)
from trine.config import BalanceConfig, ModelConfig
from trine.model import Model
from trine.ops.router import RouterStats, route
from trine.ops.router.stateless import Stateless, route_stateless

E, K, L = 8, 2, 2
CONFIGS = [
    BalanceConfig(),
    BalanceConfig(policy="sign", sign_step=0.01),
    BalanceConfig(policy="aux"),
    BalanceConfig(policy="load_quantile", load_window=2),
    BalanceConfig(policy="stateless", mode="dual"),
    BalanceConfig(policy="stateless", mode="drop", ema=0.5),
    BalanceConfig(policy="freeze"),
    BalanceConfig(policy="replay"),
    BalanceConfig(policy="none"),
]
NAMES = [f"{c.policy}-{c.mode}" if c.policy == "stateless" else c.policy for c in CONFIGS]
MOVING = {"qb", "sign", "load_quantile", "stateless"}
each = pytest.mark.parametrize("config", CONFIGS, ids=NAMES)


def feed(
    policy: BalancePolicy, stats: RouterStats, logits_LTE: Tensor, k: int = K, mask_T: Tensor | None = None
) -> None:
    """One micro-batch through routers of somebody's own."""
    for i, logits_TE in enumerate(logits_LTE):
        rule = policy.rule if isinstance(policy, StatelessThresholds) else Stateless(threshold_source="running")
        route_stateless(logits_TE, stats.bias_LE[i], k, rule, stats=stats.layer(i), mask_T=mask_T)


def relative(policy: Any) -> Tensor:
    return policy.pressure.relative_LE if isinstance(policy, AuxiliaryBalancing) else torch.zeros(0)


def make(config: BalanceConfig, k: int = K, experts: int = E) -> tuple[BalancePolicy, RouterStats]:
    return make_policy(config, k, experts), RouterStats.allocate(L, experts, bins=100)


def test_configuration_decides_class_and_dials() -> None:
    found = [make(config)[0] for config in CONFIGS]
    kinds = [QuantileBalancing, SignBalancing, AuxiliaryBalancing, LoadQuantileBalancing, StatelessThresholds,
             StatelessThresholds, Freeze, Replay, Freeze]  # fmt: skip
    assert [type(policy) for policy in found] == kinds
    drop: Any = found[5]
    assert (drop.ema, drop.rule.mode, drop.k) == (0.5, "drop", K)
    assert isinstance(found[1], SignBalancing) and found[1].step_size == 0.01
    assert isinstance(found[3], LoadQuantileBalancing) and (found[3].window, found[3].band) == (2, 3.0)


@each
def test_a_skewed_router_moves_the_bias_or_does_not(config: BalanceConfig) -> None:
    policy, stats = make(config)
    stats.set_bias_(torch.tensor([[0.1, -0.1] + [0.0] * 6] * L))
    before_LE, buffer = stats.bias_LE.clone(), stats.bias_LE
    for _ in range(2):
        feed(policy, stats, torch.randn(L, 400, E) + torch.linspace(-1, 1, E))
        loads_LE = stats.loads_LE.long().clone()
        window = policy.step(stats)
        assert torch.equal(window.loads_LE, loads_LE) and window.tokens_L.tolist() == [400] * L
        assert not stats.counts.any()
    assert stats.bias_LE is buffer and stats.bias_LE.dtype == torch.float32
    assert torch.equal(stats.bias_LE, before_LE) == (config.policy not in MOVING)
    if config.policy in MOVING:
        assert float(stats.bias_LE[0, 0]) > float(stats.bias_LE[0, -1]), "towards those who had too little"
        assert float(stats.bias_LE.double().mean(1).abs().max()) < 1e-7
    elif config.policy == "aux":
        torch.testing.assert_close(relative(policy), (loads_LE / loads_LE.double().mean(1, keepdim=True)).float())


@each
def test_corner_cases_leave_the_bias_alone(config: BalanceConfig) -> None:
    policy, stats = make(config)
    stats.set_bias_(torch.tensor([[0.1, -0.1] + [0.0] * 6] * L))
    before_LE = stats.bias_LE.clone()
    for _ in range(2):  # no token at all, on no rank
        assert policy.step(stats).tokens_L.tolist() == [0] * L
        feed(policy, stats, torch.empty(L, 0, E))
        policy.step(stats)
        feed(policy, stats, torch.randn(L, 30, E), mask_T=torch.zeros(30, dtype=torch.bool))
        assert policy.step(stats).loads_LE.any().item() is False
        # replayed choices: loads are reported, the bias learns nothing of them
        for i in range(L):
            ids_TK = torch.tensor([[0, 1]] * 50)
            route(torch.randn(50, E), stats.bias_LE[i], K, stats=stats.layer(i), ids_TK=ids_TK)
        assert policy.step(stats).loads_LE[0].tolist() == [50, 50] + [0] * 6
    assert torch.equal(stats.bias_LE, before_LE)
    assert torch.equal(relative(policy), torch.ones(L, E) if config.policy == "aux" else torch.zeros(0))


@each
def test_every_expert_chosen(config: BalanceConfig) -> None:
    policy, stats = make(config, k=4, experts=4)
    for _ in range(2):
        feed(policy, stats, torch.randn(L, 9, 4), k=4)
        assert policy.step(stats).loads_LE.tolist() == [[9] * 4] * L
    assert not stats.bias_LE.any()


@each
def test_fewer_tokens_than_experts(config: BalanceConfig) -> None:
    policy, stats = make(config)
    for _ in range(4):
        feed(policy, stats, torch.randn(L, 3, E))
        policy.step(stats)
        assert bool(stats.bias_LE.isfinite().all()) and float(stats.bias_LE.abs().max()) < 1.0


@each
def test_rows_that_are_not_finite(config: BalanceConfig) -> None:
    policy, stats = make(config)
    for _ in range(2):
        logits = torch.randn(L, 60, E)
        logits[0, 5] = torch.nan
        logits[0, 6, 2] = torch.nan
        feed(policy, stats, logits)
        assert policy.step(stats).dropped_L.tolist() == [2, 0]
        assert bool(stats.bias_LE.isfinite().all()) and bool(relative(policy).isfinite().all())


@each
def test_padding_changes_nothing(config: BalanceConfig) -> None:
    (one, plain), (two, padded) = make(config), make(config)
    for _ in range(2):
        logits, mask_T = torch.randn(L, 80, E) + torch.linspace(-1, 1, E), torch.rand(80) < 0.5
        feed(one, plain, logits[:, mask_T])
        feed(two, padded, torch.where(mask_T[:, None], logits, torch.nan), mask_T=mask_T)
        assert torch.equal(one.step(plain).loads_LE, two.step(padded).loads_LE)
    assert torch.equal(plain.bias_LE, padded.bias_LE) and torch.equal(relative(one), relative(two))


@each
def test_micro_batches_add_up(config: BalanceConfig) -> None:
    """All but what a stateless batch chooses by itself: there loads differ, and the running thresholds do not."""
    (one, whole), (two, parts) = make(config), make(config)
    for _ in range(2):
        logits = torch.randn(L, 96, E) + torch.linspace(-1, 1, E)
        feed(one, whole, logits)
        for part in logits.split(32, dim=1):
            feed(two, parts, part)
        one.step(whole)
        two.step(parts)
    assert torch.equal(whole.bias_LE, parts.bias_LE) and torch.equal(relative(one), relative(two))


@each
def test_resumed_inside_an_accumulation_window_to_the_bit(config: BalanceConfig) -> None:
    (one, straight), (two, cut) = make(config), make(config)
    for step in range(5):
        first, second = torch.randn(2, L, 50, E) + torch.linspace(-1, 1, E)
        feed(one, straight, first)
        feed(two, cut, first)
        if step in (1, 2):  # in load_quantile's window of two steps both places occur
            counts, memory = cut.state_dict(), two.state_dict()
            assert all(isinstance(value, Tensor | int) for value in memory.values())
            two, cut = make(config)
            cut.load_state_dict(counts)
            two.load_state_dict(memory)
        feed(one, straight, second)
        feed(two, cut, second)
        one.step(straight)
        two.step(cut)
        assert torch.equal(straight.bias_LE, cut.bias_LE) and torch.equal(relative(one), relative(two)), step


@each
def test_another_policys_state_is_refused(config: BalanceConfig) -> None:
    with pytest.raises(ValueError, match=r"state: found \['momentum'\]"):
        make(config)[0].load_state_dict({"momentum": 1})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"relative_LE": torch.ones(L, E, dtype=torch.float64)}, r"relative_LE: found torch.float64 of shape \(2, 8\)"),
        ({"relative_LE": torch.full((L, E), torch.nan)}, r"need finite float32 \[L, E\]"),
        ({"relative_LE": torch.ones(E)}, r"of shape \(8,\), need finite float32 \[L, E\]"),
    ],
)
def test_bad_relative_loads(state: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(BalanceConfig(policy="aux"))[0].load_state_dict(state)


def test_relative_loads_of_another_model() -> None:
    policy, stats = make(BalanceConfig(policy="aux"))
    policy.load_state_dict({"relative_LE": torch.ones(3, 4)})
    with pytest.raises(ValueError, match=r"relative_LE: found shape \(3, 4\), need \(2, 8\)"):
        policy.step(stats)


def test_live_tokens_under_replay_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    policy, stats = make(BalanceConfig(policy="replay"))
    with caplog.at_level("WARNING", logger="trine"):
        for _ in range(3):
            feed(policy, stats, torch.randn(L, 9, E))
            policy.step(stats)
    assert [record.message for record in caplog.records] == [
        "balance.policy 'replay': batches without recorded choices are routed live, with the bias as it is"
    ]


@pytest.mark.parametrize("k", [0, 9])
def test_k_out_of_range(k: int) -> None:
    with pytest.raises(ValueError, match=f"k: found {k}, need 1 <= k <= 8, the number of experts"):
        make_policy(BalanceConfig(policy="sign"), k, E)


def test_installing_sets_what_acts_in_the_forward_pass(tiny_config: Callable[..., ModelConfig]) -> None:
    model = Model(tiny_config(layers=3, mla_layers=(2,)))
    moes = [layer.feed_forward for layer in model.layers[1:]]
    aux = install_policy(model, BalanceConfig(policy="aux", aux_weight=0.3))
    assert isinstance(aux, AuxiliaryBalancing) and aux.pressure.weight == 0.3
    assert model.pressure is aux.pressure and all(moe.pressure is aux.pressure for moe in moes)
    stateless = install_policy(model, BalanceConfig(policy="stateless", mode="reassign", rounds=7))
    assert isinstance(stateless, StatelessThresholds) and stateless.rule.rounds == 7
    assert model.pressure is None and all(moe.pressure is None and moe.stateless is stateless.rule for moe in moes)
    install_policy(model, BalanceConfig())
    assert all(moe.pressure is None and moe.stateless is None for moe in moes)


RANK = """
import sys
import torch
from torch import distributed as dist
sys.path.insert(0, sys.argv[3])
from test_policies import CONFIGS, E, K, L, feed, relative
from trine.balance import RankChecked, RankMismatch, make_policy
from trine.ops.router import RouterStats

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
calls = []
original = dist.all_reduce
dist.all_reduce = lambda tensor, **kw: (calls.append((tensor.dtype, tensor.numel())), original(tensor, **kw))[1]
logits = torch.load(f"{folder}/logits.pt", weights_only=True)
found = []
for config in CONFIGS:
    policy, stats = make_policy(config, K, E), RouterStats.allocate(L, E, bins=100)
    assert isinstance(policy, RankChecked) and policy.every == 100
    calls.clear()
    for step in range(3):
        cut = 70 if step < 2 else logits.shape[2]  # in the last step rank 1 has no token at all
        feed(policy.policy, stats, logits[step, :, :cut] if rank == 0 else logits[step, :, cut:])
        window = policy.step(stats)
    found.append((stats.bias_LE.clone(), relative(policy.policy).clone(), window.loads_LE, list(calls)))
policy, stats = RankChecked(make_policy(CONFIGS[6], K, E).policy, 2), RouterStats.allocate(L, E, bins=100)
policy.step(stats)
if rank == 1:
    stats.bias_LE[1, 3] = 1e-7
policy.step(stats)  # not compared
try:
    policy.step(stats)
    message = ""
except RankMismatch as error:
    message = str(error)
torch.save({"found": [one[:3] for one in found], "calls": [str(one[3]) for one in found], "message": message},
           f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def test_two_ranks_agree_to_the_bit_equal_one_and_tell_when_they_do_not(tmp_path: Path) -> None:
    """One integer all-reduce a step for all layers; load policies send loads and counters alone."""
    logits = torch.randn(3, L, 160, E) + torch.linspace(-1, 1, E)
    torch.save(logits, tmp_path / "logits.pt")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), str(Path(__file__).parent)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()
    zero, one = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for i, config in enumerate(CONFIGS):
        policy, stats = make(config)
        for step in range(3):
            feed(policy, stats, logits[step])
            window = policy.step(stats)
        for side in (zero, one):
            bias_LE, relative_LE, loads_LE = side["found"][i]
            assert torch.equal(bias_LE, stats.bias_LE) and torch.equal(relative_LE, relative(policy)), NAMES[i]
            if config.policy != "stateless":
                assert torch.equal(loads_LE, window.loads_LE), NAMES[i]
            sums = 3 if config.policy in ("qb", "stateless") else 0
            tail = stats.counts.numel() - (0 if sums else stats.histograms_LEB.numel())
            assert side["calls"][i] == str([(torch.int32, tail)] * 3), NAMES[i]
    assert zero["message"] == one["message"] != ""
    assert " on rank 1, need " in zero["message"] and ", that of rank 0 (64-bit hashes)" in zero["message"]
