"""Loss-free balancing: steps of one length against the sign of each expert's excess load."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from trine.balance.load_policy import LoadPolicy, write_bias
from trine.balance.window import Window
from trine.ops.router import RouterStats


class SignBalancing(LoadPolicy):
    """b_j += u sign(mean load - load_j), then centred (Loss-Free Balancing, arXiv 2408.15664, algorithm 1).

    The sign is taken of integers, so an expert with exactly the mean load stays.

    Args:
        step_size: u, in units of the score.
        group: ranks that hold different tokens; default all.

    Raises:
        ValueError: a step that is not a finite number above 0.
    """

    def __init__(self, step_size: float = 1e-3, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        if not 0 < step_size < float("inf"):
            raise ValueError(f"step_size: found {step_size}, need a finite number above 0")
        self.step_size = step_size

    def move(self, stats: RouterStats, window: Window, live_L: Tensor) -> None:
        """One step of every expert in the layers that routed live tokens."""
        behind_LE = torch.sign(window.loads_LE.sum(1, keepdim=True) - stats.experts * window.loads_LE)
        write_bias(stats, stats.bias_LE.double() + self.step_size * behind_LE, live_L)
