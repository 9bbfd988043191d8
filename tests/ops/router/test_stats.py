"""RouterStats: what is counted, when, and how it travels."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trine.ops.router import COUNTERS, RouterStats, quantile, route
from trine.ops.router import stats as stats_module
from trine.ops.router.reference import histogram_reference

EXPERTS, K = 8, 2


class TwoRouters(nn.Module):
    """Two routers in a row, as a model would hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(6, EXPERTS, bias=False) for _ in range(2))
        self.values = nn.Parameter(torch.randn(EXPERTS, 6))
        self.stats = RouterStats.allocate(2, EXPERTS)

    def layer(self, i: int, x_TD: Tensor) -> Tensor:
        layer = self.stats.layer(i)
        counts = self.training and torch.is_grad_enabled()
        routing = route(self.routers[i](x_TD), layer.bias_E, K, stats=layer if counts else None)
        return x_TD + (routing.weights_TK[..., None] * self.values[routing.ids_TK]).sum(1)

    def forward(self, x_TD: Tensor, recompute: bool = False) -> Tensor:
        for i in range(2):
            if recompute:
                contexts = lambda: (nullcontext(), self.stats.paused())  # noqa: E731
                x_TD = checkpoint(self.layer, i, x_TD, use_reentrant=False, context_fn=contexts)
            else:
                x_TD = self.layer(i, x_TD)
        return x_TD


def count(stats: RouterStats, logits_TE: Tensor, mask_T: Tensor | None = None) -> None:
    route(logits_TE, stats.bias_LE[0], K, stats=stats.layer(0), mask_T=mask_T)


def test_allocate_is_exactly_zero_contiguous_and_one_buffer() -> None:
    stats = RouterStats.allocate(3, EXPERTS, 50)
    assert stats.histograms_LEB.shape == (3, EXPERTS, 50) and stats.loads_LE.shape == (3, EXPERTS)
    assert stats.counters_LF.shape == (3, len(COUNTERS)) and stats.bias_LE.shape == (3, EXPERTS)
    assert stats.counts.dtype == torch.int32 and stats.bias_LE.dtype == stats.edges_L2.dtype == torch.float32
    assert not stats.counts.any() and not stats.bias_LE.any()
    assert torch.equal(stats.edges_L2, torch.tensor([[-1.0, 0.04]] * 3))
    for view in (stats.histograms_LEB, stats.loads_LE, stats.counters_LF):
        assert view.is_contiguous() and view.untyped_storage().data_ptr() == stats.counts.untyped_storage().data_ptr()
    stats.layer(2).loads_E[5] += 7
    assert int(stats.loads_LE[2, 5]) == 7 == int(stats.counts.sum())


@pytest.mark.parametrize("experts", [8, 70])  # 70: more than one strip of columns
def test_histogram_equals_counting_by_hand(experts: int) -> None:
    logits_TE, bias_E = torch.randn(300, experts), torch.randn(experts) * 0.2
    stats = RouterStats.allocate(1, experts, 100)
    stats.set_bias_(bias_E[None])
    for part_TE in logits_TE.split(170):
        found = route(part_TE, stats.bias_LE[0], K, stats=stats.layer(0))
    assert found.ids_TK.shape == (130, K)
    expected_EB = histogram_reference(torch.sigmoid(logits_TE), bias_E, K, stats.edges_L2[0], 100)
    counts_EB = stats.histograms_LEB[0]
    assert int((counts_EB - expected_EB).abs().sum()) <= 2 * experts * 300 // 1000  # an ulp at a bin's border
    assert torch.equal(counts_EB.sum(1), torch.full((experts,), 300))
    ids_TK = route(logits_TE, bias_E, K).ids_TK
    assert torch.equal(stats.loads_LE[0], torch.bincount(ids_TK.reshape(-1), minlength=experts).int())
    assert stats.counters_LF[0].tolist() == [300, 300, 0, 0, 0]


