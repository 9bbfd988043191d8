"""Loss by position: does a token profit from a longer past?

Held-out documents are read from their beginning as far as ``length`` tokens; the losses of their tokens are averaged in
bins of doubling width. Documents differ in length, so a far bin speaks of the long ones only; to tell the effect of the
position from that of the document, ``matched`` compares each bin with the first bins of the same documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trine.data import DataError, Shards
from trine.data.packing import best_fit
from trine.evals.bits import LanguageModel
from trine.ops.cross_entropy import token_losses

FIRST_BIN = 16
MOST_TOKENS = 1 << 18


def position_edges(length: int, first: int = FIRST_BIN) -> list[int]:
    """Bins of doubling width: 0, 16, 32, 64, … up to ``length``, which is the last edge."""
    edges = [0]
    at = first
    while at < length:
        edges.append(at)
        at *= 2
    return [*edges, length]


def loss_by_position(
    model: LanguageModel,
    shards: Shards,
    length: int,
    *,
    most_tokens: int = MOST_TOKENS,
    tokens_per_call: int = 16_384,
    tick: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Mean loss of held-out tokens by their position in the document, in nats.

    Args:
        model: see `trine.evals.bits.LanguageModel`.
        shards: the data.
        length: furthest position, tokens.
        most_tokens: read the longest documents first until about so many tokens are read.
        tokens_per_call: see `trine.evals.answers.score_answers`.
        tick: called with tokens done.

    Returns:
        ``length``, ``edges`` (of B bins, B + 1 numbers), ``loss`` (nats, None where no document reaches), ``tokens``,
        ``documents`` (a bin each), ``matched`` (loss of the same documents in the bin before, None for the first).

    Raises:
        DataError: nothing is held out, or a length below 2.
    """
    if length < 2:
        raise DataError(f"length: found {length}, need at least 2")
    chosen = _longest(shards, length, most_tokens)
    edges = position_edges(length)
    bins = len(edges) - 1
    eod = [shards.tokenizer.eod_id]
    streams = [np.concatenate([shards.stream(i).astype(np.int64), eod])[: length + 1] for i in chosen]
    sums = np.zeros((len(streams), bins))
    counts = np.zeros((len(streams), bins))
    for i, nll in _losses(model, streams, max(tokens_per_call, length), tick):
        where = np.searchsorted(edges, np.arange(nll.size), side="right") - 1
        sums[i] = np.bincount(where, nll, minlength=bins)
        counts[i] = np.bincount(where, minlength=bins)
    matched: list[float | None] = [None]
    for b in range(1, bins):
        reach = counts[:, b] > 0
        matched.append(_mean(sums[reach, b - 1].sum(), counts[reach, b - 1].sum()))
    return {
        "length": length,
        "edges": edges,
        "loss": [_mean(sums[:, b].sum(), counts[:, b].sum()) for b in range(bins)],
        "tokens": counts.sum(0).astype(int).tolist(),
        "documents": (counts > 0).sum(0).tolist(),
        "matched": matched,
    }


def short_loss(
    model: LanguageModel, shards: Shards, length: int, *, most_tokens: int = 65_536, tokens_per_call: int = 16_384
) -> float:
    """Bits per byte of the first ``length`` tokens of held-out documents: the number that must not get worse later.

    Always the same documents, in the order of the shards, up to ``most_tokens``.

    Raises:
        DataError: nothing is held out, or a length below 2.
    """
    if length < 2:
        raise DataError(f"length: found {length}, need at least 2")
    eod = [shards.tokenizer.eod_id]
    streams: list[np.ndarray] = []
    read = 0
    for i in _held_out(shards):
        if read >= most_tokens:
            break
        streams.append(np.concatenate([shards.stream(i).astype(np.int64), eod])[: length + 1])
        read += streams[-1].size - 1
    sizes = shards.tokenizer.byte_lengths.astype(np.int64)
    nats = sum(float(nll.sum()) for _, nll in _losses(model, streams, max(tokens_per_call, length), None))
    size = sum(int(sizes[stream[1:]].sum()) for stream in streams)
    return nats / math.log(2) / size


def _held_out(shards: Shards) -> list[int]:
    chosen = shards.select("held_out").tolist()
    honest = [i for i in chosen if not shards.documents[i].near_copy]
    if not chosen:
        raise DataError(f"loss by position: nothing is held out in {shards.folder}")
    return honest or chosen


def _longest(shards: Shards, length: int, most_tokens: int) -> list[int]:
    """Held-out documents, longest first, until enough tokens would be read; at least one."""
    ordered = sorted(_held_out(shards), key=lambda i: (-shards.documents[i].tokens, i))
    sizes = np.cumsum([min(length, shards.documents[i].tokens + 1) for i in ordered])
    return ordered[: max(1, int(np.searchsorted(sizes, most_tokens)) + 1)]


def _losses(
    model: LanguageModel, streams: Sequence[np.ndarray], tokens_per_call: int, tick: Callable[[int], None] | None
) -> list[tuple[int, np.ndarray]]:
    """(number of the stream, nats of each target) in packed calls, evaluation mode, which is put back."""
    found = []
    device = model.head.weight.device
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            for call in best_fit(np.array([stream.size - 1 for stream in streams]), tokens_per_call):
                chosen = [streams[i] for i in call]
                tokens = torch.from_numpy(np.concatenate([stream[:-1] for stream in chosen])).to(device)
                targets = torch.from_numpy(np.concatenate([stream[1:] for stream in chosen])).to(device)
                bounds = np.concatenate([[0], np.cumsum([stream.size - 1 for stream in chosen])])
                hidden_TD = model(tokens, torch.from_numpy(bounds.astype(np.int32)).to(device))
                nll = token_losses(hidden_TD, model.head.weight, targets).double().cpu().numpy()
                found += [(i, nll[a:b]) for i, a, b in zip(call, bounds, bounds[1:], strict=False)]
                if tick is not None:
                    tick(int(tokens.numel()))
    finally:
        model.train(was_training)
    return found


def _mean(total: float, count: float) -> float | None:
    return float(total / count) if count else None
