"""What `trine balance compare` runs. Loads no framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from trine.config import BalanceConfig, need_one_of

ARMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qb": {},
        "qb-signed-log": {"estimator": "signed_log", "adaptive_gain": True},
        "qb-logit": {"estimator": "signed_log", "adaptive_gain": True, "score_domain": "logit"},
        "sign": {"policy": "sign"},
        "load-quantile": {"policy": "load_quantile"},
        "aux": {"policy": "aux"},
        "stateless": {"policy": "stateless"},
        "none": {"policy": "freeze"},
    }
)
"""Each arm's `BalanceConfig`; all else is equal. ``none`` keeps every bias at 0."""


@dataclass(frozen=True)
class CompareConfig:
    """Which balancer is better? Eight policies, several seeds of one small model, the same rows of the same text.

    Runs that are done are not run again: a comparison that was stopped goes on with the same command, and one whose
    runs were picked apart by ``arms`` and ``seed`` is put together by a command without them.

    Raises:
        ValueError: at construction, naming the field, the value found and the value needed.
    """

    folder: str = "runs/balance-compare"  # one folder inside for each arm and seed, the results and the page
    preset: str = "smoke"  # whose model, rates and data every run has
    tokens: int = 819_200  # of each run
    seeds: int = 3  # runs of each arm
    arms: tuple[str, ...] = ()  # run these now; none runs all
    seed: tuple[int, ...] = ()  # run these seeds now, from 0; none runs all
    jobs: int = 0  # runs side by side, each a process of one thread; 0: one a core, on a card one after another
    source: str = ""  # data, as of trine train; empty takes the preset's
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes a card when torch sees one
    threads: int = 0  # CPU threads of a run; 0: one where runs go side by side, else torch's choice

    def __post_init__(self) -> None:
        for arm in self.arms:
            need_one_of("arms", arm, tuple(ARMS))
        for name in ("tokens", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: found {getattr(self, name)}, need at least 1")
        for name in ("jobs", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: found {getattr(self, name)}, need 0 (choose) or more")
        if any(not 0 <= seed < self.seeds for seed in self.seed):
            raise ValueError(f"seed: found {self.seed}, need numbers from 0 to {self.seeds - 1}")

    def runs(self) -> list[tuple[str, int]]:
        """(arm, seed) of the runs asked for: all arms of a seed first, so that a stopped comparison can be read."""
        return [(arm, seed) for seed in self.seed or range(self.seeds) for arm in self.arms or ARMS]


def arm_balance(arm: str) -> BalanceConfig:
    """The balance configuration of an arm.

    Raises:
        ValueError: no such arm.
    """
    need_one_of("arm", arm, tuple(ARMS))
    return BalanceConfig(**ARMS[arm])
