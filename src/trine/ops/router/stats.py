"""Router statistics with one owner: counts, histogram ranges and biases of all MoE layers in a few flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trine.ops.router.quantile import (
    centred,
    check_k,
    count_required_bias,
    histogram_edges,
    may_read,
    quantile_from_histogram,
)

COUNTERS = ("routed", "counted", "dropped", "saturated_low", "saturated_high")
"""Columns of `RouterStats.counters_LF`: tokens routed; those of them in the histogram; those left out of it because a
score was not finite; scores that fp32 cannot tell from 0 or 1. Saturated scores can pass 2^31 in one step (4 M tokens x
896 experts), so they are held in two words, the low 20 bits and the rest; sums over ranks stay exact."""
_WORD = 20
_FIELDS = ("histograms_LEB", "loads_LE", "counters_LF", "edges_L2", "bias_LE")


class RouterStats:
    """What the routers of a model saw since the last step, and the biases they choose with.

    One object owns everything: MoE layers only add to it through `layer`, a balance policy reads, reduces and zeroes
    it. All counts are one contiguous int32 buffer (`counts`), so one integer all-reduce or one copy serves all layers,
    and integer sums do not depend on their order. It is not a Module and holds no parameter: ``model.to(bf16)`` leaves
    the fp32 bias and ranges alone. A window is open from one `zero_` to the next (gradient accumulation only adds).

    Attributes:
        counts: ``[L*E*bins + L*E + L*5]`` int32; the three below are views of it.
        histograms_LEB: ``[L, E, bins]`` required biases counted.
        loads_LE: ``[L, E]`` tokens sent to each expert (padding excluded, dropped rows included).
        counters_LF: ``[L, 5]``, columns `COUNTERS`.
        edges_L2: ``[L, 2]`` fp32 lower end and bin width of the open window's histogram.
        bias_LE: ``[L, E]`` fp32, added to scores for the choice only.
        recording: `route` adds to it only while true; see `paused`.
    """

    def __init__(self, counts: Tensor, edges: Tensor, bias: Tensor, bins: int) -> None:
        """Wrap existing buffers; use `allocate`."""
        self.counts = counts
        self.edges_L2 = edges
        self.bias_LE = bias
        self.bins = bins
        self.recording = True

    @classmethod
    def allocate(
        cls, layers: int, experts: int, bins: int = 1000, device: torch.device | str | None = None
    ) -> RouterStats:
        """Fresh statistics: every count and bias exactly 0, ranges those of bias 0.

        Args:
            layers: number of MoE layers, >= 0.
            experts: experts of each.
            bins: histogram bins (the report's 1000).
            device: where; default the current default device.

        Raises:
            ValueError: a size that is too small.
        """
        if layers < 0 or experts < 1 or bins < 1:
            raise ValueError(
                f"layers, experts, bins: found {layers}, {experts}, {bins}, need layers >= 0, experts >= 1, bins >= 1"
            )
        size = layers * (experts * bins + experts + len(COUNTERS))
        bias = torch.zeros(layers, experts, dtype=torch.float32, device=device)
        counts = torch.zeros(size, dtype=torch.int32, device=device)
        return cls(counts, histogram_edges(bias, bins), bias, bins)

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return self.bias_LE.shape[0]

    @property
    def experts(self) -> int:
        """Experts a layer."""
        return self.bias_LE.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of all buffers."""
        return self.bias_LE.device

    def _view(self, start: int, *shape: int) -> Tensor:
        size = 1
        for n in shape:
            size *= n
        return self.counts[start : start + size].view(shape)

    @property
    def histograms_LEB(self) -> Tensor:
        """``[L, E, bins]`` int32, a view."""
        return self._view(0, self.layers, self.experts, self.bins)

    @property
    def loads_LE(self) -> Tensor:
        """``[L, E]`` int32, a view."""
        return self._view(self.layers * self.experts * self.bins, self.layers, self.experts)

    @property
    def counters_LF(self) -> Tensor:
        """``[L, 5]`` int32, a view; columns `COUNTERS`."""
        return self._view(self.layers * self.experts * (self.bins + 1), self.layers, len(COUNTERS))

    @property
    def tokens_L(self) -> Tensor:
        """``[L]`` int64: tokens routed in this window."""
        return self.counters_LF[:, 0].long()

    @property
    def dropped_L(self) -> Tensor:
        """``[L]`` int64: tokens left out of the histogram because a score was not finite."""
        return self.counters_LF[:, 2].long()

    @property
    def saturated_L(self) -> Tensor:
        """``[L]`` int64: scores, of T x E, that fp32 cannot tell from 0 or 1."""
        return (self.counters_LF[:, 4].long() << _WORD) + self.counters_LF[:, 3]

    @property
    def overflow_L(self) -> Tensor:
        """``[L]`` int64: required biases outside the range; none by construction (see `histogram_edges`)."""
        return torch.zeros(self.layers, dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def required_bias_quantiles(self, levels: Sequence[float]) -> Tensor:
        """Quantiles of the required biases of each layer, all experts together, linear within a bin.

        Args:
            levels: Q levels in [0, 1].

        Returns:
            ``[L, Q]`` fp64 in units of the bias; NaN where none was counted.
        """
        below_LB = self.histograms_LEB.sum(1).cumsum(1).double()
        wanted_LQ = below_LB[:, -1:] * torch.tensor(levels, dtype=torch.float64, device=self.device)
        bin_LQ = torch.searchsorted(below_LB, wanted_LQ).clamp_(max=self.bins - 1)
        upper_LQ = below_LB.gather(1, bin_LQ)
        lower_LQ = torch.where(bin_LQ > 0, below_LB.gather(1, (bin_LQ - 1).clamp(min=0)), 0.0)
        part_LQ = (wanted_LQ - lower_LQ) / (upper_LQ - lower_LQ).clamp(min=1.0)
        low_L, width_L = self.edges_L2.double().unbind(1)
        return torch.where(below_LB[:, -1:] > 0, low_L[:, None] + (bin_LQ + part_LQ) * width_L[:, None], torch.nan)

    def replica(self) -> RouterStats:
        """Counts of its own, zero, beside the same bias and ranges: for a thread that routes with this bias."""
        other = RouterStats.allocate(self.layers, self.experts, self.bins, self.device)
        other.bias_LE, other.edges_L2 = self.bias_LE, self.edges_L2
        return other

    def layer(self, index: int) -> LayerStats:
        """View of one layer, to be handed to `route`; stays valid when the buffers move.

        Raises:
            ValueError: no such layer.
        """
        if not 0 <= index < self.layers:
            raise ValueError(f"index: found {index}, need 0 <= index < {self.layers}, the number of layers")
        return LayerStats(self, index)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted inside: evaluation, generation, and the recomputation of checkpointed activations.

        For the last, hand it to the checkpoint, whose second context is the recomputation:
        ``checkpoint(layer, x, use_reentrant=False, context_fn=lambda: (nullcontext(), stats.paused()))``.
        """
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def zero_(self) -> RouterStats:
        """Close the window: all counts become 0. Bias and ranges stay."""
        self.counts.zero_()
        return self

    @torch.no_grad()
    def solve_(self, k: int, *, ema: float = 0.0) -> RouterStats:
        """Set each layer's bias from its histogram, in place, and the range of the next window.

        A layer that counted no token keeps its bias, as does every layer when k = E (there is nothing to balance).
        Counts are left alone; call `zero_` after.

        Args:
            k: experts per token.
            ema: share of the old bias kept, 0 (report) to below 1. It smooths noise near balance and slows the way
                there; the new quantile is always a replacement, never an increment.

        Raises:
            ValueError: bad ``k`` or ``ema``.
        """
        check_k(k, self.experts)
        if not 0.0 <= ema < 1.0:
            raise ValueError(f"ema: found {ema}, need 0 <= ema < 1")
        if k == self.experts:
            return self
        for histogram_EB, edges_2, bias_E in zip(self.histograms_LEB, self.edges_L2, self.bias_LE, strict=True):
            required_E, tokens = quantile_from_histogram(histogram_EB, edges_2, k)
            solved_E = centred(ema * bias_E.double() + (1.0 - ema) * centred(required_E))
            bias_E.copy_(torch.where(tokens > 0, solved_E, bias_E.double()))
        self.edges_L2.copy_(histogram_edges(self.bias_LE, self.bins))
        return self

    @torch.no_grad()
    def set_bias_(self, bias_LE: Tensor) -> RouterStats:
        """Replace the bias (from a released checkpoint, say).

        Raises:
            ValueError: wrong shape, dtype other than fp32, a non-finite value, or an open window: what was counted
                was counted in the old range.
        """
        _check_field("bias_LE", bias_LE, self.bias_LE)
        if bool(self.counts.any()):
            raise ValueError("set_bias_: found counts of an open window, need zero_() first")
        self.bias_LE.copy_(bias_LE)
        self.edges_L2.copy_(histogram_edges(self.bias_LE, self.bins))
        return self

    def to(self, device: torch.device | str) -> RouterStats:
        """Move every buffer to ``device``, in place; dtypes stay. From meta there is nothing to copy: zeros."""
        if self.device.type == "meta" and torch.device(device).type != "meta":
            fresh = RouterStats.allocate(self.layers, self.experts, self.bins, device)
            self.counts, self.edges_L2, self.bias_LE = fresh.counts, fresh.edges_L2, fresh.bias_LE
            return self
        self.counts, self.edges_L2, self.bias_LE = (
            self.counts.to(device),
            self.edges_L2.to(device),
            self.bias_LE.to(device),
        )
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all buffers by name, the open window's counts included: a run resumed from the middle of an
        accumulation window solves the same bias as one that never stopped."""
        return {name: getattr(self, name).clone() for name in _FIELDS}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> RouterStats:
        """Restore what `state_dict` saved, in place; all or nothing.

        Raises:
            ValueError: missing or unknown names, other shapes or dtypes, non-finite biases or ranges.
        """
        if set(state) != set(_FIELDS):
            raise ValueError(f"state: found {sorted(state)}, need exactly {sorted(_FIELDS)}")
        for name in _FIELDS:
            _check_field(name, state[name], getattr(self, name))
        for name in _FIELDS:
            getattr(self, name).copy_(state[name])
        return self


def _check_field(name: str, found: Tensor, need: Tensor) -> None:
    if found.shape != need.shape or found.dtype != need.dtype:
        raise ValueError(
            f"{name}: found shape {tuple(found.shape)} of {found.dtype}, need {tuple(need.shape)} of {need.dtype}"
        )
    if found.is_floating_point() and not bool(found.isfinite().all()):
        raise ValueError(f"{name}: found a non-finite value, need finite ones")


class LayerStats:
    """One layer's part of a `RouterStats`: reads through to the owner each time, so it never goes stale."""

    def __init__(self, owner: RouterStats, index: int) -> None:
        """Use `RouterStats.layer`."""
        self.owner = owner
        self.index = index

    @property
    def bias_E(self) -> Tensor:
        """``[E]`` fp32 view."""
        return self.owner.bias_LE[self.index]

    @property
    def edges_2(self) -> Tensor:
        """``[2]`` fp32 view: lower end, bin width."""
        return self.owner.edges_L2[self.index]

    @property
    def histogram_EB(self) -> Tensor:
        """``[E, bins]`` int32 view."""
        return self.owner.histograms_LEB[self.index]

    @property
    def loads_E(self) -> Tensor:
        """``[E]`` int32 view."""
        return self.owner.loads_LE[self.index]

    @property
    def counters_F(self) -> Tensor:
        """``[5]`` int32 view, columns `COUNTERS`."""
        return self.owner.counters_LF[self.index]

    @torch.no_grad()
    def add(
        self,
        ids_TK: Tensor,
        scores_TE: Tensor,
        cutoff_T: Tensor | None,
        mask_T: Tensor | None,
        bias_E: Tensor,
        saturation_below: float = 0.0,
    ) -> None:
        """Count one batch. Does nothing while the owner is paused.

        Args:
            ids_TK: ``[T, K]`` int64 chosen experts, -1 where none.
            scores_TE: ``[T, E]`` raw scores in [0, 1].
            cutoff_T: ``[T]`` biased cutoffs, or None where no required bias exists (k = E, replayed choices): then
                only loads and tokens are counted.
            mask_T: ``[T]`` bool, true for real tokens, or None for all.
            bias_E: the bias the batch was routed with.
            saturation_below: scores at or below it, and those equal to 1, count as saturated.

        Raises:
            ValueError: another number of experts, or a bias that changed inside the window (seen on the CPU only).
        """
        if not self.owner.recording:
            return
        tokens, experts = scores_TE.shape
        if experts != self.owner.experts:
            raise ValueError(f"stats: found {self.owner.experts} experts, need {experts}, those of logits_TE")
        if cutoff_T is not None:
            self._open(bias_E)
        # one extra bin takes the -1 of padding
        self.loads_E.add_(torch.bincount(ids_TK.reshape(-1) + 1, minlength=experts + 1)[1:].int())
        counters = self.counters_F
        counters[0] += tokens if mask_T is None else mask_T.sum()
        if cutoff_T is None:
            return
        if may_read(scores_TE) and mask_T is None and tokens:
            low, high = (float(value) for value in scores_TE.aminmax())
            if low > saturation_below and high < 1.0:  # one pass settles the usual batch; false if there is a NaN
                counters[1] += tokens
                count_required_bias(scores_TE, cutoff_T, None, self.edges_2, self.histogram_EB)
                return
        # scores are in [0, 1], so a row's sum is finite exactly if all of them are
        valid_T = (scores_TE.sum(1) + cutoff_T).isfinite()
        dropped_T = ~valid_T
        if mask_T is not None:
            valid_T, dropped_T = valid_T & mask_T, dropped_T & mask_T
        saturated_T = ((scores_TE >= 1.0) | (scores_TE <= saturation_below)).sum(1)
        counters[1] += valid_T.sum()
        counters[2] += dropped_T.sum()
        counters[3] += torch.where(valid_T, saturated_T, 0).sum()
        counters[4] += counters[3] >> _WORD
        counters[3] &= (1 << _WORD) - 1
        count_required_bias(scores_TE, cutoff_T, valid_T, self.edges_2, self.histogram_EB)

    def _open(self, bias_E: Tensor) -> None:
        """The first count of a window fixes the histogram's range to the bias in use, however that was set.

        On the CPU a bias that changes inside a window is refused; on a card no value is read back.
        """
        edges_2, fresh_2 = self.edges_2, histogram_edges(bias_E.to(torch.float32), self.owner.bins)
        empty = self.counters_F[1] == 0
        if may_read(edges_2) and not torch.equal(edges_2, fresh_2):
            if not bool(fresh_2.isfinite().all()):
                raise ValueError("bias_E: found a non-finite value, need finite biases")
            if empty:
                edges_2.copy_(fresh_2)
                return
            raise ValueError(
                f"bias_E: found one whose histogram has (lower end, width) {fresh_2.tolist()}, need that of the bias "
                f"this window was opened with, {edges_2.tolist()}: a bias may change only after zero_()"
            )
        if not may_read(edges_2):
            edges_2.copy_(torch.where(empty, fresh_2, edges_2))
