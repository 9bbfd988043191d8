"""Which tensors stay in float32 when a model is cast down (docs/precision.md states the whole policy)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

_HALF = (torch.bfloat16, torch.float16)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32 for the 16-bit types; float32 and float64 unchanged."""
    return torch.float32 if dtype in _HALF else dtype


def cast_but_keep_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap the function of `Module._apply`: the device changes as asked, a 16-bit dtype is not taken on."""

    def apply(tensor: Tensor) -> Tensor:
        out = fn(tensor)
        if out.is_floating_point() and out.dtype in _HALF:
            # From the original tensor: a detour over 16 bits would lose the digits this class exists to keep.
            return tensor.to(device=out.device, dtype=at_least_float32(tensor.dtype))
        return out

    return apply


class Float32Parameters(nn.Module):
    """A module whose own parameters and buffers (not its children's) never drop below float32."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(cast_but_keep_float32(fn), recurse=False)


def float32_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter of float32 (float64 under a float64 default), whatever the default dtype is."""
    return nn.Parameter(torch.empty(*shape, dtype=at_least_float32(torch.get_default_dtype())))
