"""Segments: their affine map, how maps compose, and gradients through both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trine.ops.kda import advance, compose, kda, segment_state, zero_state

PER_TOKEN = ("k", "v", "gate", "beta")


def test_zero_state() -> None:
    state = zero_state(3, 2, 5, 4)
    assert state.shape == (3, 2, 5, 4) and state.dtype == torch.float32 and not state.any()


@pytest.mark.parametrize("kind", ["bounded", "softplus", "log_decay"])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_segment_maps_the_entering_state_to_the_leaving_one(lab: SimpleNamespace, kind: str, backend: str) -> None:
    lengths = (20, 0, 35, 1)
    inputs = lab.draw(56, sequences=4, heads=2, value_heads=4, key=7, value=5)
    if kind == "log_decay":
        del inputs["A_log"], inputs["dt_bias"]
        inputs["gate"] = -inputs["gate"].abs()
    packed = lab.cu(*lengths)
    _, final = kda(**inputs, cu_seqlens=packed, output_final_state=True, gate_kind=kind)
    state = inputs.pop("initial_state")
    del inputs["q"]
    transition, offset = segment_state(**inputs, cu_seqlens=packed, gate_kind=kind, backend=backend)
    assert transition.shape == (4, 4, 7, 7) and offset.shape == (4, 4, 7, 5)
    assert torch.allclose(advance((transition, offset), state), final, rtol=1e-11, atol=1e-12)
    assert torch.equal(transition[1], torch.eye(7).double().expand(4, 7, 7)) and not offset[1].any()


def test_the_transition_of_one_token_is_the_published_matrix(lab: SimpleNamespace) -> None:
    inputs = lab.draw(1, heads=1, key=4, value=3)
    k, beta = inputs["k"][0, 0, 0], inputs["beta"].item()
    k = k / (k.square().sum() + 1e-6).sqrt()
    g = -5 * torch.sigmoid(inputs["A_log"].exp() * (inputs["gate"][0, 0, 0] + inputs["dt_bias"][0]))
    strength = 1 / (1 + torch.tensor(-beta).double().exp())
    expected = (torch.eye(4).double() - strength * torch.outer(k, k)) @ torch.diag(g.exp())
    del inputs["q"], inputs["initial_state"]
    transition, offset = segment_state(**inputs)
    assert torch.allclose(transition[0, 0], expected, rtol=1e-12, atol=1e-14)
    assert torch.allclose(offset[0, 0], strength * torch.outer(k, inputs["v"][0, 0, 0]), rtol=1e-12, atol=1e-14)


def test_maps_compose_associatively(lab: SimpleNamespace) -> None:
    inputs = lab.draw(90, key=6, value=4)
    del inputs["q"], inputs["initial_state"]

    def part(a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        return segment_state(**{n: x[:, a:b] if n in PER_TOKEN else x for n, x in inputs.items()})

    a, b, c, whole = part(0, 30), part(30, 47), part(47, 90), part(0, 90)
    left, right = compose(compose(a, b), c), compose(a, compose(b, c))
    for found in (left, right):
        assert torch.allclose(found[0], whole[0], rtol=1e-10, atol=1e-13)
        assert torch.allclose(found[1], whole[1], rtol=1e-10, atol=1e-13)


def test_gradients_through_segments_equal_those_of_the_whole(lab: SimpleNamespace) -> None:
    inputs = lab.draw(60, key=6, value=4)
    results = []
    for segmented in (False, True):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        state, rest = leaves["initial_state"], {n: x for n, x in leaves.items() if n not in ("q", "initial_state")}
        if segmented:
            parts = [{n: x[:, a:b] if n in PER_TOKEN else x for n, x in rest.items()} for a, b in ((0, 25), (25, 60))]
            final = advance(compose(*(segment_state(**p) for p in parts)), state)
        else:
            final = kda(**leaves, output_final_state=True)[1]
        chosen = [x for n, x in leaves.items() if n != "q"]
        results.append(torch.autograd.grad(final.square().sum(), chosen))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-10 * expected.norm()


def test_maps_keep_their_precision_under_autocast() -> None:
    maps = [(torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 5)) for _ in range(2)]
    state = torch.randn(2, 3, 8, 5)
    plain = (*compose(*maps), advance(maps[0], state))
    with torch.autocast("cpu", torch.bfloat16):
        found = (*compose(*maps), advance(maps[0], state))
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(found, plain, strict=True))
    with pytest.raises(ValueError, match="first: found transition and offset of shapes"):
        compose((maps[0][0][:, :1], maps[0][1][:, :1]), maps[1])


def test_bad_arguments_name_the_key(lab: SimpleNamespace) -> None:
    inputs = lab.draw(5, key=6, value=4)
    del inputs["q"], inputs["initial_state"]
    with pytest.raises(ValueError, match=r"k: found shape \(5, 2, 6\), need \[B, T, H, K\]"):
        segment_state(**(inputs | {"k": inputs["k"][0]}))
