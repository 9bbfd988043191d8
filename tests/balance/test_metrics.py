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


ALL = (
    *(balance.max_violation, balance.min_violation, balance.average_violation, balance.coefficient_of_variation),
    *(balance.gini, balance.entropy, balance.effective_experts, balance.dead_experts, balance.load_percentiles),
    *(lambda x: balance.rank_overload(x, 2), lambda x: balance.rank_overload(x, 1)),
    *(lambda x: balance.quantile_error(x, x[..., 0], 1), lambda x: balance.silence(x * 0, x), balance.dead_over_steps),
)


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize(
    ("loads", "found"),
    [
        ([[1.0, 2.0], [math.nan, 3.0]], "nan at [1, 0]"),
        ([[-4, 2], [1, 1]], "-4 at [0, 0]"),
        ([[1, 1], [-3, 1]], "-3 at [1, 0]"),  # a mean below 0 used to count as no token, and so as even
        ([[5, 5], [8, -1]], "-1 at [1, 1]"),
        ([[math.inf, 1.0], [1.0, 1.0]], "inf at [0, 0]"),
    ],
)
def test_what_cannot_be_a_load_is_refused(metric, loads: list, found: str) -> None:
    with pytest.raises(ValueError) as error:
        metric(torch.tensor(loads))
    assert str(error.value) == f"loads: found {found}, need finite numbers of at least 0"


