"""How an operator chooses its implementation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from trine._log import logger


class BackendUnavailable(RuntimeError):
    """An explicitly requested backend cannot run here; the message says what was needed and what was found."""


@cache
def _say_once(operator: str, backend: str, device: str) -> None:
    logger.info("%s runs on backend %r for %s tensors", operator, backend, device)


def pick(operator: str, backend: str, device: str, reasons: Mapping[str, str | None]) -> str:
    """Resolve ``backend`` to the name of an implementation.

    Args:
        operator: name used in messages, e.g. ``"kda"``.
        backend: ``"auto"`` or one of the keys of ``reasons``.
        device: device type of the inputs, for the log line.
        reasons: implementations in order of preference, each with ``None`` (it can run) or a sentence saying what it
            needs and what was found.

    Returns:
        The chosen key. ``"auto"`` takes the first that can run and logs the choice once.

    Raises:
        ValueError: unknown name.
        BackendUnavailable: an explicit choice that cannot run.
    """
    if backend == "auto":
        for name, reason in reasons.items():
            if reason is None:
                if not torch.compiler.is_compiling():  # the log would break the graph
                    _say_once(operator, name, device)
                return name
        found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise BackendUnavailable(f"{operator}: no backend can run: {found}")
    if not isinstance(backend, str) or backend not in reasons:
        raise ValueError(f"backend: found {backend!r}, need one of {['auto', *reasons]} for {operator}")
    if reasons[backend] is not None:
        raise BackendUnavailable(f"{operator}: backend {backend!r} cannot run here: {reasons[backend]}")
    return backend
