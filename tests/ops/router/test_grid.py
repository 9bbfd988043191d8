"""The two histograms: where a required bias is counted, what is read back, and how a range widens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trine.ops.router import RouterStats, route, solve_bias
from trine.ops.router.grid import ESTIMATORS, SCORE_DOMAINS, Grid, find_quantile
from trine.ops.router.quantile import count_required_bias, cutoffs, exact_quantile

KINDS = [(estimator, domain) for estimator in ESTIMATORS for domain in SCORE_DOMAINS]


def counted(grid: Grid, values_TE: Tensor, bias_E: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Histogram ``[1, E, bins]`` and edges ``[1, 2]`` of a batch."""
    edges_L2 = grid.edges(bias_E[None], torch.tensor([grid.first_reach]))
    counts_EB = torch.zeros(values_TE.shape[1], grid.bins, dtype=torch.int32)
    around = (grid, bias_E) if grid.signed_log else (None, None)
    count_required_bias(values_TE, cutoffs(values_TE, bias_E, k), None, edges_L2[0], counts_EB, *around)
    return counts_EB[None], edges_L2


@pytest.mark.parametrize("bins", [64, 256, 512])
def test_signed_log_bins_equal_their_definition(bins: int) -> None:
    """x = 1 + |u| / eps; every octave of x in equal parts; one at a time, in Python's floats."""
    grid, steps, half = Grid("signed_log", "sigmoid", bins), bins // 64, bins // 2
    distance_N = torch.logspace(-11, 1.5, 4000).repeat(2)
    distance_N[:4000] *= -1
    edges_2 = grid.edges(torch.zeros(1), torch.tensor([4.0])[0])
    epsilon = float(edges_2[1])
    assert float(edges_2[0]) == -4.0
    found_N = grid.signed_log_bins(-distance_N[:, None], torch.zeros(8000), torch.zeros(1), edges_2)[:, 0].tolist()
    different = 0
    for u, found in zip(distance_N.tolist(), found_N, strict=True):
        x = 1.0 + abs(u) / epsilon
        octave = math.floor(math.log2(x))
        step = min(int(steps * (octave + x / 2.0**octave - 1.0)), half - 1)
        expected = half + step if u > 0 else half - 1 - step
        assert abs(found - expected) <= 1
        different += found != expected
        if abs(u) > 4.001:
            assert found in (0, bins - 1), "beyond the reach"
        elif abs(u) < 3.999:
            assert 0 < found < bins - 1
    assert different < 20  # an ulp at the border of a bin


def test_place_and_distance_are_inverse() -> None:
    grid = Grid("signed_log", "logit", 256)
    place_N = torch.linspace(0, 256, 1000, dtype=torch.float64)
    torch.testing.assert_close(grid._place(grid._distance(place_N)), place_N, rtol=1e-12, atol=1e-9)
    assert float(grid._distance(torch.tensor(255.0, dtype=torch.float64))) == grid._span
    assert float(grid._distance(torch.tensor(128.0, dtype=torch.float64))) == 0.0


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize("bins", [64, 256])
def test_signed_log_is_within_its_bound_of_exact(bins: int, scale: float) -> None:
    """Error of at most the width of the bin that holds the change: (|change| + eps) / steps of an octave."""
    scores_TE = 0.5 + scale * (torch.sigmoid(torch.randn(20_000, 16) + 0.3 * torch.randn(16)) - 0.5)
    bias_E = 0.05 * scale * torch.randn(16)
    grid = Grid("signed_log", "sigmoid", bins)
    counts_LEB, edges_L2 = counted(grid, scores_TE, bias_E, 2)
    bin_LE, part_LE, tokens_L = find_quantile(counts_LEB, 2)
    found_LE, outside_LE = grid.required(bin_LE, part_LE, edges_L2, bias_E[None])
    change_E = exact_quantile(cutoffs(scores_TE, bias_E, 2)[:, None] - scores_TE, 2) - bias_E.double()
    bound_E = (change_E.abs() + 1e-9) * 64 / bins * 1.01 + 2e-7  # the last: rounding of scores near 1/2
    assert int(tokens_L) == 20_000 and not bool(outside_LE.any())
    error_E = (found_LE[0] - bias_E - change_E).abs()
    assert bool((error_E <= bound_E).all()), (error_E / bound_E).max()
    assert float(change_E.abs().max()) > 0.02 * scale, "there was something to find"


