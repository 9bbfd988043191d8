"""Verdicts on saved loads: what is known of them by construction is what is said, and bad files are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trine.balance import QuantileBalancing, Recorder
from trine.balance.analyze import Loads, analyze, read_loads
from trine.balance.record_format import FILE_NAME
from trine.balance.stress import forced_routing
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
    short = analyze(loads(LASTING[:3]))
    assert short.layers[0].lasts == "unknown" and "too few steps to say whether it lasts" in short.verdict[0]
    idle = analyze(loads(LASTING, np.zeros_like(LASTING)))
    assert idle.layers[1].max_vio == 0 and not idle.layers[1].uneven
    ids_TK = forced_routing(4000, 32, 2, 4.0, seed=0)
    forced = np.bincount(ids_TK.numpy().reshape(-1), minlength=32)[None]
    assert analyze(loads(forced)).layers[0].max_vio == pytest.approx(4.0)


def test_json_is_json() -> None:
    found = json.loads(json.dumps(analyze(loads(LASTING, EVEN), ranks=2).to_json(), allow_nan=False))
    assert found["steps"] == STEPS and found["layers"][0]["lasts"] == "lasting" and found["verdict"]
    assert found["layers"][0]["correlation"]["12"] > 0.9 and found["alerts"][0]["begins"] is True


def test_formats_hold_the_same_loads(tmp_path: Path) -> None:
    both = np.stack((LASTING, EVEN), axis=1)
    np.save(tmp_path / "a.npy", both)
    np.savez(tmp_path / "b.npz", loads=both.astype(np.float32), steps=np.arange(7, 7 + STEPS), other=np.zeros(2))
    rows = [f"{s},{la},{e},{both[s, la, e]}" for s in range(STEPS) for la in range(2) for e in range(EXPERTS)]
    (tmp_path / "c.csv").write_text("step,layer,expert,load\n" + "\n".join(row for row in rows if row[-2:] != ",0"))
    for name, first in (("a.npy", 1), ("b.npz", 7), ("c.csv", 0)):
        found = read_loads(tmp_path / name)
        assert np.array_equal(found.loads_SLE, both) and found.steps_S[0] == first
        assert found.loads_SLE.dtype == np.int64
    np.savetxt(tmp_path / "d.csv", LASTING, fmt="%d", delimiter=",")
    names = ",".join(["step", *(f"e{i}" for i in range(EXPERTS))])
    numbered = np.concatenate((np.arange(5, 5 + STEPS)[:, None], LASTING), axis=1)
    np.savetxt(tmp_path / "e.csv", numbered, fmt="%d", delimiter=",", header=names, comments="")
    np.savez(tmp_path / "f.npz", LASTING)
    for name, first in (("d.csv", 1), ("e.csv", 5), ("f.npz", 1)):
        found = read_loads(tmp_path / name)
        assert np.array_equal(found.loads_SLE[:, 0], LASTING) and found.steps_S[0] == first, name
    assert read_loads(tmp_path / "e.csv", last=4).steps_S.tolist() == [49, 50, 51, 52]


def _write(path: Path, value: object) -> None:
    if isinstance(value, bytes):
        path.write_bytes(value)
    elif isinstance(value, dict):
        np.savez(path, **value)
    elif isinstance(value, np.ndarray):
        np.save(path, value, allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a.npy", np.zeros(5), "loads: found shape (5,), need [steps, layers, experts] or [steps, experts]"),
        ("a.npy", np.zeros((0, 5)), "loads: found shape (0, 1, 5)"),
        ("a.npy", np.full((2, 3), np.nan), "loads: found nan at row 0, layer 0, expert 0, need counts of tokens"),
        ("a.npy", np.array([[1, 2], [3, -1]]), "loads: found -1 at row 1, layer 0, expert 1"),
        ("a.npy", np.array([[0.5, 2]]), "found 0.5 at row 0"),
        ("a.npy", np.array([["a", "b"]]), "need counts of tokens"),
        ("a.npy", np.array([[{}, {}]]), "cannot be read"),
        ("a.npy", b"nonsense", "cannot be read"),
        ("a.npz", b"PK nonsense", "cannot be read"),
        ("a.npz", {"x": np.ones((2, 2)), "y": np.ones((2, 2))}, "found arrays ['x', 'y'], need one of the name loads"),
        ("a.npz", {"loads": np.ones((2, 2)), "steps": np.array([2, 1])}, "need one rising number for each"),
        ("a.npz", {"loads": np.ones((2, 2)), "steps": np.array([2])}, "steps: found shape (1,)"),
        ("a.csv", b"", "found 0 rows of different or no length"),
        ("a.csv", b"1,2\n3\n", "found 2 rows of different or no length"),
        ("a.csv", b"1,2\n3,x\n", "row 2: found 'x', need a number"),
        ("a.csv", b"1,2\n3,nan\n", "found nan at row 1, layer 0, expert 1"),
        ("a.csv", b"step,expert,load\n1,0,4\n1,0,5\n", "found a step, layer and expert twice"),
        ("a.csv", b"step,expert,load\n1,-1,4\n", "expert: found values that are no whole numbers of at least 0"),
        ("a.csv", b"step,expert,load\n1,2000000000,4\n", "need at most 2**28"),
        ("a.csv", b"\xff\xfe", "cannot be read"),
        ("a.txt", b"1", "found a file of kind '.txt', need a run's folder, .npy, .npz or .csv"),
        ("b.npy", None, "no such run or file"),
        ("b.sqlite", b"nonsense", "b.sqlite"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, value: object, message: str) -> None:
    _write(tmp_path / name, value)
    with pytest.raises(ValueError) as error:
        read_loads(tmp_path / name)
    assert message in str(error.value) and str(tmp_path / name) in str(error.value)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ranks: found 3, need a divisor of the 16 experts"):
        analyze(loads(EVEN), ranks=3)
    with pytest.raises(ValueError, match="here: found no token in any step"):
        analyze(loads(np.zeros_like(EVEN)))
    with pytest.raises(ValueError, match="last: found 0, need at least 1"):
        read_loads(tmp_path, last=0)


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
