"""Words, once a layer, about routers that Quantile Balancing cannot see finely enough: scores that fp32 cannot tell
apart, and scores that crowd into a few bins of the histogram."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from trine._log import logger
from trine.balance.window import Window
from trine.ops.router import RouterStats

SHARE = 0.01  # of scores equal to 0 or 1 in fp32
CROWDED = 2.0  # times an expert's due in the one bin that holds its quantile
OFF = 0.5  # of the mean load that such an expert is off by
EXPERTS = 0.02  # share of them that is worth a word
DUE = 36.0  # tokens an expert; with fewer, OFF may be chance: it is three standard deviations here
EVERY, EARLY, LATER = 4, 64, 32  # steps between looks at the histograms; until this step; and afterwards
LOOKS = 2  # in a row


class LayerWarnings:
    """Warns of each layer once, of each matter.

    On the CPU at once; on a card the figures of a step are looked at when a later one comes and their copy has arrived,
    so that nobody waits for it. A step that is captured in a CUDA graph says nothing, nor do its replays: an event can
    be asked, and memory be pinned, outside a capture only.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._told: set[tuple[str, int]] = set()
        self._crowded: dict[int, int] = {}  # looks in a row, by layer
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    @torch.no_grad()
    def look(self, stats: RouterStats, window: Window, k: int) -> None:
        """Judge an open window, summed over ranks; ``window`` is what it holds. Biases of logits do not mind saturated
        scores, and a signed-log histogram minds no scale."""
        if stats.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self._steps += 1
        share_L = torch.zeros_like(window.tokens_L, dtype=torch.float64)
        if stats.score_domain == "sigmoid":
            share_L = window.saturated_L.double() / (window.tokens_L * window.loads_LE.shape[1]).clamp(min=1)
        crowded_L = torch.full_like(share_L, -1.0)  # not looked at
        every = EVERY if self._steps <= EARLY else LATER
        if stats.estimator == "report" and self._steps % every == 0 and k < stats.experts:
            crowded_L = crowded_share(stats, k)
        figures_FL = torch.stack((share_L, crowded_L))
        if figures_FL.device.type != "cuda":
            if figures_FL.device.type == "cpu":
                self._tell(figures_FL, stats.score_domain)
            return
        if self._pending is not None and self._pending[1].query():
            self._tell(self._pending[0], stats.score_domain)
            self._pending = None
        if self._pending is None:
            copy_FL = torch.empty(figures_FL.shape, dtype=figures_FL.dtype, pin_memory=True)
            copy_FL.copy_(figures_FL, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = copy_FL, event

    def _tell(self, figures_FL: Tensor, domain: str) -> None:
        for layer, (saturated, crowded) in enumerate(figures_FL.t().tolist()):
            if saturated > SHARE:
                self._once(
                    "saturated",
                    layer,
                    f"{100 * saturated:.1f} % of its scores are 0 or 1 in fp32, too close to be told apart; "
                    'score_domain="logit" balances saturated routers',
                )
            if crowded >= 0.0:
                self._crowded[layer] = self._crowded.get(layer, 0) + 1 if crowded >= EXPERTS else 0
            if self._crowded.get(layer, 0) >= LOOKS:
                logits = ' or score_domain="logit"' if domain == "sigmoid" else ""
                self._once(
                    "crowded",
                    layer,
                    f"{100 * crowded:.0f} % of its experts stay uneven and find most of their tokens in one bin of the "
                    f'histogram, too coarse for these scores; estimator="signed_log"{logits} resolves them',
                )

    def _once(self, matter: str, layer: int, message: str) -> None:
        if (matter, layer) in self._told:
            return
        self._told.add((matter, layer))
        if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning("router of MoE layer %d: %s", layer, message)


def crowded_share(stats: RouterStats, k: int) -> Tensor:
    """Share of experts that equal bins cannot balance, of an open window.

    An expert counts if the bin that holds its quantile holds more than `CROWDED` times the tokens it should get, and
    its load is off by more than `OFF` of the mean: where within the bin the tokens lie is not known, and so is not how
    many of them the solved bias lets in.

    Args:
        stats: the open window, summed over ranks.
        k: experts per token, < E.

    Returns:
        ``[L]`` fp64; 0 for layers with fewer than `DUE` tokens an expert.
    """
    due_L1 = stats.counters_LF[:, 1:2].double() * k / stats.experts
    crowded_LE = stats.quantile_counts(k) > CROWDED * due_L1
    loads_LE = stats.loads_LE.double()
    mean_L1 = loads_LE.mean(1, keepdim=True)
    off_LE = (loads_LE - mean_L1).abs() > OFF * mean_L1
    return torch.where(due_L1[:, 0] >= DUE, (crowded_LE & off_LE).double().mean(1), 0.0)
