"""Saved loads in every form they come in, and what is said of a file that is none."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trine.balance import QuantileBalancing, Recorder
from trine.balance.alerts import Alert
from trine.balance.record_format import FILE_NAME
from trine.balance.saved_loads import read_loads
from trine.config import BalanceConfig
from trine.ops.router import RouterStats
from trine.train.run_folder import RunFolder

STEPS, EXPERTS, K = 48, 16, 2
EVEN, HOT = (np.random.default_rng(seed).integers(0, high, (STEPS, EXPERTS)) for seed, high in ((0, 300), (1, 900)))


def _stepped(steps: list[object]) -> dict[str, np.ndarray]:
    return {"loads": np.ones((2, 2)), "steps": np.array(steps)}


def test_formats_hold_the_same_loads(tmp_path: Path) -> None:
    both = np.stack((HOT, EVEN), axis=1)
    np.save(tmp_path / "a.npy", both)
    np.savez(tmp_path / "b.npz", loads=both.astype(np.float32), steps=np.arange(7, 7 + STEPS), other=np.zeros(2))
    rows = [f"{s},{la},{e},{both[s, la, e]}" for s in range(STEPS) for la in range(2) for e in range(EXPERTS)]
    (tmp_path / "c.csv").write_text("step,layer,expert,load\n" + "\n".join(row for row in rows if row[-2:] != ",0"))
    for name, first in (("a.npy", 1), ("b.npz", 7), ("c.csv", 0)):
        found = read_loads(tmp_path / name)
        assert np.array_equal(found.loads_SLE, both) and found.steps_S[0] == first
        assert found.loads_SLE.dtype == np.int64
    np.savetxt(tmp_path / "d.csv", HOT, fmt="%d", delimiter=",")
    names = ",".join(["step", *(f"e{i}" for i in range(EXPERTS))])
    numbered = np.concatenate((np.arange(5, 5 + STEPS)[:, None], HOT), axis=1)
    np.savetxt(tmp_path / "e.csv", numbered, fmt="%d", delimiter=",", header=names, comments="")
    np.savez(tmp_path / "f.npz", HOT)
    for name, first in (("d.csv", 1), ("e.csv", 5), ("f.npz", 1)):
        found = read_loads(tmp_path / name)
        assert np.array_equal(found.loads_SLE[:, 0], HOT) and found.steps_S[0] == first, name
    assert read_loads(tmp_path / "e.csv", last=4).steps_S.tolist() == [49, 50, 51, 52]


def _write(path: Path, value: object) -> None:
    if isinstance(value, bytes):
        path.write_bytes(value)
    elif isinstance(value, dict):
        np.savez(path, **value)
    elif isinstance(value, np.ndarray):
        np.save(path, value, allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a.npy", np.zeros(5), "loads: found shape (5,), need [steps, layers, experts] or [steps, experts]"),
        ("a.npy", np.zeros((0, 5)), "loads: found shape (0, 1, 5)"),
        ("a.npy", np.full((2, 3), np.nan), "loads: found nan at row 0, layer 0, expert 0, need counts of tokens"),
        ("a.npy", np.array([[1, 2], [3, -1]]), "loads: found -1 at row 1, layer 0, expert 1"),
        ("a.npy", np.array([[0.5, 2]]), "found 0.5 at row 0"),
        ("a.npy", np.array([["a", "b"]]), "need counts of tokens"),
        ("a.npy", np.array([[{}, {}]]), "cannot be read"),
        ("a.npy", b"nonsense", "found a file that begins b'nonsen', need one that numpy.save(z) wrote"),
        ("a.npy", b"", "found an empty file, need loads"),
        ("a.npy", b"\x93NUMPY nonsense", "cannot be read"),
        ("a.npz", b"PK nonsense", "cannot be read"),
        ("a.npz", {"x": np.ones((2, 2)), "y": np.ones((2, 2))}, "found arrays ['x', 'y'], need one of the name loads"),
        ("a.npz", _stepped([2, 1]), "steps: found 1 at row 1 after 2, need each number larger than the one before"),
        ("a.npz", _stepped([2, 2]), "steps: found 2 at row 1 after 2"),
        ("a.npz", _stepped([-1, 2]), "steps: found -1 at row 0, need whole numbers of at least 0"),
        ("a.npz", _stepped([1, 1.5]), "steps: found 1.5 at row 1, need whole numbers"),
        ("a.npz", _stepped([1, np.nan]), "steps: found nan at row 1, need whole numbers"),
        ("a.npz", _stepped([1, np.inf]), "steps: found inf at row 1, need whole numbers"),
        ("a.npz", _stepped([2]), "steps: found shape (1,) of int64, need one number for each of the 2 rows"),
        ("a.npz", _stepped(["1", "2"]), "steps: found shape (2,) of <U1, need one number"),
        ("a.csv", b"", "found an empty file, need loads"),
        ("a.csv", b"\n\n", "found no row of numbers, need at least one"),
        ("a.csv", b"step,e0\n", "found names of columns and no row of numbers, need at least one"),
        ("a.csv", b"step;e0\n1;2\n", "line 1: found semicolons between cells, need commas"),
        ("a.csv", b"\n1\t2\n", "line 2: found tabs between cells, need commas"),
        ("a.csv", b"step,layer,e0,e1\n1,0,2,3\n", "found the column layer and none of the name expert and load"),
        ("a.csv", b"step,expert,load,load\n1,0,2,3\n", "line 1: found the column load twice, need it once"),
        ("a.csv", b"1,2\n\n3\n", "line 3: found 1 cells, need 2, as in the first line"),
        ("a.csv", b"1,2\n3,x\n", "line 2: found 'x', need a number"),
        ("a.csv", b"1,2\n3,nan\n", "loads: found nan at line 2, layer 0, expert 1"),
        ("a.csv", b"step,e0\n1,2\n\n3,-2\n", "loads: found -2.0 at line 4, layer 0, expert 0"),
        ("a.csv", b"step,e0\n1,2\n1.5,2\n", "steps: found 1.5 at line 3, need whole numbers of at least 0"),
        ("a.csv", b"step,e0\n-1,2\n", "steps: found -1.0 at line 2"),
        ("a.csv", b"step,e0\nnan,2\n", "steps: found nan at line 2"),
        ("a.csv", b"Steps,e0\n1,2\n2,2\n\n2,2\n", "steps: found 2 at line 5 after 2, need each number larger"),
        ("a.csv", b"step,e0\n7,2\n3,2\n", "steps: found 3 at line 3 after 7"),
        ("a.csv", b"step,expert,load\n1,0,4\n2,0,4\n1,0,5\n", "step 1, layer 0, expert 0 a second time at line 4"),
        ("a.csv", b"step,expert,load\n1,-1,4\n", "expert: found -1.0 at line 2, need whole numbers of at least 0"),
        ("a.csv", b"step,expert,load\n1,0,4\n1.5,0,4\n", "step: found 1.5 at line 3"),
        ("a.csv", b"step,expert,load\n1,0,4\n2,0,-4\n", "load: found -4.0 at line 3"),
        (
            "a.csv",
            b"step,expert,load\n1,100000000,4\n",
            "expert: found 100000000.0 at line 2, need whole numbers of at",
        ),
        ("a.csv", b"\xff\xfe", "cannot be read"),
        ("a.txt", b"1", "found a file of kind '.txt', need a run's folder, .npy, .npz or .csv"),
        ("b.npy", None, "no such run or file"),
        ("b.sqlite", b"nonsense", "b.sqlite"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, value: object, message: str) -> None:
    _write(tmp_path / name, value)
    with pytest.raises(ValueError) as error:
        read_loads(tmp_path / name)
    assert message in str(error.value) and str(tmp_path / name) in str(error.value)


def test_folders_that_hold_no_loads_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: found no balance.sqlite in it, it is no run's folder; need a"):
        read_loads(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"found no balance\.sqlite in it, this run recorded none \(recorder off\)"):
        read_loads(tmp_path)


def test_a_long_table_has_the_layers_it_names_and_tells_what_it_left_out(tmp_path: Path) -> None:
    """Layers 3, 7 and 40 were 41 layers, and a column more made of all of them loads of experts."""
    rows = [f"{s},{la},x,{e},{10 * la + e}" for s in (1, 2) for la in (3, 7, 40) for e in range(4)]
    (tmp_path / "a.csv").write_text("Step,layer,bias,expert,load\n" + "\n".join(rows[:-2]))
    found = read_loads(tmp_path / "a.csv")
    assert found.loads_SLE.shape == (2, 3, 4) and found.steps_S.tolist() == [1, 2]
    assert found.loads_SLE[0].tolist() == [[30, 31, 32, 33], [70, 71, 72, 73], [400, 401, 402, 403]]
    assert found.loads_SLE[1, 2].tolist() == [400, 401, 0, 0]
    assert found.notes == (
        f"{tmp_path / 'a.csv'}: columns that are not read: bias.",
        f"{tmp_path / 'a.csv'}: its layers 3, 7, 40 are called 0 to 2 here.",
        f"{tmp_path / 'a.csv'}: 2 of 24 experts of steps and layers have no row: counted as 0.",
    )
    (tmp_path / "b.csv").write_text("step,expert,load\n1,0,4\n1,1,4\n")
    assert read_loads(tmp_path / "b.csv").notes == ()


def test_last_must_be_one_or_more(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="last: found 0, need at least 1"):
        read_loads(tmp_path, last=0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with ten recorded steps."""
    stats, policy = RouterStats.allocate(2, EXPERTS, 100), QuantileBalancing(K)
    recorder = Recorder(tmp_path / FILE_NAME, layers=2, experts=EXPERTS, top_k=K)
    for step in range(1, 11):
        stats.loads_LE.add_(torch.randint(1, 50, (2, EXPERTS), dtype=torch.int32))
        recorder.record(step, policy.step(stats))
    recorder.close()
    return tmp_path


