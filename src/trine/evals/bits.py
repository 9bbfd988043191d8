"""Bits per byte of held-out documents under a model.

The divisor is the bytes of the text, so models with different vocabularies, compressors and n-grams compare. Every
token of a document is scored exactly once. A document of up to ``context`` tokens is one sequence, which begins with
the end-of-document token. A longer one is scored in windows of ``context`` tokens: the first scores all of its
targets, each later one reaches back ``overlap`` tokens for context and scores only what the windows before it did
not. With overlap 0 the first token of a later window is predicted from one token alone, which costs a little; the
number of windows is reported. The end-of-document token after a document is scored apart (``end_bits``) and is not
part of bits per byte: n-grams are not charged for it either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trine.data import DataError, Document, Shards, Tokenizer
from trine.data.packing import best_fit
from trine.ops.cross_entropy import token_losses

CONTEXT = 2048
TOKENS_PER_CALL = 4096
_LN2 = float(np.log(2.0))


class LanguageModel(Protocol):
    """What is needed of a model: packed hidden states, a head, and a switch to evaluation."""

    head: Any
    training: bool

    def __call__(self, tokens_T: Tensor, cu_seqlens_N1: Tensor) -> Tensor:
        """Hidden states [T, D] of packed sequences."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Set training or evaluation."""
        ...


@dataclass(frozen=True)
class DocumentBits:
    """The score of one document.

    Attributes:
        name: its name.
        bytes: UTF-8 bytes of its text.
        tokens: tokens of its text.
        windows: sequences it was scored in.
        bits: -log2 of the probability of its tokens.
        end_bits: -log2 of the probability of its end.
        near_copy: see ``Document``.
        source: name of its source.
    """

    name: str
    bytes: int
    tokens: int
    windows: int
    bits: float
    end_bits: float
    near_copy: bool
    source: str = ""

    @property
    def bits_per_byte(self) -> float:
        """Bits over bytes."""
        return self.bits / self.bytes


@dataclass(frozen=True)
class BitsReport:
    """Scores of a set of documents.

    Attributes:
        documents: one score each.
        context: longest sequence, tokens.
        overlap: tokens of context that a later window of a long document shares with the one before.
        seconds: time it took.
    """

    documents: tuple[DocumentBits, ...]
    context: int
    overlap: int
    seconds: float

    def _total(self, chosen: Sequence[DocumentBits]) -> float | None:
        return sum(d.bits for d in chosen) / sum(d.bytes for d in chosen) if chosen else None

    @property
    def bits_per_byte(self) -> float | None:
        """Without near-copies: the number to quote. None when there are no other documents."""
        return self._total([d for d in self.documents if not d.near_copy])

    @property
    def bits_per_byte_all(self) -> float:
        """All documents, near-copies of training text among them."""
        total = self._total(self.documents)
        assert total is not None
        return total

    def by_source(self) -> dict[str, dict[str, Any]]:
        """For each source its bits per byte without near-copies (of all, where there are no others) and its size."""
        found = {}
        for source in sorted({d.source for d in self.documents}):
            mine = [d for d in self.documents if d.source == source]
            chosen = [d for d in mine if not d.near_copy] or mine
            found[source] = {
                "bits_per_byte": self._total(chosen),
                "documents": len(chosen),
                "bytes": sum(d.bytes for d in chosen),
            }
        return found

    def to_json(self) -> dict[str, Any]:
        """For ``eval.json``."""
        return {
            "bits_per_byte": self.bits_per_byte,
            "bits_per_byte_all": self.bits_per_byte_all,
            "held_out": {
                "documents": sum(not d.near_copy for d in self.documents),
                "documents_all": len(self.documents),
                "bytes": sum(d.bytes for d in self.documents if not d.near_copy),
                "bytes_all": sum(d.bytes for d in self.documents),
                "tokens_all": sum(d.tokens for d in self.documents),
                "windowed_documents": sum(d.windows > 1 for d in self.documents),
                "end_bits_per_document": sum(d.end_bits for d in self.documents) / len(self.documents),
            },
            "by_source": self.by_source(),
            "context": self.context,
            "overlap": self.overlap,
            "seconds": self.seconds,
            "by_document": [
                {
                    "name": d.name,
                    "bytes": d.bytes,
                    "tokens": d.tokens,
                    "windows": d.windows,
                    "bits_per_byte": d.bits_per_byte,
                    "near_copy": d.near_copy,
                }
                for d in self.documents
            ],
        }


@dataclass(frozen=True)
class _Window:
    """Targets ``begin`` to ``end - 1`` of a document, read from input ``read_from`` on; ``scored_from`` are new."""

    document: int
    read_from: int
    scored_from: int
    end: int

    @property
    def length(self) -> int:
        """Tokens that are read, those of the context too."""
        return self.end - self.read_from


def _windows(document: int, targets: int, context: int, overlap: int) -> list[_Window]:
    """Windows that together score each of a document's targets once."""
    windows = [_Window(document, 0, 0, min(targets, context))]
    while windows[-1].end < targets:
        done = windows[-1].end
        start = done - overlap
        windows.append(_Window(document, start, done, min(targets, start + context)))
    return windows