@pytest.mark.parametrize("method", ["histogram", "signed_log"])
def test_logits_are_counted_in_a_range_that_holds_them(method: str) -> None:
    """marin-community/marin#7891: logits in the range of sigmoid scores were cut off. Offsets of -30 to 30 here."""
    logits_TE, bias_E = torch.randn(20_000, 16) + torch.linspace(-30, 30, 16), torch.zeros(16)
    exact_E = solve_bias(logits_TE, bias_E, 2)
    found_E = solve_bias(logits_TE, bias_E, 2, method, score_domain="logit")
    bound = 2.2 * 64 / 998 if method == "histogram" else 0.25 * 60
    assert float(exact_E.abs().max()) > 20 and float((found_E - exact_E).abs().max()) <= bound
    for _ in range(12):  # and with fresh changes the finer bins are reached
        found_E = solve_bias(logits_TE, found_E, 2, method, score_domain="logit")
    load_E = torch.bincount(route(logits_TE, found_E, 2, score_domain="logit").ids_TK.reshape(-1), minlength=16)
    assert float(load_E.max() / 2500.0) < 1.1 and int(load_E.min()) > 2250


def test_end_bins_of_logits_hold_only_what_lies_outside() -> None:
    stats = RouterStats.allocate(1, 8, estimator="report", score_domain="logit")
    logits_TE = torch.randn(300, 8)
    route(logits_TE, stats.bias_LE[0], 2, stats=stats.layer(0), score_domain="logit")
    assert stats.overflow_L.tolist() == [0]
    assert stats.edges_L2[0].tolist() == pytest.approx([-16 - 32 / 998, 32 / 998])
    logits_TE[:7, 3] = -40.0  # required bias of about 41 for expert 3 alone
    logits_TE[5, 1] = 60.0  # and of about -59 for expert 1
    route(logits_TE, stats.bias_LE[0], 2, stats=stats.layer(0), score_domain="logit")
    assert stats.overflow_L.tolist() == [8] and int(stats.histograms_LEB[0, 1, 0]) == 1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_quantile_outside_the_range_moves_safely_and_widens_it(estimator: str) -> None:
    stats = RouterStats.allocate(2, 8, estimator=estimator, score_domain="logit")
    reach, far = stats.grid.first_reach, 40 * stats.grid.first_reach
    offset_E = torch.tensor([far, far, far, 0.0, 0.0, 0.0, 0.0, 0.0])
    for index in range(2):  # the second layer has nothing out of the ordinary
        logits_TE = torch.randn(400, 8) + (offset_E if index == 0 else 0)
        route(logits_TE, stats.bias_LE[index], 2, stats=stats.layer(index), score_domain="logit")
    stats.solve_(2)
    moved_E = stats.bias_LE[0]
    assert bool((moved_E[3:] - moved_E[:3].max() > 0.9 * reach).all()), "in the right direction"
    assert float(moved_E.max() - moved_E.min()) <= 2 * reach * 1.01, "never beyond the range"
    assert float(stats.reach_L[0]) > reach and float(stats.reach_L[1]) == reach
    dead = []
    for _ in range(16):
        stats.zero_()
        logits_TE = torch.randn(400, 8) + offset_E
        route(logits_TE, stats.bias_LE[0], 2, stats=stats.layer(0), score_domain="logit")
        stats.solve_(2)
        dead.append(int((stats.loads_LE[0] == 0).sum()))
    assert dead[-1] == 0 and float(stats.bias_LE[0].max() - stats.bias_LE[0].min()) > 0.9 * far


