"""Verdicts on saved loads: what is known of them by construction is what is said, and bad files are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trine.balance import QuantileBalancing, Recorder
from trine.balance.alerts import Alert
from trine.balance.analyze import analyze
from trine.balance.record_format import FILE_NAME, HostWindow
from trine.balance.saved_loads import Loads, read_loads
from trine.balance.stress import forced_routing
from trine.config import BalanceConfig
from trine.ops.router import RouterStats, route

STEPS, EXPERTS, K, TOKENS = 48, 16, 2, 2000


def drawn(share_SE: np.ndarray, seed: int = 0) -> np.ndarray:
    """Loads of tokens that choose experts by these shares, ``[S, E]``."""
    generator = np.random.default_rng(seed)
    return np.stack([generator.multinomial(TOKENS * K, share_E / share_E.sum()) for share_E in share_SE])


def skew(hot: int, factor: float = 4.0) -> np.ndarray:
    share_E = np.ones(EXPERTS)
    share_E[hot] = factor
    return share_E


EVEN = drawn(np.ones((STEPS, EXPERTS)))
LASTING = drawn(np.stack([skew(3)] * STEPS))
CHANGING = drawn(np.stack([skew(int(i)) for i in np.random.default_rng(1).integers(0, EXPERTS, STEPS)]))
DRIFTING = drawn(np.stack([skew(step // 6) for step in range(STEPS)]))


def loads(*layers: np.ndarray, first: int = 1) -> Loads:
    return Loads("here", np.arange(first, first + len(layers[0])), np.stack(layers, axis=1))


def test_kinds_of_imbalance_are_told_apart() -> None:
    found = analyze(loads(EVEN, LASTING, CHANGING, DRIFTING))
    assert [one.lasts for one in found.layers] == ["", "lasting", "changing", "drifting"]
    assert [one.uneven for one in found.layers] == [False, True, True, True]
    even, lasting, changing, drifting = found.layers
    floor = (TOKENS * K / EXPERTS) ** -0.5
    assert even.cv == pytest.approx(floor, rel=0.1) and even.cv_floor == pytest.approx(floor)
    assert lasting.max_vio == pytest.approx(4 * EXPERTS / (EXPERTS + 3) - 1, rel=0.05)
    assert lasting.hottest[0][0] == 3 and lasting.hottest[0][1] == pytest.approx(64 / 19, rel=0.02)
    assert even.correlation == {}
    assert min(lasting.correlation.values()) > 0.95 and set(lasting.correlation) == {1, 2, 4, 8, 12, 16, 32}
    assert max(changing.correlation.values()) < 0.5
    assert drifting.correlation[1] > 0.7 and drifting.correlation[12] < 0.2
    text = " ".join(found.verdict)
    for part in (
        "uneven in layer 1: MaxVio 2.3",
        "the same experts are full or empty throughout",
        "layer 2",
        "no bias can foresee it",
        "layer 3",
        "changes slowly",
    ):
        assert part in text, text
    assert "Experts are even" not in text and "ranks" not in text


def test_an_even_router_is_called_even() -> None:
    found = analyze(loads(EVEN, EVEN), ranks=4)
    assert found.verdict[0].startswith("Experts are even: MaxVio is at most 0.1")
    assert found.verdict[1].startswith("Ranks are even: the fullest of 4 ranks has 1.0")
    assert found.verdict[2] == "No alert would have begun (p95, dead, max_vio, rank_overload)."
    few = analyze(loads(drawn(np.ones((STEPS, EXPERTS))) // 100), ranks=1)
    assert not few.layers[0].uneven, "a few tokens are uneven by chance"


def test_alerts_begin_when_patience_ends() -> None:
    """Even for 10 steps, then one expert with everything: the alert of MaxVio begins 20 steps later."""
    concentrated = np.zeros((38, EXPERTS), dtype=np.int64)
    concentrated[:, :2] = TOKENS
    found = analyze(loads(np.concatenate((EVEN[:10], concentrated)), first=101), ranks=8)
    begun = {alert.rule: alert.step for alert in found.alerts if alert.begins}
    assert begun["max_vio"] == 101 + 10 + 19 and begun["rank_overload"] == 130
    assert "dead" in begun and begun["dead"] < 118
    text = " ".join(found.verdict)
    assert "Alert max_vio would have begun at step 130: MaxVio over its floor" in text
    assert found.layers[0].dead == 0 and "Ranks are uneven in layer 0: the fullest of 8 ranks has" in text


def test_ranks_can_be_uneven_where_experts_hardly_are() -> None:
    share_E = np.where(np.arange(64) < 8, 1.15, 1.0)
    generator = np.random.default_rng(0)
    rows = np.stack([generator.multinomial(640_000, share_E / share_E.sum()) for _ in range(8)])
    found = analyze(loads(rows), ranks=8)
    assert found.layers[0].uneven_ranks and not found.layers[0].uneven
    assert found.verdict[1].endswith("another placement of experts on ranks may be enough.")
    assert not analyze(loads(rows), ranks=1).layers[0].uneven_ranks


def test_dead_experts_and_short_series() -> None:
    dead = LASTING.copy()
    dead[:, 5:7] = 0
    assert "2 experts got no token in any step, in layer 0." in analyze(loads(dead)).verdict
    short = analyze(loads(LASTING[:19]))
    assert short.layers[0].lasts == "unknown" and "too few steps to say whether it lasts: 20 are" in short.verdict[0]
    assert analyze(loads(LASTING[:20])).layers[0].lasts == "lasting"
    idle = analyze(loads(LASTING, np.zeros_like(LASTING)))
    assert idle.layers[1].max_vio == 0 and not idle.layers[1].uneven
    ids_TK = forced_routing(4000, 32, 2, 4.0, seed=0)
    forced = np.bincount(ids_TK.numpy().reshape(-1), minlength=32)[None]
    assert analyze(loads(forced)).layers[0].max_vio == pytest.approx(4.0)


def test_an_imbalance_that_is_going_away_is_not_called_lasting() -> None:
    """The first steps under a policy: every step has the same experts full, each less than the one before."""
    share_SE = 1.0 + 3.0 * np.exp(-np.arange(24) / 6.0)[:, None] * (np.arange(EXPERTS) == 3)
    falling = np.rint(TOKENS * K * share_SE / share_SE.sum(1, keepdims=True)).astype(np.int64)
    found = analyze(loads(falling))
    assert found.layers[0].lasts == "falling" and found.layers[0].correlation[6] > 0.5
    assert "going away by itself" in found.verdict[0] and "lasting" not in found.advice


def test_slots_that_stay_empty_are_told() -> None:
    """Dropping to a capacity of 1 left a MaxVio that nothing explained: the mean is that of the slots filled."""
    capped = np.minimum(LASTING, TOKENS * K // EXPERTS)
    none = np.zeros(1, dtype=np.int64)
    windows = tuple(
        HostWindow(
            one[None], np.zeros((1, EXPERTS), np.float32), np.array([TOKENS]), none, none, none, np.zeros((1, 5))
        )
        for one in capped
    )
    found = analyze(Loads("here", np.arange(1, 1 + STEPS), capped[:, None], K, windows))
    share = 1 - capped.sum() / (STEPS * TOKENS * K)
    assert share > 0.05 and found.layers[0].empty == pytest.approx(share)
    assert f"Up to {share:.1%} of the slots stayed empty (layer 0)" in " ".join(found.verdict)
    assert "empty" not in " ".join(analyze(loads(capped)).verdict)


def test_json_is_json() -> None:
    found = json.loads(json.dumps(analyze(loads(LASTING, EVEN), ranks=2).to_json(), allow_nan=False))
    assert found["steps"] == STEPS and found["layers"][0]["lasts"] == "lasting" and found["verdict"]
    assert found["layers"][0]["correlation"]["12"] > 0.9 and found["alerts"][0]["begins"] is True


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="ranks: found 3, need a divisor of the 16 experts"):
        analyze(loads(EVEN), ranks=3)
    with pytest.raises(ValueError, match="here: found no token in any step"):
        analyze(loads(np.zeros_like(EVEN)))


def test_a_recorders_file_answers_every_rule(tmp_path: Path) -> None:
    """A run with a saturated router: loads, biases and counters come from the file, and the saturation is told."""
    stats, policy = RouterStats.allocate(2, EXPERTS, 100), QuantileBalancing(K)
    recorder = Recorder(tmp_path / FILE_NAME, layers=2, experts=EXPERTS, top_k=K)
    kept = []
    for step in range(1, 7):
        for layer, scale in enumerate((1.0, 60.0)):
            logits_TE = scale * torch.randn(300, EXPERTS) + torch.linspace(-1, 1, EXPERTS)
            route(logits_TE, stats.bias_LE[layer], K, stats=stats.layer(layer))
        window = policy.step(stats)
        kept.append(window.loads_LE.numpy())
        recorder.record(step, window)
    recorder.close()
    found = read_loads(tmp_path)
    assert np.array_equal(found.loads_SLE, np.stack(kept)) and found.top_k == K
    assert found.steps_S.tolist() == [1, 2, 3, 4, 5, 6]
    report = analyze(found)
    assert report.layers[0].cv_floor == pytest.approx((300 * K / EXPERTS) ** -0.5)
    assert {"saturation", "bias_range", "oscillation"} <= set(report.rules) and "stale" not in report.rules
    assert [alert.layers for alert in report.alerts if alert.rule == "saturation"] == [(1,)]
    assert read_loads(tmp_path, last=2).steps_S.tolist() == [5, 6]


def under(policy: str, *layers: np.ndarray, first: int = 101, told: tuple[Alert, ...] | None = None, **dials) -> str:
    """The verdict on loads of a run with this policy."""
    steps_S = np.arange(first, first + len(layers[0]))
    config = BalanceConfig(policy=policy, **dials)
    return " ".join(analyze(Loads("here", steps_S, np.stack(layers, axis=1), K, balance=config, told=told)).verdict)


@pytest.mark.parametrize(
    ("policy", "dials", "lasting", "drifting", "changing"),
    [
        ("qb", {}, "estimator signed_log", "one step late; a lower learning rate", "balance.policy stateless"),
        (
            "qb",
            {"estimator": "signed_log"},
            "none of the usual reasons is here",
            "one step late",
            "no bias can foresee",
        ),
        ("qb", {"estimator": "signed_log", "ema": 0.9}, "balance.ema 0.9 keeps", "balance.ema 0.9", "more tokens"),
        ("qb", {"service": "thread", "service_lag": 3}, "bias is 3 steps old", "bias is 3 steps old", "more tokens"),
        ("qb", {"service": "thread", "service_lag": -1}, "as old as it is slow", "service", "more tokens"),
        ("sign", {"sign_step": 0.002}, "sign_step 0.002 are too short", "sign_step 0.002", "may overshoot"),
        ("aux", {"aux_weight": 0.5}, "balance.aux_weight 0.5, is too small", "aux_weight 0.5", "no bias can foresee"),
        ("load_quantile", {"load_window": 9}, "every 9 steps is too slow", "0.05 every 9", "no bias can foresee"),
        ("stateless", {"rounds": 2}, *["raise balance.rounds (now 2)"] * 3),
        (
            "stateless",
            {"mode": "drop", "capacity": 1.5},
            *["(tokens beyond it are dropped), no more: lower it towards 1"] * 3,
        ),
        ("stateless", {"mode": "reassign"}, *["(tokens beyond it go elsewhere), no more: take balance.mode dual"] * 3),
        ("stateless", {"threshold_source": "running"}, "none of the usual reasons", "one step late", "more tokens"),
        ("freeze", {}, "the bias is frozen; a bias policy can", "frozen; a bias solved", "frozen; no bias"),
        ("none", {}, "balances nothing; a bias policy can remove it (balance.policy qb)", "nothing", "nothing"),
        ("replay", {}, *["they came with the batches"] * 3),
    ],
)
def test_advice_fits_the_policy_of_the_run(
    policy: str, dials: dict, lasting: str, drifting: str, changing: str
) -> None:
    for rows, part in ((LASTING, lasting), (DRIFTING, drifting), (CHANGING, changing)):
        text = under(policy, rows, **dials)
        assert part in text and f"(balance.policy {policy}): MaxVio" in text, text
        if policy == "qb" or dials.get("threshold_source") == "running":
            assert "balance.policy qb)." not in text and "take balance.policy qb" not in text, text


def test_advice_knows_saturated_scores_few_tokens_and_a_silent_service() -> None:
    assert "an expert gets 2.0 tokens a step, too few" in under("qb", np.tile([[32] + [0] * 15], (20, 1)))
    told = (Alert(130, "stale", True, (0,), 1, 5.0, 4.0, "steps since the bias last came: 5"),)
    text = under("qb", LASTING, told=told, service="thread")
    assert "the service fell silent (alert stale)" in text
    assert "Alert stale began at step 130: steps since the bias last came: 5." in text
    assert "stale" not in under("qb", LASTING) and ", stale)." in under("qb", EVEN, told=())
    assert "Experts are even (balance.policy qb): MaxVio" in under("qb", EVEN)
    loads_SLE = LASTING[:, None]
    windows = tuple(
        HostWindow(
            one, np.zeros((1, EXPERTS), np.float32), *np.array([[TOKENS], [0], [TOKENS * 4], [0]]), np.zeros((1, 5))
        )
        for one in loads_SLE
    )
    steps_S = np.arange(101, 101 + STEPS)
    found = analyze(Loads("here", steps_S, loads_SLE, K, windows, balance=BalanceConfig(estimator="signed_log")))
    assert "25% of the scores are saturated" in found.verdict[0] and "balance.score_domain logit" in found.verdict[0]
    assert found.policy == "qb" and list(found.advice) == ["lasting"]


def test_a_bias_on_logits_is_judged_by_the_range_of_logits() -> None:
    bias_LE = np.linspace(-4, 4, EXPERTS, dtype=np.float32)[None]
    windows = tuple(
        HostWindow(one[None], bias_LE, *np.array([[TOKENS], [0], [0], [0]]), np.zeros((1, 5))) for one in EVEN
    )
    for domain, begun in (("sigmoid", ["bias_range"]), ("logit", [])):
        config = BalanceConfig(score_domain=domain)
        found = analyze(Loads("here", np.arange(1, 1 + STEPS), EVEN[:, None], K, windows, balance=config))
        assert [alert.rule for alert in found.alerts] == begun


def test_one_rank_is_asked_nothing_about_ranks() -> None:
    found = analyze(loads(LASTING))
    assert "rank_overload" not in found.rules and {one.rank_overload for one in found.layers} == {1.0}
    assert "rank" not in " ".join(found.verdict) and not found.layers[0].uneven_ranks
