"""A window of router statistics, from one optimizer step to the next: reduced over ranks, copied to survive its end."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch import distributed as dist

from trine.balance.record_format import MARGIN_LEVELS
from trine.ops.router import RouterStats


@dataclass(frozen=True)
class Window:
    """What a window held, over all ranks: a copy that survives the window. Tensors stay on the statistics' device.

    Attributes:
        loads_LE: ``[L, E]`` int64 tokens of each expert.
        bias_LE: ``[L, E]`` fp32, the bias the window was routed with.
        tokens_L: ``[L]`` int64 tokens routed.
        dropped_L: ``[L]`` int64 tokens left out because a score was not finite.
        saturated_L: ``[L]`` int64 scores that fp32 cannot tell from 0 or 1 (of tokens x experts).
        overflow_L: ``[L]`` int64 required biases outside the histogram's range (of tokens x experts).
        margins_LQ: ``[L, 5]`` fp64 quantiles at `MARGIN_LEVELS` of the required biases of a layer, all experts
            together, in units of the bias; NaN where none was counted.
    """

    loads_LE: Tensor
    bias_LE: Tensor
    tokens_L: Tensor
    dropped_L: Tensor
    saturated_L: Tensor
    overflow_L: Tensor
    margins_LQ: Tensor

    @classmethod
    def of(cls, stats: RouterStats) -> Window:
        """Copy them from the open window, before its bias is replaced, without waiting for the device."""
        return cls(
            loads_LE=stats.loads_LE.long(),
            bias_LE=stats.bias_LE.clone(),
            tokens_L=stats.tokens_L,
            dropped_L=stats.dropped_L,
            saturated_L=stats.saturated_L,
            overflow_L=stats.overflow_L,
            margins_LQ=stats.required_bias_quantiles(MARGIN_LEVELS),
        )


def reduce_counts(stats: RouterStats, group: dist.ProcessGroup | None = None) -> None:
    """Sum all counts over the ranks of ``group``, in place, in one collective; nothing to do in a single process.

    Integer sums do not depend on their order, so every rank holds the same bits after it.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(stats.counts, group=group)
