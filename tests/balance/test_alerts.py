from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from trine.balance.alerts import DEFAULT_RULES, LOGIT_RANGE, Alert, Alerts, Rule, Signals, rules_for
from trine.balance.record_format import Frame, HostWindow
from trine.balance.summary import Summaries

LAYERS, EXPERTS, TOP_K = 2, 8, 2
QUICK = tuple(replace(rule, patience=min(rule.patience, 3), calm=min(rule.calm, 2)) for rule in DEFAULT_RULES)
EVEN = np.full((LAYERS, EXPERTS), 1000, dtype=np.int64)


class Feed:
    """Steps made by hand, judged one after another."""

    def __init__(self, ranks: int = 1, rules: tuple[Rule, ...] = QUICK) -> None:
        self.summaries = Summaries(LAYERS, EXPERTS, TOP_K, ranks)
        self.alerts = Alerts(LAYERS, EXPERTS, TOP_K, ranks, rules)
        self.number = 0

    def frame(self, loads: np.ndarray = EVEN, bias: np.ndarray | None = None, **more: np.ndarray) -> Frame:
        self.number += 1
        zero_L = np.zeros(LAYERS, dtype=np.int64)
        values = {
            "loads_LE": loads.astype(np.int64),
            "bias_LE": np.zeros((LAYERS, EXPERTS), np.float32) if bias is None else bias.astype(np.float32),
            "tokens_L": loads.sum(1).astype(np.int64) // TOP_K,
            **dict.fromkeys(("dropped_L", "saturated_L", "overflow_L"), zero_L),
            "margins_LQ": np.zeros((LAYERS, 5)),
            **more,
        }
        return self.summaries.step(self.number, HostWindow(**values))

    def __call__(self, *args: np.ndarray, signals: Signals | None = None, **more: np.ndarray) -> list[tuple]:
        found = self.alerts.step(self.frame(*args, **more), signals)
        return [(one.step, one.rule, one.begins, one.layers) for one in found]


def skewed(factor: float, layer: int = 1, experts: int = 1) -> np.ndarray:
    loads = EVEN.copy()
    loads[layer, :experts] = int(1000 * factor)
    return loads


def test_balance_is_silent() -> None:
    feed = Feed(ranks=4, rules=DEFAULT_RULES)
    rng = np.random.default_rng(0)
    for mean in (3, 30, 3000, 300_000):  # whatever the batch: noise is no alarm
        for _ in range(60):
            bias = rng.normal(0, 0.01, (LAYERS, EXPERTS))
            assert feed(rng.poisson(mean, (LAYERS, EXPERTS)), bias) == []
    assert feed.alerts.active == {}


def test_it_begins_after_patience_and_ends_after_calm() -> None:
    feed = Feed()
    assert [feed(skewed(2.2)) for _ in range(4)] == [[], [], [(3, "max_vio", True, (1,))], []]
    assert feed.alerts.active == {"max_vio": [1]}
    # MaxVio 0.21 is 3.3 times its floor: below the level it began at, above the one it ends at
    assert [feed(skewed(1.25)) for _ in range(5)] == [[]] * 5
    assert feed(EVEN) == [] and feed(skewed(2.2)) == [] and feed(EVEN) == []
    assert feed(EVEN) == [(13, "max_vio", False, (1,))] and feed.alerts.active == {}


def test_a_good_step_in_between_starts_the_count_again() -> None:
    feed = Feed()
    for loads in (skewed(2), skewed(2), EVEN, skewed(2), skewed(2), EVEN):
        assert feed(loads) == []


def test_p95_over_mean() -> None:
    feed = Feed()
    two = skewed(2.5, layer=0, experts=2)  # the two busiest of eight: P95 is among them
    found = [one for _ in range(3) for one in feed(two)]
    assert (3, "p95", True, (0,)) in found


def test_small_batches_have_a_high_floor() -> None:
    """Loads of 4 +- 2 have MaxVio 1 and P95 1.8 by chance; the same shape at a thousand times the tokens is trouble."""
    noisy = np.array([[2, 3, 4, 4, 4, 4, 5, 8], [2, 3, 4, 4, 4, 4, 5, 8]])
    small, large = Feed(), Feed()
    assert [feed_all for feed_all in (small(noisy) for _ in range(6)) if feed_all] == []
    rules = [one[1] for _ in range(6) for one in large(noisy * 1000)]
    assert sorted(rules) == ["max_vio", "p95"] or rules == ["max_vio"]


