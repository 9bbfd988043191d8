from __future__ import annotations

from pathlib import Path

from trine.train.checkpoint import CheckpointError, NewerFormatError
from trine.train.errors import Interrupted, NumericStop, RunError, TrainError, no_run


def test_a_run_that_is_not_there_has_one_message(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert str(no_run("x", runs)) == "run: found no run in x"
    for name in ("smoke", "laptop-2"):
        (runs / name).mkdir(parents=True)
        (runs / name / "run.json").touch()
    (runs / "junk").mkdir()
    assert str(no_run(runs / "smke", runs)) == f"run: found no run in {runs}/smke; did you mean smoke?"
    assert str(no_run("x", runs)) == f"run: found no run in x; {runs}/ has laptop-2, smoke"
    assert str(no_run(runs, runs, "1b")) == f"run: found no run of preset '1b' in {runs}; {runs}/ has laptop-2, smoke"


def test_exit_codes_are_those_the_command_line_documents() -> None:
    codes = {kind: kind("x").exit_code for kind in (TrainError, RunError, NumericStop, Interrupted)}
    assert codes == {TrainError: 1, RunError: 1, NumericStop: 3, Interrupted: 130}
    assert CheckpointError("x").exit_code == NewerFormatError("x").exit_code == 1
