"""Updates within a batch: required biases counted against refined cutoffs (`refined_cutoffs`)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trine.ops.router import RouterStats, route, solve_bias

EXPERTS, K, TOKENS = 24, 3, 1500
KINDS = [(estimator, domain) for estimator in ("report", "signed_log") for domain in ("sigmoid", "logit")]
every_kind = pytest.mark.parametrize(("estimator", "domain"), KINDS)
METHODS = {"report": "histogram", "signed_log": "signed_log"}


def skewed(tokens: int = TOKENS, spread: float = 3.0) -> Tensor:
    return torch.randn(tokens, EXPERTS) + spread * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(7))


def values_of(logits_TE: Tensor, domain: str) -> Tensor:
    return torch.sigmoid(logits_TE) if domain == "sigmoid" else logits_TE


def counted(estimator: str, domain: str, rounds: int, logits_TE: Tensor, mask_T: Tensor | None = None) -> RouterStats:
    stats = RouterStats.allocate(1, EXPERTS, estimator=estimator, score_domain=domain, batch_rounds=rounds)
    layer = stats.layer(0)
    route(logits_TE, layer.bias_E, K, stats=layer, mask_T=mask_T, score_domain=domain)
    return stats


def violation(logits_TE: Tensor, bias_E: Tensor, domain: str) -> float:
    ids_TK = route(logits_TE, bias_E, K, score_domain=domain).ids_TK
    loads_E = torch.bincount(ids_TK.reshape(-1), minlength=EXPERTS).double()
    return float(loads_E.max() / loads_E.mean() - 1.0)


def test_exact_rounds_are_single_updates_in_turn() -> None:
    scores_TE = torch.sigmoid(skewed())
    for mask_T in (None, torch.rand(TOKENS) < 0.7):
        bias_E = torch.linspace(-0.2, 0.2, EXPERTS, dtype=torch.float64)
        for rounds in (1, 2, 5):
            once_E = bias_E
            for _ in range(rounds):
                once_E = solve_bias(scores_TE, once_E, K, mask_T=mask_T)
            assert torch.equal(solve_bias(scores_TE, bias_E, K, mask_T=mask_T, rounds=rounds), once_E)


@every_kind
def test_histograms_follow_exact_rounds_within_their_bins(estimator: str, domain: str) -> None:
    """After two updates the threshold that the second is solved from is off by a bin of the first at most."""
    values_TE, bias_E = values_of(skewed(20000, 1.0), domain), torch.zeros(EXPERTS)
    exact_E = solve_bias(values_TE, bias_E, K, rounds=2, score_domain=domain)
    change_E = solve_bias(values_TE, bias_E, K, score_domain=domain)
    bins = 2048 if estimator == "report" else 1 << 15  # gaps between order statistics are less than a bin
    found_E = solve_bias(values_TE, bias_E, K, METHODS[estimator], bins=bins, rounds=2, score_domain=domain)
    width = 2.0 if domain == "sigmoid" else 40.0
    bin_width = width / bins if estimator == "report" else 64 / bins * 1.5 * float(change_E.abs().max())
    assert float((found_E - exact_E).abs().max()) <= 4 * bin_width
    assert float((change_E - exact_E).abs().max()) > 6 * bin_width, "or the second round would not show"


@every_kind
@pytest.mark.parametrize("rounds", [1, 4])
def test_statistics_of_one_batch_solve_what_solve_bias_does(estimator: str, domain: str, rounds: int) -> None:
    logits_TE = skewed()
    stats = counted(estimator, domain, rounds, logits_TE).solve_(K)
    found_E = solve_bias(
        values_of(logits_TE, domain),
        torch.zeros(EXPERTS),
        K,
        METHODS[estimator],
        rounds=rounds,
        score_domain=domain,
    )
    assert torch.equal(stats.bias_LE[0], found_E)


@every_kind
def test_rounds_come_nearer_to_even_loads(estimator: str, domain: str) -> None:
    """After two windows of fresh tokens; the bins of the first are coarse where the bias has far to go."""
    found = {}
    for rounds in (1, 6):
        stats = RouterStats.allocate(1, EXPERTS, estimator=estimator, score_domain=domain, batch_rounds=rounds)
        torch.manual_seed(3)
        for _ in range(2):
            route(skewed(6000), stats.bias_LE[0], K, stats=stats.layer(0), score_domain=domain)
            stats.solve_(K).zero_()
        found[rounds] = violation(skewed(6000), stats.bias_LE[0], domain)
    assert found[6] < 0.7 * found[1], found


@every_kind
def test_rows_that_do_not_count_do_not_refine(estimator: str, domain: str) -> None:
    """Padding, NaN and infinite logits: the histogram is that of the other rows alone."""
    logits_TE, mask_T = skewed(400), torch.rand(400) < 0.6
    alone = counted(estimator, domain, 4, logits_TE[mask_T])
    rubbish_TE = torch.where(mask_T[:, None], logits_TE, 50.0 * torch.randn(400, EXPERTS))
    assert torch.equal(counted(estimator, domain, 4, rubbish_TE, mask_T).histograms_LEB, alone.histograms_LEB)
    for bad in (float("nan"), float("inf")):
        broken_TE = torch.where(mask_T[:, None], logits_TE, bad)
        found = counted(estimator, domain, 4, broken_TE)
        assert torch.equal(found.histograms_LEB, alone.histograms_LEB)
        assert found.dropped_L.item() == int((~mask_T).sum())


@every_kind
def test_nothing_to_count_stays_nothing(estimator: str, domain: str) -> None:
    empty, masked = skewed(0), skewed(40)
    for found in (
        counted(estimator, domain, 4, empty),
        counted(estimator, domain, 4, masked, torch.zeros(40, dtype=torch.bool)),
    ):
        assert not found.histograms_LEB.any() and not found.loads_LE.any()
        assert not found.solve_(K).bias_LE.any()
    stats = RouterStats.allocate(1, EXPERTS, estimator=estimator, score_domain=domain, batch_rounds=4)
    route(masked, stats.bias_LE[0], EXPERTS, stats=stats.layer(0), score_domain=domain)
    assert not stats.histograms_LEB.any() and stats.loads_LE.eq(40).all()
    chosen_TK = torch.randint(EXPERTS // K, (40, 1)) * K + torch.arange(K)
    route(masked, stats.bias_LE[0], K, stats=stats.layer(0), ids_TK=chosen_TK, score_domain=domain)
    assert not stats.histograms_LEB.any(), "replayed choices teach no bias"


@every_kind
def test_paths_with_and_without_reading_values_count_the_same(
    estimator: str, domain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card reads nothing back; its way is taken here on the CPU."""
    logits_TE, mask_T = skewed(300), torch.rand(300) < 0.8
    usual = counted(estimator, domain, 3, logits_TE, mask_T)
    for module in ("quantile", "stats"):
        monkeypatch.setattr(f"trine.ops.router.{module}.may_read", lambda _: False)
    unread = counted(estimator, domain, 3, logits_TE, mask_T)
    assert torch.equal(unread.counts, usual.counts) and torch.equal(unread.edges_L2, usual.edges_L2)


