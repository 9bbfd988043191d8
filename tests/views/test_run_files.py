"""What a run's folder may hold instead of the files a run writes: pipes, folders, other runs written over it."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trine.balance import RecorderReader
from trine.balance.record_format import FILE_NAME, RecordError
from trine.views.balance_data import BalanceData
from trine.views.demo import DemoSize, write_demo
from trine.views.probe_view import FILE_NAME as PROBES
from trine.views.run_view import JsonLines, RunView, find_runs

SIZE = DemoSize(layers=2, experts=8, top_k=1, steps=4, tokens=64, ranks=1)


def lines_of(name: str, count: int) -> str:
    return "".join(json.dumps({"step": step, "of": name}) + "\n" for step in range(1, count + 1))


def names(lines: JsonLines) -> set[str]:
    return {one["of"] for one in lines.read()}


@pytest.mark.parametrize("more", [0, 1, 400])
def test_a_file_written_over_in_its_place_is_another_one(tmp_path: Path, more: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of("one", 30))
    lines = JsonLines(path)
    assert names(lines) == {"one"}
    before = path.stat()
    with open(path, "r+") as file:  # as cp does
        file.truncate()
        file.write(lines_of("two", 30 + more))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert path.stat().st_ino == before.st_ino
    assert names(lines) == {"two"} and len(lines.read()) == 30 + more and not lines.bad


def test_a_file_that_begins_alike_and_goes_on_otherwise_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of("one", 300))
    lines = JsonLines(path)
    assert names(lines) == {"one"}
    path.write_text(lines_of("one", 200) + lines_of("two", 300))
    assert len(lines.read()) == 500 and names(lines) == {"one", "two"} and lines.bad == 0


def test_a_file_that_only_grew_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    taken: list[bytes] = []
    take = lines._take

    def watched(piece: bytes) -> None:
        taken.append(piece)
        take(piece)

    monkeypatch.setattr(lines, "_take", watched)
    for step in range(1, 100):
        with open(path, "a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        assert [one["step"] for one in lines.read()] == list(range(1, step + 1))
    assert b"".join(taken) == path.read_bytes()


def within(seconds: float, what: Callable[[], Any]) -> Any:
    """What a function returns; an error where it hangs."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(what()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", PROBES, "run.json", "eval.json", FILE_NAME])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_only_regular_files_are_opened(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"format_version": 1}')
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("/dev/zero")
    run = RunView(folder)

    def look() -> tuple[Any, ...]:
        return run.records(), run.events(), run.probes(), run.evaluation(), run.recorder(), run.problem(), run.version()

    records, events, probes, evaluation, recorder, problem, _ = within(20, look)
    assert not (records or events or probes or evaluation or recorder or problem)
    (note,) = [one for one in run.notes() if "regular" in one]
    assert note.startswith(name) and note.count(name) == 1 and str(tmp_path) not in note


def test_a_pipe_beside_the_recorders_file_holds_nothing_up(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_demo(folder, SIZE, "demo", "none")
    for name in (f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"):
        (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / f"{FILE_NAME}-wal")
    run = RunView(folder)
    assert within(20, run.recorder) is None
    assert f"{FILE_NAME}-wal: is no regular file." in run.notes()


def spoiled(folder: Path) -> RunView:
    """A run whose recorder's file has other tables than it should, with words of its own in SQLite's message."""
    write_demo(folder, SIZE, "demo", "none")
    database = sqlite3.connect(folder / FILE_NAME)
    database.execute("PRAGMA writable_schema = ON")
    database.execute("UPDATE sqlite_schema SET sql = 'CREATE TABLE \"max_vio\" (' WHERE name = 'frames'")
    database.commit()
    database.close()
    return RunView(folder)


def test_a_damaged_recorders_file_is_told_without_its_own_text_or_its_path(tmp_path: Path) -> None:
    run = spoiled(tmp_path / "spoiled")
    assert run.recorder() is None
    (note,) = [one for one in run.notes() if FILE_NAME in one]
    assert note == f"{FILE_NAME}: is damaged (malformed database schema)."
    with pytest.raises(RecordError, match=str(tmp_path)):  # where no other name is given, the file's own
        RecorderReader(run.path)


def test_damage_found_later_names_the_file_without_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_demo(folder, SIZE, "demo", "none")
    database = sqlite3.connect(folder / FILE_NAME)
    database.execute("UPDATE frames SET arrays = x'00', summary = x'00' WHERE last = 4")
    database.commit()
    database.close()
    data = BalanceData(run := RunView(folder))
    assert data.frame(4) is None
    said = " ".join((data.problem, *run.notes()))
    assert FILE_NAME in said and str(tmp_path) not in said and '"' not in said
    reader = run.recorder()
    assert reader is not None and np.isfinite(reader.summaries(1, 3)[1]).any()


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", PROBES, "run.json", "eval.json", FILE_NAME])
def test_links_lead_to_the_given_folders_only(tmp_path: Path, name: str) -> None:
    runs, outside = tmp_path / "runs", tmp_path / "runs-of-others"
    outside.mkdir()
    write_demo(runs / "one", SIZE, "demo", "none")
    (runs / "one" / "eval.json").write_text('{"format_version": 1, "bits_per_byte": 1.5}')
    for file in (f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"):
        (runs / "one" / file).unlink(missing_ok=True)
    (runs / "one" / name).rename(outside / name)
    (runs / "one" / name).symlink_to(outside / name)

    def look(*folders: Path) -> tuple[bool, list[str]]:
        (run,) = [one for one in find_runs(folders) if one.name == "one"]
        parts = {
            "metrics.jsonl": run.records(), "events.jsonl": run.events(), PROBES: run.probes(), "run.json": run.meta(),
            "eval.json": run.evaluation(), FILE_NAME: run.recorder(),
        }  # fmt: skip
        notes = [note for note in run.notes() if "leads out" in note]
        run.close()
        assert all(bool(part) for other, part in parts.items() if other != name)
        return bool(parts[name]), notes

    for folders in ((runs,), (runs / "one",)):
        there, notes = look(*folders)
        said = "is a link that leads out of the folders given to trine dash, and left out."
        assert not there and notes == [f"{name} {said}"]
    assert look(runs, outside) == (True, [])  # what it leads to was given as well
    (runs / "one" / name).unlink()
    (outside / name).rename(runs / "kept")
    (runs / "one" / name).symlink_to(Path("..") / "kept")
    assert look(runs) == (True, [])
    assert look(runs / "one")[0] is False


def test_a_run_that_is_a_link_out_of_the_given_folder_is_not_shown(tmp_path: Path) -> None:
    write_demo(tmp_path / "elsewhere" / "far", SIZE, "demo", "none")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "near").symlink_to(tmp_path / "elsewhere" / "far")
    (run,) = find_runs([tmp_path / "runs"])
    assert "is a link that leads out of the folders given" in run.problem()
    assert not run.records() and not run.meta() and run.recorder() is None
    (named,) = find_runs([tmp_path / "runs" / "near"])  # whoever names it means what it leads to
    assert not named.problem() and len(named.records()) == SIZE.steps
    both = find_runs([tmp_path / "runs", tmp_path / "elsewhere"])
    assert not any(one.problem() for one in both)
