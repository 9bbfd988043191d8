"""Quantile Balancing as a policy: the bias of the next step is solved from the required biases of this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist

from trine.balance.window import Window, reduce_counts
from trine.ops.router import RouterStats


class QuantileBalancing:
    """Quantile Balancing as the report has it (K3 report, arXiv 2607.24653, section 2.3.3 and appendix D).

    The bias of each expert becomes the k/E quantile of its required biases over all tokens of the step, on all ranks:
    one integer all-reduce for all layers, then the same solve everywhere, so ranks agree to the bit. There is no step
    size and no auxiliary loss; the update acts from the next step on. At inference the last bias stays.

    Args:
        k: experts per token.
        ema: share of the old bias kept in an update, 0 (the report) to below 1. Near balance the bias only follows
            the noise of one step's tokens, and averaging removes part of it; on the way to balance it is slower.
        group: ranks that hold different tokens; default all. Ranks that route copies of the same tokens must not be
            in it together.

    Raises:
        ValueError: bad ``k`` or ``ema``.
    """

    def __init__(self, k: int, *, ema: float = 0.0, group: dist.ProcessGroup | None = None) -> None:
        if k < 1:
            raise ValueError(f"k: found {k}, need at least 1")
        if not 0.0 <= ema < 1.0:
            raise ValueError(f"ema: found {ema}, need 0 <= ema < 1")
        self.k = k
        self.ema = ema
        self.group = group

    @torch.no_grad()
    def step(self, stats: RouterStats) -> Window:
        """Reduce, solve, zero. A rank without tokens takes part with zeros; no tokens anywhere: the bias stays.

        Raises:
            ValueError: k exceeds the number of experts.
        """
        reduce_counts(stats, self.group)
        window = Window.of(stats)
        self.solve_(stats)
        stats.zero_()
        return window

    def solve_(self, stats: RouterStats) -> None:
        """Write the bias solved from counts that are reduced already; the window stays open.

        Raises:
            ValueError: k exceeds the number of experts.
        """
        stats.solve_(self.k, ema=self.ema)

    def settings(self) -> dict[str, int | float | str]:
        """Keyword arguments that make the same policy in another process, JSON-ready."""
        return {"k": self.k, "ema": self.ema}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the bias is all the memory it has, and `RouterStats` keeps that."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back nothing.

        Raises:
            ValueError: the state is another policy's.
        """
        if state:
            raise ValueError(f"state: found {sorted(state)}, need an empty one: QuantileBalancing remembers nothing")
