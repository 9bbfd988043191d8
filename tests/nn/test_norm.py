"""RMSNorm: the formula, and float32 statistics for 16-bit inputs."""

from __future__ import annotations

import torch

from trine.nn import RMSNorm


def test_formula_and_gradient() -> None:
    norm = RMSNorm(7, eps=1e-3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(7))
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(norm, (x,))


def test_16_bit_inputs_have_float32_statistics() -> None:
    norm = RMSNorm(4096).to(torch.bfloat16)
    x = torch.randn(3, 4096).to(torch.bfloat16)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert norm(x).dtype == torch.bfloat16
    # One rounding to bfloat16 is all the error there may be: half a unit of 2^-8.
    assert float(((norm(x).double() - exact) / exact).abs().max()) <= 2**-8


def test_large_and_zero_rows_stay_finite() -> None:
    x = torch.tensor([[1e18, -1e18], [0.0, 0.0]])
    torch.testing.assert_close(RMSNorm(2)(x), torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
