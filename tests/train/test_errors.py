from __future__ import annotations

from trine.train.checkpoint import CheckpointError, NewerFormatError
from trine.train.errors import Interrupted, NumericStop, RunError, TrainError


def test_exit_codes_are_those_the_command_line_documents() -> None:
    codes = {kind: kind("x").exit_code for kind in (TrainError, RunError, NumericStop, Interrupted)}
    assert codes == {TrainError: 1, RunError: 1, NumericStop: 3, Interrupted: 130}
    assert CheckpointError("x").exit_code == NewerFormatError("x").exit_code == 1
