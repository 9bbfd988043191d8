"""The causal depthwise convolution in front of KDA."""

from __future__ import annotations

from torch import Tensor, nn

from trine.nn.precision import Float32Parameters, float32_parameter
from trine.ops.short_conv import short_conv


class ShortConv(Float32Parameters):
    """y_t = SiLU(Σ_j w_j ⊙ x_{t-W+1+j}), one filter of W taps a channel, weights float32 (K3 report §2.1)."""

    def __init__(self, channels: int, taps: int = 4) -> None:
        super().__init__()
        self.weight = float32_parameter(channels, taps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ± taps^-1/2, the usual default of a depthwise convolution."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, x_BTC: Tensor, cu_seqlens_N1: Tensor | None = None, window_NWC: Tensor | None = None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve; with `keep` also return the last W-1 inputs of each sequence."""
        return short_conv(
            x_BTC, self.weight, cu_seqlens=cu_seqlens_N1, window_NWC=window_NWC, activation="silu", output_window=keep
        )
