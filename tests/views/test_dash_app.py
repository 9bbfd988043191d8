from __future__ import annotations

import json
import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dash_page import HOSTILE, SIZE, get, having, parts, shown

from trine import _dash_verb
from trine.balance.record_format import MARGIN_LEVELS
from trine.train.errors import RunError
from trine.views import balance_charts, dash_answer, dash_app, dash_guard
from trine.views.balance_data import KEPT, History, Layers
from trine.views.chart import Chart
from trine.views.dash_axes import share_axes
from trine.views.dash_state import PAGES, Runs, View
from trine.views.demo import DemoSize, write_demo


@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows_its_figures_at_once(run: Path, page: str) -> None:
    text = shown(run, page=page)
    found = json.loads(text)
    assert found["heading"] == f"{PAGES[page]}: good" and found["steps"] == [60]
    # numbers in the model, whose first layer is dense; on the page about gates also that one
    numbers = {"balance": [1, 2, 3], "gates": [0, 1, 2, 3]}.get(page, [])
    assert found["layers"] == [[one, f"layer {one}"] for one in numbers]
    assert len(found["figures"]) >= (8 if page == "balance" else 1)
    assert all("plot" in part for part in parts(found).values()) and "Traceback" not in text


def test_the_page_itself_has_controls_and_no_figures(run: Path) -> None:
    client = dash_app.build([run]).server.test_client()
    text = client.get("/_dash-layout", base_url="http://127.0.0.1").text
    assert '"label":"layer 2"' not in text and '"max":60' in text and '"label":"good"' in text
    assert "Load of every expert" not in text
    calls = client.get("/_dash-dependencies", base_url="http://127.0.0.1").get_json()
    assert all(one["clientside_function"] for one in calls)  # none of them asks the server


def test_balance_shows_everything_the_page_promises(run: Path) -> None:
    text = shown(run)
    for title in (
        *("Load of every expert, step 60", "Percentiles of load over steps", "MaxVio over steps", "Dead experts"),
        *("Bias over steps", "Required bias by layer", "Load of 4 ranks", "Alerts", "Widest bias range"),
    ):
        assert title in text, title
    assert "P95 by chance" in text and "nothing in it was measured" in text