def event(step: int, begins: bool = True, rule: str = "stale", **more: object) -> str:
    values = {"layers": [0], "count": 1, "value": None, "level": 4, "text": "late", **more}
    return json.dumps({"time": 1.0, "kind": "balance_alert", "step": step, "rule": rule, "begins": begins, **values})


def test_a_run_tells_its_policy_and_its_controller(run: Path) -> None:
    """Whether the folder is named or the file in it."""
    without = read_loads(run)
    assert without.balance is None and without.told is None and without.notes == ()
    dials = BalanceConfig(policy="sign", sign_step=0.01).dials()
    (run / "run.json").write_text(json.dumps({"format_version": 1, "config": {"balance": dials}}))
    lines = [event(2), event(5, False), event(7), event(7), event(8, rule="p95"), event(99), '{"kind": "saved"}']
    (run / "events.jsonl").write_text("\n".join(lines))
    for path in (run, run / FILE_NAME):
        found = read_loads(path)
        assert found.balance == BalanceConfig(policy="sign", sign_step=0.01) and found.notes == ()
        assert [(one.step, one.begins) for one in found.told or ()] == [(2, True), (5, False), (7, True)]
    # of steps that are not read only what was still on counts
    assert [one.step for one in read_loads(run, last=3).told or ()] == [7]  # steps 8 to 10; it began at 7
    assert [one.step for one in read_loads(run, last=5).told or ()] == [7]  # steps 6 to 10; 2 ended at 5
    (run / "run.json").write_text(json.dumps({"config": {}}))
    assert read_loads(run).balance is None and read_loads(run).notes == ()


