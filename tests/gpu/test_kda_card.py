"""KDA's kernels on a CUDA card: each shipped configuration against float64, and what only a card can show.

Truth is the chunked torch path in float64, held to the token-by-token definition by the first test. Limits are those of
the contract for relative (Frobenius) errors, on an H200. Fresh memory holds NaN in every comparison.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import trine
from trine.ops.kda import kda, kda_reference, kda_step
from trine.ops.kda._choice import say_slow

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STREAMS = ("q", "k", "v", "gate", "beta")
NAMES = (*STREAMS, "A_log", "dt_bias", "initial_state")

Data = dict[str, Tensor]
RANDOM = dict(
    zip((*NAMES, "out", "final"), (5e-3, 5e-3, 5e-3, 6e-3, 6e-3, 6e-3, 6e-3, 5e-3, 4.8e-3, 3.5e-3), strict=True)
)
PARALLEL = dict.fromkeys(RANDOM, 1.2e-2) | {"out": 1.1e-2}
FULL = dict.fromkeys(RANDOM, 1e-4) | {"out": 2e-5, "final": 2e-5}
# The gate's own gradient is then a small difference of large terms.
FULL_SATURATED = FULL | dict.fromkeys(("gate", "A_log", "dt_bias"), 1e-3)
HALF = dict.fromkeys(RANDOM, 1e-2) | {"out": 3.5e-3, "final": 3.5e-3}


@dataclass(frozen=True)
class Case:
    """One comparison with float64. ``shape`` is batch, tokens, key heads; ``options`` go to the operator."""

    shape: tuple[int, int, int]
    regime: str = "fast"
    key: int = 128
    value: int = 128
    groups: int = 1
    lengths: tuple[int, ...] = ()
    dtype: torch.dtype = BF16
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        B, T, H = self.shape
        parts = [f"B{B} T{T} H{H} K{self.key} V{self.value} {str(self.dtype)[6:]} {self.regime}"]
        parts += [f"groups of {self.groups}"] if self.groups > 1 else []
        parts += ["packed"] if self.lengths else []
        return ", ".join(parts + [f"{name}={value}" for name, value in self.options])

    @property
    def limits(self) -> dict[str, float]:
        if self.dtype == FP32:
            return FULL_SATURATED if self.regime == "saturated" else FULL
        long = "parallel" in self.regime or self.regime == "no decay"  # every token's rounding stays in the state
        return HALF if self.dtype == FP16 else PARALLEL if long else RANDOM


def packed(*lengths: int, **rest: Any) -> Case:
    return Case((1, sum(lengths), 4), lengths=lengths, **rest)


FACTORS = (("save", "factors"),)
EDGES = (0, 1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65, 127, 128, 129, 0)
CASES = [
    # bf16, K = V = 128: every plan that ships, long enough for three segments where it has any
    *(Case((1, 2100, 16), regime) for regime in ("fast", "slow", "mixed", "saturated", "wide", "no decay")),
    *(Case((1, 2100, 16), regime) for regime in ("slow parallel", "fast parallel")),
    Case((1, 1100, 96)),
    Case((1, 600, 64), "slow"),
    Case((1, 4200, 32), "slow"),
    Case((1, 8300, 8), "slow"),
    Case((1, 4200, 2), "slow"),
    Case((1, 1100, 4), "slow", options=(("plan", "serial"),)),
    Case((1, 4200, 48), options=(("plan", "segmented"),)),
    Case((1, 2100, 16), "slow", options=FACTORS),
    Case((1, 1100, 96), options=FACTORS),
    # other head sizes, groups, batches
    Case((16, 63, 1), key=64, value=64),
    Case((4, 500, 8), "slow", key=64, value=64),
    Case((2, 500, 3), key=60, value=60),
    Case((2, 97, 3), key=60, value=100),
    Case((3, 300, 4), "slow", key=100, value=100),
    Case((2, 300, 4), "slow", key=32, value=64),
    Case((1, 300, 2), "slow", key=256, value=256),
    Case((1, 300, 2), key=100, value=256),
    Case((2, 500, 2), groups=4),
    Case((2, 300, 2), "slow", key=64, value=64, groups=3),
    # packed
    packed(*EDGES),
    packed(*EDGES, regime="slow", key=64, value=64),
    packed(0, 1, 31, 1132, 133, 0, 1200, 64, 0, regime="slow"),
    packed(15, 85, 200, 900, 800, key=100, value=100),
    packed(100, 200, 900, 0, 700, regime="slow", key=256, value=256),
    packed(*EDGES, regime="slow", options=FACTORS),
    # strengths and keys as given
    Case((1, 300, 4), options=(("beta_is_logit", False),)),
    Case((1, 300, 4), "slow", options=(("beta_max", 2.0),)),
    Case((1, 100, 2), key=32, value=32, options=(("beta_is_logit", False), ("qk_norm", False))),
    Case((1, 300, 4), "slow", options=(("lower_bound", -1.0), ("scale", 0.25))),
    # fp32 and fp16
    *(Case((1, 1100, 16), regime, dtype=FP32) for regime in ("fast", "slow", "slow parallel", "saturated")),
    Case((1, 1100, 16), "slow", dtype=FP32, options=FACTORS),
    Case((2, 97, 3), key=60, value=100, dtype=FP32),
    Case((1, 130, 2), "slow", key=256, value=256, dtype=FP32),
    packed(*EDGES, regime="slow", key=64, value=64, dtype=FP32),
    Case((1, 2100, 16), dtype=FP16),
    Case((2, 97, 3), "slow", key=60, value=100, dtype=FP16),
]


def draw(case: Case, device: torch.device = CARD, seed: int = 0) -> tuple[Data, Tensor, Tensor]:
    """Raw inputs, gradient of the output and gradient of the final state."""
    B, T, H = case.shape
    HV, K, V, dtype = H * case.groups, case.key, case.value, case.dtype
    N = len(case.lengths) or B
    make = torch.Generator(device).manual_seed(seed)
    options = dict(case.options)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=make, device=device)

    k, gate, bias = normal(B, T, H, K), normal(B, T, HV, K), torch.zeros(HV, K, device=device)
    if "parallel" in case.regime:
        k = normal(B, 1, H, K) + 0.1 * k
    if "slow" in case.regime:  # a time step log-uniform in [1e-3, 0.1], as layers are initialised
        dt = torch.exp(math.log(1e-3) + math.log(100) * torch.rand(HV, K, generator=make, device=device))
        gate, bias = 0.1 * gate, dt + torch.log(-torch.expm1(-dt))
    elif case.regime == "mixed":  # one slow channel among fast ones
        gate[..., 0] = -3.9
    elif case.regime == "saturated":
        gate = gate + 9
    elif case.regime == "wide":
        gate = gate * 8
    elif case.regime == "no decay":
        gate = gate - 200
    beta = normal(B, T, HV)
    if not options.get("beta_is_logit", True):
        beta = beta.sigmoid()
        beta[:, ::7], beta[:, 3::7] = 0, 1
    if not options.get("qk_norm", True):
        k = 0.17 * k
    streams = {"q": normal(B, T, H, K), "k": k, "v": normal(B, T, HV, V), "gate": gate, "beta": beta}
    data = {name: x.to(dtype) for name, x in streams.items()}
    data |= {"A_log": 0.1 * normal(HV), "dt_bias": bias, "initial_state": 0.3 * normal(N, HV, K, V)}
    return data, normal(B, T, HV, V).to(dtype), 0.3 * normal(N, HV, K, V)


def bounds_of(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype, device=CARD)


def options_of(case: Case) -> dict[str, Any]:
    return dict(case.options) | ({"cu_seqlens": bounds_of(case.lengths)} if case.lengths else {})


def run(data: Data, d_out: Tensor, d_final: Tensor | None, **options: Any) -> Data:
    """Output, final state and every gradient of a linear loss on both."""
    leaves = {name: x.detach().requires_grad_() for name, x in data.items()}
    out, final = kda(**leaves, output_final_state=True, **options)
    assert final is not None
    loss = (out * d_out.to(out.dtype)).sum()
    if d_final is not None:
        loss = loss + (final * d_final.to(final.dtype)).sum()
    found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return found | {"out": out.detach(), "final": final.detach()}


def truth(data: Data, d_out: Tensor, d_final: Tensor | None, **options: Any) -> Data:
    """The same in float64."""
    options = {name: x for name, x in options.items() if name not in ("plan", "save")}
    return run({name: x.double() for name, x in data.items()}, d_out, d_final, backend="torch", **options)


def error(found: Tensor, wanted: Tensor, size: Tensor | None = None) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    norm = wanted.double().norm() if size is None else size
    gap = ((found.double() - wanted.double()).norm() / norm.clamp_min(1e-20)).item()
    return gap if gap == gap else math.inf


def errors(found: Data, wanted: Data, data: Data) -> dict[str, float]:
    """By name. A_log's gradient is one number a head, the sum of gate' (gate + dt_bias) over its tokens and channels.

    Where that sum nearly cancels, its own size says nothing of the error that the terms' roundings must leave: it is
    measured by the root of the sum of the terms' squares then, which is what independent roundings would add up to.
    """
    gaps = {name: error(found[name], x) for name, x in wanted.items()}
    terms = wanted["gate"].double() * (data["gate"].double() + data["dt_bias"].double())
    gaps["A_log"] = error(found["A_log"], wanted["A_log"], torch.maximum(wanted["A_log"].norm(), terms.norm()))
    return gaps


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _variants() -> list[tuple[Any, Any]]:
    """Every compiled form that CASES need: their launches, recorded instead of run."""
    from trine.ops.kda.triton_backward_autograd import Settings, backward_from, forward_keeping
    from trine.ops.kda.triton_launch import Kernel

    found: dict[tuple[int, int], tuple[Any, Any]] = {}
    plain = Kernel.launch

    def record(self: Any, grid: int, args: Any, variant: Any, device: Any) -> None:
        found[id(self), id(variant)] = self, variant

    Kernel.launch = record  # type: ignore[method-assign]
    try:
        for case in CASES:
            B, T, H = case.shape
            HV, K, V, N = H * case.groups, case.key, case.value, len(case.lengths) or B
            shapes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV, K), (B, T, HV))
            tensors = [torch.empty(shape, dtype=case.dtype) for shape in shapes]
            tensors += [torch.empty(HV), torch.empty(HV, K), torch.empty(N, HV, K, V)]
            cu = torch.zeros(N + 1, dtype=torch.int32) if case.lengths else None
            o = dict(case.options)
            settings = Settings(
                o.get("lower_bound", -5.0), o.get("qk_norm", True), o.get("beta_is_logit", True), 1.0, None,
                o.get("plan", "auto"), "save" in o, True,
            )  # fmt: skip
            out, final, factors = forward_keeping(*tensors, cu, settings)
            backward_from(*tensors, cu, out, out, final, factors, settings)
    finally:
        Kernel.launch = plain  # type: ignore[method-assign]
    return list(found.values())


_JOBS: list[tuple[Any, Any]] = []


def _compile(index: int) -> None:
    kernel, variant = _JOBS[index]
    kernel.compile(variant, 90)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Fill the compiler's cache on all cores first: one after another, compiling takes longer than all the tests."""
    assert torch.cuda.is_available(), "these tests need a CUDA card"
    _JOBS[:] = _variants()
    with multiprocessing.get_context("fork").Pool(min(16, len(os.sched_getaffinity(0)))) as pool:
        pool.map(_compile, range(len(_JOBS)), chunksize=1)