def test_two_runs_stand_side_by_side_on_one_axis(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_demo(other, SIZE, "other", "none")
    found = json.loads(shown(run, other))
    ranges = [[part["plot"]["layout"]["yaxis"].get("range") for part in figure] for figure in found["figures"]]
    assert {len(one) for one in ranges} == {2} and found["heading"] == "Balance: good beside other"
    dead = parts(found)["dead-0"], parts(found)["dead-1"]
    assert [one["who"] for one in dead] == ["good", "other"]
    assert dead[0]["plot"]["layout"]["yaxis"]["range"] == dead[1]["plot"]["layout"]["yaxis"]["range"] is not None
    assert [one["title"] for one in found["tables"]] == ["Alerts of good", "Alerts of other"]


def test_two_runs_share_a_logarithmic_axis_too(run: Path) -> None:
    other = run.parent / "other"
    shutil.copytree(run, other)
    for folder, norms in ((run, (0.5, 2.0, 0.0)), (other, (1.0, 300.0, 30.0))):  # of 0 the axis is a linear one
        records = [{"step": i + 1, "loss": 1.0, "grad_norm": norm} for i, norm in enumerate(norms)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    found = parts(json.loads(shown(run, other, page="training")))
    first, second = (found[f"training-gradient-{i}"]["plot"]["layout"]["yaxis"] for i in (0, 1))
    assert first == second and first["type"] == "log"
    assert first["range"][0] < math.log10(0.5) and first["range"][1] > math.log10(300)
    assert found["training-gradient-0"]["plot"]["data"][0]["y"] == [0.5, 2.0, 0.5]
    assert "Below 0.5 is drawn at 0.5." in found["training-gradient-0"]["notes"]


def test_two_runs_of_other_lengths_share_their_steps(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_demo(other, replace(SIZE, steps=25), "other", "none")
    for page, key in (("balance", "max-vio"), ("training", "training-loss")):
        found = parts(json.loads(shown(run, other, page=page)))
        first, second = (found[f"{key}-{i}"]["plot"]["layout"]["xaxis"]["range"] for i in (0, 1))
        assert first == second and first[0] < 10 and first[1] > 60
        assert [found[f"{key}-{i}"]["over"][1] for i in (0, 1)] == [60, 25]  # the page's line stays on the data


def load(key: str, high: float) -> Chart:
    """A figure of the load over steps whose last value is ``high``, as `balance_charts` draws it."""
    figures = np.ones((4, len(KEPT), 1), dtype=np.float32)
    history = History(np.arange(1, 5), figures)
    history.of("tokens")[:] = 400.0
    history.of("p1")[:] = 0.0
    history.of("max_vio")[:] = 0.2
    history.of("p99")[-1] = history.of("max_vio")[-1] = high
    draw = {"percentiles": balance_charts.percentile_chart, "max-vio": balance_charts.max_vio_chart}[key]
    return draw(history, None, 1, 4)


@pytest.mark.parametrize("key", ["percentiles", "max-vio"])
def test_a_logarithmic_and_a_linear_figure_of_the_load_share_their_axis(key: str) -> None:
    even, wild = load(key, 1.5), load(key, 40.0)
    assert (even.y.log, wild.y.log) == (False, True)
    for pair in ((even, wild), (wild, even)):
        shared = share_axes(pair)
        assert shared[0].y == shared[1].y and shared[0].y.log and shared[0].x == shared[1].x
        low, high = shared[0].y.low, shared[0].y.high
        assert low is not None and high is not None and 0 < low < 0.2 and high > 40
    linear = share_axes([even, wild])[0]
    if key == "percentiles":  # P1 is 0, which no logarithmic axis has
        assert np.asarray(linear.bands[0].low).tolist() == [0.05] * 4
        assert linear.y.ticks == wild.y.ticks and linear.notes[-1] == "Below 0.05 is drawn at 0.05."
    else:
        assert linear.lines[0].y is even.lines[0].y and linear.notes == even.notes


def test_a_step_sends_the_figures_of_that_step_only(run: Path) -> None:
    client = dash_app.build([run]).server.test_client()
    first = get(client).get_json()
    moved = get(client, step=50, moved="", **having(first)).get_json()
    assert set(parts(moved)) == {"heat-0", "layer-0", "required-0", "ranks-0"} and moved["steps"] == [50]
    assert not moved["whole"] and moved["tables"] is None and "plot" in parts(moved)["layer-0"]
    assert parts(moved)["layer-0"]["title"] == "Load by layer, step 50"
    again = get(client, step=50, moved="", **having(first) | {"have": having(moved)["have"]}).get_json()
    assert all("plot" not in part and "picture" not in part for part in parts(again).values())
    # on a page whose figures run over steps, the page moves its line by itself
    training = get(client, page="training").get_json()
    later = get(client, page="training", step=20, **having(training)).get_json()
    assert len(parts(later)) == 5 and all("plot" not in part and part["over"] for part in parts(later).values())


def test_of_a_large_picture_a_step_sends_the_pixels_only(tmp_path: Path) -> None:
    size = DemoSize(layers=60, experts=256, top_k=4, steps=4, tokens=4096, ranks=1)
    write_demo(tmp_path / "large", size, "large", "none")
    client = dash_app.build([tmp_path / "large"]).server.test_client()
    first = get(client, what="bias", step=3).get_json()
    heat = parts(first)["heat-0"]
    assert heat["cells"] == [60, 256, 1] and "source" not in heat["plot"]["data"][0]
    for step, parted in ((3, False), (4, True)):
        found = parts(get(client, what="load", step=step, **having(first)).get_json())["heat-0"]
        assert found["picture"].startswith("data:image/png;base64,") and found["picture"] != heat["picture"]
        first["figures"][0] = [found]
        assert ("plot" not in found) == parted


def test_a_look_finds_nothing_until_there_is_something(run: Path) -> None:
    client = dash_app.build([run]).server.test_client()
    first = get(client).get_json()
    assert get(client, look="", **having(first)).status_code == 204
    with open(run / "events.jsonl", "a") as file:
        event = {"kind": "balance_alert", "step": 60, "rule": "max_vio", "begins": True, "text": "It is uneven."}
        file.write(json.dumps(event) + "\n")
    found = get(client, look="", **having(first)).get_json()
    assert found["tables"][0]["rows"][0] == ["60", "max_vio", "begins, still on", "It is uneven.", "on"]
    assert all("plot" not in part for part in parts(found).values())  # none of them shows it
    shutil.copytree(run, run.parent / "later")
    more = dash_app.build([run.parent]).server.test_client()
    known = get(more).get_json()
    assert "runs" not in known
    fewer = get(more, **having(known) | {"known": "another"}).get_json()
    assert sorted(one["label"] for one in fewer["runs"]) == ["good", "later"]


def test_a_run_that_is_gone_is_marked_in_the_list(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dash_app, "_NEW_RUNS", -1.0)
    shutil.copytree(run, run.parent / "later")
    client = dash_app.build([run.parent]).server.test_client()
    first = get(client).get_json()
    assert get(client, look="", **having(first)).status_code == 204
    (run.parent / "later").rename(run.parent.parent / "elsewhere")
    found = get(client, look="", **having(first)).get_json()
    assert sorted(one["label"] for one in found["runs"]) == ["good", "later (gone)"]
    assert get(client, look="", **having(found)).status_code == 204
    shutil.rmtree(run.parent)  # nothing is added for a folder of runs that is no more
    after = get(client, look="", **having(found)).get_json()
    assert sorted(one["label"] for one in after["runs"]) == ["good (gone)", "later (gone)"]


def test_an_alert_that_is_on_comes_before_any_number_of_others(run: Path) -> None:
    with open(run / "events.jsonl", "w") as file:
        lines = [(2, "dead", True)] + [(step, "p95", step % 2 == 1) for step in range(61, 221)]
        for step, rule, begins in lines:
            event = {"kind": "balance_alert", "step": step, "rule": rule, "begins": begins, "text": rule}
            file.write(json.dumps(event) + "\n")
    rows = json.loads(shown(run))["tables"][0]["rows"]
    assert rows[0] == ["2", "dead", "begins, still on", "dead", "on"] and len(rows) == 100
    assert [row[0] for row in rows[1:4]] == ["220", "219", "218"]


def test_metrics_find_a_run_that_began_after_the_server(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dash_app, "_NEW_RUNS", -1.0)
    for i in range(21):
        (run.parent / f"old-{i}").mkdir()
        (run.parent / f"old-{i}" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
        os.utime(run.parent / f"old-{i}" / "metrics.jsonl", (1_000_000, 1_000_000))
    client = dash_app.build([run.parent]).server.test_client()
    (run.parent / "begun").mkdir()
    (run.parent / "begun" / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    text = client.get("/metrics", base_url="http://127.0.0.1").text  # with no page open
    assert 'trine_train_step{run="begun"} 7.0' in text and text.count("trine_run_readable{") == 20


def test_a_page_beside_other_work_is_told_to_look_less_often(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = dash_app.build([run], busy=lambda: True).server.test_client()
    assert get(client).get_json()["busy"] is True
    ticks = iter([(100, 1000), (100, 1001), (110, 10_000), (9000, 20_000), (0, 0)])
    monkeypatch.setattr(dash_answer, "_processor_time", lambda: next(ticks))
    machine = dash_answer.Machine()
    # too short to say, all cores at work, most of them idle, a machine that does not say
    assert [machine.busy() for _ in range(4)] == [False, True, False, False]


def test_what_is_chosen_is_shown_and_nonsense_is_not(run: Path) -> None:
    found = shown(run, layer=1, what="bias", theme="dark")
    assert "Load of every expert" not in found and "Bias of the experts of layer 1" in found
    assert "Saturated scores of every layer" in shown(run, what="saturation")
    nonsense: tuple[dict[str, Any], ...] = (
        {"step": "x", "layer": "[]", "ranks": "{}", "what": 7, "runs": "x,,9,-1", "have": ":,:::,a", "known": HOSTILE},
        {"step": -1, "layer": 99, "ranks": 7, "expert": 1 << 70, "page": "../..", "theme": HOSTILE, "seen": HOSTILE},
    )
    for words in nonsense:
        assert len(json.loads(shown(run, **{"page": "balance"} | words))["figures"]) == 8


def test_a_cell_of_the_picture_is_told_in_words(run: Path) -> None:
    client = dash_app.build([run]).server.test_client()

    def cell(**words: Any) -> str:
        return str(client.get("/cell", query_string={"runs": 0, **words}, base_url="http://127.0.0.1").text)

    reader = Runs([run]).data(0)
    frame = reader.frame(55)
    assert frame is not None
    load, mean = frame.loads_LE[2, 7], frame.loads_LE[2].mean()
    bias = f"bias {frame.bias_LE[2, 7]:.4g}."
    want = f"Layer 3, expert 7: load {load / mean:.3g} times the layer's mean ({load:,.4g} tokens), {bias}"
    assert cell(step=55, row=2, column=7) == want
    most = int(np.argsort(frame.loads_LE[1], kind="stable")[15])
    assert f"Layer 2, expert {most} (16 of 16 from the least)" in cell(step=55, row=1, column=15, order="value")
    assert "of the scores saturated" in cell(what="saturation", row=2, column=0)
    for words in ({"row": 3, "column": 0}, {"row": 0, "column": 16}, {"row": "x"}, {"what": "saturation", "row": 3}):
        assert cell(**{"column": 0, **words}) == ""


def test_training_lists_what_happened(run: Path) -> None:
    with open(run / "events.jsonl", "a") as file:
        for event in (
            {"kind": "non_finite", "step": 31, "time": "2026-01-01T00:00:00Z", "tensor": HOSTILE},
            {"kind": "rollback", "step": 31, "to_step": 20, "checkpoint": "step-20"},
            {"kind": "balance_alert", "step": 40, "rule": "dead", "begins": True, "text": "A dead expert."},
        ):
            file.write(json.dumps(event) + "\n")
    events, alerts = json.loads(shown(run, page="training"))["tables"]
    assert events["title"] == "Events" and events["columns"] == ["Step", "Event", "Time", "What"]
    assert events["rows"][0] == ["31", "rollback", "", "Back from step 31 to step 20 (step-20).", "on"]
    text = f"The update was not applied: {HOSTILE} is not finite."
    assert events["rows"][1] == ["31", "not finite", "2026-01-01T00:00:00Z", text, "on"]
    assert any(row[1] == "stage" for row in events["rows"])
    assert ["40", "dead", "begins, still on", "A dead expert.", "on"] in alerts["rows"]


def test_layers_are_called_by_their_numbers_in_the_model(run: Path) -> None:
    meta = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**meta, "model": {**meta["model"], "layers": 40, "dense_layers": 37}}))
    with open(run / "events.jsonl", "w") as file:
        for text, layers in (
            ("it: 4 in layers 0, 2, above 1", [0, 2]), ("it: 4 in layer 1 and 3 more, above 1", [1]),
            ("in layer 1, of another kind", [0]), ("it: 4 in layer 1, above 1", None),
        ):  # fmt: skip
            event = {"kind": "balance_alert", "step": 9, "rule": "x", "begins": True, "text": text, "layers": layers}
            file.write(json.dumps(event) + "\n")
    client = dash_app.build([run]).server.test_client()
    found = get(client, layer=38).get_json()
    figures = parts(found)
    assert found["layers"] == [[one, f"layer {one}"] for one in (37, 38, 39)]
    for key in ("layer", "percentiles", "max-vio", "dead", "bias", "required", "ranks"):
        assert "layer 38" in figures[f"{key}-0"]["title"], key
    heat = figures["heat-0"]["plot"]
    assert heat["data"][0]["y0"] == 37 and heat["layout"]["yaxis"]["range"] == [39.5, 36.5]
    assert heat["layout"]["yaxis"]["title"]["text"] == "layer" and figures["heat-0"]["cells"] == [3, 16, 37]
    everything = parts(get(client).get_json())
    for key in ("layer", "required", "ranks"):
        assert everything[f"{key}-0"]["plot"]["layout"]["xaxis"]["title"]["text"] == "layer", key
        assert everything[f"{key}-0"]["plot"]["data"][0]["x"] == [37, 38, 39], key
    assert parts(get(client, what="saturation").get_json())["heat-0"]["plot"]["data"][0]["y0"] == 37
    words = {"runs": 0, "row": 2, "column": 0}
    assert client.get("/cell", query_string=words, base_url="http://127.0.0.1").text.startswith("Layer 39, expert 0: ")
    assert sorted(row[3] for row in found["tables"][0]["rows"]) == [
        "in layer 1, of another kind",
        "it: 4 in layer 1, above 1",
        "it: 4 in layer 38 and 3 more, above 1",
        "it: 4 in layers 37, 39, above 1",
    ]
    served = client.get("/metrics", base_url="http://127.0.0.1").text
    assert 'trine_load_ratio{layer="39",quantile="0.5",run="good"}' in served
    for other in (1, 36, 40):  # no such layer: all of them
        assert "all layers" in parts(get(client, layer=other).get_json())["dead-0"]["title"]
    # a run that does not tell which layers have experts: they are counted, and said to be
    (run / "run.json").write_text(json.dumps({**meta, "model": {}}))
    counted = get(client, layer=1).get_json()
    assert counted["layers"][0] == [0, "MoE layer 0"] and "MoE layer 1" in parts(counted)["dead-0"]["title"]


def test_the_layer_chosen_is_that_of_the_gates_too(run: Path) -> None:
    found = parts(json.loads(shown(run, page="gates", layer=0)))  # the dense one
    assert found["gates-decay-0"]["title"] == "Log-decay of the heads of layer 0"
    client = dash_app.build([run]).server.test_client()
    query = found["gates-decay-0"]["query"]
    saved = client.get(f"/export/gates-decay.csv?{query}", base_url="http://127.0.0.1")
    assert saved.status_code == 200 and "98 % of the gates" in saved.text


def test_without_a_layer_required_bias_has_its_cutoff(run: Path) -> None:
    frame = Runs([run]).data(0).frame(60)
    assert frame is not None
    chart = balance_charts.required_chart(frame, None, 2, Layers(1, "layer"))
    (cut,) = [line for line in chart.lines if line.name == "cutoff: 12.5 % of tokens"]
    want = [np.interp(0.125, MARGIN_LEVELS, edges) for edges in frame.margins_LQ]
    np.testing.assert_allclose(cut.y, want, rtol=1e-6)
    assert np.asarray(cut.x).tolist() == [1, 2, 3] and "Choose a layer to see its histogram." in chart.notes
    frame.margins_LQ[1] = np.nan
    frame.margins_LQ[2, 0] = 9.0  # not rising: no quantiles
    bad = balance_charts.required_chart(frame, None, 2, Layers(1, "layer")).lines[1]
    assert np.isfinite(bad.y).tolist() == [True, False, False]


def test_figures_and_their_data_are_saved(run: Path) -> None:
    client = dash_app.build([run]).server.test_client()

    def get(path: str) -> Any:
        return client.get(path, base_url="http://127.0.0.1")

    png = get("/export/max-vio.png?page=balance&runs=0")
    assert png.status_code == 200 and png.data[:4] == b"\x89PNG" and png.content_type == "image/png"
    svg = get("/export/heat.svg?page=balance&runs=0&step=50&what=bias&order=value")
    assert b"<svg" in svg.data and 'filename="good-heat-step-50.svg"' in svg.headers["Content-Disposition"]
    table = get("/export/heat.csv?page=balance&runs=0&step=60").text.splitlines()
    assert len(table) == 1 + SIZE.layers and len(table[1].split(",")) == 1 + SIZE.experts
    losses = get("/export/training-loss.csv?page=training&runs=0").text.splitlines()
    assert losses[0].startswith("series,") and len(losses) > 2 * SIZE.steps
    for bad in ("max-vio.png?runs=1", "max-vio.png?runs=-1", "none.png?runs=0", "max-vio.pdf?runs=0",
                "max-vio.png?runs=0&page=etc", "max-vio.png"):  # fmt: skip
        found = get(f"/export/{bad}")
        assert found.status_code == 404 and "<p>" in found.text and "root:" not in found.text
    assert get("/metrics").status_code == 200
    inside = (run / "run.json").read_text()
    for path in (
        "/assets/../../etc/passwd",
        "/export/..%2f..%2fetc%2fpasswd.png?runs=0",
        "/good/run.json",
        "/run.json",
    ):
        found = get(path)  # any other address is the page itself, or there is none
        assert found.status_code == 404 or "_dash-renderer" in found.text
        assert "root:" not in found.text and inside not in found.text


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_is_saved_in_every_kind(run: Path, page: str) -> None:
    runs = Runs([run])
    client = dash_app.build([run]).server.test_client()
    shut = {chart.key: chart.empty for chart in runs.charts(page, 0, View()) if chart.empty}
    assert not shut
    for chart in runs.charts(page, 0, View()):
        for kind, begins in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("csv", b"")):
            path = f"/export/{chart.key}.{kind}?page={page}&runs=0"
            saved = client.get(path, base_url="http://127.0.0.1")
            assert saved.status_code == 200 and saved.data.startswith(begins), path
            assert len(saved.data) > (3000 if kind != "csv" else 60), path
            assert kind != "csv" or len(saved.text.splitlines()) > 2


def test_saved_files_say_of_which_run_they_are(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / 'my "run" <1> é')
    client = dash_app.build([tmp_path]).server.test_client()
    kept = {}
    for kind in ("svg", "csv"):
        found = client.get(f"/export/dead.{kind}?page=balance&runs=0&step=19", base_url="http://127.0.0.1")
        assert found.headers["Content-Disposition"] == f'attachment; filename="my-run-1-dead-step-19.{kind}"'
        kept[kind] = found.text
    assert 'my "run" &lt;1&gt; é' in kept["svg"] and kept["csv"].startswith("series,steps,")


def test_off_the_balance_page_the_losses_may_be_further_than_the_recorder(run: Path) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 65, "loss": 1.0}\n')
    last = {page: json.loads(shown(run, page=page)) for page in PAGES}
    assert {page: (one["span"][1], one["steps"]) for page, one in last.items()} == {
        page: (60, [60]) if page == "balance" else (65, [65]) for page in PAGES
    }
    assert last["training"]["newest"] == "newest step 65"
    assert parts(last["training"])["training-loss-0"]["over"] == [1, 65]  # between them the page keeps its line
    assert parts(last["balance"])["dead-0"]["over"] == [10, 60] and not parts(last["balance"])["heat-0"]["over"]
    client = dash_app.build([run]).server.test_client()
    saved = client.get("/export/training-loss.csv?page=training&runs=0&step=64", base_url="http://127.0.0.1")
    assert "good-training-loss-step-64.csv" in saved.headers["Content-Disposition"]


def test_how_long_a_run_has_been_silent_is_told_unless_it_is_over(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "planned_steps": 100}))
    then = time.time() - 240
    os.utime(run / "metrics.jsonl", (then, then))
    ((who, seconds),) = json.loads(shown(run))["silent"]
    assert who == "" and 239 <= seconds < 300
    with open(run / "events.jsonl", "a") as file:
        file.write('{"kind": "interrupted", "step": 60}\n')
    assert json.loads(shown(run))["silent"] == []
    with open(run / "events.jsonl", "a") as file:
        file.write('{"kind": "resume", "step": 60}\n')
    assert len(json.loads(shown(run))["silent"]) == 1
    (run / "run.json").write_text(json.dumps({**record, "planned_steps": 60}))
    assert json.loads(shown(run))["silent"] == []


