"""``/metrics`` is a page that Prometheus reads, with as few series as promised; the Grafana board asks for no more."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from trine.balance import Recorder, Window
from trine.balance.record_format import FILE_NAME
from trine.ops.router import RouterStats
from trine.views.prometheus_page import MOST_RUNS, TRAINING, metrics_text
from trine.views.run_view import RunView

Line = dict[str, Any]
BOARD = Path(__file__).parents[2] / "docs" / "grafana-board.json"
METRIC: Line = {
    "step": 7,
    "stage": 1,
    "tokens": 96,
    "loss": 4.25,
    "bits_per_byte": 3.0,
    "lr": 0.01,
    "grad_norm": 1.5,
    "tokens_per_s": 100.0,
    "dead_experts": 2,
    "seconds": 0.5,
    "updated": True,
    "clipped_heads": 0,
}


def samples(page: str) -> dict[tuple[str, ...], float]:
    """Name and label values -> value."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            key = (one.name, *(f"{name}={value}" for name, value in sorted(one.labels.items())))
            assert key not in found
            found[key] = one.value
    return found


def record(folder: Path, layers: int = 2, experts: int = 6) -> None:
    """Two steps of a recorder's file."""
    recorder = Recorder(folder / FILE_NAME, layers=layers, experts=experts, top_k=2)
    for step in (1, 2):
        stats = RouterStats.allocate(layers, experts, bins=20)
        stats.loads_LE.copy_(torch.arange(layers * experts).view(layers, experts) + step)
        recorder.record(step, Window.of(stats))
    assert recorder.flush()
    recorder.close()


def whole_run(run_with: Callable[..., Path], looked: Callable[..., Line], name: str = "run") -> RunView:
    events = [
        {"kind": "spike", "step": 3},
        {"kind": "spike", "step": 4},
        {"kind": "balance_alert", "rule": "dead", "begins": True, "count": 2, "step": 5, "text": "dead"},
    ]
    model = {"layers": 4, "dense_layers": 2}  # recorded layers 0 and 1 are the model's 2 and 3
    folder = run_with(name, probes=[looked(0), looked(5)], metrics=[METRIC], events=events, model=model)
    record(folder)
    return RunView(folder)


def test_every_figure_of_a_run(run_with: Callable[..., Path], looked: Callable[..., Line]) -> None:
    run = whole_run(run_with, looked)
    found = samples(metrics_text([run]))
    for name, value in (("train_loss", 4.25), ("train_step", 7), ("train_dead_experts", 2), ("run_readable", 1)):
        assert found[f"trine_{name}", "run=run"] == value
    assert found["trine_train_planned_steps", "run=run"] == 40
    assert found["trine_events", "kind=spike", "run=run"] == 2
    assert found["trine_balance_step", "run=run"] == 2
    assert found["trine_load_ratio", "layer=3", "quantile=0.99", "run=run"] > 1
    assert found["trine_balance_alert_layers", "rule=dead", "run=run"] == 2
    assert found["trine_balance_alert_layers", "rule=p95", "run=run"] == 0
    assert found["trine_recorder_steps", "fate=written", "run=run"] == 2
    probe = run.probes()[-1]
    assert found["trine_inside_step", "run=run"] == 5
    assert found["trine_inside_openness", "layer=3", "run=run"] == pytest.approx(probe.openness[3].mean_H.mean())
    assert found["trine_inside_memory_tokens", "layer=0", "run=run"] == pytest.approx(
        probe.gates[0].memory_HM[:, 1].mean()
    )
    assert found["trine_inside_activation_max", "part=stream", "run=run"] == probe.peaks["stream"].largest.max()
    assert len(found) < 160


def numbers_of(run: RunView, name: str) -> set[str]:
    found = samples(metrics_text([run]))
    return {
        one.removeprefix("layer=") for key in found if key[0] == name for one in key[1:] if one.startswith("layer=")
    }


def test_a_layer_is_one_thing_in_loads_and_in_looks_inside(
    run_with: Callable[..., Path], looked: Callable[..., Line]
) -> None:
    run = whole_run(run_with, looked)
    for name in ("trine_load_ratio", "trine_experts_dead", "trine_busiest_expert", "trine_busiest_load_ratio"):
        assert numbers_of(run, name) == {"2", "3"}
    assert numbers_of(run, "trine_inside_openness") == {"0", "1", "2", "3"}


def test_the_layer_that_predicts_a_token_more_has_the_number_after_the_last(run_with: Callable[..., Path]) -> None:
    folder = run_with(metrics=[METRIC], model={"layers": 4, "dense_layers": 3, "mtp": True})
    record(folder)
    assert numbers_of(RunView(folder), "trine_load_ratio") == {"3", "4"}


