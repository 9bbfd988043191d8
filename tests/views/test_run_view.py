from __future__ import annotations

import json
from pathlib import Path

import pytest

from trine.views.run_view import JsonLines, RunView, find_runs


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_lines_are_followed_and_a_torn_one_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.read() == []
    append(path, '{"step": 1}\n{"step"')
    assert lines.read() == [{"step": 1}]
    append(path, ": 2}\nnonsense\n[1]\n\n")
    assert lines.read() == [{"step": 1}, {"step": 2}] and lines.bad == 2
    path.write_text('{"step": 7}\n')  # cut back, as a rollback does
    assert lines.read() == [{"step": 7}]
    path.unlink()
    assert lines.read() == []


def test_long_files_are_thinned_evenly_and_keep_their_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 102)))
    steps = [one["step"] for one in JsonLines(path, most=10).read()]
    assert steps == [1, 17, 33, 49, 65, 81, 97, 101]


def test_an_endless_line_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * (3 << 20) + b'\n{"step": 1}\n' + b"[" * 100_000 + b"\n")
    lines = JsonLines(path)
    assert lines.read() == [{"step": 1}] and lines.bad == 2


def test_names_lead_nowhere_else(tmp_path: Path) -> None:
    for name in ("../run.json", "/etc/passwd", "", ".."):
        with pytest.raises(ValueError, match="need a file's name"):
            RunView(tmp_path).lines(name)


def test_run_json_is_read_again_when_it_changes(tmp_path: Path) -> None:
    run = RunView(tmp_path)
    assert run.meta() == {} and "is no run" in run.problem()
    (tmp_path / "run.json").write_text('{"format_version": 1, "config": {"steps": 5}}')
    assert run.config("config", "steps") == 5 and run.config("config", "none", "deeper") is None and not run.problem()
    (tmp_path / "run.json").write_text("{" * 5000)
    assert run.meta() == {} and "run.json is damaged" in " ".join(run.notes())
    (tmp_path / "run.json").write_text('{"format_version": 2}')
    assert "newer version of Trine" in run.problem()


def test_runs_are_found_in_folders_of_runs_and_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "many" / name).mkdir(parents=True)
        (tmp_path / "many" / name / "metrics.jsonl").touch()
    (tmp_path / "many" / "empty").mkdir()
    (tmp_path / "none").mkdir()
    found = find_runs([tmp_path / "many", tmp_path / "many" / "a", tmp_path / "none"])
    assert sorted(one.name for one in found) == ["a", "b", "none"] and "is no run" in found[2].problem()
    assert RunView(tmp_path / "many" / "a", "\x1b[31m<b>\n").name == "[31m<b>"
