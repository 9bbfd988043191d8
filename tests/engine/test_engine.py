"""Generation: what is asked together equals what is asked alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from trine.cache import HybridCache
from trine.config import ModelConfig
from trine.engine import Engine, Request, Sampling, generate
from trine.model import Model

Tiny = Callable[..., ModelConfig]
PROMPTS = [[5], [1, 2, 3], list(range(40)), [7] * 17]


class Letters:
    """Token 65 is "A", and so on; enough of a tokenizer to test stop texts."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(33 + i) for i in ids)


@torch.no_grad()
def slow_greedy(model: Model, prompt: list[int], n: int) -> list[int]:
    """The definition: run everything again for each token."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(model.logits(model(torch.tensor(tokens)))[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prefill_tokens", [7, 2048])
@pytest.mark.parametrize("slots", [1, 3, 64])
def test_greedy_equals_running_everything_again(tiny_config: Tiny, slots: int, prefill_tokens: int) -> None:
    model = Model(tiny_config()).eval()
    engine = Engine(model, slots=slots, prefill_tokens=prefill_tokens)
    for prompt in PROMPTS:
        engine.submit(Request(tuple(prompt), Sampling(max_tokens=6)))
    for prompt, done in zip(PROMPTS, engine.run(), strict=True):
        assert done.tokens == slow_greedy(model, prompt, 6)
        assert done.ended == "length"


def test_noise_depends_on_seed_sample_and_position_only(tiny_config: Tiny) -> None:
    model = Model(tiny_config())
    sampling = Sampling(max_tokens=8, temperature=1.0, seed=3)
    alone = generate(model, [PROMPTS[1]], sampling, samples=2)
    together = generate(model, PROMPTS, sampling, samples=2)
    assert [c.tokens for c in together[2:4]] == [c.tokens for c in alone]
    assert alone[0].tokens != alone[1].tokens
    other = generate(model, [PROMPTS[1]], Sampling(max_tokens=8, temperature=1.0, seed=4))
    assert other[0].tokens != alone[0].tokens


def test_logprobs_are_those_of_the_model(tiny_config: Tiny) -> None:
    model = Model(tiny_config()).eval()
    (done,) = generate(model, [PROMPTS[1]], Sampling(max_tokens=5, temperature=1.0))
    tokens = torch.tensor(PROMPTS[1] + done.tokens)
    with torch.no_grad():
        logprobs_TV = model.logits(model(tokens)).log_softmax(-1)
    for i, (token, logprob) in enumerate(zip(done.tokens, done.logprobs, strict=True)):
        assert logprob == pytest.approx(float(logprobs_TV[2 + i, token]), abs=1e-5)


def test_stop_text_ends_and_is_left_out(tiny_config: Tiny) -> None:
    model = Model(tiny_config()).eval()
    letters = Letters()
    (free,) = generate(model, [[5]], Sampling(max_tokens=12), tokenizer=letters)
    assert free.text == letters.decode(free.tokens)
    stop = free.text[4:6]
    seen: list[str] = []
    (done,) = generate(
        model,
        [[5]],
        Sampling(max_tokens=12, stop=(stop,)),
        tokenizer=letters,
        on_text=lambda _, text: seen.append(text),
    )
    assert done.ended == "stop"
    assert done.text == free.text[: free.text.index(stop)]
    assert "".join(seen) == done.text


def test_streamed_text_adds_up(tiny_config: Tiny) -> None:
    seen: dict[int, str] = {}
    done = generate(
        *(Model(tiny_config()), PROMPTS, Sampling(max_tokens=9)),
        tokenizer=Letters(),
        on_text=lambda number, text: seen.update({number: seen.get(number, "") + text}),
    )
    assert seen == {i: c.text for i, c in enumerate(done)}


def test_end_token_ends(tiny_config: Tiny) -> None:
    model = Model(tiny_config()).eval()
    free = slow_greedy(model, [5], 6)
    (done,) = generate(model, [[5]], Sampling(max_tokens=6), end_token=free[3])
    assert done.ended == "end_token"
    assert done.tokens == free[: free.index(free[3])]


def test_a_kept_cache_continues_the_conversation(tiny_config: Tiny) -> None:
    model = Model(tiny_config()).eval()
    engine = Engine(model, keep_caches=True)
    engine.submit(Request((1, 2, 3), Sampling(max_tokens=4)))
    (first,) = engine.run()
    assert isinstance(first.cache, HybridCache)
    # The last token was chosen but not read yet, so it begins the next prompt.
    engine.submit(Request((first.tokens[-1], 9, 8), Sampling(max_tokens=4), cache=first.cache))
    (second,) = engine.run()
    assert second.tokens == slow_greedy(model, [1, 2, 3, *first.tokens, 9, 8], 4)


def test_training_mode_is_restored(tiny_config: Tiny) -> None:
    model = Model(tiny_config()).train()
    generate(model, [[5]], Sampling(max_tokens=2))
    assert model.training
    assert int(model.router_stats.loads_LE.sum()) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.submit(Request(())), "prompt: found no tokens, need at least one"),
        (lambda e: e.submit(Request((1,), Sampling(stop=("x",)))), "stop: stop texts need a tokenizer"),
        (lambda e: e.submit(Request((1, 97))), "prompt: found 97 at position 1, need token ids 0 to 96"),
        (lambda e: e.submit(Request((-1,))), "prompt: found -1 at position 0, need token ids 0 to 96"),
        (lambda e: e.submit(Request((2.5,))), "prompt: found 2.5 at position 0, need token ids 0 to 96"),
        (
            lambda e: e.submit(Request((1,), cache=HybridCache(replace(e.model.config, layers=8, mla_layers=(3, 7))))),
            "cache: found one of another model configuration, need one of this model",
        ),
        (lambda e: Sampling(top_p=0.0), "top_p: found 0.0, need more than 0 and at most 1"),
        (lambda e: Sampling(temperature=-1.0), "temperature: found -1.0, need 0 (greedy) or more"),
        (lambda e: Sampling(max_tokens=0), "max_tokens: found 0, need at least 1"),
        (lambda e: Sampling(stop=("",)), "stop: found an empty text, need non-empty stop sequences"),
        (lambda e: Engine(e.model, slots=0), "slots: found 0, need at least 1"),
        (lambda e: Engine(e.model, prefill_tokens=0), "prefill_tokens: found 0, need at least 1"),
    ],
)
def test_misuse_is_named(tiny_config: Tiny, call: Callable[[Engine], object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        call(Engine(Model(tiny_config())))
    assert str(error.value) == message


def test_a_refused_prompt_leaves_the_others(tiny_config: Tiny) -> None:
    model = Model(tiny_config()).eval()
    engine = Engine(model)
    engine.submit(Request((5,), Sampling(max_tokens=3)))
    with pytest.raises(ValueError, match="prompt: found 1000 at position 0"):
        engine.submit(Request((1000,)))
    engine.submit(Request(tuple(np.array([1, 2, 3])), Sampling(max_tokens=3)))
    assert [done.tokens for done in engine.run()] == [slow_greedy(model, [5], 3), slow_greedy(model, [1, 2, 3], 3)]
