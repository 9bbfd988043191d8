"""What kernels find wrong with values on a device, reported without making anyone wait.

Values of a CUDA ``cu_seqlens`` or ``state_indices`` are never read back by the call that gets them: that would stall
it. The kernels test them, stay inside their buffers, and set a word of the device's own; whoever waits for the device
anyway (the trainer at its next step, ``trine.check_errors``) reads it.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

_MESSAGES = (
    "cu_seqlens: values on {device} do not start at 0, decrease, or do not end at the number of tokens",
    "state_indices: values on {device} are neither -1 (padding) nor an entry of the pool",
)
CU_SEQLENS, STATE_INDICES = range(len(_MESSAGES))
_words: dict[torch.device, Tensor] = {}


def error_words(device: torch.device) -> Tensor:
    """The device's error words, int32 ``[2]``: one for bad ``cu_seqlens``, one for bad ``state_indices``; 0 is good."""
    found = _words.get(device)
    if found is None:
        with torch.inference_mode(False):  # so that it may be cleared outside inference mode too
            found = _words[device] = torch.zeros(len(_MESSAGES), dtype=torch.int32, device=device)
    return found


def check_errors(device: torch.device | str | None = None) -> None:
    """Raise what kernels have found wrong since the last check, and forget it. Waits for the devices it reads.

    Costs nothing where no kernel that reports errors has run. ``TRINE_CHECK=1`` in the environment makes the operators
    call it themselves after every launch.

    Args:
        device: where to look; None: every device on which such a kernel has run.

    Raises:
        ValueError: a kernel met values that describe nothing; the results of that call mean nothing.
    """
    wanted = None if device is None else torch.device(device)
    found = []
    for where, word in _words.items():
        if wanted is not None and where != wanted and not (wanted.index is None and where.type == wanted.type):
            continue
        flags = word.tolist()
        if any(flags):
            word.zero_()
            found += [text.format(device=where) for text, flag in zip(_MESSAGES, flags, strict=True) if flag]
    if found:
        raise ValueError("; ".join(found))


def check_at_once(device: torch.device) -> None:
    """Read the device's error words now if ``TRINE_CHECK=1`` asks for it and no CUDA graph is being captured."""
    if os.environ.get("TRINE_CHECK") == "1" and not (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    ):
        check_errors(device)
