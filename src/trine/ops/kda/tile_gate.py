"""The gates on tile buffers ``[*grid, H, split, 16, K]``, forward and backward without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops.kda.gate import sigmoid_, softplus
from trine.ops.kda.layout import Layout
from trine.ops.kda.nonfinite import looks_sound

# exp of it still fits float32; a logistic function beyond it is 0 or 1 to every bit that could matter (2e-35).
_LOGIT_LIMIT = 80.0
# A log-decay below this, -inf too, becomes this one: its exp is 0 all the same, and sums with it stay finite.
_LOWEST = -1e4
# exp of anything below it is 0 in the dtype, denormal numbers included.
_ZERO_DECAY = {torch.float32: -104.0, torch.float64: -746.0}


class TileGate:
    """One call's gate: log-decays g from the gate's input, and back."""

    def __init__(
        self, kind: str, lower_bound: float, A_log: Tensor | None, dt_bias: Tensor | None, like: Tensor
    ) -> None:
        heads, channels = like.shape[-2:]
        self.kind = kind
        self.lower_bound = lower_bound
        self.bias_shape = None if dt_bias is None else dt_bias.shape
        self.bias = None if dt_bias is None else dt_bias.to(like.dtype).view(heads, 1, 1, channels)
        self.rate = None if A_log is None else A_log.to(like.dtype).exp().view(heads, 1, 1, 1)

    def forward(self, x: Tensor, layout: Layout, keep: bool) -> tuple[Tensor, Tensor | None]:
        """g of the input ``x``, padding rows 0; with ``keep`` its slope too, up to constants that ``backward`` has."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if self.kind == "log_decay":
            return torch.clamp(x, min=_LOWEST, out=out), None
        if self.kind == "softplus":
            z = x if self.bias is None else x + self.bias
            torch.neg(softplus(z), out=out)
            slope = layout.fill_pads_(sigmoid_(z.neg()).neg_().contiguous()) if keep else None
            g = (out if self.rate is None else out.mul_(self.rate)).clamp_(min=_LOWEST)
            return layout.fill_pads_(g), slope
        rate = torch.ones((), dtype=x.dtype, device=x.device) if self.rate is None else self.rate
        if self.bias is None:
            torch.mul(x, -rate, out=out)
        else:
            torch.addcmul(-rate * self.bias, x, -rate, out=out)
        falling = out.clamp_(max=_LOGIT_LIMIT).exp_()  # exp(-z)
        g = falling.add(1.0)
        layout.fill_pads_(torch.div(g.new_full((), self.lower_bound), g, out=g))
        # The slope in z is exp(-z) g^2 / lower_bound. (g / lower_bound of a saturated gate is 1 to the last digit, and
        # its slope could not be had from that.)
        return g, falling.mul_(g).mul_(g) if keep else None

    def backward(
        self, dg: Tensor, slope: Tensor | None, g: Tensor | None, x: Tensor, layout: Layout, parameters: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """From the gradient of the log-decays (overwritten) to those of the input, A_log and dt_bias.

        Args:
            dg: ``[*grid, H, split, 16, K]``.
            slope, g: what ``forward`` gave; g for softplus and log_decay only.
            x: the gate's input.
            layout: the tiles.
            parameters: the last two are wanted.

        Returns:
            Gradients of the input ``[*grid, H, split, 16, K]``, of A_log ``[H]`` and of dt_bias in its own shape, or
            None.
        """
        if self.kind != "bounded":
            # Whatever crosses a row whose decay is 0 is multiplied by it. dg comes as a difference, and its rounding
            # would be multiplied by a g of any size in the gradient of A_log.
            assert g is not None
            dg.masked_fill_(g.view_as(dg) < _ZERO_DECAY[g.dtype], 0.0)
        if self.kind == "log_decay":
            return dg, None, None
        assert slope is not None
        constant = 1 / self.lower_bound if self.kind == "bounded" else 1.0
        dA = dbias = None
        if parameters and self.kind == "softplus" and self.rate is not None:
            assert g is not None
            dA = self._sum(dg * g.view_as(dg), layout).sum(-1)
        d_input = dg.mul_(slope)
        if parameters:
            rate = 1.0 if self.rate is None else self.rate.view(-1, 1)
            along = self._sum(d_input, layout) * rate * constant
            if self.kind == "bounded" and self.rate is not None:
                # z = exp(A_log) (x + bias) is its own derivative by A_log
                dA = self._sum(d_input * x, layout)
                if not looks_sound(dA):  # the slope at an infinite input is 0, and so is its product with the input
                    dA = self._sum(d_input * x.masked_fill(x.isinf(), 0.0), layout)
                dA = dA * rate * constant
                dA = (dA if self.bias is None else dA.addcmul(along, self.bias[:, 0, 0])).sum(-1)
            if self.bias is not None:
                assert self.bias_shape is not None
                dbias = along.view(self.bias_shape)
        return d_input.mul_(constant if self.rate is None else self.rate * constant), dA, dbias

    def _sum(self, x: Tensor, layout: Layout) -> Tensor:
        """Sum of a tile buffer over all tokens, ``[H, K]``.

        Over a tile, then along each sequence and over the sequences in a fixed tree: tokens that are appended and have
        no gradient leave every bit as it was.
        """
        heads, split, _, channels = x.shape[-4:]
        tiles = x.sum(-2).view(layout.chunks, heads, split, channels)
        by_sequence = layout.by_sequence(tiles.sum(2).view(layout.chunks, heads * channels))
        return _ordered_sum(_ordered_sum(by_sequence.transpose(0, 1))).view(heads, channels)


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
