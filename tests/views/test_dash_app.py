from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trine import _dash_verb
from trine.balance.record_format import FILE_NAME
from trine.train.errors import RunError
from trine.views import dash_app, dash_guard
from trine.views.dash_state import PAGES, Runs, View
from trine.views.demo import DemoSize, write_demo

SIZE = DemoSize(layers=3, experts=16, top_k=2, steps=60, keep=20, tokens=1024, ranks=4)
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "good"
    write_demo(folder, SIZE, "good", "quantile")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "good"))


def layout(*folders: Path, page: str = "/") -> str:
    """The page as it first shows, JSON."""
    client = dash_app.build(folders).server.test_client()
    answer = client.get("/_dash-layout", headers={"Referer": f"http://127.0.0.1{page}"}, base_url="http://127.0.0.1")
    assert answer.status_code == 200, answer.text
    return answer.text


def call(client: Any, output: str, values: dict[str, Any], changed: list[str]) -> Any:
    """One callback, as the page would call it."""
    found = client.get("/_dash-dependencies", base_url="http://127.0.0.1").get_json()
    (one,) = [dep for dep in found if output in dep["output"]]

    def filled(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**part, "value": values.get(part["id"])} for part in parts]

    outputs = [
        dict(zip(("id", "property"), part.rsplit(".", 1), strict=True))
        for part in one["output"].strip(".").split("...")
    ]
    body = {"output": one["output"], "outputs": outputs, "inputs": filled(one["inputs"]), "state": filled(one["state"])}
    return client.post("/_dash-update-component", json={**body, "changedPropIds": changed}, base_url="http://127.0.0.1")


@pytest.mark.parametrize("page", [f"/{name}" for name in PAGES])
def test_every_page_shows_its_figures_at_once(run: Path, page: str) -> None:
    text = layout(run, page=page)
    assert f"{PAGES[page[1:]]}: good" in text and '"aria-current":"page"' in text
    assert text.count('"type":"figure"') >= (8 if page == "/balance" else 1)
    assert "Traceback" not in text


def test_balance_shows_everything_the_page_promises(run: Path) -> None:
    text = layout(run)
    for title in (
        *("Load of every expert, step 60", "Percentiles of load over steps", "MaxVio over steps", "Dead experts"),
        *("Bias over steps", "Required bias by layer", "Load of 4 ranks", "Alerts", "Widest bias range"),
    ):
        assert title in text, title
    assert "P95 by chance" in text and "nothing in it was measured" in text