def test_an_address_names_runs_step_and_layer(run: Path) -> None:
    shutil.copytree(run, run.parent / "later")
    client = dash_app.build([run.parent]).server.test_client()
    found = get(client, run="later", beside="good", step=19, layer=1).get_json()
    assert found["heading"] == "Balance: later beside good" and found["named"] == ["later", "good"]
    assert found["steps"] == [19, 19] and "layer 1" in parts(found)["dead-0"]["title"]
    first = get(client).get_json()["heading"]
    for words in ({"run": HOSTILE}, {"run": "../good"}, {"beside": "later"}, {"run": ""}):
        assert get(client, **words).get_json()["heading"] == first
    assert get(client, run="later", beside="later").get_json()["heading"] == "Balance: later"

    def controls(query: str) -> dict[str, Any]:
        known: dict[str, Any] = {}

        def walk(one: Any) -> None:
            for part in one if isinstance(one, list) else [one]:
                if isinstance(part, dict):
                    known.setdefault(part.get("props", {}).get("id", ""), part.get("props", {}))
                    walk(part.get("props", {}).get("children"))

        header = {"Referer": f"http://127.0.0.1/{query}"}
        walk(client.get("/_dash-layout", base_url="http://127.0.0.1", headers=header).get_json())
        return {name: known[name].get("value") for name in ("run-a", "run-b", "step", "follow", "layer")}

    by_name = {label: i for i, label in enumerate(Runs([run.parent]).labels)}
    linked = {"run-a": by_name["later"], "run-b": by_name["good"], "step": 19, "follow": [], "layer": 1}
    assert controls("?run=later&beside=good&step=19&layer=1") == linked
    plain = {"run-a": 0, "run-b": None, "step": 60, "follow": ["on"], "layer": -1}
    for query in ("", "?run=%3Cb%3E&step=x&layer=99", "?step=-1&layer=[]&beside=later", "gates?layer="):
        assert controls(query) == plain
    assert controls("?step=999")["step"] == 60


