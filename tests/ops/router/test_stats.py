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
KINDS = [(estimator, domain) for estimator in ("report", "signed_log") for domain in ("sigmoid", "logit")]
every_kind = pytest.mark.parametrize(("estimator", "domain"), KINDS)


class TwoRouters(nn.Module):
    """Two routers in a row, as a model would hold them."""

    def __init__(self, estimator: str = "report", domain: str = "sigmoid") -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(6, EXPERTS, bias=False) for _ in range(2))
        self.values = nn.Parameter(torch.randn(EXPERTS, 6))
        self.stats = RouterStats.allocate(2, EXPERTS, estimator=estimator, score_domain=domain)

    def layer(self, i: int, x_TD: Tensor) -> Tensor:
        layer = self.stats.layer(i)
        counts = self.training and torch.is_grad_enabled()
        logits_TE, domain = self.routers[i](x_TD), layer.score_domain
        routing = route(logits_TE, layer.bias_E, K, stats=layer if counts else None, score_domain=domain)
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
    layer = stats.layer(0)
    route(logits_TE, layer.bias_E, K, stats=layer, mask_T=mask_T, score_domain=layer.score_domain)


def fresh(estimator: str, domain: str, experts: int = EXPERTS) -> RouterStats:
    return RouterStats.allocate(1, experts, estimator=estimator, score_domain=domain)


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


@every_kind
def test_non_finite_rows_are_left_out_and_counted(estimator: str, domain: str) -> None:
    """One such row in a histogram's first bin would drag the quantile; in torch.quantile it would end the expert."""
    logits_TE = torch.randn(20, EXPERTS)
    clean, dirty = fresh(estimator, domain), fresh(estimator, domain)
    count(clean, logits_TE)
    extra_TE = torch.randn(5, EXPERTS)
    extra_TE[0, 3], extra_TE[1] = torch.nan, torch.nan
    extra_TE[2], extra_TE[3, 1], extra_TE[4, 2] = torch.inf, torch.inf, -torch.inf  # scores of 1, 1 and 0
    count(dirty, torch.cat((logits_TE[:7], extra_TE, logits_TE[7:])))
    assert torch.equal(dirty.histograms_LEB, clean.histograms_LEB) and not bool(dirty.saturated_L)
    assert int(dirty.tokens_L) == 25 and int(dirty.dropped_L) == 5 and int(dirty.loads_LE.sum()) == 50
    assert torch.equal(dirty.solve_(K).bias_LE, clean.solve_(K).bias_LE)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@every_kind
