"""The whole model: one computation, however it is cut, packed or recomputed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trine.cache import HybridCache
from trine.config import PRESETS, ModelConfig, preset
from trine.data import Batch
from trine.model import BIAS_KEY, Model, info
from trine.nn import GatedMLA, KimiDeltaAttention, LatentMoE
from trine.nn.depth import DepthMix

Tiny = Callable[..., ModelConfig]
LENGTHS = (5, 17, 1, 41)


def bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def awake(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    """A model whose zero-initialised parts are not zero, so that nothing is trivially equal."""
    model = Model(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query", "A_log")) or "_gains" in name:
                parameter.normal_(std=0.2)
        model.router_stats.bias_LE.normal_(std=0.05)
    return model


def batch_of(tokens_T: Tensor, lengths: tuple[int, ...], weights_T: Tensor | None = None) -> Batch:
    targets_T = torch.roll(tokens_T, -1)
    return Batch(
        tokens_T=tokens_T,
        targets_T=targets_T,
        weights_T=torch.ones(tokens_T.numel()) if weights_T is None else weights_T,
        cu_seqlens_N1=bounds(lengths),
        source_N=torch.zeros(len(lengths), dtype=torch.int64),
    )


def gradients(model: Model) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("smoke", 0.47e6, 0.28e6),
        ("laptop", 2.28e6, 1.51e6),
        ("130m", 397.2e6, 128.7e6),
        ("400m", 1389.2e6, 406.1e6),
        ("1b", 4070.2e6, 1162.6e6),
        ("k3", 2.7795e12, 104.19e9),
    ],
)
def test_presets_have_the_tabled_sizes(name: str, total: float, active: float) -> None:
    counted = info(preset(name))
    assert counted["total"] == pytest.approx(total, rel=1e-2 if total < 1e7 else 1e-3 if total < 1e10 else 2e-5)
    assert counted["active"] == pytest.approx(active, rel=1e-2 if total < 1e7 else 1e-3 if total < 1e10 else 5e-5)
    assert sum(counted["parts"].values()) == counted["total"]


def test_k3_parts_are_the_reports() -> None:
    counted = info(preset("k3"))
    assert counted["parts"]["kda"] / 69 == pytest.approx(443.74e6, rel=1e-5)
    assert counted["parts"]["mla"] / 24 == pytest.approx(232.20e6, rel=1e-4)
    assert counted["parts"]["experts"] == 92 * 896 * 3 * 3584 * 3072
    assert counted["parts"]["dense"] == 3 * 33792 * 7168
    assert counted["parts"]["depth_queries"] == 2 * 7168 * 187
    assert counted["latent_bytes_per_token"] == 27648
    assert counted["kda_state_bytes"] == 69 * 4 * (96 * 128 * 128 + 3 * 3 * 12288)


# Failure B025: document boundaries reach one part of the model but not another, so documents leak.
def test_b025_packed_documents_equal_each_alone(tiny_config: Tiny) -> None:
    model = awake(tiny_config())
    tokens_T = torch.randint(97, (sum(LENGTHS),))
    model.loss(batch_of(tokens_T, LENGTHS))[0].backward()
    packed_TV = model.logits(model(tokens_T, bounds(LENGTHS)))
    packed = gradients(model)
    model.zero_grad()
    alone = []
    targets_T = torch.roll(tokens_T, -1)
    for part_T, target_T in zip(tokens_T.split(LENGTHS), targets_T.split(LENGTHS), strict=True):
        alone.append(model.logits(model(part_T)))
        one = dataclasses.replace(batch_of(part_T, (part_T.numel(),)), targets_T=target_T)
        model.loss(one)[0].backward()
    torch.testing.assert_close(packed_TV, torch.cat(alone), rtol=1e-5, atol=1e-5)
    separate = gradients(model)
    assert packed.keys() == separate.keys()
    for name in packed:
        if not name.endswith("A_log"):
            assert relative(packed[name], separate[name]) < 1e-5, name
    # A_log has two numbers a layer, sums that may nearly cancel in one of them: all layers' are one vector.
    rates, others = (torch.cat([x for name, x in g.items() if name.endswith("A_log")]) for g in (packed, separate))
    assert relative(rates, others) < 1e-5


def test_b025_editing_one_document_leaves_the_others_alone(tiny_config: Tiny) -> None:
    model = awake(tiny_config()).eval()
    tokens_T = torch.randint(97, (sum(LENGTHS),))
    edited_T = tokens_T.clone()
    edited_T[2] = (edited_T[2] + 1) % 97
    with torch.no_grad():
        before_TD, after_TD = (model(t, bounds(LENGTHS)) for t in (tokens_T, edited_T))
    assert not torch.equal(before_TD[2], after_TD[2])
    assert torch.equal(before_TD[5:], after_TD[5:])


@pytest.mark.parametrize("residual", ["attn_res", "chunk", "shallow_to_deep", "plain"])
def test_no_token_sees_a_later_one(tiny_config: Tiny, residual: str) -> None:
    extra = {"shallow_layers": (0, 1), "deep_layers": (3, 4)} if residual == "shallow_to_deep" else {}
    model = awake(tiny_config(residual=residual, **extra), torch.float64).eval()
    tokens_T = torch.randint(97, (19,))
    embedded_TD = model.embed(tokens_T).detach().requires_grad_()
    model.embed.forward = lambda _: embedded_TD  # type: ignore[method-assign, assignment]
    hidden_TD = model(tokens_T)
    for t in (0, 7, 17):
        (grad_TD,) = torch.autograd.grad(hidden_TD[t].square().sum(), embedded_TD, retain_graph=True)
        assert bool((grad_TD[t + 1 :] == 0).all())
        assert bool((grad_TD[: t + 1].abs().sum(-1) > 0).all())


def test_appending_tokens_leaves_earlier_logits(tiny_config: Tiny) -> None:
    model = awake(tiny_config()).eval()
    tokens_T = torch.randint(97, (70,))
    with torch.no_grad():
        whole_TV, short_TV = model.logits(model(tokens_T)), model.logits(model(tokens_T[:41]))
    torch.testing.assert_close(whole_TV[:41], short_TV, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pieces", [(70,), (1,) * 70, (33, 37), (16, 16, 16, 16, 6), (1, 2, 3, 64)])
def test_one_shot_equals_any_way_of_cutting(tiny_config: Tiny, pieces: tuple[int, ...]) -> None:
    config = tiny_config()
    model = awake(config).eval()
    tokens_T = torch.randint(97, (70,))
    cache = HybridCache(config)
    with torch.no_grad():
        whole_TV = model.logits(model(tokens_T))
        cut_TV = torch.cat([model.logits(model(part_T, cache=cache)) for part_T in tokens_T.split(pieces)])
    torch.testing.assert_close(cut_TV, whole_TV, rtol=0, atol=2e-5)
    assert cache.lengths_N.tolist() == [70]


# Failure B007: token-by-token decoding drifts away from the chunked pass.
def test_b007_decoding_does_not_drift(tiny_config: Tiny) -> None:
    config = tiny_config()
    model = awake(config).eval()
    tokens_T = torch.randint(97, (256,))
    cache = HybridCache(config)
    with torch.no_grad():
        whole_TV = model.logits(model(tokens_T))
        parts = [model(tokens_T[:64], cache=cache), *(model(tokens_T[t : t + 1], cache=cache) for t in range(64, 256))]
        gap_T = (model.logits(torch.cat(parts)) - whole_TV).abs().amax(-1)
    assert float(gap_T.max()) < 1e-4
    assert float(gap_T[192:].mean()) < 3 * float(gap_T[64:128].mean()) + 1e-6
    states = [entry.state_NHKV for entry in cache.layers if hasattr(entry, "state_NHKV")]
    assert all(state.dtype == torch.float32 for state in states)


# Failure B010: the conv window is wrong or crashes when the prompt is shorter than the kernel.
@pytest.mark.parametrize("prompt", [(1,), (2,), (3,), (1, 1)])
def test_b010_prompts_shorter_than_the_convolution(tiny_config: Tiny, prompt: tuple[int, ...]) -> None:
    config = tiny_config()
    model = awake(config).eval()
    tokens_T = torch.randint(97, (sum(prompt) + 5,))
    cache = HybridCache(config)
    with torch.no_grad():
        whole_TV = model.logits(model(tokens_T))
        cut_TV = torch.cat([model.logits(model(p, cache=cache)) for p in tokens_T.split((*prompt, 1, 1, 1, 1, 1))])
    torch.testing.assert_close(cut_TV, whole_TV, rtol=0, atol=1e-5)


def test_segments_carry_gradients(tiny_config: Tiny) -> None:
    config = tiny_config()
    model = awake(config, torch.float64)
    model.eval()
    tokens_T = torch.randint(97, (48,))
    # Any weights will do but equal ones: the final norm makes the plain sum of squares a constant.
    w_TD = torch.randn(48, 64, dtype=torch.float64)
    (model(tokens_T) * w_TD).sum().backward()
    whole = gradients(model)
    model.zero_grad()
    cache = HybridCache(config, dtype=torch.float64)
    (torch.cat([model(part_T, cache=cache) for part_T in tokens_T.split((20, 28))]) * w_TD).sum().backward()
    cut = gradients(model)
    for name in whole:
        assert relative(cut[name], whole[name]) < 1e-10, name


# Failure B016: with recomputation the router counts twice.
def test_b016_recompute_changes_nothing_and_counts_once(tiny_config: Tiny) -> None:
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = awake(tiny_config())
        model.recompute = recompute
        tokens_T = torch.randint(97, (64,))
        loss, _ = model.loss(batch_of(tokens_T, (64,)))
        loss.backward()
        results.append((loss.detach(), gradients(model), model.router_stats.loads_LE.clone(), model))
    (loss_a, grads_a, loads_a, _), (loss_b, grads_b, loads_b, model) = results
    assert torch.equal(loss_a, loss_b)
    for name in grads_a:
        assert torch.equal(grads_a[name], grads_b[name]), name
    assert torch.equal(loads_a, loads_b)
    assert loads_b.sum(-1).tolist() == [64 * 2] * len(model.config.moe_layers)


# Failure B015: statistics collected in evaluation move the bias of the next training step.
def test_b015_evaluation_counts_nothing(tiny_config: Tiny) -> None:
    model = awake(tiny_config())
    tokens_T = torch.randint(97, (32,))
    model.eval()
    model(tokens_T)
    model.train()
    with torch.no_grad():
        model(tokens_T)
    assert int(model.router_stats.loads_LE.sum()) == 0
    model(tokens_T)
    assert int(model.router_stats.loads_LE.sum()) == 32 * 2 * 4


# Failure B013: "zero query equals a plain residual" holds for what norms read, up to their epsilon.
def test_step_0_equals_a_plain_prenorm_net(tiny_config: Tiny) -> None:
    torch.manual_seed(0)
    mixed = Model(tiny_config(norm_eps=0.0, mla_norm_eps=0.0)).double()
    plain = Model(tiny_config(norm_eps=0.0, mla_norm_eps=0.0, residual="plain")).double()
    shared = {k: v for k, v in mixed.state_dict().items() if not k.startswith("residual.")}
    plain.load_state_dict(shared)
    # The depth mix has its own epsilon in the key norm; with a zero query it does not matter.
    tokens_T = torch.randint(97, (33,))
    outputs = []
    for model in (mixed, plain):
        loss, _ = model.loss(batch_of(tokens_T, (33,)))
        loss.backward()
        outputs.append((model(tokens_T), gradients(model)))
    assert relative(outputs[0][0], outputs[1][0]) < 1e-12
    for name, gradient in outputs[1][1].items():
        assert relative(outputs[0][1][name], gradient) < 1e-10, name


@pytest.mark.parametrize("residual", ["chunk", "shallow_to_deep"])
def test_other_residuals_start_as_the_plain_net(tiny_config: Tiny, residual: str) -> None:
    extra = {"shallow_layers": (0, 1), "deep_layers": (3, 4)} if residual == "shallow_to_deep" else {}
    other = Model(tiny_config(residual=residual, **extra))
    plain = Model(tiny_config(residual="plain"))
    plain.load_state_dict({k: v for k, v in other.state_dict().items() if not k.startswith("residual.")})
    tokens_T = torch.randint(97, (33,))
    assert torch.equal(other(tokens_T), plain(tokens_T))
    with torch.no_grad():
        for parameter in other.residual.parameters():
            parameter.add_(0.3)
    assert relative(other(tokens_T), plain(tokens_T)) > 1e-3


def zero_kda(model: Model) -> None:
    for m in model.modules():
        if isinstance(m, KimiDeltaAttention):
            m.o_proj.weight.zero_()


def zero_mla(model: Model) -> None:
    for m in model.modules():
        if isinstance(m, GatedMLA):
            m.o_proj.weight.zero_()


def zero_kda_gates(model: Model) -> None:
    for m in model.modules():
        if isinstance(m, KimiDeltaAttention):
            assert m.gate_proj is not None
            m.gate_proj.weight.zero_()


def zero_mla_gates(model: Model) -> None:
    for m in model.modules():
        if isinstance(m, GatedMLA):
            assert m.gate_proj is not None
            m.gate_proj.weight.zero_()


def drop_latent_norm(model: Model) -> None:
    for m in model.modules():
        if isinstance(m, LatentMoE):
            m.latent_norm = None


def zero_shared_experts(model: Model) -> None:
    for m in model.modules():
        if isinstance(m, LatentMoE):
            assert m.shared is not None
            m.shared.down_proj.weight.zero_()


def zero_routed_experts(model: Model) -> None:
    for m in model.modules():
        if isinstance(m, LatentMoE):
            m.expert_down.zero_()


def zero_router_bias(model: Model) -> None:
    model.router_stats.bias_LE.zero_()


def zero_depth_queries(model: Model) -> None:
    for m in model.modules():
        if isinstance(m, DepthMix):
            m.query.zero_()


def zero_decay(model: Model) -> None:
    for m in model.modules():
        if isinstance(m, KimiDeltaAttention):
            m.decay_up.weight.zero_()


@pytest.mark.parametrize(
    "zero",
    [
        *(zero_kda, zero_mla, zero_kda_gates, zero_mla_gates, drop_latent_norm, zero_shared_experts),
        *(zero_routed_experts, zero_router_bias, zero_depth_queries, zero_decay),
    ],
)
def test_every_part_matters(tiny_config: Tiny, zero: Callable[[Model], None]) -> None:
    model = awake(tiny_config()).eval()
    tokens_T = torch.randint(97, (64,))
    with torch.no_grad():
        before_TV = model.logits(model(tokens_T))
        zero(model)
        assert relative(model.logits(model(tokens_T)), before_TV) > 1e-3


# Failure B012: the output gate vanished when the output projection was wrapped.
@pytest.mark.parametrize("kind", [KimiDeltaAttention, GatedMLA])
def test_b012_output_gate_lives_in_the_layer(tiny_config: Tiny, kind: type) -> None:
    model = awake(tiny_config(), torch.float64)
    layer = next(m for m in model.modules() if isinstance(m, kind))
    x_TD = torch.randn(9, 64, dtype=torch.float64)
    before_TD, _ = layer(x_TD)

    class Adapter(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner, self.down, self.up = inner, torch.randn(2, 32, dtype=torch.float64), torch.zeros(64, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + (x @ self.down.T) @ self.up.double().T

    inner, layer.o_proj = layer.o_proj, Adapter(layer.o_proj)
    assert torch.equal(layer(x_TD)[0], before_TD)
    layer.o_proj = inner

    class Closed(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((x.shape[0], 32), -50.0, dtype=x.dtype)

    layer.gate_proj = Closed()
    assert float(layer(x_TD)[0].abs().max()) < 1e-15


def test_output_gates_and_latent_norm_can_be_left_out(tiny_config: Tiny) -> None:
    model = Model(tiny_config(output_gates=False, latent_norm=False, shared_experts=0, gate_kind="softplus"))
    names = [n for n, _ in model.named_parameters()]
    assert not any("gate_proj" in n and "attention" in n for n in names)
    assert not any("latent_norm" in n or "shared" in n for n in names)
    assert bool(model(torch.randint(97, (20,))).isfinite().all())


# Failures B018 and B029: tensors that are float32 by contract follow a cast to 16 bits.
def test_b018_b029_casting_down_keeps_float32_tensors(tiny_config: Tiny) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Model(tiny_config())
    finally:
        torch.set_default_dtype(torch.float32)
    model.router_stats.bias_LE[0, 0] = 0.123456789
    exact = torch.tensor(0.123456789)
    attention = model.layers[0].attention
    with torch.no_grad():
        attention.A_log.fill_(exact)
    model.to(torch.bfloat16)
    assert model.layers[0].attention.qkv_proj.weight.dtype == torch.bfloat16
    for tensor in (attention.A_log, attention.dt_bias, attention.output_gain, attention.conv.weight):
        assert tensor.dtype == torch.float32
    assert torch.equal(attention.A_log, exact.expand(2))
    assert model.router_stats.bias_LE.dtype == torch.float32
    fresh = Model(tiny_config()).to(torch.bfloat16)
    fresh.load_state_dict(model.state_dict())
    assert fresh.router_stats.bias_LE[0, 0] == exact
    assert not fresh.router_stats.histograms_LEB.is_floating_point()
    hidden_TD = fresh(torch.randint(97, (20,)))
    assert hidden_TD.dtype == torch.bfloat16
    assert fresh.logits(hidden_TD).dtype == torch.float32


# Failure B024: the router bias is missing from the checkpoint, or counters hold garbage after meta construction.
def test_b024_router_bias_travels_and_meta_models_start_at_zero(tiny_config: Tiny) -> None:
    model = Model(tiny_config(), device="meta")
    assert model.router_stats.bias_LE.device.type == "meta"
    model.to_empty(device="cpu")
    model.init_weights()
    assert int(model.router_stats.loads_LE.abs().sum()) == 0
    assert int(model.router_stats.histograms_LEB.abs().sum()) == 0
    assert float(model.router_stats.bias_LE.abs().sum()) == 0
    assert bool(model(torch.randint(97, (20,))).isfinite().all())
    state = model.state_dict()
    del state[BIAS_KEY]
    with pytest.raises(RuntimeError, match=BIAS_KEY):
        Model(tiny_config()).load_state_dict(state)


# Failure B026: a batch in which every label is ignored gives 0/0.
def test_b026_all_labels_ignored(tiny_config: Tiny) -> None:
    model = awake(tiny_config())
    batch = dataclasses.replace(batch_of(torch.randint(97, (20,)), (20,)), targets_T=torch.full((20,), -100))
    loss, weight = model.loss(batch)
    assert float(loss) == 0.0
    assert float(weight) == 0.0
    loss.backward()
    assert all(bool((g == 0).all()) for g in gradients(model).values())


# Failure B027: averages of micro-batch means change the objective.
def test_b027_sums_over_micro_batches_equal_one_batch(tiny_config: Tiny) -> None:
    model = awake(tiny_config())
    tokens_T = torch.randint(97, (200,))
    weights_T = torch.cat([(torch.arange(100) < 10).float(), (torch.arange(100) < 90).float()])
    loss, weight = model.loss(batch_of(tokens_T, (100, 100), weights_T))
    assert float(weight) == 100.0
    loss.backward()
    whole = gradients(model)
    model.zero_grad()
    targets = torch.roll(tokens_T, -1).split(100)
    total = 0.0
    for part_T, target_T, w_T in zip(tokens_T.split(100), targets, weights_T.split(100), strict=True):
        part, _ = model.loss(dataclasses.replace(batch_of(part_T, (100,), w_T), targets_T=target_T))
        part.backward()
        total += float(part.detach())
    assert total == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, gradient in gradients(model).items():
        assert relative(gradient, whole[name]) < 1e-5, name


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([3, 97, 5], "tokens_T: found id 97 at position 1, need 0 to 96"),
        ([3, 4, -1], "tokens_T: found id -1 at position 2, need 0 to 96"),
    ],
)
def test_ids_out_of_range_are_named(tiny_config: Tiny, tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Model(tiny_config())(torch.tensor(tokens))
    assert str(error.value) == message


def test_float_tokens_and_bad_bounds_are_refused(tiny_config: Tiny) -> None:
    model = Model(tiny_config())
    with pytest.raises(ValueError, match=r"tokens_T: found torch\.float32"):
        model(torch.zeros(3))
    tokens_T = torch.zeros(10, dtype=torch.int64)
    for cu, message in [
        (torch.tensor([0.0, 10.0]), "cu_seqlens: found dtype torch.float32"),
        (torch.tensor([0, 7, 5, 10]), "cu_seqlens: found a decrease from 7 to 5 at index 2"),
        (torch.tensor([0, 8]), "cu_seqlens: found last value 8, need the number of tokens, 10"),
        (torch.tensor([1, 10]), "cu_seqlens: found first value 1, need 0"),
    ]:
        with pytest.raises(ValueError) as error:
            model(tokens_T, cu)
        assert str(error.value).startswith(message)


def test_empty_documents_change_nothing(tiny_config: Tiny) -> None:
    model = awake(tiny_config()).eval()
    tokens_T = torch.randint(97, (30,))
    with torch.no_grad():
        a_TD = model(tokens_T, bounds((12, 18)))
        b_TD = model(tokens_T, bounds((0, 12, 0, 0, 18, 0)))
    torch.testing.assert_close(a_TD, b_TD, rtol=0, atol=1e-6)


def test_init_follows_the_configuration() -> None:
    for name in ("smoke", "laptop"):
        model = Model(PRESETS[name])
        assert float(model.embed.weight.std()) == pytest.approx(1.0, rel=0.05)
        assert float(model.head.weight.std()) == pytest.approx(0.02, rel=0.05)
        for module in model.modules():
            if isinstance(module, KimiDeltaAttention):
                assert float(module.A_log.abs().max()) == 0.0
                assert -7.0 < float(module.dt_bias.min()) <= float(module.dt_bias.max()) < -2.2
            if isinstance(module, DepthMix):
                assert float(module.query.abs().max()) == 0.0
        assert float(model.router_stats.bias_LE.abs().max()) == 0.0
