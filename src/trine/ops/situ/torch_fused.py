"""SiTU-GLU with a backward that keeps only its two inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SituGlu(torch.autograd.Function):
    """y = a(gate) * c(up) with a = beta tanh(gate/beta) sigmoid(gate) and c = linear_beta tanh(up/linear_beta)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = (beta, linear_beta)
        dtype = _work_dtype(gate, up)
        gate, up = gate.to(dtype), up.to(dtype)
        out = torch.tanh(up / linear_beta)
        out.mul_(torch.tanh(gate / beta).mul_(torch.sigmoid(gate)))
        return out.mul_(beta * linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        gate_in, up_in = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        dtype = _work_dtype(gate_in, up_in)
        gate, up, dy = gate_in.to(dtype), up_in.to(dtype), dy.to(dtype)
        dgate = dup = None
        t = torch.tanh(gate / beta)
        s = torch.sigmoid(gate)
        c = torch.tanh(up / linear_beta)
        if ctx.needs_input_grad[0]:
            # da/dgate = (1 - t^2) s + beta t s (1 - s) = s (1 - t^2 + beta t (1 - s))
            da = (1.0 - s).mul_(beta).sub_(t).mul_(t).add_(1.0).mul_(s)
            dgate = da.mul_(c).mul_(dy).mul_(linear_beta).to(gate_in.dtype)
        if ctx.needs_input_grad[1]:
            # dc/dup = 1 - tanh(up/linear_beta)^2
            dup = c.square_().neg_().add_(1.0).mul_(t).mul_(s).mul_(dy).mul_(beta).to(up_in.dtype)
        return dgate, dup, None, None


def _work_dtype(gate: Tensor, up: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (gate.dtype, up.dtype) else torch.float32


def situ_glu_torch(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU-GLU of equal shapes; float32 (float64 if an input is) result, gradients in the dtypes of the inputs."""
    return _SituGlu.apply(gate, up, beta, linear_beta)
