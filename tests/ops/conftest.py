"""The tile sizes of a card, tried on the CPU; and counts of dispatched operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from trine.ops import _tiles
from trine.ops.latent_attention import plan


@pytest.fixture
def card_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator divides its work as on a card."""
    monkeypatch.setattr(_tiles, "on_card", lambda device: True)


@pytest.fixture(params=["cpu", "card", "small card"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs with the CPU's tiles, with a card's, and with a card's way of dividing into many small ones."""
    if request.param != "cpu":
        request.getfixturevalue("card_tiles")
    if request.param == "small card":
        monkeypatch.setattr(_tiles, "CARD", 300)
        monkeypatch.setattr(plan, "CARD", plan.Tiling(16, 64, 64, 64 * 64))


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def dispatched() -> Callable[[Callable[[], object]], int]:
    """How many operations, views included, a call sends to the dispatcher: more than its launches on a card."""

    def count(call: Callable[[], object]) -> int:
        with _Count() as counter:
            call()
        return counter.calls

    return count
