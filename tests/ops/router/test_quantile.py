"""Quantile Balancing's solvers: exact, histogram, and the alternating oracle."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from trine.ops.router import RouterStats, balanced_assignment, route, solve_bias
from trine.ops.router.quantile import exact_quantile, histogram_edges, quantile_from_histogram
from trine.ops.router.reference import solve_bias_reference

METHODS = ["exact", "histogram", "signed_log"]


def loads(scores_TE: Tensor, bias_E: Tensor, k: int) -> Tensor:
    return torch.bincount(route(torch.logit(scores_TE), bias_E, k).ids_TK.reshape(-1), minlength=scores_TE.shape[1])


def max_vio(scores_TE: Tensor, bias_E: Tensor, k: int) -> float:
    load_E = loads(scores_TE, bias_E, k).double()
    return float(load_E.max() / load_E.mean() - 1)


@pytest.mark.parametrize("tokens", [1, 2, 8, 10, 37, 64])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (8, 7), (5, 3), (32, 2)])
def test_exact_equals_the_definition(tokens: int, experts: int, k: int) -> None:
    """Fractional q and fewer tokens than experts included: NVIDIA/Megatron-LM#5349 asserts that m k / E is whole."""
    scores_TE, bias_E = torch.rand(tokens, experts, dtype=torch.float64), torch.randn(experts).double() * 0.1
    solved_E = solve_bias(scores_TE, bias_E, k)
    torch.testing.assert_close(solved_E, solve_bias_reference(scores_TE, bias_E, k), rtol=1e-10, atol=1e-10)
    assert abs(float(solved_E.mean())) < 1e-12
    single_E = solve_bias(scores_TE.float(), bias_E.float(), k)
    torch.testing.assert_close(single_E.double(), solved_E, rtol=1e-5, atol=1e-5)
    assert single_E.dtype == torch.float32


def test_interpolated_quantile_is_continuous_in_q() -> None:
    required_TE = torch.arange(10.0, dtype=torch.float64)[:, None].expand(10, 8).contiguous()
    values = [float(exact_quantile(required_TE, k)[0]) for k in range(1, 8)]  # q = 1.25, 2.5, ... 8.75
    assert values == pytest.approx([1.25, 2.5, 3.75, 5.0, 6.25, 7.5, 8.75])


@pytest.mark.parametrize("method", METHODS)
def test_ten_tokens_eight_experts(method: str) -> None:
    """NVIDIA/Megatron-LM#5349: m = 10, k = 2, E = 8 hit an assertion."""
    solved_E = solve_bias(torch.rand(10, 8), torch.zeros(8), 2, method)
    assert bool(solved_E.isfinite().all()) and abs(float(solved_E.double().mean())) < 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_fewer_tokens_than_experts(method: str, tokens: int) -> None:
    scores_TE = torch.sigmoid(torch.randn(tokens, 256) + torch.randn(256))
    solved_E = solve_bias(scores_TE, torch.zeros(256), 2, method)
    assert bool(solved_E.isfinite().all()) and float(solved_E.abs().max()) < 1
    used = int((loads(scores_TE, solved_E, 2) > 0).sum())
    assert used >= int((loads(scores_TE, torch.zeros(256), 2) > 0).sum())


@pytest.mark.parametrize("method", METHODS)
def test_toy_of_the_report(method: str) -> None:
    """8 tokens, 4 experts, k = 1: loads (4, 3, 1, 0) become (2, 2, 2, 2) in one update (K3 report, figure 5)."""
    scores_TE = torch.tensor(
        [
            *([0.66, 0.71, 0.33, 0.38], [0.88, 0.73, 0.33, 0.22], [0.68, 0.61, 0.21, 0.55], [0.79, 0.58, 0.69, 0.50]),
            *([0.43, 0.27, 0.48, 0.14], [0.54, 0.59, 0.29, 0.01], [0.79, 0.49, 0.26, 0.11], [0.53, 0.65, 0.57, 0.60]),
        ],
        dtype=torch.float64,
    )
    start_E = torch.zeros(4, dtype=torch.float64)
    assert loads(scores_TE, start_E, 1).tolist() == [4, 3, 1, 0]
    assert loads(scores_TE, solve_bias(scores_TE, start_E, 1, method), 1).tolist() == [2, 2, 2, 2]


def b019_scores() -> Tensor:
    i, j = torch.arange(4096.0, dtype=torch.float64)[:, None], torch.arange(8.0, dtype=torch.float64)
    return torch.sigmoid(torch.sin(0.7 * i + 1.3 * j) + torch.cos(0.11 * i * (j + 1)) + 0.5 * j - 1.75)


