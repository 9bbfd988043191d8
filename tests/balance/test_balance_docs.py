"""What docs/balance.md and the balance README say is run, parsed or looked up here."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from trine import _balance_verbs as verbs
from trine._options import parse
from trine.balance import Freeze, QuantileBalancing, Recorder, max_violation, sampling_floor
from trine.balance.record_format import FILE_NAME
from trine.ops.router import RouterStats, route

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("docs/balance.md", "src/trine/balance/README.md")}
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = [
    pytest.param(code, id=f"{name.split('/')[-1]} {number}")
    for name, page in PAGES.items()
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run_as_written(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "runs/laptop" in code:
        (tmp_path / "runs" / "laptop").mkdir(parents=True)
        recorder = Recorder(tmp_path / "runs" / "laptop" / FILE_NAME, layers=4, experts=56, top_k=2)
        stats = RouterStats.allocate(4, 56, 10)
        for step in (1, 2, 3):
            recorder.record(step, Freeze().step(stats))
        recorder.close()
    found: dict[str, object] = {}
    exec(compile(code.replace('"process"', '"thread"'), "balance", "exec"), found)  # starts in no time
    printed = capsys.readouterr().out
    if "sequence_loads" in code:
        loads_LNE, floor_N = found["of_sequences_LNE"], found["floor_N"]
        assert isinstance(loads_LNE, torch.Tensor) and isinstance(floor_N, torch.Tensor)
        assert loads_LNE.sum(-1).tolist() == [[400, 640, 1008]] * 4 and "worst micro-batch" in printed
        assert f"has a MaxVio of {float(floor_N[0]):.2f} by chance" in " ".join(PAGES["docs/balance.md"].split())
    if "AsyncBalancing" in code:
        assert "missed=0" in printed


def test_commands_are_understood() -> None:
    kinds = {"analyze": verbs.Analyze, "stress": verbs.Stress, "serve": verbs.Serve}
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES["docs/balance.md"], re.MULTILINE | re.DOTALL)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines() if "trine balance" in line]
    found = [(verb, parse(f"balance {verb}", kinds[verb], rest)) for _, _, verb, *rest in map(shlex.split, lines)]
    assert [verb for verb, _ in found] == ["serve", "analyze", "analyze"]
    assert found[1][1] == verbs.Analyze("runs/laptop", ranks=4) and found[2][1] == verbs.Analyze("loads.csv", json=True)


def test_the_default_estimator_is_argued_with_the_figures_of_the_records() -> None:
    page = PAGES["docs/balance.md"]
    names = set(re.findall(r"benchmarks/results/([\w.-]+\.json)", page))
    assert len(names) >= 3 and all((RESULTS / name).is_file() for name in names)
    section = " ".join(page[page.index("## The default estimator") : page.index("## What a quantile costs")].split())
    (compared,) = json.loads((RESULTS / next(one for one in names if "compare" in one)).read_text())
    report, ours = compared["arms"]["qb"], compared["arms"]["qb-signed-log"]
    vio, loss = ours["max_vio"], ours["loss"]
    expected = [
        f"MaxVio is {vio['mean']:.3f} where the report's is {report['max_vio']['mean']:.3f}",
        f"a difference of {vio['difference']:.3f} ± {vio['error']:.3f}",
        f"{loss['mean']:.3f} and {report['loss']['mean']:.3f}",
        f"difference {abs(loss['difference']):.3f} ± {loss['error']:.3f}",
        f"{ours['wire_bytes'] / 1000:.1f} and {report['wire_bytes'] / 1000:.1f} KB a step",
        f"real text, {ours['seeds']} seeds",
    ]
    assert vio["counts"] and not loss["counts"]
    rows = json.loads((RESULTS / next(one for one in names if "estimators" in one)).read_text())
    table = page[page.index("<!-- estimators: begin -->") :]
    for router in ("skew", "base", "drift"):
        cv = [
            re.search(rf"\| {router} \| scores \| {method} \|[^|]*\| ([\d.]+) ±", table)
            for method in ("signed-log 256, adaptive gain", "report 1000")
        ]
        expected.append(" and ".join(one.group(1) for one in cv if one))
    assert {row["seed"] for row in rows if row["case"].startswith("skew sigmoid")} == set(range(5))
    for part in expected:
        assert part in section, part


def record(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The record of a benchmark that docs/balance.md names, by case and implementation."""
    (path,) = {RESULTS / f"{one}.json" for one in re.findall(rf"{name}-[\w-]+-\d+", PAGES["docs/balance.md"])}
    return {(row["case"], row["impl"]): row for row in json.loads(path.read_text(encoding="utf-8"))}


def test_boundary_of_the_quantiles_is_that_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many experts x tokens histogram and sketch take less time than the exact quantile."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    boundary = importlib.import_module("quantile_cost").boundary
    times: dict[tuple[int, int], dict[str, float]] = {}
    for (case, way), row in record("quantile_cost").items():
        tokens, experts = (int(part[1:]) for part in case.split()[:2])
        times.setdefault((experts, tokens), {})[way] = row["ms"]
    page = " ".join(PAGES["docs/balance.md"].split())
    assert len(times) == 15 and boundary(times) in page and "largest measured is 256 experts x 65,536" in page
    made_up = {(4, 10): dict.fromkeys(("select", "sketch", "histogram", "signed-log"), 1.0)}
    made_up[4, 20] = {"select": 3.0, "sketch": 2.0, "histogram": 2.0, "signed-log": 4.0}
    made_up[8, 20] = {"select": 3.0, "sketch": 2.0, "histogram": 4.0, "signed-log": 4.0}
    found = boundary(made_up)
    assert "at no measured size for the signed-log histogram, between 10 and 20 tokens for the sketch" in found
    assert "somewhere from 80 to 160 experts x tokens for 1000 equal bins; the largest measured is 8 experts" in found


