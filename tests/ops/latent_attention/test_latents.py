"""Latents: a value whatever is appended, forked or selected, and cheap to grow."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from trine.ops.latent_attention import Latents
from trine.ops.latent_attention.state import PAGE


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def contents(past: Latents) -> list[list[float]]:
    """First channel of each sequence's rows."""
    return [part[:, 0].tolist() for part in past.rows_PM.detach().split(past.lengths_N.tolist())]


def numbered(lengths: list[int], start: int, width: int = 3) -> Tensor:
    return torch.arange(start, start + sum(lengths), dtype=torch.float32)[:, None].repeat(1, width)


def test_empty_append_and_views() -> None:
    past = Latents.empty(3, 5, dtype=torch.float64)
    assert (past.n_sequences, past.width, past.dtype, past.device.type) == (3, 5, torch.float64, "cpu")
    assert past.lengths_N.tolist() == [0, 0, 0] and past.rows_PM.shape == (0, 5)
    rows = torch.randn(6, 5, dtype=torch.float64)
    after = past.append(rows, offsets([2, 0, 4]).int())
    assert after.lengths_N.tolist() == [2, 0, 4] and after.cu_seqlens_N1.tolist() == [0, 2, 2, 6]
    assert torch.equal(after.rows_PM, rows) and past.lengths_N.tolist() == [0, 0, 0]
    buffer, lengths = after.padded()
    assert buffer.shape == (3, PAGE, 5) and torch.equal(buffer[2, :4], rows[2:]) and lengths.tolist() == [2, 0, 4]
    packed = Latents(rows, offsets([2, 0, 4]))
    assert torch.equal(packed.padded()[0][2, :4], rows[2:]) and torch.equal(packed.rows_PM, rows)


def test_forks_that_append_differently_do_not_see_each_other() -> None:
    origin = Latents.empty(2, 3).append(numbered([2, 1], 0), offsets([2, 1]))
    snapshot, fork = origin, origin
    left = origin.append(numbered([1, 1], 10))
    right = fork.append(numbered([1, 1], 20))
    again = left.append(numbered([1, 1], 30))
    assert contents(snapshot) == [[0, 1], [2]]
    assert contents(left) == [[0, 1, 10], [2, 11]]
    assert contents(right) == [[0, 1, 20], [2, 21]]
    assert contents(again) == [[0, 1, 10, 30], [2, 11, 31]]
    assert left.padded()[0].data_ptr() == again.padded()[0].data_ptr()  # the first to append shares
    assert right.padded()[0].data_ptr() != left.padded()[0].data_ptr()  # the second has its own


def test_any_sequence_of_operations_leaves_every_holder_with_its_own_rows() -> None:
    rng = random.Random(0)
    held: list[tuple[Latents, list[list[float]]]] = [(Latents.empty(2, 2), [[], []])]
    label = 0
    for _ in range(200):
        past, want = rng.choice(held)
        kind = rng.choice(["append", "append", "append", "select", "cat", "packed"])
        if kind == "append":
            new = [rng.choice([0, 1, 1, 2, 300]) if rng.random() < 0.1 else rng.choice([0, 1, 2]) for _ in want]
            rows = numbered(new, label, 2)
            parts = [part[:, 0].tolist() for part in rows.split(new)]
            label += sum(new)
            held.append((past.append(rows, offsets(new)), [a + b for a, b in zip(want, parts, strict=True)]))
        elif kind == "select":
            chosen = [rng.randrange(len(want)) for _ in range(rng.choice([1, 2, 3]))]
            held.append((past.select(chosen), [want[i] for i in chosen]))
        elif kind == "cat" and len(want) < 4:
            other, other_want = rng.choice(held)
            held.append((Latents.cat([past, other]), want + other_want))
        elif kind == "packed":
            held.append((Latents(past.rows_PM, past.cu_seqlens_N1), want))
        held = held[-12:]
        for latents, rows_wanted in held:
            assert contents(latents) == rows_wanted


def test_appending_costs_few_copies() -> None:
    past = Latents.empty(2, 4)
    buffers = set()
    for _ in range(2000):
        past = past.append(torch.zeros(2, 4))
        buffers.add(past.padded()[0].data_ptr())
    assert past.lengths_N.tolist() == [2000, 2000]
    assert len(buffers) <= 8  # 256, 512, 768, ... half as much again each time
    assert past.padded()[0].shape[1] <= 2000 * 1.5 + PAGE


def test_gradients_flow_through_append_and_select() -> None:
    old = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    new = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    past = Latents(old, offsets([1, 2])).append(new, offsets([3, 1]))
    want = torch.cat([old[:1], new[:3], old[1:], new[3:]])
    assert torch.equal(past.rows_PM, want) and past.requires_grad()
    chosen = past.select(torch.tensor([1, 1, 0]))
    assert chosen.lengths_N.tolist() == [3, 3, 4]
    dold, dnew = torch.autograd.grad(chosen.rows_PM.sum(), [old, new])
    assert dold[:, 0].tolist() == [1, 2, 2] and dnew[:, 0].tolist() == [1, 1, 1, 2]
    with torch.no_grad():
        assert not past.append(new, offsets([2, 2])).requires_grad()


def test_a_buffer_made_in_inference_mode_can_be_appended_to_outside() -> None:
    with torch.inference_mode():
        past = Latents.empty(1, 2).append(torch.ones(2, 2))
    after = past.append(torch.zeros(1, 2))
    assert contents(after) == [[1, 1, 0]] and contents(past) == [[1, 1]]


def test_narrower_rows_are_widened() -> None:
    past = Latents.empty(1, 2).append(torch.ones(2, 2).bfloat16())
    assert past.dtype == torch.float32 and past.rows_PM.dtype == torch.float32


def test_golden_errors() -> None:
    past = Latents.empty(2, 4)

    def message(function: object, *arguments: object) -> str:
        with pytest.raises(ValueError) as caught:
            function(*arguments)  # type: ignore[operator]
        return str(caught.value)

    assert message(past.append, torch.zeros(2, 3)) == "rows_TM: found shape (2, 3), need [T, M] with M = 4"
    assert (
        message(past.append, torch.zeros(2, 4).double())
        == "rows_TM: found dtype torch.float64, need one that fits the past's torch.float32"
    )
    assert message(past.append, torch.zeros(3, 4)) == "rows_TM: found 3 rows for 2 sequences, need cu_seqlens_N1"
    assert (
        message(past.append, torch.zeros(3, 4), offsets([1, 1, 1]))
        == "cu_seqlens_N1: found 3 sequences, need the past's 2"
    )
    assert (
        message(past.append, torch.zeros(3, 4), offsets([1, 1]))
        == "cu_seqlens: found last value 2, need the number of tokens, 3"
    )
    assert message(past.select, [2]) == "indices: found 2, need 0..1"
    assert message(Latents.cat, []) == "parts: found none, need at least one Latents"
    assert message(Latents.cat, [past, Latents.empty(1, 5)]).startswith("parts: found different (width, dtype, device)")
    assert (
        message(Latents, torch.zeros(2, 3, 4), offsets([2]))
        == "rows_PM: found torch.float32 (2, 3, 4), need [P, M] of a floating dtype"
    )
