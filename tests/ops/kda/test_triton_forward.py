"""The GPU forward against the token-by-token definition in float64; in Triton's interpreter where there is no card."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from trine.ops._errors import check_errors, error_words  # noqa: E402
from trine.ops.kda.reference import kda_reference  # noqa: E402
from trine.ops.kda.triton_config import anchor, choose  # noqa: E402
from trine.ops.kda.triton_forward import forward, unsupported  # noqa: E402
from trine.ops.kda.triton_launch import repair_interpreter  # noqa: E402
from trine.ops.kda.triton_problem import even_rows  # noqa: E402

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")

FP32 = 2e-5  # the contract for float32 inputs
FP16 = 3.5e-3  # float16 inputs, factors in float16
BF16 = 5e-3


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every buffer starts as NaN, so that an element left unwritten, or read before it is written, is seen."""
    plain = torch.empty

    def poisoned(*args: object, **keywords: object) -> Tensor:
        tensor = plain(*args, **keywords)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield


def draw(
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 1,
    groups: int = 1,
    key: int = 32,
    value: int = 32,
    dtype: torch.dtype = torch.float32,
    sequences: int | None = None,
    gate_mean: float = 0.0,
) -> dict[str, Tensor]:
    """Random inputs of one call: N(0,1) tensors, gates from slow to saturated, and one initial state a sequence."""
    wide = heads * groups
    values = {
        "q": torch.randn(batch, tokens, heads, key),
        "k": torch.randn(batch, tokens, heads, key),
        "v": torch.randn(batch, tokens, wide, value),
        "gate": 2 * torch.randn(batch, tokens, wide, key) + gate_mean,
        "beta": torch.randn(batch, tokens, wide),
    }
    inputs = {name: tensor.to(DEVICE, dtype) for name, tensor in values.items()}
    inputs["A_log"] = (0.3 * torch.randn(wide)).to(DEVICE)
    inputs["dt_bias"] = torch.randn(wide, key).to(DEVICE) - 1
    inputs["initial_state"] = torch.randn(sequences or batch, wide, key, value).to(DEVICE)
    return inputs


def truth(inputs: dict[str, Tensor], **keywords: object) -> tuple[Tensor, Tensor]:
    """The definition in float64 on the CPU."""
    wide = {name: tensor.double().cpu() for name, tensor in inputs.items()}
    cut = keywords.pop("cu_seqlens", None)
    cut = cut.cpu() if isinstance(cut, Tensor) else None
    out, final = kda_reference(**wide, cu_seqlens=cut, output_final_state=True, **keywords)  # type: ignore[arg-type]
    assert final is not None
    return out, final


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    gap = float((found.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return gap if gap == gap else float("inf")


def check(inputs: dict[str, Tensor], tolerance: float, plan: str = "auto", **keywords: object) -> tuple[Tensor, Tensor]:
    """Run the kernels, compare output and final state with the truth, return both."""
    out, final, _ = forward(**inputs, output_final_state=True, plan=plan, **keywords)  # type: ignore[arg-type]
    assert final is not None and final.dtype == torch.float32
    wanted_out, wanted_final = truth(inputs, **keywords)
    assert out.dtype == inputs["v"].dtype
    assert error(out, wanted_out) <= tolerance
    assert error(final, wanted_final) <= tolerance
    return out, final


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 65])
def test_lengths(tokens: int) -> None:
    check(draw(tokens), FP32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, FP16), (torch.bfloat16, BF16)])
def test_sixteen_bit_inputs(dtype: torch.dtype, tolerance: float) -> None:
    check(draw(50, key=64, value=40, dtype=dtype), tolerance)


def test_factors_in_float16_round_less_than_in_bfloat16() -> None:
    inputs = draw(64, dtype=torch.bfloat16, gate_mean=-3.0)
    wanted, wanted_state = truth(inputs)
    errors = {}
    for plan in ("serial,fp16", "serial,bf16"):
        out, state, _ = forward(**inputs, plan=plan, output_final_state=True)
        assert state is not None
        errors[plan] = (error(out, wanted), error(state, wanted_state))
    assert errors["serial,fp16"][0] < errors["serial,bf16"][0] <= BF16
    assert errors["serial,fp16"][1] < 0.6 * errors["serial,bf16"][1]


