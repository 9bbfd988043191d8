"""The position-pair baseline: equal to the definition and to the factored tiles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trine.ops.kda import kda, kda_pairwise
from trine.ops.kda.pairwise import end_decays, pair_products


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("regime", ["random", "saturated", "identical keys", "fast and slow channels"])
def test_equal_to_the_definition(lab: SimpleNamespace, regime: str, dtype: torch.dtype) -> None:
    lab.check(kda_pairwise, lab.draw(50, regime=regime, key=10, value=8), dtype)


def test_equal_to_the_factored_tiles_on_packed_documents(lab: SimpleNamespace) -> None:
    inputs = lab.draw(90, sequences=3, key=10, value=8)
    packed = lab.cu(40, 1, 49)
    errors = lab.relative_errors(
        lab.run(kda_pairwise, inputs, cu_seqlens=packed), lab.run(kda, inputs, cu_seqlens=packed)
    )
    assert max(errors.values()) <= 1e-12


def test_pair_products_sum_the_gates_between_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trine.ops.kda.pairwise.BLOCK", 2)
    reads, w = torch.randn(5, 32, 3).double(), torch.randn(5, 16, 3).double()
    g = -torch.rand(5, 16, 3).double() * 50
    products = pair_products(reads, w, g)
    for i, j in ((0, 0), (7, 7), (9, 2), (15, 0)):
        decay = g[:, j + 1 : i + 1].sum(1).exp()
        assert torch.allclose(products[:, i, j], (reads[:, i] * w[:, j] * decay).sum(-1), rtol=1e-12)
        assert torch.allclose(products[:, 16 + i, j], (reads[:, 16 + i] * w[:, j] * decay).sum(-1), rtol=1e-12)
    grow, shrink = end_decays(g)
    assert torch.allclose(grow[:, 4], g[:, :5].sum(1).exp(), rtol=1e-12)
    assert torch.allclose(shrink[:, 4], g[:, 5:].sum(1).exp(), rtol=1e-12)
    assert torch.equal(shrink[:, 15], torch.ones_like(shrink[:, 15]))


def test_huge_gates_leave_the_slow_tokens_of_a_tile_exact() -> None:
    # A running sum would stand at -5000 after five tokens, where a float32 step is 5e-4.
    g = torch.full((1, 16, 1), -0.01)
    g[:, :5] = -1000.0
    w, reads = torch.ones(1, 16, 1), torch.ones(1, 32, 1)
    products = pair_products(reads, w, g)
    assert products[0, 15, 4].item() == pytest.approx(float(torch.tensor(-0.11).double().exp()), rel=3e-7)
    assert products[0, 15, 3].item() == 0.0
