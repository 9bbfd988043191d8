"""The GPU backward against autograd of the token recurrence in float64; in Triton's interpreter without a card."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from trine.ops.kda.reference import kda_reference  # noqa: E402
from trine.ops.kda.triton_backward import JOIN, MEMORY, SEGMENTS, choose_backward, kda_backward  # noqa: E402
from trine.ops.kda.triton_backward_autograd import Settings, factors_fit, forward_keeping  # noqa: E402
from trine.ops.kda.triton_entry import kda_triton  # noqa: E402
from trine.ops.kda.triton_launch import Kernel, repair_interpreter  # noqa: E402
from trine.ops.kda.triton_problem import NOTHING  # noqa: E402

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")

NAMES = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial_state")


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fresh buffer holds NaN, so that an element left unwritten, or read before it is written, is seen."""
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)

        def poisoned(*args: Any, plain: Any = plain, **keywords: Any) -> Tensor:
            tensor = plain(*args, **keywords)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-7)

        monkeypatch.setattr(torch, name, poisoned)


def draw(
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 1,
    groups: int = 1,
    key: int = 32,
    value: int = 32,
    sequences: int | None = None,
    regime: str = "fast",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Raw inputs, and the gradients of output and final state, drawn in float32 and rounded to ``dtype``."""
    wide, n = heads * groups, sequences or batch
    k = torch.randn(batch, tokens, heads, key)
    gate, bias = torch.randn(batch, tokens, wide, key), 0.3 * torch.randn(wide, key)
    if regime == "slow":
        gate = 0.1 * gate - 4
    elif regime == "saturated":
        gate = gate + 9
    elif regime == "parallel":
        k, gate = torch.randn(batch, 1, heads, key) + 0.1 * k, 0.1 * gate - 4
    raw = {
        "q": torch.randn(batch, tokens, heads, key),
        "k": k,
        "v": torch.randn(batch, tokens, wide, value),
        "gate": gate,
        "beta": torch.randn(batch, tokens, wide),
        "d_output": torch.randn(batch, tokens, wide, value),
    }
    full = {
        "A_log": 0.3 * torch.randn(wide),
        "dt_bias": bias,
        "initial_state": torch.randn(n, wide, key, value),
        "d_final_state": torch.randn(n, wide, key, value),
    }
    return {name: x.to(DEVICE, dtype) for name, x in raw.items()} | {name: x.to(DEVICE) for name, x in full.items()}


def expected_gradients(data: dict[str, Tensor], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of the recurrence in float64."""
    leaves = {name: data[name].double().requires_grad_() for name in NAMES if name in data}
    out, final = kda_reference(**leaves, output_final_state=True, **options)
    assert final is not None
    loss = (out * data["d_output"].double()).sum()
    if "d_final_state" in data:
        loss = loss + (final * data["d_final_state"].double()).sum()
    return out.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def run(data: dict[str, Tensor], out: Tensor, **options: Any) -> dict[str, Tensor]:
    """Our gradients by name."""
    found = kda_backward(
        *(data[name] for name in NAMES[:5]),
        out.to(data["v"].dtype),
        data["d_output"],
        data.get("d_final_state"),
        **{name: data.get(name) for name in NAMES[5:]},
        **options,
    )
    return {name: x for name, x in zip(NAMES, found, strict=True) if x is not None}


def errors_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative Frobenius errors; A_log's, one number a head that may cancel, relative to the gate's gradient too."""
    sizes = {name: x.norm() for name, x in expected.items()}
    if "A_log" in sizes:
        sizes["A_log"] = torch.maximum(sizes["A_log"], sizes["gate"])
    return {name: ((found[name].double() - x).norm() / sizes[name]).item() for name, x in expected.items()}


def check(data: dict[str, Tensor], **options: Any) -> None:
    """Every float32 gradient within 2e-5 of float64, A_log's within 1e-4."""
    ours = {name: options.pop(name) for name in ("segment", "config") if name in options}
    out, expected = expected_gradients(data, **options)
    options |= ours
    found = run(data, out, **options)
    assert found.keys() == expected.keys()
    errors = errors_of(found, expected)
    limits = dict.fromkeys(errors, 2e-5) | {"A_log": 1e-4}
    too_large = {name: f"{e:.1e}" for name, e in errors.items() if not e <= limits[name]}
    assert not too_large
    assert {name: x.dtype for name, x in found.items()} == {name: data[name].dtype for name in found}


@pytest.mark.parametrize("regime", ["fast", "slow", "parallel"])
def test_every_gradient_of_every_regime(regime: str) -> None:
    check(draw(70, regime=regime))


def test_saturated_gates() -> None:
    """A gate at 1 - 1e-4, and strengths as close to 1: their slopes are not differences from 1."""
    data = draw(70, regime="saturated")
    data["beta"] += 9
    out, expected = expected_gradients(data)
    for name, e in errors_of(run(data, out), expected).items():
        assert e <= (1e-4 if name in ("gate", "A_log", "dt_bias") else 2e-5), (name, e)


@pytest.mark.parametrize("regime", ["fast", "slow"])
def test_bf16_inputs_lose_no_more_than_their_rounding(regime: str) -> None:
    """The contract (5e-3, 6e-3 for gate, beta and sums) is kept over thousands of tokens; 64 scatter around it."""
    data = draw(64, regime=regime, dtype=torch.bfloat16)
    out, expected = expected_gradients(data)
    for name, e in errors_of(run(data, out), expected).items():
        assert e <= (1.5e-2 if name == "A_log" else 6e-3), (name, e)


def test_states_are_walked_more_finely_than_gradients() -> None:
    """With K- and values in fp16 and A in two parts, nearly parallel keys lose half as much in the gates' sums.

    And a fifth less in dv, which A in two parts alone does. A_log is one number a head, hence two draws.
    """
    squares: dict[tuple[bool, str], float] = {}
    for seed in (0, 2):
        torch.manual_seed(seed)
        data = draw(256, heads=2, regime="parallel", dtype=torch.bfloat16)
        out, expected = expected_gradients(data)
        for fine in (False, True):
            for name, e in errors_of(run(data, out, fine=fine), expected).items():
                squares[fine, name] = squares.get((fine, name), 0.0) + e * e / 2
    coarse, fine = ({name: e**0.5 for (kind, name), e in squares.items() if kind == x} for x in (False, True))
    assert fine["A_log"] <= 0.5 * coarse["A_log"] and fine["dt_bias"] <= 0.75 * coarse["dt_bias"]
    assert fine["A_log"] <= 4e-3 and fine["v"] <= 0.85 * coarse["v"]


def test_what_a_last_token_writes_leaves_no_rounding_in_the_gates() -> None:
    """At saturated gates it is e^5 times what the sums over a chunk are about; in 16 bits it cost 8.9e-3 here."""
    torch.manual_seed(2)
    data = draw(192, heads=2, regime="saturated", dtype=torch.bfloat16)
    out, expected = expected_gradients(data)
    errors = errors_of(run(data, out), expected)
    assert max(errors[name] for name in ("gate", "A_log", "dt_bias")) <= 4.5e-3, errors


@pytest.mark.parametrize("tokens", [1, 31, 32, 33])
def test_lengths_around_a_chunk(tokens: int) -> None:
    check(draw(tokens))


def test_head_sizes_that_fill_no_tile_and_a_batch() -> None:
    check(draw(40, batch=2, heads=2, key=20, value=44))


def test_several_channel_and_value_blocks() -> None:
    config = replace(choose_backward(torch.float32, 128, 64), scan_block=32)
    assert config.key_width == 2 * config.gradient_block and config.value_width == 2 * config.scan_block
    check(draw(33, key=100, value=64), config=config)


def test_value_heads_in_groups() -> None:
    check(draw(33, heads=2, groups=2))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_sequences_with_empty_ones(index: torch.dtype) -> None:
    lengths = [0, 1, 33, 0, 20, 0]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=index, device=DEVICE)
    check(draw(sum(lengths), sequences=len(lengths)), cu_seqlens=cu)


