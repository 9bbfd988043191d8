from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trine.train.errors import RunError
from trine.train.run_folder import RunFolder, free_name, newest_run, read_json

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process 77 on moon")
file.flush()
print("held", flush=True)
time.sleep(60)
"""


def test_two_runs_in_one_folder_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder(path) as folder:
        with pytest.raises(RunError) as error:
            RunFolder(path)
        assert str(error.value).startswith(f"{path}: in use by process {os.getpid()} on ")
        assert str(error.value).endswith("; wait for it, or choose another --run")
        assert error.value.exit_code == 1
    folder.close()
    RunFolder(path).close()


def test_a_folder_made_for_a_run_that_never_began_goes_again(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    with pytest.raises(ValueError, match="no data"), RunFolder(path):
        (path / "data").mkdir()
        raise ValueError("no data")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="later"), RunFolder(path) as folder:
        folder.write_json("run.json", {})
        raise ValueError("later")
    assert (path / "run.json").exists()
    other = tmp_path / "mine"
    other.mkdir()  # not made here, not removed here
    with pytest.raises(ValueError, match="no data"), RunFolder(other):
        raise ValueError("no data")
    assert other.exists()


def test_the_lock_of_a_killed_process_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    command = [sys.executable, "-S", "-c", HOLD, str(path / "lock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="in use by process 77 on moon; wait for it"):
            RunFolder(path)
    finally:
        holder.kill()
        holder.wait()
    RunFolder(path).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=r"file/run: cannot be written to \(Not a directory\)"):
        RunFolder(tmp_path / "file" / "run")


def test_records_carry_a_version_and_newer_or_broken_ones_are_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        assert not folder.has_run
        folder.write_json("run.json", {"seed": 3})
        assert folder.has_run
    assert read_json(tmp_path / "run.json") == {"format_version": 1, "seed": 3}
    for text, message in (
        ('{"format_version": 2}', "format_version 2 is newer than 1"),
        ('{"seed": 1}', r"damaged \(no format_version\)"),
        ("{", "damaged"),
    ):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RunError, match=message):
            read_json(tmp_path / "run.json")
    with pytest.raises(RunError, match=r"none.json: does not exist"):
        read_json(tmp_path / "none.json")


def test_events_and_metrics_are_lines(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.event("resume", step=4)
        for step in range(1, 5):
            folder.metric({"step": step})
        (tmp_path / "metrics.jsonl").open("a").write('{"step": 5, "lo')
        assert folder.forget_metrics_after(3) == 2
        assert folder.forget_metrics_after(3) == 0
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["kind"], event["step"]) == ("resume", 4)
    assert time.strptime(event["time"], "%Y-%m-%dT%H:%M:%SZ").tm_year >= 2024
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_line_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        (tmp_path / "metrics.jsonl").mkdir()
        with pytest.raises(RunError, match=r"metrics.jsonl: cannot be written \(Is a directory\)"):
            folder.metric({"step": 1})
        with pytest.raises(RunError, match=r"nowhere/a.json: cannot be written"):
            folder.write_json("nowhere/a.json", {})


def test_names_of_runs(tmp_path: Path) -> None:
    assert free_name(tmp_path, "laptop") == "laptop"
    assert newest_run(tmp_path, "laptop") is None
    for age, name in enumerate(["laptop-2", "laptop", "laptop-x", "laptop2"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        os.utime(tmp_path / name / "run.json", (1000 + age, 1000 + age))
    assert free_name(tmp_path, "laptop") == "laptop-3"
    assert newest_run(tmp_path, "laptop") == "laptop"
    # the one that saved last counts, not the one that began last
    (tmp_path / "laptop-2" / "checkpoints" / "step-000001").mkdir(parents=True)
    assert newest_run(tmp_path, "laptop") == "laptop-2"