@pytest.fixture(autouse=True)
def _no_errors_left() -> Iterator[None]:
    yield
    trine.check_errors()
    torch.cuda.empty_cache()


def test_the_truth_is_the_definition() -> None:
    case = packed(1, 0, 70, 33, key=24, value=40, dtype=torch.float64, regime="slow")
    data, d_out, d_final = draw(case)
    wanted, found = (
        run({n: x.double() for n, x in data.items()}, d_out, d_final, backend=b, **options_of(case))
        for b in ("reference", "torch")
    )
    assert max(errors(found, wanted, data).values()) <= 1e-10


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_within_the_contract_and_repeatable(case: Case) -> None:
    data, d_out, d_final = draw(case)
    options = options_of(case)
    with poisoned():
        found = run(data, d_out, d_final, backend="triton", **options)
        again = run(data, d_out, d_final, backend="triton", **options)
    gaps = errors(found, truth(data, d_out, d_final, **options), data)
    assert not {name: f"{e:.2e}" for name, e in gaps.items() if not e <= case.limits[name]}
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert {name: x.dtype for name, x in found.items()} == {n: x.dtype for n, x in data.items()} | {
        "out": case.dtype,
        "final": FP32,
    }


@pytest.mark.parametrize("gain", [1e-8, 1e6])
def test_gradients_of_any_size(gain: float) -> None:
    data, d_out, d_final = draw(Case((1, 300, 4), "slow"))
    d_out, d_final = (gain * d_out.float()).bfloat16(), gain * d_final
    gaps = errors(run(data, d_out, d_final), truth(data, d_out, d_final), data)
    assert not {name: f"{e:.2e}" for name, e in gaps.items() if not e <= RANDOM[name]}


