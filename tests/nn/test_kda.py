"""The KDA layer against its equations, token by token, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trine.nn import KdaPast, KimiDeltaAttention

D, H, K = 12, 2, 5


def layer_in_float64(**keywords: object) -> KimiDeltaAttention:
    layer = KimiDeltaAttention(D, H, K, decay_rank=3, **keywords).double()  # type: ignore[arg-type]
    with torch.no_grad():
        layer.A_log.normal_(std=0.3)
        layer.output_gain.normal_()
    return layer


def by_hand(layer: KimiDeltaAttention, x_TD: Tensor) -> Tensor:
    """K3 report, Eq. 1-6, one token at a time."""
    inner = H * K
    qkv_TC = x_TD @ layer.qkv_proj.weight.T
    padded = F.pad(qkv_TC, (0, 0, 3, 0))
    taps = [padded[j : j + len(x_TD)] * layer.conv.weight[:, j] for j in range(4)]
    q, k, v = F.silu(sum(taps)).view(-1, 3, H, K).unbind(1)  # type: ignore[arg-type]
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    z = (x_TD @ layer.decay_down.weight.T @ layer.decay_up.weight.T).view(-1, H, K) + layer.dt_bias
    if layer.gate_kind == "bounded":
        g = layer.g_min * torch.sigmoid(layer.A_log.exp()[:, None] * z)
    else:
        g = -layer.A_log.exp()[:, None] * F.softplus(z)
    beta = torch.sigmoid(x_TD @ layer.beta_proj.weight.T)
    rows = []
    for h in range(H):
        state = torch.zeros(K, K, dtype=torch.float64)
        out = []
        for t in range(len(x_TD)):
            state = g[t, h].exp()[:, None] * state
            state = state + beta[t, h] * torch.outer(k[t, h], v[t, h] - state.T @ k[t, h])
            o = state.T @ q[t, h] * K**-0.5
            out.append(o / (o.square().mean() + layer.norm_eps).sqrt() * layer.output_gain)
        rows.append(torch.stack(out))
    o_TC = torch.stack(rows, 1).reshape(-1, inner)
    if layer.gate_proj is not None:
        o_TC = o_TC * torch.sigmoid(x_TD @ layer.gate_proj.weight.T)
    return o_TC @ layer.o_proj.weight.T


@pytest.mark.parametrize("keywords", [{}, {"output_gate": False}, {"gate_kind": "softplus"}, {"g_min": -2.0}])
def test_layer_equals_its_equations(keywords: dict[str, object]) -> None:
    layer = layer_in_float64(**keywords)
    x_TD = torch.randn(23, D, dtype=torch.float64)
    y_TD, past = layer(x_TD)
    assert past is None
    torch.testing.assert_close(y_TD, by_hand(layer, x_TD), rtol=1e-10, atol=1e-10)


def test_steps_equal_the_packed_form_for_several_sequences() -> None:
    layer = layer_in_float64()
    x_NTD = torch.randn(3, 7, D, dtype=torch.float64)
    past = layer.empty_past(3)
    assert isinstance(past, KdaPast) and [tuple(x.shape) for x in past] == [(3, H, K, K), (3, 3, 3 * H * K)]
    assert {x.dtype for x in past} == {torch.float64} and not any(x.any() for x in past)
    steps = []
    for t in range(7):
        y_ND, past = layer(x_NTD[:, t], past=past, step=True)
        steps.append(y_ND)
    for n in range(3):
        torch.testing.assert_close(torch.stack(steps, 1)[n], by_hand(layer, x_NTD[n]), rtol=1e-10, atol=1e-10)


def test_bad_input_is_named() -> None:
    for keywords, message in (
        ({"gate_kind": "bogus"}, "gate_kind: found 'bogus', need 'bounded' or 'softplus'"),
        ({"g_min": -9.0}, r"g_min: found -9\.0, need a value in \(-5\.5, 0\)"),
        ({"conv_kernel": 0}, "conv_kernel: found 0, need at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            KimiDeltaAttention(D, H, K, **keywords)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="heads: found 0, need at least 1"):
        KimiDeltaAttention(D, 0, K)
    layer = KimiDeltaAttention(D, H, K)
    with pytest.raises(ValueError, match=r"x_TD: found shape \(1, 4, 12\), need \[T, width\]"):
        layer(torch.zeros(1, 4, D))
    with pytest.raises(ValueError, match="past: found None, need the state and window"):
        layer(torch.zeros(4, D), step=True)


def test_initial_decay_is_the_documented_one() -> None:
    layer = KimiDeltaAttention(64, 32, 32)
    g = -5 * torch.sigmoid(layer.dt_bias)
    assert -0.49 < float(g.min()) < -0.4
    assert -0.0062 < float(g.max()) < -0.0048
    assert layer.head_blocks == {"qkv_proj.weight": 96}
