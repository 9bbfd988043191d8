"""The convolution layer: depthwise, causal, SiLU, and its window carried on."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from trine.nn import ShortConv


def test_equals_a_padded_depthwise_convolution() -> None:
    conv = ShortConv(6, 4).double()
    x_BTC = torch.randn(2, 9, 6, dtype=torch.float64)
    expected = F.silu(F.conv1d(F.pad(x_BTC.transpose(1, 2), (3, 0)), conv.weight[:, None], groups=6)).transpose(1, 2)
    y_BTC, window = conv(x_BTC)
    torch.testing.assert_close(y_BTC, expected, rtol=1e-12, atol=1e-12)
    assert window is None


def test_the_window_continues() -> None:
    conv = ShortConv(6, 4)
    x_BTC = torch.randn(2, 9, 6)
    whole_BTC, _ = conv(x_BTC)
    first_BTC, window_NWC = conv(x_BTC[:, :2], keep=True)
    second_BTC, window_NWC = conv(x_BTC[:, 2:], window_NWC=window_NWC, keep=True)
    torch.testing.assert_close(torch.cat((first_BTC, second_BTC), 1), whole_BTC)
    assert torch.equal(window_NWC, x_BTC[:, -3:])


def test_weights_stay_float32_and_within_the_bound() -> None:
    conv = ShortConv(1000, 4).to(torch.bfloat16)
    assert conv.weight.dtype == torch.float32
    assert 0.49 < float(conv.weight.abs().max()) <= 0.5
