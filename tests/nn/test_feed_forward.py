"""The feed-forward is SiTU-GLU between two matrices, on every path a token can take."""

from __future__ import annotations

import pytest
import torch

from trine.nn import FeedForward, LatentMoE


def test_formula() -> None:
    layer = FeedForward(5, 7).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    g, u = x @ layer.gate_proj.weight.T, x @ layer.up_proj.weight.T
    inner = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
    torch.testing.assert_close(layer(x), inner @ layer.down_proj.weight.T, rtol=1e-12, atol=1e-12)


# Failure B020: one path silently ran SwiGLU, whose value here would be 10000.
def test_b020_every_path_is_bounded() -> None:
    dense = FeedForward(1, 1)
    moe = LatentMoE(1, experts=2, top_k=1, latent_width=1, expert_width=1, shared_experts=1, latent_norm=False)
    with torch.no_grad():
        assert moe.shared is not None
        for layer in (dense, moe.shared):
            layer.gate_proj.weight.fill_(50.0)
            layer.up_proj.weight.fill_(200.0)
            layer.down_proj.weight.fill_(1.0)
        moe.latent_down.weight.fill_(1.0)
        moe.latent_up.weight.fill_(1.0)
        moe.expert_gate.fill_(50.0)
        moe.expert_up.fill_(200.0)
        moe.expert_down.fill_(1.0)
        one = torch.ones(1, 1)
        assert float(dense(one)) == pytest.approx(99.99998, abs=2e-5)
        assert float(moe(one)) == pytest.approx(2 * 99.99998, abs=4e-5)