def test_what_a_run_folder_writes_is_what_is_read(run: Path) -> None:
    late = Alert(4, "stale", True, (0, 1), 2, math.nan, 4.0, "steps since the bias last came from its controller")
    over = replace(late, step=6, begins=False, value=0.0, level=1.0)
    with RunFolder(run) as folder:
        for alert in (late, over):
            folder.event("balance_alert", **alert.to_json())
    told = read_loads(run).told or ()
    assert [one.to_json() for one in told] == [late.to_json(), over.to_json()] and math.isnan(told[0].value)


@pytest.mark.parametrize(
    "record", ["", "[]", "{}", '{"config": {"balance": {"policy": "better"}}}', '{"config": {"balance": {"new": 1}}}']
)
def test_a_damaged_record_is_noted_and_loads_are_read(run: Path, record: str) -> None:
    (run / "run.json").write_text(record)
    torn = [event(3)[:-9], "[]", "nonsense", event(4, level="high"), event(5, layers=None), event(6)]
    (run / "events.jsonl").write_text("\n".join(torn))
    found = read_loads(run)
    assert found.balance is None and [one.step for one in found.told or ()] == [6] and len(found.steps_S) == 10
    assert "run.json: its balance policy cannot be read" in found.notes[0]
    assert found.notes[1] == f"{run / 'events.jsonl'}: 5 of its lines cannot be read."