def test_non_finite_rows_are_left_out_and_counted() -> None:
    logits_TE = torch.randn(20, EXPERTS)
    clean, dirty = RouterStats.allocate(1, EXPERTS), RouterStats.allocate(1, EXPERTS)
    count(clean, logits_TE)
    extra_TE = torch.randn(2, EXPERTS)
    extra_TE[0, 3], extra_TE[1] = torch.nan, torch.nan
    count(dirty, torch.cat((logits_TE[:7], extra_TE, logits_TE[7:])))
    assert torch.equal(dirty.histograms_LEB, clean.histograms_LEB)
    assert int(dirty.tokens_L) == 22 and int(dirty.dropped_L) == 2 and int(dirty.loads_LE.sum()) == 44
    assert torch.equal(dirty.solve_(K).bias_LE, clean.solve_(K).bias_LE)


@pytest.mark.parametrize("dirty", [False, True])
def test_the_path_that_reads_no_value_back_counts_the_same(dirty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a card, here on the CPU."""
    logits_TE, mask_T = torch.randn(60, 70), torch.arange(60) % 5 > 0
    if dirty:
        logits_TE[3, 4] = logits_TE[5, 0] = torch.nan  # row 5 is padding
        logits_TE[7, 8] = 30.0
    both = []
    for reads in (True, False):
        for module in (quantile, stats_module):
            monkeypatch.setattr(module, "may_read", lambda tensor, reads=reads: reads)
        stats = RouterStats.allocate(1, 70)
        for _ in range(2):
            stats.bias_LE.copy_(torch.linspace(-0.5, 0.5, 70))
            for part in (slice(0, 25), slice(25, 60)):
                count(stats, logits_TE[part], mask_T[part] if dirty else None)
        both.append(stats)
    assert torch.equal(both[0].counts, both[1].counts) and torch.equal(both[0].edges_L2, both[1].edges_L2)
    assert both[1].dropped_L.tolist() == [2 * dirty] and both[1].saturated_L.tolist() == [2 * dirty]
    assert torch.equal(both[0].solve_(K).bias_LE, both[1].solve_(K).bias_LE)


def test_only_non_finite_rows_keep_the_bias() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    bias_LE = torch.randn(1, EXPERTS)
    stats.set_bias_(bias_LE)
    count(stats, torch.full((5, EXPERTS), torch.nan))
    assert torch.equal(stats.solve_(K).bias_LE, bias_LE) and int(stats.dropped_L) == 5


def test_padding_is_counted_nowhere() -> None:
    """NVIDIA/Megatron-LM#5349: half of the rows are padding and shift the quantile."""
    logits_TE = torch.randn(40, EXPERTS)
    mask_T = torch.arange(40) % 2 == 0
    garbage_TE = torch.where(mask_T[:, None], logits_TE, torch.tensor(50.0) * torch.randn(40, EXPERTS))
    garbage_TE[1] = torch.nan
    packed, padded = RouterStats.allocate(1, EXPERTS), RouterStats.allocate(1, EXPERTS)
    count(packed, logits_TE[mask_T])
    count(padded, garbage_TE, mask_T)
    assert torch.equal(packed.counts, padded.counts) and int(padded.tokens_L) == 20
    assert torch.equal(packed.solve_(K).bias_LE, padded.solve_(K).bias_LE)


def test_saturated_scores_are_counted_beyond_the_low_word() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    logits_TE = torch.zeros(4, EXPERTS)
    logits_TE[0, :3], logits_TE[1, 0], logits_TE[2, 0] = 18.0, -18.0, 12.0
    count(stats, logits_TE)
    assert int(stats.saturated_L) == 4
    stats.counters_LF[0, 3] = 2**20 - 2
    count(stats, logits_TE)
    assert stats.counters_LF[0, 3:].tolist() == [2, 1] and int(stats.saturated_L) == 2**20 + 2


def test_softmax_scores_near_zero_are_not_saturated() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    logits_TE = torch.zeros(3, EXPERTS)
    logits_TE[:, 0] = 30.0
    route(logits_TE, stats.bias_LE[0], K, score="softmax", stats=stats.layer(0))
    assert int(stats.saturated_L) == 3


def test_no_token_is_no_event() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    stats.set_bias_(torch.randn(1, EXPERTS))
    before = stats.bias_LE.clone()
    count(stats, torch.zeros(0, EXPERTS))
    assert not stats.counts.any() and torch.equal(stats.solve_(K).bias_LE, before)


def test_solve_is_finite_centred_and_sets_the_next_range() -> None:
    stats = RouterStats.allocate(2, EXPERTS)
    for i in range(2):
        route(torch.randn(64, EXPERTS) + 3 * torch.randn(EXPERTS), stats.bias_LE[i], K, stats=stats.layer(i))
    stats.solve_(K).zero_()
    assert bool(stats.bias_LE.isfinite().all()) and float(stats.bias_LE.double().mean(1).abs().max()) < 1e-7
    low_L, high_L = stats.bias_LE.aminmax(dim=1)
    torch.testing.assert_close(stats.edges_L2[:, 0], low_L - 1)
    torch.testing.assert_close(stats.edges_L2[:, 0] + 1000 * stats.edges_L2[:, 1], high_L + 1)


def test_layers_without_tokens_keep_their_bias_beside_others() -> None:
    stats = RouterStats.allocate(2, EXPERTS)
    bias_LE = torch.randn(2, EXPERTS) * 0.1
    stats.set_bias_(bias_LE)
    route(torch.randn(64, EXPERTS), stats.bias_LE[1], K, stats=stats.layer(1))
    stats.solve_(K)
    assert torch.equal(stats.bias_LE[0], bias_LE[0]) and not torch.equal(stats.bias_LE[1], bias_LE[1])


def test_ema_keeps_a_share_of_the_old_bias() -> None:
    plain, smooth = (RouterStats.allocate(1, EXPERTS) for _ in range(2))
    old_LE = torch.randn(1, EXPERTS)
    old_LE -= old_LE.mean()
    logits_TE = torch.randn(64, EXPERTS)
    for stats in (plain, smooth):
        stats.set_bias_(old_LE)
        count(stats, logits_TE)
    expected_LE = 0.75 * old_LE + 0.25 * plain.solve_(K).bias_LE
    torch.testing.assert_close(smooth.solve_(K, ema=0.75).bias_LE, expected_LE)


def test_b015_evaluation_does_not_move_the_next_bias() -> None:
    torch.manual_seed(1)
    model, plain = TwoRouters(), TwoRouters()
    plain.load_state_dict(model.state_dict())
    x_TD = torch.randn(32, 6)
    for one in (model, plain):
        one(x_TD).sum().backward()
    before = model.stats.state_dict()
    model.eval()
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(17, 6))
    model.train()
    with model.stats.paused():  # generation during training
        model(torch.randn(17, 6))
    assert all(torch.equal(value, before[name]) for name, value in model.stats.state_dict().items())
    assert torch.equal(model.stats.solve_(K).bias_LE, plain.stats.solve_(K).bias_LE)


