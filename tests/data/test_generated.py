"""Generated rows: a pure function of seed, stage and step, with a weight on answers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trine.data import IGNORE_INDEX, DataError, Tokenizer, write_shards
from trine.data.generated import (
    RECALL,
    SHORT_SHARE,
    RecallRows,
    open_recall,
    pairs_for,
    recall_tokenizer,
    row_batch,
    task_corpus,
)
from trine.tasks import make, recall_row, solve, solve_recall


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return recall_tokenizer()


def test_every_symbol_is_a_token_and_only_answers_are_supervised(tokenizer: Tokenizer) -> None:
    rows = [recall_row(i, length=n, pairs=p) for i, (n, p) in enumerate([(64, 4), (40, 3), (21, 5)])]
    batch = row_batch(rows, tokenizer, 130)
    assert batch.cu_seqlens_N1.tolist() == [0, 64, 104, 125, 130]
    assert batch.source_N.tolist() == [0, 0, 0, -1]
    for row, begin in zip(rows, [0, 64, 104], strict=True):
        end = begin + len(row.text)
        assert batch.tokens_T[begin] == tokenizer.eod_id
        assert tokenizer.decode(batch.tokens_T[begin + 1 : end].tolist()) == row.text[:-1]
        chosen = (batch.weights_T[begin:end] > 0).nonzero().flatten().tolist()
        assert chosen == list(row.answers)
        assert tokenizer.decode(batch.targets_T[begin:end][chosen].tolist()) == solve_recall(row.text)
    unsupervised = batch.weights_T == 0
    assert (batch.targets_T[unsupervised] == IGNORE_INDEX).all() and batch.weights_T.sum() == 4 + 3 + 5
    assert batch.supervised_bytes == 12
    with pytest.raises(DataError, match="found 3 of 125 symbols for 124 positions"):
        row_batch(rows, tokenizer, 124)


def test_a_vocabulary_that_merges_symbols_is_refused() -> None:
    merged = Tokenizer.train(["Ak Ak Ak Ak" * 50, "?A?A?A"], 260)
    with pytest.raises(DataError, match="some recall symbols share a token"):
        row_batch([replace(recall_row(0), text="Ak" * 32)], merged)


def test_rows_are_a_pure_function_of_seed_stage_and_step(tokenizer: Tokenizer) -> None:
    def rows(**changes: int) -> RecallRows:
        return RecallRows(tokenizer, **{"row_length": 64, "tokens_per_step": 512, "micro_batch_tokens": 256, **changes})  # type: ignore[arg-type]

    one = rows().micro_batches(5)
    again = rows().micro_batches(5)
    assert len(one) == 2
    assert all(torch.equal(a.tokens_T, b.tokens_T) for a, b in zip(one, again, strict=True))
    others = [rows(seed=1).micro_batches(5), rows(stage=1).micro_batches(5), rows().micro_batches(6), one[::-1]]
    for other in others:
        assert not torch.equal(one[0].tokens_T, other[0].tokens_T)
    # Two processes see what one sees, in the same order.
    split = [rows().micro_batches(5, rank, 2)[0] for rank in (0, 1)]
    assert all(torch.equal(a.tokens_T, b.tokens_T) for a, b in zip(one, split, strict=True))
    seeds = [row.seed for step in range(40) for m in (0, 1) for row in rows(seed=3, stage=2).rows(step, m)]
    assert len(set(seeds)) == len(seeds)


def test_later_stages_keep_a_share_of_short_rows(tokenizer: Tokenizer) -> None:
    for size, shorter in ((1024, (64, 256)), (2048, (64, 256)), (4096, (64,))):
        rows = RecallRows(tokenizer, 1024, 4096, size, stage=2, shorter=shorter)
        micro = [(step, m) for step in range(16) for m in range(4096 // size)]
        lengths = [len(row.text) for step, m in micro for row in rows.rows(step, m)]
        short = sum(n for n in lengths if n < 1024)
        assert short / sum(lengths) == pytest.approx(SHORT_SHARE, abs=0.02)
        assert {n for n in lengths if n < 1024} == set(shorter)
        assert sum(lengths) == 16 * 4096  # no padding where lengths divide one another
    first = RecallRows(tokenizer, 64, 2048, 1024)
    assert {len(row.text) for row in first.rows(0, 0)} == {64}
    assert [pairs_for(n) for n in (16, 64, 256, 1024, 4096)] == [2, 8, 16, 16, 16]


def test_bad_sizes(tokenizer: Tokenizer) -> None:
    for sizes, message in (
        ((64, 512, 32), "micro_batch_tokens: found 32, need at least row_length 64"),
        ((64, 500, 256), "tokens_per_step: found 500, need a multiple"),
    ):
        with pytest.raises(DataError, match=message):
            RecallRows(tokenizer, *sizes)
    with pytest.raises(DataError, match="seed 4096"):
        RecallRows(tokenizer, 64, 512, 256, seed=4096)
    rows = RecallRows(tokenizer, 64, 512, 256)
    with pytest.raises(DataError, match="rank 0 of 3"):
        rows.micro_batches(0, 0, 3)
    with pytest.raises(DataError, match="step -1"):
        rows.rows(-1, 0)


def test_a_run_keeps_rows_to_look_at_and_to_evaluate_on(tmp_path: Path) -> None:
    shards = open_recall(tmp_path / "data")
    assert list(shards.sources) == [RECALL] and shards.tokenizer.vocab_size == 257
    held = shards.select("held_out").tolist()
    assert len(held) == 64 and shards.documents[held[0]].licence == "CC0-1.0"
    text = shards.text(held[1])
    assert len(text) == 128 and solve_recall(text) == text.partition("?")[2][1::2]
    assert open_recall(tmp_path / "data").hash == shards.hash == open_recall(tmp_path / "more").hash
    corpus = task_corpus("other", count=3, length=1_500)
    write_shards(tmp_path / "other", [corpus], Tokenizer.train(["ab"], 257))
    with pytest.raises(DataError, match=r"hold other, asked for tasks:recall"):
        open_recall(tmp_path / "other")


def test_task_texts_as_documents(tmp_path: Path) -> None:
    corpus = task_corpus("retrieval", count=40, length=1_600, families=("multi_key", "latest"), seed=5)
    assert len(corpus.documents) == 40
    held_out = [d for d in corpus.documents if d.split == "held_out"]
    assert [d.name for d in held_out] == ["latest/000019", "latest/000039"]
    first = corpus.documents[0]
    task = make("multi_key", 5, "train", length=1_600)
    assert first.text == task.render().text and len(first.text) == 1_600
    assert solve("multi_key", first.text) == task.answer
    assert first.weights is not None
    begin, end, weight = first.weights[-1]
    assert (first.text[begin:end], weight) == (f" {task.answer}", 10.0)
    again = task_corpus("retrieval", count=40, length=1_600, families=("multi_key", "latest"), seed=5)
    assert again == corpus
    with pytest.raises(DataError, match="found count 0"):
        task_corpus("x", count=0, length=1_000)
    with pytest.raises(
        DataError, match=r"source x: tasks of family 'count' of 90 characters: length: found 90, need at"
    ):
        task_corpus("x", count=1, length=90, families=("count",))
    assert np.array([len(d.text) for d in corpus.documents]).tolist() == [1_600] * 40
