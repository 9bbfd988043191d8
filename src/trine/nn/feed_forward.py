"""The dense feed-forward, also used for the shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from trine.ops.situ import situ_glu


class FeedForward(nn.Module):
    """y = W_down SiTU-GLU(W_gate x, W_up x) (K3 report, Eq. 12)."""

    def __init__(self, width: int, inner: int, *, beta: float = 4.0, linear_beta: float = 25.0) -> None:
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Apply to `x_TD`; each token alone."""
        return self.down_proj(situ_glu(self.gate_proj(x_TD), self.up_proj(x_TD), self.beta, self.linear_beta))