def test_b016_recomputed_activations_are_counted_once() -> None:
    model, plain = TwoRouters(), TwoRouters()
    plain.load_state_dict(model.state_dict())
    x_TD = torch.randn(64, 6)
    model(x_TD, recompute=True).square().sum().backward()
    plain(x_TD).square().sum().backward()
    assert model.stats.loads_LE.sum(1).tolist() == [64 * K] * 2
    assert torch.equal(model.stats.counts, plain.stats.counts)
    assert torch.equal(model.stats.solve_(K).bias_LE, plain.stats.solve_(K).bias_LE)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert model.stats.recording


def test_b018_bias_stays_fp32_under_default_dtype_cast_and_reload() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = TwoRouters()
        fresh = RouterStats.allocate(2, EXPERTS)
    finally:
        torch.set_default_dtype(torch.float32)
    exact = torch.tensor(0.123456789).item()
    model.stats.bias_LE[0, 3] = 0.123456789
    model.to(torch.bfloat16)
    assert model.routers[0].weight.dtype == torch.bfloat16
    for stats in (model.stats, fresh.load_state_dict(model.stats.state_dict())):
        assert stats.bias_LE.dtype == stats.edges_L2.dtype == torch.float32 and float(stats.bias_LE[0, 3]) == exact
        assert stats.histograms_LEB.dtype == torch.int32


