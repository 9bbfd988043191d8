"""A word, once a layer, about routers whose scores fp32 can no longer tell apart."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from trine._log import logger
from trine.balance.window import Window

SHARE = 0.01  # of scores equal to 0 or 1 in fp32


class SaturationWarning:
    """Warns of each layer once when more than `SHARE` of its scores are saturated.

    On the CPU at once; on a card the figures of a step are looked at when a later one comes and their copy has arrived,
    so that nobody waits for it.
    """

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def look(self, window: Window) -> None:
        """Judge a window of scores (biases of logits do not mind saturated scores)."""
        share_L = window.saturated_L.double() / (window.tokens_L * window.loads_LE.shape[1]).clamp(min=1)
        if share_L.device.type != "cuda":
            if share_L.device.type == "cpu":
                self._tell(share_L)
            return
        if self._pending is not None and self._pending[1].query():
            self._tell(self._pending[0])
            self._pending = None
        if self._pending is None:
            copy_L = torch.empty(share_L.shape, dtype=share_L.dtype, pin_memory=True)
            copy_L.copy_(share_L, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = copy_L, event

    def _tell(self, share_L: Tensor) -> None:
        for layer in (share_L > SHARE).nonzero().flatten().tolist():
            if layer in self._told:
                continue
            self._told.add(layer)
            if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
                logger.warning(
                    "router of MoE layer %d: %.1f %% of its scores are 0 or 1 in fp32, too close to be told apart; "
                    'score_domain="logit" balances saturated routers',
                    layer,
                    100.0 * float(share_L[layer]),
                )
