"""Stateless routing: each mode against plain Python, quantiles against order statistics, and what it must not do."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from trine.ops.router import RouterStats, route, solve_bias
from trine.ops.router import stateless as module
from trine.ops.router.stateless import Stateless, choose_by_batch, route_stateless, upper_threshold

METHODS = ("exact", "histogram", "sketch")


def loads(ids_TK: Tensor, experts: int) -> list[int]:
    return torch.bincount(ids_TK.reshape(-1) + 1, minlength=experts + 1)[1:].tolist()


def greedy(scores_TE: Tensor, k: int, capacity: float, rounds: int) -> list[set[int]]:
    """Rounds of asking, one token and one expert at a time."""
    tokens, experts = scores_TE.shape
    room = [math.ceil(capacity * tokens * k / experts - 1e-9)] * experts
    taken: list[set[int]] = [set() for _ in range(tokens)]
    asked: list[set[int]] = [set() for _ in range(tokens)]
    for _ in range(rounds):
        asks: list[list[int]] = [[] for _ in range(experts)]
        for t in range(tokens):
            may = [e for e in range(experts) if e not in asked[t] and room[e] > 0]
            for e in sorted(may, key=lambda e: (-float(scores_TE[t, e]), e))[: k - len(taken[t])]:
                asks[e].append(t)
                asked[t].add(e)
        for e in range(experts):
            for t in sorted(asks[e], key=lambda t: (-float(scores_TE[t, e]), t))[: room[e]]:
                taken[t].add(e)
                room[e] -= 1
    return taken


@pytest.mark.parametrize(("tokens", "experts", "k"), [(40, 8, 2), (37, 5, 3), (3, 16, 2), (1, 4, 1), (64, 6, 5)])
@pytest.mark.parametrize(("mode", "capacity", "rounds"), [("drop", 1.0, 9), ("drop", 1.25, 9), ("reassign", 1.0, 4)])
def test_drop_and_reassign_equal_one_token_at_a_time(
    tokens: int, experts: int, k: int, mode: str, capacity: float, rounds: int
) -> None:
    scores_TE = torch.sigmoid(torch.randn(tokens, experts) + 2 * torch.randn(experts))
    rule = Stateless(mode=mode, capacity=capacity, rounds=rounds)  # type: ignore[arg-type]
    ids_TK = choose_by_batch(scores_TE, k, rule)
    expected = greedy(scores_TE, k, capacity, 1 if mode == "drop" else rounds)
    assert [{e for e in row if e >= 0} for row in ids_TK.tolist()] == expected
    for row, row_scores in zip(ids_TK.tolist(), scores_TE.tolist(), strict=True):
        filled = [e for e in row if e >= 0]
        assert row[: len(filled)] == filled, "empty slots come last"
        assert filled == sorted(filled, key=lambda e: -row_scores[e])
    assert max(loads(ids_TK, experts)) <= math.ceil(capacity * tokens * k / experts)


@pytest.mark.parametrize("quantile", METHODS)
def test_reassigning_serves_what_dropping_loses(quantile: str) -> None:
    tokens, experts, k = 2500, 32, 4
    scores_TE = torch.sigmoid(torch.randn(tokens, experts) + torch.randn(experts))
    capacity = math.ceil(tokens * k / experts)
    served = {}
    for mode, rounds in (("drop", 1), ("reassign", 5)):
        rule = Stateless(mode=mode, quantile=quantile, rounds=rounds)  # type: ignore[arg-type]
        ids_TK = choose_by_batch(scores_TE, k, rule)
        assert max(loads(ids_TK, experts)) <= capacity
        served[mode] = int((ids_TK >= 0).sum()) / (tokens * k)
    assert 0.4 < served["drop"] < 0.9 and served["reassign"] > served["drop"] + 0.1, served
    assert served["reassign"] > 0.93


@pytest.mark.parametrize("quantile", METHODS)
def test_dual_serves_all_and_overflows_little(quantile: str) -> None:
    tokens, experts, k = 4096, 32, 4
    scores_TE = torch.sigmoid(torch.randn(tokens, experts) + torch.randn(experts))
    mean = tokens * k / experts
    vio = []
    for rounds in (1, 3, 8):
        rule = Stateless(mode="dual", quantile=quantile, rounds=rounds)  # type: ignore[arg-type]
        ids_TK = choose_by_batch(scores_TE, k, rule)
        assert int(ids_TK.min()) >= 0 and all(len(set(row)) == k for row in ids_TK.tolist())
        vio.append(max(loads(ids_TK, experts)) / mean - 1)
    free = max(loads(route(torch.logit(scores_TE), torch.zeros(experts), k).ids_TK, experts)) / mean - 1
    assert free > 1.5 and vio[0] < 0.6 and vio[1] < 0.3 and vio[2] <= vio[0], (free, vio)


def test_dual_is_quantile_balancing_inside_the_batch() -> None:
    scores_TE, k = torch.rand(200, 12), 3
    bias_E = torch.zeros(12)
    for _ in range(2):
        bias_E = solve_bias(scores_TE, bias_E, k, "exact")
    expected_TK = (scores_TE + bias_E).topk(k).indices
    found_TK = choose_by_batch(scores_TE, k, Stateless(rounds=2))
    # an exact quantile puts one token an expert on the very border, where rounding decides
    assert int((found_TK != expected_TK).any(1).sum()) <= 12


@pytest.mark.parametrize("method", METHODS)
def test_threshold_is_that_of_the_counted_entries(method: str) -> None:
    values_TE, counted_TE = torch.randn(900, 5), torch.rand(900, 5) < 0.6
    values_TE[~counted_TE] = torch.nan
    wanted_E = torch.tensor([0.0, 1.0, 40.0, 133.5, 1000.0])
    theta_E = upper_threshold(values_TE, counted_TE, wanted_E, method)
    assert theta_E.dtype == torch.float64 and theta_E[0] == torch.inf and theta_E[4] == -torch.inf
    for e in (1, 2, 3):
        kept = values_TE[counted_TE[:, e], e]
        slack = 0 if method != "histogram" else 2
        above, at_least = int((kept > theta_E[e]).sum()), int((kept >= theta_E[e]).sum())
        assert above <= math.ceil(wanted_E[e]) + slack and at_least >= wanted_E[e] - slack, (e, above, at_least)


def test_sketch_reads_a_sample() -> None:
    values_TE = torch.rand(10_000, 3)
    counted_TE = torch.ones(10_000, 3, dtype=torch.bool)
    exact_E, sketch_E = (upper_threshold(values_TE, counted_TE, torch.tensor(2500.0), m) for m in ("exact", "sketch"))
    assert not torch.equal(exact_E, sketch_E)
    torch.testing.assert_close(sketch_E, exact_E, rtol=0, atol=0.06)  # 4 / sqrt(1000) * sqrt(.25 * .75)
    values_TE.view(10_000, 3)[1::2] = 0.0  # rows between those of the sample (every 10th) may change as they like
    assert torch.equal(upper_threshold(values_TE, counted_TE, torch.tensor(2500.0), "sketch"), sketch_E)


@pytest.mark.parametrize("quantile", METHODS)
@pytest.mark.parametrize("mode", ["drop", "reassign", "dual"])
def test_ties_go_to_the_lowest_ids(mode: str, quantile: str) -> None:
    rule = Stateless(mode=mode, quantile=quantile, rounds=4)  # type: ignore[arg-type]
    ids_TK = choose_by_batch(torch.full((8, 4), 0.5), 2, rule)
    if mode == "dual":
        assert ids_TK.tolist() == [[0, 1]] * 8
    elif mode == "drop":
        assert ids_TK.tolist() == [[0, 1]] * 4 + [[-1, -1]] * 4
    else:
        assert ids_TK.tolist() == [[0, 1]] * 4 + [[2, 3]] * 4


@pytest.mark.parametrize("mode", ["drop", "reassign", "dual"])
def test_corner_cases(mode: str) -> None:
    rule = Stateless(mode=mode)  # type: ignore[arg-type]
    assert choose_by_batch(torch.empty(0, 6), 2, rule).shape == (0, 2)
    assert choose_by_batch(torch.rand(5, 3), 3, rule).sort(1).values.tolist() == [[0, 1, 2]] * 5, "k = E"
    nobody_T = torch.zeros(5, dtype=torch.bool)
    assert choose_by_batch(torch.rand(5, 6), 2, rule, nobody_T).tolist() == [[-1, -1]] * 5
    few_TK = choose_by_batch(torch.rand(3, 64), 2, rule)
    assert int((few_TK >= 0).sum(1).min()) >= 1, "fewer tokens than experts"
    scores_TE = torch.rand(50, 6)
    bad_TE = scores_TE.clone()
    bad_TE[7, 2] = torch.nan
    rest = torch.arange(50) != 7
    assert torch.equal(choose_by_batch(bad_TE, 2, rule)[rest], choose_by_batch(scores_TE[rest], 2, rule))


@pytest.mark.parametrize("mode", ["drop", "reassign", "dual"])
def test_infinite_logits_shift_no_threshold_and_are_counted(mode: str) -> None:
    """Their scores are 0 and 1, so that only the logits show it."""
    rule, logits_TE = Stateless(mode=mode), torch.randn(50, 6)  # type: ignore[arg-type]
    bad_TE = logits_TE.clone()
    bad_TE[7, :4], bad_TE[9, 1], bad_TE[11, 2] = -torch.inf, torch.inf, torch.nan
    rest = torch.tensor([row not in (7, 9, 11) for row in range(50)])
    dirty, clean = RouterStats.allocate(1, 6), RouterStats.allocate(1, 6)
    found = route_stateless(bad_TE, torch.zeros(6), 2, rule, stats=dirty.layer(0))
    expected = route_stateless(logits_TE, torch.zeros(6), 2, rule, stats=clean.layer(0), mask_T=rest)
    assert torch.equal(found.ids_TK[rest], expected.ids_TK[rest])
    assert torch.equal(found.weights_TK[rest], expected.weights_TK[rest])
    assert dirty.counters_LF[0, :3].tolist() == [50, 47, 3] and torch.equal(dirty.histograms_LEB, clean.histograms_LEB)
    if mode != "dual":
        assert found.ids_TK[~rest].tolist() == [[-1, -1]] * 3


@pytest.mark.parametrize("mode", ["drop", "reassign", "dual"])
def test_padding_changes_nothing(mode: str) -> None:
    rule = Stateless(mode=mode)  # type: ignore[arg-type]
    scores_TE = torch.rand(60, 8)
    mask_T = torch.rand(60) < 0.5
    padded_TE = torch.where(mask_T[:, None], scores_TE, torch.tensor(0.99))
    ids_TK = choose_by_batch(padded_TE, 2, rule, mask_T)
    assert torch.equal(ids_TK[mask_T], choose_by_batch(scores_TE[mask_T], 2, rule))
    assert ids_TK[~mask_T].unique().tolist() == [-1]


def test_weights_are_normalised_over_filled_slots_and_carry_the_gradient() -> None:
    logits_TE = (torch.randn(40, 6, dtype=torch.float64) + 2 * torch.randn(6)).requires_grad_()
    routing = route_stateless(logits_TE, torch.zeros(6), 2, Stateless(mode="drop"), scale=2.0)
    empty_TK = routing.ids_TK < 0
    assert empty_TK.any() and not routing.weights_TK[empty_TK].any()
    sums_T, served_T = routing.weights_TK.sum(1), ~empty_TK.all(1)
    torch.testing.assert_close(sums_T[served_T], torch.full_like(sums_T[served_T], 2.0))
    assert not sums_T[~served_T].any()
    for t, (row, weights) in enumerate(zip(routing.ids_TK.tolist(), routing.weights_TK.tolist(), strict=True)):
        scores = [float(torch.sigmoid(logits_TE.detach()[t, e])) for e in row if e >= 0]
        assert [w for e, w in zip(row, weights, strict=True) if e >= 0] == pytest.approx(
            [2 * s / sum(scores) for s in scores]
        )
    (routing.weights_TK[:, 0]).sum().backward()
    assert logits_TE.grad.isfinite().all() and logits_TE.grad.any()


@pytest.mark.parametrize("mode", ["drop", "reassign", "dual"])
def test_running_thresholds_make_a_token_independent_of_its_batch(mode: str) -> None:
    logits_TE = torch.randn(30, 8) + torch.randn(8)
    bias_E = 0.2 * torch.randn(8)
    rule = Stateless(mode=mode, threshold_source="running")  # type: ignore[arg-type]
    whole = route_stateless(logits_TE, bias_E, 2, rule)
    alone = [route_stateless(row[None], bias_E, 2, rule) for row in logits_TE]
    assert torch.equal(whole.ids_TK, torch.cat([one.ids_TK for one in alone]))
    assert torch.equal(whole.weights_TK, torch.cat([one.weights_TK for one in alone]))
    others_TE = torch.cat((logits_TE[:15], 5 + torch.randn(200, 8)))
    assert torch.equal(route_stateless(others_TE, bias_E, 2, rule).ids_TK[:15], whole.ids_TK[:15])
    by_batch = Stateless(mode=mode)  # type: ignore[arg-type]
    first, second = (route_stateless(x, bias_E, 2, by_batch).ids_TK[:15] for x in (logits_TE, others_TE))
    assert not torch.equal(first, second), "which is what the warning says of the batch's own thresholds"


def test_statistics_are_those_of_the_running_bias() -> None:
    logits_TE, mask_T = torch.randn(300, 8) + torch.randn(8), torch.rand(300) < 0.8
    plain, batch = RouterStats.allocate(1, 8), RouterStats.allocate(1, 8)
    route(logits_TE, plain.bias_LE[0], 2, stats=plain.layer(0), mask_T=mask_T)
    routing = route_stateless(
        logits_TE, batch.bias_LE[0], 2, Stateless(mode="drop"), stats=batch.layer(0), mask_T=mask_T
    )
    assert torch.equal(batch.histograms_LEB, plain.histograms_LEB) and torch.equal(batch.tokens_L, plain.tokens_L)
    assert batch.loads_LE[0].tolist() == loads(routing.ids_TK, 8)
    assert int(batch.loads_LE.sum()) < 2 * int(mask_T.sum()), "what was dropped is no load"


def test_causality_warning_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="trine"):
        route_stateless(torch.randn(4, 4), torch.zeros(4), 2, Stateless(threshold_source="running"))
        assert not caplog.records
        for _ in range(3):
            route_stateless(torch.randn(4, 4), torch.zeros(4), 2, Stateless())
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "later ones included" in caplog.text


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"mode": "swap"}, "mode: found 'swap', need one of drop, reassign, dual"),
        ({"quantile": "p2"}, "quantile: found 'p2', need one of exact, histogram, sketch"),
        ({"threshold_source": "both"}, "threshold_source: found 'both', need one of batch, running"),
        ({"capacity": 0.0}, "capacity, rounds: found 0.0, 3, need a finite capacity above 0, rounds >= 1"),
        ({"rounds": 0}, "capacity, rounds: found 1.0, 0, need a finite capacity above 0, rounds >= 1"),
    ],
)
def test_bad_dials(dials: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Stateless(**dials)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="method: found 'p2', need 'exact', 'histogram' or 'sketch'"):
        upper_threshold(torch.rand(3, 2), torch.ones(3, 2, dtype=torch.bool), torch.tensor(1.0), "p2")
    with pytest.raises(ValueError, match=r"bias_E: found shape \(3,\), need \[4\], one value an expert"):
        route_stateless(torch.rand(5, 4), torch.zeros(3), 2, Stateless())