@pytest.mark.parametrize("case", [Case((1, 2100, 16)), Case((1, 300, 4), "slow", key=64, value=64)], ids=str)
def test_nothing_depends_on_the_future(case: Case) -> None:
    """Prefixes of outputs and gradients keep every bit when later tokens change, turn to NaN or go."""
    data, d_out, _ = draw(case)
    cut = case.shape[1] - 77
    d_out[:, cut:] = 0
    plain = run(data, d_out, None)
    other = draw(case, seed=1)[0]
    changed = {n: torch.cat([x[:, :cut], other[n][:, cut:]], 1) if n in STREAMS else x for n, x in data.items()}
    found = run(changed, d_out, None)
    assert torch.equal(found["out"][:, :cut], plain["out"][:, :cut])
    assert not torch.equal(found["out"][:, cut:], plain["out"][:, cut:])
    for name in NAMES:
        assert torch.equal(found[name], plain[name]), name
    for name in STREAMS:
        assert found[name][:, cut:].abs().max() == 0, name
    short = {n: x[:, :cut] if n in STREAMS else x for n, x in data.items()}
    alone = run(short, d_out[:, :cut], None)
    assert torch.equal(alone["out"], plain["out"][:, :cut])
    for name in STREAMS:
        assert torch.equal(alone[name], plain[name][:, :cut]), name
    changed = {n: x.clone() for n, x in data.items()}
    changed["gate"][:, -(-cut // 32) * 32 :] = float("nan")  # from the next tile on: 0 x NaN is NaN inside one
    assert torch.equal(kda(**changed)[0][:, :cut], plain["out"][:, :cut])


def test_documents_do_not_see_each_other() -> None:
    case = packed(40, 1, 0, 133, 126, regime="slow")
    data, d_out, d_final = draw(case)
    bounds = bounds_of(case.lengths)
    together = run(data, d_out, d_final, cu_seqlens=bounds)
    start = 0
    for n, length in enumerate(case.lengths):
        part = slice(start, start + length)
        start += length
        if length == 0:
            assert torch.equal(together["final"][n], data["initial_state"][n])
            assert error(together["initial_state"][n], d_final[n]) <= 1e-6
            continue
        alone = {x: data[x][:, part] if x in STREAMS else data[x] for x in data}
        alone["initial_state"] = data["initial_state"][n : n + 1]
        found = run(alone, d_out[:, part], d_final[n : n + 1])
        for name in (*STREAMS, "out"):
            assert torch.equal(found[name], together[name][:, part]), (n, name)
        assert torch.equal(found["final"][0], together["final"][n])
        assert torch.equal(found["initial_state"][0], together["initial_state"][n])


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0)])
def test_no_tokens_at_all(lengths: tuple[int, ...]) -> None:
    data, d_out, d_final = draw(packed(*lengths))
    found = run(data, d_out, d_final, cu_seqlens=bounds_of(lengths))
    assert torch.equal(found["final"], data["initial_state"])
    assert error(found["initial_state"], d_final) <= 1e-6
    assert found["dt_bias"].abs().max() == 0 and found["q"].shape == (1, 0, 4, 128)


