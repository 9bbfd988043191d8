"""The figures of a step, layer by layer: what alerts judge, exporters publish and the recorder keeps beside arrays."""

from __future__ import annotations

import numpy as np
import torch

from trine.balance import metrics
from trine.balance.record_format import SUMMARY, Array, Frame, HostWindow, Shape


class Summaries:
    """Turns the windows of successive steps into frames; remembers the last two biases and who has been silent.

    Args:
        layers, experts: sizes of the windows.
        top_k: experts a token.
        ranks: expert-parallel ranks the experts of a layer are dealt out to.

    Raises:
        ValueError: ``top_k`` or ``ranks`` do not fit the number of experts.
    """

    def __init__(self, layers: int, experts: int, top_k: int, ranks: int = 1) -> None:
        if layers < 0 or experts < 1:
            raise ValueError(f"layers, experts: found {layers}, {experts}, need layers >= 0, experts >= 1")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k: found {top_k}, need 1 to {experts}, the number of experts")
        if ranks < 1 or experts % ranks:
            raise ValueError(f"ranks: found {ranks}, need a divisor of the {experts} experts")
        self.shape = Shape(layers, experts)
        self.top_k, self.ranks = top_k, ranks
        self.restart()

    def restart(self) -> None:
        """Forget what was before: the next step is no successor of the last one."""
        self._silent_LE = torch.zeros(self.shape.layers, self.shape.experts, dtype=torch.float64)
        self._bias_LE: torch.Tensor | None = None
        self._step_LE: torch.Tensor | None = None

    def step(self, number: int, window: HostWindow) -> Frame:
        """The frame of step ``number``.

        Raises:
            ValueError: the window is no window of this model; see `HostWindow.check`.
        """
        window.check(self.shape)
        figures_ML = self._figures(window) if self.shape.layers else np.empty((len(SUMMARY), 0), dtype=np.float32)
        loads_LE = window.loads_LE.astype(np.float64)
        return Frame(
            first=number,
            last=number,
            steps=1,
            loads_LE=loads_LE,
            bias_LE=window.bias_LE,
            tokens_L=window.tokens_L,
            dropped_L=window.dropped_L,
            saturated_L=window.saturated_L,
            overflow_L=window.overflow_L,
            margins_LQ=window.margins_LQ.astype(np.float32),
            lowest_LE=loads_LE,
            highest_LE=loads_LE,
            summary_KLM=np.ascontiguousarray(figures_ML.T)[None],
        )

    def _figures(self, window: HostWindow) -> Array:
        loads_LE, bias_LE = torch.from_numpy(window.loads_LE), torch.from_numpy(window.bias_LE).double()
        tokens_L = torch.from_numpy(window.tokens_L)
        self._silent_LE = metrics.silence(self._silent_LE, loads_LE)
        layers = self.shape.layers
        moved_L = flips_L = torch.full((layers,), torch.nan, dtype=torch.float64)
        if self._bias_LE is not None:
            step_LE = bias_LE - self._bias_LE
            moved_L = step_LE.abs().mean(-1)
            if self._step_LE is not None:
                flips_L = metrics.sign_flip_rate(step_LE, self._step_LE)
            self._step_LE = step_LE
        self._bias_LE = bias_LE
        scores_L = np.maximum(window.tokens_L * self.shape.experts, 1)
        figures = {
            "max_vio": metrics.max_violation(loads_LE),
            "cv": metrics.coefficient_of_variation(loads_LE),
            **metrics.load_percentiles(loads_LE)._asdict(),
            "dead": (self._silent_LE > 10.0).sum(-1),
            "entropy": metrics.entropy(loads_LE),
            "effective": metrics.effective_experts(loads_LE),
            "quantile_error": metrics.quantile_error(loads_LE, tokens_L, self.top_k),
            "rank_overload": metrics.rank_overload(loads_LE, self.ranks),
            "bias_min": bias_LE.amin(-1),
            "bias_max": bias_LE.amax(-1),
            "bias_step": moved_L,
            "flips": flips_L,
            "tokens": tokens_L,
            "dropped": window.dropped_L,
            "saturated": window.saturated_L / scores_L,
            "overflow": window.overflow_L / scores_L,
            **{name: window.margins_LQ[:, i] for i, name in enumerate(SUMMARY[-5:])},
        }
        return np.stack([np.asarray(figures[name], dtype=np.float32) for name in SUMMARY])
