"""SiTU-GLU: values, both branches' gradients, range, and what the backward pass keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trine.ops import BackendUnavailable
from trine.ops.situ import situ_glu

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def forward_backward(gate: Tensor, up: Tensor, dy: Tensor, **keywords: object) -> list[Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    y = situ_glu(gate, up, **keywords)  # type: ignore[arg-type]
    return [y.detach(), *torch.autograd.grad(y, [gate, up], dy)]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 8), (2, 0, 5), (2, 65, 129), (5, 70000)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_value_and_gradients_match_the_definition(shape: tuple[int, ...], size: float, dtype: torch.dtype) -> None:
    gate, up, dy = (torch.randn(shape, dtype=dtype) * s for s in (size, size, 1.0))
    got = forward_backward(gate, up, dy)
    exact = forward_backward(gate.double(), up.double(), dy.double(), backend="reference")
    for name, a, b in zip(["y", "dgate", "dup"], got, exact, strict=True):
        assert a.shape == b.shape and a.dtype == dtype
        # A saturated branch has slope 1 - t^2: what is left of 1 is measured against the 1 (times dy), not itself.
        size_of_terms = float(b.norm()) if name == "y" else max(float(b.norm()), float(dy.norm()))
        assert float((a - b).norm()) <= TOLERANCE[dtype] * size_of_terms, name


def test_each_value_near_zero_is_relatively_exact() -> None:
    """A tanh made from a logistic function has an absolute error near 0, which the up branch multiplies by 25."""
    x = torch.cat([torch.logspace(-30, 0, 400), -torch.logspace(-30, 0, 400)])
    y = situ_glu(torch.ones_like(x), x)
    exact = situ_glu(torch.ones_like(x).double(), x.double(), backend="reference")
    assert float(((y - exact) / exact).abs().max()) <= 1e-6
    y = situ_glu(x, torch.ones_like(x))
    exact = situ_glu(x.double(), torch.ones_like(x).double(), backend="reference")
    assert float(((y - exact) / exact).abs().max()) <= 1e-6


def test_soft_capped_where_swiglu_would_give_ten_thousand() -> None:
    """B020: gate 50, up 200 must give the cap, 100, not 10000."""
    assert situ_glu(torch.tensor(50.0).double(), torch.tensor(200.0).double()).item() == pytest.approx(
        99.99998, abs=5e-6
    )


def test_both_branches_are_differentiated() -> None:
    """B021: the gate's product rule and the up branch's tanh; values and slopes by hand."""
    gate = torch.tensor([8.0, -3.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    up = torch.tensor([100.0, 2.0, -30.0, 1.0], dtype=torch.float64, requires_grad=True)
    y = situ_glu(gate, up)
    assert y.tolist() == pytest.approx([96.305794, -0.240467, -33.932364, 0.0], abs=1e-6)
    dgate, dup = torch.autograd.grad(y.sum(), [gate, up])
    assert dgate[3].item() == pytest.approx(0.4997335, abs=1e-7)
    assert dup[3].item() == 0.0
    inputs = tuple(torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(situ_glu, inputs)


def test_large_betas_give_swiglu() -> None:
    gate, up, dy = (torch.randn(100, dtype=torch.float64) * 3 for _ in range(3))
    got = forward_backward(gate, up, dy, beta=1e6, linear_beta=1e6)
    gate, up = gate.requires_grad_(), up.requires_grad_()
    y = torch.nn.functional.silu(gate) * up
    for a, b in zip(got, [y, *torch.autograd.grad(y, [gate, up], dy)], strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_huge_inputs_stay_finite_and_capped() -> None:
    values = torch.tensor([-torch.inf, -3e38, -1e4, -90.0, 0.0, 90.0, 1e4, 3e38, torch.inf])
    gate, up = (v.flatten() for v in torch.meshgrid(values, values, indexing="ij"))
    for part in forward_backward(gate, up, torch.ones_like(gate)):
        assert bool(part.isfinite().all())
    assert float(situ_glu(gate, up).abs().max()) <= 100.0


def test_gradients_are_bounded() -> None:
    """Lipschitz, unlike SwiGLU: |dy/dgate| <= 0.926 * 25 and |dy/dup| <= 4."""
    gate, up = torch.randn(20000) * 20, torch.randn(20000) * 50
    _, dgate, dup = forward_backward(gate, up, torch.ones_like(gate))
    assert float(dgate.abs().max()) <= 0.9262 * 25 and float(dup.abs().max()) <= 4.0


def test_backward_keeps_only_gate_and_up() -> None:
    gate, up = torch.randn(40, 30, requires_grad=True), torch.randn(40, 30, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        situ_glu(gate, up)
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()}


@pytest.mark.usefixtures("tiles")
def test_strided_halves_of_one_projection_and_expanded_inputs() -> None:
    both = torch.randn(65, 2 * 33, dtype=torch.float64)
    kept = both.clone()
    gate, up = both.chunk(2, -1)
    dy = torch.randn(65, 33, dtype=torch.float64)
    for g, u in [(gate, up), (gate.t(), up.t()), (gate[:1].expand(65, 33), up)]:
        d = dy.t() if g.shape == (33, 65) else dy
        for a, b in zip(forward_backward(g, u, d), forward_backward(g, u, d, backend="reference"), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    assert torch.equal(both, kept)


def test_bfloat16_is_evaluated_in_float32() -> None:
    gate, up = torch.randn(500).bfloat16() * 3, torch.randn(500).bfloat16() * 10
    y, dgate, dup = forward_backward(gate, up, torch.ones(500, dtype=torch.bfloat16))
    exact = forward_backward(gate.double(), up.double(), torch.ones(500).double(), backend="reference")
    for a, b in zip((y, dgate, dup), exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert bool(((a - b).abs() <= 2**-8 * b.abs() * 1.01).all())  # one rounding
    assert situ_glu(gate, up.float()).dtype == torch.float32


@pytest.mark.usefixtures("tiles")
def test_one_gradient_alone() -> None:
    gate, up = torch.randn(9, requires_grad=True), torch.randn(9)
    (dgate,) = torch.autograd.grad(situ_glu(gate, up).sum(), [gate])
    assert torch.allclose(dgate, forward_backward(gate, up, torch.ones(9))[1])
    (dup,) = torch.autograd.grad(situ_glu(up, gate).sum(), [gate])
    assert torch.allclose(dup, forward_backward(up, gate, torch.ones(9))[2])


@pytest.mark.usefixtures("card_tiles")
def test_few_calls_on_a_card_for_any_number_of_tokens(dispatched: Callable[[Callable[[], object]], int]) -> None:
    counts = []
    for tokens in (40, 4000):
        gate, up, dy = (torch.randn(tokens, 64) for _ in range(3))
        counts.append(dispatched(lambda: forward_backward(gate, up, dy)))  # noqa: B023
    assert counts[0] == counts[1] <= 50


def test_golden_errors() -> None:
    x = torch.randn(2, 3)

    def message(*arguments: object, **keywords: object) -> str:
        with pytest.raises(ValueError) as caught:
            situ_glu(*arguments, **keywords)  # type: ignore[arg-type]
        return str(caught.value)

    assert message(x, x[:1]) == "up: found shape (1, 3), need that of gate, (2, 3)"
    assert message(x.int(), x) == "gate: found dtype torch.int32, need a floating dtype"
    assert message(x, x, beta=0.0) == "beta: found 0.0, need a positive finite number"
    assert message(x, x, linear_beta=float("inf")) == "linear_beta: found inf, need a positive finite number"
    with pytest.raises(BackendUnavailable, match="situ_glu: backend 'triton' cannot run here"):
        situ_glu(x, x, backend="triton")