def test_views_are_read_as_they_are() -> None:
    case = Case((1, 130, 4), "slow")
    data, d_out, d_final = draw(case)
    data["k"] = data["k"][:, :, :1].expand(-1, -1, 4, -1)
    plain = run({n: x.clone(memory_format=torch.contiguous_format) for n, x in data.items()}, d_out, d_final)
    views = dict(data)
    qv = torch.stack([data["q"], data["v"]], dim=-2).flatten(-2)  # q and v side by side in one buffer
    views["q"], views["v"] = qv[..., :128], qv[..., 128:]
    views["gate"] = data["gate"].transpose(1, 2).contiguous().transpose(1, 2)
    views["beta"] = data["beta"].mT.contiguous().mT
    views["initial_state"] = data["initial_state"].mT.contiguous().mT
    found = run(views, d_out[:, :1].expand_as(d_out), d_final)
    again = run({n: x.contiguous() for n, x in views.items()}, d_out[:, :1].repeat(1, 130, 1, 1), d_final)
    assert torch.equal(found["out"], plain["out"]) and torch.equal(found["final"], plain["final"])
    for name in found:
        assert torch.equal(found[name], again[name]), name


def test_state_layout_between_prefill_and_decode() -> None:
    case = Case((2, 75, 3), "slow", key=64, value=32)
    data, *_ = draw(case)
    whole, final = kda(**data, output_final_state=True)
    _, state = kda(**{n: x[:, :70] if n in STREAMS else x for n, x in data.items()}, output_final_state=True)
    assert state is not None and state.shape == (2, 3, 64, 32)
    for t in range(70, 75):
        rows = (data[n][:, t] for n in STREAMS)
        out, state = kda_step(*rows, state, A_log=data["A_log"], dt_bias=data["dt_bias"], backend="triton")
        assert error(out, whole[:, t]) <= 8e-3
    assert error(state, final) <= 5e-3
    with pytest.raises(ValueError, match=r"initial_state: .*transposed"):
        kda(**(data | {"initial_state": state.mT}))


