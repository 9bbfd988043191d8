"""Stable LatentMoE against its equation, one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trine.nn import LatentMoE
from trine.ops.router import RouterStats

D, E, L, F, TOP = 10, 6, 4, 5, 2


def situ(g: Tensor, u: Tensor) -> Tensor:
    return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)


def make(**keywords: object) -> tuple[LatentMoE, RouterStats]:
    layer = LatentMoE(
        *(D,),
        **{"experts": E, "top_k": TOP, "latent_width": L, "expert_width": F, "shared_experts": 2, **keywords},  # type: ignore[arg-type]
    ).double()
    stats = RouterStats.allocate(1, E)
    layer.stats = stats.layer(0)
    stats.bias_LE.normal_(std=0.3)
    return layer, stats


def by_hand(layer: LatentMoE, x_D: Tensor, bias_E: Tensor) -> Tensor:
    """K3 report, Eq. 11 and 13, for one token."""
    score_E = torch.sigmoid(layer.router.weight @ x_D)
    chosen = (score_E + bias_E).topk(TOP).indices.tolist()
    z = layer.latent_down.weight @ x_D
    u = torch.zeros(L, dtype=torch.float64)
    for e in chosen:
        inner = situ(layer.expert_gate[e] @ z, layer.expert_up[e] @ z)
        u = u + score_E[e] / score_E[chosen].sum() * (layer.expert_down[e] @ inner)
    if layer.latent_norm is not None:
        u = u / (u.square().mean() + 1e-5).sqrt() * layer.latent_norm.weight
    y = layer.latent_up.weight @ u
    if layer.shared is not None:
        s = layer.shared
        y = y + s.down_proj.weight @ situ(s.gate_proj.weight @ x_D, s.up_proj.weight @ x_D)
    return y


@pytest.mark.parametrize("keywords", [{}, {"latent_norm": False}, {"shared_experts": 0}])
def test_layer_equals_its_equation(keywords: dict[str, object]) -> None:
    layer, stats = make(**keywords)
    x_TD = torch.randn(30, D, dtype=torch.float64)
    expected = torch.stack([by_hand(layer, x_D, stats.bias_LE[0].double()) for x_D in x_TD])
    torch.testing.assert_close(layer(x_TD), expected, rtol=1e-10, atol=1e-10)


def test_counting_needs_training_gradients_and_a_first_pass() -> None:
    layer, stats = make()
    x_TD = torch.randn(30, D, dtype=torch.float64)
    layer.eval()
    layer(x_TD)
    layer.train()
    with torch.no_grad():
        layer(x_TD)
    with layer.recomputing():
        layer(x_TD)
    assert int(stats.loads_LE.sum()) == 0
    layer(x_TD)
    assert int(stats.loads_LE.sum()) == 30 * TOP


def test_padding_is_neither_routed_nor_counted() -> None:
    layer, stats = make()
    x_TD = torch.randn(30, D, dtype=torch.float64)
    real_TD = layer(x_TD[:20])
    counted = stats.loads_LE.clone()
    stats.loads_LE.zero_()
    masked_TD = layer(x_TD, torch.arange(30) < 20)
    torch.testing.assert_close(masked_TD[:20], real_TD, rtol=1e-10, atol=1e-10)
    assert torch.equal(stats.loads_LE, counted)


def test_a_layer_without_statistics_routes_without_bias() -> None:
    layer, _ = make()
    layer.stats = None
    x_TD = torch.randn(5, D, dtype=torch.float64)
    expected = torch.stack([by_hand(layer, x_D, torch.zeros(E, dtype=torch.float64)) for x_D in x_TD])
    torch.testing.assert_close(layer(x_TD), expected, rtol=1e-10, atol=1e-10)
