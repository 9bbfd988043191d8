"""Failures that users of other implementations met in public, each cut down to its smallest input.

The case numbers are those of the project's list of public failures; each test is named by the symptom.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trine.ops.kda import kda, kda_pairwise, kda_reference, kda_step

PER_TOKEN = ("q", "k", "v", "gate", "beta")


def test_b001_unbounded_decay_on_the_bounded_path_is_exact_or_refused(lab: SimpleNamespace) -> None:
    inputs = lab.draw(64, heads=1, key=16, value=16, state=False)
    del inputs["A_log"], inputs["dt_bias"]
    with pytest.raises(ValueError, match="lower_bound: found None; gate_kind='bounded' needs the gate's lower bound"):
        kda(**inputs, lower_bound=None)  # type: ignore[arg-type]
    inputs["gate"] = torch.full_like(inputs["gate"], -30.0)
    lab.check(kda, inputs, torch.float32, gate_kind="log_decay")


@pytest.mark.parametrize("entry", ["chunk", "reference", "decode"])
def test_b002_scale_lost_or_prediction_made_before_decay(entry: str) -> None:
    g, beta = [math.log(0.5), math.log(0.25)], [0.5]
    q, k, v, gate = (torch.tensor(x).view(1, 1, 1, 2) for x in ([0.6, 0.8], [1.0, 0.0], [10.0, 20.0], g))
    state = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2)
    options = {"qk_norm": False, "beta_is_logit": False, "gate_kind": "log_decay"}
    if entry == "decode":
        out, new = kda_step(*(x[:, 0] for x in (q, k, v, gate)), torch.tensor(beta).view(1, 1), state, **options)
    else:
        backend = "torch" if entry == "chunk" else "reference"
        out, new = kda(
            q, k, v, gate, torch.tensor(beta).view(1, 1, 1), initial_state=state, output_final_state=True,
            backend=backend, **options,
        )  # fmt: skip
    assert torch.allclose(out.flatten(), torch.tensor([2.651650, 5.020458]), rtol=0, atol=1e-6)
    assert torch.allclose(new.view(2, 2), torch.tensor([[5.25, 10.5], [0.75, 1.0]]), rtol=0, atol=1e-6)


def test_b003_state_layout_mixed_up_between_prefill_and_decode(lab: SimpleNamespace) -> None:
    inputs = lab.cast(lab.draw(75, key=8, value=4), torch.float32)
    whole, final = kda(**inputs, output_final_state=True)
    head = {name: x[:, :70] if name in PER_TOKEN else x for name, x in inputs.items()}
    _, state = kda(**head, output_final_state=True)
    assert state is not None and final is not None and state.shape == (1, 2, 8, 4)
    parameters = {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"]}
    for t in range(70, 75):
        out, state = kda_step(*(inputs[n][:, t] for n in PER_TOKEN), state, **parameters)
        assert (out - whole[:, t]).norm() <= 1e-5 * whole[:, t].norm()
    assert (state - final).norm() <= 1e-5 * final.norm()
    with pytest.raises(ValueError, match=r"initial_state: .*transposed"):
        kda(**(inputs | {"initial_state": state.mT}))
    with pytest.raises(ValueError, match=r"state: .*transposed"):
        kda_step(*(inputs[n][:, 0] for n in PER_TOKEN), state.mT, **parameters)


@pytest.mark.parametrize("form", ["bounded", "log_decay", "pairs"])
@pytest.mark.parametrize("decay", ["saturated", "alternating", "one slow channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b004_strong_decay_inside_a_chunk_gives_nan_in_the_backward(
    lab: SimpleNamespace, decay: str, form: str, dtype: torch.dtype
) -> None:
    inputs = lab.draw(128, key=32, value=32, state=False)
    g = torch.full_like(inputs["gate"], -5.0)
    if decay == "alternating":
        g[:, ::2] = 0.0
    elif decay == "one slow channel":
        g[..., 0] = 0.0
    del inputs["A_log"], inputs["dt_bias"]
    # A bounded gate reaches -5 and 0 at the ends of its logistic function.
    inputs["gate"] = g if form == "log_decay" else torch.where(g == 0, -200.0, 200.0).double()
    inputs["beta"] = torch.ones_like(inputs["beta"])
    options = {"gate_kind": "log_decay" if form == "log_decay" else "bounded", "beta_is_logit": False}
    function = kda_pairwise if form == "pairs" else kda
    rounded = {name: x.to(dtype).double() for name, x in inputs.items()}
    expected = lab.run(kda_reference, rounded, **options)
    found = lab.run(function, lab.cast(rounded, dtype), **options)
    assert all(torch.isfinite(x).all() for x in found.values())
    sizes = lab.gate_terms(rounded, **options)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    errors = lab.relative_errors(found, expected, sizes)
    if form != "log_decay":
        # The slope of the logistic function is below every float32 number.
        assert found["d_gate"].abs().max() < 1e-30
        del errors["d_gate"]
    assert max(errors.values()) <= limit, errors


def test_b005_gradients_of_a_sequence_cut_in_segments(lab: SimpleNamespace) -> None:
    inputs = lab.cast(lab.draw(256, key=16, value=16), torch.float32)

    def gradients(cuts: list[int]) -> dict[str, Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        state, outs = leaves["initial_state"], []
        for a, b in itertools.pairwise(cuts):
            part = {name: x[:, a:b] if name in PER_TOKEN else x for name, x in leaves.items()}
            out, state = kda(**(part | {"initial_state": state}), output_final_state=True)
            outs.append(out)
        loss = torch.cat(outs, 1).square().sum()
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    whole = gradients([0, 256])
    for cuts in ([0, 64, 128, 192, 256], [0, 1, 70, 201, 256]):
        found = gradients(cuts)
        for name, expected in whole.items():
            for a, b in itertools.pairwise(cuts):
                rows = (slice(None), slice(a, b)) if name in PER_TOKEN else (slice(None),)
                assert (found[name][rows] - expected[rows]).norm() <= 1e-4 * expected[rows].norm(), (name, a, b)


@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129])
def test_b006_short_tails_take_an_untested_branch(lab: SimpleNamespace, tokens: int) -> None:
    inputs = lab.cast(lab.draw(tokens, key=16, value=16), torch.float32)
    out, final = kda(**inputs, output_final_state=True)
    state, parameters = inputs["initial_state"], {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"]}
    steps = []
    for t in range(tokens):
        o, state = kda_step(*(inputs[n][:, t] for n in PER_TOKEN), state, **parameters)
        steps.append(o)
    expected = torch.stack(steps, 1)
    assert final is not None
    assert (out - expected).norm() <= 1e-5 * expected.norm()
    assert (final - state).norm() <= 1e-5 * state.norm()


def test_b040_beta_rounded_to_bfloat16_drifts_the_state() -> None:
    k = torch.tensor([1.0, 0.0]).view(1, 1, 2)
    v, zero, beta = k.clone(), torch.zeros(1, 1, 2), torch.full((1, 1), 0.5)
    half = [x.bfloat16() for x in (k, k, v, zero, beta)]
    _, state = kda_step(*half, torch.zeros(1, 1, 2, 2), gate_kind="log_decay", qk_norm=False)
    assert abs(state[0, 0, 0, 0].item() - 0.6224593) < 1e-6


def test_b040_no_drift_between_prefill_and_decode_over_4096_tokens(lab: SimpleNamespace) -> None:
    inputs = {n: x.bfloat16() for n, x in lab.draw(4096, heads=1, key=8, value=8, state=False).items()}
    inputs["gate"] = inputs["gate"] - 6.0  # slow decay: errors would stay in the state
    parameters = {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"]}
    state = prefilled = torch.zeros(1, 1, 8, 8)
    gaps = []
    with torch.no_grad():
        for start in range(0, 4096, 512):
            part = {n: x[:, start : start + 512] if n in PER_TOKEN else x for n, x in inputs.items()}
            _, prefilled = kda(**part, initial_state=prefilled, output_final_state=True)
            for t in range(start, start + 512):
                _, state = kda_step(*(inputs[n][:, t] for n in PER_TOKEN), state, **parameters)
            gaps.append(((state - prefilled).norm() / state.norm()).item())
    assert max(gaps) <= 1e-5
    assert gaps[-1] <= 3 * max(gaps[:2]) + 1e-6
