"""Depth residuals against their definitions, written out with every sublayer output kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trine.nn import AttnResidual, ChunkResidual, PlainResidual, ShallowToDeepResidual
from trine.nn.depth import DepthMix, DepthStream

D = 6


def mix(sources: list[Tensor], cell: nn.Module) -> Tensor:
    """Attention Residuals, §3: softmax over w · (γ ⊙ RMSNorm(v)), values as they are."""
    assert isinstance(cell, DepthMix)
    v_STD = torch.stack(sources)
    keys_STD = v_STD / (v_STD.square().mean(-1, keepdim=True) + cell.eps).sqrt()
    alpha_ST = (keys_STD @ (cell.gain * cell.query)).softmax(0)
    return (alpha_ST[..., None] * v_STD).sum(0)


def sublayer(i: int, kind: int, h_TD: Tensor) -> Tensor:
    return torch.sin(h_TD * (1 + i) + kind) + 0.1 * h_TD


def walk(stream: DepthStream, layers: int) -> tuple[list[Tensor], Tensor]:
    inputs = []
    for i in range(layers):
        inputs.append(stream.attention_input(i))
        stream.add_attention(i, sublayer(i, 0, inputs[-1]))
        inputs.append(stream.feed_forward_input(i))
        stream.add_feed_forward(i, sublayer(i, 1, inputs[-1]))
    return inputs, stream.output()


def wake(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()


@pytest.mark.parametrize(("layers", "block"), [(5, 2), (6, 3), (4, 1), (3, 12), (1, 1)])
def test_attn_residual_follows_the_paper(layers: int, block: int) -> None:
    residual = AttnResidual(D, layers, block).double()
    wake(residual)
    x_TD = torch.randn(4, D, dtype=torch.float64)
    inputs, output = walk(residual.start(x_TD), layers)

    outputs: list[Tensor] = []  # f_1 .. f_2L
    expected: list[Tensor] = []
    size = 2 * block
    for s in range(2 * layers):
        finished, inside = divmod(s, size)
        sources = [x_TD] + [sum(outputs[n * size : (n + 1) * size], torch.zeros_like(x_TD)) for n in range(finished)]
        if inside:
            sources.append(sum(outputs[finished * size :], torch.zeros_like(x_TD)))
        cells = residual.attention if s % 2 == 0 else residual.feed_forward
        h_TD = x_TD if s == 0 else mix(sources, cells[s // 2])
        expected.append(h_TD)
        outputs.append(sublayer(s // 2, s % 2, h_TD))
    blocks = [sum(outputs[n : n + size], torch.zeros_like(x_TD)) for n in range(0, 2 * layers, size)]
    torch.testing.assert_close(torch.stack(inputs), torch.stack(expected), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(output, mix([x_TD, *blocks], residual.final), rtol=1e-11, atol=1e-11)


# Failure B014: count the sources of the last mix.
@pytest.mark.parametrize(("layers", "block", "sources"), [(93, 12, 9), (24, 12, 3), (5, 2, 4), (2, 1, 3), (1, 12, 2)])
def test_b014_sources_of_the_last_mix(layers: int, block: int, sources: int) -> None:
    residual = AttnResidual(D, layers, block)
    seen: list[int] = []
    residual.final.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    commits: list[int] = []
    stream = residual.start(torch.randn(2, D))
    for i in range(layers):
        before = len(stream.blocks)  # type: ignore[attr-defined]
        h_TD = stream.attention_input(i)
        if len(stream.blocks) > before:  # type: ignore[attr-defined]
            commits.append(i)
        stream.add_attention(i, h_TD)
        stream.add_feed_forward(i, stream.feed_forward_input(i))
    stream.output()
    assert seen == [sources]
    assert commits == list(range(0, layers, block))


def test_plain_is_the_sum() -> None:
    x_TD = torch.randn(4, D, dtype=torch.float64)
    inputs, output = walk(PlainResidual().start(x_TD), 3)
    total = x_TD
    for s, h_TD in enumerate(inputs):
        torch.testing.assert_close(h_TD, total)
        total = total + sublayer(s // 2, s % 2, h_TD)
    torch.testing.assert_close(output, total)


def test_chunk_reads_across_layers_at_boundaries_only() -> None:
    residual = ChunkResidual(D, 5, 2).double()
    assert len(residual.mixes) == 2
    wake(residual)
    x_TD = torch.randn(4, D, dtype=torch.float64)
    inputs, output = walk(residual.start(x_TD), 5)
    total, boundaries = x_TD, [x_TD]
    for s, h_TD in enumerate(inputs):
        layer = s // 2
        if s % 2 == 0 and layer in (2, 4):
            boundaries.append(total)
            n = layer // 2 - 1
            total = total + residual.path_gains[n] * (mix(boundaries, residual.mixes[n]) - total)
        torch.testing.assert_close(h_TD, total, rtol=1e-11, atol=1e-11)
        total = total + sublayer(layer, s % 2, h_TD)
    torch.testing.assert_close(output, total, rtol=1e-11, atol=1e-11)


def test_shallow_attention_reaches_deep_layers() -> None:
    residual = ShallowToDeepResidual(D, (0, 1), (2, 3)).double()
    wake(residual)
    x_TD = torch.randn(4, D, dtype=torch.float64)
    inputs, output = walk(residual.start(x_TD), 4)
    total, kept = x_TD, {}
    for s, h_TD in enumerate(inputs):
        layer, attention = s // 2, s % 2 == 0
        expected = total
        if attention and layer in (2, 3):
            for shallow, a_TD in kept.items():
                expected = expected + residual.pair_gains[f"{shallow}_{layer}"] * a_TD
        torch.testing.assert_close(h_TD, expected, rtol=1e-11, atol=1e-11)
        y_TD = sublayer(layer, s % 2, h_TD)
        if attention and layer in (0, 1):
            kept[layer] = y_TD
        total = total + y_TD
    torch.testing.assert_close(output, total, rtol=1e-11, atol=1e-11)
