"""Stable LatentMoE."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trine.nn.feed_forward import FeedForward
from trine.nn.norm import RMSNorm
from trine.nn.precision import at_least_float32
from trine.ops.experts import grouped_experts
from trine.ops.router import LayerStats, route


class LatentMoE(nn.Module):
    """y = Σ_shared E(x) + W↑ RMSNorm(Σ_{j ∈ top-k} p_j E_j(W↓ x)) (K3 report, Eq. 11 and 13).

    The router reads the full-width x in float32; the bias only selects. `stats` is this layer's view of the model's
    `RouterStats`: it holds the bias and, while training, receives loads and required-bias histograms.
    """

    def __init__(
        self,
        width: int,
        *,
        experts: int,
        top_k: int,
        latent_width: int,
        expert_width: int,
        shared_experts: int,
        beta: float = 4.0,
        linear_beta: float = 25.0,
        latent_norm: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.top_k, self.beta, self.linear_beta = top_k, beta, linear_beta
        self.router = nn.Linear(width, experts, bias=False)
        self.latent_down = nn.Linear(width, latent_width, bias=False)
        self.expert_gate = nn.Parameter(torch.empty(experts, expert_width, latent_width))
        self.expert_up = nn.Parameter(torch.empty(experts, expert_width, latent_width))
        self.expert_down = nn.Parameter(torch.empty(experts, latent_width, expert_width))
        self.latent_norm = RMSNorm(latent_width, norm_eps) if latent_norm else None
        self.latent_up = nn.Linear(latent_width, width, bias=False)
        self.shared = (
            FeedForward(width, shared_experts * expert_width, beta=beta, linear_beta=linear_beta)
            if shared_experts
            else None
        )
        self.stats: LayerStats | None = None
        self._recomputing = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Expert matrices with standard deviation fan_in^-1/2."""
        for stack in (self.expert_gate, self.expert_up, self.expert_down):
            nn.init.normal_(stack, std=stack.shape[-1] ** -0.5)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """While active, a forward pass counts nothing: it repeats one that was already counted."""
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None) -> Tensor:
        """Route and mix each token alone; tokens where `mask_T` is False are not counted."""
        dtype = at_least_float32(x_TD.dtype)
        logits_TE = F.linear(x_TD.to(dtype), self.router.weight.to(dtype))
        bias_E = self.stats.bias_E if self.stats is not None else logits_TE.new_zeros(logits_TE.shape[1])
        counts = self.training and torch.is_grad_enabled() and not self._recomputing
        routing = route(logits_TE, bias_E, self.top_k, stats=self.stats if counts else None, mask_T=mask_T)
        u_TL = grouped_experts(
            *(self.latent_down(x_TD), routing.ids_TK, routing.weights_TK),
            *(self.expert_gate, self.expert_up, self.expert_down),
            beta=self.beta,
            linear_beta=self.linear_beta,
        )
        if self.latent_norm is not None:
            u_TL = self.latent_norm(u_TL)
        y_TD = self.latent_up(u_TL)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)
