"""Micro-batches side by side: the same bits as one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trine.config import ModelConfig
from trine.data import Batch
from trine.model import Model
from trine.train.workers import Workers

Tiny = Callable[..., ModelConfig]


def micro_batches(count: int) -> list[Batch]:
    tokens = [torch.randint(97, (50,)) for _ in range(count)]
    bounds = torch.tensor([0, 20, 50], dtype=torch.int32)
    return [Batch(t, torch.roll(t, -1), torch.ones(50), bounds, torch.zeros(2, dtype=torch.int64)) for t in tokens]


@pytest.mark.parametrize(("count", "threads", "recompute"), [(2, 2, False), (5, 3, False), (3, 2, True)])
def test_same_bits_as_one_thread(tiny_config: Tiny, count: int, threads: int, recompute: bool) -> None:
    model = Model(tiny_config())
    model.recompute = recompute
    model.router_stats.set_bias_(0.05 * torch.randn_like(model.router_stats.bias_LE))
    batches = micro_batches(count)
    expected_losses = []
    for batch in batches:
        loss, _ = model.loss(batch)
        (loss / 100.0).backward()
        expected_losses.append(loss.detach().double())
    expected = {n: p.grad for n, p in model.named_parameters()}
    counts = model.router_stats.counts.clone()
    model.zero_grad()
    model.router_stats.zero_()

    workers = Workers(model, threads)
    for _ in range(2):  # a second step meets clean replicas
        model.zero_grad()
        model.router_stats.zero_()
        losses = workers.accumulate(batches, 100.0, lambda: None)
        assert losses == expected_losses
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (expected[name] is None), name
            assert parameter.grad is None or torch.equal(parameter.grad, expected[name]), name
            assert parameter.grad is None or parameter.grad.stride() == parameter.stride(), name
        assert torch.equal(model.router_stats.counts, counts)


def test_a_new_bias_and_new_weights_reach_the_replicas(tiny_config: Tiny) -> None:
    model = Model(tiny_config())
    workers = Workers(model, 2)
    batches = micro_batches(2)
    before = workers.accumulate(batches, 0.0, lambda: None)
    assert all(p.grad is None for p in model.parameters())
    model.router_stats.zero_()
    model.router_stats.bias_LE.add_(torch.randn_like(model.router_stats.bias_LE))
    moved = workers.accumulate(batches, 0.0, lambda: None)
    assert moved != before
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    assert workers.accumulate(batches, 0.0, lambda: None) != moved


def test_an_error_in_a_thread_reaches_the_caller_and_leaves_no_thread_behind(tiny_config: Tiny) -> None:
    model = Model(tiny_config())
    workers = Workers(model, 2)
    good, bad = micro_batches(2)
    bad.tokens_T[3] = 97
    with pytest.raises(ValueError, match="found id 97 at position 3"):
        workers.accumulate([good, bad, good], 1.0, lambda: None)
    assert len(workers.accumulate([good, good], 1.0, lambda: None)) == 2

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.accumulate([good, good, good], 1.0, stop)
    assert workers._idle.qsize() == 2
