"""Forced imbalance: the loads are those asked for, a token never has an expert twice, and policies differ as known."""

from __future__ import annotations

import pytest
import torch

from trine.balance import QuantileBalancing, SignBalancing, max_violation
from trine.balance.freeze import Freeze
from trine.balance.stress import forced_loads, forced_routing, possible, recovery, time_experts


@pytest.mark.parametrize("violation", [0.0, 0.2, 1.0, 4.0, 27.0])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(4096, 56, 2), (1000, 256, 8), (77, 84, 3)])
def test_loads_are_those_asked_for(tokens: int, experts: int, k: int, violation: float) -> None:
    mean = tokens * k / experts
    ids_TK = forced_routing(tokens, experts, k, violation, seed=3)
    assert ids_TK.shape == (tokens, k) and ids_TK.dtype == torch.int64
    ordered_TK = ids_TK.sort(1).values
    assert (ordered_TK[:, 1:] != ordered_TK[:, :-1]).all() or k == 1
    loads_E = torch.bincount(ids_TK.reshape(-1), minlength=experts)
    assert torch.equal(loads_E.sort().values, forced_loads(tokens, experts, k, violation).sort().values)
    # the fullest load is a whole number, so MaxVio is off by at most one token (even loads by almost one)
    assert abs(float(max_violation(loads_E)) - violation) <= (0.5 if violation * mean > 1 else 1.0) / mean + 1e-9
    rest_E = loads_E.sort().values[:-1]
    assert rest_E.max() - rest_E.min() <= 1 and len(loads_E) == experts


def test_several_hot_experts() -> None:
    loads_E = forced_loads(1000, 20, 2, 1.0, hot=5)
    assert loads_E[:5].tolist() == [200] * 5 and loads_E.sum() == 2000 and loads_E[5:].unique().tolist() == [66, 67]
    assert forced_loads(10, 4, 2, 1.0, hot=2).tolist() == [10, 10, 0, 0], "the most that two can have"
    assert forced_loads(10, 4, 4, 0.0).tolist() == [10] * 4
    assert forced_loads(9, 4, 2, 0.01).tolist() == [5, 5, 4, 4], "as near as whole tokens come"


def test_routing_depends_on_the_seed_only_in_names_and_order() -> None:
    one, same, other = (forced_routing(300, 16, 2, 1.0, seed) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    hot = {
        int(torch.bincount(ids.reshape(-1)).argmax()) for ids in (forced_routing(64, 16, 2, 1.0, s) for s in range(9))
    }
    assert len(hot) > 2
    first = forced_routing(4000, 16, 2, 0.0, 5)[:, 0]
    assert torch.bincount(first, minlength=16).min() > 150, "neither place has experts of its own"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 2, 0.0), "tokens, experts, k, hot: found 0, 4, 2, 1"),
        ((5, 4, 5, 0.0), "need tokens >= 1, 1 <= k <= experts and 1 <= hot <= experts"),
        ((5, 4, 2, 1.1), "max_violation: found 1.1, need 0 to 1: 1 of 4 experts, 2 a token"),
        ((5, 4, 2, -0.1), "max_violation: found -0.1, need 0 to 1"),
        ((5, 4, 2, float("nan")), "max_violation: found nan, need 0 to 1"),
        ((5, 8, 2, 1.5, 4), "max_violation: found 1.5, need 0 to 1: 4 of 8 experts, 2 a token"),
        ((5, 8, 2, 0.0, 9), "found 5, 8, 2, 9"),
    ],
)
def test_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError) as error:
        forced_loads(*arguments)
    assert message in str(error.value)


def test_policies_recover_as_known() -> None:
    """Quantile balancing in a few steps, the sign rule in many at 1e-3, none at all when frozen."""
    sizes = (2048, 32, 2, 4.0)
    qb, sign, frozen = (
        recovery(name, policy, *sizes, steps=12)
        for name, policy in (("qb", QuantileBalancing(2)), ("sign", SignBalancing(1e-3)), ("freeze", Freeze()))
    )
    assert [one.floor for one in (qb, sign, frozen)] == pytest.approx([0.2327] * 3, abs=1e-3)
    assert all(abs(one.path[0] - 4.0) < 0.02 for one in (qb, sign, frozen))
    assert qb.steps is not None and 1 <= qb.steps <= 3, qb.path
    assert sign.steps is None and frozen.steps is None and min(frozen.path) > 3.5
    assert len(qb.path) == 13 and sign.path[-1] < frozen.path[-1]
    even = recovery("freeze", Freeze(), 2048, 32, 2, 0.0, steps=3)
    assert even.steps == 0
    with pytest.raises(ValueError, match="steps: found 2, need at least 3"):
        recovery("qb", QuantileBalancing(2), *sizes, steps=2)
    with pytest.raises(ValueError, match=r"max_violation: found 0\.01, need at least .* take more of them"):
        recovery("qb", QuantileBalancing(2), 64, 32, 2, 0.01)


@pytest.mark.parametrize("backward", [False, True])
def test_experts_are_timed_at_each_load(backward: bool) -> None:
    found = time_experts(256, 8, 2, latent=16, hidden=16, max_violations=(1.0, 2.0), repeats=1, backward=backward)
    assert [one.max_violation for one in found] == [0.0, 1.0, 2.0]
    assert [one.found for one in found] == pytest.approx([0.0, 1.0, 2.0])
    assert found[0].relative == 1.0 and all(one.milliseconds > 0 for one in found)
    assert set(found[0].to_json()) == {"max_violation", "found", "milliseconds", "relative", "per_token_k"}
    with pytest.raises(ValueError, match="need at least 1 each"):
        time_experts(256, 8, 2, repeats=0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((8192, 64, 4), (0.2, 1.0, 4.0)),
        ((2048, 16, 4), (0.2, 1.0)),  # at most 3.0
        ((256, 16, 4), (1.0,)),  # chance gives more than 0.2
        ((30, 4, 3), (1 / 3,)),
    ],
)
def test_the_usual_sweep_is_what_sizes_allow(sizes: tuple[int, int, int], expected: tuple[float, ...]) -> None:
    assert possible(*sizes) == pytest.approx(expected)
