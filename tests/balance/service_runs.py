"""What the tests of the balance service share: windows of one small run, and the steps that a policy makes of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from trine.ops.router import RouterStats, route

EXPERTS, K, TOKENS = 16, 2, 512
OFFSET_E = torch.linspace(-1.5, 1.5, EXPERTS)


def logits(step: int, layers: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(layers, TOKENS, EXPERTS, generator=generator) + OFFSET_E


def window(stats: RouterStats, step: int) -> None:
    for layer, logits_TE in enumerate(logits(step)):
        route(logits_TE, stats.bias_LE[layer], K, stats=stats.layer(layer), score_domain=stats.score_domain)


def drive(policy: Any, steps: range, stats: RouterStats | None = None) -> tuple[RouterStats, list[torch.Tensor]]:
    """The statistics, and the bias after each step."""
    stats = RouterStats.allocate(2, EXPERTS, 100) if stats is None else stats
    path = []
    for step in steps:
        window(stats, step)
        policy.step(stats)
        path.append(stats.bias_LE.clone())
    return stats, path


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.005)
