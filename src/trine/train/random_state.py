"""The random numbers a model or callback could draw, as JSON-ready values and back."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """State of torch, its cards, numpy and Python."""

    def text(tensor: Tensor) -> str:
        return base64.b64encode(tensor.cpu().numpy().tobytes()).decode()

    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    return {
        "torch": text(torch.get_rng_state()),
        "cuda": [text(one) for one in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` gave; cards only where there are as many."""

    def tensor(text: str) -> Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

    torch.set_rng_state(tensor(state["torch"]))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([tensor(one) for one in state["cuda"]])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))
