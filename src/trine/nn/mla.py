"""Gated multi-head latent attention without positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trine.nn.norm import RMSNorm
from trine.ops.latent_attention import Latents, latent_attention
from trine.ops.latent_attention.largest import largest_scores


class HeadPeaks:
    """What QK-clip must know of a batch: the largest scaled score of each head, exact once it exceeds `limit`.

    Up to `limit` an upper bound stands in, which costs next to nothing (`largest_scores`).
    """

    def __init__(self, heads: int, limit: float) -> None:
        self.limit = limit
        self.peak_H = torch.full((heads,), -torch.inf)

    def see(self, peak_H: Tensor) -> None:
        """Take the peaks of a micro-batch in."""
        self.peak_H = torch.maximum(self.peak_H.to(peak_H), peak_H)

    def zero_(self) -> None:
        """Begin a new step."""
        self.peak_H = torch.full_like(self.peak_H, -torch.inf)

    def merge_(self, other: HeadPeaks) -> None:
        """Take in what a replica saw."""
        self.see(other.peak_H)


class GatedMLA(nn.Module):
    """y = W_o [ σ(W_g x) ⊙ Attention(x) ] (K3 report, Eq. 7), NoPE.

    Per head: q = W_qb RMSNorm(W_qa x), content and shared part; [c ; s] = W_kva x with c ← RMSNorm(c);
    key = [W_k c ; s], value = W_v c. No rotation anywhere, so the absorbed form used for decoding is exact. The gate
    acts on attention outputs, from the same normed input.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        *,
        q_rank: int,
        kv_rank: int,
        shared_key_dim: int,
        output_gate: bool = True,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.kv_rank = heads, head_dim, kv_rank
        inner = heads * head_dim
        self.q_down = nn.Linear(width, q_rank, bias=False)
        self.q_norm = RMSNorm(q_rank, norm_eps)
        self.q_up = nn.Linear(q_rank, heads * (head_dim + shared_key_dim), bias=False)
        self.kv_down = nn.Linear(width, kv_rank + shared_key_dim, bias=False)
        self.kv_norm = RMSNorm(kv_rank, norm_eps)
        self.kv_up = nn.Linear(kv_rank, heads * 2 * head_dim, bias=False)  # rows a head: content key, then value
        self.gate_proj = nn.Linear(width, inner, bias=False) if output_gate else None
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.head_blocks = {"q_up.weight": heads, "kv_up.weight": 2 * heads}
        self.peaks: HeadPeaks | None = None  # set by whoever clips (`trine.train.qk_clip`)

    def forward(
        self, x_TD: Tensor, cu_seqlens_N1: Tensor | None = None, past: Latents | None = None, step: bool = False
    ) -> tuple[Tensor, Latents | None]:
        """Run packed sequences; `past` holds the rows `[latent ; shared key]` before them.

        Args:
            x_TD: normed layer input.
            cu_seqlens_N1: sequence bounds, None = one sequence (with `step`: T = N sequences of one token).
            past: latents to attend to as well; the extended ones are returned exactly when it is given.
            step: one new token a sequence, computed in the absorbed form.
        """
        if step:
            cu_seqlens_N1 = torch.arange(x_TD.shape[0] + 1, device=x_TD.device)
        q_THC = self.q_up(self.q_norm(self.q_down(x_TD))).unflatten(-1, (self.heads, -1))
        latent_TR, shared_TS = self.kv_down(x_TD).tensor_split((self.kv_rank,), dim=-1)
        latent_TR = self.kv_norm(latent_TR)
        up_HCR = self.kv_up.weight.view(self.heads, 2 * self.head_dim, self.kv_rank)
        if self.peaks is not None and self.training and torch.is_grad_enabled():
            seen = (q_THC, latent_TR, shared_TS, up_HCR[:, : self.head_dim], cu_seqlens_N1)
            self.peaks.see(largest_scores(*seen, enough=self.peaks.limit))
        o_BTHV = latent_attention(
            *(q_THC[None], latent_TR[None], shared_TS[None], up_HCR[:, : self.head_dim], up_HCR[:, self.head_dim :]),
            cu_seqlens=cu_seqlens_N1,
            past=past,
            form="absorbed" if step else "auto",
        )
        o_TC = o_BTHV[0].flatten(-2)  # float32, as the report keeps it in training
        if self.gate_proj is not None:
            o_TC = o_TC * torch.sigmoid(self.gate_proj(x_TD).to(o_TC.dtype))
        y_TD = self.o_proj(o_TC.to(x_TD.dtype))
        if past is None:
            return y_TD, None
        rows_TM = torch.cat((latent_TR, shared_TS), dim=-1)
        if cu_seqlens_N1 is None:
            cu_seqlens_N1 = torch.tensor([0, x_TD.shape[0]], device=x_TD.device)
        return y_TD, past.append(rows_TM, cu_seqlens_N1)
