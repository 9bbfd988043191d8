"""Lines of ``probes.jsonl`` come back as they were written, and whatever else is in them does no harm."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trine.train import probes as written
from trine.views import depth_charts, gate_charts, probe_view, training_charts
from trine.views.chart_render import to_csv
from trine.views.plotly_charts import to_plotly
from trine.views.probe_view import Probe
from trine.views.prometheus_page import metrics_text
from trine.views.run_view import RunView

Line = dict[str, Any]


def test_reader_and_writer_agree_on_names() -> None:
    assert (probe_view.FILE_NAME, probe_view.FORMAT_VERSION) == (written.FILE_NAME, written.FORMAT_VERSION)


def test_a_line_is_read_whole(looked: Callable[..., Line]) -> None:
    line = looked(7)
    probe = Probe.of(json.loads(json.dumps(line)))
    assert (probe.step, probe.text, probe.tokens, probe.length, probe.lacks) == (7, "held-out text", 24, 15, ())
    assert probe.sites == tuple(line["depth"]["sites"]) and probe.labels == ("0", "1", "2", "3", "head")
    assert [row.tolist() for row in probe.weights] == [pytest.approx(row) for row in line["depth"]["weights"]]
    np.testing.assert_allclose(probe.cka, line["layers"]["cka"], rtol=1e-6)
    assert len(probe.next_alike) == 4 and len(probe.peaks["stream"].largest) == 5
    assert [gate.layer for gate in probe.gates] == [0, 1, 2] and [gate.layer for gate in probe.openness] == [0, 1, 2, 3]
    gate = probe.gates[1]
    assert gate.g_HQ.shape == (2, len(probe.levels)) and gate.memory_HM.shape == (2, 3) and gate.g_min == -5.0
    assert len(gate.histogram_B) == len(probe.bins) - 1 and probe.bins[0] == -5 and probe.bins[-1] == 1
    assert probe.openness[3].kind == "mla"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"layers": None}, "layers"),
        ({"depth": {"sites": ["a"], "weights": []}}, "depth"),
        ({"gates": [{"layer": 0}]}, "gates"),
        ({"levels": [0.9, 0.1]}, "levels"),
        ({"activations": {"stream": {"max": [1], "rms": []}}}, "activations"),
        ({"openness": "x"}, "openness"),
        ({"decades": [0, 0, 5]}, "decades"),
    ],
)
def test_a_damaged_part_is_absent_and_named(looked: Callable[..., Line], change: Line, part: str) -> None:
    probe = Probe.of({**looked(3), **change})
    assert part in probe.lacks and probe.step == 3
    if part not in ("levels", "decades"):
        assert probe.lacks == (part,)


def test_numbers_that_are_none_are_gaps(looked: Callable[..., Line]) -> None:
    line = looked(3)
    line["layers"]["cka"][0][1] = None
    line["layers"]["tokens_alike"][2] = float("inf")
    line["activations"]["stream"]["max"][0] = 10**400
    probe = Probe.of(line)
    assert np.isnan(probe.cka[0, 1]) and np.isnan(probe.tokens_alike[2])
    assert probe.lacks == ("activations",)  # no number of any float


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({}, "step"),
        ({"step": True}, "step"),
        ({"step": -1}, "step"),
        ({"step": 1, "format_version": 2}, "newer|at most"),
    ],
)
def test_a_line_without_a_step_or_of_a_newer_format_is_refused(record: Line, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Probe.of(record)


def test_a_newer_format_is_a_sentence(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    run = RunView(run_with(probes=[{**looked(1), "format_version": 9}]))
    assert run.probes() == []
    assert any("format_version: found 9, need at most 1" in note for note in run.notes())


def test_a_file_is_followed_while_it_grows(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    folder = run_with(probes=[looked(0), looked(5)])
    run = RunView(folder)
    assert [one.step for one in run.probes()] == [0, 5]
    before = run.version()
    text = json.dumps(looked(10)) + "\n"
    with open(folder / "probes.jsonl", "a") as file:
        file.write(text[:100])
        file.flush()
        assert [one.step for one in run.probes()] == [0, 5] and run.version() != before
        file.write(text[100:])
    assert [one.step for one in run.probes()] == [0, 5, 10]
    (folder / "probes.jsonl").write_text(json.dumps(looked(0)) + "\n")  # taken back
    assert [one.step for one in run.probes()] == [0]
    (folder / "probes.jsonl").unlink()
    assert run.probes() == []


def pages(run: RunView, step: int | None) -> None:
    """Everything that a page asks for."""
    for module in (depth_charts, gate_charts, training_charts):
        for chart in module.charts(run, step):
            json.dumps(to_plotly(chart), allow_nan=False)
            assert to_csv(chart) and chart.description
            if chart.empty:
                assert chart.empty.endswith(".") and len(chart.empty) > 20
    training_charts.event_rows(run)
    training_charts.alert_rows(run)
    assert metrics_text([run])
    assert run.notes() is not None


STRANGE: list[Any] = [
    *(None, True, -1, 0, 1, 2**53, 10**400, 1e308, float("nan"), float("inf"), -5.5, "", "x", "\ud800\u202e</script>"),
    *([], [None], [[1], [1, 2]], {}, {"a": 1}, [[]], [1, "a"], "9" * 500),
]


def damage(value: Any, noise: random.Random, depth: int = 0) -> Any:
    """The same with one place changed into something strange."""
    if depth > 1 and noise.random() < 0.2:
        return noise.choice(STRANGE)
    if isinstance(value, dict) and value:
        key = noise.choice(list(value))
        if noise.random() < 0.15:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: damage(value[key], noise, depth + 1)}
    if isinstance(value, list) and value:
        place = noise.randrange(len(value))
        if noise.random() < 0.15:
            return value[:place] + value[place + 1 :] if noise.random() < 0.5 else value + value[-1:]
        return [*value[:place], damage(value[place], noise, depth + 1), *value[place + 1 :]]
    return noise.choice(STRANGE)


METRIC = {
    "step": 1,
    "stage": 0,
    "tokens": 96,
    "loss": 4.0,
    "bits_per_byte": 3.0,
    "lr": 0.01,
    "grad_norm": 1.0,
    "tokens_per_s": 100.0,
    "max_vio": [0.1],
    "dead_experts": 0,
    "seconds": 0.5,
    "updated": True,
    "mtp_loss": None,
}
EVENTS = [
    {"time": "t", "kind": "stage", "step": 1, "stage": 0, "length": 8, "step_tokens": 16, "mixture": []},
    {"time": "t", "kind": "spike", "step": 2, "loss": 9.0, "usual": 3.0},
    {"time": "t", "kind": "balance_alert", "step": 2, "rule": "dead", "begins": True, "count": 1, "text": "dead"},
    {"time": "t", "kind": "rollback", "step": 3, "to_step": 1, "checkpoint": "step-000001", "left_out": []},
    {"time": "t", "kind": "short_guard", "stage": 0, "after": 1.0, "change": None, "worse": False, "unit": "bits"},
]
PLAN = [{"stage": {"length": 8}, "steps": 2, "first_step": 0}, {"stage": {"length": 16}, "steps": 9, "first_step": 2}]


@pytest.mark.parametrize(("seed", "folders"), [(11, 60), pytest.param(12, 1000, marks=pytest.mark.slow)])
def test_damaged_files_never_bring_a_page_down(
    tmp_path: Path, looked: Callable[..., Line], seed: int, folders: int
) -> None:
    noise = random.Random(seed)
    metrics = [{**METRIC, "step": step, "loss": 4.0 - step / 10} for step in range(1, 9)]
    config = {"config": {"probe_every": 4, "optimizer": {"clip": 1.0}}, "plan": PLAN, "planned_steps": 8}
    record = {"format_version": 1, **config}
    evaluation = {"format_version": 1, "bits_per_byte": 1.5, "baselines": {"gzip": 2.0, "xz": 1.8}}
    probes = [looked(step) for step in (0, 4, 8)]
    for number in range(folders):
        folder = tmp_path / str(number)
        folder.mkdir()
        files: dict[str, Any] = {"probes.jsonl": probes, "metrics.jsonl": metrics, "events.jsonl": EVENTS}
        files |= {"run.json": record, "eval.json": evaluation}
        for name, value in copy.deepcopy(files).items():
            for _ in range(noise.randrange(4)):
                value = damage(value, noise, -1)
            lines = value if isinstance(value, list) else [value]
            body = "\n".join(json.dumps(one) for one in lines).encode() + b"\n"
            if noise.random() < 0.5:  # bytes that rot, or an end that is missing
                place = noise.randrange(len(body))
                rot = bytes(noise.randrange(256) for _ in range(noise.randrange(6)))
                body = body[:place] + rot + (body[place + 3 :] if noise.random() < 0.7 else b"")
            if noise.random() < 0.95:
                (folder / name).write_bytes(body)
        run = RunView(folder)
        pages(run, noise.choice([None, 0, 5, 10**9]))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    pages(run, None)  # gone while open
    assert run.problem().endswith("does not exist (any more).")


@pytest.mark.parametrize("lines", [[], [0], [0, 5]])
def test_few_looks_and_one_step_are_enough(
    run_with: Callable[..., Path], looked: Callable[..., Line], lines: list[int]
) -> None:
    pages(RunView(run_with(probes=[looked(step) for step in lines], metrics=[METRIC])), None)


@pytest.mark.parametrize(
    "change", [{"residual": "plain"}, {"gate_kind": "softplus", "output_gates": False}, {"dense_layers": 4}]
)
def test_models_without_a_part_get_a_sentence(
    run_with: Callable[..., Path], looked: Callable[..., Line], change: Line
) -> None:
    run = RunView(run_with(probes=[looked(0, **change), looked(2, **change)]))
    pages(run, None)
    empty = {chart.key: chart.empty for chart in (*depth_charts.charts(run), *gate_charts.charts(run)) if chart.empty}
    if "residual" in change:
        assert set(empty) == {"depth-weights", "depth-reading"} and "no depth mixes" in empty["depth-reading"]
    elif "gate_kind" in change:
        assert set(empty) == {"gates-bound", "gates-bound-steps", "gates-openness", "gates-openness-steps"}
    else:
        assert not empty
