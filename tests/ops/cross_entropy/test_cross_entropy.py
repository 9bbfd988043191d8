"""Chunked linear cross-entropy: values, gradients, ignored tokens, micro-batches, and that logits are never whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trine.ops import BackendUnavailable
from trine.ops.cross_entropy import linear_cross_entropy, token_losses

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / max(float(want.norm()), 1e-3))


def inputs(
    tokens: int, dtype: torch.dtype, width: int = 12, vocabulary: int = 61
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    weights = torch.rand(tokens, dtype=dtype, requires_grad=True)
    return hidden, weight, targets, weights


def run(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, **keywords: object) -> list[Tensor]:
    loss, total = linear_cross_entropy(hidden, weight, targets, weights, **keywords)  # type: ignore[arg-type]
    wanted = [hidden, weight] + ([weights] if weights is not None and weights.requires_grad else [])
    return [loss, total, *torch.autograd.grad(loss * 1.5 + total.square() * 0.01, wanted)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_sums_and_gradients_match_the_definition(tokens: int, dtype: torch.dtype) -> None:
    hidden, weight, targets, weights = inputs(tokens, dtype)
    targets[::5] = -100
    for given in (weights, weights.detach(), None):
        got = run(hidden, weight, targets, given, chunk=32)
        want = run(hidden, weight, targets, given, backend="reference")
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype and error(a, b) <= TOLERANCE[dtype]
    each = token_losses(hidden, weight, targets, chunk=32)
    assert each.shape == (tokens,) and not each.requires_grad and not bool(each[::5].any())
    assert error((each * weights).sum(), got_loss(hidden, weight, targets, weights)) <= TOLERANCE[dtype]


def got_loss(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, targets, weights, backend="reference")[0]


def test_values_by_hand() -> None:
    hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    weight = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    loss, total = linear_cross_entropy(hidden, weight, torch.tensor([1, 0]), torch.tensor([1.0, 3.0]))
    want = math.log(1 + math.exp(-1)) + 3 * math.log(1 + math.exp(2))
    assert loss.item() == pytest.approx(want, rel=1e-6) and total.item() == 4.0
    uniform, _ = linear_cross_entropy(torch.zeros(3, 4), torch.randn(50, 4), torch.tensor([0, 7, 49]))
    assert uniform.item() == pytest.approx(3 * math.log(50), rel=1e-6)


def test_very_unlikely_targets_and_large_logits_stay_exact() -> None:
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [500.0], [1e4]], requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, weight, torch.tensor([0, 2]))
    assert loss.item() == 1e4
    dhidden, dweight = torch.autograd.grad(loss, [hidden, weight])
    assert dhidden.flatten().tolist() == [1e4, 0.0] and dweight.flatten().tolist() == [-1.0, 0.0, 1.0]


def test_micro_batch_with_every_label_ignored_gives_zero_not_nan() -> None:
    """B026: one micro-batch of four, and the whole step, without a target."""
    hidden, weight, targets, _ = inputs(40, torch.float32)
    nothing = torch.full((10,), -100)
    loss, total = linear_cross_entropy(hidden[:10], weight, nothing)
    grads = torch.autograd.grad(loss, [hidden, weight])
    assert loss.item() == 0.0 and total.item() == 0.0 and not any(bool(g.any()) for g in grads)
    for backend in ("torch", "reference"):
        parts = [targets[i : i + 10] for i in (0, 10, 20)] + [nothing]
        sums = [
            linear_cross_entropy(h, weight, t, backend=backend) for h, t in zip(hidden.split(10), parts, strict=True)
        ]
        with_empty = torch.autograd.grad(sum(s for s, _ in sums), [hidden, weight], retain_graph=True)
        without = torch.autograd.grad(sum(s for s, _ in sums[:3]), [hidden, weight])
        assert all(torch.equal(a, b) for a, b in zip(with_empty, without, strict=True))


def test_zero_weights_leave_a_token_out_whatever_it_holds() -> None:
    hidden, weight, targets, _ = inputs(6, torch.float32)
    poisoned = hidden.detach().clone()
    poisoned[2] = torch.nan
    poisoned.requires_grad_()
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    loss, total = linear_cross_entropy(poisoned, weight, targets, weights)
    dhidden, dweight = torch.autograd.grad(loss, [poisoned, weight])
    assert bool(loss.isfinite()) and total.item() == 5.0
    assert bool(dweight.isfinite().all()) and not bool(dhidden[2].any())


def test_accumulated_sums_equal_one_batch_of_unequal_rows() -> None:
    """B027: 10 and 90 supervised tokens, as one batch and as two micro-batches."""
    hidden, weight, targets, _ = inputs(200, torch.float32)
    targets[10:100] = -100
    targets[190:] = -100
    loss, total = linear_cross_entropy(hidden, weight, targets)
    whole = torch.autograd.grad(loss / total, [hidden, weight])
    halves = [linear_cross_entropy(hidden[a:b], weight, targets[a:b]) for a, b in ((0, 100), (100, 200))]
    count = halves[0][1] + halves[1][1]
    assert [h[1].item() for h in halves] == [10.0, 90.0] and count.item() == total.item()
    parts = [torch.autograd.grad(s / count, [hidden, weight]) for s, _ in halves]
    for got, want in zip((a + b for a, b in zip(*parts, strict=True)), whole, strict=True):
        assert error(got, want) <= 1e-6
    assert error((halves[0][0] + halves[1][0]) / count, loss / total) <= 1e-6


def test_chunk_size_does_not_change_the_result() -> None:
    hidden, weight, targets, weights = inputs(100, torch.float64)
    want = run(hidden, weight, targets, weights, chunk=100)
    for chunk in (1, 7, 64, 1000):
        assert (
            max(error(a, b) for a, b in zip(run(hidden, weight, targets, weights, chunk=chunk), want, strict=True))
            <= 1e-12
        )


class _Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_logits_are_never_held_whole() -> None:
    hidden, weight, targets, _ = inputs(640, torch.float32, width=8, vocabulary=200)
    with _Largest() as largest:
        linear_cross_entropy(hidden, weight, targets, chunk=32)[0].backward()
        token_losses(hidden, weight, targets, chunk=32)
    assert largest.numel <= max(32 * 200, 640 * 8)


def test_no_gradient_work_without_gradients() -> None:
    hidden, weight, targets, weights = inputs(50, torch.float32)
    with torch.no_grad():
        loss, total = linear_cross_entropy(hidden, weight, targets, weights, chunk=16)
    want, want_total = linear_cross_entropy(hidden, weight, targets, weights, chunk=16)
    assert not loss.requires_grad and torch.equal(loss, want) and torch.equal(total, want_total)
    (dhidden,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), targets)[0], [hidden])
    assert error(dhidden, torch.autograd.grad(linear_cross_entropy(hidden, weight, targets)[0], [hidden])[0]) <= 1e-6


def test_bfloat16_strided_and_expanded_inputs() -> None:
    hidden = torch.randn(12, 30).bfloat16().t().requires_grad_()
    weight = torch.randn(1, 12).bfloat16().expand(5, 12)
    targets = torch.randint(0, 5, (60,))[::2]
    loss, _ = linear_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    exact, _ = linear_cross_entropy(hidden.double(), weight.double(), targets, backend="reference")
    assert error(loss, exact) <= 1e-5
    (dhidden,) = torch.autograd.grad(loss, [hidden])
    assert dhidden.dtype == torch.bfloat16


def test_gradcheck_and_no_tokens() -> None:
    hidden, weight, targets, weights = inputs(5, torch.float64, 3, 4)
    assert torch.autograd.gradcheck(
        lambda h, w, a: linear_cross_entropy(h, w, targets, a, chunk=2), (hidden, weight, weights)
    )
    loss, total = linear_cross_entropy(hidden[:0], weight, targets[:0])
    assert loss.item() == 0.0 and total.item() == 0.0
    assert token_losses(hidden[:0], weight, targets[:0]).shape == (0,)


def test_golden_errors() -> None:
    hidden, weight, targets, _ = inputs(6, torch.float32, 4, 10)

    def message(*arguments: object, **keywords: object) -> str:
        with pytest.raises(ValueError) as caught:
            linear_cross_entropy(*arguments, **keywords)  # type: ignore[arg-type]
        return str(caught.value)

    wrong = targets.clone()
    wrong[3] = 10
    text = "targets_T: found 10 at index 3, need 0..9 (vocabulary 10) or ignore_index -100"
    assert message(hidden, weight, wrong) == text
    wrong[3] = -1
    assert message(hidden, weight, wrong) == text.replace("found 10", "found -1")
    with pytest.raises(ValueError, match="targets_T: found -1 at index 3"):
        token_losses(hidden, weight, wrong)
    assert message(hidden[None], weight, targets) == "hidden_TD: found shape (1, 6, 4), need [T, D]"
    assert message(hidden, weight.t(), targets) == "weight_VD: found shape (4, 10), need [V >= 1, D] with D = 4"
    assert message(hidden, weight, targets[1:]) == "targets_T: found shape (5,), need [T] = [6]"
    assert message(hidden, weight, targets.int()) == "targets_T: found dtype torch.int32, need torch.int64"
    assert message(hidden, weight, targets, torch.ones(5)) == "weights_T: found shape (5,), need [T] = [6]"
    assert message(hidden, weight, targets, targets) == "weights_T: found dtype torch.int64, need a floating dtype"
    assert message(hidden, weight, targets, chunk=0) == "chunk: found 0, need a number of tokens >= 1"
    with pytest.raises(BackendUnavailable, match="linear_cross_entropy: backend 'triton' cannot run here"):
        linear_cross_entropy(hidden, weight, targets, backend="triton")
