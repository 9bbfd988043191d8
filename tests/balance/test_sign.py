"""Loss-free balancing: its step, its sign, its path to balance."""

from __future__ import annotations

import pytest
import torch

from trine.balance import SignBalancing, max_violation
from trine.ops.router import RouterStats, route

E, K = 16, 2


def window(stats: RouterStats, logits_LTE: torch.Tensor) -> None:
    for i, logits_TE in enumerate(logits_LTE):
        route(logits_TE, stats.bias_LE[i], K, stats=stats.layer(i))


def test_each_expert_moves_by_one_step_towards_the_mean() -> None:
    stats = RouterStats.allocate(2, 4)
    # loads [6, 4, 2, 0] of 12 assignments in layer 0, mean 3; layer 1 has the mean everywhere
    first_TE = torch.tensor([[3.0, 2, 1, 0]] * 4 + [[3.0, 1, 2, 0]] * 2)
    second_TE = torch.tensor([[2.0, 1, 0, 0], [0, 0, 2, 1]] * 3)
    for i, logits_TE in enumerate((first_TE, second_TE)):
        route(logits_TE, stats.bias_LE[i], 2, stats=stats.layer(i))
    found = SignBalancing(0.01).step(stats)
    assert found.loads_LE.tolist() == [[6, 4, 2, 0], [3, 3, 3, 3]]
    torch.testing.assert_close(stats.bias_LE, torch.tensor([[-0.01, -0.01, 0.01, 0.01], [0.0] * 4]))
    assert not stats.counts.any() and stats.bias_LE.dtype == torch.float32


def test_it_is_centred_whatever_the_signs_add_up_to() -> None:
    stats = RouterStats.allocate(1, 4)
    route(torch.tensor([[9.0, 1, 0, -1]] * 8), stats.bias_LE[0], 1, stats=stats.layer(0))  # loads [8, 0, 0, 0]
    SignBalancing(0.01).step(stats)
    torch.testing.assert_close(stats.bias_LE[0], torch.tensor([-0.015, 0.005, 0.005, 0.005]))
    assert abs(float(stats.bias_LE.double().mean())) < 1e-9


def test_a_skewed_router_becomes_even_slowly() -> None:
    stats, policy, offset_E = RouterStats.allocate(1, E), SignBalancing(0.02), torch.linspace(-1.5, 1.5, E)
    path = []
    for _ in range(60):
        window(stats, torch.randn(1, 1024, E) + offset_E)
        path.append(float(max_violation(policy.step(stats).loads_LE)[0]))
    assert path[0] > 1.5 and path[3] > 1.0 and max(path[-5:]) < 0.6, path


@pytest.mark.parametrize("step", [0.0, -1e-3, float("nan"), float("inf")])
def test_bad_step(step: float) -> None:
    with pytest.raises(ValueError, match=r"step_size: found .*, need a finite number above 0"):
        SignBalancing(step)
