"""Balance a mixture of experts that somebody else wrote in plain torch: fifteen lines between the two marks.

`TheirRouter` and `TheirMoE` know nothing of Trine and stay as they are. The data are skewed (one direction dominates),
so the untouched routers send most tokens to a few experts. Quantile Balancing needs no auxiliary loss and no step size:
the bias that it solves after each step only chooses, weights stay those of the raw scores. It is added to logits:
softmax scores of many experts crowd near 0, where the histogram's bins are too coarse for them (docs/balance.md).

The biases live in `stats`, not in the model: save `stats.state_dict()` beside the model's. Where rows are padded give
`route` the mask as well (`mask_T=`, true for tokens), or padding is counted as load.

    python examples/quantile_balancing_in_your_router.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trine.balance import QuantileBalancing, dead_experts, max_violation
from trine.ops.router import LayerStats, RouterStats, route

EXPERTS, K, WIDTH, TOKENS, LAYERS = 32, 2, 16, 2048, 2


class TheirRouter(nn.Module):
    """Softmax, the k best, renormalised."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(torch.softmax(self.gate(x), -1), K)
        return weights / weights.sum(-1, keepdim=True), ids


class TheirMoE(nn.Module):
    """One matrix an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router: nn.Module = TheirRouter()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        return x + (weights[..., None] * torch.einsum("td,tkcd->tkc", x, self.experts[ids])).sum(1)


# -- from here ---------------------------------------------------------------------------------------------------------
class Balanced(nn.Module):
    def __init__(self, theirs: TheirRouter, stats: LayerStats) -> None:
        super().__init__()
        self.theirs, self.stats = theirs, stats

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        counted = self.stats if self.training else None
        routing = route(self.theirs.gate(x), self.stats.bias_E, K, score="softmax", score_domain="logit", stats=counted)
        return routing.weights_TK, routing.ids_TK


def balance(model: nn.Module) -> tuple[RouterStats, QuantileBalancing]:
    moes = [module for module in model.modules() if isinstance(module, TheirMoE)]
    stats = RouterStats.allocate(len(moes), EXPERTS, score_domain="logit")  # counts and biases of all layers
    for i, moe in enumerate(moes):
        moe.router = Balanced(moe.router, stats.layer(i))
    return stats, QuantileBalancing(K)  # and after each optimizer step: policy.step(stats)


# -- to here -----------------------------------------------------------------------------------------------------------


def train(steps: int, balanced: bool) -> list[tuple[float, int]]:
    """Imitate a nonlinear map; (largest MaxVio of the layers, dead experts of all) of every step."""
    torch.manual_seed(0)
    target, direction = nn.Linear(WIDTH, WIDTH), 2 * torch.randn(WIDTH)
    model = nn.Sequential(*(TheirMoE() for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if balanced:
        stats, policy = balance(model)
    chosen: list[Tensor] = []
    for moe in model:
        moe.router.register_forward_hook(lambda _, __, output: chosen.append(output[1]))
    history = []
    for _ in range(steps):
        x = torch.randn(TOKENS, WIDTH) + direction
        loss = (model(x) - torch.tanh(target(x)).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if balanced:
            policy.step(stats)
        loads = torch.stack([torch.bincount(ids.flatten(), minlength=EXPERTS) for ids in chosen])
        chosen.clear()
        history.append((float(max_violation(loads).max()), int(dead_experts(loads).sum())))
    return history


if __name__ == "__main__":
    for name, balanced in (("plain top-k", False), ("Quantile Balancing", True)):
        path = train(12, balanced)
        print(f"{name:>18}: MaxVio", *(f"{violation:.2f}" for violation, _ in path), "| dead at the end:", path[-1][1])
