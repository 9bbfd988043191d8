"""Router statistics with one owner: counts, histogram ranges and biases of all MoE layers in a few flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trine.ops.router.grid import ESTIMATORS, SCORE_DOMAINS, Grid, find_quantile
from trine.ops.router.quantile import (
    centred,
    check_k,
    check_rounds,
    count_required_bias,
    finite_rows,
    may_read,
    refined_cutoffs,
)

COUNTERS = ("routed", "counted", "dropped", "saturated_low", "saturated_high")
"""Columns of `RouterStats.counters_LF`: tokens routed; those of them in the histogram; those left out of it because a
logit was not finite; scores that fp32 cannot tell from 0 or 1. Saturated scores can pass 2^31 in one step (4 M tokens x
896 experts), so they are held in two words, the low 20 bits and the rest; sums over ranks stay exact."""
_WORD = 20
_FIRST_FIELDS = ("histograms_LEB", "loads_LE", "counters_LF", "edges_L2", "bias_LE")
_FIELDS = (*_FIRST_FIELDS, "anchor_LE", "reach_L")
_FORMAT = 2  # 1: `_FIRST_FIELDS` alone, of the report's histogram over scores


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
        edges_L2: ``[L, 2]`` fp32 range of the open window's histogram, see `Grid.edges`.
        bias_LE: ``[L, E]`` fp32, added to scores (or logits) for the choice only.
        anchor_LE: ``[L, E]`` fp32, the bias that the open window was routed with.
        reach_L: ``[L]`` fp32, how far beyond the bias the range goes; widens when a quantile lies outside.
        grid: which histogram, of scores or of logits.
        batch_rounds: updates of the bias within each batch that is added, the window's own included: 1 counts required
            biases against the cutoffs that the batch was routed with, more against refined ones (`refined_cutoffs`).
            Those are of each rank's and micro-batch's own tokens; what is counted is summed as ever.
        recording: `route` adds to it only while true; see `paused`.
    """

    def __init__(self, counts: Tensor, bias: Tensor, reach: Tensor, grid: Grid, batch_rounds: int = 1) -> None:
        """Wrap existing buffers; use `allocate`."""
        self.counts = counts
        self.bias_LE = bias
        self.anchor_LE = bias.clone()
        self.reach_L = reach
        self.edges_L2 = grid.edges(bias, reach)
        self.grid = grid
        self.batch_rounds = batch_rounds
        self.recording = True

    @classmethod
    def allocate(
        cls,
        layers: int,
        experts: int,
        bins: int | None = None,
        device: torch.device | str | None = None,
        *,
        estimator: str = "report",
        score_domain: str = "sigmoid",
        batch_rounds: int = 1,
    ) -> RouterStats:
        """Fresh statistics: every count and bias exactly 0, ranges those of bias 0.

        Args:
            layers: number of MoE layers, >= 0.
            experts: experts of each.
            bins: histogram bins; default the report's 1000, 256 for ``signed_log``.
            device: where; default the current default device.
            estimator: ``"report"``, equal bins over one range for all experts (K3 report, appendix D), or
                ``"signed_log"``, bins around each expert's old bias, fine near it.
            score_domain: what biases are added to: ``"sigmoid"``, the scores (also softmax), or ``"logit"``. Must be
                that of `route`.
            batch_rounds: the attribute; >= 1.

        Raises:
            ValueError: a size that is too small or does not fit, an unknown name.
        """
        if bins is None:
            bins = 256 if estimator == "signed_log" else 1000
        if layers < 0 or experts < 1 or bins < 1:
            raise ValueError(
                f"layers, experts, bins: found {layers}, {experts}, {bins}, need layers >= 0, experts >= 1, bins >= 1"
            )
        check_rounds("batch_rounds", batch_rounds)
        grid = Grid(estimator, score_domain, bins)
        size = layers * (experts * bins + experts + len(COUNTERS))
        bias = torch.zeros(layers, experts, dtype=torch.float32, device=device)
        reach = torch.full((layers,), grid.first_reach, dtype=torch.float32, device=device)
        return cls(torch.zeros(size, dtype=torch.int32, device=device), bias, reach, grid, batch_rounds)

    @property
    def bins(self) -> int:
        """Histogram bins an expert."""
        return self.grid.bins

    @property
    def estimator(self) -> str:
        """``"report"`` or ``"signed_log"``."""
        return self.grid.estimator

    @property
    def score_domain(self) -> str:
        """What biases are added to: ``"sigmoid"`` or ``"logit"``."""
        return self.grid.score_domain

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
        """``[L]`` int64: required biases, of T x E, outside the histogram's range. Those far above an expert's quantile
        do no harm. 0 for the report's histogram of scores, which leave its range nowhere; counted against refined
        cutoffs (`batch_rounds`) they may, and are then in its first and last bins without being told apart."""
        if not self.grid.bordered:
            return torch.zeros(self.layers, dtype=torch.int64, device=self.device)
        return self.histograms_LEB[:, :, :: self.bins - 1].sum((1, 2), dtype=torch.int64)

    @torch.no_grad()
    def required_bias_quantiles(self, levels: Sequence[float]) -> Tensor:
        """Quantiles of the required biases of each layer, all experts together, linear within a bin.

        Args:
            levels: Q levels in [0, 1].

        Returns:
            ``[L, Q]`` fp64 in units of the bias; NaN where none was counted.

        Raises:
            ValueError: a level outside [0, 1].
        """
        if not all(0.0 <= level <= 1.0 for level in levels):
            raise ValueError(f"levels: found {list(levels)}, need numbers in [0, 1]")
        levels_Q = torch.tensor(levels, dtype=torch.float64, device=self.device)
        return self.grid.pooled_quantiles(self.histograms_LEB, self.edges_L2, self.anchor_LE, levels_Q)

    @torch.no_grad()
    def quantile_counts(self, k: int) -> Tensor:
        """Required biases in the bin that holds each expert's k/E quantile, ``[L, E]`` int32.

        Where they lie within the bin is not known. Beside the tokens that an expert should get, m k / E, this says how
        finely the open window's histogram can set the expert's load.

        Args:
            k: experts per token, < E.
        """
        bin_LE, _, _ = find_quantile(self.histograms_LEB, k)
        return self.histograms_LEB.gather(2, bin_LE[..., None]).squeeze(2)

    def replica(self) -> RouterStats:
        """Counts of its own, zero, beside the same bias and ranges: for a thread that routes with this bias."""
        other = RouterStats(torch.zeros_like(self.counts), self.bias_LE, self.reach_L, self.grid, self.batch_rounds)
        other.anchor_LE, other.edges_L2 = self.anchor_LE, self.edges_L2
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
        """Close the window: all counts become 0, and ranges those of the bias. Bias and reach stay."""
        self.counts.zero_()
        self._reopen()
        return self

    @torch.no_grad()
    def _reopen(self) -> None:
        self.anchor_LE.copy_(self.bias_LE)
        self.edges_L2.copy_(self.grid.edges(self.bias_LE, self.reach_L))

    @torch.no_grad()
    def solve_(self, k: int, *, ema: float = 0.0, gain_L: Tensor | None = None) -> RouterStats:
        """Set each layer's bias from its histogram, in place, and the reach of the next window.

        b becomes (1 - g) b + g times the solved bias, with g = 1 - ema, times ``gain_L``. A layer that counted no token
        keeps its bias, as does every layer when k = E (there is nothing to balance). An expert whose quantile lies
        outside the range moves to the range's end, short of its aim, and the range widens. Counts are left alone; call
        `zero_` after.

        Args:
            k: experts per token.
            ema: share of the old bias kept, 0 (report) to below 1. It smooths noise near balance and slows the way
                there; the new quantile is always a replacement, never an increment.
            gain_L: ``[L]`` in [0, 1]; None is 1. Never above: a longer step than the quantile's rings or diverges.

        Raises:
            ValueError: bad ``k`` or ``ema``.
        """
        check_k(k, self.experts)
        if not 0.0 <= ema < 1.0:
            raise ValueError(f"ema: found {ema}, need 0 <= ema < 1")
        if k == self.experts or self.layers == 0:
            return self
        bin_LE, part_LE, tokens_L = find_quantile(self.histograms_LEB, k)
        required_LE, outside_LE = self.grid.required(bin_LE, part_LE, self.edges_L2, self.anchor_LE)
        any_L1 = (tokens_L > 0)[:, None]
        old_LE = self.bias_LE.double()
        if gain_L is None:
            solved_LE = ema * old_LE + (1.0 - ema) * centred(required_LE)
        else:
            gain_L1 = (1.0 - ema) * gain_L.double().clamp(0.0, 1.0)[:, None]
            solved_LE = (1.0 - gain_L1) * old_LE + gain_L1 * centred(required_LE)
        self.bias_LE.copy_(torch.where(any_L1, centred(solved_LE), old_LE))
        reach_L = self.grid.next_reach(self.reach_L, self.anchor_LE, required_LE, outside_LE)
        self.reach_L.copy_(torch.where(any_L1[:, 0], reach_L, self.reach_L))
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
        self._reopen()
        return self

    def to(self, device: torch.device | str) -> RouterStats:
        """Move every buffer to ``device``, in place; dtypes stay. From meta there is nothing to copy: zeros."""
        names = ("counts", "bias_LE", "anchor_LE", "reach_L", "edges_L2")
        source = self
        if self.device.type == "meta" and torch.device(device).type != "meta":
            source = RouterStats.allocate(
                *(self.layers, self.experts, self.bins, device),
                estimator=self.estimator,
                score_domain=self.score_domain,
            )
        for name in names:
            setattr(self, name, getattr(source, name).to(device))
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all buffers by name, the open window's counts included: a run resumed from the middle of an
        accumulation window solves the same bias as one that never stopped. ``layout`` holds the format's version, the
        place of the estimator in `ESTIMATORS` and that of the score domain in `SCORE_DOMAINS`."""
        kind = [_FORMAT, ESTIMATORS.index(self.estimator), SCORE_DOMAINS.index(self.score_domain)]
        layout = torch.tensor(kind, dtype=torch.int64, device=self.device)
        return {name: getattr(self, name).clone() for name in _FIELDS} | {"layout": layout}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> RouterStats:
        """Restore what `state_dict` saved, in place; all or nothing.

        States of the first format (the report's histogram over scores, without ``layout``) load too. Of a state with
        the other estimator the bias is taken over, if its window is closed.

        Raises:
            ValueError: missing or unknown names, a newer format, another score domain, the other estimator with an open
                window, other shapes or dtypes, non-finite biases or ranges.
        """
        if set(state) == set(_FIRST_FIELDS):
            kind = torch.tensor([_FORMAT, 0, 0])
            reach_L = torch.ones_like(self.reach_L)
            state = {**state, "anchor_LE": state["bias_LE"], "reach_L": reach_L, "layout": kind}
        need = {*_FIELDS, "layout"}
        if set(state) != need:
            raise ValueError(f"state: found {sorted(state)}, need exactly {sorted(need)}")
        if _estimator_of(state["layout"], self.score_domain) != self.estimator:
            _check_field("bias_LE", state["bias_LE"], self.bias_LE)
            if any(bool(state[name].any()) for name in ("histograms_LEB", "loads_LE", "counters_LF")):
                raise ValueError(
                    f"estimator: found counts of an open window of the other one, need {self.estimator!r}, or a state "
                    "saved between steps"
                )
            self.counts.zero_()
            self.bias_LE.copy_(state["bias_LE"])
            self.reach_L.fill_(self.grid.first_reach)
            self._reopen()
            return self
        for name in _FIELDS:
            _check_field(name, state[name], getattr(self, name))
        if not bool((state["reach_L"] > 0).all()):
            raise ValueError(f"reach_L: found {state['reach_L'].tolist()}, need numbers above 0")
        for name in _FIELDS:
            getattr(self, name).copy_(state[name])
        return self


def _estimator_of(layout: Tensor, score_domain: str) -> str:
    """The estimator that a state's ``layout`` names, if its format and score domain are ours."""
    values = layout.tolist() if layout.ndim == 1 else []
    if not values or values[0] != _FORMAT:
        raise ValueError(f"layout: found {layout.tolist()}, need format version {_FORMAT} or older")
    if len(values) != 3 or values[1] not in range(len(ESTIMATORS)) or values[2] not in range(len(SCORE_DOMAINS)):
        raise ValueError(f"layout: found {values}, need [{_FORMAT}, estimator 0 or 1, score domain 0 or 1]")
    if SCORE_DOMAINS[values[2]] != score_domain:
        raise ValueError(
            f"score_domain: found {SCORE_DOMAINS[values[2]]!r}, need {score_domain!r}: biases of scores and of logits "
            "have different units"
        )
    return ESTIMATORS[values[1]]


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
    def score_domain(self) -> str:
        """What the bias is added to: ``"sigmoid"`` or ``"logit"``, the argument of `route`."""
        return self.owner.score_domain

    @property
    def anchor_E(self) -> Tensor:
        """``[E]`` fp32 view: the bias the open window was routed with."""
        return self.owner.anchor_LE[self.index]

    @property
    def edges_2(self) -> Tensor:
        """``[2]`` fp32 view of the range, see `Grid.edges`."""
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
        saturation_above: float = 1.0,
        logits_TE: Tensor | None = None,
    ) -> None:
        """Count one batch. Does nothing while the owner is paused.

        Args:
            ids_TK: ``[T, K]`` int64 chosen experts, -1 where none.
            scores_TE: ``[T, E]`` raw scores in [0, 1]; logits where the score domain is ``"logit"``.
            cutoff_T: ``[T]`` biased cutoffs, or None where no required bias exists (k = E, replayed choices): then
                only loads and tokens are counted.
            mask_T: ``[T]`` bool, true for real tokens, or None for all.
            bias_E: the bias the batch was routed with.
            saturation_below: scores (logits) at or below it count as saturated,
            saturation_above: and those at or above this.
            logits_TE: ``[T, E]`` what the scores are of. A row in which one is NaN or infinite is left out of the
                histogram and counted as dropped: an infinite logit has the finite score 0 or 1, and no required bias.
                None: ``scores_TE`` themselves.

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
        ids_N = ids_TK.reshape(-1) + 1
        if may_read(ids_N):
            self.loads_E.add_(torch.bincount(ids_N, minlength=experts + 1)[1:].int())
        else:  # bincount would read the largest id back to size its answer
            ones_N = torch.ones((), dtype=torch.int32, device=ids_N.device).expand(ids_N.shape[0])
            self.loads_E.add_(self.loads_E.new_zeros(experts + 1).index_add_(0, ids_N, ones_N)[1:])
        counters = self.counters_F
        counters[0] += tokens if mask_T is None else mask_T.sum()
        if cutoff_T is None:
            return
        if may_read(scores_TE) and mask_T is None and tokens:
            low, high = (float(value) for value in scores_TE.aminmax())
            # one pass settles the usual batch; false if there is a NaN, or the 0 or 1 of an infinite logit
            above_zero = self.score_domain == "logit" or low > 0.0
            if above_zero and low > saturation_below and high < saturation_above:
                counters[1] += tokens
                self._count(scores_TE, cutoff_T, None, ids_TK.shape[1])
                return
        valid_T = finite_rows(scores_TE if logits_TE is None else logits_TE) & cutoff_T.isfinite()
        dropped_T = ~valid_T
        if mask_T is not None:
            valid_T, dropped_T = valid_T & mask_T, dropped_T & mask_T
        saturated_T = ((scores_TE >= saturation_above) | (scores_TE <= saturation_below)).sum(1)
        counters[1] += valid_T.sum()
        counters[2] += dropped_T.sum()
        counters[3] += torch.where(valid_T, saturated_T, 0).sum()
        counters[4] += counters[3] >> _WORD
        counters[3] &= (1 << _WORD) - 1
        self._count(scores_TE, cutoff_T, valid_T, ids_TK.shape[1])

    def _count(self, scores_TE: Tensor, cutoff_T: Tensor, valid_T: Tensor | None, k: int) -> None:
        grid, anchor_E = self.owner.grid, self.anchor_E
        if self.owner.batch_rounds > 1:
            reach = self.owner.reach_L[self.index]
            cutoff_T = refined_cutoffs(scores_TE, anchor_E, k, self.owner.batch_rounds, grid, reach, valid_T)
        count_required_bias(scores_TE, cutoff_T, valid_T, self.edges_2, self.histogram_EB, grid, anchor_E)

    def _open(self, bias_E: Tensor) -> None:
        """The first count of a window fixes its range to the bias in use, however that was set.

        On the CPU a bias that changes inside a window is refused; on a card no value is read back.
        """
        anchor_E, edges_2 = self.anchor_E, self.edges_2
        bias_E = bias_E.to(torch.float32)
        empty = self.counters_F[1] == 0
        if not may_read(anchor_E):
            anchor_E.copy_(torch.where(empty, bias_E, anchor_E))
        elif torch.equal(anchor_E, bias_E):
            return
        elif not bool(bias_E.isfinite().all()):
            raise ValueError("bias_E: found a non-finite value, need finite biases")
        elif not bool(empty):
            raise ValueError(
                f"bias_E: found one that differs by up to {float((bias_E - anchor_E).abs().max()):.3g} from the bias "
                "this window was opened with: a bias may change only after zero_()"
            )
        else:
            anchor_E.copy_(bias_E)
        edges_2.copy_(self.owner.grid.edges(anchor_E, self.owner.reach_L[self.index]))
