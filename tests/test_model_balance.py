"""What balancing does inside the model: auxiliary loss, stateless thresholds, recorded and replayed routing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trine.balance import AuxiliaryBalancing, install_policy
from trine.config import BalanceConfig, ModelConfig
from trine.data import IGNORE_INDEX, Batch
from trine.model import Model
from trine.nn import LatentMoE
from trine.ops.router import RouterStats
from trine.ops.router.auxiliary import relative_loads
from trine.train.workers import Workers

LAYERS = {"layers": 3, "mla_layers": (2,)}  # two MoE layers


@pytest.fixture
def model(tiny_config: Callable[..., ModelConfig]) -> Model:
    return Model(tiny_config(**LAYERS)).double()


def batch(tokens: int = 40, seed: int = 0) -> Batch:
    """Two sequences, a target that is unknown, weights that differ."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(97, (tokens + 1,), generator=generator)
    targets = ids[1:].clone()
    targets[3] = IGNORE_INDEX
    weights = torch.where(targets == IGNORE_INDEX, 0.0, torch.rand(tokens, generator=generator) + 0.5)
    bounds = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32)
    return Batch(ids[:-1], targets, weights, bounds, torch.zeros(2, dtype=torch.int64))


def halves(one: Batch) -> list[Batch]:
    cut = int(one.cu_seqlens_N1[1])
    return [
        Batch(
            *(one.tokens_T[part], one.targets_T[part], one.weights_T[part]),
            torch.tensor([0, len(one.tokens_T[part])], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
        )
        for part in (slice(0, cut), slice(cut, None))
    ]


def gradients(model: Model, *batches: Batch) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    for one in batches:
        model.loss(one)[0].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def press(model: Model, weight: float) -> None:
    policy = install_policy(model, BalanceConfig(policy="aux", aux_weight=weight))
    assert isinstance(policy, AuxiliaryBalancing)
    policy.pressure.relative_LE = relative_loads(torch.tensor([[9, 1, 0, 4, 4, 2, 8, 4], [1, 1, 30, 0, 2, 2, 2, 2]]))


def test_auxiliary_gradient_is_that_of_its_definition_and_the_value_stays(model: Model) -> None:
    """Against autograd in float64, through everything below the routers."""
    one = batch()
    plain, _ = model.loss(one)
    without = gradients(model, one)
    press(model, 0.7)
    pressed, _ = model.loss(one)
    assert float(pressed.detach()) == float(plain.detach())
    found = gradients(model, one)

    logits: list[Tensor] = []
    hooks = [
        layer.feed_forward.register_forward_pre_hook(
            lambda moe, args: logits.append(args[0] @ moe.router.weight.t())  # type: ignore[func-returns-value]
        )
        for layer in model.layers[1:]
    ]
    model.zero_grad(set_to_none=True)
    model(one.tokens_T, one.cu_seqlens_N1)
    expected = torch.zeros((), dtype=torch.float64)
    for z_TE, f_E in zip(logits, model.pressure.relative_LE.double(), strict=True):
        s_TE = torch.sigmoid(z_TE)
        p_TE = s_TE / s_TE.sum(1, keepdim=True)
        expected = expected + (one.weights_T.double()[:, None] * p_TE * f_E).sum()
    (0.7 * expected).backward()
    for hook in hooks:
        hook.remove()
    seen = 0
    for name, parameter in model.named_parameters():
        if name not in found:
            assert parameter.grad is None
            continue
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name] - without[name], own, rtol=1e-6, atol=1e-9)
        seen += bool(own.abs().max() > 1e-6)
    assert seen > 20, "not the routers alone"


def test_auxiliary_gradient_of_a_step_does_not_depend_on_its_micro_batches(model: Model) -> None:
    press(model, 0.5)
    one = batch()
    whole, parts = gradients(model, one), gradients(model, *halves(one))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-9, atol=1e-11)


