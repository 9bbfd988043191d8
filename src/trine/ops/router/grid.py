"""Where required biases are counted: the two histograms of Quantile Balancing, and the quantile read from them.

``report``: equal bins over one range for all experts of a layer (K3 report, arXiv 2607.24653, appendix D).
``signed_log``: each expert's bins lie around the bias it was routed with, fine there and coarse far away, so that a
correction of 1e-6 is seen as well as one of 1. README.md here has the derivation of both and their bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ESTIMATORS = ("report", "signed_log")
SCORE_DOMAINS = ("sigmoid", "logit")

OCTAVES = 32  # of distance from the old bias, on each side of it
_ONE_BITS = 0x3F800000  # 1.0 in fp32
_MANTISSA = 23
_FIRST_REACH = {
    ("report", "sigmoid"): 1.0,  # exact for scores in [0, 1], and fixed
    ("report", "logit"): 16.0,
    ("signed_log", "sigmoid"): 4.0,  # above 1 + spread of the bias until that is 3
    ("signed_log", "logit"): 256.0,
}
_LONGEST_REACH = 2.0**40


@dataclass(frozen=True)
class Grid:
    """Which histogram, of what, with how many bins.

    A layer's range follows from its bias and its `reach`, how far from the bias the bins go; the reach is state: it
    widens when an expert's quantile lies outside.

    Args:
        estimator: one of `ESTIMATORS`.
        score_domain: what the bias is added to: scores (``"sigmoid"``, also for softmax) or logits.
        bins: number of bins; for ``signed_log`` a power of two, at least 64.

    Raises:
        ValueError: an unknown name, or a number of bins that does not fit.
    """

    estimator: str
    score_domain: str
    bins: int

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator: found {self.estimator!r}, need one of {list(ESTIMATORS)}")
        if self.score_domain not in SCORE_DOMAINS:
            raise ValueError(f"score_domain: found {self.score_domain!r}, need one of {list(SCORE_DOMAINS)}")
        if self.signed_log and (self.bins < 2 * OCTAVES or self.bins & (self.bins - 1)):
            raise ValueError(f"bins: found {self.bins}, need a power of two, at least {2 * OCTAVES}, for signed_log")
        if self.bordered and self.bins < 3:
            raise ValueError(f"bins: found {self.bins}, need at least 3: the first and the last hold what lies outside")

    @property
    def signed_log(self) -> bool:
        """Whether bins lie around each expert's old bias."""
        return self.estimator == "signed_log"

    @property
    def bordered(self) -> bool:
        """Whether the first and last bins hold only what lies outside the range. Scores in [0, 1] leave the report's
        range nowhere (but against refined cutoffs), so that there every bin is one like the others."""
        return self.signed_log or self.score_domain == "logit"

    @property
    def first_reach(self) -> float:
        """Reach of a fresh layer, in units of the bias."""
        return _FIRST_REACH[self.estimator, self.score_domain]

    @property
    def _steps(self) -> int:
        """Bins an octave of a signed-log grid."""
        return self.bins // (2 * OCTAVES)

    @property
    def _span(self) -> float:
        """Distance, in units of epsilon, at which the last bin of a signed-log grid begins."""
        return 2.0 ** (OCTAVES - 1) * (2.0 - 1.0 / self._steps) - 1.0

    def edges(self, bias_LE: Tensor, reach_L: Tensor) -> Tensor:
        """Lower end and width of the bins.

        Args:
            bias_LE: ``[..., E]`` fp32.
            reach_L: ``[...]`` fp32.

        Returns:
            ``[..., 2]`` fp32. ``report``: lower end of the first bin, width of each. ``signed_log``: minus the reach,
            relative to each expert's bias, and epsilon, the distance over which the bins next to it are equal.
        """
        reach_L = reach_L.double()
        if self.signed_log:
            return torch.stack((-reach_L, reach_L / self._span), dim=-1).float()
        low_L, high_L = torch.aminmax(bias_LE.double(), dim=-1)
        inner = self.bins - 2 * self.bordered
        width_L = (high_L - low_L + 2.0 * reach_L) / inner
        return torch.stack((low_L - reach_L - self.bordered * width_L, width_L), dim=-1).float()

    def signed_log_bins(self, scores_TE: Tensor, cutoff_T: Tensor, anchor_E: Tensor, edges_2: Tensor) -> Tensor:
        """Bin of every required bias r = cutoff - score, by its distance u = r - anchor, ``[T, E]`` int32.

        With x = 1 + abs(u) / epsilon the bins are equal steps of exponent + fraction of x, that is, every octave of x
        is cut into equal parts: the bits of an fp32 number say the bin, no logarithm is taken, and every device
        finds the same one.
        """
        place_TE = (cutoff_T[:, None] - scores_TE).sub_(anchor_E.to(scores_TE.dtype)).float()
        side_TE = place_TE.view(torch.int32) >> 31  # -1 below the old bias
        bits_TE = place_TE.abs().mul_(1.0 / edges_2[1]).add_(1.0).view(torch.int32)
        step_TE = bits_TE.sub_(_ONE_BITS) >> (_MANTISSA - (self._steps.bit_length() - 1))
        half = self.bins // 2
        return step_TE.clamp_(max=half - 1).bitwise_xor_(side_TE).add_(half)

    def _distance(self, place: Tensor) -> Tensor:
        """Distance from the anchor in epsilons of a place on the axis of bins (fp64; 0 to ``bins``), signed."""
        from_middle = place - self.bins // 2
        octave = (from_middle.abs() / self._steps).floor()
        fraction = from_middle.abs() / self._steps - octave
        return torch.sign(from_middle) * (torch.exp2(octave) * (1.0 + fraction) - 1.0)

    def _place(self, distance: Tensor) -> Tensor:
        """The inverse of `_distance`: continuous, linear within each bin."""
        mantissa, exponent = torch.frexp(1.0 + distance.abs())  # mantissa in [1/2, 1)
        steps = (exponent.double() + 2.0 * mantissa - 2.0) * self._steps
        return torch.sign(distance) * steps + self.bins // 2

    def required(self, bin_LE: Tensor, part_LE: Tensor, edges_L2: Tensor, anchor_LE: Tensor) -> tuple[Tensor, Tensor]:
        """The bias at a share of a bin, linear within the bin.

        Args:
            bin_LE: ``[L, E]`` int64 bin.
            part_LE: ``[L, E]`` fp64 share of it, 0 to 1.
            edges_L2: of the window.
            anchor_LE: bias the window was routed with.

        Returns:
            ``[L, E]`` fp64 biases, and bool: true where the quantile lies outside. There the bias is the range's end
            on that side, a step in the right direction that is too short, never too long.
        """
        low_L1, width_L1 = (part[:, None] for part in edges_L2.double().unbind(1))
        outside_LE = torch.zeros_like(bin_LE, dtype=torch.bool)
        if self.bordered:
            below_LE, above_LE = bin_LE == 0, bin_LE == self.bins - 1
            outside_LE = below_LE | above_LE
            part_LE = torch.where(below_LE, 1.0, torch.where(above_LE, 0.0, part_LE))
        if not self.signed_log:
            return low_L1 + (bin_LE + part_LE) * width_L1, outside_LE
        # linear in the distance itself, also in the octaves, whose ends are ends of bins
        first_LE, last_LE = self._distance(bin_LE.double()), self._distance(bin_LE.double() + 1.0)
        return anchor_LE.double() + (first_LE + part_LE * (last_LE - first_LE)) * width_L1, outside_LE

    def next_reach(self, reach_L: Tensor, anchor_LE: Tensor, required_LE: Tensor, outside_LE: Tensor) -> Tensor:
        """Reach of the next window, ``[L]`` fp32: wider where an expert's quantile lay outside; the equal bins of the
        report over logits also narrow again, as their width is their resolution."""
        if not self.bordered:
            return reach_L
        wide_L = outside_LE.any(1)
        if self.signed_log:
            next_L = torch.where(wide_L, 16.0 * reach_L, reach_L)
        else:
            small_L = (required_LE - anchor_LE.double()).abs().amax(1) < 0.125 * reach_L
            narrow_L = torch.where(small_L, (0.5 * reach_L).clamp(min=self.first_reach), reach_L)
            next_L = torch.where(wide_L, 2.0 * reach_L, narrow_L)
        return next_L.clamp(max=_LONGEST_REACH)

    def pooled_quantiles(self, counts_LEB: Tensor, edges_L2: Tensor, anchor_LE: Tensor, levels_Q: Tensor) -> Tensor:
        """Quantiles of the required biases of all experts of a layer together, ``[L, Q]`` fp64; NaN without any.

        Args:
            counts_LEB: ``[L, E, bins]`` integer counts.
            edges_L2: of the window.
            anchor_LE: bias the window was routed with.
            levels_Q: ``[Q]`` fp64 in [0, 1].
        """
        low_L1, width_L1 = (part[:, None] for part in edges_L2.double().unbind(1))
        if not self.signed_log:
            below_LB = counts_LEB.sum(1).cumsum(1).double()
            wanted_LQ = below_LB[:, -1:] * levels_Q
            bin_LQ = torch.searchsorted(below_LB, wanted_LQ).clamp_(max=self.bins - 1)
            lower_LQ = torch.where(bin_LQ > 0, below_LB.gather(1, (bin_LQ - 1).clamp(min=0)), 0.0)
            part_LQ = (wanted_LQ - lower_LQ) / (below_LB.gather(1, bin_LQ) - lower_LQ).clamp(min=1.0)
            found_LQ = low_L1 + (bin_LQ + part_LQ) * width_L1
            return torch.where(below_LB[:, -1:] > 0, found_LQ, torch.nan)
        below_LEB = counts_LEB.cumsum(2, dtype=torch.int64).double()
        wanted_LQ = below_LEB[:, :, -1].sum(1, keepdim=True) * levels_Q
        anchor_LE = anchor_LE.double()
        reach_L1 = -low_L1
        low_LQ = (anchor_LE.amin(1, keepdim=True) - reach_L1).expand_as(wanted_LQ)
        size_LQ = (anchor_LE.amax(1, keepdim=True) + reach_L1).expand_as(wanted_LQ) - low_LQ
        cuts_C = torch.arange(1, 16, dtype=torch.float64, device=counts_LEB.device) / 16
        for _ in range(6):  # each round a sixteenth of the last: to 2^-24 of the range
            tried_LN = (low_LQ[..., None] + cuts_C * size_LQ[..., None]).flatten(1)
            place_LEN = self._place((tried_LN[:, None] - anchor_LE[..., None]) / width_L1[..., None])
            place_LEN = place_LEN.clamp_(1.0, self.bins - 1.0)
            bin_LEN = place_LEN.long().clamp_(max=self.bins - 2)
            before_LEN = below_LEB.gather(2, bin_LEN - 1)
            inside_LEN = below_LEB.gather(2, bin_LEN) - before_LEN
            reached_LN = (before_LEN + (place_LEN - bin_LEN) * inside_LEN).sum(1)
            short_LQ = (reached_LN.unflatten(1, (-1, 15)) < wanted_LQ[..., None]).sum(2)
            size_LQ = size_LQ / 16
            low_LQ = low_LQ + short_LQ * size_LQ
        high_LQ = low_LQ + size_LQ
        return torch.where(below_LEB[:, :, -1].sum(1, keepdim=True) > 0, high_LQ, torch.nan)


