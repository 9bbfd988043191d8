from __future__ import annotations

import base64
import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trine.views import chart_render, heatmap
from trine.views.chart import Axis, Band, Bars, Chart, Heatmap, Line, Mark, nothing, plain
from trine.views.plotly_charts import to_plotly

NASTY = "<script>alert('$x_{1}$')</script>\u202e\x00\x1b[31m"


def curve(**options: object) -> Chart:
    return Chart(
        "loss",
        "Loss",
        Axis("step", whole=True),
        Axis("loss", "nats"),
        lines=(Line("a run", [1, 2, 3], [3.0, math.nan, 1.0]), Line("=SUM(A1)", [1], [2.0], "red", points=True)),
        bands=(Band("spread", [1, 3], [0.5, 0.75], [2.5, 1.5], "green"),),
        bars=(Bars("count", [1, 2], [4.0, 5.0], width=0.5),),
        marks=(Mark(2, "stage"), Mark(1.5, "floor", "y")),
        notes=("How to read it.",),
        **options,  # type: ignore[arg-type]
    )


def picture(rows: int = 3, columns: int = 4) -> Chart:
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    values[:1, 1:2] = np.nan
    return Chart("heat", "Heat", Axis("expert"), Axis("layer", down=True), heatmap=Heatmap(values, "load", 1.0, 8.0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Line("a", [1, 2], [1.0]), "line a: found 2 x, 1 y"),
        (lambda: Line("a", [1], ["b"]), "values that are no numbers"),
        (lambda: Line("a", [[1]], [[1]]), "found 2 dimensions, need 1"),
        (lambda: Band("b", [1], [1, 2], [1]), "band b: found 1 x, 2 low, 1 high"),
        (lambda: Mark(math.inf, "m"), "mark m: found inf"),
        (lambda: Heatmap([1.0], "h", 0, 1), "found 1 dimensions, need 2"),
        (lambda: Heatmap([[1.0]], "h", 1, 1), "found 1 to 1"),
        (lambda: Heatmap([[1.0]], "h", 0, 1, log2=True), "above 0 with log2"),
        (lambda: Chart("a b", "t"), "found key 'a b'"),
        (lambda: Chart("../up", "t"), "need letters, digits"),
    ],
)
def test_what_is_no_figure_is_refused_by_name(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


def test_plain_text_has_one_line_and_no_control_characters() -> None:
    assert plain("a\n\tb\x00c\u202ed\x1b[31m") == "a b c d [31m"
    assert plain("x" * 500) == "x" * 399 + "…"
    assert plain(None) == "None"


def test_shades_follow_values_and_leave_the_unknown_blank() -> None:
    found = heatmap.shades(Heatmap([[0.25, 1.0, 4.0], [0.0, 99.0, math.nan]], "load", 0.25, 4.0, log2=True))
    assert found.tolist() == [[0, 127, 254], [0, 254, 255]]
    flat = heatmap.shades(Heatmap([[-1.0, 0.0, 1.0, math.inf]], "bias", -1.0, 1.0))
    assert flat.tolist() == [[0, 127, 254, 255]]


@pytest.mark.parametrize("name", ["balance", "signed", "amount"])
def test_palettes_have_a_shade_for_every_byte(name: str) -> None:
    colours = heatmap.palette(name)  # type: ignore[arg-type]
    assert colours.shape == (256, 3) and colours.dtype == np.uint8
    assert len({tuple(one) for one in colours.tolist()}) > 200
    with pytest.raises(ValueError, match="found 'none'"):
        heatmap.palette("none")  # type: ignore[arg-type]


def test_the_picture_of_k3_is_one_small_png_of_a_pixel_a_cell() -> None:
    values = np.random.default_rng(0).gamma(9.0, 1 / 9, (92, 896)).astype(np.float32)
    values[7, 13] = 0.0
    data = heatmap.png(Heatmap(values, "load", 0.25, 4.0, log2=True, palette="balance"))
    image = Image.open(io.BytesIO(data))
    assert image.size == (896, 92) and len(data) < 110_000
    assert image.convert("RGB").getpixel((13, 7)) == tuple(heatmap.palette("balance")[0])


def test_plotly_gets_json_with_gaps_and_escaped_words() -> None:
    chart = Chart("k", NASTY, Axis(NASTY), lines=(Line(NASTY, [1, 2], [math.inf, 2.0]),), marks=(Mark(1, NASTY),))
    text = json.dumps(to_plotly(chart), allow_nan=False)
    assert "<script>" not in text and "&lt;script&gt;" in text and "\\u202e" not in text
    assert to_plotly(chart)["data"][0]["y"] == [None, 2.0]
    dark = to_plotly(curve(), dark=True)
    assert [one["type"] for one in dark["data"]] == ["scatter", "scatter", "bar", "scatter", "scatter"]
    assert dark["data"][1]["fill"] == "tonexty" and dark["data"][-1]["mode"] == "markers"
    assert [one["x0"] for one in dark["layout"]["shapes"]] == [2.0, 0]


def test_plotly_places_marks_of_logarithmic_axes() -> None:
    chart = Chart(
        "k", "t", y=Axis("loss", log=True, low=0.1, high=100), marks=(Mark(10, "ten", "y"), Mark(-1, "", "y"))
    )
    layout = to_plotly(chart)["layout"]
    assert layout["yaxis"]["range"] == [-1.0, 2.0]
    assert [one["y0"] for one in layout["shapes"]] == [10.0] and layout["annotations"][0]["y"] == 1.0


def test_plotly_gets_long_curves_as_bytes_without_rounding_steps() -> None:
    steps = np.arange(100, dtype=np.float64) + 2.0**30 + 1
    values = np.linspace(0, 1, 100)
    values[7] = math.nan
    found = to_plotly(Chart("k", "t", lines=(Line("a", steps, values), Line("b", steps[:63], values[:63]))))["data"]

    def numbers(column: dict[str, str]) -> Any:
        return np.frombuffer(base64.b64decode(column["bdata"]), dtype=f"<{column['dtype']}")

    assert found[0]["x"]["dtype"] == "f8" and numbers(found[0]["x"]).tolist() == steps.tolist()
    assert found[0]["y"]["dtype"] == "f4"
    np.testing.assert_allclose(numbers(found[0]["y"]), values, rtol=1e-7)
    assert len(found[1]["x"]) == 63 and found[1]["y"][7] is None
    assert to_plotly(Chart("k", "t", lines=(Line("a", [1e300] * 64, values[:64]),)))["data"][0]["x"]["dtype"] == "f8"


def test_an_axis_that_is_open_at_one_end_grows_with_the_data() -> None:
    layout = to_plotly(Chart("k", "t", y=Axis("count", low=0.0), lines=(Line("a", [1, 2], [1.0, 2.0]),)))["layout"]
    assert layout["yaxis"]["range"] == [0.0, None] and "uirevision" not in layout
    assert layout["legend"]["uirevision"] == "k"


@pytest.mark.parametrize("least", [1.0, 8.5, 0.03])
@pytest.mark.parametrize("times", [1.0, 7.0, 10.0, 50.0])
def test_a_logarithmic_axis_has_two_numbers_at_least(least: float, times: float) -> None:
    def axis(*values: float) -> Any:
        chart = Chart("k", "t", y=Axis("n", log=True), lines=(Line("a", range(len(values)), values),))
        return to_plotly(chart)["layout"]["yaxis"]

    found = axis(least, least * times)
    low, high = (least / 10, least * 10) if times == 1 else (least, least * times)  # plotly.js shows so much of a value
    texts = [text for at, text in zip(found["tickvals"], found["ticktext"], strict=True) if low <= at <= high]
    assert len(texts) >= 2 and len(set(texts)) == len(texts)
    assert "1,000" in axis(900)["ticktext"] and axis(least, least * 200)["dtick"] == 1
    assert "tickvals" not in axis(3, 4)  # plotly.js marks even steps where there is less than a power of ten


@pytest.mark.parametrize("axis", ["x", "y"])
def test_whole_numbers_are_never_marked_between(axis: str) -> None:
    def marks(*numbers: float, **options: Any) -> Any:
        on = {axis: Axis("n", whole=True, **options)}
        return to_plotly(Chart("k", "t", lines=(Line("a", numbers, numbers),), **on))["layout"][f"{axis}axis"]

    for few in (marks(7), marks(0, 1), marks(1001, 1011), marks(0, 1, low=-0.5, high=5.5), marks(low=0.0, high=1.0)):
        assert (few["dtick"], few["tick0"], few["tickformat"]) == (1, 0, ",d")
    assert "dtick" not in marks(0, 11) and "dtick" not in marks(0, 1, low=0, high=895.5)
    heat = Chart("k", "t", y=Axis("head", whole=True), heatmap=Heatmap(np.ones((4, 30)), "x", 0, 1))
    assert to_plotly(heat)["layout"]["yaxis"]["dtick"] == 1


def test_ends_that_nothing_passes_do_not_say_so() -> None:
    found = [
        [text for _, text in heatmap.scale_ticks(Heatmap([[0.5]], "x", 0, 1, beyond=ends), 3)]
        for ends in ((True, True), (False, True), (False, False))
    ]
    assert found == [["≤ 0", "0.5", "≥ 1"], ["0", "0.5", "≥ 1"], ["0", "0.5", "1"]]


def test_quotation_marks_are_no_markup_to_plotly() -> None:
    layout = to_plotly(Chart("k", "t", Axis('the "x"'), marks=(Mark(1, "it's <b>"),), lines=(Line("a", [1], [1]),)))
    assert layout["layout"]["xaxis"]["title"]["text"] == 'the "x"'
    assert layout["layout"]["annotations"][0]["text"] == "it's &lt;b&gt;"


def test_the_step_that_is_looked_at_is_left_to_the_page() -> None:
    marks = (Mark(3, "stage"), Mark(5, "step 5", moves=True))
    assert [one["x0"] for one in to_plotly(Chart("k", "t", marks=marks))["layout"]["shapes"]] == [3.0]
    assert len(chart_render.to_matplotlib(Chart("k", "t", Axis("s"), marks=marks)).axes[0].lines) == 2


def test_small_heatmaps_tell_values_and_large_ones_are_one_image() -> None:
    small = to_plotly(picture())
    assert small["data"][0]["type"] == "heatmap" and small["data"][0]["text"][0] == ["0", "none", "2", "3"]
    assert small["data"][0]["z"][0][1] is None
    large = to_plotly(picture(92, 896))
    assert large["data"][0]["type"] == "image" and large["data"][0]["source"].startswith("data:image/png;base64,")
    assert large["layout"]["yaxis"]["scaleanchor"] is False and len(json.dumps(large)) < 150_000


def test_an_empty_figure_says_why() -> None:
    chart = nothing("k", "Title", "There is <b>nothing</b>.")
    found = to_plotly(chart)
    assert found["data"] == [] and "&lt;b&gt;nothing" in found["layout"]["annotations"][0]["text"]
    assert chart.description == "Title. There is <b>nothing</b>."


def test_descriptions_name_what_is_drawn() -> None:
    assert curve().description == (
        "Loss. loss (nats) upwards, step to the right. Shows spread, count, a run, =SUM(A1). How to read it."
    )
    assert picture().description.startswith("Heat. 3 rows by 4 columns of load.")


def test_csv_is_long_and_safe_to_open() -> None:
    rows = list(csv.reader(io.StringIO(chart_render.to_csv(curve()))))
    assert rows[0] == ["series", "step", "loss (nats)", "low", "high"]
    assert rows[1:4] == [["a run", "1", "3", "", ""], ["a run", "2", "", "", ""], ["a run", "3", "1", "", ""]]
    assert ["'=SUM(A1)", "1", "2", "", ""] in rows and ["spread", "3", "", "0.75", "1.5"] in rows
    table = list(csv.reader(io.StringIO(chart_render.to_csv(picture()))))
    assert table[0] == ["layer \\ expert", "0", "1", "2", "3"] and table[1] == ["0", "0", "", "2", "3"]


def test_exports_are_what_they_say(tmp_path: Path) -> None:
    chart = Chart("k", NASTY, Axis(NASTY), lines=(Line(NASTY, [1, 2], [1.0, 2.0]),), notes=(NASTY,))
    assert Image.open(io.BytesIO(chart_render.export(chart, "png"))).size[0] > 500
    svg = chart_render.export(chart, "svg")
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg") and not [one for one in root.iter() if one.tag.endswith("script")]
    assert svg == chart_render.export(chart, "svg")  # no date, no random names
    assert ET.fromstring(chart_render.export(picture(), "svg")).tag.endswith("svg")
    with pytest.raises(ValueError, match="found 'pdf'"):
        chart_render.export(chart, "pdf")  # type: ignore[arg-type]
    path = chart_render.write_chart(curve(), tmp_path / "loss.csv")
    assert path.read_text().startswith("series,step")
    with pytest.raises(ValueError, match="found the ending 'gif'"):
        chart_render.write_chart(chart, tmp_path / "a.gif")
    assert [one.name for one in tmp_path.iterdir()] == ["loss.csv"]


@pytest.mark.parametrize("chart", [curve(), picture(), nothing("k", "t", "why"), picture(0, 5), picture(1, 1)])
def test_every_kind_of_figure_is_drawn_by_every_renderer(chart: Chart) -> None:
    assert chart_render.to_matplotlib(chart).axes
    json.dumps(to_plotly(chart), allow_nan=False)
    assert chart_render.to_csv(chart)