def bits_per_byte(
    model: LanguageModel,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    *,
    context: int = CONTEXT,
    overlap: int = 0,
    tokens_per_call: int = TOKENS_PER_CALL,
    device: torch.device | str | None = None,
    tick: Callable[[int], None] | None = None,
) -> BitsReport:
    """Score documents under a model (in evaluation mode, without gradients; the mode is put back).

    Args:
        model: see ``LanguageModel``; ``trine.Model`` is one.
        documents: what to score.
        tokenizer: the model's vocabulary.
        context: longest sequence in tokens, at least 2.
        overlap: see the module; 0 to ``context - 1``. A long document costs context / (context - overlap) times more.
        tokens_per_call: sequences are packed into calls of about this many tokens, at least ``context``.
        device: where the model lies, default where its head lies.
        tick: called with the number of tokens done after each call.

    Returns:
        Totals and scores a document.

    Raises:
        DataError: no documents, an empty document, or lengths out of range.
    """
    if not documents:
        raise DataError("bits per byte: no documents to score")
    encoded = tokenizer.encode_batch([document.text for document in documents])
    for document, ids in zip(documents, encoded, strict=True):
        if ids.size == 0:
            raise DataError(f"bits per byte: document {document.name} is empty")
    streams = [np.concatenate([[tokenizer.eod_id], ids, [tokenizer.eod_id]]) for ids in encoded]
    return _score(
        model,
        streams,
        [(d.name, len(d.text.encode()), d.near_copy, d.source) for d in documents],
        *(context, overlap, tokens_per_call, device, tick),
    )


def held_out_bits(
    model: LanguageModel,
    shards: Shards,
    *,
    context: int = CONTEXT,
    overlap: int = 0,
    tokens_per_call: int = TOKENS_PER_CALL,
    device: torch.device | str | None = None,
    tick: Callable[[int], None] | None = None,
    source: str | None = None,
) -> BitsReport:
    """``bits_per_byte`` of the held-out documents of shards (of one ``source``), whose tokens are there already.

    The other arguments, and errors, are those of `bits_per_byte`.
    """
    chosen = shards.select("held_out", source=source).tolist()
    if not chosen:
        of = "" if source is None else f" of source {source}"
        raise DataError(f"bits per byte: nothing{of} is held out in {shards.folder}")
    end = [shards.tokenizer.eod_id]
    streams = [np.concatenate([shards.stream(i).astype(np.int64), end]) for i in chosen]
    entries = [shards.documents[i] for i in chosen]
    about = [(entry.name, entry.bytes, entry.near_copy, entry.source) for entry in entries]
    return _score(model, streams, about, context, overlap, tokens_per_call, device, tick)


def _score(
    model: LanguageModel,
    streams: Sequence[NDArray[np.int64]],
    about: Sequence[tuple[str, int, bool, str]],
    context: int,
    overlap: int,
    tokens_per_call: int,
    device: torch.device | str | None,
    tick: Callable[[int], None] | None,
) -> BitsReport:
    """Score streams (end token, tokens, end token) of documents; ``about``: name, bytes, near_copy, source of each."""
    if context < 2:
        raise DataError(f"context: found {context}, need at least 2")
    if not 0 <= overlap < context:
        raise DataError(f"overlap: found {overlap}, need 0 to context - 1 = {context - 1}")
    if tokens_per_call < context:
        raise DataError(f"tokens_per_call: found {tokens_per_call}, need at least context = {context}")
    began = time.perf_counter()
    windows = [w for i, stream in enumerate(streams) for w in _windows(i, stream.size - 1, context, overlap)]
    calls = best_fit(np.array([w.length for w in windows], dtype=np.int64), tokens_per_call)
    bits = np.zeros(len(streams))
    end_bits = np.zeros(len(streams))
    place = torch.device(device) if device is not None else model.head.weight.device
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            for call in calls:
                chosen = [windows[i] for i in call]
                inputs = np.concatenate([streams[w.document][w.read_from : w.end] for w in chosen])
                targets = np.concatenate([streams[w.document][w.read_from + 1 : w.end + 1] for w in chosen])
                bounds = np.cumsum([0] + [w.length for w in chosen])
                hidden_TD = model(
                    torch.from_numpy(inputs).to(place), torch.from_numpy(bounds.astype(np.int32)).to(place)
                )
                nll_T = token_losses(hidden_TD, model.head.weight, torch.from_numpy(targets).to(place))
                found = nll_T.to(device="cpu", dtype=torch.float64).numpy() / _LN2
                for w, at in zip(chosen, bounds[:-1].tolist(), strict=True):
                    mine = found[at + w.scored_from - w.read_from : at + w.length]
                    if w.end == streams[w.document].size - 1:
                        end_bits[w.document] = mine[-1]
                        mine = mine[:-1]
                    bits[w.document] += mine.sum()
                if tick is not None:
                    tick(int(inputs.size))
    finally:
        model.train(was_training)
    count = np.bincount([w.document for w in windows], minlength=len(streams))
    scores = tuple(
        DocumentBits(name, size, streams[i].size - 2, int(count[i]), float(bits[i]), float(end_bits[i]), copy, source)
        for i, (name, size, copy, source) in enumerate(about)
    )
    return BitsReport(scores, context, overlap, time.perf_counter() - began)