@pytest.mark.parametrize(
    ("key", "value", "heads", "groups", "dtype"),
    [
        (60, 100, 1, 2, torch.float16),
        (100, 60, 2, 1, torch.float32),
        (16, 8, 2, 2, torch.float32),
        (200, 24, 1, 1, torch.float16),
        (24, 256, 1, 1, torch.float16),
    ],
)
def test_head_sizes_and_grouped_value_heads(key: int, value: int, heads: int, groups: int, dtype: torch.dtype) -> None:
    inputs = draw(12, batch=2, heads=heads, groups=groups, key=key, value=value, dtype=dtype)
    check(inputs, FP32 if dtype == torch.float32 else FP16)


@pytest.mark.parametrize(
    ("lengths", "index"),
    [
        ([0, 33, 0, 0, 1, 36, 0], torch.int32),
        ([32, 64], torch.int64),
        ([0, 0], torch.int32),
        ([5], torch.int64),
    ],
)
def test_packed_sequences(lengths: list[int], index: torch.dtype) -> None:
    error_words(DEVICE).zero_()  # it is the device's, and another test may have left its mark
    inputs = draw(sum(lengths), sequences=len(lengths))
    cut = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=index, device=DEVICE)
    out, final = check(inputs, FP32, cu_seqlens=cut)
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(final[n], inputs["initial_state"][n])
    check_errors(DEVICE)
    assert out.shape[1] == sum(lengths)


def test_empty_sequence_without_initial_state_ends_at_zero() -> None:
    inputs = draw(3, sequences=2)
    del inputs["initial_state"]
    cut = torch.tensor([0, 3, 3], device=DEVICE)
    _, final = check(inputs, FP32, cu_seqlens=cut)
    assert torch.equal(final[1], torch.zeros_like(final[1]))


def test_no_tokens_at_all() -> None:
    inputs = draw(0, batch=2)
    out, final, _ = forward(**inputs, output_final_state=True)
    assert out.shape == (2, 0, 1, 32)
    assert final is not None and torch.equal(final, inputs["initial_state"])


def test_packed_equals_each_alone_to_the_bit() -> None:
    lengths = [40, 1, 33]
    inputs = draw(sum(lengths), sequences=3, dtype=torch.float16)
    bounds = [0, 40, 41, 74]
    packed, states, _ = forward(**inputs, cu_seqlens=torch.tensor(bounds, device=DEVICE), output_final_state=True)
    assert states is not None
    for n, (a, b) in enumerate(pairwise(bounds)):
        alone = {name: inputs[name][:, a:b] for name in ("q", "k", "v", "gate", "beta")}
        alone |= {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"]}
        out, state, _ = forward(**alone, initial_state=inputs["initial_state"][n : n + 1], output_final_state=True)
        assert state is not None
        assert torch.equal(out, packed[:, a:b])
        assert torch.equal(state[0], states[n])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_segmented_walk_is_exact(dtype: torch.dtype) -> None:
    """Four segments of slow decay, where every transition counts; offsets alone would be far off."""
    inputs = draw(120, key=32, dtype=dtype, gate_mean=-8.0)
    check(inputs, FP32 if dtype == torch.float32 else FP16, plan="segmented:32")


def test_segments_are_joined_in_two_parts_beyond_128_channels() -> None:
    check(draw(97, key=136, value=8, dtype=torch.float16, gate_mean=-8.0), FP16, plan="segmented:32")


def test_segmented_packed_sequences() -> None:
    lengths = [0, 40, 32, 0, 97, 31, 0]
    inputs = draw(sum(lengths), sequences=len(lengths), gate_mean=-8.0)
    cut = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE)
    out, final = check(inputs, FP32, plan="segmented:32", cu_seqlens=cut)
    serial, serial_final, _ = forward(**inputs, cu_seqlens=cut, plan="serial", output_final_state=True)
    assert serial_final is not None
    # Sequences of one segment take the same path in both plans.
    assert torch.equal(out[:, 40:72], serial[:, 40:72])
    assert torch.equal(final[5], serial_final[5])


@pytest.mark.parametrize("plan", ["serial", "segmented:32"])
def test_outputs_keep_every_bit_when_the_future_changes_or_grows(plan: str) -> None:
    inputs = draw(72, dtype=torch.float16)
    base, _, _ = forward(**inputs, plan=plan)
    streams = ("q", "k", "v", "gate", "beta")
    for cut, names in ((22, ("k", "gate")), (45, streams)):
        changed = {name: (x.clone() if name in streams else x) for name, x in inputs.items()}
        for name in names:
            changed[name][:, cut:] = 7.0
        out, _, _ = forward(**changed, plan=plan)
        assert torch.equal(out[:, :cut], base[:, :cut])
        assert not torch.equal(out[:, cut:], base[:, cut:])
    short = {name: (x[:, :45] if name in streams else x) for name, x in inputs.items()}
    out, _, _ = forward(**short, plan=plan)
    assert torch.equal(out, base[:, :45])


