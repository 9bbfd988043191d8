"""The core of gated multi-head latent attention without positions: expanded and absorbed, with past latents."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trine.ops._backend import pick
from trine.ops._sequences import check_cu_seqlens
from trine.ops.latent_attention.reference import latent_attention_reference
from trine.ops.latent_attention.state import Latents
from trine.ops.latent_attention.torch_tiled import latent_attention_torch

__all__ = ["Latents", "latent_attention"]

_REASONS = {
    "torch": None,
    "reference": None,
    "triton": "latent_attention has no triton kernel; found only 'torch' and 'reference'",
}
_FORMS = ("expanded", "absorbed", "auto")


def _check(
    q_BTHC: Tensor,
    latent_BTR: Tensor,
    shared_key_BTS: Tensor,
    key_up_HKR: Tensor,
    value_up_HVR: Tensor,
    cu_seqlens: Tensor | None,
    past: Latents | None,
) -> None:
    """Refuse arguments that do not fit together."""
    named = {
        "q_BTHC": q_BTHC,
        "latent_BTR": latent_BTR,
        "shared_key_BTS": shared_key_BTS,
        "key_up_HKR": key_up_HKR,
        "value_up_HVR": value_up_HVR,
    }
    for name, tensor in named.items():
        letters = name.rsplit("_", 1)[1]
        if tensor.ndim != len(letters):
            raise ValueError(f"{name}: found shape {tuple(tensor.shape)}, need [{', '.join(letters)}]")
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: found dtype {tensor.dtype}, need a floating dtype")
        if tensor.device != q_BTHC.device:
            raise ValueError(f"{name}: found device {tensor.device}, need that of q_BTHC, {q_BTHC.device}")
    batch, tokens, heads, channels = q_BTHC.shape
    rank, shared = latent_BTR.shape[2], shared_key_BTS.shape[2]
    content = channels - shared
    if content < 0 or heads < 1:
        raise ValueError(
            f"q_BTHC: found shape {tuple(q_BTHC.shape)}, need H >= 1 and C = K + S with S = {shared} of shared_key_BTS"
        )
    needs = {
        "latent_BTR": (latent_BTR, (batch, tokens, rank), "[B, T, R]"),
        "shared_key_BTS": (shared_key_BTS, (batch, tokens, shared), "[B, T, S]"),
        "key_up_HKR": (key_up_HKR, (heads, content, rank), "[H, K, R]"),
        "value_up_HVR": (value_up_HVR, (heads, value_up_HVR.shape[1], rank), "[H, V, R]"),
    }
    for name, (tensor, shape, letters) in needs.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: found shape {tuple(tensor.shape)}, need {letters} = {list(shape)}")
    sequences = batch
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, tokens)
        sequences = cu_seqlens.numel() - 1
    if past is not None:
        if past.n_sequences != sequences:
            raise ValueError(f"past: found {past.n_sequences} sequences, need {sequences}")
        if past.width != rank + shared:
            raise ValueError(f"past: found rows of width {past.width}, need M = R + S = {rank + shared}")
        if past.device != q_BTHC.device:
            raise ValueError(f"past: found device {past.device}, need that of q_BTHC, {q_BTHC.device}")


def latent_attention(
    q_BTHC: Tensor,
    latent_BTR: Tensor,
    shared_key_BTS: Tensor,
    key_up_HKR: Tensor,
    value_up_HVR: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    past: Latents | None = None,
    scale: float | None = None,
    form: str = "expanded",
    backend: str = "auto",
) -> Tensor:
    """Causal softmax attention whose keys and values are read from a shared latent; no rotation anywhere.

    ``key_h = [key_up_h latent ; shared_key]``, ``value_h = value_up_h latent``,
    ``o_h,t = sum_{j <= t} softmax_j(scale q_h,t . key_h,j) value_h,j``
    (Gated MLA of the K3 report, arXiv 2607.24653, Eq. 7, without its output gate and projections).

    Memory is linear in T; the backward pass computes probabilities again. Outputs before t, and gradients of a loss on
    them, keep their bits whatever happens at or after t.

    Args:
        q_BTHC: queries, C = K + S channels: content, then the part that meets the shared key. B = 1 when packed.
        latent_BTR: normed latents.
        shared_key_BTS: key channels shared by all heads.
        key_up_HKR, value_up_HVR: maps from latent to each head's content key and value.
        cu_seqlens: int32 or int64 [N+1] offsets of packed sequences, empty ones allowed; ``None`` means N = B. Its
            values are read on the host.
        past: rows ``[latent ; shared_key]`` that precede the new tokens of the N sequences; gradients flow to them.
        scale: of the scores; C^-1/2 if ``None``.
        form: ``"expanded"`` makes keys and values of every head; ``"absorbed"`` maps queries to latent space and
            values out of it, so that past latents are read as they are (decoding; also the faster one for training
            where 2R <= K + V); ``"auto"`` takes the one with fewer multiplications a pair. They agree to rounding.
        backend: ``"auto"``, ``"torch"`` or ``"reference"``.

    Returns:
        o_BTHV in float32 (float64 if an input is float64): softmax and output stay in full precision.

    Raises:
        ValueError: a shape, dtype, device, ``cu_seqlens``, past, scale or form that does not fit; the message names it.
        BackendUnavailable: an explicit backend that cannot run.
    """
    _check(q_BTHC, latent_BTR, shared_key_BTS, key_up_HKR, value_up_HVR, cu_seqlens, past)
    batch, tokens, heads, channels = q_BTHC.shape
    rank, content, value = latent_BTR.shape[2], key_up_HKR.shape[1], value_up_HVR.shape[1]
    if form not in _FORMS:
        raise ValueError(f"form: found {form!r}, need one of {list(_FORMS)}")
    if scale is None:
        scale = channels**-0.5
    elif not math.isfinite(scale):
        raise ValueError(f"scale: found {scale}, need a finite number")
    path = pick("latent_attention", backend, q_BTHC.device.type, _REASONS)
    floats = [q_BTHC, latent_BTR, shared_key_BTS, key_up_HKR, value_up_HVR]
    dtypes = [t.dtype for t in floats] + ([] if past is None else [past.dtype])
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    q, latent, shared, key_up, value_up = (t.to(dtype) for t in floats)
    q_THC, latent_TR, shared_TS = q.flatten(0, 1), latent.flatten(0, 1), shared.flatten(0, 1)
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1) * tokens
    if q_THC.shape[0] == 0:
        return q.sum(-1, keepdim=True).expand(batch, tokens, heads, value)
    if path == "reference":
        past_rows = None if past is None else past.rows_PM
        past_bounds = None if past is None else past.cu_seqlens_N1.tolist()
        bounds = cu_seqlens.tolist()
        o_THV = latent_attention_reference(
            q_THC, latent_TR, shared_TS, key_up, value_up, bounds, past_rows, past_bounds, scale
        )
    else:
        if form == "auto":
            form = "absorbed" if 2 * rank <= content + value else "expanded"
        rows_TM = torch.cat([latent_TR, shared_TS], -1)
        o_THV = latent_attention_torch(q_THC, rows_TM, key_up, value_up, cu_seqlens, past, scale, form)
    return o_THV.unflatten(0, (batch, tokens))
