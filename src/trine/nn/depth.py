"""How sublayers read what earlier ones wrote: Block Attention Residuals and the baselines it is compared with.

Each residual is a module that holds the learned part; `start(x_TD)` returns the running state of one forward pass with
four verbs, in the order a decoder uses them: `attention_input(i)`, `add_attention(i, a)`, `feed_forward_input(i)`,
`add_feed_forward(i, f)`, and `output()` at the end.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from trine.ops.attn_res import attn_res


class DepthStream(Protocol):
    """The running state of a residual during one forward pass."""

    def attention_input(self, i: int) -> Tensor:
        """What layer `i`'s attention reads."""

    def add_attention(self, i: int, a_TD: Tensor) -> None:
        """Take in the output of layer `i`'s attention."""

    def feed_forward_input(self, i: int) -> Tensor:
        """What layer `i`'s feed-forward reads."""

    def add_feed_forward(self, i: int, f_TD: Tensor) -> None:
        """Take in the output of layer `i`'s feed-forward."""

    def output(self) -> Tensor:
        """What the head reads, before the final norm."""


class DepthMix(nn.Module):
    """Softmax mix over depth sources with a learned query (Attention Residuals, arXiv 2603.15031, §3).

    The query starts at zero, so every source starts with the same weight; the gain is the key norm's.
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.empty(width))
        self.gain = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero query, unit gain."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.gain)

    def forward(self, sources: list[Tensor]) -> Tensor:
        """Mix the sources, each `[T, D]`."""
        return attn_res(sources, self.query, self.gain, self.eps)


class AttnResidual(nn.Module):
    """Block Attention Residuals (K3 report, Eq. 8-10): every sublayer mixes the embedding, the finished block sums and
    the running partial sum. Layer 0's attention mix exists, as in the release, and is never read."""

    def __init__(self, width: int, layers: int, block_layers: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.block_layers = block_layers
        self.attention = nn.ModuleList(DepthMix(width, eps) for _ in range(layers))
        self.feed_forward = nn.ModuleList(DepthMix(width, eps) for _ in range(layers))
        self.final = DepthMix(width, eps)

    def start(self, x_TD: Tensor) -> DepthStream:
        """Begin with the token embeddings."""
        return _AttnStream(self, x_TD)


class _AttnStream:
    def __init__(self, residual: AttnResidual, x_TD: Tensor) -> None:
        self.residual = residual
        self.blocks: list[Tensor] = []
        self.partial: Tensor | None = x_TD

    def sources(self) -> list[Tensor]:
        """Finished blocks and, unless it is still empty, the running sum."""
        return self.blocks if self.partial is None else [*self.blocks, self.partial]

    def _add(self, y_TD: Tensor) -> None:
        self.partial = y_TD if self.partial is None else self.partial + y_TD

    def attention_input(self, i: int) -> Tensor:
        sources = self.sources()
        h_TD = sources[0] if i == 0 else self.residual.attention[i](sources)
        if i % self.residual.block_layers == 0:
            # The mix above still reads the finished sum; the new block starts from nothing.
            self.blocks, self.partial = sources, None
        return h_TD

    def add_attention(self, i: int, a_TD: Tensor) -> None:
        self._add(a_TD)

    def feed_forward_input(self, i: int) -> Tensor:
        return self.residual.feed_forward[i](self.sources())

    def add_feed_forward(self, i: int, f_TD: Tensor) -> None:
        self._add(f_TD)

    def output(self) -> Tensor:
        return self.residual.final(self.sources())


class PlainResidual(nn.Module):
    """The ordinary pre-norm residual sum: the baseline without depth attention."""

    def start(self, x_TD: Tensor) -> DepthStream:
        """Begin with the token embeddings."""
        return _PlainStream(x_TD)


class _PlainStream:
    def __init__(self, x_TD: Tensor) -> None:
        self.sum_TD = x_TD

    def attention_input(self, i: int) -> Tensor:
        return self.sum_TD

    def add_attention(self, i: int, a_TD: Tensor) -> None:
        self.sum_TD = self.sum_TD + a_TD

    def feed_forward_input(self, i: int) -> Tensor:
        return self.sum_TD

    def add_feed_forward(self, i: int, f_TD: Tensor) -> None:
        self.sum_TD = self.sum_TD + f_TD

    def output(self) -> Tensor:
        return self.sum_TD


class ChunkResidual(nn.Module):
    """Layers grouped in chunks that share one cross-layer path, read at the chunk's boundary only.

    Inside a chunk the residual is the plain sum. When a chunk starts, its stream moves toward a softmax mix of the
    embedding and the streams at all earlier boundaries: s ← s + scale ⊙ (mix - s). `scale` starts at zero (the form's
    own initialisation), so the net starts as the plain one.
    """

    def __init__(self, width: int, layers: int, block_layers: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.block_layers = block_layers
        chunks = (layers - 1) // block_layers  # the first chunk has nothing earlier to read
        self.mixes = nn.ModuleList(DepthMix(width, eps) for _ in range(chunks))
        self.path_gains = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(chunks))

    def start(self, x_TD: Tensor) -> DepthStream:
        """Begin with the token embeddings."""
        return _ChunkStream(self, x_TD)


class _ChunkStream(_PlainStream):
    def __init__(self, residual: ChunkResidual, x_TD: Tensor) -> None:
        super().__init__(x_TD)
        self.residual = residual
        self.boundaries = [x_TD]

    def attention_input(self, i: int) -> Tensor:
        chunk, inside = divmod(i, self.residual.block_layers)
        if chunk > 0 and inside == 0:
            self.boundaries.append(self.sum_TD)
            mix_TD = self.residual.mixes[chunk - 1](self.boundaries)
            self.sum_TD = self.sum_TD + self.residual.path_gains[chunk - 1] * (mix_TD - self.sum_TD)
        return self.sum_TD


class ShallowToDeepResidual(nn.Module):
    """The plain sum, with chosen shallow attention outputs added to the attention input of chosen deep layers.

    One learned gain vector for each pair, starting at zero, so the net starts as the plain one.
    """

    def __init__(self, width: int, shallow_layers: tuple[int, ...], deep_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.shallow_layers, self.deep_layers = shallow_layers, deep_layers
        self.pair_gains = nn.ParameterDict(
            {
                f"{shallow}_{deep}": nn.Parameter(torch.zeros(width))
                for shallow in shallow_layers
                for deep in deep_layers
            }
        )

    def start(self, x_TD: Tensor) -> DepthStream:
        """Begin with the token embeddings."""
        return _ShallowToDeepStream(self, x_TD)


class _ShallowToDeepStream(_PlainStream):
    def __init__(self, residual: ShallowToDeepResidual, x_TD: Tensor) -> None:
        super().__init__(x_TD)
        self.residual = residual
        self.kept: dict[int, Tensor] = {}

    def attention_input(self, i: int) -> Tensor:
        h_TD = self.sum_TD
        if i in self.residual.deep_layers:
            for shallow, a_TD in self.kept.items():
                h_TD = h_TD + self.residual.pair_gains[f"{shallow}_{i}"] * a_TD
        return h_TD

    def add_attention(self, i: int, a_TD: Tensor) -> None:
        if i in self.residual.shallow_layers:
            self.kept[i] = a_TD
        super().add_attention(i, a_TD)
