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
from trine.ops.router import LayerStats, Routing, route
from trine.ops.router.auxiliary import LoadPressure, auxiliary_loss
from trine.ops.router.stateless import Stateless, route_stateless


class LatentMoE(nn.Module):
    """y = Σ_shared E(x) + W↑ RMSNorm(Σ_{j ∈ top-k} p_j E_j(W↓ x)) (K3 report, Eq. 11 and 13).

    The router reads the full-width x in float32; the bias only selects. `stats` is this layer's view of the model's
    `RouterStats`: it holds the bias and, while training, receives loads and required-bias histograms.

    Balancing rules that act in the forward pass, in training only, are given from outside: `stateless` chooses experts
    by thresholds of the batch; with `pressure` each pass leaves its tokens' auxiliary loss in `auxiliary_T`.
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
        self.stateless: Stateless | None = None
        self.pressure: LoadPressure | None = None
        self.auxiliary_T: Tensor | None = None
        self.heard: list[Tensor] | None = None  # where each pass appends its choices [T, k]; None keeps none
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

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, replay_TK: Tensor | None = None) -> Tensor:
        """Route and mix each token alone; tokens where `mask_T` is False are not counted.

        Args:
            x_TD: tokens.
            mask_T: bool, True for real tokens.
            replay_TK: int64 experts to use instead of this router's own choice (routing replay).
        """
        dtype = at_least_float32(x_TD.dtype)
        logits_TE = F.linear(x_TD.to(dtype), self.router.weight.to(dtype))
        routing = self._route(logits_TE, mask_T, replay_TK)
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

    def _route(self, logits_TE: Tensor, mask_T: Tensor | None, replay_TK: Tensor | None) -> Routing:
        """Choose experts; count them, note the auxiliary loss and the choices of a first pass only."""
        bias_E = self.stats.bias_E if self.stats is not None else logits_TE.new_zeros(logits_TE.shape[1])
        trains = self.training and torch.is_grad_enabled()
        stats = self.stats if trains and not self._recomputing else None
        if self.stateless is not None and trains and replay_TK is None:
            routing = route_stateless(logits_TE, bias_E, self.top_k, self.stateless, stats=stats, mask_T=mask_T)
        else:
            domain = self.stats.score_domain if self.stats is not None else "sigmoid"
            routing = route(
                *(logits_TE, bias_E, self.top_k), stats=stats, mask_T=mask_T, ids_TK=replay_TK, score_domain=domain
            )
        if self.pressure is not None and trains and replay_TK is None:
            # computed again in a recomputation, which must repeat the pass, but kept from the first one
            auxiliary_T = auxiliary_loss(routing.scores_TE, self.pressure.layer(self.stats.index if self.stats else 0))
            if not self._recomputing:
                self.auxiliary_T = auxiliary_T
        if self.heard is not None and not self._recomputing:
            self.heard.append(routing.ids_TK)
        return routing
