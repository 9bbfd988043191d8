"""The gates by themselves: values, slopes, and bits that do not depend on where an element stands."""

from __future__ import annotations

import math

import pytest
import torch

from trine.ops.kda import bounded_gate
from trine.ops.kda.gate import log_decay, sigmoid, softplus


def test_bounded_gate_values() -> None:
    x = torch.tensor([[0.0, 1.0, -200.0, 200.0]])
    g = bounded_gate(x, torch.tensor([math.log(2.0)]), torch.tensor([0.5, 0.5, 0.5, 0.5]), lower_bound=-4.0)
    expected = torch.tensor([[-4 / (1 + math.exp(-1)), -4 / (1 + math.exp(-3)), 0.0, -4.0]])
    assert torch.allclose(g, expected, rtol=1e-6, atol=0)


def test_bounded_gate_without_parameters_and_in_half_precision_is_float32() -> None:
    x = torch.randn(3, 2, 4).bfloat16()
    g = bounded_gate(x)
    assert g.dtype == torch.float32
    assert torch.allclose(g, -5 * torch.sigmoid(x.float()), rtol=1e-6)


def test_bounded_gate_gradients() -> None:
    x, A, b = torch.randn(5, 2, 3).double(), torch.randn(2).double(), torch.randn(2, 3).double()
    leaves = [t.requires_grad_() for t in (x, A, b)]
    assert torch.autograd.gradcheck(bounded_gate, leaves)
    assert torch.autograd.gradcheck(lambda *t: log_decay(*t, "softplus", -5.0), leaves)


def test_the_slope_of_a_saturated_gate_keeps_its_relative_accuracy() -> None:
    for value in (30.0, -30.0, 85.0):
        x = torch.full((1, 1), value, requires_grad=True)
        bounded_gate(x).sum().backward()
        assert x.grad is not None
        assert x.grad.item() == pytest.approx(-5 * math.exp(-abs(value)), rel=1e-5)


@pytest.mark.parametrize("function", [sigmoid, softplus])
def test_bits_do_not_depend_on_the_place_in_the_array(function: object) -> None:
    assert callable(function)
    x = 5 * torch.randn(1000)
    whole = function(x)
    for n in range(1, 100):
        assert torch.equal(function(x[:n].clone()), whole[:n])


def test_sigmoid_and_softplus_values() -> None:
    x = torch.linspace(-95, 95, 1001, dtype=torch.float64)
    assert torch.allclose(sigmoid(x), torch.sigmoid(x), rtol=1e-14)
    assert torch.allclose(softplus(x), torch.logaddexp(x, torch.zeros_like(x)), rtol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3),), r"gate: found shape \(3,\), need \[\.\.\., H, K\]"),
        ((torch.zeros(2, 3), torch.zeros(3)), r"A_log: found shape \(3,\), need \[2\]"),
        ((torch.zeros(2, 3), None, torch.zeros(5)), r"dt_bias: found shape \(5,\), need \[2, 3\] or flattened"),
        ((torch.zeros(2, 3), None, None, 0.0), r"lower_bound: found 0.0, need a negative number"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bounded_gate(*arguments)  # type: ignore[arg-type]
