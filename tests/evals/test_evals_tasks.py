"""Tasks by depth and length: what is asked, and that a model which reads the evidence shows, and one that does not."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trine.data import DataError, Tokenizer
from trine.data.generated import recall_tokenizer
from trine.evals.tasks import asked_of, asked_of_row, evaluate_recall, evaluate_tasks, plan_tasks
from trine.tasks import FAMILIES, make, recall_row
from trine.tasks.symbols import KEYS, VALUES


class Lookup(nn.Module):
    """Knows recall by heart: says the value behind the key's first place in the sequence, with logit ``sure``."""

    def __init__(self, tokenizer: Tokenizer, sure: float = 8.0, reach: int = 10**9) -> None:
        super().__init__()
        self.head = nn.Linear(tokenizer.vocab_size, tokenizer.vocab_size, bias=False)
        nn.init.eye_(self.head.weight)
        self.keys = {tokenizer.encode(key)[0] for key in KEYS}
        self.values = {tokenizer.encode(value)[0] for value in VALUES}
        self.sure, self.reach = sure, reach

    def forward(self, tokens_T: Tensor, cu_seqlens_N1: Tensor) -> Tensor:
        hidden = torch.zeros(tokens_T.numel(), self.head.weight.shape[0])
        for begin, end in pairwise(cu_seqlens_N1.tolist()):
            first: dict[int, tuple[int, int]] = {}
            ids = tokens_T[begin:end].tolist()
            for t, token in enumerate(ids):
                if token in self.keys and token in first and t - first[token][0] <= self.reach:
                    hidden[begin + t, first[token][1]] = self.sure
                if token in self.keys and t + 1 < len(ids) and ids[t + 1] in self.values:
                    first.setdefault(token, (t, ids[t + 1]))
        return hidden


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return recall_tokenizer()


def test_a_model_that_looks_has_a_gap_of_its_certainty(tokenizer: Tokenizer) -> None:
    cases = [(64, 4, None), (300, 4, None), (300, 4, 250), (300, 4, 30)]
    seen: list[int] = []
    found = evaluate_recall(Lookup(tokenizer), tokenizer, cases, rows=8, tick=seen.append)
    logsum = math.log(math.exp(8) + 256)
    for cell, (length, pairs, distance) in zip(found, cases, strict=True):
        assert (cell["length"], cell["pairs"], cell["distance"]) == (length, pairs, distance)
        assert cell["accuracy"] == 1.0 and cell["chance"] == 0.25
        assert cell["loss"] == pytest.approx(logsum - 8, rel=1e-4)
        assert cell["gap"] == pytest.approx(8.0, rel=1e-4)  # the logit moves to the swapped value
        assert cell["count"] == (8 if distance else 32)
    assert len(seen) >= 4
    near, far = evaluate_recall(Lookup(tokenizer, reach=100), tokenizer, [(300, 4, 50), (300, 4, 200)], rows=8)
    assert near["accuracy"] == 1.0 and near["gap"] > 7.9
    assert far["gap"] == pytest.approx(0.0, abs=1e-6) and far["loss"] == pytest.approx(math.log(257), rel=1e-4)


def test_answers_stand_where_they_are_scored(tokenizer: Tokenizer) -> None:
    row = recall_row(1, length=50, pairs=3)
    asked = asked_of_row(row, tokenizer)
    assert tokenizer.decode(asked.stream[asked.at].tolist()) == "".join(value for _, value in row.pairs)
    shown = make("latest", 0, length=1_200).render()
    asked = asked_of(shown.prompt, shown.completion, tokenizer)
    assert tokenizer.decode(asked.stream[asked.at].tolist()) == shown.completion
    assert asked.at[-1] == asked.stream.size - 1 and asked.stream[0] == tokenizer.eod_id
    merged = Tokenizer.train(["Ak Ak Ak Ak" * 50, "?A?A?A"], 260)
    with pytest.raises(DataError, match="share a token"):
        asked_of_row(replace(row, text="Ak" * 25), merged)


