"""The auxiliary loss as a policy: it moves no bias, but tells the loss which experts had too much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from trine.balance.load_policy import LoadPolicy
from trine.balance.window import Window
from trine.ops.router import RouterStats
from trine.ops.router.auxiliary import LoadPressure, relative_loads


class AuxiliaryBalancing(LoadPolicy):
    """Global-batch load balancing by a loss (arXiv 2501.11873); the bias stays as it is (0 in a fresh run).

    The loss of a step is weight * sum over its tokens of w_i (sum over j of f_j p_ij) / (sum of w_i), with w_i the
    token's loss weight (`trine.ops.router.auxiliary`). The shares f are those of the *whole last step*: all its
    micro-batches, all ranks, summed as integers in the one all-reduce that this policy does. So each micro-batch can be
    differentiated by itself, in any order and on any number of threads, and cutting a step into other micro-batches
    changes nothing beyond rounding. Shares that grow from micro-batch to micro-batch would depend on the order, and
    those of the running step are not known before its last token. One step of lag is what the bias policies have too.
    In the first step f is 1 everywhere and nothing presses.

    Args:
        pressure: what the MoE layers read; its weight is the loss's.
        group: ranks that hold different tokens; default all.
    """

    def __init__(self, pressure: LoadPressure, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.pressure = pressure

    def move(self, stats: RouterStats, window: Window, live_L: Tensor) -> None:
        """Publish the relative loads; a layer that routed nothing of its own keeps those it had.

        Raises:
            ValueError: the loads that were restored are those of another model.
        """
        before_LE = self.pressure.relative_LE
        if before_LE is None:
            before_LE = torch.ones_like(stats.bias_LE)
        elif before_LE.shape != stats.bias_LE.shape:
            found, need = tuple(before_LE.shape), tuple(stats.bias_LE.shape)
            raise ValueError(f"relative_LE: found shape {found}, need {need}")
        fresh_LE = relative_loads(window.loads_LE)
        self.pressure.relative_LE = torch.where(live_L[:, None], fresh_LE, before_LE.to(stats.device))

    def state_dict(self) -> dict[str, Any]:
        """The relative loads of the last step, ``[L, E]`` fp32; nothing before the first."""
        relative_LE = self.pressure.relative_LE
        return {} if relative_LE is None else {"relative_LE": relative_LE.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Press as before.

        Raises:
            ValueError: the state is another policy's, or not finite.
        """
        if set(state) - {"relative_LE"}:
            raise ValueError(f"state: found {sorted(state)}, need relative_LE or nothing")
        relative_LE = state.get("relative_LE")
        if relative_LE is not None:
            if relative_LE.ndim != 2 or relative_LE.dtype != torch.float32 or not bool(relative_LE.isfinite().all()):
                found = f"{relative_LE.dtype} of shape {tuple(relative_LE.shape)}"
                raise ValueError(f"relative_LE: found {found}, need finite float32 [L, E]")
            # where the model is, if a step was done already; otherwise the first step moves it
            before_LE = self.pressure.relative_LE
            relative_LE = relative_LE.to("cpu" if before_LE is None else before_LE.device, copy=True)
        self.pressure.relative_LE = relative_LE
