"""Routed experts: a grouped SiTU feed-forward over expert-sorted tokens (K3 report, arXiv 2607.24653, Eq. 11-12)."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops._backend import pick
from trine.ops.experts.torch_grouped import GroupedExperts, infer

__all__ = ["grouped_experts"]


def grouped_experts(
    x_TL: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_EFL: Tensor,
    up_EFL: Tensor,
    down_ELF: Tensor,
    *,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    backend: str = "auto",
) -> Tensor:
    """y_t = sum over the chosen experts e of w_te * down_e situ_glu(gate_e x_t, up_e x_t) (K3 report Eq. 11-12).

    Gradients reach x, weights and all three stacks; an expert without tokens gets exact zeros. Same inputs, same bits.

    Args:
        x_TL: ``[T, L]`` latent tokens, floating point.
        ids_TK: ``[T, K]`` int64 experts; -1 = nowhere (what `route` gives padding): adds nothing, gets no gradient.
        weights_TK: ``[T, K]`` mixing weights, fp32 or the dtype of x.
        gate_EFL: ``[E, F, L]`` of x's dtype.
        up_EFL: ``[E, F, L]`` of x's dtype.
        down_ELF: ``[E, L, F]`` of x's dtype.
        beta: soft cap of the gate branch.
        linear_beta: soft cap of the up branch.
        backend: ``"auto"``, ``"torch"`` (sorted, any device) or ``"reference"`` (loop over experts, any dtype).

    Returns:
        ``[T, L]`` of x's dtype. Products run in it; activation and weights in fp32 (fp64 for fp64).

    Raises:
        ValueError: bad shape, dtype or device, a cap that is not positive, or an id out of range (values are read on
            the CPU only).
        BackendUnavailable: an explicit backend that cannot run.
    """
    _check(x_TL, ids_TK, weights_TK, gate_EFL, up_EFL, down_ELF, beta, linear_beta)
    reasons = {"torch": None, "reference": None, "triton": "needs a kernel that this version does not have"}
    chosen = pick("grouped_experts", backend, x_TL.device.type, reasons)
    if chosen == "reference":
        from trine.ops.experts.reference import reference

        return reference(x_TL, ids_TK, weights_TK, gate_EFL, up_EFL, down_ELF, beta, linear_beta)
    tensors = (x_TL, weights_TK, gate_EFL, up_EFL, down_ELF)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return infer(x_TL, ids_TK, weights_TK, gate_EFL, up_EFL, down_ELF, beta, linear_beta)
    return GroupedExperts.apply(x_TL, ids_TK, weights_TK, gate_EFL, up_EFL, down_ELF, beta, linear_beta)


def _check(
    x_TL: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_EFL: Tensor,
    up_EFL: Tensor,
    down_ELF: Tensor,
    beta: float,
    linear_beta: float,
) -> None:
    if x_TL.ndim != 2 or not x_TL.is_floating_point():
        raise ValueError(f"x_TL: found shape {tuple(x_TL.shape)} of {x_TL.dtype}, need a floating-point [T, L]")
    tokens, latent = x_TL.shape
    if ids_TK.ndim != 2 or ids_TK.shape[0] != tokens or ids_TK.shape[1] < 1 or ids_TK.dtype != torch.int64:
        raise ValueError(
            f"ids_TK: found shape {tuple(ids_TK.shape)} of {ids_TK.dtype}, need [{tokens}, K] int64 with K >= 1"
        )
    if weights_TK.shape != ids_TK.shape or weights_TK.dtype not in (torch.float32, x_TL.dtype):
        raise ValueError(
            f"weights_TK: found shape {tuple(weights_TK.shape)} of {weights_TK.dtype}, need {list(ids_TK.shape)} of "
            f"float32 or {x_TL.dtype}"
        )
    if gate_EFL.ndim != 3 or gate_EFL.shape[0] < 1 or gate_EFL.shape[2] != latent:
        raise ValueError(f"gate_EFL: found shape {tuple(gate_EFL.shape)}, need [E, F, {latent}]")
    experts, inner, _ = gate_EFL.shape
    if up_EFL.shape != gate_EFL.shape:
        raise ValueError(f"up_EFL: found shape {tuple(up_EFL.shape)}, need {list(gate_EFL.shape)}, that of gate_EFL")
    if down_ELF.shape != (experts, latent, inner):
        raise ValueError(f"down_ELF: found shape {tuple(down_ELF.shape)}, need {[experts, latent, inner]}")
    named = {"gate_EFL": gate_EFL, "up_EFL": up_EFL, "down_ELF": down_ELF, "ids_TK": ids_TK, "weights_TK": weights_TK}
    for name, tensor in named.items():
        if name.endswith(("FL", "LF")) and tensor.dtype != x_TL.dtype:
            raise ValueError(f"{name}: found dtype {tensor.dtype}, need {x_TL.dtype}, that of x_TL")
        if tensor.device != x_TL.device:
            raise ValueError(f"{name}: found device {tensor.device}, need {x_TL.device}, that of x_TL")
    for cap_name, cap in (("beta", beta), ("linear_beta", linear_beta)):
        if not cap > 0:
            raise ValueError(f"{cap_name}: found {cap}, need a positive number")
    if ids_TK.device.type == "cpu" and ids_TK.numel():
        low, high = (int(value) for value in torch.aminmax(ids_TK))
        if low < -1 or high >= experts:
            raise ValueError(
                f"ids_TK: found {low if low < -1 else high}, need 0 <= id < {experts}, or -1 for no expert"
            )
