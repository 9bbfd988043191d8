"""Policies that leave the bias alone: frozen, and replayed."""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist

from trine._log import logger
from trine.balance.load_policy import LoadPolicy
from trine.balance.window import Window
from trine.ops.router import RouterStats


class Freeze(LoadPolicy):
    """The bias stays bit for bit; loads are still summed and reported.

    Fine-tuning on narrow data wants this: balance on a few topics would push general experts away from what they do. In
    a fresh run, whose bias is 0, it is no balancing at all.
    """


class Replay(LoadPolicy):
    """Routing replay: the bias stays, because choices that were made elsewhere say nothing about it.

    The choices come with the batch (``Model.loss(batch, replay_LTK=...)``): weights are then those of the live scores,
    normalised over the replayed experts, and gradients reach their logits. Batches that carry none are routed live with
    the bias as it is, which is told once.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._told = False

    def move(self, stats: RouterStats, window: Window, live_L: Tensor) -> None:
        """Nothing but the word about live tokens."""
        if not self._told and bool(live_L.any()):
            self._told = True
            logger.warning(
                "balance.policy 'replay': batches without recorded choices are routed live, with the bias as it is"
            )