def test_more_sequences_times_heads_than_a_grid_dimension_holds() -> None:
    """65 536 programs are the limit of the second and third dimension of a grid."""
    lengths = tuple(n % 3 for n in range(1100))
    case = Case((1, sum(lengths), 64), key=32, value=64, lengths=lengths)
    data, d_out, d_final = draw(case)
    bounds = bounds_of(lengths, torch.int64)
    gaps = errors(run(data, d_out, d_final, cu_seqlens=bounds), truth(data, d_out, d_final, cu_seqlens=bounds), data)
    assert not {name: f"{e:.2e}" for name, e in gaps.items() if not e <= RANDOM[name]}
    x, *_ = draw(Case((2100, 1, 32), key=32, value=32))
    out, state = kda_step(*(x[n][:, 0] for n in STREAMS), x["initial_state"], backend="triton")
    last, last_state = kda_step(*(x[n][-1:, 0] for n in STREAMS), x["initial_state"][-1:], backend="torch")
    assert error(out[-1:], last) <= 4e-3 and error(state[-1:], last_state) <= 1e-6


def test_more_elements_than_a_32_bit_index_reaches() -> None:
    """2.15e9 elements in q; the second half alone, from the state between, must give the same."""
    half, heads = 131104, 64
    data: Data = {}
    for name in STREAMS:
        shape = (1, 2 * half, heads) if name == "beta" else (1, 2 * half, heads, 128)
        data[name] = torch.empty(shape, dtype=BF16, device=CARD).normal_()
    assert data["q"].numel() > 2**31
    whole, final = kda(**data, output_final_state=True, backend="triton")
    _, middle = kda(**{n: x[:, :half] for n, x in data.items()}, output_final_state=True)
    tail, again = kda(**{n: x[:, half:] for n, x in data.items()}, initial_state=middle, output_final_state=True)
    for a in range(0, half, 32776):  # in parts: the comparison needs memory too
        assert error(whole[:, half + a : half + a + 32776], tail[:, a : a + 32776]) <= 1e-4
    assert final is not None and again is not None and error(final, again) <= 1e-4


