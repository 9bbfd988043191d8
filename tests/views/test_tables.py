"""Tables of a run and of a preset."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from trine.config import preset
from trine.model import info
from trine.views import tables


def test_evaluation_rows_leave_out_what_was_not_measured() -> None:
    evaluation = {"bits_per_byte": 1.5, "baselines": {"xz": 2.0, "gzip": None, "ngram_best": 1.2}}
    assert tables.evaluation_rows(evaluation) == [
        ("this model", "1.500", ""),
        ("best byte n-gram of order up to 8", "1.200", "25.0 % worse"),
        ("xz -9", "2.000", "25.0 % better"),
    ]


def test_evaluation_without_a_result_says_nothing_of_it() -> None:
    rows = tables.evaluation_rows({"bits_per_byte": None, "baselines": {"xz": 2.0}})
    assert rows == [("this model", "-", ""), ("xz -9", "2.000", "")]


def test_model_rows_add_up() -> None:
    facts = info(preset("smoke"))
    rows = tables.model_rows(facts)
    counts = [int(count.replace(",", "")) for _, count, _ in rows]
    assert sum(counts[:-2]) == counts[-2] == facts["total"]
    assert rows[-1][0] == "used by one token" and counts[-1] == facts["active"]
    assert "Kimi Delta Attention" in [name for name, _, _ in rows]


def test_terminal_tables_show_text_as_it_is() -> None:
    text = io.StringIO()
    console = Console(file=text, width=120)
    console.print(tables.terminal(("part", "found"), [("[bold]a[/]", "1")], "a caption"))
    console.print(tables.model_table("smoke", info(preset("smoke"))))
    assert "[bold]a[/]" in text.getvalue()
    assert "a caption" in text.getvalue()
    assert "A sequence carries" in text.getvalue()


def test_markdown_escapes_what_would_break_a_table() -> None:
    assert tables.markdown(("a", "b"), [("x|y", "*1*")]) == "| a | b |\n| --- | ---: |\n| x\\|y | \\*1\\* |"


@pytest.mark.parametrize(("count", "text"), [(27_648, "27.0 KiB"), (3 * 2**30, "3.0 GiB"), (96, "96 bytes")])
def test_sizes(count: int, text: str) -> None:
    assert tables.size(count) == text