def test_b024_resume_in_the_middle_of_a_window_is_exact() -> None:
    """Also PaddlePaddle/PaddleFleet#1644: the bin range was not stored, so the bias after a resume differed."""
    parts = torch.randn(6, 50, EXPERTS)
    straight = RouterStats.allocate(1, EXPERTS)
    for step, part_TE in enumerate(parts):
        count(straight, part_TE)
        if step == 2:
            straight.solve_(K).zero_()
        if step == 3:  # one micro-batch into the second window
            saved = straight.state_dict()
    resumed = RouterStats.allocate(1, EXPERTS).load_state_dict(saved)
    assert int(resumed.tokens_L) == 50
    for part_TE in parts[4:]:
        count(resumed, part_TE)
    assert torch.equal(resumed.counts, straight.counts) and torch.equal(resumed.edges_L2, straight.edges_L2)
    assert torch.equal(resumed.solve_(K).bias_LE, straight.solve_(K).bias_LE)


def test_b024_counters_are_zero_after_building_on_meta() -> None:
    with torch.device("meta"):
        stats = RouterStats.allocate(2, EXPERTS)
    assert stats.device.type == "meta"
    for real in (RouterStats.allocate(2, EXPERTS, device="cpu"), stats.to("cpu")):
        assert real.device.type == "cpu" and not real.counts.any() and not real.bias_LE.any()
        assert real.edges_L2[:, 0].tolist() == [-1.0, -1.0]


def test_state_dict_is_a_copy_and_loading_is_all_or_nothing() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    count(stats, torch.randn(9, EXPERTS))
    saved = stats.state_dict()
    stats.zero_()
    assert int(saved["loads_LE"].sum()) == 18
    before = stats.state_dict()
    names = sorted(saved)
    bad = {
        f"state: found {names[1:]}, need exactly {names}": {n: saved[n] for n in names[1:]},
        f"state: found {sorted([*names, 'more'])}, need exactly {names}": {**saved, "more": saved["bias_LE"]},
        "bias_LE: found shape (1, 8) of torch.bfloat16, need (1, 8) of torch.float32": {
            **saved,
            "bias_LE": saved["bias_LE"].bfloat16(),
        },
        "loads_LE: found shape (1, 7) of torch.int32, need (1, 8) of torch.int32": {
            **saved,
            "loads_LE": saved["loads_LE"][:, :7],
        },
        "bias_LE: found a non-finite value, need finite ones": {**saved, "bias_LE": saved["bias_LE"] / 0},
    }
    for message, state in bad.items():
        with pytest.raises(ValueError) as error:
            stats.load_state_dict(state)
        assert str(error.value) == message
        assert all(torch.equal(value, before[name]) for name, value in stats.state_dict().items())


def test_views_follow_a_move_and_a_deep_copy() -> None:
    stats = RouterStats.allocate(2, EXPERTS)
    pair = {"stats": stats, "layer": stats.layer(1)}
    twin = copy.deepcopy(pair)
    route(torch.randn(5, EXPERTS), twin["layer"].bias_E, K, stats=twin["layer"])
    assert int(twin["stats"].tokens_L[1]) == 5 and not stats.counts.any()
    layer = stats.layer(0)
    stats.to("meta").to("cpu")
    route(torch.randn(5, EXPERTS), layer.bias_E, K, stats=layer)
    assert stats.tokens_L.tolist() == [5, 0]


