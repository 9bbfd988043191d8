"""Figures are drawn for files one after the other, whoever asks and however many at once."""

from __future__ import annotations

import threading
import time

import pytest

from trine.views import chart_render
from trine.views.chart import Chart, Line, Mark
from trine.views.chart_render import export

CHARTS = [Chart(f"one-{i}", f"figure {i}", lines=[Line("a", [1, 2, 3], [i, 2, i])]) for i in range(6)]


def test_exports_asked_for_at_once_are_drawn_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, most = [0], [0]
    threads: set[int] = set()
    draw = chart_render.to_matplotlib

    def watched(chart: Chart) -> object:
        busy[0] += 1
        most[0] = max(most[0], busy[0])
        threads.add(threading.get_ident())
        figure = draw(chart)
        time.sleep(0.01)
        busy[0] -= 1
        return figure

    alone = [export(chart, "svg") for chart in CHARTS]
    monkeypatch.setattr(chart_render, "to_matplotlib", watched)
    found: dict[int, bytes] = {}
    asking = [
        threading.Thread(target=lambda i=i: found.__setitem__(i, export(CHARTS[i], "svg")))  # type: ignore[misc]
        for i in range(len(CHARTS))
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert most[0] == 1 and len(threads) == 1  # each thread that ever draws keeps tens of MB
    assert [found[i] for i in range(len(CHARTS))] == alone


def test_what_fails_while_it_is_drawn_fails_for_whoever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Chart) -> object:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(chart_render, "to_matplotlib", fails)
        with pytest.raises(RuntimeError, match="no room"):
            export(CHARTS[0], "png")
    assert export(CHARTS[0], "png").startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="format: found 'pdf'"):
        export(CHARTS[0], "pdf")  # type: ignore[arg-type]


def test_words_at_one_place_stand_on_both_sides_of_it_and_hide_the_curves_behind_them() -> None:
    marks = [Mark(2, "stage 2"), Mark(2, "step 2", moves=True), Mark(1.5, "level", "y")]
    chart = Chart("marks", "Marks", lines=[Line("a", [1, 2, 3], [1, 2, 1])], marks=marks)
    texts = {one.get_text(): one for one in chart_render.to_matplotlib(chart).axes[0].texts}
    assert [texts[name].get_horizontalalignment() for name in ("stage 2", "step 2", "level")] == [
        "left",
        "right",
        "right",
    ]
    for text in texts.values():
        ground = text.get_bbox_patch()
        assert ground is not None and ground.get_facecolor()[:3] == (1.0, 1.0, 1.0)