def test_experts_masked_by_minus_infinity_are_counted_and_teach_nothing(
    estimator: str, domain: str, score: str, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Group-limited routing by masks: sigmoid(-inf) = 0 is finite, and with a bias 0.9 % of the slots went to masked
    experts in silence. Each such row is dropped and counted, by itself and beside rows without a mask."""
    for module in (quantile, stats_module):
        monkeypatch.setattr(module, "may_read", lambda tensor: reads)
    logits_TE = torch.randn(64, EXPERTS)
    masked_TE = logits_TE.clone()
    masked_TE[::2, EXPERTS // 2 :] = -torch.inf
    masked_TE[1::4, : EXPERTS // 2] = -torch.inf
    found, open_ = fresh(estimator, domain), fresh(estimator, domain)
    for stats, rows_TE, mask_T in ((found, masked_TE, None), (open_, logits_TE, torch.arange(64) % 4 == 3)):
        stats.set_bias_(torch.linspace(-0.5, 0.5, EXPERTS)[None])
        layer = stats.layer(0)
        route(rows_TE, layer.bias_E, K, score=score, stats=layer, mask_T=mask_T, score_domain=domain)
    assert found.counters_LF[0, :3].tolist() == [64, 16, 48] and not bool(found.saturated_L)
    assert torch.equal(found.histograms_LEB, open_.histograms_LEB)
    bias_LE = found.solve_(K).bias_LE
    assert bool(bias_LE.isfinite().all()) and torch.equal(bias_LE, open_.solve_(K).bias_LE)
    weights_TK = route(masked_TE, bias_LE[0], K, score=score, score_domain=domain).weights_TK
    assert bool(weights_TK.isfinite().all())


@pytest.mark.parametrize("dirty", [False, True])
@every_kind
def test_the_path_that_reads_no_value_back_counts_the_same(
    estimator: str, domain: str, dirty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on a card, here on the CPU."""
    logits_TE, mask_T = torch.randn(60, 70), torch.arange(60) % 5 > 0
    if dirty:
        logits_TE[3, 4] = logits_TE[5, 0] = torch.nan  # row 5 is padding
        logits_TE[8, 0], logits_TE[10, 1], logits_TE[11, 2] = -torch.inf, torch.inf, torch.inf  # so is row 10
        logits_TE[7, 8] = 30.0
    both = []
    for reads in (True, False):
        for module in (quantile, stats_module):
            monkeypatch.setattr(module, "may_read", lambda tensor, reads=reads: reads)
        stats = fresh(estimator, domain, 70)
        for _ in range(2):
            stats.bias_LE.copy_(torch.linspace(-0.5, 0.5, 70))
            for part in (slice(0, 25), slice(25, 60)):
                count(stats, logits_TE[part], mask_T[part] if dirty else None)
        both.append(stats)
    assert torch.equal(both[0].counts, both[1].counts) and torch.equal(both[0].edges_L2, both[1].edges_L2)
    assert both[1].dropped_L.tolist() == [6 * dirty] and both[1].saturated_L.tolist() == [2 * dirty]
    assert torch.equal(both[0].solve_(K).bias_LE, both[1].solve_(K).bias_LE)


def test_only_non_finite_rows_keep_the_bias() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    bias_LE = torch.randn(1, EXPERTS)
    stats.set_bias_(bias_LE)
    count(stats, torch.full((5, EXPERTS), torch.nan))
    assert torch.equal(stats.solve_(K).bias_LE, bias_LE) and int(stats.dropped_L) == 5


@every_kind
def test_padding_is_counted_nowhere(estimator: str, domain: str) -> None:
    """NVIDIA/Megatron-LM#5349: half of the rows are padding and shift the quantile."""
    logits_TE = torch.randn(40, EXPERTS)
    mask_T = torch.arange(40) % 2 == 0
    garbage_TE = torch.where(mask_T[:, None], logits_TE, torch.tensor(50.0) * torch.randn(40, EXPERTS))
    garbage_TE[1] = torch.nan
    packed, padded = fresh(estimator, domain), fresh(estimator, domain)
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


@every_kind
def test_b015_evaluation_does_not_move_the_next_bias(estimator: str, domain: str) -> None:
    """pytorch/torchtitan#4412: a forward pass in evaluation changed the bias of the next training step."""
    torch.manual_seed(1)
    model, plain = TwoRouters(estimator, domain), TwoRouters(estimator, domain)
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


@every_kind
def test_b016_recomputed_activations_are_counted_once(estimator: str, domain: str) -> None:
    """pytorch/torchtitan#3686, #1114: a hook that ran again in the recomputation counted twice."""
    model, plain = TwoRouters(estimator, domain), TwoRouters(estimator, domain)
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


@every_kind
def test_b018_bias_stays_fp32_under_default_dtype_cast_and_reload(estimator: str, domain: str) -> None:
    """PrimeIntellect-ai/prime-rl#3411: the bias followed ``model.to(bfloat16)``."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = TwoRouters(estimator, domain)
        other = RouterStats.allocate(2, EXPERTS, estimator=estimator, score_domain=domain)
    finally:
        torch.set_default_dtype(torch.float32)
    exact = torch.tensor(0.123456789).item()
    model.stats.bias_LE[0, 3] = 0.123456789
    model.to(torch.bfloat16)
    assert model.routers[0].weight.dtype == torch.bfloat16
    for stats in (model.stats, other.load_state_dict(model.stats.state_dict())):
        assert stats.anchor_LE.dtype == stats.reach_L.dtype == torch.float32
        assert stats.bias_LE.dtype == stats.edges_L2.dtype == torch.float32 and float(stats.bias_LE[0, 3]) == exact
        assert stats.histograms_LEB.dtype == torch.int32


@every_kind
def test_b024_resume_in_the_middle_of_a_window_is_exact(estimator: str, domain: str) -> None:
    """Also PaddlePaddle/PaddleFleet#1644: the bin range was not stored, so the bias after a resume differed."""
    parts = torch.randn(6, 50, EXPERTS)
    straight = fresh(estimator, domain)
    if domain == "logit":
        parts[:, :, 0] += 1000.0  # outside the first range, which widens
    for step, part_TE in enumerate(parts):
        count(straight, part_TE)
        if step == 2:
            straight.solve_(K).zero_()
        if step == 3:  # one micro-batch into the second window
            saved = straight.state_dict()
    resumed = fresh(estimator, domain).load_state_dict(saved)
    assert int(resumed.tokens_L) == 50
    assert (float(resumed.reach_L) > resumed.grid.first_reach) == (domain == "logit")
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


def first_format(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was saved before there was a second estimator."""
    return {name: state[name] for name in ("histograms_LEB", "loads_LE", "counters_LF", "edges_L2", "bias_LE")}


def test_states_of_the_first_format_load() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    stats.set_bias_(torch.linspace(-0.2, 0.2, EXPERTS)[None])
    parts = torch.randn(2, 50, EXPERTS)
    count(stats, parts[0])
    resumed = RouterStats.allocate(1, EXPERTS).load_state_dict(first_format(stats.state_dict()))
    for one in (stats, resumed):
        count(one, parts[1])
        one.solve_(K)
    assert torch.equal(resumed.counts, stats.counts) and torch.equal(resumed.bias_LE, stats.bias_LE)
    assert float(resumed.reach_L) == 1.0


def test_the_other_estimator_takes_the_bias_over_between_steps_only() -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    stats.set_bias_(torch.linspace(-0.2, 0.2, EXPERTS)[None])
    other = RouterStats.allocate(1, EXPERTS, estimator="signed_log")
    for state in (stats.state_dict(), first_format(stats.state_dict())):
        count(other, torch.randn(9, EXPERTS))
        other.load_state_dict(state)
        assert torch.equal(other.bias_LE, stats.bias_LE) and torch.equal(other.anchor_LE, stats.bias_LE)
        assert not other.counts.any() and float(other.reach_L) == 4.0
    count(stats, torch.randn(9, EXPERTS))
    with pytest.raises(ValueError) as error:
        other.load_state_dict(stats.state_dict())
    assert str(error.value) == (
        "estimator: found counts of an open window of the other one, need 'signed_log', or a state saved between steps"
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([3, 0, 0], "layout: found [3, 0, 0], need format version 2 or older"),
        ([2, 0], "layout: found [2, 0], need [2, estimator 0 or 1, score domain 0 or 1]"),
        ([2, 5, 0], "layout: found [2, 5, 0], need [2, estimator 0 or 1, score domain 0 or 1]"),
        (
            [2, 0, 1],
            "score_domain: found 'logit', need 'sigmoid': biases of scores and of logits have different units",
        ),
    ],
)
def test_unknown_layouts_are_refused(layout: list[int], message: str) -> None:
    stats = RouterStats.allocate(1, EXPERTS)
    with pytest.raises(ValueError) as error:
        stats.load_state_dict({**stats.state_dict(), "layout": torch.tensor(layout)})
    assert str(error.value) == message
    with pytest.raises(ValueError, match=r"reach_L: found \[0\.0\], need numbers above 0"):
        stats.load_state_dict({**stats.state_dict(), "reach_L": torch.zeros(1)})


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


@every_kind
def test_nothing_is_read_back_on_the_way_of_a_step(estimator: str, domain: str) -> None:
    """NVIDIA/TransformerEngine#3426: a check of the range on the host broke the capture of a step in a graph. A meta
    tensor has no value to read, so a read anywhere fails here."""
    stats = RouterStats.allocate(2, 70, device="meta", estimator=estimator, score_domain=domain)
    for mask_T in (None, torch.ones(30, dtype=torch.bool, device="meta")):
        route(
            *(torch.empty(30, 70, device="meta"), stats.bias_LE[1], 4),
            stats=stats.layer(1),
            mask_T=mask_T,
            score_domain=domain,
        )
    stats.solve_(4)
    stats.required_bias_quantiles([0.05, 0.5])
    assert stats.overflow_L.shape == stats.saturated_L.shape == (2,)
    assert stats.zero_().bias_LE.device.type == "meta"


@every_kind
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 8, 2), (10, 8, 2), (8, 256, 2), (3, 5, 4), (65, 33, 32)])
def test_awkward_sizes(estimator: str, domain: str, tokens: int, experts: int, k: int) -> None:
    """NVIDIA/Megatron-LM#5349: m = 10, k = 2, E = 8 hit an assertion; marin-community/marin#8033: two of the histogram
    variants crashed, for reasons not given."""
    stats = fresh(estimator, domain, experts)
    for _ in range(4):
        layer = stats.layer(0)
        route(torch.randn(tokens, experts), layer.bias_E, k, stats=layer, score_domain=domain)
        stats.solve_(k).zero_()
        assert bool(stats.bias_LE.isfinite().all()) and abs(float(stats.bias_LE.double().mean())) < 1e-6


@every_kind
def test_equal_scores_of_all_experts_leave_the_bias_at_zero(estimator: str, domain: str) -> None:
    """A router of zeros: every required bias is 0, the lowest ids get all tokens, and nothing runs away."""
    stats = fresh(estimator, domain)
    for _ in range(3):
        count(stats, torch.zeros(50, EXPERTS))
        assert stats.loads_LE.tolist() == [[50, 50, 0, 0, 0, 0, 0, 0]]
        stats.solve_(K).zero_()
        assert float(stats.bias_LE.abs().max()) < 1e-7


@every_kind
def test_bias_stays_centred_over_many_steps(estimator: str, domain: str) -> None:
    """One constant for all experts is free (the dual does not feel it); left in, it would grow and be lost in fp32."""
    stats, offset_E = fresh(estimator, domain), torch.linspace(-2, 2, EXPERTS)
    for _ in range(200):
        count(stats, torch.randn(40, EXPERTS) + offset_E)
        stats.solve_(K).zero_()
        assert abs(float(stats.bias_LE.double().mean())) < 1e-6 * (1 + float(stats.bias_LE.abs().max()))
    assert float(stats.bias_LE.abs().max()) < 6


@every_kind
def test_gain_is_a_share_of_the_change_and_never_above_one(estimator: str, domain: str) -> None:
    parts = torch.randn(2, 300, EXPERTS) + torch.linspace(-1, 1, EXPERTS)
    results = []
    for gain in (1.0, 0.25, 7.0, 0.0):
        stats = fresh(estimator, domain)
        stats.set_bias_(torch.linspace(0.1, -0.1, EXPERTS)[None])
        count(stats, parts[0])
        stats.solve_(K, gain_L=torch.tensor([gain]))
        results.append(stats.bias_LE.clone())
    full, quarter, above, none = results
    old = torch.linspace(0.1, -0.1, EXPERTS)[None]
    torch.testing.assert_close(quarter, 0.75 * old + 0.25 * full)
    assert torch.equal(above, full)
    torch.testing.assert_close(none, old)


def test_saturated_scores_balance_on_logits_only() -> None:
    """Logits of standard deviation 13: in fp32 many scores are exactly 1 and tie, logits are not and do not."""
    offset_E, dead, most = 6.0 * torch.randn(64), {}, {}
    for estimator, domain in KINDS:
        stats, generator = fresh(estimator, domain, 64), torch.Generator().manual_seed(3)
        for _ in range(10):
            logits_TE = 12.0 * torch.randn(2048, 64, generator=generator) + offset_E
            layer = stats.layer(0)
            route(logits_TE, layer.bias_E, 4, stats=layer, score_domain=domain)
            share = float(stats.saturated_L) / (2048 * 64)
            load_E = stats.loads_LE[0].clone()
            stats.solve_(4).zero_()
        assert share > 0.1, "counted in both domains"
        dead[estimator, domain] = int((load_E == 0).sum())
        most[estimator, domain] = float(load_E.max()) / (2048 * 4 / 64)
    for estimator in ("report", "signed_log"):
        assert dead[estimator, "logit"] == 0 and most[estimator, "logit"] < 1.5, most
        assert most[estimator, "sigmoid"] > 1.7, most
    assert dead["report", "sigmoid"] > 0, dead


def test_saturation_is_the_same_share_on_logits_as_on_scores() -> None:
    logits_TE = torch.linspace(-20, 20, 4000).reshape(500, EXPERTS)
    counted = []
    for domain in ("sigmoid", "logit"):
        stats = fresh("report", domain)
        count(stats, logits_TE)
        counted.append(int(stats.saturated_L))
    assert abs(counted[0] - counted[1]) <= 1 and counted[0] > 500


def test_route_and_statistics_must_agree_on_the_domain() -> None:
    stats = fresh("signed_log", "logit")
    with pytest.raises(ValueError, match="score_domain: found 'sigmoid', need 'logit', that of stats"):
        route(torch.zeros(2, EXPERTS), stats.bias_LE[0], K, stats=stats.layer(0))
    with pytest.raises(ValueError, match=r"score_domain: found 'tanh', need one of \['sigmoid', 'logit'\]"):
        route(torch.zeros(2, EXPERTS), stats.bias_LE[0], K, score_domain="tanh")
