"""Head projection and cross-entropy in chunks: the logits of a batch are never held at once."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops._backend import pick
from trine.ops.cross_entropy.reference import linear_cross_entropy_reference
from trine.ops.cross_entropy.torch_chunked import linear_cross_entropy_torch, token_losses_torch

__all__ = ["linear_cross_entropy", "token_losses"]

_REASONS = {
    "torch": None,
    "reference": None,
    "triton": "linear_cross_entropy has no triton kernel; found only 'torch' and 'reference'",
}


def _check(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, weights_T: Tensor | None, chunk: int) -> None:
    """Refuse shapes, dtypes and devices that do not fit together."""
    if hidden_TD.ndim != 2:
        raise ValueError(f"hidden_TD: found shape {tuple(hidden_TD.shape)}, need [T, D]")
    tokens, width = hidden_TD.shape
    if weight_VD.ndim != 2 or weight_VD.shape[1] != width or weight_VD.shape[0] < 1:
        raise ValueError(f"weight_VD: found shape {tuple(weight_VD.shape)}, need [V >= 1, D] with D = {width}")
    if tuple(targets_T.shape) != (tokens,):
        raise ValueError(f"targets_T: found shape {tuple(targets_T.shape)}, need [T] = [{tokens}]")
    if targets_T.dtype != torch.int64:
        raise ValueError(f"targets_T: found dtype {targets_T.dtype}, need torch.int64")
    floats = [("hidden_TD", hidden_TD), ("weight_VD", weight_VD)]
    if weights_T is not None:
        if tuple(weights_T.shape) != (tokens,):
            raise ValueError(f"weights_T: found shape {tuple(weights_T.shape)}, need [T] = [{tokens}]")
        floats.append(("weights_T", weights_T))
    for name, tensor in floats:
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: found dtype {tensor.dtype}, need a floating dtype")
    for name, tensor in [*floats, ("targets_T", targets_T)]:
        if tensor.device != hidden_TD.device:
            raise ValueError(f"{name}: found device {tensor.device}, need that of hidden_TD, {hidden_TD.device}")
    if chunk < 1:
        raise ValueError(f"chunk: found {chunk}, need a number of tokens >= 1")


def _counted(targets_T: Tensor, vocabulary: int, ignore_index: int) -> Tensor:
    """Which tokens have a target; refuses ids outside the vocabulary."""
    counted_T = targets_T != ignore_index
    wrong_T = counted_T & ((targets_T < 0) | (targets_T >= vocabulary))
    if bool(wrong_T.any()):
        at = int(wrong_T.nonzero()[0, 0])
        raise ValueError(
            f"targets_T: found {int(targets_T[at])} at index {at}, need 0..{vocabulary - 1} "
            f"(vocabulary {vocabulary}) or ignore_index {ignore_index}"
        )
    return counted_T


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    weights_T: Tensor | None = None,
    *,
    chunk: int = 1024,
    ignore_index: int = -100,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Weighted sum of token losses, ``sum_t w_t (logsumexp_v z_tv - z_t,target)``, and the sum of the weights.

    ``z = hidden weight^T``, never formed whole.
    Sums, not means: micro-batches add up to the batch whatever their token counts, and a batch without a target gives
    0 and zero gradients. Logits are held for ``chunk`` tokens at a time and gradients are made in the forward pass.

    Args:
        hidden_TD: final hidden states, any floating dtype.
        weight_VD: the head, one row a vocabulary entry.
        targets_T: int64 ids in 0..V-1, or ``ignore_index``.
        weights_T: weight of each token; ``None`` means 1.
        chunk: tokens whose logits exist at once.
        ignore_index: target of tokens that do not count.
        backend: ``"auto"``, ``"torch"`` or ``"reference"`` (which holds all logits).

    Returns:
        loss_sum in nats and weight_sum over counted tokens, scalars in float32 (float64 if an input is float64).
        Divide the one by the other for the mean; both carry gradients.

    Raises:
        ValueError: a shape, dtype, device or chunk that does not fit, or an id outside the vocabulary.
        BackendUnavailable: an explicit backend that cannot run.
    """
    _check(hidden_TD, weight_VD, targets_T, weights_T, chunk)
    counted_T = _counted(targets_T, weight_VD.shape[0], ignore_index)
    path = pick("linear_cross_entropy", backend, hidden_TD.device.type, _REASONS)
    if path == "reference":
        return linear_cross_entropy_reference(hidden_TD, weight_VD, targets_T, weights_T, ignore_index)
    dtype = torch.float64 if torch.float64 in (hidden_TD.dtype, weight_VD.dtype) else torch.float32
    if weights_T is None:
        weights_T = torch.ones(hidden_TD.shape[0], dtype=dtype, device=hidden_TD.device)
    elif not weights_T.requires_grad:
        counted_T = counted_T & (weights_T != 0)
    weights_T = weights_T.to(dtype)
    if not bool(counted_T.all()):
        # Tokens that do not count are left out, not multiplied by zero: whatever they hold cannot reach the sums.
        rows = counted_T.nonzero().squeeze(1)
        hidden_TD, targets_T, weights_T = hidden_TD[rows], targets_T[rows], weights_T[rows]
    hidden_TD, weight_VD = hidden_TD.to(dtype), weight_VD.to(dtype)
    if torch.is_grad_enabled():
        loss = linear_cross_entropy_torch(hidden_TD, weight_VD, targets_T, weights_T, chunk)
    else:
        nll_T = token_losses_torch(hidden_TD, weight_VD, targets_T, chunk)
        loss = (nll_T.double() * weights_T.double()).sum().to(dtype)
    return loss, weights_T.sum()


@torch.no_grad()
def token_losses(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, *, chunk: int = 1024, ignore_index: int = -100
) -> Tensor:
    """Negative log-likelihood of each token's target, nll_T in nats (0 where ignored); for evaluation, no gradient.

    Same arguments and errors as ``linear_cross_entropy``; float32, or float64 if an input is float64.
    """
    _check(hidden_TD, weight_VD, targets_T, None, chunk)
    counted_T = _counted(targets_T, weight_VD.shape[0], ignore_index)
    dtype = torch.float64 if torch.float64 in (hidden_TD.dtype, weight_VD.dtype) else torch.float32
    aims_T = torch.where(counted_T, targets_T, 0)
    nll_T = token_losses_torch(hidden_TD.to(dtype), weight_VD.to(dtype), aims_T, chunk)
    return torch.where(counted_T, nll_T, 0.0)
