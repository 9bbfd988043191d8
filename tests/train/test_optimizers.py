from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from trine.train.errors import RunError
from trine.train.optimizers import Optimizers, describe_groups, first_non_finite, head_blocks, place


def test_every_parameter_has_its_group_and_its_decay(tiny: SimpleNamespace) -> None:
    found = {one.name: (one.group, one.blocks, one.weight_decay) for one in place(tiny.model())}
    assert found == {
        "query": ("other", 1, False),
        "embed.weight": ("embeddings", 1, True),
        "attention.q_proj.weight": ("muon", 2, True),
        "attention.o_proj.weight": ("muon", 1, True),
        "attention.o_proj.bias": ("other", 1, False),
        "attention.gate.A_log": ("other", 1, False),
        "attention.gate.dt_bias": ("other", 1, False),
        "moe.expert_up": ("muon", 4, True),
        "moe.expert_down": ("muon", 4, True),
        "moe.router.weight": ("muon", 1, True),
        "norm.weight": ("other", 1, False),
        "norm.bias": ("other", 1, False),
        "conv.weight": ("other", 1, True),
        "head.weight": ("embeddings", 1, True),
    }


def test_gates_stay_float32_without_decay_outside_muon(tiny: SimpleNamespace) -> None:
    """B029: A_log and dt_bias follow bf16 and weight decay."""
    model = tiny.model(dtype=torch.bfloat16)
    placements = {one.name: one for one in place(model)}
    for name in ("attention.gate.A_log", "attention.gate.dt_bias"):
        assert placements[name].dtype == torch.float32
        assert placements[name].group == "other" and not placements[name].weight_decay
    assert placements["moe.expert_up"].dtype == torch.bfloat16
    optimizers = Optimizers(model, tiny.optimizer())
    no_decay = [g for o in optimizers._optimizers for g in o.param_groups if g["weight_decay"] == 0.0]
    names = {optimizers._names[p] for group in no_decay for p in group["params"]}
    assert names == {
        *("query", "norm.weight", "norm.bias", "attention.o_proj.bias"),
        *("attention.gate.A_log", "attention.gate.dt_bias"),
    }
    model.loss(tiny.batch(0))[0].backward()
    optimizers.step()
    stored = load(save({k: v.contiguous() for k, v in model.state_dict().items()}))
    assert stored["attention.gate.A_log"].dtype == stored["attention.gate.dt_bias"].dtype == torch.float32
    assert all(t.dtype == torch.float32 for t in optimizers.state_tensors().values())


def test_the_listing_names_every_parameter_once(tiny: SimpleNamespace) -> None:
    model = tiny.model()
    lines = describe_groups(model, tiny.optimizer()).splitlines()
    assert len(lines) == 1 + len(list(model.parameters()))
    (line,) = (line for line in lines if line.endswith("attention.q_proj.weight"))
    assert line.split() == ["muon", "0.02", "0.1", "2", "8x8", "float32", "attention.q_proj.weight"]
    (line,) = (line for line in lines if line.endswith("A_log"))
    assert line.split()[:3] == ["other", "0.01", "0"]


def test_head_blocks_of_nothing_are_refused(tiny: SimpleNamespace) -> None:
    model = tiny.model()
    model.attention.head_blocks = {"k_proj.weight": 2}
    with pytest.raises(ValueError, match=r"head_blocks: attention.k_proj.weight is no parameter"):
        head_blocks(model)


def test_frozen_parameters_are_left_alone(tiny: SimpleNamespace) -> None:
    model = tiny.model()
    model.embed.weight.requires_grad_(False)
    assert "embed.weight" not in {one.name for one in place(model)}


def test_rates_follow_the_factor(tiny: SimpleNamespace) -> None:
    optimizers = Optimizers(tiny.model(), tiny.optimizer())
    optimizers.set_factor(0.5)
    assert optimizers.lr == pytest.approx(0.01)
    assert sorted({g["lr"] for g in optimizers._groups}) == pytest.approx([0.005, 0.01])
    optimizers.set_factor(1.0)
    assert optimizers.lr == pytest.approx(0.02)


def test_muons_products_take_the_dtype_asked_for(tiny: SimpleNamespace) -> None:
    """bfloat16 moves the matrices by its rounding and nothing else; on a CPU the masters' own dtype is the default."""
    moved = {}
    for dtype in (None, torch.float32, torch.bfloat16):
        model = tiny.model()
        optimizers = Optimizers(model, tiny.optimizer(), muon_dtype=dtype)
        model.loss(tiny.batch(0))[0].backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizers.step()
        moved[dtype] = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    matrices = {one.name for one in place(tiny.model()) if one.group == "muon"}
    for name, exact in moved[torch.float32].items():
        assert torch.equal(moved[None][name], exact)
        gap = float((moved[torch.bfloat16][name] - exact).norm() / exact.norm())
        assert (1e-4 < gap < 0.1) if name in matrices else gap == 0, (name, gap)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.complex64, "bfloat16"])
