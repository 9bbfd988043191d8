"""The gates on tile buffers ``[*grid, H, 16, K]``, forward and backward without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops.kda._checks import TILE
from trine.ops.kda.gate import sigmoid_, softplus
from trine.ops.kda.layout import Layout

# exp of it still fits float32; a logistic function beyond it is 0 or 1 to every bit that could matter (2e-35).
_LOGIT_LIMIT = 80.0


class TileGate:
    """One call's gate: log-decays ``g = scale * y`` with ``y`` from the gate's input, and back.

    ``scale`` is the lower bound of a bounded gate, else 1; it is left to the products that sum y along a tile.
    """

    def __init__(self, kind: str, lower_bound: float, A_log: Tensor | None, dt_bias: Tensor | None, like: Tensor):
        heads, channels = like.shape[-2:]
        self.kind = kind
        self.scale = lower_bound if kind == "bounded" else 1.0
        self.bias = None if dt_bias is None else dt_bias.to(like.dtype).view(heads, 1, channels)
        self.rate = None if A_log is None else A_log.to(like.dtype).exp().view(heads, 1, 1)

    def forward(self, x: Tensor, layout: Layout, keep: bool) -> tuple[Tensor, Tensor | None]:
        """y of the input ``x``, padding rows 0, and with ``keep`` the slope dy/dx without the factor exp(A_log)."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if self.kind == "log_decay":
            return out.copy_(x), None
        if self.kind == "softplus":
            z = x if self.bias is None else x + self.bias
            torch.neg(softplus(z), out=out)
            slope = layout.fill_pads_(sigmoid_(z.neg()).neg_().contiguous()) if keep else None
            return layout.fill_pads_(out if self.rate is None else out.mul_(self.rate)), slope
        rate = torch.ones((), dtype=x.dtype, device=x.device) if self.rate is None else self.rate
        if self.bias is None:
            torch.mul(x, -rate, out=out)
        else:
            torch.addcmul(-rate * self.bias, x, -rate, out=out)
        falling = out.clamp_(max=_LOGIT_LIMIT).exp_()  # exp(-z)
        y = layout.fill_pads_(falling.add(1.0).reciprocal_())
        # y (1 - y) would lose the slope of a saturated gate; exp(-z) y^2 keeps it.
        return y, falling.mul_(y).mul_(y) if keep else None

    def backward(self, dy: Tensor, slope: Tensor | None) -> Tensor:
        """From the gradient of y to that of the input without the factor exp(A_log), in place."""
        return dy if slope is None else dy.mul_(slope)

    def parameter_gradients(
        self, dz: Tensor, dy_times_y: Tensor | None, x: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Gradients of A_log ``[H]`` and dt_bias ``[H, K]``.

        Sums run over a tile, then along each sequence and over the sequences in a fixed tree: tokens that are appended
        and have no gradient leave every bit as it was.

        Args:
            dz: what ``backward`` gave.
            dy_times_y: for the softplus gate, dy * y, which is the gradient of A_log a row.
            x: the gate's input.
        """
        heads, _, channels = dz.shape[-3:]
        if self.kind == "softplus":
            assert dy_times_y is not None
            dA_terms = dy_times_y
        else:
            dA_terms = dz * x
        ones = dz.new_ones(1, 1, TILE).expand(layout.tiles * heads, -1, -1)
        sums = (torch.bmm(ones, t.view(-1, TILE, channels)).view(layout.tiles, -1) for t in (dz, dA_terms))
        dbias, dA = (_ordered_sum(_ordered_sum(layout.by_sequence(s).transpose(0, 1))) for s in sums)
        dbias, dA = dbias.view(heads, channels), dA.view(heads, channels)
        if self.kind == "bounded":
            # z = rate * (x + bias)
            if self.bias is not None:
                dA = dA.addcmul(dbias, self.bias.squeeze(1))
            if self.rate is not None:
                dA = dA * self.rate.squeeze(1)
        if self.rate is not None:
            dbias = dbias * self.rate.squeeze(1)
        return dA.sum(-1), dbias


def _ordered_sum(x: Tensor) -> Tensor:
    """Sum of ``[N, ..., X]`` over the first axis in a tree of fixed groups of 16: appended zeros change no bit."""
    shape = x.shape[1:]
    x = x.reshape(x.shape[0], -1)
    while x.shape[0] > 1:
        n = -(-x.shape[0] // 16)
        if n * 16 != x.shape[0]:
            x = torch.cat([x, x.new_zeros(n * 16 - x.shape[0], x.shape[1])])
        x = torch.bmm(x.new_ones(n, 1, 16), x.view(n, 16, -1)).squeeze(1)
    return x.view(shape)
