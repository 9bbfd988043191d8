"""SiTU-GLU: the gated activation whose two branches are both soft-capped."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trine.ops._backend import pick
from trine.ops.situ.reference import situ_glu_reference
from trine.ops.situ.torch_fused import situ_glu_torch

__all__ = ["situ_glu"]

_REASONS = {
    "torch": None,
    "reference": None,
    "triton": "situ_glu has no triton kernel; found only 'torch' and 'reference'",
}


def situ_glu(
    gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float = 25.0, *, backend: str = "auto"
) -> Tensor:
    """``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``: |result| <= beta * linear_beta.

    Sigmoid Tanh Unit, K3 report (arXiv 2607.24653) Eq. 12. Both betas to infinity give SwiGLU, and near 0 the two agree
    to first order. Evaluated in float32 (float64 if an input is float64); the backward pass keeps only ``gate`` and
    ``up`` and computes the rest again.

    Args:
        gate, up: equal shapes, any floating dtype.
        beta: cap of the gate branch, > 0.
        linear_beta: cap of the up branch, > 0.
        backend: ``"auto"``, ``"torch"`` or ``"reference"``.

    Returns:
        the activation, in the wider dtype of the two inputs.

    Raises:
        ValueError: unequal shapes or devices, a dtype that is not floating, a beta that is not positive and finite.
        BackendUnavailable: an explicit backend that cannot run.
    """
    for name, tensor in (("gate", gate), ("up", up)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: found dtype {tensor.dtype}, need a floating dtype")
    if gate.shape != up.shape:
        raise ValueError(f"up: found shape {tuple(up.shape)}, need that of gate, {tuple(gate.shape)}")
    if gate.device != up.device:
        raise ValueError(f"up: found device {up.device}, need that of gate, {gate.device}")
    for name, value in (("beta", beta), ("linear_beta", linear_beta)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: found {value}, need a positive finite number")
    path = pick("situ_glu", backend, gate.device.type, _REASONS)
    function = situ_glu_reference if path == "reference" else situ_glu_torch
    return function(gate, up, float(beta), float(linear_beta)).to(torch.promote_types(gate.dtype, up.dtype))
