"""Checkpoints written by a thread, one after another, while training goes on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trine.train import checkpoint


class Writer:
    """Saves and prunes in a thread. A save begins when the one before it has ended, so order is that of the calls.

    Args:
        folder: holds all checkpoints of a run.
        keep: newest checkpoints that are kept.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Copy everything, then write it in the background. The save before must have been taken with `finished`."""
        assert self._thread is None, "the save before was not waited for"
        copies = {
            stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
            for stem, named in tensors.items()
        }
        self._path = self._error = None
        # Not a daemon: the program's end waits for a save that has begun.
        self._thread = threading.Thread(
            target=self._write, args=(step, copies, copy.deepcopy(dict(state))), name="trine-checkpoint"
        )
        self._thread.start()

    def _write(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        try:
            path = checkpoint.save_checkpoint(self._folder, step, tensors, state)
            checkpoint.prune(self._folder, self._keep, path)
            self._path = path
        except BaseException as error:  # handed to the thread that trains
            self._error = error

    def finished(self, wait: bool = False) -> Path | None:
        """The checkpoint whose writing has ended since the last call, or None.

        Args:
            wait: until a save under way has ended.

        Raises:
            RunError: it failed; older checkpoints are intact.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._path
