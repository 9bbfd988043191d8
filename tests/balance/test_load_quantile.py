"""Monitor and correct: who moves, by how much, when, and who stays inside the dead band."""

from __future__ import annotations

import pytest
import torch

from trine.balance import LoadQuantileBalancing, max_violation
from trine.ops.router import RouterStats, route

E, K = 40, 2


def with_loads(stats: RouterStats, loads_E: list[int]) -> None:
    """Route one expert a token so that these loads come about."""
    ids = torch.repeat_interleave(torch.arange(stats.experts), torch.tensor(loads_E))
    logits_TE = torch.nn.functional.one_hot(ids, stats.experts).float() * 60 - 30  # beyond any bias here
    route(logits_TE, stats.bias_LE[0], 1, stats=stats.layer(0))


def test_only_the_edges_move_and_in_proportion_to_their_excess() -> None:
    stats = RouterStats.allocate(1, E)
    # mean 100, noise 10: two of 40 beyond each edge, all others inside the band
    loads = [300, 150, 45, 50] + [90] * 30 + [120, 130, 125, 125, 128, 127]
    assert sum(loads) == 4000
    with_loads(stats, loads)
    policy = LoadQuantileBalancing(rate=0.1, window=1)
    assert policy.step(stats).loads_LE[0].tolist() == loads
    low, high = torch.quantile(torch.tensor(loads, dtype=torch.float64), torch.tensor([0.05, 0.95]).double()).tolist()
    expected = []
    for load in loads:
        edge = load >= high or load <= low
        expected.append(-0.1 * min(load / 100 - 1, 1.0) if edge and abs(load - 100) > 30 else 0.0)
    assert expected[:5] == pytest.approx([-0.1, -0.05, 0.055, 0.05, 0.0]) and not any(expected[4:])
    want_E = torch.tensor(expected) - sum(expected) / E
    torch.testing.assert_close(stats.bias_LE[0], want_E, rtol=1e-6, atol=1e-8)


def test_sampling_noise_moves_nobody() -> None:
    """Quantiles alone would move a tenth of the experts for ever."""
    stats, quiet, nervous = RouterStats.allocate(1, E), LoadQuantileBalancing(window=1, band=4.5), None
    for _ in range(4):
        logits_TE = torch.randn(2000, E)
        route(logits_TE, stats.bias_LE[0], K, stats=stats.layer(0))
        quiet.step(stats)
    assert not stats.bias_LE.any()
    nervous = LoadQuantileBalancing(window=1, band=0.0)
    route(torch.randn(2000, E), stats.bias_LE[0], K, stats=stats.layer(0))
    nervous.step(stats)
    assert int((stats.bias_LE.abs() > stats.bias_LE.abs().median() + 1e-6).sum()) >= 3


def test_one_move_a_window_from_the_sum_of_its_steps() -> None:
    stats, policy, summed = RouterStats.allocate(1, 4), LoadQuantileBalancing(0.1, 3), RouterStats.allocate(1, 4)
    parts = ([100, 20, 30, 50], [90, 40, 20, 50], [80, 30, 40, 50])
    for i, part in enumerate(parts):
        assert not stats.bias_LE.any(), i
        with_loads(stats, part)
        policy.step(stats)
        assert not stats.counts.any()
    with_loads(summed, [sum(column) for column in zip(*parts, strict=True)])
    LoadQuantileBalancing(0.1, 1).step(summed)
    assert stats.bias_LE.any() and torch.equal(stats.bias_LE, summed.bias_LE)
    before = stats.bias_LE.clone()
    with_loads(stats, [200, 0, 0, 0])
    policy.step(stats)
    assert torch.equal(stats.bias_LE, before), "the next window began empty"


def test_a_skewed_router_becomes_more_even() -> None:
    stats, policy = RouterStats.allocate(1, 16), LoadQuantileBalancing(rate=0.05, window=2)
    offset_E, path = torch.linspace(-1.5, 1.5, 16), []
    for _ in range(120):
        route(torch.randn(512, 16) + offset_E, stats.bias_LE[0], K, stats=stats.layer(0))
        path.append(float(max_violation(policy.step(stats).loads_LE)[0]))
    assert path[0] > 1.5 and sum(path[-8:]) / 8 < 0.6, path


def test_state_goes_on_inside_the_window() -> None:
    straight, cut = RouterStats.allocate(1, 4), RouterStats.allocate(1, 4)
    one, two = LoadQuantileBalancing(0.1, 3), LoadQuantileBalancing(0.1, 3)
    parts = ([100, 20, 30, 50], [90, 40, 20, 50], [80, 30, 40, 50], [10, 60, 70, 60])
    for i, part in enumerate(parts):
        with_loads(straight, part)
        one.step(straight)
        with_loads(cut, part)
        two.step(cut)
        state, two = two.state_dict(), LoadQuantileBalancing(0.1, 3)
        assert state["steps"] == (i + 1) % 3
        two.load_state_dict(state)
        assert torch.equal(straight.bias_LE, cut.bias_LE)
    assert straight.bias_LE.any()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"state: found \[\] with steps = None, need steps from 0 to 2, and loads_LE unless they are 0"),
        ({"steps": 3, "loads_LE": torch.zeros(1, 4, dtype=torch.int64)}, "with steps = 3, need steps from 0 to 2"),
        ({"steps": 1}, "with steps = 1"),
        ({"steps": True, "loads_LE": torch.zeros(1, 4, dtype=torch.int64)}, "with steps = True"),
        ({"steps": 1, "loads_LE": torch.zeros(1, 4)}, r"loads_LE: found 2-d torch.float32, need \[L, E\] int64"),
    ],
)
def test_bad_state(state: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadQuantileBalancing(0.1, 3).load_state_dict(state)


def test_loads_of_another_model() -> None:
    policy, stats = LoadQuantileBalancing(0.1, 3), RouterStats.allocate(1, 4)
    policy.load_state_dict({"steps": 1, "loads_LE": torch.zeros(2, 8, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"loads_LE: found shape \(2, 8\) in the restored window, need \(1, 4\)"):
        policy.step(stats)


@pytest.mark.parametrize("dials", [{"rate": 0.0}, {"window": 0}, {"band": -1.0}, {"rate": float("nan")}])
def test_bad_dials(dials: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"rate, window, band: found .* need a finite rate above 0, a window"):
        LoadQuantileBalancing(**dials)  # type: ignore[arg-type]
