"""Gated MLA against plain softmax attention, and without any notion of position."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.nn import GatedMLA
from trine.ops.latent_attention import Latents

D, H, K, R, S = 12, 2, 5, 4, 3


def layer_in_float64(output_gate: bool = True) -> GatedMLA:
    layer = GatedMLA(D, H, K, q_rank=6, kv_rank=R, shared_key_dim=S, output_gate=output_gate).double()
    with torch.no_grad():
        layer.q_norm.weight.normal_()
        layer.kv_norm.weight.normal_()
    return layer


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def by_hand(layer: GatedMLA, x_TD: Tensor) -> Tensor:
    """K3 report, Eq. 7."""
    q = (rms(x_TD @ layer.q_down.weight.T, layer.q_norm.weight) @ layer.q_up.weight.T).view(-1, H, K + S)
    down = x_TD @ layer.kv_down.weight.T
    latent, shared = rms(down[:, :R], layer.kv_norm.weight), down[:, R:]
    kv = (latent @ layer.kv_up.weight.T).view(-1, H, 2 * K)
    outs = []
    for h in range(H):
        key = torch.cat((kv[:, h, :K], shared), -1)
        scores = (q[:, h] @ key.T) * (K + S) ** -0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        outs.append(scores.softmax(-1) @ kv[:, h, K:])
    o_TC = torch.stack(outs, 1).flatten(1)
    if layer.gate_proj is not None:
        o_TC = o_TC * torch.sigmoid(x_TD @ layer.gate_proj.weight.T)
    return o_TC @ layer.o_proj.weight.T


def test_layer_equals_its_equations() -> None:
    for gate in (True, False):
        layer = layer_in_float64(gate)
        x_TD = torch.randn(17, D, dtype=torch.float64)
        y_TD, past = layer(x_TD)
        assert past is None
        torch.testing.assert_close(y_TD, by_hand(layer, x_TD), rtol=1e-10, atol=1e-10)


# Failure B011: ports rotate the "rope" part of the shapes. Without positions, the order of the past cannot matter.
def test_b011_the_order_of_the_past_does_not_matter() -> None:
    layer = layer_in_float64()
    x_TD = torch.randn(12, D, dtype=torch.float64)
    shuffled_TD = torch.cat((x_TD[torch.randperm(11)], x_TD[11:]))
    torch.testing.assert_close(layer(shuffled_TD)[0][11], layer(x_TD)[0][11], rtol=1e-12, atol=1e-12)


def test_absorbed_steps_equal_the_expanded_form() -> None:
    layer = layer_in_float64()
    x_NTD = torch.randn(3, 6, D, dtype=torch.float64)
    past = Latents.empty(3, R + S, dtype=torch.float64)
    steps = []
    for t in range(6):
        y_ND, past = layer(x_NTD[:, t], past=past, step=True)
        steps.append(y_ND)
    assert past.lengths_N.tolist() == [6, 6, 6]
    for n in range(3):
        torch.testing.assert_close(torch.stack(steps, 1)[n], by_hand(layer, x_NTD[n]), rtol=1e-10, atol=1e-10)


def test_head_blocks_split_keys_from_values() -> None:
    layer = layer_in_float64()
    assert layer.head_blocks == {"q_up.weight": H, "kv_up.weight": 2 * H}
    assert layer.kv_up.weight.shape[0] // (2 * H) == K
