"""The GPU decode step against the definition in float64; in Triton's interpreter where there is no card."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from trine.ops.kda.reference import kda_reference  # noqa: E402
from trine.ops.kda.triton_decode import kda_step_triton  # noqa: E402
from trine.ops.kda.triton_forward import forward  # noqa: E402
from trine.ops.kda.triton_launch import repair_interpreter  # noqa: E402

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


def draw(
    count: int,
    *,
    heads: int = 1,
    groups: int = 1,
    key: int = 32,
    value: int = 32,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """One token of ``count`` sequences, and gate parameters."""
    wide = heads * groups
    step = {
        "q": torch.randn(count, heads, key),
        "k": torch.randn(count, heads, key),
        "v": torch.randn(count, wide, value),
        "gate": 2 * torch.randn(count, wide, key),
        "beta": torch.randn(count, wide),
    }
    inputs = {name: x.to(DEVICE, dtype) for name, x in step.items()}
    inputs["A_log"] = (0.3 * torch.randn(wide)).to(DEVICE)
    inputs["dt_bias"] = (torch.randn(wide, key) - 1).to(DEVICE)
    return inputs


def run(inputs: dict[str, Tensor], state: Tensor, **keywords: object) -> tuple[Tensor, Tensor]:
    """The kernel."""
    tensors = [inputs[name] for name in ("q", "k", "v", "gate", "beta")]
    return kda_step_triton(*tensors, state, A_log=inputs.get("A_log"), dt_bias=inputs.get("dt_bias"), **keywords)  # type: ignore[arg-type]


def truth(inputs: dict[str, Tensor], state: Tensor, **keywords: object) -> tuple[Tensor, Tensor]:
    """The definition in float64 on the CPU."""
    wide = {name: (x[:, None] if name[0] not in "Ad" else x).double().cpu() for name, x in inputs.items()}
    out, final = kda_reference(**wide, initial_state=state.double().cpu(), output_final_state=True, **keywords)  # type: ignore[arg-type]
    assert final is not None
    return out[:, 0], final


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    gap = float((found.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return gap if gap == gap else float("inf")


@pytest.mark.parametrize(
    ("key", "value", "heads", "groups"), [(32, 32, 2, 1), (60, 100, 1, 2), (100, 60, 2, 2), (8, 20, 1, 1)]
)
def test_one_token(key: int, value: int, heads: int, groups: int) -> None:
    inputs = draw(2, heads=heads, groups=groups, key=key, value=value)
    state = torch.randn(2, heads * groups, key, value, device=DEVICE)
    kept = state.clone()
    out, new = run(inputs, state)
    wanted, wanted_state = truth(inputs, state)
    assert error(out, wanted) <= 2e-6 and error(new, wanted_state) <= 2e-6
    assert torch.equal(state, kept)


@pytest.mark.parametrize("kind", ["softplus", "log_decay"])
def test_gates_without_a_floor(kind: str) -> None:
    inputs = draw(2, heads=2)
    if kind == "log_decay":
        inputs["gate"] = -inputs["gate"].abs() * 20
        del inputs["A_log"], inputs["dt_bias"]
    state = torch.randn(2, 2, 32, 32, device=DEVICE)
    out, new = run(inputs, state, gate_kind=kind)
    wanted, wanted_state = truth(inputs, state, gate_kind=kind)
    assert error(out, wanted) <= 2e-6 and error(new, wanted_state) <= 2e-6


def test_options() -> None:
    inputs = draw(1)
    inputs["beta"] = torch.rand_like(inputs["beta"])
    del inputs["A_log"], inputs["dt_bias"]
    options = {"beta_is_logit": False, "qk_norm": False, "scale": 0.5, "lower_bound": -1.0}
    state = torch.randn(1, 1, 32, 32, device=DEVICE)
    out, new = run(inputs, state, **options)
    wanted, wanted_state = truth(inputs, state, **options)
    assert error(out, wanted) <= 2e-6 and error(new, wanted_state) <= 2e-6


def test_beta_is_not_rounded() -> None:
    """Public case B040: a bf16 logit of 0.5 must write sigmoid(0.5) = 0.6224593, not its bf16 neighbour 0.62109375."""
    bf16 = torch.bfloat16
    _, state = kda_step_triton(
        torch.ones(1, 1, 2, dtype=bf16, device=DEVICE),
        torch.tensor([1.0, 0.0], dtype=bf16, device=DEVICE).view(1, 1, 2),
        torch.tensor([1.0, 0.0], dtype=bf16, device=DEVICE).view(1, 1, 2),
        torch.zeros(1, 1, 2, dtype=bf16, device=DEVICE),
        torch.full((1, 1), 0.5, dtype=bf16, device=DEVICE),
        torch.zeros(1, 1, 2, 2, device=DEVICE),
        qk_norm=False,
    )
    assert abs(float(state[0, 0, 0, 0]) - 0.6224593) < 1e-6


def test_a_pool_is_updated_in_place_and_padding_touches_nothing() -> None:
    inputs = draw(4, heads=2, dtype=torch.float16)
    pool = torch.randn(5, 2, 32, 32, device=DEVICE)
    kept = pool.clone()
    index = torch.tensor([3, -1, 0, 7], dtype=torch.int32, device=DEVICE)
    out, same = run(inputs, pool, state_indices=index, inplace=True)
    assert same is pool
    wanted, wanted_state = truth(inputs, kept[[3, 0, 0, 0]])
    for row, entry in ((0, 3), (2, 0)):
        alone = {name: (x[row : row + 1] if name[0] not in "Ad" else x) for name, x in inputs.items()}
        wanted, wanted_state = truth(alone, kept[entry : entry + 1])
        assert error(out[row], wanted[0]) <= 1e-3
        assert error(pool[entry], wanted_state[0]) <= 1e-6
    for row in (1, 3):
        assert torch.equal(out[row], torch.zeros_like(out[row]))
    for entry in (1, 2, 4):
        assert torch.equal(pool[entry], kept[entry])


def test_a_pool_is_copied_unless_in_place() -> None:
    inputs = draw(1)
    pool = torch.randn(3, 1, 32, 32, device=DEVICE)
    kept = pool.clone()
    _, new = run(inputs, pool, state_indices=torch.tensor([2], device=DEVICE))
    assert torch.equal(pool, kept)
    assert torch.equal(new[:2], kept[:2]) and not torch.equal(new[2], kept[2])


def test_states_in_bfloat16_round_once() -> None:
    inputs = draw(2, heads=2)
    state = torch.randn(2, 2, 32, 32, device=DEVICE).bfloat16()
    out, new = run(inputs, state)
    wanted, wanted_state = truth(inputs, state)
    assert new.dtype == torch.bfloat16
    assert error(out, wanted) <= 2e-6
    assert torch.equal(new.cpu(), wanted_state.float().bfloat16())


def test_strides_are_honoured() -> None:
    inputs = draw(2, heads=2)
    state = torch.randn(2, 2, 32, 32, device=DEVICE)
    out, new = run(inputs, state)
    padded = torch.full((2, 2, 33, 40), float("nan"), device=DEVICE)
    padded[:, :, :32, :32] = state
    views = {name: (x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 2 else x) for name, x in inputs.items()}
    views["beta"] = inputs["beta"].t().contiguous().t()
    out2, new2 = run(views, padded[:, :, :32, :32], inplace=True)
    assert torch.equal(out2, out) and torch.equal(new2, new)
    assert bool(padded[:, :, 32:].isnan().all()) and bool(padded[..., 32:].isnan().all())


def test_decode_goes_on_where_prefill_stopped() -> None:
    tokens, cut = 38, 33
    step = draw(tokens, heads=1)
    whole = {name: (x[None] if name[0] not in "Ad" else x) for name, x in step.items()}
    out, final, _ = forward(**whole, output_final_state=True)
    head = {name: (x[:, :cut] if name[0] not in "Ad" else x) for name, x in whole.items()}
    _, state, _ = forward(**head, output_final_state=True)
    assert final is not None and state is not None
    for t in range(cut, tokens):
        token = {name: (x[t : t + 1] if name[0] not in "Ad" else x) for name, x in step.items()}
        y, state = run(token, state)
        assert error(y[0], out[0, t].double().cpu()) <= 2e-5
    assert error(state, final.double().cpu()) <= 2e-5


@pytest.mark.parametrize(
    ("keywords", "state", "message"),
    [
        ({}, torch.zeros(1, 1, 32, 32, dtype=torch.float16), "float16"),
        ({"inplace": True}, torch.zeros(1, 1, 32, 32).transpose(2, 3), "contiguous rows"),
    ],
)
def test_states_that_cannot_be_used_are_named(keywords: dict[str, object], state: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"state: .*{message}"):
        run(draw(1), state.to(DEVICE), **keywords)


def test_too_many_channels_are_named() -> None:
    with pytest.raises(ValueError, match="K=300"):
        run(draw(1, key=300), torch.zeros(1, 1, 300, 32, device=DEVICE))
