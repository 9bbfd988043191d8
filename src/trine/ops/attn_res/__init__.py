"""Block Attention Residuals: the softmax mix over depth sources that replaces the residual stream."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trine.ops._backend import pick
from trine.ops.attn_res.reference import attn_res_reference
from trine.ops.attn_res.torch_rows import attn_res_torch, attn_res_weights_torch

__all__ = ["attn_res", "attn_res_weights"]

_REASONS = {
    "torch": None,
    "reference": None,
    "triton": "attn_res has no triton kernel; found only 'torch' and 'reference'",
}


def _check(
    sources: Tensor | Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float
) -> tuple[list[Tensor], torch.dtype, float]:
    """The sources as a list, the working dtype and an eps that divides; refuses what does not fit together."""
    if isinstance(sources, Tensor):
        if sources.ndim < 2:
            raise ValueError(f"sources: found one tensor of shape {tuple(sources.shape)}, need [S, ..., D]")
        bank = list(sources.unbind(0))
    else:
        bank = list(sources)
    if not bank:
        raise ValueError("sources: found none, need at least one")
    shape = bank[0].shape
    if len(shape) == 0 or shape[-1] == 0:
        raise ValueError(f"sources: found shape {tuple(shape)} at index 0, need [..., D] with D >= 1")
    for i, v in enumerate(bank):
        if v.shape != shape:
            raise ValueError(f"sources: found shape {tuple(v.shape)} at index {i}, need {tuple(shape)} as at index 0")
        if not v.is_floating_point():
            raise ValueError(f"sources: found dtype {v.dtype} at index {i}, need a floating dtype")
        if v.device != bank[0].device:
            raise ValueError(f"sources: found device {v.device} at index {i}, need {bank[0].device} as at index 0")
    for name, vector in (("query_D", query_D), ("gain_D", gain_D)):
        if tuple(vector.shape) != (shape[-1],):
            raise ValueError(f"{name}: found shape {tuple(vector.shape)}, need [D] = [{shape[-1]}]")
        if not vector.is_floating_point():
            raise ValueError(f"{name}: found dtype {vector.dtype}, need a floating dtype")
        if vector.device != bank[0].device:
            raise ValueError(f"{name}: found device {vector.device}, need that of the sources, {bank[0].device}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: found {eps}, need a number >= 0")
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in [*bank, query_D, gain_D]) else torch.float32
    # With 0 the key of a source of zeros would be 0 / 0. The smallest number whose power -3/2, the slope of the inverse
    # root, is finite: 5e-26 in float32, far below the mean square of anything but zeros.
    return bank, dtype, max(eps, torch.finfo(dtype).tiny ** (2 / 3))


def attn_res(
    sources: Tensor | Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float = 1e-5, *, backend: str = "auto"
) -> Tensor:
    """Mix depth sources by softmax: ``h = sum_i alpha_i V_i``, ``alpha = softmax_i( RMSNorm(V_i) * gain . query )``.

    Attention Residuals (arXiv 2603.15031), K3 report (arXiv 2607.24653) Eq. 8-10. Keys are the normalised sources,
    values the raw ones; one head, no temperature. A zero query gives the *mean* of the sources.

    Args:
        sources: S equal-shaped tensors [..., D], or one stacked [S, ..., D]; any floating dtype.
        query_D: the learned pseudo-query of this site.
        gain_D: the gain of this site's key norm (only ``gain * query`` matters).
        eps: added to the mean square inside the root; the key of a source of zeros is zero, with eps = 0 too.
        backend: ``"auto"``, ``"torch"`` or ``"reference"``.

    Returns:
        h_...D in the widest dtype of the sources; norms, logits and sums are float32 (float64 if an input is).

    Raises:
        ValueError: no source, unequal shapes, wrong dtypes or devices, a negative eps; the message names the argument.
        BackendUnavailable: an explicit backend that cannot run.
    """
    bank, dtype, eps = _check(sources, query_D, gain_D, eps)
    shape = bank[0].shape
    out_dtype = bank[0].dtype
    for v in bank[1:]:
        out_dtype = torch.promote_types(out_dtype, v.dtype)
    query_D, gain_D = query_D.to(dtype), gain_D.to(dtype)
    if pick("attn_res", backend, bank[0].device.type, _REASONS) == "reference":
        return attn_res_reference(bank, query_D, gain_D, eps)[0].to(out_dtype)
    rows = [v.reshape(-1, shape[-1]) for v in bank]
    return attn_res_torch(rows, query_D, gain_D, eps).to(out_dtype).view(shape)


@torch.no_grad()
def attn_res_weights(
    sources: Tensor | Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float = 1e-5, *, backend: str = "auto"
) -> Tensor:
    """The weights alpha_S... that ``attn_res`` would mix with, for logging; same arguments and errors, no gradient."""
    bank, dtype, eps = _check(sources, query_D, gain_D, eps)
    shape = bank[0].shape
    query_D, gain_D = query_D.to(dtype), gain_D.to(dtype)
    if pick("attn_res", backend, bank[0].device.type, _REASONS) == "reference":
        return attn_res_reference(bank, query_D, gain_D, eps)[1]
    rows = [v.reshape(-1, shape[-1]) for v in bank]
    return attn_res_weights_torch(rows, query_D, gain_D, eps).view(len(bank), *shape[:-1])