def test_a_neighbour_document_does_not_matter() -> None:
    inputs = draw(50, sequences=2, dtype=torch.float16)
    cut = torch.tensor([0, 25, 50], device=DEVICE)
    base, states, _ = forward(**inputs, cu_seqlens=cut, output_final_state=True)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in ("q", "k", "v", "gate", "beta"):
        changed[name][:, 25:] = float("nan")
    out, new_states, _ = forward(**changed, cu_seqlens=cut, output_final_state=True)
    assert states is not None and new_states is not None
    assert torch.equal(out[:, :25], base[:, :25])
    assert torch.equal(new_states[0], states[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["saturated", "alternating", "one slow channel", "no decay"])
def test_extreme_gates_stay_finite_and_right(case: str, dtype: torch.dtype) -> None:
    """Strong decay must not overflow an anchor (public case B004)."""
    inputs = draw(33, dtype=dtype)
    del inputs["A_log"], inputs["dt_bias"]
    gate = torch.full_like(inputs["gate"], 40.0)
    if case == "alternating":
        gate[:, ::2] = -40.0
    elif case == "one slow channel":
        gate[..., 0] = -40.0
    elif case == "no decay":
        gate[:] = -200.0
    inputs["gate"] = gate
    inputs["beta"] = torch.full_like(inputs["beta"], 30.0)
    check(inputs, FP32 if dtype == torch.float32 else BF16)


@pytest.mark.parametrize(("noise", "dtype"), [(0.0, torch.float32), (0.1, torch.float32), (0.1, torch.bfloat16)])
def test_parallel_keys_with_slow_decay(noise: float, dtype: torch.dtype) -> None:
    """The inverse of I + M must not lose accuracy where powers of M are huge."""
    inputs = draw(64, dtype=dtype)
    keys = torch.randn(1, 1, 1, 32).to(DEVICE) + noise * torch.randn(1, 64, 1, 32).to(DEVICE)
    inputs["k"] = keys.expand(1, 64, 1, 32).to(dtype)
    inputs["gate"] = torch.full_like(inputs["gate"], -6.0)
    inputs["beta"] = torch.full_like(inputs["beta"], 30.0)
    del inputs["A_log"], inputs["dt_bias"]
    check(inputs, 1e-4 if dtype == torch.float32 else 1.1e-2)


def test_zero_rows() -> None:
    inputs = draw(20)
    inputs["q"][:, 3] = 0
    inputs["k"][:, 5:9] = 0
    inputs["v"][:, 12] = 0
    check(inputs, FP32)


@pytest.mark.parametrize(
    "keywords",
    [
        {"beta_max": 2.0},
        {"beta_is_logit": False},
        {"qk_norm": False, "scale": 0.25},
        {"lower_bound": -1.0},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options(keywords: dict[str, object], dtype: torch.dtype) -> None:
    inputs = draw(20, dtype=dtype)
    if "beta_is_logit" in keywords:
        inputs["beta"] = torch.rand_like(inputs["beta"])
    if "qk_norm" in keywords:
        inputs["k"] = inputs["k"] * 0.2
    inputs["dt_bias"] = inputs["dt_bias"].flatten()
    check(inputs, FP32 if dtype == torch.float32 else 1.2e-2, **keywords)


@pytest.mark.parametrize("missing", ["A_log", "dt_bias"])
def test_gate_parameters_may_be_absent(missing: str) -> None:
    inputs = draw(5)
    del inputs[missing]
    check(inputs, FP32)


def test_worked_example_of_scale_and_order_of_decay() -> None:
    """Public case B002: the read-out scale, and the prediction made after the decay."""
    gate = torch.logit(torch.tensor([0.5, 0.25]).log() / -5.0).view(1, 1, 1, 2)
    out, final, _ = forward(
        *(torch.tensor(x).view(1, 1, 1, 2).to(DEVICE) for x in ([0.6, 0.8], [1.0, 0.0], [10.0, 20.0])),
        gate.to(DEVICE),
        torch.full((1, 1, 1), 0.5, device=DEVICE),
        beta_is_logit=False,
        qk_norm=False,
        initial_state=torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE).view(1, 1, 2, 2),
        output_final_state=True,
    )
    assert final is not None
    assert torch.allclose(out.flatten().cpu(), torch.tensor([2.651650, 5.020458]), rtol=1e-5)
    assert torch.allclose(final.flatten().cpu(), torch.tensor([5.25, 10.5, 0.75, 1.0]), rtol=1e-5)


def _columns_of_a_wider_buffer(x: Tensor) -> Tensor:
    buffer = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device)
    buffer[..., 1 : 1 + x.shape[-1]] = x
    return buffer[..., 1 : 1 + x.shape[-1]]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _channels_apart(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("form", [_columns_of_a_wider_buffer, _heads_first, _channels_apart])
def test_strides_are_honoured(form: Callable[[Tensor], Tensor]) -> None:
    inputs = draw(9, heads=2, key=28, value=20, dtype=torch.float16)
    base, state, _ = forward(**inputs, output_final_state=True)
    views = {name: form(x) if x.ndim == 4 else x for name, x in inputs.items()}
    out, new_state, _ = forward(**views, output_final_state=True)
    assert torch.equal(out, base)
    assert state is not None and new_state is not None and torch.equal(new_state, state)


def test_expanded_heads() -> None:
    inputs = draw(9, heads=2)
    inputs["k"] = inputs["k"][:, :, :1].expand(-1, -1, 2, -1)
    check(inputs, FP32)


@pytest.mark.parametrize("bounds", [[1, 40], [0, 30, 20, 40], [0, 41], [0, 39]])
def test_bad_boundaries_set_the_error_word(bounds: list[int]) -> None:
    inputs = draw(40, sequences=len(bounds) - 1)
    forward(**inputs, cu_seqlens=torch.tensor(bounds, device=DEVICE), output_final_state=True)
    with pytest.raises(ValueError, match="cu_seqlens"):
        check_errors(DEVICE)
    check_errors(DEVICE)


def test_bad_boundaries_raise_at_once_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens"):
        forward(**draw(40), cu_seqlens=torch.tensor([0, 39], device=DEVICE))


def test_chunked_prefill_carries_the_state() -> None:
    inputs = draw(70)
    whole, final, _ = forward(**inputs, output_final_state=True)
    state = inputs["initial_state"]
    parts = []
    for a, b in ((0, 10), (10, 11), (11, 70)):
        piece = {name: (x[:, a:b] if name in ("q", "k", "v", "gate", "beta") else x) for name, x in inputs.items()}
        piece["initial_state"] = state
        out, new, _ = forward(**piece, output_final_state=True)
        assert new is not None
        state = new
        parts.append(out)
    assert final is not None
    assert error(torch.cat(parts, 1), whole.double().cpu()) <= FP32
    assert error(state, final.double().cpu()) <= FP32


def test_what_the_kernels_refuse() -> None:
    x = torch.zeros(1, 1, 1, 32)
    assert unsupported(x, x, "bounded", -5.0) is None
    assert "lower_bound" in str(unsupported(x, x, "bounded", -6.0))
    assert "softplus" in str(unsupported(x, x, "softplus", -5.0))
    assert "float64" in str(unsupported(x.double(), x.double(), "bounded", -5.0))
    assert "float64" in str(unsupported(x, x, "bounded", -5.0, x.double()))
    assert "512" in str(unsupported(torch.zeros(1, 1, 1, 512), x, "bounded", -5.0))


@pytest.mark.parametrize("plan", ["fast", "serial,fp8", "segmented:33", "segmented:0", "serial:64", "segmented:x"])
def test_unknown_plans_are_named(plan: str) -> None:
    with pytest.raises(ValueError, match="plan"):
        choose(8, 128, 128, torch.bfloat16, torch.bfloat16, True, plan)


def test_the_plan_is_a_function_of_heads_and_sizes_only() -> None:
    lengths = {h: choose(h, 128, 128, torch.bfloat16, torch.bfloat16, True, "auto").segment for h in (8, 16, 32, 96)}
    assert lengths == {8: 5056, 16: 1184, 32: 2048, 96: 0}
    assert choose(8, 128, 128, torch.bfloat16, torch.bfloat16, True, "serial").segment == 0


def test_the_anchor_keeps_a_tile_in_range() -> None:
    for bound in (-0.1, -1.0, -5.0, -5.4):
        c = anchor(bound)
        assert abs(c) <= 126
        assert 32 * abs(bound) * 1.4426950408889634 - c <= 126


def test_rows_too_far_apart_for_32_bit_offsets_are_copied() -> None:
    near = torch.randn(1, 3, 1, 8)
    far = torch.empty(2 * (1 << 26) + 24).as_strided((1, 3, 1, 8), (8, 1 << 26, 8, 1)).copy_(near)
    assert even_rows(near) is near
    found = even_rows(far)
    assert found.is_contiguous() and torch.equal(found, near)
