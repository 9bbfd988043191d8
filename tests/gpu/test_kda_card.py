"""KDA's kernels on a CUDA card: large sizes, decode, torch.compile, CUDA graphs, and what is reported."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from kda_cases import (
    BF16,
    CARD,
    FP32,
    RANDOM,
    STREAMS,
    Case,
    Data,
    bounds_of,
    draw,
    error,
    errors,
    packed,
    run,
    truth,
)  # fmt: skip
from torch import Tensor

import trine
from trine.nn import KimiDeltaAttention
from trine.ops.kda import kda, kda_reference, kda_step
from trine.ops.kda._choice import say_slow

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_layer_trains_to_the_same_loss_with_and_without_kernels(dtype: torch.dtype) -> None:
    """Twenty steps of one layer on packed rows, fp32 weights: every loss within 1e-3 of the torch path's."""
    make = torch.Generator(CARD).manual_seed(0)
    x_TD = torch.randn(2048, 256, generator=make, device=CARD)
    wanted_TD = torch.cat([x_TD[:1], x_TD[:-1]]).cumsum(0).tanh()
    losses: dict[str, list[float]] = {}
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        layer = KimiDeltaAttention(256, 4, 64, backend=backend).to(CARD)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
        for _ in range(20):
            with torch.autocast("cuda", dtype, enabled=dtype != FP32):
                found_TD, _ = layer(x_TD, bounds_of((700, 0, 1300, 48)))
            loss = (found_TD.float() - wanted_TD).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.setdefault(backend, []).append(loss.item())
    assert losses["torch"][-1] < 0.8 * losses["torch"][0]
    gaps = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    print(f"losses {losses['torch'][0]:.4f} to {losses['torch'][-1]:.4f}, largest gap {max(gaps):.1e}")
    assert max(gaps) <= 1e-3


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
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
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
