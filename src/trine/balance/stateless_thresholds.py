"""The memory that stateless routing needs after all: running thresholds for where there is no batch."""

from __future__ import annotations

from torch import distributed as dist

from trine.balance.quantile_balancing import QuantileBalancing
from trine.ops.router.stateless import Stateless


class StatelessThresholds(QuantileBalancing):
    """In training each micro-batch routes itself by its own thresholds (`trine.ops.router.stateless`); here the same
    quantiles are taken over all tokens of a step, on all ranks, and averaged over steps.

    They are kept as a bias (minus the threshold), so that evaluation, decoding and an exported model need no rule of
    their own: top-k of score + bias, token by token, whatever else is in the batch. With ``threshold_source =
    "running"`` training routes by them too and the policy is Quantile Balancing.

    Args:
        k: experts per token.
        rule: what the MoE layers choose by in training.
        ema: share of the old thresholds kept in an update, 0 to below 1.
        group: ranks that hold different tokens; default all.
    """

    def __init__(self, k: int, rule: Stateless, *, ema: float = 0.0, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(k, ema=ema, group=group)
        self.rule = rule
