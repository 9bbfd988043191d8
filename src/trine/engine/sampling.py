"""From scores to a token. The noise is a function of (seed, sample, position) and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens.

    Raises:
        ValueError: a value out of range, named.
    """

    max_tokens: int = 256  # new tokens at most
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0  # keep the smallest set of likeliest tokens whose probability reaches this
    stop: tuple[str, ...] = ()  # end before the first of these texts; it is not part of the result
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: found {self.max_tokens}, need at least 1")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature: found {self.temperature}, need 0 (greedy) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: found {self.top_p}, need more than 0 and at most 1")
        if any(not s for s in self.stop):
            raise ValueError("stop: found an empty text, need non-empty stop sequences")


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) for one token of one sample: the Philox counter at `position` under the key (seed, sample)."""
    key = np.array([seed % 2**64, sample % 2**64], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def choose(logits_V: Tensor, sampling: Sampling, sample: int, position: int) -> tuple[int, float]:
    """Choose one token.

    Args:
        logits_V: scores, any float dtype.
        sampling: temperature, top-p and seed.
        sample: number of the sample, so that samples of one prompt differ.
        position: number of the new token within the sample.

    Returns:
        The token, and its natural-log probability under the distribution it was drawn from before top-p is applied
        (the untempered one when greedy).

    Raises:
        ValueError: scores that are not finite.
    """
    scores_V = logits_V.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(scores_V).all()):
        raise ValueError(f"logits_V: found non-finite scores at sample {sample}, position {position}")
    if sampling.temperature > 0.0:
        # From the largest down: a temperature near 0 sends the others to -inf, never the largest to an infinity.
        scores_V = (scores_V - scores_V.max()) / sampling.temperature
    logprobs_V = scores_V.log_softmax(-1)
    if sampling.temperature == 0.0:
        token = int(logprobs_V.argmax())
        return token, float(logprobs_V[token])
    # A stable sort: equal probabilities keep the order of their ids, so ties fall the same way everywhere.
    p_V, ids_V = logprobs_V.exp().sort(descending=True, stable=True)
    cumulative_V = p_V.cumsum(-1)
    # Sums round, so the last may stay below top_p; and what has no probability left is never drawn.
    possible = int((p_V > 0.0).sum())
    kept = min(int((cumulative_V < sampling.top_p).sum()) + 1, possible) if sampling.top_p < 1.0 else possible
    mass = float(cumulative_V[kept - 1])
    u = torch.tensor(uniform(sampling.seed, sample, position) * mass, dtype=torch.float64)
    token = int(ids_V[min(int(torch.searchsorted(cumulative_V[:kept], u, right=True)), kept - 1)])
    return token, float(logprobs_V[token])