@pytest.mark.parametrize("matrices", [True, False])
def test_muon_in_other_dtypes_is_refused(tiny: SimpleNamespace, dtype: Any, matrices: bool) -> None:
    """In float16 a matrix would overflow before it is scaled; the others have no products at all."""
    model = tiny.model() if matrices else nn.LayerNorm(3)
    with pytest.raises(ValueError, match=r"muon_dtype: found .*, need None, torch.bfloat16, torch.float32"):
        Optimizers(model, tiny.optimizer(), muon_dtype=dtype)


def test_norm_and_clip_are_global(tiny: SimpleNamespace) -> None:
    model = tiny.model()
    optimizers = Optimizers(model, tiny.optimizer())
    assert float(optimizers.grad_norm()) == 0.0
    model.loss(tiny.batch(0))[0].backward()
    need = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert float(optimizers.grad_norm()) == pytest.approx(need, rel=1e-6)
    optimizers.clip(need, need * 2)
    assert float(optimizers.grad_norm()) == pytest.approx(need, rel=1e-6)
    optimizers.clip(need, 0.125)
    assert float(optimizers.grad_norm()) == pytest.approx(0.125, rel=1e-5)


def test_bf16_gradients_add_up_in_float32(tiny: SimpleNamespace) -> None:
    """Sixteen micro-batches added in bf16 would lose digits; their sum must equal the sum taken in float32."""
    model = tiny.model(dtype=torch.bfloat16)
    optimizers = Optimizers(model, tiny.optimizer())
    need = torch.zeros(29, 8)
    for seed in range(16):
        model.loss(tiny.batch(seed))[0].backward()
        alone = tiny.model(dtype=torch.bfloat16)
        alone.loss(tiny.batch(seed))[0].backward()
        need += alone.head.weight.grad.float()
        assert model.head.weight.grad is None
    assert torch.equal(optimizers.gradients()["head.weight"], need)


def test_small_updates_of_bf16_weights_are_not_lost(tiny: SimpleNamespace) -> None:
    model = tiny.model(dtype=torch.bfloat16)
    optimizers = Optimizers(model, tiny.optimizer(weight_decay=0.0))
    optimizers.set_factor(1e-3)  # 2e-5 a step, below half a bf16 digit of a weight near 1
    before = model.embed.weight.detach().clone()
    for _ in range(200):
        model.embed.weight.backward(torch.ones_like(model.embed.weight))
        optimizers.step()
        optimizers.zero_grad()
    master = optimizers.state_tensors()["embed.weight/master"]
    assert float((before.float() - master).mean()) == pytest.approx(200 * 2e-5, rel=0.01)
    assert torch.equal(model.embed.weight.detach(), master.bfloat16())
    assert not torch.equal(model.embed.weight.detach(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_survives_a_file_and_training_goes_on_equal(tiny: SimpleNamespace, dtype: torch.dtype) -> None:
    def steps(model: torch.nn.Module, optimizers: Optimizers, seeds: range) -> None:
        for seed in seeds:
            model.loss(tiny.batch(seed))[0].backward()
            optimizers.step()
            optimizers.zero_grad()

    straight = tiny.model(dtype=dtype)
    steps(straight, Optimizers(straight, tiny.optimizer()), range(6))
    first = tiny.model(dtype=dtype)
    optimizers = Optimizers(first, tiny.optimizer())
    steps(first, optimizers, range(3))
    weights = {k: v.clone() for k, v in first.state_dict().items()}
    content = save({k: v.contiguous() for k, v in optimizers.state_tensors().items()})
    second = tiny.model(seed=9, dtype=dtype)
    second.load_state_dict(weights)
    optimizers = Optimizers(second, tiny.optimizer())
    optimizers.load_state_tensors(load(content))
    steps(second, optimizers, range(3, 6))
    for name, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update({"gone/momentum": torch.zeros(2)}), "gone/momentum belongs to no parameter"),
        (
            lambda s: s.update({"moe.expert_up/momentum": torch.zeros(2)}),
            r"moe.expert_up/momentum: found torch.float32",
        ),
        (lambda s: s.pop("head.weight/exp_avg"), r"head.weight: found \['exp_avg_sq', 'step'\], need \['exp_avg'"),
        (lambda s: s.update({"query/exp_avg": s["query/exp_avg"].double()}), "query/exp_avg: found torch.float64"),
        (lambda s: s.update({"query/max": s["query/exp_avg"]}), r"query: found .*'max'"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(tiny: SimpleNamespace, change: object, message: str) -> None:
    model = tiny.model()
    optimizers = Optimizers(model, tiny.optimizer())
    model.loss(tiny.batch(0))[0].backward()
    optimizers.step()
    before = {k: v.clone() for k, v in optimizers.state_tensors().items()}
    state = dict(before)
    change(state)  # type: ignore[operator]
    with pytest.raises(RunError, match=message):
        optimizers.load_state_tensors(state)
    assert all(torch.equal(v, before[k]) for k, v in optimizers.state_tensors().items())


def test_first_non_finite_names_it() -> None:
    tensors = {"a": torch.ones(3), "b": torch.tensor([1.0, math.inf]), "c": torch.tensor([math.nan])}
    assert first_non_finite(tensors) == "b"
    assert first_non_finite({"a": torch.ones(3)}) is None
    # a finite tensor whose sum overflows is not at fault
    assert first_non_finite({"a": torch.full((4,), 3e38)}) is None