def find_quantile(counts_LEB: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the k/E quantile lies: the first bin whose cumulative count reaches q = m k / E, and the share of it.

    Integers decide the bin (cumulative E >= m k), so that no rounding of q can. Bins are summed in blocks
    first: one pass over the counts, then one block of each expert.

    Args:
        counts_LEB: ``[L, E, bins]`` contiguous int32 (or int64) counts; an expert's sum to the layer's tokens m.
        k: experts per token, < E.

    Returns:
        ``[L, E]`` int64 bin, ``[L, E]`` fp64 share of it in [0, 1], ``[L]`` int64 m.
    """
    layers, experts, bins = counts_LEB.shape
    block = max(d for d in range(1, math.isqrt(bins) + 1) if bins % d == 0)
    blocks, rows = bins // block, layers * experts
    counts_NB = counts_LEB.reshape(rows * blocks, block)
    # an expert's counts are at most 2^31 - 1 in all; sums in the counts' own type are twelve times as fast
    sums_RN = counts_NB.sum(1, dtype=counts_LEB.dtype).view(rows, blocks)
    below_RN = sums_RN.cumsum(1, dtype=counts_LEB.dtype)
    tokens_L = below_RN.view(layers, experts, blocks)[:, 0, -1].long()
    wanted_L = tokens_L * k
    least_L = (wanted_L + experts - 1) // experts  # cumulative E >= m k: cumulative >= this
    least_R1 = least_L.to(counts_LEB.dtype).repeat_interleave(experts, output_size=rows)[:, None]
    row_R = torch.arange(rows, device=counts_LEB.device)
    block_R = torch.searchsorted(below_RN, least_R1).squeeze(1).clamp_(max=blocks - 1)
    place_R = row_R * blocks + block_R
    before_R = below_RN.view(-1).index_select(0, place_R) - sums_RN.view(-1).index_select(0, place_R)
    inner_RB = counts_NB.index_select(0, place_R)
    within_RB = inner_RB.cumsum(1, dtype=counts_LEB.dtype).add_(before_R[:, None])
    bin_R = torch.searchsorted(within_RB, least_R1).squeeze(1).clamp_(max=block - 1)
    place_R = row_R * block + bin_R
    inside_R = inner_RB.view(-1).index_select(0, place_R)
    before_R = within_RB.view(-1).index_select(0, place_R) - inside_R
    inside_LE, before_LE = inside_R.view(layers, experts), before_R.view(layers, experts)
    part_LE = (wanted_L[:, None].double() / experts - before_LE) / inside_LE.clamp(min=1)
    return (block_R * block + bin_R).view(layers, experts), part_LE.clamp_(0.0, 1.0), tokens_L
