"""Keeping NaN and infinite inputs from reaching rows before them.

The chunked form multiplies whole tiles: what stands above a diagonal is zero, but 0 * NaN is NaN, so one bad row would
spoil the earlier rows of its chunk. A bad row spoils its own output too, so one sum over the output says whether there
is any (below 1 % of a forward pass). Only then is the input taken apart: bad values become 0, the run is repeated, and
what depends on them is NaN, as in the definition. The rows before have the bits they have without the bad ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def looks_sound(out: Tensor) -> bool:
    """Whether an output holds finite numbers only; read on the CPU only, where it costs no synchronisation.

    A sum that overflows gives False too: that costs time, no correctness.
    """
    if out.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    return math.isfinite(out.detach().sum(dtype=torch.promote_types(out.dtype, torch.float32)).item())


def separate(tensors: Packed, gate_kind: str, beta_is_logit: bool, lengths: list[int]) -> tuple[Packed, Tensor, Tensor]:
    """Inputs without their bad values, and what those reach.

    Args:
        tensors: q, k, gate ``[R, H, K]``, v ``[R, H, V]``, beta ``[R, H]`` of packed sequences.
        gate_kind, beta_is_logit: as in ``kda``. Infinite gate inputs and logits are good: they saturate.
        lengths: of the sequences.

    Returns:
        The inputs, with 0 for bad values; bool ``[R, H, V]``, true where the output is spoilt (by q in its row, by v in
        its column from there on, by the others from there on); and ``[N, H, V]``, where the final state is.
    """
    q, k, v, gate, beta = tensors
    bad_q, bad_k, bad_v = ~q.isfinite(), ~k.isfinite(), ~v.isfinite()
    bad_gate = gate.isposinf() | gate.isnan() if gate_kind == "log_decay" else gate.isnan()
    bad_beta = beta.isnan() if beta_is_logit else ~beta.isfinite()
    starting = bad_v | (bad_k.any(-1) | bad_gate.any(-1) | bad_beta).unsqueeze(-1)
    # How many bad rows stand before each row: spoilt is where that is more than at the start of the sequence.
    count = torch.cat([torch.zeros_like(starting[:1]), starting]).cumsum(0)
    length = torch.tensor(lengths, device=q.device)
    end = length.cumsum(0)
    begun = count[end - length]
    spoilt = (count[1:] > begun.repeat_interleave(length, 0)) | bad_q.any(-1, keepdim=True)
    cleaned = (
        q.masked_fill(bad_q, 0.0),
        k.masked_fill(bad_k, 0.0),
        v.masked_fill(bad_v, 0.0),
        gate.masked_fill(bad_gate, 0.0),
        beta.masked_fill(bad_beta, 0.0),
    )
    return cleaned, spoilt, count[end] > begun


class Spoil(torch.autograd.Function):
    """NaN where a bad input reaches. A loss on such places has NaN gradients, one on others those without them."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, final: Tensor, spoilt: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(spoilt, lost)
        ctx.set_materialize_grads(False)
        return out.masked_fill(spoilt, math.nan), final.masked_fill(lost.unsqueeze(-2), math.nan)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        spoilt, lost = ctx.saved_tensors
        if d_out is not None:
            d_out = d_out.masked_fill(spoilt & (d_out != 0), math.nan)
        if d_final is not None:
            d_final = d_final.masked_fill(lost.unsqueeze(-2) & (d_final != 0), math.nan)
        return d_out, d_final, None, None
