"""The ways a training run can end early, each with the exit code of the command line."""

from __future__ import annotations


class TrainError(Exception):
    """A run ended early. ``str(error)`` is one line for the user; ``exit_code`` is what the command returns."""

    exit_code = 1


class RunError(TrainError):
    """The user can mend it: a folder in use, a changed plan, a damaged checkpoint, a full disk. Exit code 1."""


class NumericStop(TrainError):
    """Losses or gradients, or the model itself, are not finite; what is on disk is. Exit code 3."""

    exit_code = 3


class Interrupted(TrainError):
    """A signal arrived; everything up to the last whole step is saved. Exit code 130."""

    exit_code = 130
