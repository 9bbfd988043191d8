"""Figures are drawn for files one after the other, whoever asks and however many at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from matplotlib.text import Text

from trine.views import chart_render
from trine.views.chart import Chart, Line, Mark
from trine.views.chart_render import export

CHARTS = [Chart(f"one-{i}", f"figure {i}", lines=[Line("a", [1, 2, 3], [i, 2, i])]) for i in range(6)]


def test_exports_asked_for_at_once_are_drawn_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, most = [0], [0]
    threads: set[int] = set()
    draw = chart_render.to_matplotlib

    def watched(chart: Chart, **options: Any) -> object:
        busy[0] += 1
        most[0] = max(most[0], busy[0])
        threads.add(threading.get_ident())
        figure = draw(chart, **options)
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
    def fails(_: Chart, **options: Any) -> object:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(chart_render, "to_matplotlib", fails)
        with pytest.raises(RuntimeError, match="no room"):
            export(CHARTS[0], "png")
    assert export(CHARTS[0], "png").startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="format: found 'pdf'"):
        export(CHARTS[0], "pdf")  # type: ignore[arg-type]


def test_words_stand_in_no_others_way_and_where_there_is_no_room_there_are_none() -> None:
    levels = [Mark(at, f"level {at}", "y") for at in (1.803, 1.8, 1.802, 1.801, 1.0)]
    stages = [
        Mark(at, f"stage {i + 2}, rows of 1,024") for i, at in enumerate((50, 92, 95, 95.3, 95.6, 96, 96.3, 96.6))
    ]
    line = Line("a", [0, 100], [1, 3])
    picture = chart_render.to_matplotlib(Chart("words", "Words", lines=[line], marks=[*levels, *stages]))
    picture.draw_without_rendering()
    axes = picture.axes[0]
    texts = {one.get_text(): one for one in axes.texts}
    boxes = [Text.get_window_extent(text) for text in texts.values()]  # without the lines that lead to them
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    heights = [Text.get_window_extent(texts[f"level {at}"]).y0 for at in (1.0, 1.8, 1.801, 1.802, 1.803)]
    assert heights == sorted(heights)
    drawn = [name for name in texts if name.startswith("stage")]
    assert 3 <= len(drawn) < len(stages)
    assert len(axes.lines) == 1 + len(levels) + len(stages)  # the lines themselves are all there


def test_figures_on_one_picture_have_their_own_titles_and_notes_within_it() -> None:
    long = "A note that is longer than a narrow figure is wide. " * 4
    charts = [Chart(f"p-{i}", f"figure {i}", lines=[Line("a", [1, 2], [1, 1000 * i])], notes=[long]) for i in range(3)]
    picture = chart_render.panels([charts[:2], [charts[2]]], of=f"all of them, {'x' * 70} {long}", width=10)
    assert [axes.get_title("left") for axes in picture.axes] == ["figure 0", "figure 1", "figure 2"]
    picture.draw_without_rendering()
    (above,) = picture.texts
    assert above.get_text().count("\n") >= 2
    box = above.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= picture.bbox.x1 and box.y1 <= picture.bbox.y1
    labels = [label.get_text() for label in picture.axes[2].get_yticklabels()]
    assert "2,000" in labels and "500" in labels
    first, second, third = (axes.get_window_extent() for axes in picture.axes)
    assert first.x0 == pytest.approx(third.x0) and second.x1 == pytest.approx(third.x1)
    for axes in picture.axes:
        (note,) = axes.texts
        assert note.get_text().replace("\n", " ") == long.strip()
        box = note.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= picture.bbox.x1 and box.y0 >= 0
    with pytest.raises(ValueError, match=r"rows: found \[1, 0\] figures"):
        chart_render.panels([charts[:1], []])
    with pytest.raises(ValueError, match="need at least one"):
        chart_render.panels([])


def test_words_at_one_place_stand_on_both_sides_of_it_and_hide_the_curves_behind_them() -> None:
    marks = [Mark(2, "stage 2"), Mark(2, "step 2", moves=True), Mark(1.5, "level", "y")]
    chart = Chart("marks", "Marks", lines=[Line("a", [1, 2, 3], [1, 2, 1])], marks=marks)
    texts = {one.get_text(): one for one in chart_render.to_matplotlib(chart).axes[0].texts}
    assert [texts[name].get_horizontalalignment() for name in ("stage 2", "step 2", "level")] == [
        "left",
        "right",
        "left",
    ]
    for text in texts.values():
        ground = text.get_bbox_patch()
        assert ground is not None and ground.get_facecolor()[:3] == (1.0, 1.0, 1.0)
