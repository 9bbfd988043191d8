"""Quantile Balancing as a policy: the bias of the next step is solved from the required biases of this one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from trine.balance.load_policy import Memoryless
from trine.balance.router_warnings import LayerWarnings
from trine.balance.window import Window, reduce_counts
from trine.ops.router import RouterStats

FEW_TOKENS = 4.0  # mean load below which one step's quantiles are mostly chance
LEAST_GAIN = 0.25
NEAR, FAR = 1.5, 3.0  # times the floor of the load's coefficient of variation: least gain up to NEAR, 1 from FAR on


class QuantileBalancing(Memoryless):
    """Quantile Balancing as the report has it (K3 report, arXiv 2607.24653, section 2.3.3 and appendix D).

    The bias of each expert becomes the k/E quantile of its required biases over all tokens of the step, on all ranks:
    one integer all-reduce for all layers, then the same solve everywhere, so ranks agree to the bit. There is no step
    size and no auxiliary loss; the update acts from the next step on. At inference the last bias stays. Which
    histogram, and whether biases act on scores or logits, is what the `RouterStats` were allocated with.

    With fewer than `FEW_TOKENS` tokens an expert, m k / E < 4, only the share m k / (4 E) of the change is made: such
    quantiles are mostly chance. No token: the bias stays.

    Args:
        k: experts per token.
        ema: share of the old bias kept in an update, 0 (the report) to below 1. Near balance the bias only follows
            the noise of one step's tokens, and averaging removes part of it; on the way to balance it is slower.
        group: ranks that hold different tokens; default all. Ranks that route copies of the same tokens must not be
            in it together.
        adaptive_gain: make the whole change while loads are far from even, a quarter of it near the sampling floor
            (`load_gain`): there a step's quantiles carry as much noise as its loads, and averaging removes most of it.

    Raises:
        ValueError: bad ``k`` or ``ema``.
    """

    def __init__(
        self, k: int, *, ema: float = 0.0, group: dist.ProcessGroup | None = None, adaptive_gain: bool = False
    ) -> None:
        if k < 1:
            raise ValueError(f"k: found {k}, need at least 1")
        if not 0.0 <= ema < 1.0:
            raise ValueError(f"ema: found {ema}, need 0 <= ema < 1")
        self.k = k
        self.ema = ema
        self.group = group
        self.adaptive_gain = adaptive_gain
        self._warnings = LayerWarnings()

    @torch.no_grad()
    def step(self, stats: RouterStats) -> Window:
        """Reduce, solve, zero. A rank without tokens takes part with zeros; no tokens anywhere: the bias stays.

        A layer more than 1 % of whose scores are saturated is named in one warning, on the first rank, and so is one
        whose scores the report's equal bins are too coarse for (softmax over many experts, mostly).

        Raises:
            ValueError: k exceeds the number of experts.
        """
        reduce_counts(stats, self.group)
        window = Window.of(stats)
        self.warn(stats, window)
        self.solve_(stats)
        stats.zero_()
        return window

    @torch.no_grad()
    def solve_(self, stats: RouterStats) -> None:
        """Write the next bias into ``stats.bias_LE`` from counts that are reduced already; counts stay.

        Raises:
            ValueError: k exceeds the number of experts.
        """
        mean_L = stats.loads_LE.double().mean(1)
        gain_L = (mean_L / FEW_TOKENS).clamp(max=1.0)
        if self.adaptive_gain:
            gain_L = gain_L * load_gain(stats.loads_LE)
        stats.solve_(self.k, ema=self.ema, gain_L=gain_L)

    def warn(self, stats: RouterStats, window: Window) -> None:
        """Name layers that no bias, or none from this histogram, can balance: once each, on the first rank
        (`trine.balance.router_warnings`). The window is still open and summed over ranks."""
        self._warnings.look(stats, window, self.k)

    def settings(self) -> dict[str, int | float | bool]:
        """Keyword arguments that make the same policy in another process, JSON-ready."""
        return {"k": self.k, "ema": self.ema, "adaptive_gain": self.adaptive_gain}


def load_gain(loads_LE: Tensor) -> Tensor:
    """Share of a solved change to make, by how far loads are from what chance alone leaves.

    With c = coefficient of variation of the loads times the root of the mean load, 1 being the spread of independent
    tokens under perfect balance: `LEAST_GAIN` for c up to `NEAR`, 1 from `FAR` on, linear between. Under a bias that
    is fitted to one step's tokens and used on the next one's, c is about the root of 2.

    Args:
        loads_LE: ``[L, E]`` integer loads.

    Returns:
        ``[L]`` fp64 in [`LEAST_GAIN`, 1].
    """
    loads_LE = loads_LE.double()
    mean_L = loads_LE.mean(1)
    noise_L = loads_LE.std(1, correction=0) / mean_L.clamp(min=1e-300).sqrt()
    return (LEAST_GAIN + (1.0 - LEAST_GAIN) * (noise_L - NEAR) / (FAR - NEAR)).clamp(LEAST_GAIN, 1.0)
