"""Causality bit for bit: what stands at or after t, or in another document, touches nothing before t."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trine.ops.kda import kda, kda_pairwise

KINDS = ("bounded", "softplus", "log_decay")
PER_TOKEN = ("q", "k", "v", "gate", "beta")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> object:
    """Three threads cut arrays at places that are no multiple of a vector."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(lab: SimpleNamespace, tokens: int, kind: str, *, seed: int = 0, **sizes: int) -> dict[str, Tensor]:
    inputs = lab.cast(lab.draw(tokens, seed=seed, **{"key": 20, "value": 12, **sizes}), torch.float32)
    if kind == "log_decay":
        del inputs["A_log"], inputs["dt_bias"]
        inputs["gate"] = -inputs["gate"].abs()
    return inputs


def prefix_results(
    inputs: dict[str, Tensor], t: int, weights: Tensor, cu_seqlens: Tensor | None, kind: str
) -> dict[str, Tensor]:
    """Outputs before t and the gradients of a loss on them."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out, _ = kda(**leaves, cu_seqlens=cu_seqlens, gate_kind=kind)
    gradients = torch.autograd.grad((out[:, :t] * weights[:, :t]).sum(), list(leaves.values()))
    return {"out": out[:, :t].detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_same_prefix(found: dict[str, Tensor], expected: dict[str, Tensor], t: int, sequences: int) -> None:
    for name, value in expected.items():
        other = found[name]
        if name in PER_TOKEN:
            assert torch.equal(other[:, :t], value[:, :t]), name
            assert not other[:, t:].any(), f"{name} beyond t"
        elif name == "initial_state":
            assert torch.equal(other[:sequences], value[:sequences]), name
            assert not other[sequences:].any()
        else:
            assert torch.equal(other, value), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [1, 15, 16, 21, 33])
def test_a_later_edit_changes_no_bit(lab: SimpleNamespace, threads: int, kind: str, t: int) -> None:
    inputs, other = draw(lab, 40, kind), draw(lab, 40, kind, seed=1)
    weights = torch.randn(inputs["v"].shape)
    expected = prefix_results(inputs, t, weights, None, kind)
    for name in PER_TOKEN:
        edited = dict(inputs)
        edited[name] = torch.cat([inputs[name][:, :t], 3 * other[name][:, t:]], 1)
        assert_same_prefix(prefix_results(edited, t, weights, None, kind), expected, t, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "key"), [(1, 20), (15, 20), (16, 20), (22, 60), (47, 20), (47, 130)])
def test_appended_tokens_change_no_bit(lab: SimpleNamespace, threads: int, kind: str, tokens: int, key: int) -> None:
    long = draw(lab, 150, kind, heads=3, key=key, value=key - 4)
    weights = torch.randn(long["v"].shape)

    def cut(end: int) -> dict[str, Tensor]:
        return {name: x[:, :end] if name in PER_TOKEN else x for name, x in long.items()}

    expected = prefix_results(cut(tokens), tokens, weights, None, kind)
    for end in (tokens + 1, 48, 64, 150):
        assert_same_prefix(prefix_results(cut(end), tokens, weights, None, kind), expected, tokens, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_appended_documents_change_no_bit(lab: SimpleNamespace, threads: int, kind: str) -> None:
    lengths = (20, 0, 33, 16, 70, 1)
    sizes = {"heads": 3, "sequences": len(lengths)}
    whole = draw(lab, sum(lengths), kind, **sizes)
    weights = torch.randn(whole["v"].shape)

    def cut(documents: int) -> tuple[dict[str, Tensor], Tensor]:
        end = sum(lengths[:documents])
        part = {name: x[:, :end] if name in PER_TOKEN else x for name, x in whole.items()}
        part["initial_state"] = whole["initial_state"][:documents]
        return part, lab.cu(*lengths[:documents])

    first, packed = cut(1)
    expected = prefix_results(first, 20, weights, packed, kind)
    for documents in range(2, len(lengths) + 1):
        part, packed = cut(documents)
        assert_same_prefix(prefix_results(part, 20, weights, packed, kind), expected, 20, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_has_the_same_bits_packed_and_alone(lab: SimpleNamespace, threads: int, kind: str) -> None:
    lengths = (20, 0, 33, 16, 70, 1)
    inputs = draw(lab, sum(lengths), kind, sequences=len(lengths))
    packed = lab.run(kda, inputs, cu_seqlens=lab.cu(*lengths), gate_kind=kind)
    start = 0
    for n, length in enumerate(lengths):
        rows = slice(start, start + length)
        alone = {name: x[:, rows] if name in PER_TOKEN else x for name, x in inputs.items()}
        alone["initial_state"] = inputs["initial_state"][n : n + 1]
        out, final = kda(**alone, gate_kind=kind, output_final_state=True)
        assert torch.equal(out, packed["out"][:, rows])
        assert torch.equal(final, packed["final"][n : n + 1])
        start += length


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_in_one_document_leaves_its_neighbours_gradients(lab: SimpleNamespace, kind: str) -> None:
    lengths = (30, 17, 50)
    inputs, other = draw(lab, 97, kind, sequences=3), draw(lab, 97, kind, seed=1, sequences=3)
    edited = {
        name: torch.cat([x[:, :30], other[name][:, 30:47], x[:, 47:]], 1) if name in PER_TOKEN else x
        for name, x in inputs.items()
    }
    expected = lab.run(kda, inputs, cu_seqlens=lab.cu(*lengths), gate_kind=kind)
    found = lab.run(kda, edited, cu_seqlens=lab.cu(*lengths), gate_kind=kind)
    for name in ("out", *("d_" + n for n in PER_TOKEN)):
        for rows in (slice(0, 30), slice(47, 97)):
            assert torch.equal(found[name][:, rows], expected[name][:, rows]), name
        assert not torch.equal(found[name][:, 30:47], expected[name][:, 30:47])


def test_plans_give_the_same_bits(lab: SimpleNamespace) -> None:
    inputs = draw(lab, 100, "bounded")
    runs = [lab.run(kda, inputs, plan=plan) for plan in ("auto", "serial", "segmented")]
    assert all(torch.equal(runs[0][name], other[name]) for other in runs[1:] for name in other)


def test_the_jacobian_is_zero_above_the_diagonal(lab: SimpleNamespace) -> None:
    inputs = lab.draw(20, heads=1, key=3, value=2)
    for function in (kda, kda_pairwise):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out, _ = function(**leaves)
        for t in range(20):
            gradients = torch.autograd.grad(out[:, t].sum(), [leaves[n] for n in PER_TOKEN], retain_graph=True)
            assert all(not g[:, t + 1 :].any() for g in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [32, 60, 64])
def test_appended_tokens_change_no_bit_when_threads_share_the_arrays(
    lab: SimpleNamespace, threads: int, kind: str, key: int
) -> None:
    long = draw(lab, 1500, kind, heads=3, key=key, value=key)
    weights = torch.randn(long["v"].shape)

    def cut(end: int) -> dict[str, Tensor]:
        return {name: x[:, :end] if name in PER_TOKEN else x for name, x in long.items()}

    expected = prefix_results(cut(999), 999, weights, None, kind)
    for end in (1000, 1008, 1024, 1500):
        assert_same_prefix(prefix_results(cut(end), 999, weights, None, kind), expected, 999, 1)
