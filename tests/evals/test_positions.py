"""Loss by position against sums taken by hand, and the short measurement of the guard."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trine.data import DataError, Shards
from trine.evals.positions import loss_by_position, position_edges, short_loss


class Sloped(nn.Module):
    """The loss of a token is known from its position: logit of every true target is not known, so scale the head."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 4, dtype=torch.float64)
        self.head = nn.Linear(4, vocabulary, bias=False, dtype=torch.float64)

    def forward(self, tokens_T: Tensor, cu_seqlens_N1: Tensor) -> Tensor:
        return self.embed(tokens_T)


def by_hand(model: Sloped, stream: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(stream)
    logp = model.head(model.embed(ids[:-1])).log_softmax(-1)
    return -logp[torch.arange(len(ids) - 1), ids[1:]].detach().numpy()


def streams(shards: Shards) -> list[np.ndarray]:
    chosen = [i for i in shards.select("held_out").tolist() if not shards.documents[i].near_copy]
    return [np.append(shards.stream(i).astype(np.int64), shards.tokenizer.eod_id) for i in chosen]


def test_edges() -> None:
    assert position_edges(100) == [0, 16, 32, 64, 100]
    assert position_edges(16) == [0, 16]
    assert position_edges(16_384)[-3:] == [4_096, 8_192, 16_384]


@pytest.mark.parametrize(("length", "per_call"), [(200, 16_384), (5_000, 100)])
def test_bins_hold_what_they_say(shards: Shards, length: int, per_call: int) -> None:
    model = Sloped(shards.tokenizer.vocab_size)
    found = loss_by_position(model, shards, length, tokens_per_call=per_call)
    losses = [by_hand(model, stream[: length + 1]) for stream in streams(shards)]
    edges = found["edges"]
    assert edges == position_edges(length)
    for b, (low, high) in enumerate(pairwise(edges)):
        mine = [one[low:high] for one in losses if one.size > low]
        assert found["documents"][b] == len(mine)
        assert found["tokens"][b] == sum(one.size for one in mine)
        expected = np.concatenate(mine).mean() if mine else None
        assert found["loss"][b] == (None if expected is None else pytest.approx(expected, rel=1e-6))
        if b:
            before = [one[edges[b - 1] : low] for one in losses if one.size > low]
            expected = np.concatenate(before).mean() if before else None
            assert found["matched"][b] == (None if expected is None else pytest.approx(expected, rel=1e-6))
    assert found["matched"][0] is None
    assert sum(found["tokens"]) == sum(one.size for one in losses)


def test_a_budget_takes_the_longest_documents(shards: Shards) -> None:
    model = Sloped(shards.tokenizer.vocab_size)
    found = loss_by_position(model, shards, 300, most_tokens=500)
    sizes = sorted((min(300, stream.size - 1) for stream in streams(shards)), reverse=True)
    count = next(i for i in range(1, 99) if sum(sizes[:i]) >= 500)
    assert found["documents"][0] == count and sum(found["tokens"]) == sum(sizes[:count])
    with pytest.raises(DataError, match="length: found 1"):
        loss_by_position(model, shards, 1)


def test_short_loss_reads_beginnings_only(shards: Shards) -> None:
    model = Sloped(shards.tokenizer.vocab_size)
    sizes = shards.tokenizer.byte_lengths
    cut = [stream[:41] for stream in streams(shards)]
    nats = sum(by_hand(model, stream).sum() for stream in cut)
    expected = nats / math.log(2) / sum(int(sizes[stream[1:]].sum()) for stream in cut)
    model.train()
    assert short_loss(model, shards, 40) == pytest.approx(expected, rel=1e-6)
    assert model.training
    assert short_loss(model, shards, 40, most_tokens=1) == pytest.approx(
        by_hand(model, cut[0]).sum() / math.log(2) / int(sizes[cut[0][1:]].sum()), rel=1e-6
    )
    with pytest.raises(DataError, match="length: found 1"):
        short_loss(model, shards, 1)
