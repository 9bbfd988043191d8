"""RMSNorm with float32 statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trine.nn.precision import at_least_float32


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) ⊙ weight over the last dimension, weight initialised to 1.

    Statistics and the product with the weight are float32 (float64 for float64 inputs); the result has x's dtype.
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Unit weight."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `[..., width]`."""
        dtype = at_least_float32(x.dtype)
        return F.rms_norm(x.to(dtype), (self.width,), self.weight.to(dtype), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Width and epsilon, for `print(model)`."""
        return f"{self.width}, eps={self.eps}"
