from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dash_page import SIZE, parts, shown

from trine import _dash_verb
from trine.views.dash_state import Runs
from trine.views.demo import DEMO_VERSION, DemoSize, Incidents, is_done, write_demo
from trine.views.run_view import RunView


def test_the_demo_is_made_once_and_anew_for_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(_dash_verb.__file__).parents[1]))
    folder = tmp_path / "runs" / "demo-small"
    writers: list[Any] = []
    write = _dash_verb._write_demo

    def watched(*args: Any) -> Any:
        writers.append(write(*args))
        return writers[-1]

    monkeypatch.setattr(_dash_verb, "_write_demo", watched)

    def whole(server: Any) -> None:
        assert server.port and writers[-1].wait(120) == 0

    def shown() -> dict[str, Any]:
        assert _dash_verb.main(["--demo-small", "--port", "0"], whole) == 0
        return {one.name: one.stat().st_mtime_ns for one in folder.glob("*/demo.json")} | {
            one.parent.name: one.read_text() for one in folder.glob("*/demo.json")
        }

    first = shown()
    assert {"demo-quantile", "demo-sign"} <= set(first) and "steps in" in capfd.readouterr().err
    assert shown() == first and "steps in" not in capfd.readouterr().err  # what is whole is taken as it is
    for done in folder.glob("*/demo.json"):
        done.write_text(json.dumps({**json.loads(done.read_text()), "demo_version": DEMO_VERSION - 1}))
    assert not is_done(folder / "demo-quantile", 60)
    shown()
    said = capfd.readouterr().err
    assert said.count("steps in") == 2 and is_done(folder / "demo-quantile", 60) and is_done(folder / "demo-sign", 15)


def test_a_demo_replaces_demos_only(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="something else than a demo"):
        write_demo(tmp_path.parent, SIZE, "x", "none")
    other = tmp_path / "demo"
    shutil.copytree(made, other)
    write_demo(other, DemoSize(layers=1, experts=8, top_k=1, steps=2, tokens=64, ranks=1), "x", "none")
    assert Runs([other]).span(0) == (1, 2)


def test_a_demo_has_what_happens_to_losses(made: Path) -> None:
    run = RunView(made)
    records = {one["step"]: one for one in run.records()}
    assert sorted(records) == list(range(1, 61))
    kinds = [(one["kind"], one["step"]) for one in run.events() if one["kind"] in ("spike", "non_finite", "rollback")]
    assert kinds == [("spike", 16), ("non_finite", 31), ("spike", 52), ("rollback", 52)]
    assert records[16]["loss"] > records[15]["loss"] + 1 and records[31]["loss"] is None
    assert not records[31]["updated"] and all(one["updated"] for step, one in records.items() if step != 31)
    found = parts(json.loads(shown(made, page="training")))
    names = [trace["name"] for trace in found["training-loss-0"]["plot"]["data"]]
    assert names[-3:] == ["not finite", "spike", "rollback"]
    marks = [one["text"] for one in found["training-gradient-0"]["plot"]["layout"]["annotations"]]
    assert marks == ["stage 2, rows of 32,768", "stage 3, rows of 131,072", "clipped at 1"]
    text = shown(made, page="training")
    assert "Back from step 52 to step 51 (step-000051)." in text and "Steps whose update was not applied: 1." in text


# a run's steps, and those in which something happens
@pytest.mark.parametrize(
    ("steps", "found"), [(39, (0, 0, 0, 0)), (40, (11, 21, 34, 33)), (2000, (540, 1040, 1720, 1670))]
)
def test_incidents_of_a_demo_keep_apart(steps: int, found: tuple[int, ...]) -> None:
    assert Incidents.of(steps) == found
