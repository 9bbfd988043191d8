"""Answers scored in packed calls against the same sums taken one at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from trine.config import ModelConfig
from trine.data import DataError
from trine.evals.answers import Answered, Asked, score_answers
from trine.model import Model


@pytest.fixture
def model(tiny_config: Callable[..., ModelConfig]) -> Model:
    torch.manual_seed(2)
    model = Model(tiny_config(vocab_size=31))
    torch.nn.init.normal_(model.head.weight, std=1.0)
    return model.double()


def some(count: int) -> list[Asked]:
    draw = np.random.default_rng(0)
    found = []
    for i in range(count):
        size = 5 + 7 * i
        at = np.sort(draw.choice(np.arange(1, size), size=1 + i % 3, replace=False)).astype(np.int64)
        found.append(Asked(draw.integers(0, 31, size), at))
    return found


@pytest.mark.parametrize("per_call", [1, 40, 10_000])
def test_packed_scores_are_those_of_each_alone(model: Model, per_call: int) -> None:
    asked, seen = some(6), []
    model.train()
    found = score_answers(model, asked, tokens_per_call=per_call, tick=seen.append)
    assert model.training and sum(seen) == sum(one.length for one in asked)
    model.eval()
    for one, score in zip(asked, found, strict=True):
        stream = torch.from_numpy(one.stream)
        logp = model.logits(model(stream[:-1])).log_softmax(-1)
        mine = [-logp[at - 1, stream[at]].item() for at in one.at.tolist()]
        right = [int(logp[at - 1].argmax()) == stream[at].item() for at in one.at.tolist()]
        assert score.loss == pytest.approx(np.mean(mine), rel=1e-6)
        assert (score.tokens, score.right_tokens) == (len(mine), sum(right))
        assert score.right == all(right)


def test_tokens_after_the_last_answer_are_not_read(model: Model) -> None:
    (one,) = some(1)
    longer = Asked(np.concatenate([one.stream, one.stream]), one.at)
    assert score_answers(model, [one]) == score_answers(model, [longer])
    assert longer.length == one.at[-1]


def test_whole_answers_need_every_token() -> None:
    assert Answered(0.1, 3, 3).right and not Answered(0.1, 3, 2).right


def test_bad_places(model: Model) -> None:
    for at in ([], [0], [5]):
        with pytest.raises(DataError, match="answers: number 0 has answers at"):
            score_answers(model, [Asked(np.arange(5), np.array(at, dtype=np.int64))])
    assert score_answers(model, []) == []
