"""Tensors that are float32 by contract survive every cast down and follow a cast up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trine.nn.precision import Float32Parameters, at_least_float32, float32_parameter


class Sample(Float32Parameters):
    def __init__(self) -> None:
        super().__init__()
        self.kept = float32_parameter(3)
        self.register_buffer("counter", torch.arange(3))
        self.child = nn.Linear(3, 3)
        nn.init.constant_(self.kept, 0.123456789)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_down_keeps_every_digit(dtype: torch.dtype) -> None:
    module = Sample().to(dtype)
    assert module.kept.dtype == torch.float32
    assert float(module.kept[0]) == float(torch.tensor(0.123456789))
    assert module.child.weight.dtype == dtype
    assert module.counter.dtype == torch.int64
    assert module.half().kept.dtype == torch.float32


def test_cast_up_is_followed() -> None:
    module = Sample().double()
    assert module.kept.dtype == torch.float64
    assert module.float().kept.dtype == torch.float32


def test_a_16_bit_default_does_not_reach_the_parameter() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert float32_parameter(2).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert at_least_float32(torch.float64) == torch.float64
