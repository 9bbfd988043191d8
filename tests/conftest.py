"""Shared fixtures: every test starts from the same seed, and a machine's thread count does not change results."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
