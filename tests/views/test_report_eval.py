"""The sections an evaluation adds to a report: there when measured, absent when not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trine.views import depth_charts
from trine.views.chart_render import to_csv, to_matplotlib
from trine.views.probe_view import Probe
from trine.views.report_eval import (
    evaluation_figures,
    evaluation_sections,
    guard_rows,
    portrait_charts,
    recall_rows,
    source_rows,
    task_rows,
)


def cell(length: int, depth: float, accuracy: float, gap: float, chance: float = 0.25) -> dict[str, Any]:
    return {
        "length": length,
        "depth": depth,
        "accuracy": accuracy,
        "token_accuracy": accuracy,
        "chance": chance,
        "loss": 1.0,
        "gap": gap,
        "count": 4,
    }


FAMILIES = {
    "passkey": [cell(512, 0.0, 1.0, 4.0, 1 / 90_000), cell(512, 1.0, 0.5, 2.0), cell(2048, 0.5, 0.0, 0.0)],
    "latest": [cell(512, 0.5, 0.25, 0.5)],
}
RECALL = {"length": 256, "pairs": 4, "distance": None, "accuracy": 0.953, "chance": 0.25, "loss": 0.12, "gap": 5.2}
EVENTS = [
    {"kind": "resume"},
    {"kind": "short_guard", "stage": 0, "before": None, "after": 2.0, "change": None, "worse": False,
     "length": 128, "unit": "bits per byte"},
    {"kind": "short_guard", "stage": 1, "before": 2.0, "after": 2.1, "change": 0.05, "worse": True,
     "length": 128, "unit": "bits per byte"},
]  # fmt: skip
EVALUATION = {
    "by_source": {
        "books": {"bits_per_byte": 1.9, "documents": 3, "bytes": 12_000},
        "code": {"bits_per_byte": 1.25, "documents": 40, "bytes": 400_000},
    },
    "by_position": {
        "length": 64,
        "edges": [0, 16, 32, 64],
        "loss": [4.0, 3.5, 3.2],
        "tokens": [9, 9, 9],
        "documents": [3, 3, 2],
        "matched": [None, 4.0, 3.4],
    },
    "tasks": {"families": FAMILIES, "left_out": ["tasks of 4096 tokens: too many"], "tokens": 1, "seconds": 1.0},
    "portrait": {"mix": [], "similarity": {"labels": ["0", "head"], "values": [[1.0, 0.5], [0.5, 1.0]]}},
}


def test_rows() -> None:
    assert source_rows(EVALUATION) == [("books", "1.900", "3", "12,000"), ("code", "1.250", "40", "400,000")]
    assert guard_rows(EVENTS) == [("1", "", "2.0000", ""), ("2", "2.0000", "2.1000", "+5.0 % (worse)")]
    headings, rows = task_rows(FAMILIES)
    assert headings == ("family", "chance", "512 tokens", "2K tokens")
    assert rows == [("passkey", "25.0 %", "75 %, 3.00", "0 %, 0.00"), ("latest", "25.0 %", "25 %, 0.50", "-")]
    far = {**RECALL, "distance": 1_536, "count": 8}
    assert recall_rows([far]) == [("256", "4", "1,536", "95.3 %", "25.0 %", "0.120", "5.20", "8")]


def test_sections_in_order_with_their_pictures() -> None:
    figures = evaluation_figures(EVALUATION, [32, 64])
    assert set(figures) == {"positions", "tasks", "gaps", "similarity"}
    text = "\n\n".join(evaluation_sections(EVALUATION, EVENTS, {name: f"plots/{name}.png" for name in figures}))
    order = ["## By source", "## The short context after each stage", "## Loss by position", "## Tasks", "## Inside"]
    assert [text.index(heading) for heading in order] == sorted(text.index(heading) for heading in order)
    for name in figures:
        assert f"(plots/{name}.png)" in text
    assert "- not measured: tasks of 4096 tokens: too many" in text
    assert "128 tokens of context, bits per byte" in text


def test_nothing_measured_gives_nothing() -> None:
    assert evaluation_sections({}, [], {}) == []
    assert evaluation_figures({}, [64]) == {}
    one = {"by_source": {"code": EVALUATION["by_source"]["code"]}}  # type: ignore[index]
    assert evaluation_sections(one, [], {}) == []


def test_recall_has_its_own_section() -> None:
    found = {"recall": [{**RECALL, "count": 256}, {**RECALL, "distance": 200, "count": 64}]}
    (text,) = evaluation_sections(found, [], {"recall": "plots/recall.png"})
    assert "| 256 | 4 | any | 95.3 % | 25.0 % | 0.120 | 5.20 | 256 |" in text and "plots/recall.png" in text
    assert set(evaluation_figures(found, [64])) == {"recall"}


def test_the_look_inside_is_the_dashboards(looked: Callable[..., dict[str, Any]]) -> None:
    line = looked(4)
    depth, layers = line["depth"], line["layers"]
    mix = [{"label": site, "weights": row} for site, row in zip(depth["sites"], depth["weights"], strict=True)]
    portrait = {"mix": mix, "similarity": {"labels": layers["labels"], "values": layers["cka"]}}
    found = portrait_charts({"portrait": portrait})
    probe = Probe.of(line)
    page = {"depth_mix": depth_charts.mix_weights(probe), "similarity": depth_charts.similarity(probe)}
    assert list(found) == list(page)
    for name, chart in found.items():
        assert (to_csv(chart), chart.title, chart.x, chart.y) == (
            to_csv(page[name]), page[name].title, page[name].x, page[name].y
        )  # fmt: skip
        assert chart.notes == page[name].notes[1:]  # all but when it was seen
    written = [text.get_text() for text in to_matplotlib(found["depth_mix"]).axes[0].texts]
    assert written == [f"{weight:.2g}" for row in depth["weights"] for weight in row]


@pytest.mark.parametrize(
    "portrait",
    [None, {}, {"mix": [], "similarity": None}, {"similarity": {"labels": ["0", "head"], "values": [[1.0, 0.5]]}}],
)
def test_without_a_look_inside_there_is_no_picture_of_it(portrait: Any) -> None:
    assert portrait_charts({"portrait": portrait}) == {}
