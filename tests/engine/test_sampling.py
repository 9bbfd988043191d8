"""Sampling draws from the distribution it says it draws from."""

from __future__ import annotations

import math

import pytest
import torch

from trine.engine.sampling import Sampling, choose, uniform


def test_uniform_is_uniform_and_keyed() -> None:
    draws = [uniform(0, 0, p) for p in range(4000)]
    assert sum(draws) / 4000 == pytest.approx(0.5, abs=0.02)
    assert all(0.0 <= u < 1.0 for u in draws)
    assert len({uniform(s, n, p) for s in range(3) for n in range(3) for p in range(3)}) == 27
    assert uniform(1, 2, 3) == uniform(1, 2, 3)


def test_frequencies_follow_probabilities() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = torch.zeros(4)
    for position in range(4000):
        counts[choose(p.log(), Sampling(temperature=1.0), 0, position)[0]] += 1
    torch.testing.assert_close(counts / 4000, p, rtol=0, atol=0.025)


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    for top_p, allowed in [(0.4, {1}), (0.5, {1}), (0.51, {1, 3}), (0.8, {1, 3}), (0.96, {0, 1, 2, 3})]:
        seen = {choose(logits, Sampling(temperature=1.0, top_p=top_p), 0, i)[0] for i in range(400)}
        assert seen == allowed, top_p


def test_low_temperature_approaches_greedy_and_ties_take_the_first() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0])
    assert choose(logits, Sampling(), 0, 0)[0] == 1
    assert {choose(logits, Sampling(temperature=0.01), 0, i)[0] for i in range(50)} == {1, 2}
    _, logprob = choose(logits, Sampling(), 0, 0)
    assert logprob == pytest.approx(math.log(math.e**2 / (math.e + 2 * math.e**2 + 1)))


@pytest.mark.parametrize("below", [2.0**-53, 2.0**-52, 1e-15, 1e-12])
def test_top_p_just_below_one(below: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 3, 50, 1000):
        for position in range(20):
            logits = torch.randn(size, generator=generator)
            token, logprob = choose(logits, Sampling(temperature=1.0, top_p=1.0 - below), 0, position)
            assert 0 <= token < size and math.isfinite(logprob)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_temperature_next_to_zero_is_greedy_with_ties_shared(temperature: float, top_p: float) -> None:
    logits = torch.tensor([-3.0, 2.0, 2.0, 0.0]) * 1e4
    drawn = [choose(logits, Sampling(temperature=temperature, top_p=top_p), 0, i) for i in range(40)]
    assert {token for token, _ in drawn} == {1, 2}
    assert all(logprob == pytest.approx(-math.log(2.0)) for _, logprob in drawn)
    assert choose(logits[:2], Sampling(temperature=temperature), 0, 0) == (1, 0.0)


def test_non_finite_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="logits_V: found non-finite scores at sample 2, position 5"):
        choose(torch.tensor([0.0, math.nan]), Sampling(), 2, 5)
