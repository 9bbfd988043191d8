from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from trine.train.config import Stage, TrainConfig, train_to_dict
from trine.train.errors import RunError
from trine.views import figures
from trine.views.compare import compare, comparison_rows, comparison_table


def run(folder: Path, config: TrainConfig, steps: int, bits: float | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"format_version": 1, "config": train_to_dict(config)}))
    lines = [
        {
            "step": step,
            "stage": int(step > steps // 2),
            "tokens": 100 * step,
            "loss": 5.0 - 0.01 * step,
            "tokens_per_s": 50.0,
            "seconds": 2.0,
            "updated": step != 3,
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')
    if bits is not None:
        (folder / "eval.json").write_text(json.dumps({"bits_per_byte": bits}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    base = TrainConfig()
    other = dataclasses.replace(base, seed=4, mtp=0.3, stages=(Stage(length=256),), threads=7)
    return [run(tmp_path / "one" / "main", base, 40, 2.5), run(tmp_path / "two" / "main", other, 30, None)]


def test_what_differs_and_what_came_of_it(runs: list[Path]) -> None:
    found = compare(runs)
    assert found.names == ("one/main", "two/main")
    assert found.differences == {
        "model.mtp": (None, True),
        "mtp": (None, 0.3),
        "seed": (0, 4),
        "stages.0.length": (128, 256),
    }
    assert found.results["steps"] == (40, 30) and found.results["seconds"] == (80.0, 60.0)
    assert found.results["loss"] == (pytest.approx(5 - 0.305), pytest.approx(5 - 0.205))
    assert found.results["held_out_bits_per_byte"] == (2.5, None)
    rows = comparison_rows(found)
    assert ("seed", "0", "4") in rows and ("mtp", "-", "0.3") in rows
    assert ("bits per byte, held out", "2.500", "-") in rows and (
        "time of training",
        "1 min 20 s",
        "1 min 00 s",
    ) in rows
    assert comparison_table(found).row_count == len(rows)
    assert set(found.to_json()) == {"names", "differences", "results"}


def test_the_curves_are_drawn_with_their_stages(runs: list[Path], tmp_path: Path) -> None:
    found = compare([*runs, runs[0]])
    figure = figures.compare(found.names, found.metrics)
    assert figures.save(figure, tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    loss, speed = figure.axes
    marks = [line for line in loss.lines if line.get_marker() == "|"]
    assert [line.get_xdata()[0] for line in marks] == [2_100.0, 1_600.0, 2_100.0]
    assert len(speed.lines) == 6
    assert figures.stage_starts([{"stage": 0}, {"stage": 0}, {"stage": 2}, {}]) == [2, 3]


def test_runs_that_are_the_same_say_so(runs: list[Path]) -> None:
    assert comparison_rows(compare([runs[0], runs[0]]))[0] == ("(nothing is set differently)", "", "")


def test_what_cannot_be_compared_is_named(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs: found 1, need at least 2"):
        compare(runs[:1])
    with pytest.raises(RunError, match=r"found no run in .*nowhere"):
        nowhere = tmp_path / "nowhere"
        nowhere.mkdir()
        (nowhere / "metrics.jsonl").write_text('{"step": 1}\n')
        compare([runs[0], nowhere])
    (runs[1] / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics.jsonl: no step recorded yet"):
        compare(runs)
    with pytest.raises(ValueError, match="metrics: found no run"):
        figures.compare([], [])
