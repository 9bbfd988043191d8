"""What policies that look at loads share: one small all-reduce, a window, a move, and the window closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from trine.balance.window import Window
from trine.ops.router import COUNTERS, RouterStats


class Memoryless:
    """State of a policy whose only memory is the bias, which `RouterStats` keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back nothing.

        Raises:
            ValueError: the state is another policy's.
        """
        if state:
            raise ValueError(
                f"state: found {sorted(state)}, need an empty one: {type(self).__name__} remembers nothing"
            )


class LoadPolicy(Memoryless):
    """A policy that decides by loads; without `move` it leaves the bias as it is.

    Args:
        group: ranks that hold different tokens; default all. Ranks that route copies of the same tokens must not be
            in it together.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    @torch.no_grad()
    def step(self, stats: RouterStats) -> Window:
        """Sum loads and counters over ranks in one integer all-reduce for all layers, move, zero.

        Histograms are not summed, as no load policy reads them: E integers a layer travel, not E x bins. So
        ``margins_LQ`` and ``overflow_L`` of the window are those of this rank's tokens.
        """
        reduce_loads(stats, self.group)
        window = Window.of(stats)
        self.move(stats, window, live_layers(stats))
        stats.zero_()
        return window

    def move(self, stats: RouterStats, window: Window, live_L: Tensor) -> None:
        """Write ``stats.bias_LE`` in place.

        Args:
            stats: the open window, summed over ranks.
            window: a copy of what it holds.
            live_L: see `live_layers`; the other layers keep their bias.
        """


def reduce_loads(stats: RouterStats, group: dist.ProcessGroup | None = None) -> None:
    """Sum all counts but the histograms over the ranks of ``group``, in place; nothing to do in a single process.

    Loads and counters lie behind the histograms in one buffer, so this is one collective for all layers.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(stats.counts[stats.histograms_LEB.numel() :], group=group)


def live_layers(stats: RouterStats) -> Tensor:
    """Which layers routed tokens in this window, all by their own choice, ``[L]`` bool.

    Replayed choices say nothing about the bias, and with k = E there is no choice: both are routed, not counted.
    """
    routed_L, counted_L, dropped_L = (
        stats.counters_LF[:, COUNTERS.index(name)].long() for name in ("routed", "counted", "dropped")
    )
    return (counted_L > 0) & (counted_L + dropped_L == routed_L)


def write_bias(stats: RouterStats, bias_LE: Tensor, live_L: Tensor) -> None:
    """Put ``bias_LE`` (fp64), less its mean, into the layers of ``live_L``, in place."""
    centred_LE = bias_LE - bias_LE.mean(1, keepdim=True)
    stats.bias_LE.copy_(torch.where(live_L[:, None], centred_LE, stats.bias_LE.double()))