@pytest.mark.parametrize("method", METHODS)
def test_b019_quantile_sign_and_centring(method: str) -> None:
    scores_TE, bias_E = b019_scores(), torch.zeros(8)
    assert loads(scores_TE, bias_E, 2).tolist() == [0, 0, 99, 429, 924, 1361, 2410, 2969]
    ratio = []
    for step in range(4):
        bias_E = solve_bias(scores_TE, bias_E, 2, method)
        if step == 0:
            expected = [0.3394, 0.2484, 0.1026, -0.0424, -0.0444, -0.1042, -0.2210, -0.2785]
            # the first change is the longest, and a signed-log bin is a quarter of its distance
            assert bias_E.tolist() == pytest.approx(expected, abs=0.02 if method == "signed_log" else 0.002)
        assert abs(float(bias_E.double().mean())) < 1e-7
        ratio.append(1 + max_vio(scores_TE, bias_E, 2))
    assert ratio[0] == pytest.approx(1.36, abs=0.05 if method == "signed_log" else 0.01)
    assert ratio[3] == pytest.approx(1.04, abs=0.02)


@pytest.mark.parametrize(("estimator", "method"), [("report", "histogram"), ("signed_log", "signed_log")])
def test_b019_micro_batches_give_the_bias_of_the_whole_batch(estimator: str, method: str) -> None:
    logits_TE = torch.logit(b019_scores()).float()
    whole, parts = (RouterStats.allocate(1, 8, estimator=estimator) for _ in range(2))
    route(logits_TE, whole.bias_LE[0], 2, stats=whole.layer(0))
    for part_TE in logits_TE.split(512):
        route(part_TE, parts.bias_LE[0], 2, stats=parts.layer(0))
    assert torch.equal(whole.counts, parts.counts)
    assert torch.equal(whole.solve_(2).bias_LE, parts.solve_(2).bias_LE)
    expected_E = solve_bias(torch.sigmoid(logits_TE), torch.zeros(8), 2, method)
    torch.testing.assert_close(whole.bias_LE[0], expected_E, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_k_equal_to_e_needs_no_bias(method: str) -> None:
    assert solve_bias(torch.rand(6, 4), torch.randn(4), 4, method).tolist() == [0.0] * 4


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_do_not_count(method: str) -> None:
    """A NaN row must not drag a quantile, and padding (NVIDIA/Megatron-LM#5349) must not shift it."""
    scores_TE, bias_E = torch.rand(40, 8), torch.randn(8) * 0.1
    clean_E = solve_bias(scores_TE, bias_E, 2, method)
    dirty_TE = torch.cat((scores_TE, torch.full((1, 8), torch.nan), torch.full((3, 8), 0.9)))
    dirty_TE[40, 3:] = 0.5
    mask_T = torch.arange(44) < 41
    assert torch.equal(solve_bias(dirty_TE, bias_E, 2, method, mask_T=mask_T), clean_E)
    none_E = solve_bias(dirty_TE, bias_E, 2, method, mask_T=torch.zeros(44, dtype=torch.bool))
    assert torch.equal(none_E, bias_E) and none_E is not bias_E
    assert torch.equal(solve_bias(scores_TE[:0], bias_E, 2, method), bias_E)


@pytest.mark.parametrize("method", METHODS)
def test_equal_scores_give_a_zero_bias(method: str) -> None:
    assert solve_bias(torch.full((50, 8), 0.5), torch.zeros(8), 2, method).abs().max() < 1e-7


@pytest.mark.parametrize("bins", [100, 1000])
def test_histogram_is_within_a_bin_of_exact(bins: int) -> None:
    scores_TE, bias_E = torch.sigmoid(torch.randn(20_000, 16) + torch.randn(16)), torch.randn(16) * 0.1
    width = float(histogram_edges(bias_E, bins)[1])
    exact_E, histogram_E = (solve_bias(scores_TE, bias_E, 2, method, bins) for method in METHODS[:2])
    assert float((exact_E - histogram_E).abs().max()) <= width


def test_quantile_inside_a_bin_by_hand() -> None:
    """m = 6, E = 2, k = 1: q = 3. First expert: 2 below, 4 in bin 5: a quarter of it. Second: bin 2 holds the third."""
    counts_EB = torch.zeros(2, 10, dtype=torch.int32)
    counts_EB[0, 0], counts_EB[0, 5] = 2, 4
    counts_EB[1, 1], counts_EB[1, 2], counts_EB[1, 9] = 1, 2, 3
    required_E, tokens = quantile_from_histogram(counts_EB, torch.tensor([-1.0, 0.5]), 1)
    assert required_E.tolist() == [-1 + 5.25 * 0.5, -1 + 3.0 * 0.5] and int(tokens) == 6


def test_range_covers_every_required_bias() -> None:
    bias_E = torch.tensor([-0.7, 0.0, 2.0])
    low, width = histogram_edges(bias_E, 1000).tolist()
    assert low == pytest.approx(-1.7) and low + 1000 * width == pytest.approx(3.0)
    scores_TE = torch.rand(1000, 3).round()  # 0 and 1: the extremes
    cutoff_T = (scores_TE + bias_E).topk(2, 1).values[:, 1]
    required_TE = cutoff_T[:, None] - scores_TE
    assert float(required_TE.min()) >= low - 1e-6 and float(required_TE.max()) <= low + 1000 * width + 1e-6


def test_toy_with_a_hundred_experts_converges_at_once() -> None:
    """4096 tokens, 112 experts, top 2 (73.14 tokens each): one update ends the collapse, a dozen exact ones reach what
    whole tokens allow, and the histogram stops where one bin holds several tokens an expert."""
    generator = torch.Generator().manual_seed(5)
    scores_TE = torch.sigmoid(torch.randn(4096, 112, generator=generator) + torch.randn(112, generator=generator))
    before = loads(scores_TE, torch.zeros(112), 2)
    assert max_vio(scores_TE, torch.zeros(112), 2) > 20 and int((before == 0).sum()) > 20
    for method, least, most in (("exact", 0.0, 0.05), ("histogram", 0.1, 0.3)):
        bias_E, path = torch.zeros(112), []
        for _ in range(12):
            bias_E = solve_bias(scores_TE, bias_E, 2, method)
            load_E = loads(scores_TE, bias_E, 2)
            path.append(float(load_E.max() / (4096 * 2 / 112) - 1))
            assert int(load_E.min()) > 0
        assert path[0] < 1.1 and path[2] < 0.4 and least < path[-1] < most, (method, path)


def test_fresh_tokens_each_step_stay_near_the_sampling_floor() -> None:
    offset_E, bias_E, path = torch.randn(64), torch.zeros(64), []
    for _ in range(8):
        scores_TE = torch.sigmoid(torch.randn(4096, 64) + offset_E)
        path.append(max_vio(scores_TE, bias_E, 4))
        bias_E = solve_bias(scores_TE, bias_E, 4, "histogram")
    floor = (2 * np.log(64) / 256) ** 0.5
    assert path[0] > 2 and max(path[2:]) < 3 * floor, path


# -- the oracle --------------------------------------------------------------------------------------------------------


def linear_program(scores_TE: Tensor, k: int) -> float:
    tokens, experts = scores_TE.shape
    rows = np.kron(np.eye(tokens), np.ones((1, experts)))
    columns = np.kron(np.ones((1, tokens)), np.eye(experts))
    bounds = np.concatenate((np.full(tokens, k), np.full(experts, tokens * k / experts)))
    answer = linprog(-scores_TE.numpy().ravel(), A_eq=np.vstack((rows, columns)), b_eq=bounds, bounds=(0, 1))
    assert answer.status == 0
    return float(-answer.fun)


@pytest.mark.parametrize("domain", ["sigmoid", "logit"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(2))
def test_training_updates_come_near_the_optimum_of_the_linear_program(seed: int, method: str, domain: str) -> None:
    """Every estimator, iterated on one batch of 64 x 8, k 2: no top-k choice with these loads can score better, and the
    sum of scores is within 1 % of the optimum with equal loads, which a few tokens too many cannot reach exactly."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(64, 8, generator=generator).double() + torch.randn(8, generator=generator)
    values_TE = torch.sigmoid(logits_TE) if domain == "sigmoid" else logits_TE
    optimum, bias_E, gaps = linear_program(values_TE, 2), torch.zeros(8).double(), []
    for _ in range(20):
        bias_E = solve_bias(values_TE, bias_E, 2, method, score_domain=domain)
        ids_TK = (values_TE + bias_E).topk(2, 1).indices
        load_E = torch.bincount(ids_TK.reshape(-1), minlength=8).double()
        # the dual bound: score + bias of the choice, less what equal loads would have paid for the bias
        bound = float((values_TE + bias_E).gather(1, ids_TK).sum() - 16 * bias_E.sum())
        assert bound >= optimum - 1e-9, "weak duality: the bias is that of a dual point"
        gaps.append((bound - optimum) / abs(optimum))
    assert min(gaps) < 0.01, gaps
    assert float(load_E.max()) <= 22 and float(load_E.min()) >= 10, load_E


@pytest.mark.parametrize("seed", range(3))
def test_oracle_reaches_the_optimum_of_the_linear_program(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.sigmoid(torch.randn(64, 8, generator=generator).double() + torch.randn(8, generator=generator))
    ids_TK, bias_E = balanced_assignment(scores_TE, 2)
    assert torch.bincount(ids_TK.reshape(-1), minlength=8).tolist() == [16] * 8
    assert float(scores_TE.gather(1, ids_TK).sum()) == pytest.approx(linear_program(scores_TE, 2), rel=1e-9)
    assert torch.equal(ids_TK, route(torch.logit(scores_TE), bias_E, 2).ids_TK) and abs(float(bias_E.mean())) < 1e-12


def test_oracle_with_a_fractional_share_is_within_one_percent() -> None:
    scores_TE = torch.sigmoid(torch.randn(65, 8).double() + torch.randn(8))  # q = 16.25
    ids_TK, _ = balanced_assignment(scores_TE, 2)
    load_E = torch.bincount(ids_TK.reshape(-1), minlength=8)
    assert int(load_E.min()) >= 15 and int(load_E.max()) <= 18
    assert float(scores_TE.gather(1, ids_TK).sum()) == pytest.approx(linear_program(scores_TE, 2), rel=0.01)


def test_one_exact_update_lowers_the_dual_objective() -> None:
    scores_TE, bias_E, objective = torch.rand(64, 8, dtype=torch.float64) ** 3, torch.zeros(8).double(), []
    for _ in range(6):
        cutoff_T = (scores_TE + bias_E).topk(3, 1).values[:, 2]
        slack = (scores_TE - cutoff_T[:, None] + bias_E).clamp(min=0).sum()
        objective.append(float(slack + 2 * cutoff_T.sum() - 16 * bias_E.sum()))
        bias_E = solve_bias(scores_TE, bias_E, 2)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(objective)), objective
    assert objective[-1] < objective[0] - 0.1


def test_oracle_degenerate_sizes() -> None:
    scores_TE = torch.rand(5, 3)
    assert torch.equal(balanced_assignment(scores_TE, 3)[0].sort(1).values, torch.arange(3).expand(5, 3))
    assert balanced_assignment(scores_TE[:1], 1)[0].tolist() == [[int(scores_TE[0].argmax())]]
    with pytest.raises(ValueError, match="found no token or a non-finite score"):
        balanced_assignment(scores_TE[:0], 1)
    with pytest.raises(ValueError, match="found no token or a non-finite score"):
        balanced_assignment(scores_TE / 0, 1)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS[1:])
def test_logits_in_a_sigmoid_range_are_refused(method: str) -> None:
    """marin-community/marin#7891: logits counted in the range of sigmoid scores were cut off."""
    logits_TE = torch.tensor([[2.5, -1.0, 0.0], [0.0, 1.0, 0.5]])
    with pytest.raises(ValueError) as error:
        solve_bias(logits_TE, torch.zeros(3), 1, method)
    assert str(error.value) == (
        f"scores_TE: found values in [-1, 2.5], need [0, 1] for method {method!r}: its range is exact only for sigmoid "
        "or softmax scores"
    )
    assert bool(solve_bias(logits_TE, torch.zeros(3), 1, "exact").isfinite().all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 9}, "k: found 9, need 1 <= k <= 8, the number of experts"),
        ({"method": "median"}, "method: found 'median', need 'exact', 'histogram' or 'signed_log'"),
        ({"bins": 0}, "bins: found 0, need at least 1"),
        ({"score_domain": "tanh"}, "score_domain: found 'tanh', need one of ['sigmoid', 'logit']"),
        ({"bias_E": torch.zeros(3)}, "bias_E: found shape (3,), need [8], one value an expert"),
        ({"bias_E": torch.full((8,), torch.nan)}, "bias_E: found a non-finite value, need finite biases"),
        (
            {"scores_TE": torch.zeros(8)},
            "scores_TE: found shape (8,) of torch.float32, need a floating-point [T, E]",
        ),
        (
            {"mask_T": torch.ones(4)},
            "mask_T: found shape (4,) of torch.float32, need [4] bool, true for real tokens",
        ),
    ],
)
def test_bad_input(changes: dict, message: str) -> None:
    arguments = {"scores_TE": torch.rand(4, 8), "bias_E": torch.zeros(8), "k": 2, **changes}
    with pytest.raises(ValueError) as error:
        solve_bias(**arguments)
    assert str(error.value) == message