def test_gradients_where_the_stored_states_pass_that_limit() -> None:
    tokens, tail, heads = 66560, 512, 64
    data, *_ = draw(Case((1, tokens, heads), "slow"))
    data.pop("initial_state")
    leaves = {n: x.requires_grad_() for n, x in data.items() if n in STREAMS}
    out, _ = kda(**data)
    out[:, -tail:].float().sum().backward()
    with torch.no_grad():
        _, state = kda(**{n: x[:, :-tail] if n in STREAMS else x for n, x in data.items()}, output_final_state=True)
    parts = {n: x.detach()[:, -tail:].requires_grad_() for n, x in leaves.items()}
    rest = {n: x for n, x in data.items() if n not in STREAMS}
    kda(**parts, **rest, initial_state=state)[0].float().sum().backward()
    for name in STREAMS:
        grad = leaves[name].grad
        assert grad is not None and bool(grad[:, ::97].isfinite().all())
        # The stored states are rounded to bf16, at other places in the two calls.
        assert error(grad[:, -tail:], parts[name].grad) <= 6e-3, name


def test_a_million_tokens() -> None:
    tokens = 1 << 20
    data, *_ = draw(Case((1, tokens, 1), "slow"))
    data.pop("initial_state")
    whole, final = kda(**data, output_final_state=True, backend="triton")
    cut = tokens - 4096
    _, state = kda(**{n: x[:, :cut] if n in STREAMS else x for n, x in data.items()}, output_final_state=True)
    tail, again = kda(
        **{n: x[:, cut:] if n in STREAMS else x for n, x in data.items()}, initial_state=state, output_final_state=True
    )
    assert bool(whole.isfinite().all())
    assert error(whole[:, cut:], tail) <= 1e-3
    assert final is not None and again is not None and error(final, again) <= 1e-3


def test_peak_memory_of_forward_and_backward() -> None:
    data, d_out, _ = draw(Case((1, 8192, 96)))
    data.pop("initial_state")
    leaves = {n: x.requires_grad_() for n, x in data.items()}
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kda(**leaves, backend="triton")[0].backward(d_out)
    assert torch.cuda.max_memory_allocated() - base <= 3.0 * 2**30


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_twenty_thousand_decoded_tokens_stay_with_the_chunked_pass(dtype: torch.dtype) -> None:
    tokens, early = 20000, 2000
    data, *_ = draw(Case((1, tokens, 4), "slow", dtype=dtype))
    state = data.pop("initial_state").clone()
    start = state.clone()
    rows = [data[n][0].unsqueeze(1).unbind() for n in STREAMS]
    parameters = {"A_log": data["A_log"], "dt_bias": data["dt_bias"]}
    gaps, outs = [], []
    for t in range(tokens):
        out, _ = kda_step(*(row[t] for row in rows), state, **parameters, inplace=True)
        outs.append(out)
        if t + 1 in (early, tokens):
            part = {n: x[:, : t + 1] if n in STREAMS else x for n, x in data.items()}
            chunked, final = kda(**part, initial_state=start, output_final_state=True, backend="triton")
            gaps.append(error(state, final))
    found = torch.stack(outs, 1)
    if dtype == FP32:
        assert gaps[1] <= 2e-5 and error(found, chunked) <= 2e-5
    else:
        assert gaps[1] <= 1.5 * gaps[0] and error(found, chunked) <= 8e-3


