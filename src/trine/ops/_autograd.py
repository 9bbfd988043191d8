"""Backward passes written by hand: differentiable once, in reverse mode; other derivatives raise, none is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def refuse_tangents(operator: str, tensors: Iterable[Tensor | None]) -> None:
    """For kernels that torch does not see: forward-mode differentiation would pass them by without a word.

    Raises:
        NotImplementedError: a tensor with a tangent (`torch.autograd.forward_ad`).
    """
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            f"{operator}: found a tensor with a forward-mode tangent; the kernels differentiate in reverse mode only, "
            'backend="reference" in both'
        )


class _OnlyOnce(torch.autograd.Function):
    """Gradients as they are; asked for their own gradients it raises."""

    @staticmethod
    def forward(ctx: Any, name: str, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(x.view_as(x) for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name}: found a gradient of a gradient, need a loss of first gradients: its backward pass can be "
            "differentiated once only"
        )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of an autograd function's ``backward``, computed without a graph; a second derivative raises.

    ``torch.autograd.function.once_differentiable`` raises only where the incoming gradient needs one itself. Under
    ``create_graph=True`` with a loss that is linear in the output it does not, and what a penalty on the gradient
    should have added would be missing silently.
    """

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return results
        several = results if isinstance(results, tuple) else (results,)
        found = [x.detach().requires_grad_() for x in several if x is not None]
        again = iter(_OnlyOnce.apply(backward.__qualname__.removesuffix(".backward"), *found) if found else ())
        bound = tuple(None if x is None else next(again) for x in several)
        return bound if isinstance(results, tuple) else bound[0]

    return run
