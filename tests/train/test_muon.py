from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trine.train import muon
from trine.train.muon import Muon, orthogonalize


def matrix(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.nn.Parameter(torch.randn(*shape) * scale)


def give(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient.clone()


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8), (1, 5), (7, 1)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(5, *shape, dtype=torch.float64)))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_zero_stays_zero() -> None:
    assert float(orthogonalize(torch.zeros(2, 4, 6)).abs().max()) == 0.0


def test_heads_are_orthogonalised_alone_and_a_loud_head_drowns_none() -> None:
    """B028: Muon orthogonalises a fused weight as one matrix."""
    weight, alone = matrix(64, 64), []
    gradient = torch.randn(64, 64)
    gradient[:16] *= 100
    for head in range(4):
        part = torch.nn.Parameter(weight.detach()[16 * head : 16 * head + 16].clone())
        give(part, gradient[16 * head : 16 * head + 16])
        Muon([part], [1], lr=0.1, weight_decay=0.0).step()
        alone.append(part.detach())
    before = weight.detach().clone()
    give(weight, gradient)
    Muon([weight], [4], lr=0.1, weight_decay=0.0).step()
    assert float((weight.detach() - torch.cat(alone)).abs().max()) <= 1e-6
    norms = (weight.detach() - before).view(4, 16, 64).norm(dim=(1, 2))
    assert float(norms.max() / norms.min()) < 1.5
    whole = torch.nn.Parameter(before.clone())
    give(whole, gradient)
    Muon([whole], [1], lr=0.1, weight_decay=0.0).step()
    assert float((whole.detach() - weight.detach()).norm() / (weight.detach() - before).norm()) > 0.1


def test_a_fused_weight_moves_as_its_parts_do() -> None:
    """B028: gate and up projection in one tensor, and as two."""
    gate, up = matrix(24, 10), matrix(24, 10)
    fused = torch.nn.Parameter(torch.cat((gate.detach(), up.detach())))
    gradients = torch.randn(24, 10), 30 * torch.randn(24, 10)
    give(gate, gradients[0])
    give(up, gradients[1])
    give(fused, torch.cat(gradients))
    Muon([gate, up], [1, 1], lr=0.1).step()
    Muon([fused], [2], lr=0.1).step()
    assert float((fused.detach() - torch.cat((gate.detach(), up.detach()))).abs().max()) <= 1e-6


def test_each_expert_of_a_stack_is_a_block() -> None:
    stack = matrix(5, 12, 8)
    parts = [torch.nn.Parameter(one.clone()) for one in stack.detach()]
    gradient = torch.randn(5, 12, 8) * torch.tensor([1.0, 1e-3, 1e3, 1.0, 1.0])[:, None, None]
    give(stack, gradient)
    for part, one in zip(parts, gradient, strict=True):
        give(part, one)
    Muon([stack], [5], lr=0.1).step()
    Muon(parts, [1] * 5, lr=0.1).step()
    assert float((stack.detach() - torch.stack([p.detach() for p in parts])).abs().max()) <= 1e-6


def plain(weight: Tensor, gradients: list[Tensor], lr: float, momentum: float, decay: float) -> Tensor:
    """The definition, in float64 and one matrix at a time."""
    running = torch.zeros_like(weight)
    for gradient in gradients:
        running = momentum * running + gradient
        x = gradient + momentum * running
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        weight = weight - lr * (0.2 * math.sqrt(max(weight.shape)) * x + decay * weight)
    return weight


