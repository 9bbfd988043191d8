"""Selection, weights and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trine.config import from_dict, preset, to_dict
from trine.ops.router import RouterStats, route
from trine.ops.router.reference import route_reference
from trine.ops.router.select import top_ids


def zeros(experts: int) -> Tensor:
    return torch.zeros(experts)


def load(ids_TK: Tensor, experts: int) -> list[int]:
    return torch.bincount(ids_TK.reshape(-1), minlength=experts).tolist()


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(0, 8, 2), (1, 8, 1), (33, 8, 2), (17, 56, 2), (9, 200, 16), (6, 5, 5)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equals_the_definition(tokens: int, experts: int, k: int, dtype: torch.dtype, tolerance: float) -> None:
    # values on a grid of 2^-4 keep the order of sums the same in both precisions, and make ties
    exact_TE = (torch.randn(tokens, experts, dtype=torch.float64) * 16).round() / 16
    bias_E = (torch.randn(experts) * 8).round() / 64
    upstream_TK = torch.randn(tokens, k, dtype=torch.float64)

    reference_TE = exact_TE.clone().requires_grad_()
    ids_TK, weights_TK, cutoff_T = route_reference(reference_TE, bias_E.double(), k, scale=1.5)
    (weights_TK * upstream_TK).sum().backward()

    logits_TE = exact_TE.to(dtype).requires_grad_()
    found = route(logits_TE, bias_E, k, scale=1.5)
    (found.weights_TK * upstream_TK.to(dtype)).sum().backward()

    assert torch.equal(found.ids_TK, ids_TK) and found.ids_TK.dtype == torch.int64
    assert found.weights_TK.dtype == dtype and found.cutoff_T.dtype == dtype
    torch.testing.assert_close(found.weights_TK.double(), weights_TK, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.cutoff_T.double(), cutoff_T, rtol=tolerance, atol=tolerance)
    assert logits_TE.grad is not None and reference_TE.grad is not None
    torch.testing.assert_close(logits_TE.grad.double(), reference_TE.grad, rtol=tolerance, atol=tolerance)
    chosen_TE = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, found.ids_TK, True)
    assert not logits_TE.grad[~chosen_TE].any(), "only chosen scores carry a gradient"


@pytest.mark.parametrize("experts", [8, 56, 256, 896])
@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_go_to_the_lowest_ids(experts: int, k: int, dtype: torch.dtype) -> None:
    found = route(torch.zeros(5, experts, dtype=dtype), zeros(experts), k)
    assert torch.equal(found.ids_TK, torch.arange(k).expand(5, k))
    assert torch.equal(found.weights_TK, torch.full((5, k), 1 / k, dtype=dtype))
    assert torch.equal(found.cutoff_T, torch.full((5,), 0.5, dtype=dtype))


@pytest.mark.parametrize("k", [2, 6])
def test_ties_inside_and_at_the_cutoff(k: int) -> None:
    logits_TE = torch.full((1, 12), -1.0)
    logits_TE[0, 9] = logits_TE[0, 4] = 2.0
    assert route(logits_TE, zeros(12), k).ids_TK.tolist() == [[4, 9, 0, 1, 2, 3][:k]]


@pytest.mark.parametrize("k", [2, 6])
def test_negative_zero_ties_with_zero_and_saturated_scores_tie(k: int) -> None:
    bias_E = torch.tensor([0.0, -0.0] * 4)
    empty_TE = torch.full((1, 8), -torch.inf)  # score exactly 0
    assert route(empty_TE, bias_E, k).ids_TK.tolist() == [list(range(k))]
    saturated_TE = torch.linspace(40, 60, 8)[None]  # rising logits, score exactly 1
    assert route(saturated_TE, bias_E, k).ids_TK.tolist() == [list(range(k))]


@pytest.mark.parametrize("n", [3, 9])
def test_rows_with_nan_still_give_different_ids(n: int) -> None:
    values_TE = torch.rand(4, 12)
    values_TE[1, 5] = values_TE[1, 7] = torch.nan
    values_TE[2] = torch.nan
    ids_TN = top_ids(values_TE, n)
    assert all(len(set(row)) == n and min(row) >= 0 and max(row) < 12 for row in ids_TN.tolist())
    assert ids_TN[1, :2].tolist() == [5, 7]
    assert torch.equal(ids_TN, top_ids(values_TE, n))


@pytest.mark.parametrize("n", [3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_minus_infinity_still_give_different_ids(n: int, dtype: torch.dtype) -> None:
    values_TE = torch.full((2, 12), -torch.inf, dtype=dtype)
    values_TE[0, 7] = 0.5
    assert top_ids(values_TE, n).tolist() == [([7, 0, 1, 2, 3, 4, 5, 6, 8])[:n], list(range(n))]


@pytest.mark.parametrize(("experts", "k"), [(4, 2), (128, 8)])
def test_b017_biased_scores_choose_and_raw_scores_weigh(experts: int, k: int) -> None:
    if experts == 4:
        found = route(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0]), 2)
        assert found.ids_TK.tolist() == [[3, 0]]
        assert found.weights_TK[0].tolist() == pytest.approx([0.233915, 0.766085], abs=1e-6)
        return
    logits_TE, bias_E = torch.randn(300, experts), torch.randn(experts) * 0.3
    found = route(logits_TE, bias_E, k)
    scores_TE = torch.sigmoid(logits_TE)
    plain_TK = torch.topk(scores_TE + bias_E, k, dim=1).indices
    assert torch.equal(found.ids_TK, plain_TK)
    raw_TK = scores_TE.gather(1, plain_TK)
    torch.testing.assert_close(found.weights_TK, raw_TK / raw_TK.sum(1, keepdim=True))


def test_bias_is_added_in_training_and_inference_alike() -> None:
    """NVIDIA/Megatron-LM#6802: trained with s + b, served with s - b."""
    logits_TE, bias_E = torch.randn(40, 8), torch.randn(8)
    stats = RouterStats.allocate(1, 8)
    trained = route(logits_TE.requires_grad_(), bias_E, 2, stats=stats.layer(0))
    with torch.no_grad():
        served = route(logits_TE, bias_E, 2)
    assert torch.equal(trained.ids_TK, served.ids_TK)
    assert torch.equal(served.ids_TK[:, 0], (torch.sigmoid(logits_TE) + bias_E).argmax(1))


