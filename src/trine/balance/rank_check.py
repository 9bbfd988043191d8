"""Proof that all ranks route with the same bias: a 64-bit hash, compared now and then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from trine.balance.window import Window
from trine.ops.router import RouterStats

if TYPE_CHECKING:
    from trine.balance.policies import BalancePolicy


class RankMismatch(RuntimeError):
    """Ranks hold different router biases: they route the same token to different experts."""


def bias_hash(bias_LE: Tensor) -> Tensor:
    """64-bit hash of the bits of a bias and of their places, int64 scalar on its device; nothing is read back.

    Each value is mixed with its place by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), and the results
    are added, all modulo 2^64.
    """
    bits_N = bias_LE.detach().contiguous().view(torch.int32).reshape(-1).long() & 0xFFFFFFFF
    place_N = torch.arange(1, bits_N.numel() + 1, device=bits_N.device)
    mixed_N = bits_N + place_N * -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed_N = (mixed_N ^ ((mixed_N >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (mixed_N ^ ((mixed_N >> 31) & ((1 << 33) - 1))).sum()


def check_same_bias(stats: RouterStats, group: dist.ProcessGroup | None = None) -> None:
    """Compare the bias over the ranks of ``group``; nothing to do in a single process. Waits for the device.

    Raises:
        RankMismatch: on every rank, naming those that differ from the majority (with none: from the lowest rank).
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
        return
    mine_1 = bias_hash(stats.bias_LE).reshape(1)
    gathered = [torch.zeros_like(mine_1) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine_1, group=group)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    hashes = dict(zip(ranks, (int(one) for one in gathered), strict=True))
    if len(set(hashes.values())) == 1:
        return
    usual = Counter(hashes.values()).most_common(1)[0][0]  # of equally common ones the first, the lowest rank's
    others = {rank: value for rank, value in hashes.items() if value != usual}
    found = ", ".join(f"{value & 0xFFFFFFFFFFFFFFFF:016x} on rank {rank}" for rank, value in others.items())
    alike = ", ".join(str(rank) for rank in hashes if rank not in others)
    raise RankMismatch(
        f"router bias: found {found}, need {usual & 0xFFFFFFFFFFFFFFFF:016x}, that of rank {alike} (64-bit hashes): "
        "ranks would route the same token differently; resume from the last checkpoint"
    )


class RankChecked:
    """Any policy, with the bias compared over ranks after the first step and after every ``every``-th.

    Args:
        policy: does the work.
        every: steps from one comparison to the next, at least 1.
        group: ranks to compare.
    """

    def __init__(self, policy: BalancePolicy, every: int, group: dist.ProcessGroup | None = None) -> None:
        if every < 1:
            raise ValueError(f"every: found {every}, need at least 1")
        self.policy, self.every, self.group = policy, every, group
        self._steps = 0

    def step(self, stats: RouterStats) -> Window:
        """The policy's step, then the comparison when it is due.

        Raises:
            RankMismatch: see `check_same_bias`.
        """
        window = self.policy.step(stats)
        if self._steps % self.every == 0:
            check_same_bias(stats, self.group)
        self._steps += 1
        return window

    def state_dict(self) -> dict[str, Any]:
        """The policy's."""
        return self.policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The policy's."""
        self.policy.load_state_dict(state)


def unchecked(policy: BalancePolicy | None) -> BalancePolicy | None:
    """The policy itself, without the comparison that `RankChecked` puts around it."""
    return policy.policy if isinstance(policy, RankChecked) else policy