def test_decode_with_a_pool_in_two_state_types() -> None:
    for state_dtype in (FP32, BF16):
        x, *_ = draw(Case((5, 1, 4), "slow", groups=2))
        pool = torch.full((9, 8, 128, 128), 1e30, dtype=state_dtype, device=CARD)
        index = torch.tensor([7, -1, 0, 3, 4], dtype=torch.int32, device=CARD)
        used = [7, 0, 3, 4]
        pool[used] = x["initial_state"][[0, 2, 3, 4]].to(state_dtype)
        before = pool.clone()
        rows = [x[n][:, 0] for n in STREAMS]
        parameters = {"A_log": x["A_log"], "dt_bias": x["dt_bias"]}
        out, same = kda_step(*rows, pool, **parameters, state_indices=index, inplace=True, backend="triton")
        wanted, wanted_pool = kda_step(*rows, before, **parameters, state_indices=index, backend="torch")
        assert same is pool and torch.equal(out[1], torch.zeros_like(out[1]))
        assert error(out, wanted) <= 4e-3 and error(pool[used], wanted_pool[used]) <= (
            1e-6 if state_dtype == FP32 else 4e-3
        )
        unused = [1, 2, 5, 6, 8]
        assert torch.equal(pool[unused], before[unused])


def test_a_compiled_layer_has_one_graph_and_the_same_bits() -> None:
    """Forward, backward and decode inside torch.compile, packed, with lengths that change between calls."""

    def layer(x: Data, bounds: Tensor) -> tuple[Tensor, Tensor]:
        out, final = kda(**(x | {"v": torch.nn.functional.silu(x["v"])}), cu_seqlens=bounds, output_final_state=True)
        assert final is not None
        last = (x[n][0, -1:] for n in STREAMS)
        y, _ = kda_step(*(z.detach() for z in last), final[-1:].detach())
        return out.float() * 2 + y.float(), final

    whole = torch.compile(layer, fullgraph=True)
    for lengths in ((100, 60), (31, 129)):
        data, d_out, d_final = draw(packed(*lengths, regime="slow"))
        results = []
        for function in (layer, whole):
            leaves = {n: x.clone().requires_grad_() for n, x in data.items()}
            out, final = function(leaves, bounds_of(lengths))
            loss = (out * d_out.float()).sum() + (final * d_final).sum()
            results.append([final, *torch.autograd.grad(loss, list(leaves.values()))])
        for eager, compiled in zip(*results, strict=True):
            assert error(compiled, eager) <= 1e-3


