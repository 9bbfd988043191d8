"""The decode step: equal to the operator over one token, and careful with the pool of states."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trine.ops.kda import kda, kda_reference, kda_step

PER_TOKEN = ("q", "k", "v", "gate", "beta")


def one_token(
    lab: SimpleNamespace, n: int, kind: str = "bounded", **sizes: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Tensors of a step, the gate's parameters, and the states."""
    inputs = lab.draw(1, batch=n, **{"key": 10, "value": 6, **sizes})
    state = inputs.pop("initial_state")
    step = {name: inputs.pop(name).squeeze(1) for name in PER_TOKEN}
    if kind == "log_decay":
        inputs.clear()
        step["gate"] = -step["gate"].abs()
    return step, inputs, state


@pytest.mark.parametrize("kind", ["bounded", "softplus", "log_decay"])
@pytest.mark.parametrize("options", [{}, {"qk_norm": False, "scale": 0.3}, {"beta_max": 2.0}, {"beta_is_logit": False}])
def test_equals_the_operator_over_one_token(lab: SimpleNamespace, kind: str, options: dict[str, object]) -> None:
    step, parameters, state = one_token(lab, 3, kind, heads=2, value_heads=4)
    before = {name: x.clone() for name, x in step.items()}
    out, new = kda_step(*step.values(), state, **parameters, gate_kind=kind, **options)
    expected, final = kda_reference(
        *(x.unsqueeze(1) for x in step.values()),
        **parameters,
        gate_kind=kind,
        initial_state=state,
        output_final_state=True,
        **options,
    )
    assert torch.allclose(out, expected.squeeze(1), rtol=1e-12, atol=1e-13)
    assert torch.allclose(new, final, rtol=1e-12, atol=1e-13)
    assert all(torch.equal(step[name], before[name]) for name in step)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("inplace", [False, True])
def test_padding_touches_no_state_and_gives_zero(lab: SimpleNamespace, index: torch.dtype, inplace: bool) -> None:
    step, parameters, state = one_token(lab, 4)
    pool = torch.randn(5, *state.shape[1:]).double()
    before = pool.clone()
    where = torch.tensor([-1, 3, -1, 0], dtype=index)
    out, new = kda_step(*step.values(), pool, **parameters, state_indices=where, inplace=inplace)
    plain, states = kda_step(*step.values(), before[where.long().clamp(min=0)], **parameters)
    assert not out[[0, 2]].any() and torch.equal(out[[1, 3]], plain[[1, 3]])
    assert torch.equal(new[[1, 2, 4]], before[[1, 2, 4]])
    assert torch.equal(new[3], states[1]) and torch.equal(new[0], states[3])
    assert (new is pool) == inplace
    assert torch.equal(pool, new if inplace else before)


@pytest.mark.parametrize("n", [1, 3])
def test_padding_alone_touches_nothing(lab: SimpleNamespace, n: int) -> None:
    step, parameters, state = one_token(lab, n)
    pool = torch.randn(2, *state.shape[1:]).double()
    before = pool.clone()
    out, new = kda_step(*step.values(), pool, **parameters, state_indices=torch.full((n,), -1), inplace=True)
    assert new is pool and torch.equal(pool, before) and not out.any()


