"""Bias policies: each reads a window of router statistics once, writes the bias in place and closes the window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from trine.ops.router import RouterStats


@dataclass(frozen=True)
class WindowLoads:
    """What a window held, over all ranks: a copy that survives the window. Tensors stay on the statistics' device.

    Attributes:
        loads_LE: ``[L, E]`` int64 tokens of each expert.
        tokens_L: ``[L]`` int64 tokens routed.
        dropped_L: ``[L]`` int64 tokens left out because a score was not finite.
        saturated_L: ``[L]`` int64 scores that fp32 cannot tell from 0 or 1 (of tokens x experts).
    """

    loads_LE: Tensor
    tokens_L: Tensor
    dropped_L: Tensor
    saturated_L: Tensor

    @classmethod
    def of(cls, stats: RouterStats) -> WindowLoads:
        """Copy them from the open window, without waiting for the device."""
        return cls(stats.loads_LE.long(), stats.tokens_L, stats.dropped_L, stats.saturated_L)


class BalancePolicy(Protocol):
    """What every policy offers: call `step` once after each optimizer step, on every rank."""

    def step(self, stats: RouterStats) -> WindowLoads:
        """Reduce the window over ranks, write ``stats.bias_LE`` in place, zero the window; return what it held."""

    def state_dict(self) -> dict[str, Any]:
        """What the policy remembers between steps, beside the bias: JSON-ready values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""


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
    def step(self, stats: RouterStats) -> WindowLoads:
        """Reduce, solve, zero. A rank without tokens takes part with zeros; no tokens anywhere: the bias stays.

        Raises:
            ValueError: k exceeds the number of experts.
        """
        reduce_counts(stats, self.group)
        window = WindowLoads.of(stats)
        stats.solve_(self.k, ema=self.ema).zero_()
        return window

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


def reduce_counts(stats: RouterStats, group: dist.ProcessGroup | None = None) -> None:
    """Sum all counts over the ranks of ``group``, in place, in one collective; nothing to do in a single process.

    Integer sums do not depend on their order, so every rank holds the same bits after it.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(stats.counts, group=group)
