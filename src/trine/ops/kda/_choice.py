"""Whether the GPU kernels can take a call, and how it is said when they cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from trine._log import logger
from trine.ops._backend import BackendUnavailable

_NO_TRITON = "needs the package triton (in the clone: .venv/bin/pip install -e '.[gpu]'), found none"


_PLAIN = (Tensor, torch.nn.Parameter)


def traced(tensor: Tensor) -> bool:
    """Whether somebody traces this call: ``torch.compile``, or a tensor that is no plain one (fake, functional)."""
    return torch.compiler.is_compiling() or type(tensor) not in _PLAIN


@cache
def triton_is_there() -> bool:
    """Whether the package triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def why_not_triton(q: Tensor, v: Tensor, gate_kind: str, lower_bound: float, *others: Tensor) -> str | None:
    """What the chunked kernels need and what was found instead; None when they can run."""
    reason = why_no_card(q)
    if reason is not None:
        return reason
    from trine.ops.kda.triton_forward import unsupported

    return unsupported(q, v, gate_kind, lower_bound, *others)


def why_no_card(q: Tensor) -> str | None:
    """What any kernel needs and what was found instead; None for a CUDA tensor where triton is installed."""
    if q.device.type != "cuda":
        return f"needs CUDA tensors, found {q.device.type}"
    # torch.compile cannot look for packages, and has found triton already.
    if not torch.compiler.is_compiling() and not triton_is_there():
        return _NO_TRITON
    return None


@cache
def say_slow(operator: str, reason: str) -> None:
    """Warn once that a call on a card runs without kernels."""
    logger.warning(
        "%s: %s; this call and others like it take the slower chunked torch path on the GPU", operator, reason
    )


def tune_kda(say: Callable[[str], None], write: bool) -> None:
    """``trine tune kda``: see ``triton_tune``.

    Raises:
        BackendUnavailable: no CUDA card, or no triton.
    """
    if not triton_is_there():
        raise BackendUnavailable(f"tune kda: {_NO_TRITON}")
    from trine.ops.kda.triton_tune import tune

    tune(say, write)
