"""Policies: each reads a window of router statistics once, writes the bias in place and closes the window.

One file a policy; here is what they have in common, and how a configuration becomes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import distributed as dist

from trine.balance.auxiliary_balancing import AuxiliaryBalancing
from trine.balance.freeze import Freeze, Replay
from trine.balance.load_quantile import LoadQuantileBalancing
from trine.balance.quantile_balancing import QuantileBalancing
from trine.balance.rank_check import RankChecked, unchecked
from trine.balance.service import AsyncBalancing
from trine.balance.sign import SignBalancing
from trine.balance.stateless_thresholds import StatelessThresholds
from trine.balance.window import Window
from trine.config import BalanceConfig
from trine.ops.router import RouterStats
from trine.ops.router.auxiliary import LoadPressure
from trine.ops.router.stateless import Stateless

if TYPE_CHECKING:
    from trine.model import Model


class BalancePolicy(Protocol):
    """What every policy offers: call `step` once after each optimizer step, on every rank."""

    def step(self, stats: RouterStats) -> Window:
        """Reduce the window over ranks, write ``stats.bias_LE`` in place, zero the window; return what it held."""

    def state_dict(self) -> dict[str, Any]:
        """What the policy remembers between steps, beside the bias: JSON-ready values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""


def make_policy(config: BalanceConfig, k: int, experts: int, group: dist.ProcessGroup | None = None) -> BalancePolicy:
    """The policy that ``config`` names, for routers of any model.

    Where several ranks run, it is wrapped in `RankChecked`; so initialise torch.distributed first. ``aux`` and
    ``stateless`` act in the forward pass too: give the layers ``policy.pressure`` or ``policy.rule``
    (`install_policy` does so for `trine.Model`).

    Args:
        config: the policy and its dials.
        k: experts per token, 1 to E. With k = E there is nothing to balance and every policy leaves the bias alone.
        experts: E.
        group: ranks that hold different tokens; default all.

    Raises:
        ValueError: ``k`` is out of range.
    """
    policy = _bare(config, k, experts, group)
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    return RankChecked(policy, config.check_every, group) if several and config.check_every else policy


def install_policy(model: Model, config: BalanceConfig, group: dist.ProcessGroup | None = None) -> BalancePolicy:
    """Make a model's routers follow ``config`` and return the policy to be stepped after each optimizer step.

    Args:
        model: in training; its former rules are replaced, its bias stays.
        config: the policy and its dials.
        group: see `make_policy`.

    Raises:
        ValueError: ``score_domain`` is not the model's own (`ModelConfig.score_domain`).
    """
    if config.score_domain != model.config.score_domain:
        raise ValueError(
            f"balance.score_domain: found {config.score_domain!r}, need {model.config.score_domain!r}, the model's"
        )
    policy = make_policy(config, model.config.top_k, model.config.experts, group)
    bare = unchecked(policy)
    model.set_balance(
        estimator=config.estimator,
        batch_rounds=config.batch_rounds,
        stateless=bare.rule if isinstance(bare, StatelessThresholds) else None,
        pressure=bare.pressure if isinstance(bare, AuxiliaryBalancing) else None,
    )
    return policy


def close_policy(policy: BalancePolicy) -> None:
    """End what a policy keeps running beside training: the thread or child process of `AsyncBalancing`."""
    bare = unchecked(policy)
    if isinstance(bare, AsyncBalancing):
        bare.close()


def _bare(config: BalanceConfig, k: int, experts: int, group: dist.ProcessGroup | None) -> BalancePolicy:
    if not 1 <= k <= experts:
        raise ValueError(f"k: found {k}, need 1 <= k <= {experts}, the number of experts")
    c = config
    if c.policy == "qb":
        qb = QuantileBalancing(k, ema=c.ema, group=group, adaptive_gain=c.adaptive_gain)
        lag = None if c.service_lag < 0 else c.service_lag
        return qb if c.service == "off" else AsyncBalancing(qb, c.service, lag=lag)
    if c.policy == "sign":
        return SignBalancing(c.sign_step, group=group)
    if c.policy == "aux":
        return AuxiliaryBalancing(LoadPressure(c.aux_weight), group=group)
    if c.policy == "load_quantile":
        return LoadQuantileBalancing(c.load_rate, c.load_window, c.load_band, group=group)
    if c.policy == "stateless":
        rule = Stateless(c.mode, c.quantile, c.threshold_source, c.capacity, c.rounds)
        return StatelessThresholds(k, rule, ema=c.ema, group=group)
    return Replay(group) if c.policy == "replay" else Freeze(group)