@pytest.mark.parametrize("chunk", [1 << 17, 200, 1])
def test_steps_equal_the_definition_however_blocks_are_batched(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_CHUNK_CPU", chunk)
    shapes = [(12, 8), (8, 12), (5, 12, 8), (24, 8), (12, 8)]
    blocks = [1, 1, 5, 2, 1]
    weights = [matrix(*shape).double() for shape in shapes]
    weights = [torch.nn.Parameter(w.detach()) for w in weights]
    begin = [w.detach().clone() for w in weights]
    optimizer = Muon(weights, blocks, lr=0.05, momentum=0.9, weight_decay=0.3)
    history = []
    for _ in range(3):
        gradients = [torch.randn(w.shape, dtype=torch.float64) for w in weights]
        history.append(gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            give(weight, gradient)
        optimizer.step()
    for i, count in enumerate(blocks):
        cut = [t.reshape(count, -1, t.shape[-1]) for t in (begin[i], *(h[i] for h in history))]
        for b in range(count):
            need = plain(cut[0][b], [g[b] for g in cut[1:]], 0.05, 0.9, 0.3)
            found = weights[i].detach().reshape(count, -1, weights[i].shape[-1])[b]
            assert float((found - need).abs().max()) <= 1e-11


def test_the_update_has_the_root_mean_square_it_promises() -> None:
    weight = matrix(64, 256)
    before = weight.detach().clone()
    give(weight, torch.randn(64, 256) * 1e-4)
    Muon([weight], [1], lr=1.0, weight_decay=0.0).step()
    # 0.2 sqrt(256) times a semi-orthogonal matrix with 64 singular values near 1: about 0.2 a component
    assert float((weight.detach() - before).square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)


def test_without_a_gradient_nothing_moves() -> None:
    still, moved = matrix(4, 4), matrix(4, 4)
    before = still.detach().clone()
    give(moved, torch.ones(4, 4))
    optimizer = Muon([still, moved], [1, 1], lr=0.1)
    optimizer.step()
    assert torch.equal(still.detach(), before)
    assert still not in optimizer.state and moved in optimizer.state


def test_decay_is_decoupled_from_the_update() -> None:
    weight = matrix(4, 6)
    before = weight.detach().clone()
    give(weight, torch.zeros(4, 6))
    Muon([weight], [1], lr=0.1, weight_decay=0.5).step()
    assert torch.allclose(weight.detach(), before * 0.95, atol=0, rtol=1e-6)


def test_bf16_iteration_stays_close() -> None:
    weights = [torch.nn.Parameter(torch.zeros(16, 32)) for _ in range(2)]
    gradient = torch.randn(16, 32)
    for weight, dtype in zip(weights, (None, torch.bfloat16), strict=True):
        give(weight, gradient)
        Muon([weight], [1], lr=1.0, compute_dtype=dtype).step()
    assert weights[1].dtype == torch.float32
    assert float((weights[0] - weights[1]).detach().norm() / weights[0].detach().norm()) < 0.05


@pytest.mark.parametrize(
    ("parameter", "blocks", "message"),
    [
        (torch.zeros(4), 1, "need a 2-D or 3-D matrix"),
        (torch.zeros(4, 4, dtype=torch.int64), 1, "need a 2-D or 3-D matrix"),
        (torch.zeros(4, 6).T, 1, "not contiguous"),
        (torch.zeros(10, 4), 4, r"found 4 blocks, need a number that cuts shape \(10, 4\) evenly"),
        (torch.zeros(3, 4, 4), 2, r"found 2 blocks, need a number that cuts shape \(3, 4, 4\) evenly"),
        (torch.zeros(4, 4), 0, "found 0 blocks"),
    ],
)
def test_what_cannot_be_cut_is_refused(parameter: Tensor, blocks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([parameter], [blocks], lr=0.1)


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compute_dtype: found torch.float16, need None, torch.bfloat16"):
        Muon([torch.ones(2, 2)], [1], lr=0.1, compute_dtype=torch.float16)


def test_every_parameter_needs_its_blocks() -> None:
    with pytest.raises(ValueError, match="blocks: found 1 numbers, need 2, one a parameter"):
        Muon([torch.zeros(2, 2), torch.zeros(2, 2)], [1], lr=0.1)


def test_a_closure_is_called_with_gradients_on() -> None:
    weight = matrix(3, 3)

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    before = weight.detach().clone()
    assert Muon([weight], [1], lr=0.1).step(closure) == pytest.approx(float(before.square().sum()))
    assert not torch.equal(weight.detach(), before)