def test_cuda_graphs_replay_with_new_values_and_new_bounds() -> None:
    case = packed(100, 60, 96, regime="slow")
    static, d_out, d_final = draw(case)
    bounds = bounds_of(case.lengths)
    leaves = {n: x.requires_grad_() for n, x in static.items()}

    def step() -> list[Tensor]:
        out, final = kda(**leaves, cu_seqlens=bounds, output_final_state=True, backend="triton")
        return [out, final, *torch.autograd.grad([out, final], list(leaves.values()), [d_out, d_final])]

    pool = torch.randn(4, 4, 128, 128, device=CARD)
    row = [leaves[n].detach()[0, :3] for n in STREAMS]
    index = torch.tensor([2, -1, 0], dtype=torch.int32, device=CARD)

    def decode() -> Tensor:
        with torch.no_grad():
            return kda_step(*row, pool, state_indices=index, inplace=True, backend="triton")[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(), decode()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
        captured_y = decode()
    for lengths in ((100, 60, 96), (1, 0, 255), (33, 190, 33)):
        new = draw(case, seed=sum(lengths[:2]))[0]
        with torch.no_grad():
            for name, x in new.items():
                static[name].copy_(x)
        bounds.copy_(bounds_of(lengths))
        start = pool.clone()
        graph.replay()
        after = pool.clone()
        pool.copy_(start)
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(captured_y, decode()) and torch.equal(after, pool)


@pytest.mark.parametrize("bounds", [[1, 40], [0, 30, 20, 40], [0, 41], [0, 39]])
def test_bad_bounds_are_reported_and_nothing_is_overrun(bounds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((1, 40, 4), lengths=(0,) * (len(bounds) - 1))
    data, d_out, d_final = draw(case)
    cu = torch.tensor(bounds, dtype=torch.int32, device=CARD)
    run(data, d_out, d_final, cu_seqlens=cu)
    with pytest.raises(ValueError, match="cu_seqlens"):
        trine.check_errors()
    trine.check_errors()
    monkeypatch.setenv("TRINE_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens"):
        kda(**data, cu_seqlens=cu)


def test_a_state_index_outside_the_pool_is_reported() -> None:
    x, *_ = draw(Case((2, 1, 4)))
    pool = x["initial_state"]
    kept = pool.clone()
    index = torch.tensor([5, -1], device=CARD)
    out, _ = kda_step(*(x[n][:, 0] for n in STREAMS), pool, state_indices=index, inplace=True, backend="triton")
    assert torch.equal(pool, kept) and out.abs().max() == 0
    with pytest.raises(ValueError, match="state_indices"):
        trine.check_errors()


@pytest.mark.parametrize("kind", ["softplus", "log_decay"])
def test_gates_without_a_floor_take_a_path_that_is_right_and_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case((1, 70, 2), key=32, value=48, dtype=FP32)
    data, d_out, d_final = draw(case)
    if kind == "log_decay":
        data["gate"] = -20 * data["gate"].abs()
        del data["A_log"], data["dt_bias"]
    say_slow.cache_clear()
    with caplog.at_level(logging.WARNING, logger="trine"):
        found = run(data, d_out, d_final, gate_kind=kind)
    assert "slower chunked torch path" in caplog.text
    wanted = run({n: x.double() for n, x in data.items()}, d_out, d_final, gate_kind=kind, backend="reference")
    for name in ("out", "final", "q", "k", "v", "beta", "initial_state"):
        assert error(found[name], wanted[name]) <= 2e-5, name
    with pytest.raises(trine.ops.BackendUnavailable, match="need gate_kind 'bounded'"):
        kda(**data, gate_kind=kind, backend="triton")


def test_autocast_and_a_second_gradient() -> None:
    data, d_out, d_final = draw(Case((1, 70, 4), "slow", dtype=FP32))
    with torch.autocast("cuda", dtype=BF16):
        found = run(data, d_out, d_final)
    plain = run(data, d_out, d_final)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    leaves = {n: x.requires_grad_() for n, x in data.items()}
    (dv,) = torch.autograd.grad(kda(**leaves)[0].square().sum(), leaves["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dv.sum().backward()


def test_segments_of_one_sequence_chain_with_exact_gradients() -> None:
    """Public case B005: gradients of every piece of a cut sequence are those of the uncut run."""
    data, d_out, d_final = draw(Case((1, 256, 4), "slow", key=64, value=64, dtype=FP32))
    whole = run(data, d_out, d_final)
    leaves = {n: x.detach().requires_grad_() for n, x in data.items()}
    state, loss = leaves["initial_state"], torch.zeros((), device=CARD)
    for a in range(0, 256, 64):
        part = {n: x[:, a : a + 64] if n in STREAMS else x for n, x in leaves.items()}
        out, state = kda(**(part | {"initial_state": state}), output_final_state=True)
        loss = loss + (out * d_out[:, a : a + 64]).sum()
    assert state is not None
    grads = torch.autograd.grad(loss + (state * d_final).sum(), list(leaves.values()))
    for name, grad in zip(leaves, grads, strict=True):
        assert error(grad, whole[name]) <= 1e-4, name


def test_worked_example() -> None:
    """Public case B002 on the kernels, and the definition beside them."""
    gate = torch.logit(torch.tensor([0.5, 0.25]).log() / -5.0).view(1, 1, 1, 2)
    rows = [torch.tensor(x).view(1, 1, 1, 2).to(CARD) for x in ([0.6, 0.8], [1.0, 0.0], [10.0, 20.0])]
    state = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=CARD).view(1, 1, 2, 2)
    beta = torch.full((1, 1, 1), 0.5, device=CARD)
    options: dict[str, Any] = {"beta_is_logit": False, "qk_norm": False}
    for function in (kda, kda_reference):
        out, final = function(*rows, gate.to(CARD), beta, initial_state=state, output_final_state=True, **options)
        assert torch.allclose(out.flatten().cpu(), torch.tensor([2.651650, 5.020458]), rtol=1e-5)
        assert torch.allclose(final.flatten().cpu(), torch.tensor([5.25, 10.5, 0.75, 1.0]), rtol=1e-5)