def test_tokens_beyond_the_last_sequence_get_zero() -> None:
    data = draw(70, sequences=1)
    short = {name: x[:, :40] if x.ndim > 2 and x.shape[1] == 70 else x for name, x in data.items()}
    out, expected = expected_gradients(short)
    padded = torch.zeros_like(data["v"])
    padded[:, :40] = out
    found = run(data, padded, cu_seqlens=torch.tensor([0, 40], dtype=torch.int32, device=DEVICE))
    for name in NAMES[:5]:
        assert (found[name][:, :40].double() - expected[name]).norm() <= 2e-5 * expected[name].norm(), name
        assert found[name][:, 40:].abs().max() == 0, name
    assert (found["dt_bias"].double() - expected["dt_bias"]).norm() <= 2e-5 * expected["dt_bias"].norm()


@pytest.mark.parametrize("lengths", [None, [0], [0, 0, 0]])
def test_nothing_to_do_passes_the_states_gradient_through(lengths: list[int] | None) -> None:
    n = len(lengths or [0])
    data = draw(0, sequences=n)
    cu = None if lengths is None else torch.zeros(n + 1, dtype=torch.int32, device=DEVICE)
    found = run(data, data["v"], cu_seqlens=cu)
    assert torch.allclose(found["initial_state"], data["d_final_state"], rtol=1e-6, atol=0)
    assert found["A_log"].abs().max() == 0 and found["dt_bias"].abs().max() == 0
    assert found["q"].shape == (1, 0, 1, 32)


