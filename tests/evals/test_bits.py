"""Bits per byte against sums taken by hand, with a model whose probabilities are known."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trine.config import preset
from trine.data import DataError, Document, Shards, Tokenizer, write_shards
from trine.data.sources import make_corpus
from trine.evals.bits import BitsReport, bits_per_byte, held_out_bits
from trine.model import Model


class ContextModel(nn.Module):
    """Hidden state = embedding of the token plus 0.1 of the mean of the sequence so far: context matters, a little."""

    def __init__(self, vocabulary: int, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, dtype=torch.float64)
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=torch.float64)
        self.calls: list[list[int]] = []

    def forward(self, tokens_T: Tensor, cu_seqlens_N1: Tensor) -> Tensor:
        assert not self.training and not torch.is_grad_enabled()
        bounds = cu_seqlens_N1.tolist()
        assert bounds[0] == 0 and bounds[-1] == tokens_T.numel()
        self.calls.append(np.diff(bounds).tolist())
        parts = []
        for a, b in pairwise(bounds):
            x = self.embed(tokens_T[a:b])
            parts.append(x + 0.1 * x.cumsum(0) / torch.arange(1, b - a + 1)[:, None])
        return torch.cat(parts)


def _documents(shards: Shards) -> list[Document]:
    return [
        Document(e.name, shards.text(i), e.family, e.split, e.near_copy, e.licence, e.sha256, e.source)
        for i, e in enumerate(shards.documents)
        if e.split == "held_out"
    ]


def _by_hand(model: ContextModel, tokenizer: Tokenizer, text: str, context: int, overlap: int) -> tuple[float, float]:
    """Bits of the text and of its end, one target at a time."""
    stream = [tokenizer.eod_id, *tokenizer.encode(text), tokenizer.eod_id]
    total, start, done = [], 0, 0
    while done < len(stream) - 1:
        end = min(len(stream) - 1, start + context)
        x = model.embed(torch.tensor(stream[start:end]))
        hidden = x + 0.1 * x.cumsum(0) / torch.arange(1, end - start + 1)[:, None]
        logp = model.head(hidden).log_softmax(-1)
        total += [-logp[t - start, stream[t + 1]].item() / math.log(2) for t in range(done, end)]
        done, start = end, end - overlap
    return sum(total[:-1]), total[-1]


@pytest.mark.parametrize(("context", "overlap", "per_call"), [(1000, 0, 1000), (50, 0, 128), (50, 20, 50), (2, 1, 64)])
def test_every_token_is_scored_once_whatever_the_windows(
    shards: Shards, context: int, overlap: int, per_call: int
) -> None:
    model = ContextModel(shards.tokenizer.vocab_size)
    documents = _documents(shards)
    model.train()
    report = bits_per_byte(
        model, documents, shards.tokenizer, context=context, overlap=overlap, tokens_per_call=per_call
    )
    assert model.training, "the mode is put back"
    for document, score in zip(documents, report.documents, strict=True):
        bits, end = _by_hand(model, shards.tokenizer, document.text, context, overlap)
        assert score.bits == pytest.approx(bits, rel=1e-9)
        assert score.end_bits == pytest.approx(end, rel=1e-9)
        assert score.bytes == len(document.text.encode())
        assert score.tokens == len(shards.tokenizer.encode(document.text))
        targets = score.tokens + 1
        assert score.windows == (1 if targets <= context else 1 + -(-(targets - context) // (context - overlap)))
    assert max(sum(call) for call in model.calls) <= per_call
    assert max(max(call) for call in model.calls) <= context


def test_totals_with_and_without_near_copies(shards: Shards) -> None:
    model = ContextModel(shards.tokenizer.vocab_size)
    report = held_out_bits(model, shards)
    honest = [d for d in report.documents if not d.near_copy]
    assert 0 < len(honest) < len(report.documents)
    assert report.bits_per_byte == pytest.approx(sum(d.bits for d in honest) / sum(d.bytes for d in honest))
    assert report.bits_per_byte_all == pytest.approx(
        sum(d.bits for d in report.documents) / sum(d.bytes for d in report.documents)
    )
    values = report.to_json()
    assert values["bits_per_byte"] == report.bits_per_byte
    assert values["held_out"]["documents"] == len(honest)
    assert values["held_out"]["bytes_all"] == sum(shards.documents[i].bytes for i in shards.select("held_out"))
    one = values["by_document"][0]
    assert one["bits_per_byte"] == pytest.approx(report.documents[0].bits / one["bytes"])
    assert values["by_source"] == {
        "made": {
            "bits_per_byte": report.bits_per_byte,
            "documents": len(honest),
            "bytes": sum(d.bytes for d in honest),
        }
    }
    again = bits_per_byte(model, _documents(shards), shards.tokenizer)
    assert again.documents == report.documents


def test_a_uniform_model_needs_log2_of_the_vocabulary_a_token(shards: Shards) -> None:
    model = ContextModel(shards.tokenizer.vocab_size)
    nn.init.zeros_(model.head.weight)
    report = held_out_bits(model, shards)
    tokens = sum(d.tokens for d in report.documents)
    size = sum(d.bytes for d in report.documents)
    assert report.bits_per_byte_all == pytest.approx(tokens * math.log2(320) / size)


def test_only_near_copies_leave_no_number_to_quote(shards: Shards) -> None:
    model = ContextModel(shards.tokenizer.vocab_size)
    documents = [d for d in _documents(shards) if d.near_copy]
    report = bits_per_byte(model, documents, shards.tokenizer)
    assert report.bits_per_byte is None and report.bits_per_byte_all > 0


def test_the_mode_is_put_back_after_an_error(shards: Shards) -> None:
    class Broken(ContextModel):
        def forward(self, tokens_T: Tensor, cu_seqlens_N1: Tensor) -> Tensor:
            raise RuntimeError("broken")

    model = Broken(shards.tokenizer.vocab_size)
    with pytest.raises(RuntimeError, match="broken"):
        held_out_bits(model, shards)
    assert model.training


def test_the_real_model_scores_packed_as_alone(shards: Shards) -> None:
    config = preset("smoke")
    assert config.vocab_size == 256
    tokenizer = shards.tokenizer
    model = Model(dataclasses.replace(config, vocab_size=tokenizer.vocab_size))
    nn.init.normal_(model.head.weight, std=0.3)
    bias, loads = model.router_stats.bias_LE.clone(), model.router_stats.loads_LE.clone()
    documents = _documents(shards)[:4]
    together = bits_per_byte(model, documents, tokenizer, context=512)
    for document, score in zip(documents, together.documents, strict=True):
        (alone,) = bits_per_byte(model, [document], tokenizer, context=512).documents
        assert score.bits == pytest.approx(alone.bits, rel=1e-5)
    assert torch.equal(model.router_stats.bias_LE, bias) and torch.equal(model.router_stats.loads_LE, loads)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 1}, "context: found 1, need at least 2"),
        ({"context": 8, "overlap": 8}, "overlap: found 8, need 0 to context - 1 = 7"),
        ({"context": 8, "overlap": -1}, "overlap: found -1"),
        ({"context": 64, "tokens_per_call": 32}, "tokens_per_call: found 32, need at least context = 64"),
    ],
)
def test_lengths_out_of_range_are_named(shards: Shards, changes: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        held_out_bits(ContextModel(320), shards, **changes)


def test_nothing_to_score_is_an_error(shards: Shards) -> None:
    model = ContextModel(320)
    with pytest.raises(DataError, match="no documents to score"):
        bits_per_byte(model, [], shards.tokenizer)
    empty = Document("hollow", "", "hollow", "held_out", False, "MIT", "")
    with pytest.raises(DataError, match="document hollow is empty"):
        bits_per_byte(model, [empty], shards.tokenizer)
    assert isinstance(BitsReport((), 8, 0, 0.0).bits_per_byte, type(None))


def test_one_source_alone_is_scored(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["text"], 258)
    corpus = make_corpus(
        "one", [(f"n{i}", f"{i * i} lines of one".encode()) for i in range(12)], licence="MIT", one_in=2
    )
    other = make_corpus("other", [(f"o{i}", b"other text " * (i + 3)) for i in range(12)], licence="MIT", one_in=2)
    shards = write_shards(tmp_path, [corpus, other], tokenizer)
    model = ContextModel(tokenizer.vocab_size)
    report = held_out_bits(model, shards, source="other")
    held = [d.name for d in other.documents if d.split == "held_out"]
    assert held and [d.name for d in report.documents] == held
    assert report.bits_per_byte_all != held_out_bits(model, shards).bits_per_byte_all
    with pytest.raises(DataError, match="nothing of source none is held out in"):
        held_out_bits(model, shards, source="none")
