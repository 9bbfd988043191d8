"""The chunked path against the definition in float64: values, final states and every gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trine.ops.kda import kda, kda_reference, kda_step
from trine.ops.kda.chunk import tiles_in_chunk

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
REGIMES = (
    "saturated",
    "parallel keys",
    "identical keys",
    "one slow channel",
    "fast and slow channels",
    "alternating",
    "zero rows",
)
DTYPES = (torch.float64, torch.float32)


@pytest.fixture(autouse=True)
def _flush_denormals() -> object:
    """Training runs with denormals flushed; accuracy must not depend on them."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_length_equals_the_definition(lab: SimpleNamespace, tokens: int, dtype: torch.dtype) -> None:
    lab.check(kda, lab.draw(tokens, key=12, value=7), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("regime", REGIMES)
def test_hard_gates_and_keys_equal_the_definition(lab: SimpleNamespace, regime: str, dtype: torch.dtype) -> None:
    lab.check(kda, lab.draw(70, regime=regime), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sixty_key_channels(lab: SimpleNamespace, dtype: torch.dtype) -> None:
    lab.check(kda, lab.draw(65, key=60, value=36), dtype)


@pytest.mark.parametrize(
    "lengths", [(5, 17, 1, 0, 41), (0, 0, 3), (1, 1, 1), (16, 48, 32), (32, 32), (33, 0), (64, 16, 16, 0)]
)
@pytest.mark.parametrize("kind", ["bounded", "softplus"])
def test_packed_documents_equal_the_definition(lab: SimpleNamespace, lengths: tuple[int, ...], kind: str) -> None:
    inputs = lab.draw(sum(lengths), sequences=len(lengths), key=8, value=5)
    for dtype, index in zip(DTYPES, (torch.int32, torch.int64), strict=True):
        lab.check(kda, inputs, dtype, cu_seqlens=lab.cu(*lengths, dtype=index), gate_kind=kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bounded", "log_decay"])
@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("lengths", [(5, 65, 0, 33, 130), (64, 64, 64)])
def test_chunks_of_several_tiles(
    lab: SimpleNamespace,
    split: int,
    lengths: tuple[int, ...],
    kind: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trine.ops.kda.tiles_in_chunk", lambda key, value: split)
    inputs = lab.draw(sum(lengths), sequences=len(lengths), key=9, value=5)
    if kind == "log_decay":
        del inputs["A_log"], inputs["dt_bias"]
        inputs["gate"] = -inputs["gate"].exp()
    lab.check(kda, inputs, dtype, cu_seqlens=lab.cu(*lengths), gate_kind=kind)


def test_chunks_grow_with_the_state_only() -> None:
    assert [tiles_in_chunk(*sizes) for sizes in ((32, 32), (64, 64), (60, 36), (128, 128))] == [1, 2, 2, 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_and_short_documents_over_several_blocks_of_the_reverse_scan(
    lab: SimpleNamespace, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trine.ops.kda.scan.RING_BYTES", 4096)
    lengths = (100, 3, 40, 0, 97, 64)
    inputs = lab.draw(sum(lengths), sequences=len(lengths), key=8, value=5)
    lab.check(kda, inputs, dtype, cu_seqlens=lab.cu(*lengths))


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_rows_without_packing(lab: SimpleNamespace, dtype: torch.dtype) -> None:
    lab.check(kda, lab.draw(21, batch=3), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bounded", "softplus", "log_decay"])
def test_grouped_value_heads(lab: SimpleNamespace, kind: str, dtype: torch.dtype) -> None:
    inputs = lab.draw(35, heads=2, value_heads=6, key=9, value=4)
    if kind == "log_decay":
        del inputs["A_log"], inputs["dt_bias"]
        inputs["gate"] = -inputs["gate"].abs()
    lab.check(kda, inputs, dtype, gate_kind=kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": False},
        {"scale": 0.7},
        {"beta_max": 2.0},
        {"lower_bound": -1.0},
        {"lower_bound": -5.4},
        {"plan": "serial"},
        {"plan": "segmented"},
    ],
    ids=str,
)
def test_options(lab: SimpleNamespace, options: dict[str, object], dtype: torch.dtype) -> None:
    inputs = lab.draw(40, key=10, value=6)
    if options.get("qk_norm") is False:
        inputs["q"], inputs["k"] = inputs["q"] * 0.3, inputs["k"] * 0.3
    sizes = lab.gate_terms(inputs)
    errors = lab.relative_errors(
        lab.run(kda, lab.cast(inputs, dtype), **options), lab.run(kda_reference, inputs, **options), sizes
    )
    assert max(errors.values()) <= (1e-10 if dtype == torch.float64 else 1e-5), errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 1.0, 2.0])
def test_beta_given_directly(lab: SimpleNamespace, value: float, dtype: torch.dtype) -> None:
    inputs = lab.draw(40, key=10, value=6)
    inputs["beta"] = torch.full_like(inputs["beta"], value)
    lab.check(kda, inputs, dtype, beta_is_logit=False)


@pytest.mark.parametrize("missing", [("A_log",), ("dt_bias",), ("A_log", "dt_bias"), ("initial_state",)])
@pytest.mark.parametrize("kind", ["bounded", "softplus"])
def test_optional_tensors_left_out(lab: SimpleNamespace, missing: tuple[str, ...], kind: str) -> None:
    inputs = {name: x for name, x in lab.draw(33, key=6, value=5).items() if name not in missing}
    lab.check(kda, inputs, torch.float64, gate_kind=kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 0.01, 5.0, 30.0, 1000.0])
def test_log_decays_of_any_size(lab: SimpleNamespace, size: float, dtype: torch.dtype) -> None:
    inputs = lab.draw(50)
    del inputs["A_log"], inputs["dt_bias"]
    inputs["gate"] = torch.full_like(inputs["gate"], -size)
    lab.check(kda, inputs, dtype, gate_kind="log_decay")


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_decays_of_all_sizes_mixed(lab: SimpleNamespace, dtype: torch.dtype) -> None:
    inputs = lab.draw(90)
    del inputs["A_log"], inputs["dt_bias"]
    sizes = torch.tensor([0.0, 1e-3, 0.3, 5.0, 30.0, 1000.0], dtype=torch.float64)
    inputs["gate"] = -sizes[torch.randint(6, inputs["gate"].shape)] * torch.rand_like(inputs["gate"]).float().double()
    lab.check(kda, inputs, dtype, gate_kind="log_decay")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(lab: SimpleNamespace, dtype: torch.dtype) -> None:
    state = lab.draw(40)["initial_state"].float()
    inputs = {name: x.to(dtype) for name, x in lab.draw(40, state=False).items()}
    exact, exact_state = kda(**{n: x.float() for n, x in inputs.items()}, initial_state=state, output_final_state=True)
    out, final = kda(**inputs, initial_state=state, output_final_state=True)
    assert out.dtype == dtype and final is not None and final.dtype == torch.float32
    assert torch.equal(out, exact.to(dtype))
    assert torch.equal(final, exact_state)
    gradients = lab.run(lambda **x: kda(**x, initial_state=state), inputs, final=False)
    assert all(gradients["d_" + name].dtype == dtype for name in inputs)


def test_float64_states_stay_float64(lab: SimpleNamespace) -> None:
    out, final = kda(**lab.draw(20), output_final_state=True)
    assert out.dtype == torch.float64 and final is not None and final.dtype == torch.float64


def test_strided_and_expanded_inputs_are_read_as_they_are_and_left_alone(lab: SimpleNamespace) -> None:
    plain = lab.cast(lab.draw(40, key=8, value=6), torch.float32)
    wide = {name: torch.cat([x, torch.full_like(x, float("nan"))], -1) for name, x in plain.items()}
    strided = {name: x[..., : plain[name].shape[-1]] for name, x in wide.items()}
    strided["k"] = plain["k"][:, :1].expand_as(plain["k"])
    plain["k"] = strided["k"].contiguous()
    strided["v"] = plain["v"].transpose(1, 2).contiguous().transpose(1, 2)
    before = {name: x.clone() for name, x in strided.items()}
    expected, found = lab.run(kda, plain), lab.run(kda, strided)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    kda(**strided, output_final_state=True)
    assert all(torch.equal(strided[name], before[name]) for name in strided)


def test_forward_without_gradient_gives_the_same_bits(lab: SimpleNamespace) -> None:
    lengths = (40, 7, 0, 33)
    inputs = lab.cast(lab.draw(80, sequences=4), torch.float32)
    packed = lab.cu(*lengths)
    with torch.no_grad():
        out, final = kda(**inputs, cu_seqlens=packed, output_final_state=True)
    results = lab.run(kda, inputs, cu_seqlens=packed)
    assert torch.equal(out, results["out"]) and torch.equal(final, results["final"])


@pytest.mark.parametrize("used", ["out", "final"])
def test_a_loss_on_one_result_only(lab: SimpleNamespace, used: str) -> None:
    results = {}
    for function in (kda, kda_reference):
        leaves = {name: x.clone().requires_grad_() for name, x in lab.draw(37, key=6, value=5).items()}
        out, final = function(**leaves, output_final_state=True)
        loss = (out if used == "out" else final).square().sum()
        results[function] = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    for found, expected in zip(results[kda], results[kda_reference], strict=True):
        assert (found - expected).norm() <= 1e-10 * expected.norm()


def test_two_backward_passes_over_one_graph_agree(lab: SimpleNamespace) -> None:
    leaves = {name: x.requires_grad_() for name, x in lab.draw(70, key=60, value=40).items()}
    out, final = kda(**leaves, output_final_state=True)
    loss = out.square().sum() + final.sum()
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_rounds_nothing(lab: SimpleNamespace) -> None:
    inputs = lab.cast(lab.draw(40), torch.float32)
    expected = lab.run(kda, inputs)
    plain = kda(**inputs, backend="reference")[0]
    per_token = [inputs[n][:, 0] for n in ("q", "k", "v", "gate", "beta")]
    parameters = {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"]}
    step = kda_step(*per_token, inputs["initial_state"], **parameters)
    with torch.autocast("cpu", torch.bfloat16):
        found = lab.run(kda, inputs)
        assert torch.equal(kda(**inputs, backend="reference")[0], plain)
        again = kda_step(*per_token, inputs["initial_state"], **parameters)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(a, b) for a, b in zip(step, again, strict=True))


def test_only_wanted_gradients(lab: SimpleNamespace) -> None:
    inputs = lab.draw(20, key=6, value=5)
    inputs["v"].requires_grad_()
    out, _ = kda(**inputs)
    out.sum().backward()
    assert inputs["v"].grad is not None and inputs["q"].grad is None and inputs["A_log"].grad is None


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_refused(lab: SimpleNamespace, power: int) -> None:
    """Also where the incoming gradient needs none itself: a penalty must not be lost silently."""
    inputs = {name: x.requires_grad_() for name, x in lab.draw(5, key=4, value=3).items()}
    out, _ = kda(**inputs)
    loss = out.pow(power).sum()
    (dq,) = torch.autograd.grad(loss, inputs["q"], create_graph=True)
    assert dq.requires_grad
    with pytest.raises(RuntimeError, match="ChunkedKDA: found a gradient of a gradient"):
        (loss + dq.square().sum()).backward()


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0)])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_no_tokens_at_all(lab: SimpleNamespace, lengths: tuple[int, ...], backend: str) -> None:
    inputs = lab.draw(0, sequences=len(lengths))
    state = inputs["initial_state"].requires_grad_()
    out, final = kda(**inputs, cu_seqlens=lab.cu(*lengths), output_final_state=True, backend=backend)
    assert out.shape == inputs["v"].shape and final is not None and torch.equal(final, state)
    final.sum().backward()
    assert torch.equal(state.grad, torch.ones_like(state))
    values = inputs["v"].requires_grad_()
    kda(**inputs, cu_seqlens=lab.cu(*lengths), backend=backend)[0].sum().backward()
    assert values.grad is not None and values.grad.shape == values.shape
    del inputs["initial_state"]
    out, final = kda(**inputs, cu_seqlens=lab.cu(*lengths), output_final_state=True, backend=backend)
    assert final is not None and final.abs().max() == 0


def test_run_to_run_bits(lab: SimpleNamespace) -> None:
    inputs = lab.cast(lab.draw(100), torch.float32)
    first, second = lab.run(kda, inputs), lab.run(kda, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bounded", "softplus", "log_decay"])
@pytest.mark.parametrize("sizes", [(32, 32), (64, 64), (128, 100), (60, 60), (3, 1), (5, 130)], ids=str)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_length_size_and_gate(
    lab: SimpleNamespace, tokens: int, sizes: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    inputs = lab.draw(tokens, key=sizes[0], value=sizes[1], seed=tokens)
    if kind == "log_decay":
        del inputs["A_log"], inputs["dt_bias"]
        inputs["gate"] = -inputs["gate"].exp()
    lab.check(kda, inputs, dtype, gate_kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_packings(lab: SimpleNamespace, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 70, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator).tolist()
    inputs = lab.draw(sum(lengths), sequences=len(lengths), key=7, value=9, seed=seed)
    lab.check(kda, inputs, torch.float32, cu_seqlens=lab.cu(*lengths))
