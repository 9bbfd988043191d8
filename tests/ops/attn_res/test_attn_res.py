"""The depth mix: values, gradients, the mean at a zero query, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trine.ops import BackendUnavailable
from trine.ops.attn_res import attn_res, attn_res_weights

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / max(float(want.norm()), 1e-3 * want.numel() ** 0.5))


def forward_backward(
    sources: list[Tensor], query: Tensor, gain: Tensor, dh: Tensor, **keywords: object
) -> list[Tensor]:
    h = attn_res(sources, query, gain, **keywords)  # type: ignore[arg-type]
    return [h, *torch.autograd.grad(h, [*sources, query, gain], dh)]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_mix_and_gradients_match_the_definition(tokens: int, dtype: torch.dtype) -> None:
    for count, width in [(1, 8), (2, 60), (5, 33)]:
        sources = [(torch.randn(tokens, width, dtype=dtype) * (0.1 + i)).requires_grad_() for i in range(count)]
        query = (torch.randn(width, dtype=dtype) / width**0.5).requires_grad_()
        gain = torch.randn(width, dtype=dtype, requires_grad=True)
        dh = torch.randn(tokens, width, dtype=dtype)
        got = forward_backward(sources, query, gain, dh)
        want = forward_backward(sources, query, gain, dh, backend="reference")
        assert max(error(a, b) for a, b in zip(got, want, strict=True)) <= TOLERANCE[dtype]
        weights = attn_res_weights(sources, query, gain)
        assert weights.shape == (count, tokens) and not weights.requires_grad
        assert error(weights, attn_res_weights(sources, query, gain, backend="reference")) <= TOLERANCE[dtype]
        assert torch.allclose(weights.sum(0), torch.ones(tokens, dtype=dtype))


def test_rows_beyond_one_block() -> None:
    sources = [torch.randn(3, 900, 64, requires_grad=True) for _ in range(3)]
    query, gain = torch.randn(64, requires_grad=True), torch.randn(64, requires_grad=True)
    dh = torch.randn(3, 900, 64)
    got = forward_backward(sources, query, gain, dh)
    want = forward_backward(sources, query, gain, dh, backend="reference")
    assert max(error(a, b) for a, b in zip(got, want, strict=True)) <= 1e-5
    weights = attn_res_weights(sources, query, gain)
    assert weights.shape == (3, 3, 900)
    assert error(weights, attn_res_weights(sources, query, gain, backend="reference")) <= 1e-5


def test_zero_query_gives_the_mean_of_the_sources_not_the_sum() -> None:
    """B013, with its numbers."""
    sources = torch.tensor([[2.0, 0.0], [0.0, 4.0], [3.0, 3.0]], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    h = attn_res(sources, 0 * ones, ones)
    assert h.tolist() == pytest.approx([5 / 3, 7 / 3], abs=1e-12)
    total = sources.sum(0)
    assert torch.allclose(h / h.norm(), total / total.norm(), rtol=0, atol=1e-12)  # what the next RMSNorm sees
    query = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert attn_res(sources, query, ones, eps=1e-6).tolist() == pytest.approx([2.091717, 1.552040], abs=1e-6)
    weights = attn_res_weights(sources, query, ones, eps=1e-6)
    assert weights.tolist() == pytest.approx([0.525216, 0.127689, 0.347095], abs=1e-6)


def test_zero_query_still_learns() -> None:
    sources = [torch.randn(50, 16, requires_grad=True) for _ in range(3)]
    query, gain = torch.zeros(16, requires_grad=True), torch.ones(16, requires_grad=True)
    h, *_, dquery, dgain = forward_backward(sources, query, gain, torch.randn(50, 16))
    assert error(h, torch.stack(sources).mean(0)) <= 1e-6
    assert float(dquery.norm()) > 0.1 and not bool(dgain.any())


def test_one_stacked_tensor_equals_a_list() -> None:
    bank = torch.randn(4, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    query, gain = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    dh = torch.randn(3, 5, 8, dtype=torch.float64)
    (got,) = torch.autograd.grad(attn_res(bank, query, gain), [bank], dh)
    parts = [v.detach().requires_grad_() for v in bank]
    want = torch.autograd.grad(attn_res(parts, query, gain), parts, dh)
    assert torch.equal(got, torch.stack(want))


def test_keeps_references_and_two_scalars_a_source_and_token() -> None:
    sources = [torch.randn(100, 32, requires_grad=True) for _ in range(4)]
    query, gain = torch.randn(32, requires_grad=True), torch.ones(32, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        attn_res(sources, query, gain)
    held = {v.data_ptr() for v in (*sources, query, gain)}
    extra = sum(t.numel() for t in kept if t.data_ptr() not in held)
    assert extra <= 2 * 4 * 100 + 2 * 32


@pytest.mark.usefixtures("tiles")
def test_a_source_without_gradient_gets_none_and_repeated_sources_add_up() -> None:
    a, b = torch.randn(6, 8, dtype=torch.float64, requires_grad=True), torch.randn(6, 8, dtype=torch.float64)
    query, gain = torch.randn(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    (got,) = torch.autograd.grad(attn_res([a, b, a], query, gain).sum(), [a])
    (want,) = torch.autograd.grad(attn_res([a, b, a], query, gain, backend="reference").sum(), [a])
    assert error(got, want) <= 1e-12


@pytest.mark.usefixtures("tiles")
def test_strided_and_expanded_sources_are_read_and_not_written() -> None:
    base = torch.randn(8, 30, 2, dtype=torch.float64)
    sources = [base[..., 0].t(), base[..., 1].t(), torch.randn(1, 8, dtype=torch.float64).expand(30, 8)]
    kept = [v.clone() for v in sources]
    query, gain = torch.randn(8, dtype=torch.float64), torch.randn(16, dtype=torch.float64)[::2]
    got = attn_res(sources, query, gain)
    assert error(got, attn_res([v.contiguous() for v in sources], query, gain, backend="reference")) <= 1e-12
    assert all(torch.equal(a, b) for a, b in zip(kept, sources, strict=True))


@pytest.mark.usefixtures("tiles")
def test_bfloat16_sources_have_float32_statistics() -> None:
    sources = [(torch.randn(40, 64) * (1 + i)).bfloat16().requires_grad_() for i in range(3)]
    query, gain = torch.randn(64, requires_grad=True), torch.ones(64, requires_grad=True)
    h = attn_res(sources, query, gain)
    assert h.dtype == torch.bfloat16
    exact = attn_res([v.double() for v in sources], query.double(), gain.double(), backend="reference")
    assert bool(((h - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all())
    grads = torch.autograd.grad(h.float().sum(), [*sources, query])
    assert [g.dtype for g in grads] == [torch.bfloat16] * 3 + [torch.float32]


@pytest.mark.usefixtures("tiles")
def test_gradcheck_and_empty_rows() -> None:
    inputs = tuple(torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    vectors = tuple(torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *a: attn_res(a[:3], a[3], a[4]), (*inputs, *vectors))
    empty = torch.zeros(2, 0, 3, requires_grad=True)
    h = attn_res([empty, empty], torch.ones(3), torch.ones(3))
    h.sum().backward()
    assert h.shape == (2, 0, 3) and attn_res_weights([empty], torch.ones(3), torch.ones(3)).shape == (1, 2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_source_of_zeros_has_a_zero_key_without_an_epsilon(backend: str, dtype: torch.dtype) -> None:
    v, query, gain = torch.randn(5, 4, dtype=dtype), torch.randn(4, dtype=dtype), torch.rand(4, dtype=dtype)
    sources = [torch.zeros_like(v).requires_grad_(), v.requires_grad_()]
    h = attn_res(sources, query, gain, 0.0, backend=backend)
    score = (v / v.square().mean(-1, keepdim=True).sqrt() * gain * query).sum(-1, keepdim=True)
    torch.testing.assert_close(h, torch.sigmoid(score) * v, rtol=1e-5, atol=1e-6)
    weights = attn_res_weights(sources, query, gain, 0.0, backend=backend)
    torch.testing.assert_close(weights[1], torch.sigmoid(score).squeeze(-1), rtol=1e-5, atol=1e-6)
    h.sum().backward()
    assert all(source.grad is not None and source.grad.isfinite().all() for source in sources)


@pytest.mark.usefixtures("card_tiles")
def test_few_calls_on_a_card_for_any_number_of_tokens(dispatched: Callable[[Callable[[], object]], int]) -> None:
    counts = []
    for tokens in (40, 4000):
        sources = [torch.randn(tokens, 64, requires_grad=True) for _ in range(5)]
        query, gain = torch.randn(64, requires_grad=True), torch.ones(64, requires_grad=True)
        dh = torch.randn(tokens, 64)
        counts.append(dispatched(lambda: forward_backward(sources, query, gain, dh)))  # noqa: B023
    assert counts[0] == counts[1] <= 30 * 5 + 60  # 30 a source, most of them views


def test_golden_errors() -> None:
    v, query = torch.randn(5, 4), torch.randn(4)

    def message(*arguments: object, **keywords: object) -> str:
        with pytest.raises(ValueError) as caught:
            attn_res(*arguments, **keywords)  # type: ignore[arg-type]
        return str(caught.value)

    assert message([], query, query) == "sources: found none, need at least one"
    assert message([v, v[:3]], query, query) == "sources: found shape (3, 4) at index 1, need (5, 4) as at index 0"
    assert message([v.int()], query, query) == "sources: found dtype torch.int32 at index 0, need a floating dtype"
    assert message(query, query, query) == "sources: found one tensor of shape (4,), need [S, ..., D]"
    assert message([v], query[:3], query) == "query_D: found shape (3,), need [D] = [4]"
    assert message([v], query, v) == "gain_D: found shape (5, 4), need [D] = [4]"
    assert message([v], query, query, -1.0) == "eps: found -1.0, need a number >= 0"
    assert message([v], query, query, float("nan")) == "eps: found nan, need a number >= 0"
    with pytest.raises(BackendUnavailable, match="attn_res: backend 'triton' cannot run here"):
        attn_res([v], query, query, backend="triton")