def test_without_optional_arguments() -> None:
    data = draw(33)
    for name in ("A_log", "dt_bias", "initial_state", "d_final_state"):
        del data[name]
    check(data, lower_bound=-1.0, scale=0.5, beta_max=2.0)


def test_given_strengths_of_zero_and_one_and_raw_keys() -> None:
    data = draw(33)
    data["beta"] = data["beta"].sigmoid()
    data["beta"][:, ::5] = 0
    data["beta"][:, 2::5] = 1
    data["k"] *= 0.2
    check(data, beta_is_logit=False, qk_norm=False)


@pytest.mark.parametrize("regime", ["fast", "slow", "saturated"])
def test_tiny_and_huge_gradients_keep_every_bit(regime: str) -> None:
    """Beside factors of 2^-115 a gradient of 1e-9 would underflow: the kernel scales by powers of two, exactly."""
    data = draw(40, regime=regime)
    out, _ = expected_gradients(data)
    plain = run(data, out)
    for power in (-40, 30):
        scaled = dict(data, d_output=data["d_output"] * 2.0**power, d_final_state=data["d_final_state"] * 2.0**power)
        for name, x in run(scaled, out).items():
            assert torch.equal(x * 2.0**-power, plain[name]), (name, power)


def test_later_tokens_change_no_bit_of_earlier_gradients() -> None:
    data, other = draw(70), draw(70)
    cut = 45
    data["d_output"][:, cut:] = 0
    del data["d_final_state"]
    changed = dict(data)
    for name in ("q", "k", "v", "gate", "beta"):
        changed[name] = torch.cat([data[name][:, :cut], other[name][:, cut:]], dim=1)
    found = run(data, expected_gradients(data)[0])
    again = run(changed, expected_gradients(changed)[0])
    for name in NAMES:
        assert torch.equal(found[name], again[name]), name
    for name in NAMES[:5]:
        assert found[name][:, cut:].abs().max() == 0, name


def test_strided_views_are_read_as_they_are() -> None:
    data = draw(33, heads=2)
    out, _ = expected_gradients(data)
    plain = run(data, out)
    views = {name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 4 else x for name, x in data.items()}
    views["initial_state"] = data["initial_state"].mT.contiguous().mT
    views["v"] = torch.cat([data["v"], data["v"]], dim=-1)[..., :32]
    assert not views["q"].is_contiguous() and not views["v"].is_contiguous()
    for name, x in run(views, out.expand(1, -1, -1, -1)).items():
        assert torch.equal(x, plain[name]), name


@pytest.mark.parametrize("segment", [32, 64])
def test_segments_give_the_same_gradients(segment: int) -> None:
    """Exact for slow decay: three or two segments of 70 tokens, and packed ones cut from each sequence's own start."""
    check(draw(70, regime="slow"), segment=segment)
    if segment == 32:
        cu = torch.tensor([0, 0, 33, 34, 104, 104], dtype=torch.int32, device=DEVICE)
        check(draw(104, sequences=5, regime="slow"), segment=segment, cu_seqlens=cu)


