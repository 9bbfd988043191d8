"""Load metrics at values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from trine import balance

EVEN = torch.full((8,), 5)
ONE = torch.tensor([40, 0, 0, 0, 0, 0, 0, 0])
STEPS = torch.tensor([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("metric", "even", "one", "steps"),
    [
        (balance.max_violation, 0.0, 7.0, 0.6),
        (balance.min_violation, 0.0, 1.0, 0.6),
        (balance.average_violation, 0.0, 1.75, 0.4),
        (balance.coefficient_of_variation, 0.0, math.sqrt(7), math.sqrt(1.25) / 2.5),
        (balance.gini, 0.0, 7 / 8, 0.25),
        (balance.entropy, 1.0, 0.0, -sum(p * math.log(p) for p in (0.1, 0.2, 0.3, 0.4)) / math.log(4)),
    ],
)
def test_values(metric, even: float, one: float, steps: float) -> None:
    found = [float(metric(load_E)) for load_E in (EVEN, ONE, STEPS)]
    assert found == pytest.approx([even, one, steps], abs=1e-12)
    stacked = metric(torch.stack((EVEN, ONE)))
    assert stacked.shape == (2,) and stacked.tolist() == pytest.approx([even, one], abs=1e-12)
    assert metric(EVEN.to(torch.int32)).dtype == torch.float64


def test_no_load_is_even() -> None:
    none_LE = torch.zeros(2, 8, dtype=torch.int32)
    for metric, value in ((balance.max_violation, 0.0), (balance.min_violation, 0.0), (balance.gini, 0.0)):
        assert metric(none_LE).tolist() == [value, value]
    assert balance.entropy(none_LE).tolist() == pytest.approx([1.0, 1.0])
    assert balance.dead_experts(none_LE).tolist() == [0, 0]
    assert balance.entropy(torch.tensor([7])).item() == 1.0


def test_dead_experts_need_enough_tokens_to_be_expected() -> None:
    few_E = torch.tensor([0, 5, 10, 5])
    assert int(balance.dead_experts(few_E)) == 0 and int(balance.dead_experts(few_E, least_expected=4)) == 1
    assert balance.dead_experts(torch.tensor([[0, 0, 100, 100], [1, 50, 50, 99]])).tolist() == [2, 0]


def test_percentiles_do_not_leave_out_zeros() -> None:
    """A percentile over non-zero loads only would hide the dead."""
    load_E = torch.cat((torch.zeros(10), torch.full((90,), 10.0)))
    found = balance.load_percentiles(load_E)
    assert float(found.p1) == float(found.p5) == 0.0
    assert float(found.p50) == float(found.p99) == pytest.approx(10 / 9)
    ramp = balance.load_percentiles(torch.arange(101))
    assert [float(p) for p in ramp] == pytest.approx([0.02, 0.1, 1.0, 1.9, 1.98])


def test_sampling_floor_against_random_loads() -> None:
    floor = balance.sampling_floor(4096, 2, 56)
    mean = 4096 * 2 / 56
    assert floor.cv == pytest.approx(mean**-0.5) and floor.max_violation == pytest.approx(0.2346, abs=1e-3)
    ids = torch.stack([torch.rand(4096, 56).topk(2).indices.reshape(-1) for _ in range(20)])
    loads = torch.stack([torch.bincount(row, minlength=56) for row in ids])
    assert float(balance.coefficient_of_variation(loads).mean()) == pytest.approx(floor.cv, rel=0.1)
    assert float(balance.max_violation(loads).mean()) == pytest.approx(floor.max_violation, rel=0.3)
    assert balance.sampling_floor(10, 4, 4) == (0.0, 0.0)


@pytest.mark.parametrize("arguments", [(0, 1, 4), (5, 0, 4), (5, 5, 4)])
def test_sampling_floor_refuses(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError) as error:
        balance.sampling_floor(*arguments)
    found = ", ".join(map(str, arguments))
    assert str(error.value) == f"tokens, k, experts: found {found}, need tokens >= 1 and 1 <= k <= experts"
