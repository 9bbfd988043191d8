"""Balance the experts of a router of your own: statistics and a policy around a plain linear layer.

The data are skewed (one direction dominates), so an untouched router sends most tokens to a few experts. The numbered
lines are all that Quantile Balancing adds: no auxiliary loss, no step size.

    python examples/quantile_balancing_in_your_router.py
"""

from __future__ import annotations

import torch

from trine.balance import QuantileBalancing, dead_experts, max_violation
from trine.ops.router import RouterStats, route

EXPERTS, K, WIDTH, TOKENS = 32, 2, 16, 2048


def train(steps: int, balanced: bool) -> list[tuple[float, int]]:
    """Train router and experts (one matrix each) to imitate a nonlinear map; (MaxVio, dead experts) of every step."""
    torch.manual_seed(0)
    target, direction = torch.nn.Linear(WIDTH, WIDTH), 2 * torch.randn(WIDTH)
    router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
    experts = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
    optimizer = torch.optim.Adam([*router.parameters(), experts], lr=1e-3)
    stats = RouterStats.allocate(layers=1, experts=EXPERTS)  # 1: counts and biases of all layers
    policy = QuantileBalancing(K)  # 2
    history = []
    for _ in range(steps):
        x_TD = torch.randn(TOKENS, WIDTH) + direction
        routing = route(router(x_TD), stats.bias_LE[0], K, stats=stats.layer(0))  # 3: in place of your top-k
        outputs_TKD = torch.einsum("td,tkcd->tkc", x_TD, experts[routing.ids_TK])
        y_TD = (routing.weights_TK[..., None] * outputs_TKD).sum(1)
        loss = (y_TD - torch.tanh(target(x_TD)).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loads_LE = policy.step(stats).loads_LE if balanced else stats.loads_LE.clone()  # 4: after each optimizer step
        stats.zero_()
        history.append((float(max_violation(loads_LE)[0]), int(dead_experts(loads_LE)[0])))
    return history


if __name__ == "__main__":
    for name, balanced in (("plain top-k", False), ("Quantile Balancing", True)):
        path = train(12, balanced)
        print(f"{name:>18}: MaxVio", *(f"{violation:.2f}" for violation, _ in path), "| dead at the end:", path[-1][1])
