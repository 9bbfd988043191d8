"""The definition itself: against numbers worked out by hand, a loop over scalars, and finite differences."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from trine.ops.kda import kda_reference


def test_two_tokens_worked_out_by_hand() -> None:
    # S0 = [[1, 2], [3, 4]]; decay (1/2, 1/4) gives [[0.5, 1], [0.75, 1]].
    # k = e0, v = (10, 20), beta 1/2: row 0 moves half way to v: [[5.25, 10.5], [0.75, 1]]; o = 0.6 row 0 + 0.8 row 1.
    # Second token: decay (1, 1/2): [[5.25, 10.5], [0.375, 0.5]]; k = e1, v = (1, 1), beta 1: row 1 becomes (1, 1);
    # q = e1 reads it.
    x = {
        "q": [[0.6, 0.8], [0.0, 1.0]],
        "k": [[1.0, 0.0], [0.0, 1.0]],
        "v": [[10.0, 20.0], [1.0, 1.0]],
        "gate": [[math.log(0.5), math.log(0.25)], [0.0, math.log(0.5)]],
    }
    inputs = {name: torch.tensor(value, dtype=torch.float64).view(1, 2, 1, 2) for name, value in x.items()}
    out, state = kda_reference(
        **inputs,
        beta=torch.tensor([0.5, 1.0], dtype=torch.float64).view(1, 2, 1),
        gate_kind="log_decay",
        qk_norm=False,
        beta_is_logit=False,
        scale=1.0,
        initial_state=torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64).view(1, 1, 2, 2),
        output_final_state=True,
    )
    expected = torch.tensor([[0.6 * 5.25 + 0.8 * 0.75, 0.6 * 10.5 + 0.8 * 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert torch.allclose(out.view(2, 2), expected, rtol=0, atol=1e-14)
    assert state is not None
    assert torch.allclose(state.view(2, 2), torch.tensor([[5.25, 10.5], [1.0, 1.0]]).double(), rtol=0, atol=1e-14)


def test_bounded_gate_norm_and_beta_worked_out_in_scalars() -> None:
    # K = V = 1: everything is one number.
    q, k, v, x, b, A, bias, s0 = 2.0, -3.0, 0.7, 0.4, -0.3, 0.2, 0.1, 1.5
    g = -5 / (1 + math.exp(-math.exp(A) * (x + bias)))
    kn, qn = k / math.sqrt(k * k + 1e-6), q / math.sqrt(q * q + 1e-6)
    beta = 2 / (1 + math.exp(-b))
    decayed = math.exp(g) * s0
    s1 = decayed + beta * kn * (v - kn * decayed)
    one = {
        name: torch.full((1, 1, 1, 1), value).double() for name, value in {"q": q, "k": k, "v": v, "gate": x}.items()
    }
    out, state = kda_reference(
        **one,
        beta=torch.full((1, 1, 1), b).double(),
        A_log=torch.tensor([A]).double(),
        dt_bias=torch.tensor([bias]).double(),
        beta_max=2.0,
        initial_state=torch.full((1, 1, 1, 1), s0).double(),
        output_final_state=True,
    )
    # the inputs above went through float32
    assert state is not None and state.item() == pytest.approx(s1, rel=1e-6)
    assert out.item() == pytest.approx(qn * s1, rel=1e-6)


def test_softplus_gate_worked_out_in_scalars() -> None:
    x, A, bias, s0 = 0.4, 0.2, -0.1, 1.5
    g = -math.exp(A) * math.log1p(math.exp(x + bias))
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    _, state = kda_reference(
        zero,
        zero,
        zero,
        zero + x,
        torch.zeros(1, 1, 1, dtype=torch.float64),
        A_log=torch.tensor([A], dtype=torch.float64),
        dt_bias=torch.tensor([bias], dtype=torch.float64),
        gate_kind="softplus",
        initial_state=zero + s0,
        output_final_state=True,
    )
    assert state is not None and state.item() == pytest.approx(math.exp(g) * s0, rel=1e-14)


@pytest.mark.parametrize("kind", ["bounded", "softplus", "log_decay"])
def test_gradients_by_finite_differences(lab: SimpleNamespace, kind: str) -> None:
    inputs = lab.draw(3, heads=1, value_heads=2, key=3, value=2, sequences=3)
    if kind == "log_decay":
        del inputs["A_log"], inputs["dt_bias"]
        inputs["gate"] = -inputs["gate"].abs()
    names = list(inputs)
    packed = lab.cu(2, 0, 1)

    def function(*tensors: torch.Tensor) -> object:
        return kda_reference(
            **dict(zip(names, tensors, strict=True)), gate_kind=kind, cu_seqlens=packed, output_final_state=True
        )

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs.values()])


def test_packing_equals_each_document_alone(lab: SimpleNamespace) -> None:
    lengths = (4, 0, 7)
    inputs = lab.draw(11, sequences=3, key=5, value=3)
    out, final = kda_reference(**inputs, cu_seqlens=lab.cu(*lengths), output_final_state=True)
    start = 0
    for n, length in enumerate(lengths):
        per_token = ("q", "k", "v", "gate", "beta")
        alone = {name: x[:, start : start + length] if name in per_token else x for name, x in inputs.items()}
        alone["initial_state"] = inputs["initial_state"][n : n + 1]
        o, s = kda_reference(**alone, output_final_state=True)
        assert torch.equal(o, out[:, start : start + length])
        assert final is not None and torch.equal(s, final[n : n + 1])
        start += length