def test_dead_experts() -> None:
    feed = Feed()
    few = np.full((LAYERS, EXPERTS), 4)
    few[0, 5] = 0
    # expected 3.5 a step: above ten from the third on, and three such steps make an alert
    assert [feed(few) for _ in range(5)] == [[], [], [], [], [(5, "dead", True, (0,))]]
    few[0, 5] = 1
    assert [one for _ in range(2) for one in feed(few)] == [(7, "dead", False, (0,))]


def test_oscillation_is_told_from_noise() -> None:
    rng = np.random.default_rng(1)
    noise, ringing = Feed(), Feed()
    swing = rng.normal(0, 0.1, (LAYERS, EXPERTS))
    for step in range(120):
        assert noise(EVEN, rng.normal(0, 0.01, (LAYERS, EXPERTS))) == []
        found = ringing(EVEN, swing * (-1) ** step)
        assert found == ([(5, "oscillation", True, (0, 1))] if step == 4 else [])
    assert [one for _ in range(6) for one in ringing(EVEN, swing)] == []  # nothing moves: says nothing
    drift = [one for step in range(9) for one in ringing(EVEN, swing * step / 10)]
    assert [one[1:] for one in drift] == [("oscillation", False, (0, 1))]


@pytest.mark.parametrize(
    ("rule", "more", "layers"),
    [
        ("bias_range", {"bias": np.stack((np.linspace(-0.6, 0.6, EXPERTS), np.zeros(EXPERTS)))}, (0,)),
        ("saturation", {"saturated_L": np.array([0, 4000 * 8 // 50])}, (1,)),
        ("overflow", {"overflow_L": np.array([4000 * 8 // 50] * 2)}, (0, 1)),
        ("non_finite", {"dropped_L": np.array([0, 1])}, (1,)),
    ],
)
def test_each_rule_alone(rule: str, more: dict[str, np.ndarray], layers: tuple[int, ...]) -> None:
    feed = Feed()
    patience = next(one.patience for one in QUICK if one.name == rule)
    found = [one for _ in range(patience) for one in feed(EVEN, **more)]
    assert found == [(patience, rule, True, layers)]
    assert [one for _ in range(2) for one in feed(EVEN)] == [(patience + 2, rule, False, layers)]


def test_rank_overload_needs_ranks() -> None:
    loads = EVEN.copy()
    loads[0, :2], loads[0, 2:] = 1300, 900  # even within each rank
    alone, four = Feed(), Feed(ranks=4)
    only = [[one for _ in range(4) for one in feed(loads) if one[1] == "rank_overload"] for feed in (alone, four)]
    assert only == [[], [(3, "rank_overload", True, (0,))]]


def test_one_rank_is_never_overloaded() -> None:
    """Not by a rule that would find 1.0 too much, nor by what a run on four ranks left behind."""
    strict = (Rule("rank_overload", "fullest rank", 0.5, 0.4),)
    four, alone = Feed(ranks=4, rules=strict), Feed(rules=strict)
    assert [one[1] for one in four(EVEN)] == ["rank_overload"]
    alone.alerts.load_state_dict(four.alerts.state_dict())
    assert alone.alerts.active == {} and alone(skewed(3)) == [] and alone.alerts.active == {}
    frame = alone.frame(skewed(3))
    assert frame.summary("rank_overload").tolist() == [1.0, 1.0]
    assert [rule.name for rule in alone.alerts.rules] == []


def test_signals() -> None:
    feed = Feed()
    assert feed(signals=Signals(stale_steps=4)) == []
    assert feed(signals=Signals(stale_steps=5)) == [(2, "stale", True, (0, 1))]
    assert feed(signals=Signals(stale_steps=3)) == [] == feed(signals=Signals(stale_steps=1))
    assert feed(signals=Signals()) == [(5, "stale", False, (0, 1))]


def test_state_goes_on_where_it_was() -> None:
    rng = np.random.default_rng(3)
    whole, first = Feed(), Feed()
    steps = [
        (rng.poisson(1000 * rng.choice([1, 3], (LAYERS, EXPERTS), p=[0.8, 0.2])), rng.normal(0, 0.1, (LAYERS, EXPERTS)))
        for _ in range(60)
    ]
    expected = [whole(*step) for step in steps]
    found = [first(*step) for step in steps[:29]]
    state = json.loads(json.dumps(first.alerts.state_dict()))
    first.alerts = Alerts(LAYERS, EXPERTS, TOP_K, 1, QUICK)
    first.alerts.load_state_dict(state)
    found += [first(*step) for step in steps[29:]]
    assert found == expected and sum(map(len, found)) > 3
    fresh = Alerts(LAYERS, EXPERTS, TOP_K)
    fresh.load_state_dict(Alerts(LAYERS, EXPERTS, TOP_K).state_dict())
    gone = {**state, "states": {**state["states"], "a rule of before": [[1] * 2, [0] * 2, [1] * 2]}}
    fresh.load_state_dict(gone)
    assert "a rule of before" not in fresh.active
    with pytest.raises(ValueError, match="state: found one of 2 layers, need 3"):
        Alerts(3, EXPERTS, TOP_K).load_state_dict(state)
    for bad in ({}, {"flips": 3, "states": {}}, {"flips": [None] * 2, "states": {"p95": [[1]]}}):
        with pytest.raises(ValueError, match="state: found"):
            fresh.load_state_dict(bad)


def test_a_sentence_and_its_json() -> None:
    layers = 12
    alerts = Alerts(layers, EXPERTS, TOP_K, rules=[Rule("non_finite", "tokens left out", 0, 0)])
    summaries, zero_L = Summaries(layers, EXPERTS, TOP_K), np.zeros(layers, dtype=np.int64)
    loads = np.full((layers, EXPERTS), 100)
    bias = np.zeros((layers, EXPERTS), np.float32)
    frame = summaries.step(
        5, HostWindow(loads, bias, zero_L + 400, zero_L + np.arange(layers), zero_L, zero_L, np.zeros((layers, 5)))
    )
    (alert,) = alerts.step(frame)
    assert alert.text == "tokens left out: 11 in layers 1, 2, 3, 4, 5, 6, 7, 8 and 3 more, above 0"
    assert (alert.count, alert.value, alert.level, len(alert.layers)) == (11, 11.0, 0, 8)
    assert json.loads(json.dumps(alert.to_json()))["layers"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert Alert(1, "x", True, (), 0, math.nan, 0.0, "").to_json()["value"] is None


def test_bad_rules_and_frames() -> None:
    for change in ({"below": 2.0}, {"above": math.nan}, {"patience": 0}, {"calm": 0}):
        with pytest.raises(ValueError, match="rule p95: found above"):
            Rule(**{"name": "p95", "what": "", "above": 1.0, "below": 0.5, **change})
    for rules in ((QUICK[0], QUICK[0]), (Rule("mine", "", 1, 0),)):
        with pytest.raises(ValueError, match=r"rules: found .* need each once, of p95, dead"):
            Alerts(LAYERS, EXPERTS, TOP_K, rules=rules)
    with pytest.raises(ValueError, match=r"frame: found \(1, 2\), need one step of 3 layers"):
        Alerts(3, EXPERTS, TOP_K).step(Feed().frame())


def test_it_never_reads_a_device() -> None:
    """Judging is the host's business; nothing of it changes torch's state."""
    before = torch.get_rng_state()
    Feed()(skewed(3))
    assert torch.equal(before, torch.get_rng_state())


def test_biases_on_logits_may_range_wider() -> None:
    assert rules_for("sigmoid") == DEFAULT_RULES
    changed = [(one, other) for one, other in zip(rules_for("logit"), DEFAULT_RULES, strict=True) if one != other]
    assert [(one.name, one.above, one.below) for one, _ in changed] == [("bias_range", LOGIT_RANGE, 0.9 * LOGIT_RANGE)]
    assert np.float32(1.0) - np.float32(np.exp(-LOGIT_RANGE - 1.0)) == np.float32(1.0)  # a score that is 1 in fp32
