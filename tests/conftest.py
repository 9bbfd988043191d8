"""Shared fixtures: every test starts from the same seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trine.config import ModelConfig

TINY = {
    "width": 64,
    "layers": 5,
    "mla_layers": (3, 4),
    "heads": 2,
    "head_dim": 16,
    "q_rank": 24,
    "kv_rank": 16,
    "shared_key_dim": 8,
    "dense_width": 96,
    "experts": 8,
    "top_k": 2,
    "latent_width": 16,
    "expert_width": 24,
    "vocab_size": 97,
    "block_layers": 2,
}


def pytest_configure() -> None:
    # The Makefile runs one process a core; more threads than that wait for each other at every small operation.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny_config() -> Callable[..., ModelConfig]:
    """A model small enough for exact tests, with every part; keyword arguments override fields."""

    def make(**overrides: object) -> ModelConfig:
        return ModelConfig(**{**TINY, **overrides})  # type: ignore[arg-type]

    return make
