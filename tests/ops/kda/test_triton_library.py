"""The registered operators: schemas, shapes of fake tensors, gradients, and tracing a whole graph without a break."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from trine.ops.kda import _choice, kda, kda_step  # noqa: E402
from trine.ops.kda.triton_backward_autograd import Settings  # noqa: E402
from trine.ops.kda.triton_launch import repair_interpreter  # noqa: E402
from trine.ops.kda.triton_library import _kda_op, _kda_step_inplace_op, _kda_step_op  # noqa: E402

repair_interpreter()
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered", "ignore::UserWarning"
)

NAMES = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial_state")


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kda` treats CPU tensors like those on a card: kernels (in the interpreter), and no values read back."""
    monkeypatch.setattr(_choice, "why_no_card", lambda q: None)
    monkeypatch.setattr("trine.ops.kda.step.why_no_card", lambda q: None)
    monkeypatch.setattr("trine.ops.kda._checks.check_cu_seqlens", lambda *arguments: None)
    monkeypatch.setattr("trine.ops.kda._checks.check_entries", lambda *arguments: None)


def draw(tokens: int = 5, *, heads: int = 1, groups: int = 1, key: int = 32, value: int = 32) -> dict[str, Tensor]:
    """Inputs of one call in float32."""
    wide = heads * groups
    shapes = {
        "q": (1, tokens, heads, key), "k": (1, tokens, heads, key), "v": (1, tokens, wide, value),
        "gate": (1, tokens, wide, key), "beta": (1, tokens, wide), "A_log": (wide,), "dt_bias": (wide, key),
        "initial_state": (1, wide, key, value),
    }  # fmt: skip
    return {name: torch.randn(shape).to(DEVICE) for name, shape in shapes.items()}


def settings(keep: bool, final: bool, norm: bool = True) -> Settings:
    return Settings(-5.0, norm, True, 1.0, None, "auto", keep, final)


@pytest.mark.parametrize(
    ("keep", "final", "groups", "norm"), [(False, True, 2, True), (True, False, 1, True), (True, True, 1, False)]
)
def test_the_chunked_operator_keeps_the_rules_of_the_library(keep: bool, final: bool, groups: int, norm: bool) -> None:
    inputs = draw(groups=groups, value=20)
    if not final:
        del inputs["initial_state"], inputs["dt_bias"]
    leaves = [inputs[n].requires_grad_() if n in inputs else None for n in NAMES]
    torch.library.opcheck(_kda_op, (*leaves, None, *settings(keep, final, norm)))


def test_the_chunked_operator_with_packed_sequences() -> None:
    bounds = torch.tensor([0, 0, 3, 5], dtype=torch.int32, device=DEVICE)
    inputs = draw()
    inputs["initial_state"] = torch.randn(3, 1, 32, 32, device=DEVICE)
    arguments = (*(inputs[n] for n in NAMES), bounds, *settings(True, True))
    torch.library.opcheck(_kda_op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("pool", [False, True])
def test_the_step_operators(pool: bool) -> None:
    x = draw(1)
    index = torch.tensor([1], device=DEVICE) if pool else None
    state = torch.randn(3 if pool else 1, 1, 32, 32, device=DEVICE)
    row = (*(x[n][:, 0] for n in NAMES[:5]), state, x["A_log"], x["dt_bias"], index, "bounded", -5.0, True, True, 1.0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(_kda_step_op, (*row, None), test_utils=checks)
    torch.library.opcheck(_kda_step_inplace_op, (*row, None), test_utils=checks)


def gradients(function: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Outputs and gradients of a loss on both."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out, final = function(leaves, **options)
    loss = (out * torch.arange(out.numel(), device=DEVICE).view_as(out)).sum() + final.square().sum()
    found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return {**found, "out": out.detach(), "final": final.detach()}


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("save", ["inputs", "factors"])
def test_a_compiled_call_gives_the_bits_of_an_eager_one(save: str) -> None:
    def layer(x: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        out, final = kda(**(x | {"q": x["q"] * 2}), output_final_state=True, save=save)
        return out + 1, final

    inputs = draw(heads=1)
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    eager, compiled = gradients(layer, inputs), gradients(whole, inputs)
    assert all(torch.equal(eager[name], compiled[name]) for name in eager)


@pytest.mark.usefixtures("_kernels")
def test_a_compiled_packed_call_follows_new_lengths() -> None:
    def layer(x: dict[str, Tensor], bounds: Tensor) -> Tensor:
        return kda(**x, cu_seqlens=bounds)[0]

    whole = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([0, 2, 5], [0, 4, 9]):
        bounds = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        x = {**draw(lengths[-1]), "initial_state": torch.randn(2, 1, 32, 32, device=DEVICE)}
        with torch.no_grad():
            assert torch.equal(whole(x, bounds), layer(x, bounds))


@pytest.mark.usefixtures("_kernels")
def test_a_compiled_step_updates_its_pool_in_place() -> None:
    x = draw(1)
    pool = torch.randn(3, 1, 32, 32, device=DEVICE)
    index = torch.tensor([2], dtype=torch.int32, device=DEVICE)

    def step(state: Tensor) -> Tensor:
        row = (x[n][:, 0] for n in NAMES[:5])
        return kda_step(*row, state, A_log=x["A_log"], state_indices=index, inplace=True)[0] + 1

    eager, compiled = pool.clone(), pool.clone()
    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(step(eager), whole(compiled))
    assert torch.equal(eager, compiled) and not torch.equal(eager, pool)
    assert torch.equal(eager[:2], pool[:2])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("power", [1, 2])
def test_a_gradient_of_a_gradient_raises(power: int) -> None:
    leaves = {name: x.requires_grad_() for name, x in draw(3).items()}
    out, _ = kda(**leaves)
    (dv,) = torch.autograd.grad(out.pow(power).sum(), leaves["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        dv.sum().backward()


@pytest.mark.usefixtures("_kernels")
def test_unused_outputs_and_unneeded_gradients() -> None:
    x = draw(3)
    x["v"].requires_grad_()
    out, final = kda(**x, output_final_state=True)
    assert final is not None and final.grad_fn is not None
    (of_state,) = torch.autograd.grad(final.sum(), x["v"], retain_graph=True)
    (of_out,) = torch.autograd.grad(out.sum(), x["v"], retain_graph=True)
    (both,) = torch.autograd.grad(out.sum() + final.sum(), x["v"])
    assert torch.allclose(both, of_state + of_out, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert kda(**x)[0].grad_fn is None