def test_one_row_alone_is_routed_as_in_a_batch() -> None:
    logits_TE, bias_E = torch.randn(64, 56), torch.randn(56) * 0.1
    whole = route(logits_TE, bias_E, 8)
    for t in (0, 17, 63):
        alone = route(logits_TE[t : t + 1], bias_E, 8)
        assert torch.equal(alone.ids_TK[0], whole.ids_TK[t]) and torch.equal(alone.weights_TK[0], whole.weights_TK[t])


def test_softmax_scores_scale_and_no_normalisation() -> None:
    logits_TE = torch.randn(20, 8, dtype=torch.float64)
    found = route(logits_TE, zeros(8), 3, score="softmax", normalize=False, scale=2.0)
    best = torch.softmax(logits_TE, 1).topk(3, 1)
    assert torch.equal(found.ids_TK, best.indices)
    torch.testing.assert_close(found.weights_TK, 2 * best.values)
    normalised = route(logits_TE, zeros(8), 3, score="softmax").weights_TK
    torch.testing.assert_close(normalised.sum(1), torch.ones(20, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_scored_in_fp32(dtype: torch.dtype) -> None:
    logits_TE = torch.randn(50, 16).to(dtype)
    low, full = route(logits_TE, zeros(16), 4), route(logits_TE.float(), zeros(16), 4)
    assert low.weights_TK.dtype == low.scores_TE.dtype == torch.float32
    assert torch.equal(low.ids_TK, full.ids_TK) and torch.equal(low.weights_TK, full.weights_TK)


def test_gradcheck() -> None:
    logits_TE = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    bias_E = torch.randn(6) * 0.1
    assert torch.autograd.gradcheck(lambda x: route(x, bias_E, 2, scale=1.3).weights_TK, (logits_TE,))
    assert torch.autograd.gradcheck(lambda x: route(x, bias_E, 2).scores_TE, (logits_TE,))


def test_k_equal_to_e_chooses_all_and_counts_no_required_bias() -> None:
    """PaddlePaddle/PaddleFleet#1775: a cutoff of -inf filled the border bin."""
    stats = RouterStats.allocate(1, 4)
    found = route(torch.randn(10, 4), zeros(4), 4, stats=stats.layer(0))
    assert torch.equal(found.ids_TK.sort(1).values, torch.arange(4).expand(10, 4))
    assert bool((found.cutoff_T == -torch.inf).all())
    assert stats.loads_LE.tolist() == [[10] * 4] and int(stats.histograms_LEB.sum()) == 0
    stats.solve_(4)
    assert not stats.bias_LE.any()


@pytest.mark.parametrize("setting", ["n_group", "topk_group"])
def test_group_limited_routing_is_no_setting(setting: str) -> None:
    """README.md: not supported, so it must not be read over."""
    with pytest.raises(ValueError, match=setting):
        from_dict({**to_dict(preset("smoke")), setting: 8})


def test_padding_rows_go_nowhere_and_disturb_nothing() -> None:
    logits_TE = torch.randn(12, 8)
    mask_T = torch.tensor([True, False] * 6)
    padded_TE = logits_TE.clone()
    padded_TE[~mask_T] = torch.nan
    padded_TE.requires_grad_()
    packed_TE = logits_TE[mask_T].requires_grad_()
    padded, packed = route(padded_TE, zeros(8), 2, mask_T=mask_T), route(packed_TE, zeros(8), 2)
    assert torch.equal(padded.ids_TK[mask_T], packed.ids_TK) and bool((padded.ids_TK[~mask_T] == -1).all())
    assert torch.equal(padded.weights_TK[mask_T], packed.weights_TK) and not padded.weights_TK[~mask_T].any()
    padded.weights_TK.square().sum().backward()
    packed.weights_TK.square().sum().backward()
    assert padded_TE.grad is not None and packed_TE.grad is not None
    assert torch.equal(padded_TE.grad[mask_T], packed_TE.grad) and not padded_TE.grad[~mask_T].any()


def test_b034_replayed_experts_outside_the_live_choice_keep_weight_and_gradient() -> None:
    logits_TE = torch.tensor([[3.0, 2.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]], requires_grad=True)
    assert route(logits_TE, zeros(8), 2).ids_TK.tolist() == [[0, 1]]
    replayed_TK = torch.tensor([[0, 5]])
    found = route(logits_TE, zeros(8), 2, ids_TK=replayed_TK)
    scores = torch.sigmoid(torch.tensor([3.0, 1.0]))
    assert torch.equal(found.ids_TK, replayed_TK)
    torch.testing.assert_close(found.weights_TK[0], scores / scores.sum())
    found.weights_TK[0, 1].backward()
    assert logits_TE.grad is not None and float(logits_TE.grad[0, 5]) > 0.01
    assert not logits_TE.grad[0, [1, 2, 3, 4, 6, 7]].any()


def test_b034_replay_survives_recomputation_and_micro_batches() -> None:
    logits_TE = torch.randn(8, 8, requires_grad=True)
    ids_TK = torch.stack([torch.randperm(8)[:2] for _ in range(8)])
    whole = route(logits_TE, zeros(8), 2, ids_TK=ids_TK)
    (expected_TE,) = torch.autograd.grad(whole.weights_TK.square().sum(), logits_TE)
    seen: list[Tensor] = []

    def forward(part_TE: Tensor, part_TK: Tensor) -> Tensor:
        routing = route(part_TE, zeros(8), 2, ids_TK=part_TK)
        seen.append(routing.ids_TK)
        return routing.weights_TK.square().sum()

    for part in (slice(0, 3), slice(3, 8)):
        checkpoint(forward, logits_TE[part], ids_TK[part], use_reentrant=False).backward()
    assert logits_TE.grad is not None and torch.equal(logits_TE.grad, expected_TE)
    assert [ids.tolist() for ids in seen] == [ids_TK[p].tolist() for p in (slice(0, 3),) * 2 + (slice(3, 8),) * 2]


def test_b034_replay_counts_loads_but_teaches_the_bias_nothing() -> None:
    stats = RouterStats.allocate(1, 8)
    recorded = route(torch.randn(16, 8), zeros(8), 2, mask_T=torch.arange(16) < 10)  # -1 in padding rows
    route(torch.randn(16, 8), zeros(8), 2, mask_T=torch.arange(16) < 10, ids_TK=recorded.ids_TK, stats=stats.layer(0))
    assert stats.loads_LE[0].tolist() == load(recorded.ids_TK[:10], 8) and int(stats.tokens_L) == 10
    assert int(stats.histograms_LEB.sum()) == 0
    stats.solve_(2)
    assert not stats.bias_LE.any()


BAD = {
    "k too large": (
        {"k": 9},
        "k: found 9, need 1 <= k <= 8, the number of experts",
    ),
    "k zero": ({"k": 0}, "k: found 0, need 1 <= k <= 8, the number of experts"),
    "logits rank": (
        {"logits_TE": torch.zeros(2, 3, 8)},
        "logits_TE: found shape (2, 3, 8) of torch.float32, need a floating-point [T, E]",
    ),
    "logits integer": (
        {"logits_TE": torch.zeros(3, 8, dtype=torch.int64)},
        "logits_TE: found shape (3, 8) of torch.int64, need a floating-point [T, E]",
    ),
    "bias shape": ({"bias_E": torch.zeros(7)}, "bias_E: found shape (7,), need [8], one value an expert"),
    "bias -inf": (
        {"bias_E": torch.tensor([0.0] + [-torch.inf] * 7)},
        "bias_E: found a non-finite value, need finite biases",
    ),
    "bias nan": ({"bias_E": torch.full((8,), torch.nan)}, "bias_E: found a non-finite value, need finite biases"),
    "bias dtype": (
        {"bias_E": torch.zeros(8, dtype=torch.bfloat16)},
        "bias_E: found dtype torch.bfloat16, need float32 (or float64); keep it out of model.to(dtype)",
    ),
    "score": ({"score": "relu"}, "score: found 'relu', need 'sigmoid' or 'softmax'"),
    "mask": (
        {"mask_T": torch.ones(4, dtype=torch.bool)},
        "mask_T: found shape (4,) of torch.bool, need [3] bool, true for real tokens",
    ),
    "replay shape": (
        {"ids_TK": torch.zeros(3, 1, dtype=torch.int64)},
        "ids_TK: found shape (3, 1) of torch.int64, need [3, 2] int64",
    ),
    "replay range": ({"ids_TK": torch.tensor([[0, 1], [8, 2], [3, 4]])}, "ids_TK: found 8, need 0 <= id < 8"),
    "replay negative": ({"ids_TK": torch.tensor([[0, 1], [-1, 2], [3, 4]])}, "ids_TK: found -1, need 0 <= id < 8"),
    "replay twice": (
        {"ids_TK": torch.tensor([[0, 1], [5, 5], [3, 4]])},
        "ids_TK: found an expert twice in one row, need different experts",
    ),
    "device": (
        {"bias_E": torch.zeros(8, device="meta")},
        "bias_E: found device meta, need cpu, that of logits_TE",
    ),
    "stats": (
        {"stats": RouterStats.allocate(1, 9).layer(0)},
        "stats: found 9 experts, need 8, those of logits_TE",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    changes, message = BAD[name]
    arguments = {"logits_TE": torch.zeros(3, 8), "bias_E": torch.zeros(8), "k": 2, **changes}
    with pytest.raises(ValueError) as error:
        route(**arguments)
    assert str(error.value) == message
