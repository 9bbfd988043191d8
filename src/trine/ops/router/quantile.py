"""Quantile Balancing: from required biases to the bias that gives every expert its share.

The required bias of expert j at token i, r_ij = cutoff_i - s_ij, is what j's bias would have to be to tie with the
token's cutoff (its (k+1)-th largest biased score). Setting b_j to the k/E quantile of r_.j lets exactly that share of
tokens in; see K3 report (arXiv 2607.24653) Eq. 13-14, appendices C and D, and README.md here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops.router.grid import SCORE_DOMAINS, Grid, find_quantile
from trine.ops.router.select import top_ids

_ROWS = 4096
_COLUMNS = 64  # experts counted together on the CPU: their bins stay in the second-level cache


def may_read(tensor: Tensor) -> bool:
    """Whether Python may look at values: on the CPU. Reading those of a card would stall it at every layer."""
    return tensor.device.type == "cpu"


def finite_rows(values_TE: Tensor) -> Tensor:
    """Whether every value of a row of ``[T, E]`` is finite, ``[T]`` bool.

    Zero times a finite number is 0, and NaN otherwise; on a CPU a fourth of the time of `isfinite`.
    """
    return (values_TE * 0.0).sum(1) == 0.0


def histogram_edges(bias_LE: Tensor, bins: int) -> Tensor:
    """Range of the next histogram: ``[min b - 1, max b + 1]`` in ``bins`` equal bins (K3 report, appendix D).

    Scores lie in [0, 1] and the cutoff is an order statistic of s + b, so it lies in [min b, max b + 1] and every
    required bias lies in this range: nothing is cut off. (This holds for sigmoid and softmax scores, not for logits,
    and for the cutoffs that the batch was routed with, not for refined ones.)

    Args:
        bias_LE: ``[..., E]`` fp32.
        bins: number of bins.

    Returns:
        ``[..., 2]`` fp32: lower end, bin width.
    """
    return Grid("report", "sigmoid", bins).edges(bias_LE, bias_LE.new_ones(bias_LE.shape[:-1]))


def count_required_bias(
    scores_TE: Tensor,
    cutoff_T: Tensor,
    valid_T: Tensor | None,
    edges_2: Tensor,
    counts_EB: Tensor,
    grid: Grid | None = None,
    anchor_E: Tensor | None = None,
) -> None:
    """Add each valid token's required bias of every expert to the histogram, in place.

    Args:
        scores_TE: ``[T, E]`` raw scores, fp32 or fp64.
        cutoff_T: ``[T]`` biased cutoffs.
        valid_T: ``[T]`` bool, None for all; other rows add nothing (they may hold NaN).
        edges_2: ``[2]`` fp32, from `Grid.edges` of the bias in use.
        counts_EB: ``[E, bins]`` contiguous int32.
        grid: the bins of a signed-log one lie around ``anchor_E``; of any other, or None, they are equal.
        anchor_E: ``[E]`` fp32, the bias in use; read with a signed-log grid.
    """
    experts, bins = counts_EB.shape
    if may_read(scores_TE):
        if valid_T is not None and not bool(valid_T.all()):
            scores_TE, cutoff_T = scores_TE[valid_T], cutoff_T[valid_T]
        ones = torch.ones((), dtype=torch.int32)
        for rows in range(0, scores_TE.shape[0], _ROWS):
            for first in range(0, experts, _COLUMNS):
                part_EB = counts_EB[first : first + _COLUMNS]
                part_TE = scores_TE[rows : rows + _ROWS, first : first + _COLUMNS]
                part_E = None if anchor_E is None else anchor_E[first : first + _COLUMNS]
                index_N = _flat_bins(part_TE, cutoff_T[rows : rows + _ROWS], edges_2, bins, grid, part_E).view(-1)
                part_EB.view(-1).index_add_(0, index_N, ones.expand(index_N.shape[0]))
        return
    if valid_T is None:
        valid_T = torch.ones_like(cutoff_T, dtype=torch.bool)
    # no value is read back from the device: rows that do not count add 0
    scores_TE = torch.where(valid_T[:, None], scores_TE, 0)
    cutoff_T = torch.where(valid_T, cutoff_T, 0)
    index_TE = _flat_bins(scores_TE, cutoff_T, edges_2, bins, grid, anchor_E)
    counts_EB.view(-1).index_add_(0, index_TE.view(-1), valid_T.int()[:, None].expand(-1, experts).reshape(-1))


def _flat_bins(
    scores_TE: Tensor, cutoff_T: Tensor, edges_2: Tensor, bins: int, grid: Grid | None, anchor_E: Tensor | None
) -> Tensor:
    """Index ``expert * bins + bin`` of every required bias, ``[T, E]`` int32."""
    first_E = torch.arange(scores_TE.shape[1], dtype=torch.int32, device=scores_TE.device) * bins
    if grid is not None and grid.signed_log and anchor_E is not None:
        return grid.signed_log_bins(scores_TE, cutoff_T, anchor_E, edges_2).add_(first_E)
    # scores: the last rounding may step over an end of the exact range by one ulp; logits, and scores counted against
    # refined cutoffs: the end bins take the rest
    place_TE = (cutoff_T[:, None] - scores_TE).sub_(edges_2[0]).mul_(1.0 / edges_2[1]).clamp_(0, bins - 1)
    return place_TE.int().add_(first_E)


def quantile_from_histogram(counts_EB: Tensor, edges_2: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k/E quantile of each expert's required bias, linear within its bin (K3 report, appendix D).

    Args:
        counts_EB: ``[E, bins]`` contiguous integer counts; every row sums to the number of tokens m.
        edges_2: ``[2]`` fp32 lower end and width.
        k: experts per token, < E.

    Returns:
        ``[E]`` fp64 required biases (finite whatever the counts) and the scalar int64 m.
    """
    bin_LE, part_LE, tokens_L = find_quantile(counts_EB[None], k)
    low, width = edges_2.double().unbind()
    return low + (bin_LE[0] + part_LE[0]) * width, tokens_L[0]


