"""The definition of SiTU-GLU, as written; autograd differentiates it."""

from __future__ import annotations

import torch
from torch import Tensor


def situ_glu_reference(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)`` (K3 report, arXiv 2607.24653, Eq. 12).

    Any equal shapes; computed in float64 if an input is float64 and in float32 otherwise, and returned so.
    """
    dtype = torch.float64 if torch.float64 in (gate.dtype, up.dtype) else torch.float32
    gate, up = gate.to(dtype), up.to(dtype)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)
