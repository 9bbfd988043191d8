"""Kimi Delta Attention as a layer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trine.config import GateKind
from trine.nn.precision import Float32Parameters, at_least_float32, float32_parameter
from trine.nn.short_conv import ShortConv
from trine.ops.kda import kda, kda_step

# dt is drawn log-uniformly from this range and dt_bias is its inverse softplus, as in Mamba-2 and Kimi Linear: the
# bias then spans about -6.9 to -2.3 and channels start with memories from two to two hundred tokens.
DT_RANGE = (1e-3, 0.1)
DT_FLOOR = 1e-4


class KdaPast(NamedTuple):
    """What N sequences carry through one KDA layer: recurrent state ``[N, H, K, K]``, float32 (float64 in a float64
    layer), and the last inputs of the convolution ``[N, W - 1, 3 H K]`` in the layer's dtype. Zeros before any token:
    `KimiDeltaAttention.empty_past`."""

    state_NHKV: Tensor
    window_NWC: Tensor


class KimiDeltaAttention(Float32Parameters):
    """y = W_o [ σ(W_g x) ⊙ RMSNorm_head(KDA(q, k, v, g, β)) ] (K3 report, Eq. 1-6).

    q, k, v = SiLU(ShortConv(W x)), q and k L2-normalised a head; g = g_min·σ(e^A (W↑W↓x + dt_bias)); β = σ(W_β x).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        *,
        conv_kernel: int = 4,
        decay_rank: int | None = None,
        gate_kind: GateKind = "bounded",
        g_min: float = -5.0,
        output_gate: bool = True,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        for name, size in (("width", width), ("heads", heads), ("head_dim", head_dim), ("conv_kernel", conv_kernel)):
            if size < 1:
                raise ValueError(f"{name}: found {size}, need at least 1")
        if gate_kind not in ("bounded", "softplus"):
            raise ValueError(f"gate_kind: found {gate_kind!r}, need 'bounded' or 'softplus'")
        if not -5.5 < g_min < 0:
            raise ValueError(f"g_min: found {g_min}, need a value in (-5.5, 0)")
        self.backend = backend  # of `trine.ops.kda.kda` and `kda_step`: "auto", "torch", "triton"
        self.heads, self.head_dim = heads, head_dim
        self.gate_kind, self.g_min, self.norm_eps = gate_kind, g_min, norm_eps
        inner = heads * head_dim
        self.qkv_proj = nn.Linear(width, 3 * inner, bias=False)  # rows: all heads of q, then of k, then of v
        self.conv = ShortConv(3 * inner, conv_kernel)
        self.decay_down = nn.Linear(width, decay_rank or head_dim, bias=False)
        self.decay_up = nn.Linear(decay_rank or head_dim, inner, bias=False)
        self.beta_proj = nn.Linear(width, heads, bias=False)
        self.A_log = float32_parameter(heads)
        self.dt_bias = float32_parameter(heads, head_dim)
        self.output_gain = float32_parameter(head_dim)
        self.gate_proj = nn.Linear(width, inner, bias=False) if output_gate else None
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.head_blocks = {"qkv_proj.weight": 3 * heads}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A = 0, gain 1 and the time-step bias described at `DT_RANGE`; matrices are left to their own defaults."""
        nn.init.zeros_(self.A_log)
        nn.init.ones_(self.output_gain)
        low, high = (math.log(x) for x in DT_RANGE)
        with torch.no_grad():
            dt = torch.empty_like(self.dt_bias).uniform_(low, high).exp_().clamp_(min=DT_FLOOR)
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def empty_past(self, sequences: int = 1) -> KdaPast:
        """What ``sequences`` carry before their first token: zeros, on the layer's device."""
        weight = self.qkv_proj.weight
        state = (sequences, self.heads, self.head_dim, self.head_dim)
        window = (sequences, self.conv.weight.shape[1] - 1, 3 * self.heads * self.head_dim)
        return KdaPast(weight.new_zeros(state, dtype=at_least_float32(weight.dtype)), weight.new_zeros(window))

    def forward(
        self, x_TD: Tensor, cu_seqlens_N1: Tensor | None = None, past: KdaPast | None = None, step: bool = False
    ) -> tuple[Tensor, KdaPast | None]:
        """Run packed sequences, or with `step` one token of each of N sequences.

        Args:
            x_TD: normed layer input ``[T, width]``.
            cu_seqlens_N1: sequence bounds, None = one sequence (with `step`: T = N sequences).
            past: state and window to start from, of N sequences (first: `empty_past`); the new ones are returned
                exactly when it is given.
            step: needs ``past``.

        Returns:
            ``[T, width]``, and the new past or None.

        Raises:
            ValueError: an input of another shape, a step without a past, and what `kda` and `short_conv` refuse.
        """
        if x_TD.ndim != 2:
            raise ValueError(f"x_TD: found shape {tuple(x_TD.shape)}, need [T, width], sequences packed in one row")
        if step and past is None:
            raise ValueError("past: found None, need the state and window of the N sequences (first: empty_past)")
        state_NHKV, window_NWC = past if past is not None else (None, None)
        # A step is N sequences of one token each, so it is batched over N instead of packed along time.
        qkv_BTC = self.qkv_proj(x_TD)[:, None] if step else self.qkv_proj(x_TD)[None]
        bounds = None if step else cu_seqlens_N1
        qkv_BTC, window_NWC = self.conv(qkv_BTC, bounds, window_NWC, keep=past is not None)
        q, k, v = qkv_BTC.unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)  # [B,T,H,K] each
        gate_THK = self.decay_up(self.decay_down(x_TD)).unflatten(-1, (self.heads, self.head_dim))
        beta_TH = self.beta_proj(x_TD)
        settings: dict[str, Any] = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "gate_kind": self.gate_kind,
            "lower_bound": self.g_min,
            "backend": self.backend,
        }
        if step:
            assert state_NHKV is not None
            o_THV, state_NHKV = kda_step(q[:, 0], k[:, 0], v[:, 0], gate_THK, beta_TH, state_NHKV, **settings)
        else:
            o_BTHV, state_NHKV = kda(
                *(q, k, v, gate_THK[None], beta_TH[None]),
                **settings,
                initial_state=state_NHKV,
                output_final_state=past is not None,
                cu_seqlens=cu_seqlens_N1,
            )
            o_THV = o_BTHV[0]
        o_THV = F.rms_norm(o_THV.to(at_least_float32(o_THV.dtype)), (self.head_dim,), self.output_gain, self.norm_eps)
        o_TC = o_THV.flatten(-2)
        if self.gate_proj is not None:
            o_TC = o_TC * torch.sigmoid(self.gate_proj(x_TD).to(o_TC.dtype))
        y_TD = self.o_proj(o_TC.to(x_TD.dtype))
        if past is None:
            return y_TD, None
        assert state_NHKV is not None and window_NWC is not None
        return y_TD, KdaPast(state_NHKV, window_NWC)
