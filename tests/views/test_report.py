"""`report.md`: made from the files of a run's folder, whole, and honest about what is missing."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from trine.config import preset, to_dict
from trine.train.config import train_preset, train_to_dict
from trine.train.errors import RunError
from trine.train.stored import program
from trine.views.report import _balance, duration, next_commands, read_lines, summary_line, write_report

EVALUATION = {
    "format_version": 1,
    "step": 300,
    "bits_per_byte": 1.498,
    "bits_per_byte_all": 1.4,
    "held_out": {"documents": 34, "documents_all": 39, "bytes": 405_899, "bytes_all": 460_148},
    "baselines": {
        "gzip": 2.053,
        "xz": 1.8,
        "ngram3": 2.651,
        "ngram_best": 1.872,
        "ngram_best_order": 6,
        "xz_primed": 1.413,
    },
}

STAGE = {"length": 256, "share": 1.0, "step_tokens": 16_384, "micro_tokens": 4_096, "recompute": False}


def make_run(folder: Path, steps: int = 300, finished: bool = True) -> Path:
    """A made-up run of the laptop preset, with the files and the shapes of a real one."""
    folder.mkdir(parents=True)
    noise = random.Random(0)
    plan = train_preset("laptop")
    record = {
        "format_version": 1,
        "config": train_to_dict(plan),
        "model": to_dict(preset("laptop")),
        "plan": [{"stage": STAGE, "steps": 300, "first_step": 0}],
        "planned_steps": 300,
        "planned_tokens": 300 * 16_384,
        "seed": 0,
        "command": ["trine", "train", "--preset", "laptop"],
        "git_commit": None,
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
        "hardware": {
            "system": "Linux",
            "cpu": "AMD | EPYC",
            "cores": 2,
            "cores_total": 2,
            "memory_bytes": 24 * 2**30,
            "gpus": [],
        },
        "threads": 2,
        "data": {"hash": "0123456789abcdef0123", "sources": ["stdlib"], "licences": ["PSF-2.0"]},
        "started": "2026-11-29T12:00:00Z",
    }
    (folder / "run.json").write_text(json.dumps(record))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            bits = 1.45 + 4.2 * math.exp(-step / 25) + noise.gauss(0, 0.04)
            vio = [0.15 + 0.9 * math.exp(-step / 3) + abs(noise.gauss(0, 0.03)) for _ in range(4)]
            line = {
                "step": step,
                "stage": 0,
                "tokens": 16_384 * step,
                "loss": 2.4 * bits,
                "bits_per_byte": bits if step != 7 else None,
                "lr": 0.01 * (1 + math.cos(math.pi * step / 300)) / 2,
                "grad_norm": 0.2 + math.exp(-step / 15),
                "tokens_per_s": noise.gauss(7300, 150),
                "max_vio": vio,
                "dead_experts": int(step == 1),
                "seconds": 2.5,
                "updated": step != 7,
            }
            file.write(json.dumps(line) + "\n")
        file.write('{"step": 301, "to')  # the writer was stopped here
    if finished:
        (folder / "eval.json").write_text(json.dumps(EVALUATION))
        (folder / "sample.txt").write_text("def area(r):\n    ```\n    return r\n")
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("runs") / "laptop"))


def test_every_section_stands_in_its_order(report: Path) -> None:
    headings = re.findall(r"^#+ .*", report.read_text(), re.MULTILINE)
    assert headings == [
        "# laptop",
        "## Held-out text",
        "## What it writes",
        "## Balance of the experts",
        "## Training",
        "## Model",
        "## Plan",
        "## Machine",
        "## Next",
    ]


def test_pictures_that_are_named_exist(report: Path) -> None:
    names = re.findall(r"!\[.*?\]\((.*?)\)", report.read_text())
    assert sorted(names) == sorted(f"plots/{n}.png" for n in ("overview", "load", "optimizer"))
    for name in names:
        with Image.open(report.parent / name) as picture:
            assert picture.width > 500
    left = {path.name for path in report.parent.rglob("*") if path.name.startswith(".")}
    assert not left


def test_model_is_compared_with_every_yardstick_also_where_it_loses(report: Path) -> None:
    text = report.read_text()
    assert "| this model | 1.498 |  |" in text
    assert "| byte 3-gram | 2.651 | 43.5 % better |" in text
    assert "| best byte n-gram of order up to 8 (order 6) | 1.872 | 20.0 % better |" in text
    assert "| xz -9 | 1.800 | 16.8 % better |" in text
    assert "| xz -9e that has read the training files | 1.413 | 6.0 % worse |" in text
    assert "34 held-out files, 405,899 bytes" in text
    assert "with them the model reaches 1.400" in text


def test_balance_is_judged_from_step_twenty_on(report: Path) -> None:
    text = report.read_text()
    assert "Steps in which an expert got no token: 1 of 300." in text
    assert re.search(r"at most 0\.3 in \d+ % of the steps, and 0\.\d\d at worst", text)
    model = preset("laptop")
    floor = math.sqrt(2 * math.log(model.experts) / (16_384 * model.top_k / model.experts))
    assert f"Fair dice would give about {floor:.2f}" in text
    assert "In rows of the first stage" not in text


def test_balance_of_stages_is_told_apart() -> None:
    lines: list[dict[str, Any]] = []
    for i in range(1, 101):
        long = int(i > 60)
        tokens = 4_096 * min(i, 60) + 16_384 * max(0, i - 60)
        lines.append(
            {"step": i, "stage": long, "tokens": tokens, "dead_experts": 0, "max_vio": [0.1, 0.2 + 0.4 * long]}
        )
    text = _balance(lines, {"experts": 18, "top_k": 8}, "load.png")
    assert "at most 0.3 in 51 % of the steps, and 0.60 at worst." in text  # 41 of 81
    assert "In rows of the first stage that is 100 %, and 0.20 at worst" in text
    floors = [math.sqrt(2 * math.log(18) / (size * 8 / 18)) for size in (4_096, 16_384)]
    assert f"about {floors[0]:.2f} with 4,096 tokens a step and {floors[1]:.2f} with 16,384." in text


def test_sample_cannot_break_out_of_its_fence(report: Path) -> None:
    assert "````text\ndef area(r):\n    ```\n    return r\n````" in report.read_text()


def test_plan_machine_and_data_are_told(report: Path) -> None:
    text = report.read_text()
    assert "| 1 | 256 | 300 | 16,384 | 4,096 |" in text
    assert "AMD \\| EPYC, 2 usable cores" in text
    assert "data: stdlib (PSF-2.0), manifest `0123456789abcdef`" in text
    assert re.search(r"Median 7,\d{3} tokens a second\. Steps whose update was not applied: 1\.", text)
    assert "python 3.11.7, torch 2.13.0+cpu" in text


def test_summary_names_size_tokens_and_time(report: Path) -> None:
    line = report.read_text().splitlines()[2]
    assert line.startswith("Preset `laptop`: 2.28 M")
    assert "300 of 300 steps, 4.92 M tokens, 12 min 30 s of training on AMD | EPYC, 2 threads." in line


def test_next_commands_name_this_run(report: Path) -> None:
    name = program()
    commands = [command for command, _ in next_commands(report.parent)]
    assert len(commands) == 3
    assert commands[0].startswith(f"{name} generate {report.parent} --prompt")
    assert commands[1] == f"{name} eval {report.parent}"
    assert commands[2] == f"{name} train --preset laptop --run laptop-plain --model residual=plain"
    assert all(command in report.read_text() for command in commands)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            ["train", "--balance.policy", "sign", "--run", "a", "--data.source", "my texts", "--runs=r"],
            "train --balance.policy sign --data.source 'my texts' --runs=r --run kept-plain --model residual=plain",
        ),
        (["train", "--run=a", "--tokens", "5"], "train --tokens 5 --run kept-plain --model residual=plain"),
        (["train", "--run", "a", "--resume"], None),
        (["train", "--model", "residual=plain"], None),
        (["-c"], None),
    ],
)
def test_training_again_keeps_what_was_given(tmp_path: Path, command: list[str], expected: str | None) -> None:
    """It was `train --preset`, whatever else the run was set to."""
    folder = make_run(tmp_path / "kept", steps=2)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "command": ["/bin/trine", *command]}))
    commands = [one for one, _ in next_commands(folder)]
    assert commands[2:] == ([] if expected is None else [f"{program()} {expected}"])


def test_run_that_was_stopped_gets_a_report_without_the_parts_it_has_not_reached(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "short", steps=5, finished=False)).read_text()
    assert "Not evaluated: the run has not reached its end." in text
    assert "What it writes" not in text
    assert "5 of 300 steps" in text
    assert "The largest MaxVio of any layer was" in text


def test_report_written_again_is_the_same_and_a_model_without_experts_has_no_balance(tmp_path: Path) -> None:
    run = make_run(tmp_path / "again", steps=3)
    lines = [{**line, "max_vio": []} for line in read_lines(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = write_report(run).read_text()
    assert "Balance of the experts" not in first
    assert write_report(run).read_text() == first


def test_folder_without_a_run_or_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run: found no run in .*nothing"):
        write_report(tmp_path / "nothing")
    run = make_run(tmp_path / "fresh", steps=0)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no step recorded yet"):
        write_report(run)
    (run / "eval.json").write_text("{")
    (run / "metrics.jsonl").write_text((make_run(tmp_path / "one", steps=1) / "metrics.jsonl").read_text())
    with pytest.raises(ValueError, match=r"eval\.json: damaged"):
        write_report(run)
    (run / "eval.json").write_text("[]")
    with pytest.raises(ValueError, match=r"eval\.json: damaged \(found list, need an object\)"):
        write_report(run)


def test_summary_names_the_card_when_there_is_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "card", steps=1)
    record: dict[str, Any] = json.loads((run / "run.json").read_text())
    record["hardware"]["gpus"] = [{"name": "NVIDIA H200", "memory_bytes": 141 * 2**30}]
    record["threads"] = 1
    line = summary_line(record, read_lines(run / "metrics.jsonl"), {"total": 4_700_000, "active": 280_123})
    assert "4.7 M parameters with a vocabulary of 4,096, 0.28 M used by a token" in line
    assert line.endswith("on NVIDIA H200, 1 thread.")


def changed(run: Path, file: str, **changes: Any) -> None:
    values = json.loads((run / file).read_text())
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    (run / file).write_text(json.dumps(values))


def test_the_yardstick_that_knows_the_training_text_is_explained_only_where_it_is(report: Path, tmp_path: Path) -> None:
    sentence = "The last row can look up every line it has read"
    assert sentence in report.read_text()
    run = make_run(tmp_path / "unprimed", steps=2)
    changed(run, "eval.json", baselines={"xz_primed": None})
    assert sentence not in write_report(run).read_text()


def test_the_smoke_run_says_what_it_is_not_for(report: Path, tmp_path: Path) -> None:
    sentence = "A model this small is not expected to beat gzip in so few steps (300)"
    assert sentence not in report.read_text()
    run = make_run(tmp_path / "small", steps=2)
    changed(run, "run.json", config={"preset": "smoke"})
    assert sentence in write_report(run).read_text()


def test_why_there_is_no_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "done", finished=False)
    assert "Not evaluated: `trine eval` does it." in write_report(run).read_text()
    changed(run, "run.json", data={"held_out": 0})
    assert "Not evaluated: no document is held out (`data.held_out_one_in`)." in write_report(run).read_text()


@pytest.mark.parametrize(("seconds", "text"), [(9.6, "10 s"), (754, "12 min 34 s"), (7_260, "2 h 01 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