def test_where_values_are_not_read_a_bad_load_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card: the figure is NaN, that of the good layer beside it is right."""
    monkeypatch.setattr("trine.balance.metrics.may_read", lambda tensor: False)
    loads_LE = torch.tensor([[math.nan, 1, 1], [-9, 1, 1], [math.inf, 1, 1], [4, 1, 1]])
    for metric, good in ((balance.max_violation, 1.0), (lambda x: balance.rank_overload(x, 3), 2.0)):
        found = metric(loads_LE).tolist()
        assert all(map(math.isnan, found[:3])) and found[3] == pytest.approx(good)


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


def test_effective_number_and_quantile_error() -> None:
    loads_LE = torch.tensor([[5, 5, 5, 5], [10, 10, 0, 0], [20, 0, 0, 0], [0, 0, 0, 0]])
    assert balance.effective_experts(loads_LE).tolist() == pytest.approx([4, 2, 1, 4])
    assert float(balance.effective_experts(STEPS)) == pytest.approx(
        math.exp(float(balance.entropy(STEPS)) * math.log(4))
    )
    # k / E = 1/2 of 10 tokens: shares 1/2; 1, 1, 0, 0; 2 (an expert twice would be wrong, and shows)
    found = balance.quantile_error(loads_LE, torch.tensor([10, 10, 10, 0]), 2)
    assert found.tolist() == pytest.approx([0, 0.5, 1.5, 0])


def test_rank_overload_sums_neighbours() -> None:
    loads_LE = torch.tensor([[4, 0, 1, 3, 2, 2], [6, 6, 0, 0, 0, 0], [0] * 6])
    assert balance.rank_overload(loads_LE, 3).tolist() == pytest.approx([1.0, 3.0, 1.0])
    assert balance.rank_overload(loads_LE, 2).tolist() == pytest.approx([7 / 6, 2.0, 1.0])
    assert balance.rank_overload(loads_LE, 1).tolist() == [1.0, 1.0, 1.0]
    many_LE = torch.randint(0, 2**40, (50, 7))
    assert set(balance.rank_overload(many_LE, 1).tolist()) == {1.0}, "one rank is its own mean, to the bit"
    with pytest.raises(ValueError, match="ranks: found 4, need a divisor of the 6 experts"):
        balance.rank_overload(loads_LE, 4)


def test_sign_flips() -> None:
    step = torch.tensor([[1.0, -1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    before = torch.tensor([[-3.0, 1.0, 1.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
    found = balance.sign_flip_rate(step, before)
    assert float(found[0]) == pytest.approx(2 / 3) and math.isnan(float(found[1]))
    noise = torch.randn(3, 100_000).diff(dim=0)
    assert float(balance.sign_flip_rate(noise[1], noise[0])) == pytest.approx(2 / 3, abs=0.01)


def test_sequence_loads() -> None:
    ids_TK = torch.tensor([[0, 1], [2, -1], [1, 2], [-1, -1], [3, 0], [3, 1]])
    bounds = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    found = balance.sequence_loads(ids_TK, bounds, 4)
    assert found.tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]]
    assert found.sum(0).tolist() == [2, 3, 2, 2] and found.dtype == torch.int64
    assert balance.sequence_loads(ids_TK[:0], torch.tensor([0]), 4).shape == (0, 4)
    # the three scopes differ by their leading dimensions only
    assert balance.max_violation(found).tolist() == pytest.approx([1 / 3, 0, 0, 1])
    layers_LTK = torch.stack((ids_TK, ids_TK.flip(0)))
    both = balance.sequence_loads(layers_LTK, bounds, 4)
    assert both.tolist() == [found.tolist(), balance.sequence_loads(ids_TK.flip(0), bounds, 4).tolist()]
    micro = balance.sequence_loads(layers_LTK[None], torch.tensor([0, 6]), 4)
    assert micro.shape == (1, 2, 1, 4) and micro.flatten().tolist() == [2, 3, 2, 2] * 2
    assert balance.sequence_loads(layers_LTK[:, :0], torch.tensor([0]), 4).shape == (2, 0, 4)


@pytest.mark.parametrize(
    ("ids", "bounds", "words"),
    [
        ([[4, 0]], [0, 1], "ids_TK: found 0 to 4, need -1 to 3"),
        ([[-2, 0]], [0, 1], "ids_TK: found -2 to 0"),
        ([[1, 0]], [0, 2], "cu_seqlens_N1: found .* need 0 up to T = 1"),
        ([[1, 0], [1, 0]], [0, 2, 1, 2], "cu_seqlens_N1"),
        ([[1, 0]], [1, 1], "cu_seqlens_N1"),
        ([1, 0], [0, 2], "need \\[..., T, K\\]"),
    ],
)
def test_sequence_loads_refuse(ids: list, bounds: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        balance.sequence_loads(torch.tensor(ids), torch.tensor(bounds), 4)


def test_dead_over_several_steps() -> None:
    """Six tokens an expert a step prove nothing in one step, twelve in two do."""
    loads_SLE = torch.tensor([[[12, 0, 6, 6]], [[12, 0, 12, 0]], [[8, 4, 6, 6]]])
    assert balance.dead_over_steps(loads_SLE[:1]).tolist() == [0]
    assert balance.dead_over_steps(loads_SLE[:2]).tolist() == [1]
    assert balance.dead_over_steps(loads_SLE).tolist() == [0]
    silent = torch.zeros(1, 4, dtype=torch.float64)
    seen = [silent := balance.silence(silent, loads_LE) for loads_LE in loads_SLE]
    assert [one.tolist() for one in seen] == [[[0, 6, 0, 0]], [[0, 12, 0, 6]], [[0, 0, 0, 0]]]
    assert [int((one > 10).sum()) for one in seen] == [0, 1, 0]


def test_floors_of_many_windows() -> None:
    cv, max_vio, percentiles = balance.sampling_floors(torch.tensor([4096, 0, 9]), 2, 56)
    one = balance.sampling_floor(4096, 2, 56)
    assert (float(cv[0]), float(max_vio[0])) == pytest.approx(one)
    assert (float(cv[1]), float(max_vio[1])) == (0.0, 0.0)
    assert [float(p[0]) for p in percentiles] == pytest.approx(
        [1 + z * one.cv for z in (-2.3263479, -1.6448536, 0, 1.6448536, 2.3263479)], abs=1e-6
    )
    assert [float(p[1]) for p in percentiles] == [1.0] * 5 and float(percentiles.p1[2]) == 0.0
    assert float(balance.sampling_floors(torch.tensor(7), 4, 4)[1]) == 0.0
    with pytest.raises(ValueError, match="k, experts: found 5, 4"):
        balance.sampling_floors(torch.tensor(7), 5, 4)
    # what a balanced router's loads really show
    ids = torch.rand(20_000, 56).topk(2).indices.reshape(-1)
    found = balance.load_percentiles(torch.bincount(ids, minlength=56))
    floor = balance.sampling_floors(torch.tensor(20_000), 2, 56)[2]
    assert float(found.p95) == pytest.approx(float(floor.p95), abs=0.03)
