"""SiTU-GLU with a backward that keeps only its two inputs, in tiles of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.ops._autograd import differentiable_once
from trine.ops._tiles import row_tiles


class _SituGlu(torch.autograd.Function):
    """y = beta t s linear_beta c with t = tanh(gate/beta), s = sigmoid(gate), c = tanh(up/linear_beta); rows [T, F]."""

    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor, beta: float, linear_beta: float) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        ctx.betas = (beta, linear_beta)
        dtype = _work_dtype(gate_TF, up_TF)
        y_TF = torch.empty(gate_TF.shape, dtype=dtype, device=gate_TF.device)
        for rows in row_tiles(gate_TF.shape[0], gate_TF.shape[1], gate_TF.device):
            gate, up, y = gate_TF[rows].to(dtype), up_TF[rows].to(dtype), y_TF[rows]
            t = torch.mul(gate, 1.0 / beta).tanh_().mul_(torch.sigmoid(gate))
            torch.mul(up, 1.0 / linear_beta, out=y).tanh_().mul_(t).mul_(beta * linear_beta)
        return y_TF

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        gate_TF, up_TF = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        need_gate, need_up = ctx.needs_input_grad[:2]
        dtype = _work_dtype(gate_TF, up_TF)
        one = torch.ones((), dtype=dtype, device=gate_TF.device)
        dgate_TF, dup_TF = _new_like(gate_TF, need_gate), _new_like(up_TF, need_up)
        for rows in row_tiles(gate_TF.shape[0], gate_TF.shape[1], gate_TF.device):
            gate, up, dy = (x[rows].to(dtype) for x in (gate_TF, up_TF, dy_TF))
            t, s = torch.mul(gate, 1.0 / beta).tanh_(), torch.sigmoid(gate)
            c = torch.mul(up, 1.0 / linear_beta).tanh_()
            dy_s = dy * s
            if dgate_TF is not None:
                # d(beta t s)/dgate = s (1 - t^2 + beta t (1 - s)) = s (1 + t (beta - beta s - t))
                slope = torch.rsub(s, beta, alpha=beta).sub_(t).mul_(t).add_(1.0)
                torch.mul(slope.mul_(c).mul_(dy_s), linear_beta, out=dgate_TF[rows])
            if dup_TF is not None:
                # d(linear_beta c)/dup = 1 - c^2
                slope = torch.addcmul(one, c, c, value=-1.0)
                torch.mul(slope.mul_(t).mul_(dy_s), beta, out=dup_TF[rows])
        return dgate_TF, dup_TF, None, None


def _new_like(x: Tensor, wanted: bool) -> Tensor | None:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted else None


def _work_dtype(gate: Tensor, up: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (gate.dtype, up.dtype) else torch.float32


def situ_glu_torch(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU-GLU of equal shapes; float32 (float64 if an input is) result, gradients in the dtypes of the inputs."""
    if gate.ndim == 0 or gate.numel() == 0:
        return _SituGlu.apply(gate.reshape(-1, 1), up.reshape(-1, 1), beta, linear_beta).view(gate.shape)
    width = gate.shape[-1]
    return _SituGlu.apply(gate.reshape(-1, width), up.reshape(-1, width), beta, linear_beta).view(gate.shape)
