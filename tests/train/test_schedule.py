from __future__ import annotations

import itertools
import math

import pytest

from trine.train.config import Stage, train_preset
from trine.train.schedule import Plan, Schedule, lay_out


def test_shares_become_whole_steps_and_every_step_has_one_stage() -> None:
    stages = [
        Stage(length=64, share=0.5, step_tokens=128, micro_tokens=64),
        Stage(length=128, share=0.3, step_tokens=128, micro_tokens=128),
        Stage(length=128, share=0.2, step_tokens=256, micro_tokens=128),
    ]
    plan = lay_out(stages, 10_240)
    assert [(s.first_step, s.steps, s.first_token) for s in plan] == [(0, 40, 0), (40, 24, 5120), (64, 8, 8192)]
    assert (plan.steps, plan.tokens) == (72, 10_240)
    assert [plan.at(i).index for i in (0, 39, 40, 63, 64, 71)] == [0, 0, 1, 1, 2, 2]
    assert [plan.tokens_before(i) for i in (0, 1, 40, 41, 64, 65, 72)] == [0, 128, 5120, 5248, 8192, 8448, 10_240]
    with pytest.raises(ValueError, match="step: found 72, need 0 to 71"):
        plan.at(72)


def test_a_tiny_share_still_gets_a_step() -> None:
    stages = [Stage(share=0.999, step_tokens=4096), Stage(length=512, share=0.001, step_tokens=4096)]
    assert [s.steps for s in lay_out(stages, 40_960)] == [10, 1]


@pytest.mark.parametrize(("stages", "tokens"), [([], 5), ([Stage()], 0)])
def test_an_empty_plan_is_refused(stages: list[Stage], tokens: int) -> None:
    with pytest.raises(ValueError, match="found"):
        lay_out(stages, tokens)


def test_the_laptop_plan_ends_on_a_whole_step() -> None:
    config = train_preset("laptop")
    plan = lay_out(config.stages, config.tokens)
    assert plan.steps == 481 and plan.tokens == 410 * 4_096 + 51 * 4_096 + 15 * 8_192 + 5 * 16_384


def curve(plan: Plan, schedule: Schedule, steps: range) -> list[float]:
    return [schedule.factor(plan.tokens_before(i), plan.at(i).stage.step_tokens) for i in steps]


def test_warm_up_and_cosine_against_values_worked_out_by_hand() -> None:
    """Warm-up 5 steps, cosine to 50 (B023)."""
    plan = lay_out([Stage(length=8, step_tokens=8, micro_tokens=8)], 400)
    schedule = Schedule(plan.tokens, 40, final=0.1)
    found = curve(plan, schedule, range(50))
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=1e-12)
    assert found[5] == 1.0
    # step 20 begins after 15 of 45 cosine steps: a third of the way
    assert found[20] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 3)), abs=1e-12)
    assert found[20] == pytest.approx(0.775, abs=1e-12)
    assert found[49] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 44 / 45)), abs=1e-12)
    assert schedule.factor(400, 8) == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(found[5:]))


def test_the_curve_depends_on_tokens_alone_and_does_not_restart_at_a_stage() -> None:
    one = lay_out([Stage(length=8, step_tokens=8, micro_tokens=8)], 800)
    two = lay_out(
        [
            Stage(length=8, share=0.5, step_tokens=8, micro_tokens=8),
            Stage(length=8, share=0.5, step_tokens=16, micro_tokens=8),
        ],
        800,
    )
    schedule = Schedule(800, 80)
    single, staged = curve(one, schedule, range(100)), curve(two, schedule, range(75))
    assert staged[:50] == single[:50]
    assert staged[50:] == single[50::2]


def test_no_warm_up_starts_at_the_peak_and_a_plan_overrun_stays_at_the_end() -> None:
    schedule = Schedule(100, 0, final=0.25)
    assert schedule.factor(0, 10) == 1.0
    assert schedule.factor(500, 10) == pytest.approx(0.25)


@pytest.mark.parametrize("arguments", [(0, 0), (10, 10), (10, -1), (10, 0, 1.5)])
def test_a_curve_that_cannot_be_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"found .* need"):
        Schedule(*arguments)