def test_auxiliary_gradient_survives_recomputation_and_threads(tiny_config: Callable[..., ModelConfig]) -> None:
    model = Model(tiny_config(**LAYERS))
    press(model, 0.5)
    model.train()
    parts = halves(batch())
    kept = gradients(model, *parts)
    model.recompute = True
    again = gradients(model, *parts)
    model.recompute = False
    workers = Workers(model, 2)
    model.zero_grad(set_to_none=True)
    workers.accumulate(parts, 1.0, lambda: None)
    for name, parameter in model.named_parameters():
        if name in kept:
            torch.testing.assert_close(again[name], kept[name], rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(parameter.grad, kept[name], rtol=0, atol=0)


def test_auxiliary_loss_is_for_training_and_a_pass_of_its_own_leaves_nothing(model: Model) -> None:
    one = batch()
    plain = gradients(model, one)
    press(model, 0.5)
    pressed = gradients(model, one)
    model(one.tokens_T, one.cu_seqlens_N1)  # leaves its tokens' losses, of another pass
    assert all(torch.equal(value, pressed[name]) for name, value in gradients(model, one).items())
    model.eval()
    assert all(torch.equal(value, plain[name]) for name, value in gradients(model, one).items())


@pytest.mark.parametrize("mode", ["drop", "reassign", "dual"])
def test_stateless_routing_is_for_training(model: Model, mode: str) -> None:
    """In evaluation and decoding a token's experts do not depend on what else is in its batch."""
    install_policy(model, BalanceConfig(policy="stateless", mode=mode))  # type: ignore[arg-type]
    model.router_stats.bias_LE.normal_(std=0.2)
    first, second = halves(batch())
    together = torch.cat((first.tokens_T, second.tokens_T))
    bounds = torch.tensor([0, first.tokens, len(together)], dtype=torch.int32)

    def choices(tokens_T: Tensor, cu_seqlens_N1: Tensor | None = None) -> Tensor:
        with model.recorded_routing() as passes:
            model(tokens_T, cu_seqlens_N1)
        return passes[0][:, : first.tokens]

    model.train()
    assert not torch.equal(choices(first.tokens_T), choices(together, bounds))
    with torch.no_grad():
        assert torch.equal(choices(first.tokens_T), choices(together, bounds))
    model.eval()
    assert torch.equal(choices(first.tokens_T), choices(together, bounds))
    assert int(choices(first.tokens_T).min()) >= 0, "nothing is dropped"


@pytest.mark.parametrize("policy", ["qb", "stateless", "aux"])
@pytest.mark.parametrize("recompute", [False, True])
def test_eval_and_recomputation_count_nothing(model: Model, policy: str, recompute: bool) -> None:
    """B015 and B016 for what acts in the forward pass too."""
    install_policy(model, BalanceConfig(policy=policy))  # type: ignore[arg-type]
    one = batch()
    model.train()
    model.recompute = recompute
    model.loss(one)[0].backward()
    counts = model.router_stats.counts.clone()
    assert model.router_stats.loads_LE.sum(1).tolist() == [80, 80]
    model.eval()
    for _ in range(3):
        model.loss(one)[0].backward()
    with torch.no_grad():
        model.train()
        model.loss(one)
    assert torch.equal(model.router_stats.counts, counts)


def replayed_layer() -> tuple[LatentMoE, RouterStats]:
    """8 experts and a router whose live top-2 of the input [1, 0, ...] is {0, 1}."""
    moe = LatentMoE(8, experts=8, top_k=2, latent_width=4, expert_width=4, shared_experts=0).double()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:, 0] = torch.tensor([2.0, 1.5, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0])
    stats = RouterStats.allocate(1, 8)
    moe.stats = stats.layer(0)
    return moe, stats


def test_replayed_experts_get_live_weights_and_gradients() -> None:
    """B034: weights from the full live scores, normalised over the replayed experts."""
    moe, stats = replayed_layer()
    x_TD = torch.zeros(1, 8, dtype=torch.float64)
    x_TD[0, 0] = 1.0
    given: dict[str, Tensor] = {}

    def grouped(u: Tensor, ids_TK: Tensor, weights_TK: Tensor, *rest: object, **dials: object) -> Tensor:
        given.update(ids=ids_TK, weights=weights_TK)
        return u * weights_TK[:, :1] + u * u * weights_TK[:, 1:]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trine.nn.moe.grouped_experts", grouped)
        moe(x_TD)
        assert given["ids"].tolist() == [[0, 1]]
        moe(x_TD, None, torch.tensor([[0, 5]])).sum().backward()
    s_E = torch.sigmoid(moe.router.weight[:, 0].detach())
    assert given["ids"].tolist() == [[0, 5]]
    torch.testing.assert_close(given["weights"].detach()[0], s_E[[0, 5]] / s_E[[0, 5]].sum())
    gradient_E = moe.router.weight.grad[:, 0]
    assert float(gradient_E[5].abs()) > 1e-6 and gradient_E.nonzero()[:, 0].tolist() == [0, 5]
    assert int(stats.counters_LF[0, 1]) == 1, "the live pass alone is in the histogram"


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_uses_exactly_the_recorded_choices(model: Model, recompute: bool) -> None:
    """Also in recomputation and in each micro-batch; what was recorded replays to the same numbers."""
    install_policy(model, BalanceConfig(policy="replay"))
    parts = halves(batch())
    with model.recorded_routing() as passes:
        live = [model.loss(one)[0] for one in parts]
    assert [one.shape for one in passes] == [(2, one.tokens, 2) for one in parts]
    model.recompute = recompute
    used: list[Tensor] = []
    original = LatentMoE._route

    def spy(moe: LatentMoE, *args: Tensor) -> object:
        routing = original(moe, *args)
        used.append(routing.ids_TK)
        return routing

    model.router_stats.bias_LE.normal_()  # live choices would be others now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentMoE, "_route", spy)
        for one, ids_LTK, loss in zip(parts, passes, live, strict=True):
            used.clear()
            found, _ = model.loss(one, replay_LTK=ids_LTK)
            torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
            found.backward()
            assert len(used) == (4 if recompute else 2)
            for i, ids_TK in enumerate(used[:2] + used[:1:-1]):  # the backward pass goes the other way
                assert torch.equal(ids_TK, ids_LTK[i % 2])
    assert all(layer.feed_forward.router.weight.grad.any() for layer in model.layers[1:])


def test_bad_replay(model: Model) -> None:
    one = batch()
    with pytest.raises(
        ValueError, match=r"replay_LTK: found shape \(3, 40, 2\), need \[2, T, k\], one row a MoE layer"
    ):
        model.loss(one, replay_LTK=torch.zeros(3, 40, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="ids_TK: found an expert twice in one row, need different experts"):
        model.loss(one, replay_LTK=torch.zeros(2, 40, 2, dtype=torch.int64))