def test_both_kinds_of_a_step_and_the_shares_of_them_are_those_of_the_records() -> None:
    page = PAGES["docs/balance.md"]
    section = page[page.index("## What balancing costs a run") : page.index("<!-- estimators: begin -->")]
    recorder, ours = record("recorder_cpu"), record("balance-estimators")
    whole = recorder["step laptop", "without"]["ms"]
    (run,) = record("laptop_run").values()
    rate = run["tokens_per_second_median"]
    report, signed_log = (ours["step of the laptop preset", one] for one in ("report", "signed-log"))
    alone = report["ms"] / report["floor_fraction"] - report["ms"]
    assert signed_log["ms"] / signed_log["floor_fraction"] - signed_log["ms"] == pytest.approx(alone, abs=3)
    assert f"| {whole:,.0f} |" in section and f"({rate:,.0f} tokens a second" in section
    assert f": {4096e3 / rate:,.0f} ms)" in section
    printed = int(re.findall(r"of the passes, (\d+) ms", section)[0])
    assert printed == pytest.approx(alone, abs=1.5) and f"| {printed} |" in section
    hand_over, all_of_it = (recorder["step laptop", one] for one in ("hand over", "all of it"))
    rows = {
        "counting and solving, report": (report, report["note"].split()[0]),
        "counting and solving, signed-log": (signed_log, signed_log["note"].split()[0]),
        "recorder, what training waits for": (hand_over, f"{100 * hand_over['ms'] / alone:.2f}"),
        "recorder, all of its work": (all_of_it, f"{100 * all_of_it['ms'] / alone:.2f}"),
    }
    for name, (row, of_passes) in rows.items():
        ms = row["ms"]
        assert f"| {name} | {ms:.2f} | {of_passes} % | {100 * ms / whole:.2f} % |" in section
    rounds = ours["step of the laptop preset", "signed-log, 4 rounds"]
    beside = rounds["ms"] / rounds["floor_fraction"] - rounds["ms"]
    share = rounds["note"].split()[0]
    assert f"{rounds['ms']:.1f} ms, {share} % of the passes measured beside it in a slower hour ({beside:,.0f} ms)" in (
        " ".join(section.split())
    )
    solved = [ours["solve 92x896x256", one]["ms"] for one in ("report", "signed-log")]
    words = " ".join(section.split())
    assert "takes {:.1f} ms with the report's estimator and {:.1f} ms with signed-log".format(*solved) in words


def test_late_biases_are_said_to_be_what_was_recorded() -> None:
    page = " ".join(PAGES["docs/balance.md"].split())
    worst: dict[tuple[str, str], float] = {}
    for (case, lag), row in record("balance-estimators").items():
        if case.startswith("async"):
            key = case.split()[1], lag
            worst[key] = max(worst.get(key, 0.0), *row["max_violation"][20:])
    none, three, four = (f"{worst['drift', f'lag {lag}']:.2f}" for lag in (0, 3, 4))
    assert f"the worst MaxVio is {none} without a lag, {three} at lag 3 and {four} at lag 4" in page
    assert (
        f"One that drifts loses balance by it: the worst is {none} at lag 0, {three} at lag 3, {four} at lag 4" in page
    )
    assert max(value for (router, _), value in worst.items() if router == "base") < 0.42
    assert "recorded at 128 experts, with the report's estimator on scores" in page


def test_table_of_softmax_routers_is_what_such_routers_do() -> None:
    page = PAGES["docs/balance.md"]
    table = page[page.index("<!-- softmax -->") : page.index("<!-- /softmax -->")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    (row,) = [row for row in rows if row[:2] == ["64, 4", "2"]]
    assert float(row[2]) == round(sampling_floor(4096, 4, 64).max_violation, 2)
    kinds = [
        ("softmax", {}),
        ("softmax", {"estimator": "signed_log"}),
        ("softmax", {"score_domain": "logit"}),
        ("sigmoid", {}),
    ]
    for cell, (score, kind) in zip(row[3:], kinds, strict=True):
        found = 0.0
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            offset_E = 2.0 * torch.randn(64, generator=generator)
            stats, policy = RouterStats.allocate(1, 64, **kind), QuantileBalancing(4)
            for _ in range(12):
                logits_TE = torch.randn(4096, 64, generator=generator) + offset_E
                domain, layer = stats.score_domain, stats.layer(0)
                route(logits_TE, stats.bias_LE[0], 4, score=score, stats=layer, score_domain=domain)
                loads_E = policy.step(stats).loads_LE[0]
            found += float(max_violation(loads_E)) / 3
        assert found == pytest.approx(float(cell.split()[0]), abs=0.02)