def test_segments_of_keys_too_wide_for_one_map() -> None:
    cu = torch.tensor([0, 99, 100], dtype=torch.int32)
    check(draw(100, heads=1, key=256, value=32, sequences=2, regime="slow"), segment=32, cu_seqlens=cu)


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((), {"tokens": 100, "batch": 2, "value": 44}),  # four segments; value rows that only the padding has
        ((0, 33, 1, 70, 0), {"tokens": 104, "sequences": 5}),
        ((99, 1), {"tokens": 100, "heads": 1, "key": 256, "value": 32, "sequences": 2}),  # maps in pieces
    ],
)
def test_cuts_of_the_forward_pass_serve_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], sizes: dict[str, int]
) -> None:
    """With states and maps of the forward's segments the same gradients, from a third of the programs."""
    plain_launch = Kernel.launch
    monkeypatch.setattr(MEMORY, "_kept", {})  # no replays, which would not come by
    data = draw(**sizes, regime="slow")  # type: ignore[arg-type]
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int() if lengths else None
    settings = Settings(-5.0, True, True, 1.0, None, "segmented:32", False, True)
    out, _, kept = forward_keeping(*(data[name] for name in NAMES), cu, settings)
    assert kept.cuts is not None and kept.factors is None
    expected_out, expected = expected_gradients(data, **({} if cu is None else {"cu_seqlens": cu}))
    assert (out.double() - expected_out).norm() <= 2e-5 * expected_out.norm()
    grids: dict[bool, list[int]] = {False: [], True: []}
    for served in (False, True):

        def launch(kernel: Kernel, grid: int, *rest: Any, grids: list[int] = grids[served]) -> None:
            if kernel in (SEGMENTS, JOIN):
                grids.append(grid)
            plain_launch(kernel, grid, *rest)

        monkeypatch.setattr(Kernel, "launch", launch)
        found = run(data, out, cu_seqlens=cu, segment=32, kept=kept if served else NOTHING)
        for name, e in errors_of(found, expected).items():
            assert e <= (1e-4 if name == "A_log" else 2e-5), (served, name, e)
    segments, join = grids[True]
    assert grids[False][1] == 2 * join and grids[False][0] > 2 * segments


@pytest.mark.parametrize("keep", [False, True])
def test_autograd_ties_forward_and_backward(keep: bool) -> None:
    data = draw(40)
    leaves = {name: data[name].clone().requires_grad_() for name in NAMES}
    out, final = kda_triton(**leaves, output_final_state=True, save="factors" if keep else "inputs")
    assert final is not None
    loss = (out * data["d_output"]).sum() + (final * data["d_final_state"]).sum()
    found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    expected_out, expected = expected_gradients(data)
    assert (out.double() - expected_out).norm() <= 2e-5 * expected_out.norm()
    assert max(errors_of(found, expected).values()) <= 3e-5


def test_autograd_without_a_state_and_with_a_frozen_input() -> None:
    data = draw(33, dtype=torch.bfloat16)
    leaves = {name: data[name].clone().requires_grad_(name != "k") for name in NAMES[:7]}
    out, final = kda_triton(**leaves, save="factors")
    assert final is None
    out.backward(data["d_output"])
    del data["initial_state"], data["d_final_state"]
    _, expected = expected_gradients(data)
    assert leaves["k"].grad is None
    for name in ("q", "v", "gate", "beta", "dt_bias"):
        grad = leaves[name].grad
        assert grad is not None and grad.dtype == data[name].dtype
        assert (grad.double() - expected[name]).norm() <= 7e-3 * expected[name].norm(), name


@pytest.mark.parametrize(("logit", "values"), [(False, torch.bfloat16), (True, torch.float16)])
def test_nothing_is_rounded_for_factors_that_are_not_kept(logit: bool, values: torch.dtype) -> None:
    data = draw(70, dtype=torch.bfloat16)
    inputs = {name: data[name] for name in NAMES[:7]}
    inputs["v"] = inputs["v"].to(values)
    if not logit:
        inputs["beta"] = inputs["beta"].sigmoid()
    settings = Settings(-5.0, True, logit, 1.0, None, "auto", True, False)
    assert not factors_fit(inputs["q"], inputs["v"], settings)
    wanted, found = (
        kda_triton(**{n: x.clone().requires_grad_() for n, x in inputs.items()}, beta_is_logit=logit, save=save)[0]
        for save in ("inputs", "factors")
    )
    assert torch.equal(wanted, found)


def test_a_wrong_output_shape_is_named() -> None:
    data = draw(3)
    with pytest.raises(ValueError, match=r"output: found shape \(1, 2, 1, 32\), need that of v, \(1, 3, 1, 32\)"):
        run(data, data["v"][:, :2])
