"""Monitor and correct, the first article's form: experts at the edges of the load distribution are moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from trine.balance.load_policy import LoadPolicy, write_bias
from trine.balance.window import Window
from trine.ops.router import RouterStats

LOW, HIGH = 0.05, 0.95  # of the loads of a layer's experts


class LoadQuantileBalancing(LoadPolicy):
    """b_j -= rate * min(F_j / L - 1, 1) for experts with F_j >= P95 (down) or F_j <= P5 (up) of the loads F summed over
    a window of steps, if abs(F_j - L) > band * sqrt(L), L = mean load; then centred.

    Quantiles alone would move a tenth of the experts even at perfect balance, for ever; sqrt(L) is the sampling noise
    of a load (`trine.balance.sampling_floor`), so inside the band nothing moves. One move a window, and the next window
    begins empty: loads that were routed with the bias before the move are not held against the one after it.

    Args:
        rate: bias moved for a load of twice the mean or more, in units of the score.
        window: steps whose loads are summed.
        band: half-width of the dead band in standard deviations of the sampling noise.
        group: ranks that hold different tokens; default all.

    Raises:
        ValueError: a rate that is not a finite number above 0, a window below 1, a band below 0.
    """

    def __init__(
        self, rate: float = 0.05, window: int = 4, band: float = 3.0, *, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(group)
        if not (0 < rate < float("inf") and window >= 1 and 0 <= band < float("inf")):
            raise ValueError(
                f"rate, window, band: found {rate}, {window}, {band}, need a finite rate above 0, a window of at least "
                "1, a band of at least 0"
            )
        self.rate, self.window, self.band = rate, window, band
        self._steps = 0
        self._loads_LE: Tensor | None = None

    def move(self, stats: RouterStats, window: Window, live_L: Tensor) -> None:
        """Add this step's loads; at the window's end move the bias and begin anew.

        Raises:
            ValueError: the loads that were restored are those of another model.
        """
        loads_LE = torch.where(live_L[:, None], window.loads_LE, 0)
        if self._loads_LE is not None:
            if self._loads_LE.shape != loads_LE.shape:
                found, need = tuple(self._loads_LE.shape), tuple(loads_LE.shape)
                raise ValueError(f"loads_LE: found shape {found} in the restored window, need {need}")
            loads_LE = loads_LE + self._loads_LE.to(loads_LE.device)
        self._steps += 1
        if self._steps < self.window:
            self._loads_LE = loads_LE
            return
        self._steps, self._loads_LE = 0, None
        mean_L1 = loads_LE.double().mean(1, keepdim=True)
        excess_LE = loads_LE.double() / mean_L1.clamp(min=1e-300) - 1.0
        levels_2 = torch.tensor([LOW, HIGH], dtype=torch.float64, device=loads_LE.device)
        low_L1, high_L1 = torch.quantile(excess_LE, levels_2, dim=1)[..., None]
        far_LE = excess_LE.abs() * mean_L1.sqrt() > self.band
        edge_LE = ((excess_LE >= high_L1) & (excess_LE > 0)) | ((excess_LE <= low_L1) & (excess_LE < 0))
        moves_LE = torch.where(far_LE & edge_LE, self.rate * excess_LE.clamp(max=1.0), 0.0)
        write_bias(stats, stats.bias_LE.double() - moves_LE, mean_L1[:, 0] > 0)

    def state_dict(self) -> dict[str, Any]:
        """The loads of the open window of steps (``[L, E]`` int64) and how many steps they are of."""
        return {"steps": self._steps} | ({} if self._loads_LE is None else {"loads_LE": self._loads_LE.clone()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on inside that window.

        Raises:
            ValueError: the state is another policy's, or of a longer window.
        """
        steps, loads_LE = state.get("steps"), state.get("loads_LE")
        names = {"steps", "loads_LE"} if steps else {"steps"}
        if type(steps) is not int or not 0 <= steps < self.window or set(state) != names:
            raise ValueError(
                f"state: found {sorted(state)} with steps = {steps!r}, need steps from 0 to {self.window - 1}, and "
                "loads_LE unless they are 0"
            )
        if loads_LE is not None and (loads_LE.dtype != torch.int64 or loads_LE.ndim != 2):
            raise ValueError(f"loads_LE: found {loads_LE.ndim}-d {loads_LE.dtype}, need [L, E] int64")
        self._steps, self._loads_LE = steps, None if loads_LE is None else loads_LE.clone()
