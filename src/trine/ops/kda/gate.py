"""Decay gates: from the gate's input to log-decays g <= 0, in float32 (float64 for float64 input).

Formulas: K3 report (arXiv 2607.24653) Eq. 5 for ``bounded``, Kimi Linear (arXiv 2510.26692) for ``softplus``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

GATE_KINDS = ("bounded", "softplus", "log_decay")


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 when any of the tensors is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast, which would hand float32 products of states and decays to 16 bits."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class _Sigmoid(torch.autograd.Function):
    """1 / (1 + exp(-x)) whose bits depend on the element alone.

    ``torch.sigmoid`` on the CPU rounds the last elements of an array, and those at the seams between threads, by
    another formula than the rest, so appending tokens would change earlier results.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return sigmoid_(x.neg())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        # sigmoid(-x), not 1 - sigmoid(x): the slope of a saturated gate keeps its relative accuracy.
        (x,) = ctx.saved_tensors
        return dy * sigmoid(x) * sigmoid(-x)


def sigmoid_(negated: Tensor) -> Tensor:
    """sigmoid(x) written over -x; the same bits wherever an element stands."""
    return negated.exp_().add_(1).reciprocal_()


def sigmoid(x: Tensor) -> Tensor:
    """Elementwise logistic function whose bits depend on the element alone; see ``_Sigmoid``."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Sigmoid.apply(x)
    return sigmoid_(x.neg())


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), exact at both ends, the same bits wherever an element stands."""
    return torch.relu(x) + torch.log1p(torch.exp(-x.abs()))


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return softplus(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy * sigmoid(x)


def bounded_gate(
    gate: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float = -5.0
) -> Tensor:
    """Bounded log-decay, g = lower_bound * sigmoid(exp(A_log) * (gate + dt_bias)): K3 report (arXiv 2607.24653) Eq. 5.

    Args:
        gate: ``[..., H, K]``, any float dtype.
        A_log: ``[H]``; None counts as 0, a slope of 1.
        dt_bias: ``[H, K]`` or ``[H * K]``; None counts as 0. It stands inside the multiplication.
        lower_bound: most negative log-decay a step, < 0.

    Returns:
        Natural-log decays in (lower_bound, 0), shape of ``gate``, float32 (float64 for float64 input). Differentiable.

    Raises:
        ValueError: a wrong shape or ``lower_bound`` not negative.
    """
    if not lower_bound < 0:
        raise ValueError(f"lower_bound: found {lower_bound}, need a negative number")
    return lower_bound * sigmoid(_affine(gate, A_log, dt_bias, multiply=True))


def log_decay(gate: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, kind: str, lower_bound: float) -> Tensor:
    """Log-decays of any gate kind from its input ``[..., H, K]``; differentiable, float32 or float64."""
    if kind == "bounded":
        return bounded_gate(gate, A_log, dt_bias, lower_bound)
    if kind == "softplus":
        y = _Softplus.apply(_affine(gate, None, dt_bias, multiply=False))
        slope = 1.0 if A_log is None else A_log.to(y.dtype).exp()[:, None]
        return -slope * y
    return gate.to(compute_dtype(gate))


def _affine(gate: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, multiply: bool) -> Tensor:
    if gate.ndim < 2:
        raise ValueError(f"gate: found shape {tuple(gate.shape)}, need [..., H, K]")
    heads, channels = gate.shape[-2:]
    x = gate.to(compute_dtype(gate))
    if dt_bias is not None:
        if dt_bias.shape not in ((heads, channels), (heads * channels,)):
            raise ValueError(f"dt_bias: found shape {tuple(dt_bias.shape)}, need [{heads}, {channels}] or flattened")
        x = x + dt_bias.to(x.dtype).view(heads, channels)
    if A_log is not None and multiply:
        if A_log.shape != (heads,):
            raise ValueError(f"A_log: found shape {tuple(A_log.shape)}, need [{heads}]")
        x = x * A_log.to(x.dtype).exp()[:, None]
    return x
