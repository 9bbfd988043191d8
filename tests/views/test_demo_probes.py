from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trine.train import probes as real
from trine.views import demo_probes, depth_charts, gate_charts
from trine.views.run_view import RunView


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (6, 60), (92, 2000)])
def test_a_demo_fills_both_pages(tmp_path: Path, layers: int, steps: int) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format_version": 1, "model": {"layers": layers + 1}}))
    demo_probes.write(tmp_path, steps, 3)
    run = RunView(tmp_path)
    probes = run.probes()
    assert [probes[0].step, probes[-1].step] == [0, steps] and not any(one.lacks for one in probes)
    assert len(probes) == min(demo_probes.LOOKS, steps + 1)
    last = probes[-1]
    assert len(last.labels) == layers + 2 and len(last.openness) == layers + 1 and last.gates
    assert [round(float(row.sum()), 2) for row in last.weights] == [1.0] * (2 * layers + 2)
    assert np.allclose(np.diag(last.cka), 1) and (tmp_path / "probes.jsonl").stat().st_size < 4e6
    for module in (depth_charts, gate_charts):
        assert not any(chart.empty for chart in module.charts(run))


def test_the_same_seed_makes_the_same_demo(tmp_path: Path) -> None:
    made = []
    for seed in (3, 3, 4):
        (tmp_path / "run.json").write_text(json.dumps({"format_version": 1, "model": {"layers": 4}}))
        demo_probes.write(tmp_path, 20, seed)
        made.append((tmp_path / "probes.jsonl").read_bytes())
    assert made[0] == made[1] != made[2]


def test_it_has_the_levels_of_real_looks() -> None:
    assert (demo_probes.LEVELS, demo_probes.MEMORY_LEVELS) == (real.LEVELS, real.MEMORY_LEVELS)
    assert (*real.DECADES, real.BINS_A_DECADE) == demo_probes.DECADES
