"""Packed rows on a terminal: boundaries, sources and weights are all there, and text is shown as it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from trine.config import SourceShare
from trine.data import Corpus, Document, MixturePlan, Shards, Tokenizer, write_shards
from trine.views.rows import mixture_table, rows_view

TEXTS = ["first [bold]text[/] of mine\n", "second text, a longer one, with an answer: 42\n", "third é\n"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Three documents of two sources; of the second only the answer weighs."""
    tokenizer = Tokenizer.train(TEXTS, 257)
    at = TEXTS[1].index("42")
    documents = [Document.make("prose", f"doc{i}", text, licence="MIT") for i, text in enumerate(TEXTS)]
    documents[1] = Document.make("tasks", "doc1", TEXTS[1], licence="MIT", weights=[(at, at + 2, 2.0)])
    corpora = [Corpus("prose", (documents[0], documents[2])), Corpus("tasks", (documents[1],))]
    return write_shards(tmp_path_factory.mktemp("rows"), corpora, tokenizer)


def _plan(shards: Shards) -> MixturePlan:
    mixture = (SourceShare("prose", 1.0), SourceShare("tasks", 1.0))
    sizes = {"row_length": 48, "tokens_per_step": 96, "micro_batch_tokens": 48, "steps": 1}
    return MixturePlan(shards, mixture, **sizes, allow_repeats=True)  # type: ignore[arg-type]


def _shown(thing: object) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(thing)
    return console.export_text()


def test_every_sequence_is_shown_with_where_it_is_from(shards: Shards) -> None:
    shown = _shown(rows_view(_plan(shards).micro_batches(0), shards))
    assert "micro-batch 0: 48 tokens, 2 sequences, 9 padding" in shown
    assert "[0:29] prose: doc0  whole of 29" in shown
    assert "⏎first [bold]text[/] of mine" in shown and "⏎third é" in shown
    assert "[0:47] tasks: doc1  whole of 47, 2 weighted, sum 4" in shown
    assert "answer: 42" in shown


def test_a_long_sequence_is_shortened_in_the_middle(shards: Shards) -> None:
    shown = _shown(rows_view(_plan(shards).micro_batches(0), shards, shown=20))
    assert "⏎first [bo ⋯ " in shown and "of mine" in shown


def test_weights_are_styles(shards: Shards) -> None:
    console = Console(width=100, force_terminal=True, color_system="standard", record=True, file=io.StringIO())
    console.print(rows_view(_plan(shards).micro_batches(0)[1:], shards))
    shown = console.export_text(styles=True)
    assert "\x1b[4m42\x1b[0m" in shown and "\x1b[2msecond text, a longer" in shown


def test_parts_of_a_mixture_in_a_table(shards: Shards) -> None:
    shown = _shown(mixture_table(_plan(shards).report()))
    assert "2 rows, 86 targets, 10.4% padding" in shown.replace("\n", " ")
    row = next(line for line in shown.splitlines() if "tasks" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["tasks", "any", "1", "50.0%", "1", "47", "0", "1.00"]