def test_gradients_flow_through_a_pool(lab: SimpleNamespace) -> None:
    step, parameters, state = one_token(lab, 3)
    step = {name: x.requires_grad_() for name, x in step.items()}
    for where in (torch.tensor([2, 0, 1]), torch.tensor([-1, 0, 2])):
        pool = state.clone().requires_grad_()
        out, new = kda_step(*step.values(), pool, **parameters, state_indices=where)
        found = torch.autograd.grad(out.square().sum() + new.square().sum(), [step["v"], pool])
        used = where[where >= 0]
        alone = [x[where >= 0] for x in step.values()]
        out, states = kda_step(*alone, pool[used], **parameters)
        rest = torch.ones(3, dtype=torch.bool).index_fill(0, used, False)
        loss = out.square().sum() + states.square().sum() + pool[rest].square().sum()
        for a, b in zip(found, torch.autograd.grad(loss, [step["v"], pool]), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


def test_in_place_writes_into_the_states(lab: SimpleNamespace) -> None:
    step, parameters, state = one_token(lab, 2)
    mine = state.clone()
    _, expected = kda_step(*step.values(), state, **parameters)
    _, new = kda_step(*step.values(), mine, **parameters, inplace=True)
    assert new is mine and torch.equal(mine, expected)


def test_gradients_flow_through_steps(lab: SimpleNamespace) -> None:
    inputs = lab.draw(6, key=5, value=4)
    results = []
    for function in (kda_reference, "steps"):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        if function == "steps":
            state, outs = leaves["initial_state"], []
            for t in range(6):
                out, state = kda_step(
                    *(leaves[n][:, t] for n in PER_TOKEN), state, A_log=leaves["A_log"], dt_bias=leaves["dt_bias"]
                )
                outs.append(out)
            loss = torch.stack(outs, 1).square().sum() + state.sum()
        else:
            out, final = kda_reference(**leaves, output_final_state=True)
            assert final is not None
            loss = out.square().sum() + final.sum()
        results.append(torch.autograd.grad(loss, list(leaves.values())))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_half_precision_tokens_with_float32_states(lab: SimpleNamespace) -> None:
    step, parameters, state = one_token(lab, 2)
    half = {name: x.bfloat16() for name, x in step.items()}
    parameters = lab.cast(parameters, torch.float32)
    out, new = kda_step(*half.values(), state.float(), **parameters)
    exact, states = kda_step(*(x.float() for x in half.values()), state.float(), **parameters)
    assert out.dtype == torch.bfloat16 and new.dtype == torch.float32
    assert torch.equal(out, exact.bfloat16()) and torch.equal(new, states)


def test_continues_a_chunked_prefill(lab: SimpleNamespace) -> None:
    inputs = lab.cast(lab.draw(100, key=16, value=12), torch.float32)
    whole, final = kda(**inputs, output_final_state=True)
    head = {name: x[:, :90] if name in PER_TOKEN else x for name, x in inputs.items()}
    _, state = kda(**head, output_final_state=True)
    for t in range(90, 100):
        out, state = kda_step(
            *(inputs[n][:, t] for n in PER_TOKEN), state, A_log=inputs["A_log"], dt_bias=inputs["dt_bias"]
        )
        assert (out - whole[:, t]).norm() <= 1e-5 * whole[:, t].norm()
    assert (state - final).norm() <= 1e-5 * final.norm()


def test_no_sequences(lab: SimpleNamespace) -> None:
    step, parameters, state = one_token(lab, 1)
    none = {name: x[:0] for name, x in step.items()}
    out, new = kda_step(*none.values(), state[:0], **parameters)
    assert out.shape == (0, 2, 6) and new.shape == (0, 2, 10, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 10)}, r"q: found shape \(2, 10\), need \[N, H, K\]"),
        ({"v": torch.zeros(2, 6)}, r"v: found shape \(2, 6\), need \[N, HV, V\]"),
        ({"k": torch.zeros(2, 2, 9)}, r"k: found shape \(2, 2, 9\), need \[N, H, K\] = \(2, 2, 10\)"),
        ({"v": torch.zeros(2, 3, 6)}, r"v: found 3 value heads, need a multiple of the 2 key heads"),
        ({"beta": torch.zeros(2)}, r"beta: found shape \(2,\), need \[N, HV\] = \(2, 2\)"),
        (
            {"state": torch.zeros(2, 2, 6, 10)},
            r"state: found shape .*it looks transposed, \[V, K\] instead of \[K, V\]",
        ),
        ({"state": torch.zeros(2, 2, 10, 6).half()}, r"state: found dtype torch.float16, need torch.float32"),
        (
            {"state_indices": torch.tensor([0.0, 1.0])},
            r"state_indices: found dtype torch.float32, need int32 or int64",
        ),
        ({"state_indices": torch.tensor([0])}, r"state_indices: found shape \(1,\), need \[N\] = \(2,\)"),
        ({"state_indices": torch.tensor([0, 2])}, r"state_indices: found 2, need -1 \(padding\) or 0 \.\. 1"),
        ({"state_indices": torch.tensor([-2, 1])}, r"state_indices: found -2, need -1 \(padding\) or 0 \.\. 1"),
        ({"state_indices": torch.tensor([1, 1])}, r"state_indices: found one state twice, need each at most once"),
    ],
)
def test_bad_arguments(lab: SimpleNamespace, change: dict[str, Tensor], message: str) -> None:
    step, _, state = one_token(lab, 2)
    arguments = {name: x.float() for name, x in step.items()} | {"state": state.float()} | change
    indices = arguments.pop("state_indices", None)
    with pytest.raises(ValueError, match=message):
        kda_step(*arguments.values(), state_indices=indices)


def test_factors_and_expanded_states_are_refused_by_name(lab: SimpleNamespace) -> None:
    step, parameters, state = one_token(lab, 2)
    with pytest.raises(ValueError, match="scale: found nan, need a finite number"):
        kda_step(*step.values(), state, **parameters, scale=float("nan"))
    with pytest.raises(ValueError, match=r"beta_max: found -2.0, need a finite number > 0"):
        kda_step(*step.values(), state, **parameters, beta_max=-2.0)
    shared = state[:1].expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match="state: found an expanded tensor, whose states share memory"):
        kda_step(*step.values(), shared, **parameters, inplace=True)
    out, new = kda_step(*step.values(), shared, **parameters)
    expected, states = kda_step(*step.values(), shared.contiguous(), **parameters)
    assert torch.equal(out, expected) and torch.equal(new, states)


@pytest.mark.parametrize("inplace", [False, True])
def test_an_empty_pool_takes_padding(lab: SimpleNamespace, inplace: bool) -> None:
    step, parameters, state = one_token(lab, 3)
    pool = state[:0]
    out, new = kda_step(*step.values(), pool, **parameters, state_indices=torch.full((3,), -1), inplace=inplace)
    assert out.shape == (3, 2, 6) and not out.any() and new.shape == (0, 2, 10, 6)


@pytest.mark.parametrize("inplace", [False, True])
def test_states_of_any_strides(lab: SimpleNamespace, inplace: bool) -> None:
    step, parameters, state = one_token(lab, 3)
    expected, states = kda_step(*step.values(), state, **parameters)
    strided = state.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    out, new = kda_step(*step.values(), strided, **parameters, inplace=inplace)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(new, states, rtol=1e-12, atol=1e-13)
    assert (new is strided) == inplace


def test_in_place_with_gradients_is_refused(lab: SimpleNamespace) -> None:
    step, parameters, state = one_token(lab, 2)
    step["v"].requires_grad_()
    with pytest.raises(ValueError, match=r"inplace: found inputs that require a gradient, need torch.no_grad\(\)"):
        kda_step(*step.values(), state, **parameters, inplace=True)