def test_a_plan_spends_its_budget_on_samples_then_on_depths() -> None:
    whole = plan_tasks([512, 1024], families=("passkey", "latest"), samples=3)
    assert len(whole.cells) == 2 * 2 * 5 and {cell[3] for cell in whole.cells} == {3}
    assert whole.tokens == 2 * 2 * 5 * 3 * (512 + 1024)
    small = plan_tasks([1_000, 4_000, 64_000], families=("passkey", "latest"), budget=120_000)
    by_length = {n: [cell for cell in small.cells if cell[1] == n] for n in (1_000, 4_000)}
    assert {cell[2] for cell in by_length[1_000]} == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert {cell[3] for cell in by_length[1_000]} == {3}  # fifteen tasks a family fit 60 000 tokens
    assert {cell[2:] for cell in by_length[4_000]} == {(0.0, 1), (0.5, 1), (1.0, 1)}
    assert small.left_out == (
        "tasks of 64000 tokens: need 256,000 tokens, more than its part, 40,000 of the 120,000 that may be read",
    )
    assert small.tokens <= 120_000
    # A length that is left out leaves its part to the others: four stages do not keep 1,024 tokens from being asked.
    staged = plan_tasks([128, 1_024, 4_096, 16_384], budget=65_536)
    assert {cell[1] for cell in staged.cells} == {128, 1_024} and staged.tokens <= 65_536
    assert [line.split(":")[0] for line in staged.left_out] == ["tasks of 4096 tokens", "tasks of 16384 tokens"]
    none = plan_tasks([5_000], families=("passkey",), budget=9_999)
    assert none.cells == () and none.left_out == (
        "tasks of 5000 tokens: need 10,000 tokens, more than the 9,999 that may be read",
    )
    assert {cell[0] for cell in plan_tasks([512]).cells} == set(FAMILIES)
    with pytest.raises(ValueError, match="lengths: found none"):
        plan_tasks([])
    with pytest.raises(ValueError, match="families: found 'passkeys'"):
        plan_tasks([512], families=("passkeys",))


class Flat(nn.Module):
    """Every token as likely as any other: it looks at nothing."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(2, vocabulary, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens_T: Tensor, cu_seqlens_N1: Tensor) -> Tensor:
        return torch.ones(tokens_T.numel(), 2)


def test_every_family_is_asked_at_its_length(tokenizer: Tokenizer) -> None:
    plan = plan_tasks([150, 1_000], depths=(0.0, 1.0), samples=2)
    read: list[int] = []

    class Counting(Flat):
        def forward(self, tokens_T: Tensor, cu_seqlens_N1: Tensor) -> Tensor:
            read.extend(np.diff(cu_seqlens_N1.numpy()).tolist())
            return super().forward(tokens_T, cu_seqlens_N1)

    found: dict[str, Any] = evaluate_tasks(Counting(257), tokenizer, plan)
    assert set(found["families"]) == set(FAMILIES)
    assert any(line.startswith("count at 150 tokens: found 149, need at least") for line in found["left_out"])
    for name, cells in found["families"].items():
        long = [cell for cell in cells if cell["length"] == 1_000]
        assert [cell["depth"] for cell in long] == [0.0, 1.0]
        for cell in cells:
            assert cell["count"] == 2 and 0 < cell["chance"] <= 0.5, name
            assert cell["loss"] == pytest.approx(math.log(257), rel=1e-5)
            assert cell["gap"] == pytest.approx(0.0, abs=1e-9) and cell["accuracy"] == 0.0
    # A task of 1 000 tokens is 999 and the end-of-document token before; the last token is only predicted.
    # Swapped evidence may be a little longer or shorter.
    assert read.count(999) >= 48 and read.count(149) >= 4
    assert all(min(abs(n - 999), abs(n - 149)) < 20 for n in read)
