from __future__ import annotations

import json
import math
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dash_page import HOSTILE, get, having, parts, shown

from trine.balance.record_format import FILE_NAME
from trine.views import balance_charts, dash_app
from trine.views.dash_state import PAGES, Runs
from trine.views.dash_style import SCRIPT
from trine.views.demo import DemoSize, write_demo


def no_run(folder: Path) -> None:
    for one in folder.iterdir():
        one.unlink()
    (folder / "notes.txt").write_text("hello")


def newer(folder: Path) -> None:
    found = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**found, "format_version": 99}))


def newer_recorder(folder: Path) -> None:
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()


def torn(folder: Path) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('not json\n{"step": 61, "loss": 1.')
    data = (folder / FILE_NAME).read_bytes()
    (folder / FILE_NAME).write_bytes(data[: len(data) // 3])


def empty(folder: Path) -> None:
    (folder / FILE_NAME).write_bytes(b"")


def nothing_recorded(folder: Path) -> None:
    (folder / FILE_NAME).unlink()


def not_finite(folder: Path) -> None:
    lines = [
        json.dumps({"step": i, "loss": float("nan"), "grad_norm": None, "max_vio": [float("inf")]}) for i in range(3)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    no_summaries(folder)


def no_summaries(folder: Path) -> None:
    with sqlite3.connect(folder / FILE_NAME) as database:
        from trine.balance.record_format import pack_summary

        blob = pack_summary(np.full((1, 3, 25), np.nan, dtype=np.float32))
        database.execute("UPDATE frames SET summary = ?", (blob,))
    database.close()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (no_run, "is no run: a run's folder has run.json"),
        (newer, "written by a newer version of Trine (format_version 99"),
        (newer_recorder, "format_version 99 is newer than 1"),
        (torn, "damaged"),
        (empty, "is empty"),
        (nothing_recorded, "the load of experts was not recorded (yet)"),
        (not_finite, "MaxVio over steps"),
        (shutil.rmtree, "does not exist (any more)"),
    ],
)
def test_bad_input_is_a_sentence_on_the_page(run: Path, spoil: Callable[[Path], None], sentence: str) -> None:
    spoil(run)
    for page in PAGES:
        text = shown(run, page=page)
        assert "Traceback" not in text and json.loads(text)["figures"]
        assert page != "balance" or sentence in text


@pytest.mark.parametrize("layer", [None, 2])
def test_of_figures_that_are_not_known_none_is_drawn_as_0(run: Path, layer: int | None) -> None:
    no_summaries(run)
    words = {} if layer is None else {"layer": layer}
    found = parts(json.loads(shown(run, **words)))
    said = "None of the recorded steps has a figure of it."
    keys = ["percentiles-0", "max-vio-0", "dead-0", *(["bias-0"] if layer is None else [])]
    for key in keys:
        assert said in found[key]["description"] and not found[key]["plot"]["data"], key
    assert [len(found[key]["query"]) for key in keys] == [0] * len(keys)  # nothing to save
    (side,) = json.loads(shown(run, **words))["tiles"]
    tiles = {name: (value, bad) for name, value, _, bad in side["tiles"]}
    assert [tiles[name] for name in ("MaxVio, worst layer", "Dead experts", "Saturated scores")] == [
        ("unknown", False)
    ] * 3


def test_a_gap_in_the_dead_is_no_0(run: Path) -> None:
    data = Runs([run]).data(0)
    history = data.history()
    assert history is not None
    dead = history.of("dead")
    dead[:] = 0.0
    dead[1], dead[2, 0] = np.nan, np.nan
    for row, wanted in ((None, [0.0, math.nan, 0.0]), (0, [0.0, math.nan, math.nan])):
        chart = balance_charts.dead_chart(history, row, data.layers)
        np.testing.assert_array_equal(np.asarray(chart.lines[0].y)[:3], wanted)
    dead[:] = 0.0
    dead[3, 0] = 5.0
    chart = balance_charts.dead_chart(history, None, data.layers)
    area, steps = chart.bands[0], history.steps
    # level from the step on until the next one, as the line
    at = np.flatnonzero(np.asarray(area.high))
    assert np.asarray(area.x)[at].tolist() == [steps[3], steps[4]] and np.asarray(area.high)[at].tolist() == [5, 5]


def test_a_run_deleted_while_open_is_told(run: Path) -> None:
    client = dash_app.build([run]).server.test_client()
    before = get(client).get_json()
    shutil.rmtree(run)
    after = get(client, look="", **having(before)).get_json()
    assert after["version"] != before["version"]
    assert "does not exist (any more)" in after["notes"][0] and list(parts(after)) == ["problem-0"]


@pytest.mark.parametrize("size", [DemoSize(layers=1, experts=8, top_k=1, steps=1, tokens=64, ranks=1)])
def test_one_step_is_enough(tmp_path: Path, size: DemoSize) -> None:
    write_demo(tmp_path / "one", size, "one", "none")
    text = shown(tmp_path / "one")
    assert "Load of every expert, step 1" in text and "Traceback" not in text


def test_no_moe_layers_is_a_sentence(tmp_path: Path) -> None:
    from trine.balance.recorder import Recorder

    folder = tmp_path / "dense"
    folder.mkdir()
    (folder / "run.json").write_text('{"format_version": 1}')
    Recorder(folder / FILE_NAME, layers=0, experts=4, top_k=1).close()
    assert "no MoE layers" in shown(folder)


def test_a_folder_of_five_hundred_runs_lists_them_all(tmp_path: Path) -> None:
    for i in range(500):
        (tmp_path / f"run-{i}").mkdir()
        (tmp_path / f"run-{i}" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    runs = Runs([tmp_path])
    assert len(runs) == 500 and runs.run(499) is not None and runs.run(500) is None
    client = dash_app.build([tmp_path]).server.test_client()
    assert client.get("/_dash-layout", base_url="http://127.0.0.1").text.count('"label":"run-') == 1000  # both lists


def test_hostile_names_and_texts_stay_text(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    shutil.copytree(made, folder)
    with open(folder / "events.jsonl", "a") as file:
        event = {"kind": "balance_alert", "step": 9, "rule": HOSTILE, "begins": True, "text": HOSTILE + "\u202e\x00"}
        file.write(json.dumps(event) + "\n")
    client = dash_app.build([folder]).server.test_client()
    found = client.get("/", base_url="http://127.0.0.1")
    assert HOSTILE not in found.text
    text = json.dumps(json.loads(shown(folder)))
    # the page gets it as a text, and never takes a text for markup; to plotly.js, which does, it goes escaped
    assert HOSTILE in text and "innerHTML" not in SCRIPT and "insertAdjacent" not in SCRIPT
    assert all(HOSTILE not in json.dumps(part.get("plot")) for part in parts(json.loads(text)).values())
    page = client.get("/_dash-layout", base_url="http://127.0.0.1").text
    assert "dangerously" not in page and '"type":"Markdown"' not in page
    assert "\\u202e" not in text and "\\u0000" not in text
    alerts = Runs([folder]).alerts(0)
    assert alerts[-1][1] == HOSTILE[:40] or any(one[1].startswith("<img") for one in alerts)


# -- export, addresses, who may look --------------------------------------------------------------------------------


def test_a_run_of_a_newer_version_is_not_said_to_have_no_alerts(run: Path) -> None:
    assert json.loads(shown(run))["tables"][0]["none"] == "None so far."
    newer(run)
    for page in ("balance", "training"):
        (table,) = json.loads(shown(run, page=page))["tables"]
        assert table["title"] == "Alerts" and table["rows"] == []
        assert table["none"] == "Whether there were any cannot be read."