def test_a_bias_written_between_windows_needs_no_bookkeeping() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    stats.bias_LE.copy_(torch.linspace(-3, 3, EXPERTS))
    count(stats, torch.randn(64, EXPERTS))
    assert stats.edges_L2[0].tolist() == pytest.approx([-4.0, 0.008])
    assert int(stats.histograms_LEB[0, :, [0, 999]].sum()) == 0, "nothing was pressed into the border bins"


def test_a_bias_may_not_change_inside_a_window() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    count(stats, torch.randn(8, EXPERTS))
    before = stats.counts.clone()
    with pytest.raises(ValueError) as error:
        route(torch.randn(8, EXPERTS), torch.arange(8.0), K, stats=stats.layer(0))
    assert str(error.value) == (
        "bias_E: found one that differs by up to 7 from the bias this window was opened with: a bias may change only "
        "after zero_()"
    )
    with pytest.raises(ValueError, match=r"set_bias_: found counts of an open window, need zero_\(\) first"):
        stats.set_bias_(torch.zeros(1, EXPERTS))
    assert torch.equal(stats.counts, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.layer(1), "index: found 1, need 0 <= index < 1, the number of layers"),
        (lambda s: s.solve_(9), "k: found 9, need 1 <= k <= 8, the number of experts"),
        (lambda s: s.solve_(2, ema=1.0), "ema: found 1.0, need 0 <= ema < 1"),
        (
            lambda s: s.set_bias_(torch.zeros(8)),
            "bias_LE: found shape (8,) of torch.float32, need (1, 8) of torch.float32",
        ),
        (
            lambda s: RouterStats.allocate(1, 0),
            "layers, experts, bins: found 1, 0, 1000, need layers >= 0, experts >= 1, bins >= 1",
        ),
        (
            lambda s: route(torch.zeros(2, 8), torch.full((8,), torch.nan), 2, stats=s.layer(0)),
            "bias_E: found a non-finite value, need finite biases",
        ),
    ],
)
def test_bad_input(call, message: str) -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    with pytest.raises(ValueError) as error:
        call(stats)
    assert str(error.value) == message and not stats.counts.any()


def test_a_model_without_moe_layers_has_empty_statistics() -> None:
    stats = RouterStats.allocate(0, EXPERTS)
    assert stats.solve_(K).zero_().state_dict()["bias_LE"].shape == (0, EXPERTS)


def test_pooled_quantiles_of_the_required_bias() -> None:
    stats = RouterStats.allocate(2, EXPERTS)
    assert bool(stats.required_bias_quantiles([0.5]).isnan().all())
    logits_TE = torch.randn(400, EXPERTS)
    count(stats, logits_TE)
    scores_TE = torch.sigmoid(logits_TE)
    required_N = (scores_TE.topk(K + 1, 1).values[:, K:] - scores_TE).double().reshape(-1)
    levels = [0.0, 0.01, 0.5, 0.99, 1.0]
    found_LQ = stats.required_bias_quantiles(levels)
    expected_Q = torch.quantile(required_N, torch.tensor(levels, dtype=torch.float64))
    assert float((found_LQ[0] - expected_Q)[1:].abs().max()) <= 0.004 and bool(found_LQ[1].isnan().all())


def test_a_replica_counts_apart_under_the_same_bias() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    twin = stats.replica()
    stats.bias_LE.copy_(torch.linspace(-1, 1, EXPERTS))
    count(twin, torch.randn(9, EXPERTS))
    assert int(twin.tokens_L) == 9 and not stats.counts.any() and float(stats.edges_L2[0, 0]) == -2.0
    stats.counts.add_(twin.counts)
    assert torch.equal(stats.solve_(K).bias_LE, twin.bias_LE)