@pytest.mark.parametrize(
    "model", [None, {}, {"layers": 4}, {"layers": 4, "dense_layers": 1}, {"layers": True, "dense_layers": -1}]
)
def test_without_the_models_numbers_a_layer_says_that_it_counts_moe_layers(
    run_with: Callable[..., Path], model: Any
) -> None:
    folder = run_with(metrics=[METRIC], model=model)
    record(folder)
    assert numbers_of(RunView(folder), "trine_load_ratio") == {"MoE 0", "MoE 1"}


def test_of_many_runs_the_one_that_is_written_to_now_is_served(run_with: Callable[..., Path]) -> None:
    runs = []
    for i in range(MOST_RUNS + 5):
        folder = run_with(f"run-{i:02}", metrics=[METRIC])
        for file in folder.iterdir():
            os.utime(file, (1_000_000 - i, 1_000_000 - i))  # as they are found: newest first
        runs.append(RunView(folder))
    training = RunView(run_with("training-now", metrics=[METRIC]))  # one that appeared later is added at the end
    served = {key[1] for key in samples(metrics_text([*runs, training])) if key[0] == "trine_run_readable"}
    assert "run=training-now" in served and len(served) == MOST_RUNS
    assert "run=run-00" in served and "run=run-24" not in served
    with open(runs[-1].path / "metrics.jsonl", "a") as lines:  # an old one goes on
        lines.write(json.dumps({**METRIC, "step": 8}) + "\n")
    found = samples(metrics_text([*runs, training]))
    assert found["trine_train_step", "run=run-24"] == 8


def test_hostile_and_equal_names_gone_runs_and_none(run_with: Callable[..., Path], tmp_path: Path) -> None:
    evil = 'a"} 1\ntrine_x{run="b\\'
    runs = [RunView(run_with("one", metrics=[METRIC]), evil), RunView(run_with("two"), evil), RunView(tmp_path / "no")]
    found = samples(metrics_text(runs))
    readable = {key[1]: value for key, value in found.items() if key[0] == "trine_run_readable"}
    assert sorted(readable.values()) == [0, 1, 1] and readable["run=no"] == 0
    assert not any(key[0] == "trine_x" for key in found)
    assert not any("run=no" in key for key in found if key[0] != "trine_run_readable")
    assert samples(metrics_text([])) == {}


def test_values_that_are_no_numbers_and_no_recorder_are_left_out(run_with: Callable[..., Path]) -> None:
    bad = {**METRIC, "loss": None, "grad_norm": "x", "lr": 10**400, "seconds": float("nan")}
    folder = run_with(metrics=[bad])
    (folder / FILE_NAME).write_bytes(b"no database")
    names = {key[0] for key in samples(metrics_text([RunView(folder)]))}
    assert "trine_train_tokens_per_second" in names and "trine_balance_step" not in names
    assert not names & {"trine_train_loss", "trine_train_gradient_norm", "trine_train_learning_rate"}


def test_without_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch, run_with: Callable[..., Path]) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match="prometheus_client is not installed"):
        metrics_text([RunView(run_with(metrics=[METRIC]))])


def test_the_grafana_board_asks_only_for_what_there_is(
    run_with: Callable[..., Path], looked: Callable[..., Line]
) -> None:
    board = json.loads(BOARD.read_text())
    page = samples(metrics_text([whole_run(run_with, looked)]))
    names = {key[0] for key in page}
    labels = {name: {one.split("=")[0] for key in page if key[0] == name for one in key[1:]} for name in names}
    asked: set[str] = set()
    panels = [one for one in board["panels"] if one["type"] != "row"]
    for panel in panels:
        assert panel["title"] and panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            for name, inside in re.findall(r"(trine_\w+)\{([^}]*)\}", target["expr"]):
                asked.add(name)
                assert name in names, f"{panel['title']}: {name} is exported by nothing"
                used = set(re.findall(r"(\w+)\s*=", inside))
                assert used <= labels[name], f"{panel['title']}: {name} has no {used - labels[name]}"
                assert 'run=~"$run"' in inside
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= set.union(*(labels[name] for name in re.findall(r"trine_\w+", target["expr"])))
    assert {f"trine_{name}" for name in TRAINING} - asked <= {
        *("trine_train_stage", "trine_train_tokens", "trine_train_step_seconds", "trine_train_dead_experts"),
        "trine_train_clipped_heads",
    }
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not mine & cells
        cells |= mine
    assert {one["name"] for one in board["templating"]["list"]} == {"datasource", "run"}


def test_the_pages_need_neither_torch_nor_matplotlib() -> None:
    """A page that only looks at files stays small."""
    modules = ("depth_charts", "gate_charts", "training_charts", "prometheus_page")
    names = ", ".join(f"trine.views.{one}" for one in modules)
    text = f"import sys, {names}; print([one for one in ('torch', 'matplotlib') if one in sys.modules])"
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
