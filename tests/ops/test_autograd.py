"""`differentiable_once`: first gradients as they are, second ones refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trine.ops._autograd import differentiable_once


class Scaled(torch.autograd.Function):
    """a * b; the gradient of b is asked for only where it is needed."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, _: str) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        assert not torch.is_grad_enabled()
        a, b = ctx.saved_tensors
        return up * b, up * a if ctx.needs_input_grad[1] else None, None


class Doubled(torch.autograd.Function):
    """One gradient, not a tuple of them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return 2 * a

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, up: Tensor) -> Tensor:
        return 2 * up


@pytest.mark.parametrize("create_graph", [False, True])
def test_first_gradients_are_those_of_the_function(create_graph: bool) -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    da, db = torch.autograd.grad(Scaled.apply(a, b, "x").sum(), (a, b), create_graph=create_graph)
    assert torch.equal(da, b) and torch.equal(db, a) and da.requires_grad == create_graph
    (da,) = torch.autograd.grad(Scaled.apply(a, b.detach(), "x").sum(), a, create_graph=create_graph)
    assert torch.equal(da, b)
    (da,) = torch.autograd.grad(Doubled.apply(a).sum(), a, create_graph=create_graph)
    assert da.tolist() == [2, 2, 2]


@pytest.mark.parametrize("power", [1, 2])
def test_second_gradients_raise_whatever_the_loss(power: int) -> None:
    a = torch.randn(3, requires_grad=True)
    for call in (Doubled.apply, lambda x: Scaled.apply(x, torch.ones(3), "x")):
        loss = call(a).pow(power).sum()
        (da,) = torch.autograd.grad(loss, a, create_graph=True)
        loss.backward(retain_graph=True)  # the loss alone may still be differentiated
        with pytest.raises(RuntimeError, match=r"(Doubled|Scaled): found a gradient of a gradient"):
            (loss + da.square().sum()).backward()