def test_only_reading_is_answered(run: Path) -> None:
    before = {one.name: one.read_bytes() for one in run.iterdir() if one.suffix != ".sqlite-shm"}
    client = dash_app.build([run]).server.test_client()
    for method in ("put", "delete", "patch", "post"):
        assert getattr(client, method)("/", base_url="http://127.0.0.1").status_code == 405
    shown(run)
    after = {one.name: one.read_bytes() for one in run.iterdir() if one.name in before}
    assert after == before


def test_other_names_of_this_machine_are_refused(run: Path) -> None:
    client = dash_app.build([run]).server.test_client()
    for name, status in (("127.0.0.1:8050", 200), ("localhost:8050", 200), ("[::1]:8050", 200), ("evil.example", 403)):
        answer = client.get("/", base_url=f"http://{name}")
        assert answer.status_code == status, name
    policy = client.get("/", base_url="http://localhost").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "http" not in policy


def test_other_addresses_need_the_token(run: Path) -> None:
    token = "a-long-token-of-many-letters"
    client = dash_app.build([run], token=token, host="0.0.0.0").server.test_client()
    for path in ("/", "/_dash-layout", "/figures", "/cell", "/export/max-vio.png?runs=0", "/metrics", "/?token=wrong"):
        assert client.get(path, base_url="http://box:8050").status_code == 403
    answer = client.get(f"/?token={token}", base_url="http://box:8050")
    assert answer.status_code == 302 and token not in answer.headers["Location"]
    assert "HttpOnly" in answer.headers["Set-Cookie"] and "SameSite=Strict" in answer.headers["Set-Cookie"]
    assert client.get("/_dash-layout", base_url="http://box:8050").status_code == 200  # the cookie
    other = dash_app.build([run], token=token, host="0.0.0.0").server.test_client()
    header = {"Authorization": f"Bearer {token}"}
    assert other.get("/metrics", base_url="http://box:8050", headers=header).status_code == 200
    assert [dash_guard.is_local(one) for one in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "x")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_the_verb_binds_to_this_machine_and_makes_up_a_token_elsewhere(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    assert _dash_verb.main([str(run), "--port", "0"], seen.append) == 0
    out = capsys.readouterr().out
    assert out.startswith("dashboard at http://127.0.0.1:") and "token" not in out
    assert _dash_verb.main([str(run), "--port", "0", "--host", "0.0.0.0"], seen.append) == 0
    assert "/?token=" in capsys.readouterr().out and len(seen) == 2
    monkeypatch.chdir(run.parent)
    for args, error in (
        (["nowhere"], RunError),
        ([str(run), "--token", "short"], ValueError),
        ([str(run), "--every", "0"], ValueError),
        ([str(run), "--port", "99999"], ValueError),
    ):
        with pytest.raises(error):
            _dash_verb.main(args, seen.append)
