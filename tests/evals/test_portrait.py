"""Depth-mix weights and similarity of layers, against their definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trine.config import ModelConfig
from trine.evals.portrait import cka, portrait
from trine.model import Model


def test_similarity_ignores_rotation_scale_and_shift() -> None:
    x = torch.randn(50, 6, dtype=torch.float64)
    turn, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    assert cka(x, 3 * x @ turn + 5) == pytest.approx(1.0)
    assert cka(x, torch.randn(50, 6, dtype=torch.float64)) < 0.6
    assert cka(x, torch.ones(50, 2)) == 0.0


def test_untrained_queries_read_all_sources_alike(tiny_config: Callable[..., ModelConfig]) -> None:
    model = Model(tiny_config())
    model.train()
    tokens = torch.randint(97, (40,))
    found = portrait(model, tokens, torch.tensor([0, 15, 40]))
    assert model.training
    labels = [row["label"] for row in found["mix"]]
    # Layer 0's attention reads the embedding alone; blocks have two layers.
    assert labels == [
        "0 feed-forward",
        *(f"{i} {k}" for i in range(1, 5) for k in ("attention", "feed-forward")),
        "head",
    ]
    for row in found["mix"]:
        assert row["weights"] == pytest.approx([1 / len(row["weights"])] * len(row["weights"]))
    assert [len(row["weights"]) for row in found["mix"]] == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    labels, values = found["similarity"]["labels"], torch.tensor(found["similarity"]["values"])
    assert labels == ["0", "1", "2", "3", "4", "head"]
    assert torch.allclose(values, values.T) and torch.allclose(values.diag(), torch.ones(6))
    assert (values >= 0).all() and (values <= 1 + 1e-6).all() and values[0, 5] < 0.99


def test_a_query_shows_where_it_points(tiny_config: Callable[..., ModelConfig]) -> None:
    model = Model(tiny_config(layers=2, mla_layers=(1,), block_layers=1))
    with torch.no_grad():
        model.embed.weight[:] = 0
        model.embed.weight[:, 0] = 3.0
        model.residual.final.query[0] = 50.0
    weights = portrait(model, torch.arange(8))["mix"][-1]["weights"]
    assert weights[0] > 0.99 and sum(weights) == pytest.approx(1.0)


def test_other_residuals_have_no_mix(tiny_config: Callable[..., ModelConfig]) -> None:
    found = portrait(Model(tiny_config(residual="plain")), torch.arange(20))
    assert found["mix"] == [] and len(found["similarity"]["labels"]) == 6