def test_reach_over_logits_narrows_when_nothing_needs_it() -> None:
    stats = RouterStats.allocate(1, 8, score_domain="logit")
    stats.reach_L.fill_(64.0)
    for expected in (32.0, 16.0, 16.0):
        stats.zero_()
        route(torch.randn(400, 8), stats.bias_LE[0], 2, stats=stats.layer(0), score_domain="logit")
        assert float(stats.solve_(2).reach_L) == expected


@pytest.mark.parametrize(("layers", "experts", "bins"), [(3, 5, 1000), (2, 7, 256), (1, 4, 13), (2, 3, 1), (0, 4, 64)])
def test_quantile_by_blocks_equals_counting_one_by_one(layers: int, experts: int, bins: int) -> None:
    counts_LEB = torch.zeros(layers, experts, bins, dtype=torch.int32)
    for counts_EB in counts_LEB:
        for counts_B in counts_EB:
            counts_B.index_add_(0, torch.randint(bins, (37,)) ** 2 // bins, torch.ones(37, dtype=torch.int32))
    bin_LE, part_LE, tokens_L = find_quantile(counts_LEB, 2)
    assert tokens_L.tolist() == [37] * layers
    for index in range(layers):
        for e in range(experts):
            wanted = 2 * 37 / experts
            counts = counts_LEB[index, e].tolist()
            b = next(b for b in range(bins) if sum(counts[: b + 1]) >= wanted - 1e-9)
            assert int(bin_LE[index, e]) == b
            assert float(part_LE[index, e]) == pytest.approx((wanted - sum(counts[:b])) / counts[b], abs=1e-9)


@pytest.mark.parametrize(("estimator", "domain"), KINDS)
def test_pooled_quantiles(estimator: str, domain: str) -> None:
    """Of all experts together, in units of the bias although a signed-log histogram counts distances from it."""
    stats = RouterStats.allocate(2, 12, estimator=estimator, score_domain=domain)
    stats.bias_LE.copy_(torch.linspace(-0.4, 0.4, 12))
    assert bool(stats.required_bias_quantiles([0.5]).isnan().all())
    logits_TE = torch.randn(3000, 12)
    found = route(logits_TE, stats.bias_LE[1], 3, stats=stats.layer(1), score_domain=domain)
    values_TE = found.scores_TE if domain == "sigmoid" else logits_TE
    required_N = (found.cutoff_T[:, None] - values_TE).double().reshape(-1)
    levels = [0.01, 0.2, 0.5, 0.99]
    expected_Q = torch.quantile(required_N, torch.tensor(levels, dtype=torch.float64))
    found_LQ = stats.required_bias_quantiles(levels)
    scale = 1.0 if domain == "sigmoid" else 4.0
    tolerance = 0.1 * scale if estimator == "signed_log" else 0.01 * scale  # a far bin is a quarter of its distance
    assert bool(found_LQ[0].isnan().all()) and float((found_LQ[1] - expected_Q).abs().max()) < tolerance
    ends_Q = stats.required_bias_quantiles([0.0, 1.0])[1]
    assert (
        float(ends_Q[0]) <= float(required_N.min()) + tolerance
        and float(ends_Q[1]) >= float(required_N.max()) - tolerance
    )
    with pytest.raises(ValueError, match=r"levels: found \[1\.5\], need numbers in \[0, 1\]"):
        stats.required_bias_quantiles([1.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mean", "sigmoid", 10), "estimator: found 'mean', need one of ['report', 'signed_log']"),
        (("report", "tanh", 10), "score_domain: found 'tanh', need one of ['sigmoid', 'logit']"),
        (("signed_log", "logit", 100), "bins: found 100, need a power of two, at least 64, for signed_log"),
        (("signed_log", "logit", 32), "bins: found 32, need a power of two, at least 64, for signed_log"),
        (("report", "logit", 2), "bins: found 2, need at least 3: the first and the last hold what lies outside"),
    ],
)
def test_bad_grid(arguments: tuple[str, str, int], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Grid(*arguments)
    assert str(error.value) == message
