"""Infinite decays are resets; NaN and infinite rows reach nothing before them, and are not hidden behind them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trine.ops.kda import kda, kda_pairwise, kda_reference, kda_step

KINDS = ("bounded", "softplus", "log_decay")
PER_TOKEN = ("q", "k", "v", "gate", "beta")


def draw(lab: SimpleNamespace, tokens: int, kind: str, **sizes: int) -> dict[str, Tensor]:
    inputs = lab.cast(lab.draw(tokens, **{"key": 20, "value": 12, **sizes}), torch.float32)
    if kind == "log_decay":
        del inputs["A_log"], inputs["dt_bias"]
        inputs["gate"] = -inputs["gate"].abs()
    return inputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("function", [kda, kda_pairwise])
def test_an_infinite_log_decay_forgets_the_state(lab: SimpleNamespace, function: object, dtype: torch.dtype) -> None:
    inputs = lab.draw(40, key=10, value=8)
    del inputs["A_log"], inputs["dt_bias"]
    inputs["gate"] = -inputs["gate"].abs()
    inputs["gate"][:, 20] = -math.inf
    inputs["gate"][:, 33, 1, 4] = -math.inf
    expected = lab.run(kda_reference, inputs, gate_kind="log_decay")
    found = lab.run(function, lab.cast(inputs, dtype), gate_kind="log_decay")
    assert all(x.isfinite().all() for x in expected.values())
    sizes = {"d_gate": expected["d_q"].new_tensor(100.0)}
    assert max(lab.relative_errors(found, expected, sizes).values()) < (1e-5 if dtype == torch.float32 else 1e-12)
    assert not found["d_gate"][:, 20].any() and not found["d_gate"][:, 33, 1, 4].any()
    assert not found["d_initial_state"].isnan().any()
    alone = {name: x[:, 20:] if name in PER_TOKEN else x for name, x in lab.cast(inputs, dtype).items()}
    del alone["initial_state"]
    alone["gate"] = alone["gate"].clamp(min=-1e4)
    out, _ = kda_reference(**alone, gate_kind="log_decay")
    torch.testing.assert_close(found["out"][:, 20:], out, rtol=0, atol=1e-5)


def test_an_infinite_gate_input_saturates(lab: SimpleNamespace) -> None:
    for kind in ("bounded", "softplus"):
        inputs = draw(lab, 40, kind)
        inputs["gate"][:, 20] = math.inf
        inputs["gate"][:, 25, 0] = -math.inf
        finite = dict(inputs, gate=inputs["gate"].clamp(-1e4, 1e4))
        found, expected = lab.run(kda, inputs, gate_kind=kind), lab.run(kda, finite, gate_kind=kind)
        assert all(x.isfinite().all() for x in found.values()), kind
        assert max(lab.relative_errors(found, expected).values()) < 1e-6
        out, _ = kda_reference(**inputs, gate_kind=kind)
        torch.testing.assert_close(found["out"], out, rtol=0, atol=1e-5)


def test_a_decay_that_is_zero_has_no_gradient_by_its_size(lab: SimpleNamespace) -> None:
    inputs = lab.draw(48, key=10, value=8, state=False)
    inputs["gate"] = inputs["gate"].abs() + 1e4
    expected = lab.run(kda_reference, inputs, gate_kind="softplus")
    assert not expected["d_A_log"].any()
    found = lab.run(kda, lab.cast(inputs, torch.float32), gate_kind="softplus")
    for name in ("d_A_log", "d_dt_bias", "d_gate"):
        assert not found[name].any(), name
    assert max(lab.relative_errors(found, expected).values()) < 1e-5


def prefix(
    inputs: dict[str, Tensor], t: int, weights: Tensor, function: object, **options: object
) -> dict[str, Tensor]:
    """Outputs before t and the gradients of a loss on them."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out, _ = function(**leaves, **options)
    gradients = torch.autograd.grad((out[:, :t] * weights[:, :t]).sum(), list(leaves.values()))
    return {"out": out[:, :t].detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [0, 20, 32])
@pytest.mark.parametrize("function", [kda, kda_pairwise])
def test_a_poisoned_row_changes_no_bit_before_it(lab: SimpleNamespace, function: object, t: int, kind: str) -> None:
    inputs = draw(lab, 40, kind, value_heads=4)
    weights = torch.randn(inputs["v"].shape)
    for name in PER_TOKEN:
        for value in (math.nan, math.inf, -math.inf):
            if kind == "log_decay" and name == "gate" and value == math.inf:
                continue  # refused by name
            bad = dict(inputs, **{name: inputs[name].clone()})
            bad[name][:, t, 0] = value
            bad[name][:, t + 3 :, 1] = value
            edited = dict(inputs, **{name: inputs[name].clone()})
            edited[name][:, t] *= 0.5
            expected = prefix(edited, t, weights, function, gate_kind=kind)
            found = prefix(bad, t, weights, function, gate_kind=kind)
            for key, want in expected.items():
                assert torch.equal(found[key], want), (name, value, key)


def test_poison_stays_in_its_sequence_head_and_column_and_is_not_hidden(lab: SimpleNamespace) -> None:
    packed = lab.cu(25, 0, 40)
    inputs = draw(lab, 65, "bounded", sequences=3)
    clean, states = kda(**inputs, cu_seqlens=packed, output_final_state=True)
    bad = {name: x.clone() for name, x in inputs.items()}
    bad["k"][0, 5, 0, 3] = math.nan
    bad["v"][0, 40, 1, 2] = math.inf
    bad["q"][0, 60, 1, 0] = -math.inf
    out, final = kda(**bad, cu_seqlens=packed, output_final_state=True)
    poisoned = torch.zeros_like(out, dtype=torch.bool)
    poisoned[0, 5:25, 0] = poisoned[0, 40:, 1, 2] = poisoned[0, 60, 1] = True
    assert torch.equal(out.isnan(), poisoned)
    assert torch.equal(out[~poisoned], clean[~poisoned])
    lost = torch.zeros_like(final, dtype=torch.bool)
    lost[0, 0], lost[2, 1, :, 2] = True, True
    assert torch.equal(final.isnan(), lost) and torch.equal(final[~lost], states[~lost])
    found = lab.run(kda, bad, cu_seqlens=packed)
    for name in ("d_k", "d_v", "d_gate", "d_beta"):
        assert found[name][0, :5, 0].isnan().all(), f"{name}: a loss on poisoned rows must not look sound"
        assert found[name][0, 25:, 0].isfinite().all(), f"{name}: the other sequence"


def test_the_step_forgets_at_an_infinite_log_decay(lab: SimpleNamespace) -> None:
    inputs = lab.draw(1, batch=2, key=6, value=5)
    state = inputs["initial_state"]
    step = [inputs[name].squeeze(1) for name in PER_TOKEN]
    step[3] = torch.full_like(step[3], -math.inf)
    out, new = kda_step(*step, state, gate_kind="log_decay")
    expected, fresh = kda_step(*step, torch.zeros_like(state), gate_kind="log_decay")
    assert torch.equal(out, expected) and torch.equal(new, fresh)
