"""The Quantile Balancing policy: one window, several windows, several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trine.balance import BalancePolicy, QuantileBalancing, Window, max_violation
from trine.ops.router import RouterStats, route, solve_bias

EXPERTS, K = 16, 2


def window(stats: RouterStats, logits: torch.Tensor) -> None:
    for i, logits_TE in enumerate(logits):
        route(logits_TE, stats.bias_LE[i], K, stats=stats.layer(i))


def test_step_solves_returns_what_was_counted_and_closes_the_window() -> None:
    stats, logits = RouterStats.allocate(2, EXPERTS), torch.randn(2, 200, EXPERTS) + torch.randn(EXPERTS)
    logits[0, 3] = torch.nan
    logits[1, 0, 0] = 40.0
    window(stats, logits)
    bias = stats.bias_LE
    loads_LE = stats.loads_LE.clone()
    policy: BalancePolicy = QuantileBalancing(K)
    found = policy.step(stats)
    assert isinstance(found, Window) and found.loads_LE.dtype == torch.int64
    assert torch.equal(found.loads_LE, loads_LE.long()) and found.tokens_L.tolist() == [200, 200]
    assert found.dropped_L.tolist() == [1, 0] and found.saturated_L.tolist() == [0, 1]
    assert stats.bias_LE is bias and not stats.counts.any()
    for i in range(2):
        expected_E = solve_bias(torch.sigmoid(logits[i]), torch.zeros(EXPERTS), K, "histogram")
        torch.testing.assert_close(stats.bias_LE[i], expected_E, rtol=0, atol=1e-6)
    kept = found.loads_LE.clone()
    window(stats, logits)
    assert torch.equal(found.loads_LE, kept), "the record outlives the window"


def test_skewed_router_is_even_after_a_step_and_stays_so() -> None:
    stats, policy, offset_E = RouterStats.allocate(1, EXPERTS), QuantileBalancing(K), 1.5 * torch.randn(EXPERTS)
    path = []
    for _ in range(6):
        window(stats, torch.randn(1, 4096, EXPERTS) + offset_E)
        path.append(float(max_violation(policy.step(stats).loads_LE)[0]))
    assert path[0] > 2 and path[1] < 1.0 and max(path[3:]) < 0.3, path


def test_ema_smooths() -> None:
    logits = torch.randn(1, 500, EXPERTS) + torch.randn(EXPERTS)
    full, half = (RouterStats.allocate(1, EXPERTS) for _ in range(2))
    for stats, ema in ((full, 0.0), (half, 0.5)):
        window(stats, logits)
        QuantileBalancing(K, ema=ema).step(stats)
    torch.testing.assert_close(half.bias_LE, full.bias_LE / 2)


def test_without_tokens_or_choice_the_bias_stays() -> None:
    stats = RouterStats.allocate(1, 4)
    stats.set_bias_(torch.tensor([[0.1, -0.1, 0.2, -0.2]]))
    before = stats.bias_LE.clone()
    assert QuantileBalancing(2).step(stats).tokens_L.tolist() == [0]
    assert torch.equal(stats.bias_LE, before)
    route(torch.randn(5, 4), stats.bias_LE[0], 4, stats=stats.layer(0))
    assert QuantileBalancing(4).step(stats).loads_LE.tolist() == [[5] * 4]
    assert torch.equal(stats.bias_LE, before) and not stats.counts.any()


def test_state() -> None:
    policy = QuantileBalancing(K)
    policy.load_state_dict(policy.state_dict())
    with pytest.raises(ValueError) as error:
        policy.load_state_dict({"momentum": 1})
    assert str(error.value) == "state: found ['momentum'], need an empty one: QuantileBalancing remembers nothing"


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="k: found 0, need at least 1"):
        QuantileBalancing(0)
    with pytest.raises(ValueError, match=r"ema: found 1\.0, need 0 <= ema < 1"):
        QuantileBalancing(2, ema=1.0)
    with pytest.raises(ValueError, match="k: found 20, need 1 <= k <= 16, the number of experts"):
        QuantileBalancing(20).step(RouterStats.allocate(1, EXPERTS))


RANK = """
import sys
import torch
from torch import distributed as dist
from trine.balance import QuantileBalancing
from trine.ops.router import RouterStats, route

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
calls = []
original = dist.all_reduce
dist.all_reduce = lambda tensor, **kw: (calls.append(tensor.dtype), original(tensor, **kw))[1]
logits = torch.load(f"{folder}/logits.pt", weights_only=True)
stats, policy = RouterStats.allocate(2, 16), QuantileBalancing(2)
for step in range(3):
    # uneven shares; in the last step rank 1 has no token at all
    cut = 70 if step < 2 else logits.shape[2]
    part = logits[step, :, :cut] if rank == 0 else logits[step, :, cut:]
    for i in range(2):
        route(part[i], stats.bias_LE[i], 2, stats=stats.layer(i))
    window = policy.step(stats)
torch.save({"bias": stats.bias_LE, "loads": window.loads_LE, "tokens": window.tokens_L}, f"{folder}/{rank}.pt")
assert calls == [torch.int32] * 3, calls
dist.destroy_process_group()
"""


def test_two_ranks_agree_to_the_bit_and_equal_one(tmp_path: Path) -> None:
    """One integer all-reduce a step for all layers; a rank without tokens takes part (quantiles of ranks averaged would
    give another bias)."""
    logits = torch.randn(3, 2, 200, EXPERTS) + torch.randn(EXPERTS)
    torch.save(logits, tmp_path / "logits.pt")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()
    zero, one = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    stats, policy = RouterStats.allocate(2, EXPERTS), QuantileBalancing(K)
    for step in range(3):
        window(stats, logits[step])
        single = policy.step(stats)
    for found in (zero, one):
        assert torch.equal(found["bias"], stats.bias_LE) and torch.equal(found["loads"], single.loads_LE)
        assert found["tokens"].tolist() == [200, 200]