def exact_quantile(required_TE: Tensor, k: int) -> Tensor:
    """The (q+1)-th smallest required bias of each expert, q = m k / E (K3 report Eq. 14), for any m >= 1.

    A q that is not a whole number lies between two order statistics and is interpolated, so fewer tokens than
    experts (q < 1) are no special case. Equal to minus the (q+1)-th largest margin s - cutoff.

    Args:
        required_TE: ``[m, E]`` finite required biases.
        k: experts per token, < E.

    Returns:
        ``[E]`` fp64.
    """
    tokens, experts = required_TE.shape
    whole, rest = divmod(tokens * k, experts)
    columns_ET = required_TE.t().contiguous()
    low_E = columns_ET.kthvalue(min(whole + 1, tokens), dim=1).values.double()
    if rest == 0:
        return low_E
    high_E = columns_ET.kthvalue(min(whole + 2, tokens), dim=1).values.double()
    return low_E + (high_E - low_E) * (rest / experts)


def centred(bias_E: Tensor) -> Tensor:
    """Bias ``[..., E]`` minus its mean over experts: one constant for all changes no choice, and would drift if left
    in."""
    return bias_E - bias_E.mean(-1, keepdim=True)


def cutoffs(scores_TE: Tensor, bias_E: Tensor, k: int) -> Tensor:
    """The (k+1)-th largest biased score of each token, ``[T]``; k < E."""
    biased_TE = scores_TE + bias_E
    return torch.topk(biased_TE, k + 1, dim=1).values[:, k]


@torch.no_grad()
def refined_cutoffs(
    scores_TE: Tensor, bias_E: Tensor, k: int, rounds: int, grid: Grid, reach: Tensor, valid_T: Tensor | None = None
) -> Tensor:
    """Cutoffs under the bias that ``rounds - 1`` updates within this batch lead to.

    An update takes the tokens' cutoffs as they are and moves every expert at once; where many experts move together,
    as with skewed scores, the cutoffs move with them and one update goes half the way. More of them on one batch are
    coordinate descent on the assignment problem's dual (K3 report, appendix C): required biases counted against these
    cutoffs are those of a router that is nearly balanced already. README.md has how far that goes, and its cost.

    Args:
        scores_TE: ``[T, E]`` raw scores (logits), fp32 or fp64.
        bias_E: ``[E]`` fp32, the bias the batch was routed with.
        k: experts per token, < E.
        rounds: updates in all, the one that is solved from what the cutoffs are for included; >= 1.
        grid: the histogram by which each is solved.
        reach: fp32 scalar, how far around a bias its bins go.
        valid_T: ``[T]`` bool, rows that count; None for all.

    Returns:
        ``[T]``; rows that do not count may hold anything.
    """
    level = bias_E.double().mean()  # kept: cutoffs of another level would lie outside the range around ``bias_E``
    for _ in range(rounds - 1):
        cutoff_T = cutoffs(scores_TE, bias_E, k)
        required_LE, _, tokens_L = _solve_batch(scores_TE, cutoff_T, bias_E, k, grid, reach, valid_T)
        bias_E = torch.where(tokens_L > 0, (centred(required_LE[0]) + level).to(bias_E.dtype), bias_E)
    return cutoffs(scores_TE, bias_E, k)


