"""The ways a training run can end early, each with the exit code of the command line."""

from __future__ import annotations

import difflib
from pathlib import Path


class TrainError(Exception):
    """A run ended early. ``str(error)`` is one line for the user; ``exit_code`` is what the command returns."""

    exit_code = 1


class RunError(TrainError):
    """The user can mend it: a folder in use, a changed plan, a damaged checkpoint, a full disk. Exit code 1."""


def no_run(where: str | Path, runs: Path, preset: str = "") -> RunError:
    """The one message for a run that is not there: the nearest name in ``runs``, or all that are there.

    Args:
        where: what was asked for, a path or a name; with ``preset`` the folder that was searched.
        runs: folder of runs.
        preset: a run of this preset was asked for.
    """
    known = sorted(path.parent.name for path in runs.glob("*/run.json"))
    near = difflib.get_close_matches(preset or Path(where).name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; {runs}/ has {', '.join(known)}" if known else ""
    return RunError(f"run: found no run {f'of preset {preset!r} ' if preset else ''}in {where}{hint}")


class NumericStop(TrainError):
    """Losses or gradients, or the model itself, are not finite; what is on disk is. Exit code 3."""

    exit_code = 3


class Interrupted(TrainError):
    """A signal arrived; everything up to the last whole step is saved. Exit code 130."""

    exit_code = 130
