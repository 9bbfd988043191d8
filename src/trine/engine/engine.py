"""Slots, admission, prefill and decoding of many sequences at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from trine.cache import HybridCache
from trine.engine.sampling import Sampling, choose
from trine.engine.text import TextStream
from trine.model import Model

OnText = Callable[[int, str], None]


class Decoder(Protocol):
    """The part of a tokenizer that generation needs."""

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids to text; unfinished UTF-8 at the end shows as U+FFFD."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue. `sample` distinguishes several samples of the same prompt."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    sample: int = 0
    cache: HybridCache | None = None  # what came before the prompt (one sequence); forked, never changed


@dataclass
class Completion:
    """What a request became: new tokens, their log-probabilities (nats), text, and why it ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    ended: Literal["", "length", "stop", "end_token"] = ""
    cache: HybridCache | None = None  # after the last token that the model has read; kept when asked for


@dataclass
class _Slot:
    number: int  # of the request, in the order of submission
    request: Request
    cache: HybridCache | None  # of this sequence alone, while it is being prefilled
    read: int = 0  # prompt tokens the model has seen
    stream: TextStream | None = None
    completion: Completion = field(default_factory=Completion)


class Engine:
    """Continues many prompts of unequal lengths together.

    Prompts are packed, never padded, and read in pieces of at most `prefill_tokens` tokens a pass; all sequences that
    are past their prompt advance by one token a pass. Results do not depend on what else runs (up to rounding), and
    noise depends on (seed, sample, position) alone.

    Args:
        model: used in eval mode, without gradients.
        tokenizer: to produce text and find stop texts; None = tokens only.
        end_token: ends a sequence; it is not part of the result.
        slots: sequences in flight at most.
        prefill_tokens: prompt tokens a pass at most.
        keep_caches: hand each completion's cache back.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Decoder | None = None,
        *,
        end_token: int | None = None,
        slots: int = 64,
        prefill_tokens: int = 2048,
        keep_caches: bool = False,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots: found {slots}, need at least 1")
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens: found {prefill_tokens}, need at least 1")
        self.model, self.tokenizer, self.end_token = model, tokenizer, end_token
        self.slots, self.prefill_tokens, self.keep_caches = slots, prefill_tokens, keep_caches
        self._device = model.embed.weight.device
        self._queue: deque[_Slot] = deque()
        self._prefilling: list[_Slot] = []
        self._active: list[_Slot] = []
        self._active_cache: HybridCache | None = None
        self._done: dict[int, Completion] = {}
        self._submitted = 0

    def submit(self, request: Request) -> int:
        """Queue a request; returns its number.

        Raises:
            ValueError: an empty prompt or one with an id outside the vocabulary, stop texts without a tokenizer, or a
                cache of several sequences or another model.
        """
        if not request.prompt:
            raise ValueError("prompt: found no tokens, need at least one")
        vocabulary = self.model.embed.weight.shape[0]
        for i, token in enumerate(request.prompt):
            if not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
                raise ValueError(f"prompt: found {token!r} at position {i}, need token ids 0 to {vocabulary - 1}")
        if request.sampling.stop and self.tokenizer is None:
            raise ValueError("stop: stop texts need a tokenizer")
        if request.cache is not None and request.cache.n_sequences != 1:
            raise ValueError(f"cache: found {request.cache.n_sequences} sequences, need one")
        if request.cache is not None and request.cache.config != self.model.config:
            raise ValueError("cache: found one of another model configuration, need one of this model")
        number = self._submitted
        self._submitted += 1
        stream = TextStream(self.tokenizer.decode, request.sampling.stop) if self.tokenizer is not None else None
        self._queue.append(_Slot(number, request, None, stream=stream))
        return number

    def run(self, on_text: OnText | None = None) -> list[Completion]:
        """Finish everything submitted; returns completions in the order of submission.

        Args:
            on_text: called with (request number, new text) as text becomes certain.
        """
        first = min((s.number for s in (*self._queue, *self._prefilling, *self._active)), default=self._submitted)
        while self._queue or self._prefilling or self._active:
            self.advance(on_text)
        return [self._done.pop(number) for number in range(first, self._submitted)]

    @torch.no_grad()
    def advance(self, on_text: OnText | None = None) -> None:
        """One pass: admit, read prompts, and one new token for every sequence past its prompt."""
        was_training = self.model.training
        self.model.eval()
        try:
            self._admit()
            if self._active:
                self._decode(on_text)
            if self._prefilling:
                self._prefill(on_text)
        finally:
            self.model.train(was_training)

    def _admit(self) -> None:
        while self._queue and len(self._prefilling) + len(self._active) < self.slots:
            slot = self._queue.popleft()
            given = slot.request.cache
            dtype = self.model.embed.weight.dtype
            slot.cache = (
                given.snapshot()
                if given is not None
                else HybridCache(self.model.config, dtype=dtype, device=self._device)
            )
            self._prefilling.append(slot)

    def _prefill(self, on_text: OnText | None) -> None:
        room = self.prefill_tokens
        pieces: list[tuple[_Slot, tuple[int, ...]]] = []
        for slot in self._prefilling:
            if room == 0:
                break
            piece = slot.request.prompt[slot.read : slot.read + room]
            pieces.append((slot, piece))
            room -= len(piece)
        cache = HybridCache.cat([slot.cache for slot, _ in pieces if slot.cache is not None])
        tokens_T = torch.tensor([t for _, piece in pieces for t in piece], device=self._device)
        lengths = torch.tensor([0, *(len(piece) for _, piece in pieces)], device=self._device)
        hidden_TD = self.model(tokens_T, lengths.cumsum(0), cache=cache)
        ready: list[_Slot] = []
        last: list[int] = []
        end = 0
        for i, (slot, piece) in enumerate(pieces):
            end += len(piece)
            slot.read += len(piece)
            slot.cache = cache.select([i])
            if slot.read == len(slot.request.prompt):
                ready.append(slot)
                last.append(end - 1)
        if not ready:
            return
        self._prefilling = [s for s in self._prefilling if s not in ready]
        self._emit(ready, self.model.logits(hidden_TD[last]), on_text)
        going = [s for s in ready if not s.completion.ended]
        for slot in ready:
            if slot.completion.ended:
                self._finish(slot, slot.cache)
        if going:
            caches = [s.cache for s in going if s.cache is not None]
            self._active_cache = HybridCache.cat(([self._active_cache] if self._active_cache else []) + caches)
            self._active += going
            for slot in going:
                slot.cache = None

    def _decode(self, on_text: OnText | None) -> None:
        assert self._active_cache is not None
        tokens_N = torch.tensor([s.completion.tokens[-1] for s in self._active], device=self._device)
        hidden_ND = self.model(tokens_N, cache=self._active_cache)
        self._emit(self._active, self.model.logits(hidden_ND), on_text)
        staying = [i for i, s in enumerate(self._active) if not s.completion.ended]
        if len(staying) == len(self._active):
            return
        for i, slot in enumerate(self._active):
            if slot.completion.ended:
                self._finish(slot, self._active_cache.select([i]) if self.keep_caches else None)
        self._active_cache = self._active_cache.select(staying) if staying else None
        self._active = [self._active[i] for i in staying]

    def _emit(self, slots: list[_Slot], logits_NV: Tensor, on_text: OnText | None) -> None:
        for slot, logits_V in zip(slots, logits_NV, strict=True):
            done, sampling = slot.completion, slot.request.sampling
            token, logprob = choose(logits_V, sampling, slot.request.sample, len(done.tokens))
            if token == self.end_token:
                done.ended = "end_token"
            else:
                done.tokens.append(token)
                done.logprobs.append(logprob)
                text = slot.stream.push(token) if slot.stream is not None else ""
                if text and on_text is not None:
                    on_text(slot.number, text)
                if slot.stream is not None and slot.stream.stopped:
                    done.ended = "stop"
                elif len(done.tokens) == sampling.max_tokens:
                    done.ended = "length"
            if done.ended and slot.stream is not None:
                rest = slot.stream.finish()
                if rest and on_text is not None:
                    on_text(slot.number, rest)
                done.text = slot.stream.text

    def _finish(self, slot: _Slot, cache: HybridCache | None) -> None:
        slot.completion.cache = cache if self.keep_caches else None
        self._done[slot.number] = slot.completion


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | None = None,
    *,
    tokenizer: Decoder | None = None,
    end_token: int | None = None,
    samples: int = 1,
    on_text: OnText | None = None,
) -> list[Completion]:
    """Continue each prompt `samples` times, all of them together.

    Args:
        model: the model.
        prompts: token ids, of any lengths.
        sampling: how to choose tokens; default greedy.
        tokenizer: to produce text; needed for stop texts.
        end_token: token that ends a sequence.
        samples: completions a prompt; they differ in their noise only.
        on_text: called with (completion number, new text) while they grow.

    Returns:
        Completions, the samples of one prompt side by side.
    """
    engine = Engine(model, tokenizer, end_token=end_token)
    for prompt in prompts:
        for sample in range(samples):
            engine.submit(Request(tuple(prompt), sampling or Sampling(), sample))
    return engine.run(on_text)