def test_two_runs_stand_side_by_side_on_one_axis(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_demo(other, SIZE, "other", "none")
    found = json.loads(layout(run, other))
    figures: dict[str, list[Any]] = {}

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            name = node.get("id")
            if isinstance(name, dict) and name.get("type") == "figure":
                figures.setdefault(name["key"], []).append(node["figure"]["layout"]["yaxis"].get("range"))
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(found)
    assert {len(one) for one in figures.values()} == {2} and "good beside other" in json.dumps(found)
    assert figures["dead"][0] == figures["dead"][1] is not None


def test_callbacks_follow_what_is_new_and_what_is_chosen(run: Path) -> None:
    client = dash_app.build([run]).server.test_client()
    values = {"run-a": 0, "follow": ["on"], "step": 10, "tick": 1, "version": ["", ""], "address": "/"}
    found = call(client, "run-b.options", values, ["tick.n_intervals"]).get_json()["response"]
    assert (
        found["step"]["max"] == found["step"]["value"] == 60
        and found["version"]["data"][0]
        and len(found["layer"]["options"]) == 4
    )
    same = call(client, "run-b.options", {**values, "version": found["version"]["data"]}, ["tick.n_intervals"])
    assert "version" not in same.get_json().get("response", {})
    drawn = call(client, "figures.children", {**values, "layer": 1, "what": "bias", "theme": "dark"}, ["theme.data"])
    assert "Load of every expert" not in drawn.text and "Bias of the experts of layer 1" in drawn.text
    assert "Saturated scores of every layer" in call(
        client, "figures.children", {**values, "what": "saturation"}, ["theme.data"]
    ).text  # fmt: skip
    for nonsense in ({"step": "x", "layer": [], "ranks": {}, "what": 7}, {"step": -1, "layer": 99, "ranks": 7}):
        assert call(client, "figures.children", {**values, **nonsense}, ["theme.data"]).status_code == 200


# -- bad input -------------------------------------------------------------------------------------------------------


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
    with sqlite3.connect(folder / FILE_NAME) as database:
        from trine.balance.record_format import pack_summary

        blob = pack_summary(np.full((1, 3, 25), np.nan, dtype=np.float32))
        database.execute("UPDATE frames SET summary = ? WHERE tier = 0", (blob,))
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
        text = layout(run, page=f"/{page}")
        assert "Traceback" not in text and '"type":"figure"' in text
        assert page != "balance" or sentence in text


def test_a_run_deleted_while_open_is_told(run: Path) -> None:
    client = dash_app.build([run]).server.test_client()
    values = {"run-a": 0, "follow": ["on"], "step": 60, "version": ["", ""], "address": "/"}
    before = call(client, "run-b.options", values, ["tick.n_intervals"]).get_json()["response"]["version"]["data"]
    shutil.rmtree(run)
    after = call(client, "run-b.options", {**values, "version": before}, ["tick.n_intervals"])
    assert after.status_code == 200 and after.get_json()["response"]["version"]["data"] != before
    assert "does not exist (any more)" in call(client, "figures.children", values, ["shape.data"]).text
    assert "does not exist (any more)" in call(client, "notes.children", values, ["version.data"]).text


@pytest.mark.parametrize("size", [DemoSize(layers=1, experts=8, top_k=1, steps=1, tokens=64, ranks=1)])
def test_one_step_is_enough(tmp_path: Path, size: DemoSize) -> None:
    write_demo(tmp_path / "one", size, "one", "none")
    text = layout(tmp_path / "one")
    assert "Load of every expert, step 1" in text and "Traceback" not in text


def test_no_moe_layers_is_a_sentence(tmp_path: Path) -> None:
    from trine.balance.recorder import Recorder

    folder = tmp_path / "dense"
    folder.mkdir()
    (folder / "run.json").write_text('{"format_version": 1}')
    Recorder(folder / FILE_NAME, layers=0, experts=4, top_k=1).close()
    assert "no MoE layers" in layout(folder)


def test_a_folder_of_five_hundred_runs_lists_them_all(tmp_path: Path) -> None:
    for i in range(500):
        (tmp_path / f"run-{i}").mkdir()
        (tmp_path / f"run-{i}" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    runs = Runs([tmp_path])
    assert len(runs) == 500 and runs.run(499) is not None and runs.run(500) is None
    assert layout(tmp_path).count('"label":"run-') == 1000  # both lists


def test_hostile_names_and_texts_stay_text(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    shutil.copytree(made, folder)
    with open(folder / "events.jsonl", "a") as file:
        event = {"kind": "balance_alert", "step": 9, "rule": HOSTILE, "begins": True, "text": HOSTILE + "\u202e\x00"}
        file.write(json.dumps(event) + "\n")
    client = dash_app.build([folder]).server.test_client()
    found = client.get("/", base_url="http://127.0.0.1")
    assert HOSTILE not in found.text
    text = json.dumps(json.loads(layout(folder)))
    # the page gets it as a text, never as markup: no component that would take it as such is used
    assert HOSTILE in text and "dangerously" not in text and '"type":"Markdown"' not in text
    assert "\\u202e" not in text and "\\u0000" not in text
    alerts = Runs([folder]).alerts(0)
    assert alerts[-1][1] == HOSTILE[:40] or any(one[1].startswith("<img") for one in alerts)


# -- export, addresses, who may look --------------------------------------------------------------------------------


def test_figures_and_their_data_are_saved(run: Path) -> None:
    client = dash_app.build([run]).server.test_client()

    def get(path: str) -> Any:
        return client.get(path, base_url="http://127.0.0.1")

    png = get("/export/max-vio.png?page=balance&run=0")
    assert png.status_code == 200 and png.data[:4] == b"\x89PNG" and png.content_type == "image/png"
    svg = get("/export/heat.svg?page=balance&run=0&step=50&what=bias&order=value")
    assert b"<svg" in svg.data and 'filename="heat-step-50.svg"' in svg.headers["Content-Disposition"]
    table = get("/export/heat.csv?page=balance&run=0&step=60").text.splitlines()
    assert len(table) == 1 + SIZE.layers and len(table[1].split(",")) == 1 + SIZE.experts
    assert get("/export/loss.csv?page=training&run=0").status_code in (200, 404)
    for bad in ("/export/max-vio.png?run=1", "/export/max-vio.png?run=-1", "/export/none.png?run=0",
                "/export/max-vio.pdf?run=0", "/export/max-vio.png?run=0&page=etc", "/export/max-vio.png"):  # fmt: skip
        answer = get(bad)
        assert answer.status_code == 404 and "<p>" in answer.text and "root:" not in answer.text
    assert get("/metrics").status_code == 200
    inside = (run / "run.json").read_text()
    for path in ("/assets/../../etc/passwd", "/export/..%2f..%2fetc%2fpasswd.png?run=0", "/good/run.json", "/run.json"):
        found = get(path)  # any other address is the page itself, or there is none
        assert found.status_code == 404 or "_dash-renderer" in found.text
        assert "root:" not in found.text and inside not in found.text


def test_only_reading_is_answered(run: Path) -> None:
    before = {one.name: one.read_bytes() for one in run.iterdir() if one.suffix != ".sqlite-shm"}
    client = dash_app.build([run]).server.test_client()
    for method in ("put", "delete", "patch", "post"):
        assert getattr(client, method)("/", base_url="http://127.0.0.1").status_code == 405
    layout(run)
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
    for path in ("/", "/_dash-layout", "/export/max-vio.png?run=0", "/metrics", "/?token=wrong"):
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


def test_a_demo_replaces_demos_only(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="something else than a demo"):
        write_demo(tmp_path.parent, SIZE, "x", "none")
    other = tmp_path / "demo"
    shutil.copytree(made, other)
    write_demo(other, DemoSize(layers=1, experts=8, top_k=1, steps=2, tokens=64, ranks=1), "x", "none")
    assert Runs([other]).span(0) == (1, 2)


# -- fuzz ------------------------------------------------------------------------------------------------------------


def fuzzed(data: bytes, random: np.random.Generator) -> bytes:
    """A recorder's file with some of it overwritten, cut out, doubled or cut off."""
    kind, at = int(random.integers(5)), int(random.integers(len(data)))
    size = int(random.integers(1, 4096))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + size :]
    if kind == 2:
        return data[:at] + data[at : at + size] + data[at:]
    found = bytearray(data)
    for place in random.integers(0, len(data) if kind == 3 else 8192, size=int(random.integers(1, 30))).tolist():
        found[place] = int(random.integers(256))
    return bytes(found)


def survive(made: Path, folder: Path, first: int, count: int) -> None:
    folder.mkdir()
    (folder / "run.json").write_text((made / "run.json").read_text())
    data = (made / FILE_NAME).read_bytes()
    for seed in range(first, first + count):
        random = np.random.default_rng(seed)
        for left in folder.glob(f"{FILE_NAME}*"):
            left.unlink()
        (folder / FILE_NAME).write_bytes(fuzzed(data, random))
        runs = Runs([folder])
        assert runs.version(0)
        layer = int(random.integers(-1, 4))
        view = View(step=int(random.integers(70)), layer=layer if layer >= 0 else None)
        charts = runs.charts("balance", 0, view)
        assert charts and all(one.key != "problem" for one in charts), (seed, [one.empty for one in charts])
        for one in charts:
            json.dumps(dash_app._plot("balance", one, view, dark=False), allow_nan=False)
        runs.tiles(0, view), runs.notes(0), runs.span(0)
        runs.run(0).close()  # type: ignore[union-attr]


def test_fifty_fuzzed_files_leave_the_page_standing(made: Path, tmp_path: Path) -> None:
    survive(made, tmp_path / "fuzzed", 0, 50)


@pytest.mark.slow
def test_a_thousand_fuzzed_files_leave_the_page_standing(made: Path, tmp_path: Path) -> None:
    survive(made, tmp_path / "fuzzed", 50, 950)