def _solve_batch(
    scores_TE: Tensor,
    cutoff_T: Tensor,
    bias_E: Tensor,
    k: int,
    grid: Grid,
    reach: Tensor,
    valid_T: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Required biases ``[1, E]`` by a histogram of this batch alone, which lie outside its range, and the tokens."""
    edges_2, anchor_E = grid.edges(bias_E, reach), bias_E.float()
    counts_EB = torch.zeros(scores_TE.shape[1], grid.bins, dtype=torch.int32, device=scores_TE.device)
    count_required_bias(scores_TE, cutoff_T, valid_T, edges_2, counts_EB, grid, anchor_E)
    bin_LE, part_LE, tokens_L = find_quantile(counts_EB[None], k)
    return *grid.required(bin_LE, part_LE, edges_2[None], anchor_E[None]), tokens_L


@torch.no_grad()
def solve_bias(
    scores_TE: Tensor,
    bias_E: Tensor,
    k: int,
    method: str = "exact",
    bins: int | None = None,
    mask_T: Tensor | None = None,
    *,
    score_domain: str = "sigmoid",
    rounds: int = 1,
) -> Tensor:
    """One update of Quantile Balancing from a whole batch of scores (K3 report Eq. 13-14), or several of them.

    Args:
        scores_TE: ``[T, E]`` raw scores in [0, 1] (any range with ``method="exact"`` or in the logit domain), floating
            point. Leave rows with an infinite logit out by ``mask_T``: a score of 0 does not show it.
        bias_E: ``[E]`` fp32 or fp64, the bias the batch was routed with.
        k: experts per token, 1 to E; with k = E every expert gets every token and the bias is 0.
        method: ``"exact"`` order statistics; ``"histogram"``, the report's estimator with an error of at most a bin's
            width; ``"signed_log"``, whose bins lie around the old bias, with an error of at most the width of the bin
            that holds the change: a quarter of it with 256 bins (README.md).
        bins: number of bins; default 1000, 256 for ``signed_log``.
        mask_T: ``[T]`` bool, true for tokens that count; default all. Rows with a non-finite score never count.
        score_domain: ``"logit"`` where ``scores_TE`` are logits; histograms then find a range that holds them.
        rounds: updates within the batch, each from the last one's bias; see `refined_cutoffs`.

    Returns:
        ``[E]`` of the dtype of ``bias_E``, mean 0, always finite. Without a token that counts: a copy of ``bias_E``.

    Raises:
        ValueError: bad shapes, dtypes, ``k``, ``method``, ``bins``, ``rounds``, a non-finite bias, or scores outside
            [0, 1] for a histogram of scores.
    """
    if bins is None:
        bins = 256 if method == "signed_log" else 1000
    _check_solve(scores_TE, bias_E, k, method, bins, mask_T)
    if score_domain not in SCORE_DOMAINS:
        raise ValueError(f"score_domain: found {score_domain!r}, need one of {list(SCORE_DOMAINS)}")
    check_rounds("rounds", rounds)
    if k == scores_TE.shape[1]:
        return torch.zeros_like(bias_E)
    scores_TE = scores_TE.detach()
    if scores_TE.dtype not in (torch.float32, torch.float64):
        scores_TE = scores_TE.float()
    valid_T = scores_TE.isfinite().all(1)
    if mask_T is not None:
        valid_T = valid_T & mask_T
    scores_TE = scores_TE[valid_T]
    if scores_TE.shape[0] == 0:
        return bias_E.clone()
    if method == "exact":
        solved_E = bias_E
        for _ in range(rounds):
            required_TE = cutoffs(scores_TE, solved_E, k)[:, None] - scores_TE
            solved_E = centred(exact_quantile(required_TE, k)).to(bias_E.dtype)
        return solved_E
    low, high = float(scores_TE.min()), float(scores_TE.max())
    if score_domain == "sigmoid" and (low < 0.0 or high > 1.0):
        raise ValueError(
            f"scores_TE: found values in [{low:.6g}, {high:.6g}], need [0, 1] for method {method!r}: its range is "
            "exact only for sigmoid or softmax scores"
        )
    grid = Grid("report" if method == "histogram" else method, score_domain, bins)
    reach = torch.tensor([grid.first_reach], device=bias_E.device)
    while True:
        cutoff_T = refined_cutoffs(scores_TE, bias_E, k, rounds, grid, reach[0])
        required_LE, outside_LE, _ = _solve_batch(scores_TE, cutoff_T, bias_E, k, grid, reach[0])
        wider = grid.next_reach(reach, bias_E.float()[None], required_LE, outside_LE)
        if not bool(outside_LE.any()) or bool(wider == reach):
            return centred(required_LE[0]).to(bias_E.dtype)
        reach = wider  # the whole batch is at hand: count again


def _check_solve(scores_TE: Tensor, bias_E: Tensor, k: int, method: str, bins: int, mask_T: Tensor | None) -> None:
    if scores_TE.ndim != 2 or not scores_TE.is_floating_point():
        raise ValueError(
            f"scores_TE: found shape {tuple(scores_TE.shape)} of {scores_TE.dtype}, need a floating-point [T, E]"
        )
    tokens, experts = scores_TE.shape
    check_bias(bias_E, experts)
    check_k(k, experts)
    if method not in ("exact", "histogram", "signed_log"):
        raise ValueError(f"method: found {method!r}, need 'exact', 'histogram' or 'signed_log'")
    if bins < 1:
        raise ValueError(f"bins: found {bins}, need at least 1")
    if mask_T is not None:
        check_mask(mask_T, tokens)
    if not bool(bias_E.isfinite().all()):
        raise ValueError("bias_E: found a non-finite value, need finite biases")


def check_k(k: int, experts: int) -> None:
    """Raise ValueError unless 1 <= k <= experts."""
    if not 1 <= k <= experts:
        raise ValueError(f"k: found {k}, need 1 <= k <= {experts}, the number of experts")


def check_rounds(name: str, rounds: int) -> None:
    """Raise ValueError unless ``rounds`` is a whole number of at least 1."""
    if not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"{name}: found {rounds!r}, need a whole number of at least 1")


def check_bias(bias_E: Tensor, experts: int) -> None:
    """Raise ValueError unless the bias is ``[experts]`` in fp32 or fp64 (a bf16 bias loses small corrections)."""
    if bias_E.shape != (experts,):
        raise ValueError(f"bias_E: found shape {tuple(bias_E.shape)}, need [{experts}], one value an expert")
    if bias_E.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"bias_E: found dtype {bias_E.dtype}, need float32 (or float64); keep it out of model.to(dtype)"
        )


def check_mask(mask_T: Tensor, tokens: int) -> None:
    """Raise ValueError unless the mask is a bool vector of length ``tokens``."""
    if mask_T.shape != (tokens,) or mask_T.dtype != torch.bool:
        raise ValueError(
            f"mask_T: found shape {tuple(mask_T.shape)} of {mask_T.dtype}, need [{tokens}] bool, true for real tokens"
        )


@torch.no_grad()
def balanced_assignment(scores_TE: Tensor, k: int, iterations: int = 100) -> tuple[Tensor, Tensor]:
    """Oracle: the alternating solver of the assignment problem (K3 report, appendix C, algorithm 1), in fp64.

    Maximise the sum of chosen scores with k experts a token and m k / E tokens an expert. The dual is minimised over
    the tokens' multipliers (the cutoffs) and the experts' (minus the bias) in turn. Each minimum is an interval
    between two neighbouring order statistics; its middle is taken, as the ends that a training step takes stall above
    the optimum (README.md). Loads that are all equal prove the optimum; otherwise the most even iterate is returned.

    Args:
        scores_TE: ``[T, E]`` finite scores of any range, T >= 1.
        k: experts per token, 1 to E.
        iterations: at most so many updates of the bias.

    Returns:
        ids ``[T, k]`` int64 and bias ``[E]`` fp64 with mean 0; ids are the top-k of score + bias.

    Raises:
        ValueError: bad shapes or ``k``, no token, or a non-finite score.
    """
    bias_E = torch.zeros(scores_TE.shape[-1], dtype=torch.float64, device=scores_TE.device)
    _check_solve(scores_TE, bias_E, k, "exact", 1, None)
    if scores_TE.shape[0] == 0 or not bool(scores_TE.isfinite().all()):
        raise ValueError("scores_TE: found no token or a non-finite score, need at least one token and finite scores")
    scores_TE = scores_TE.double()
    tokens, experts = scores_TE.shape
    whole, rest = divmod(tokens * k, experts)
    best_TK = top_ids(scores_TE, k)
    if k == experts:
        return best_TK, bias_E
    best_E, best = bias_E, _spread(best_TK, experts)
    for _ in range(iterations):
        if best == rest * (experts - rest) / experts:  # no integer loads are more even
            break
        ends_TN = torch.topk(scores_TE + bias_E, k + 1, dim=1).values[:, k - 1 :]
        required_TE = (ends_TN.mean(1, keepdim=True) - scores_TE).sort(dim=0).values
        bias_E = centred(required_TE[whole] if rest else required_TE[whole - 1 : whole + 1].mean(0))
        ids_TK = top_ids(scores_TE + bias_E, k)
        if (spread := _spread(ids_TK, experts)) < best:
            best_TK, best_E, best = ids_TK, bias_E, spread
    return best_TK, best_E


def _spread(ids_TK: Tensor, experts: int) -> float:
    """Sum over experts of (load - mean load)^2."""
    loads_E = torch.bincount(ids_TK.reshape(-1), minlength=experts)
    return float(loads_E.square().sum()) - ids_TK.numel() ** 2 / experts
