"""Bias policies: each reads a window of router statistics once, writes the bias in place and closes the window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trine.balance.window import Window
from trine.ops.router import RouterStats


class BalancePolicy(Protocol):
    """What every policy offers: call `step` once after each optimizer step, on every rank."""

    def step(self, stats: RouterStats) -> Window:
        """Reduce the window over ranks, write ``stats.bias_LE`` in place, zero the window; return what it held."""

    def state_dict(self) -> dict[str, Any]:
        """What the policy remembers between steps, beside the bias: JSON-ready values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