def test_micro_batches_refine_alone_and_sum_as_integers() -> None:
    """Each by its own tokens: order does not matter, one batch of all is near and not the same."""
    parts = [skewed(700), skewed(800)]
    both = [RouterStats.allocate(1, EXPERTS, estimator="signed_log", batch_rounds=4) for _ in range(2)]
    for stats, order in zip(both, (parts, parts[::-1]), strict=True):
        for logits_TE in order:
            route(logits_TE, stats.bias_LE[0], K, stats=stats.layer(0))
    assert torch.equal(both[0].counts, both[1].counts)
    joined = counted("signed_log", "sigmoid", 4, torch.cat(parts))
    assert torch.equal(both[0].loads_LE, joined.loads_LE) and not torch.equal(both[0].counts, joined.counts)
    fresh = skewed(4000)
    ours, whole = (violation(fresh, x.solve_(K).bias_LE[0], "sigmoid") for x in (both[0], joined))
    assert abs(ours - whole) < 0.3 < 3.0 < violation(fresh, torch.zeros(EXPERTS), "sigmoid")


@every_kind
@pytest.mark.parametrize("level", [0.5, 3.0, 40.0])
def test_a_constant_in_the_bias_changes_nothing(estimator: str, domain: str, level: float) -> None:
    """A bias from elsewhere need not have mean 0."""
    logits_TE, found = skewed(4000, 1.0), []
    for added in (0.0, level):
        stats = RouterStats.allocate(1, EXPERTS, estimator=estimator, score_domain=domain, batch_rounds=4)
        stats.set_bias_(torch.linspace(-0.1, 0.1, EXPERTS)[None] + added)
        route(logits_TE, stats.bias_LE[0], K, stats=stats.layer(0), score_domain=domain)
        found.append(stats.solve_(K).bias_LE[0].clone())
    width = 2.2 / 1000 if domain == "sigmoid" else 33 / 1000
    if estimator == "signed_log":
        width = float(found[0].abs().max()) / 4
    assert float((found[1] - found[0]).abs().max()) <= width
    assert float(found[1].max() - found[1].min()) > 0.3


def test_replicas_and_moved_statistics_keep_the_rounds() -> None:
    stats = RouterStats.allocate(1, EXPERTS, device="meta", batch_rounds=3)
    assert stats.to("cpu").replica().batch_rounds == stats.batch_rounds == 3


def test_rounds_below_one_are_refused() -> None:
    for bad in (0, -1, 2.5, "4"):
        message = f"rounds: found {bad!r}, need a whole number of at least 1"
        with pytest.raises(ValueError, match=message):
            RouterStats.allocate(1, EXPERTS, batch_rounds=bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            solve_bias(torch.rand(4, EXPERTS), torch.zeros(EXPERTS), K, rounds=bad)  # type: ignore[arg-type]
