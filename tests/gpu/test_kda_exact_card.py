"""KDA's kernels on a CUDA card: each shipped configuration against float64, and that nobody sees the future.

Truth is the chunked torch path in float64, held to the token-by-token definition by the first test. Limits are those of
the contract for relative (Frobenius) errors, on an H200. Fresh memory holds NaN in every comparison.
"""

from __future__ import annotations

import pytest
import torch
from kda_cases import (
    CASES,
    FP32,
    NAMES,
    RANDOM,
    STREAMS,
    Case,
    bounds_of,
    draw,
    error,
    errors,
    options_of,
    packed,
    poisoned,
    run,
    truth,
)  # fmt: skip

from trine.ops.kda import kda, kda_step

pytestmark = pytest.mark.gpu


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
