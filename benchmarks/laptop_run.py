"""A finished run as a record and as the picture of the README.

    make train && python benchmarks/laptop_run.py runs/laptop --minutes 13.99 --peak-mb 1253

Minutes and peak are those of the whole command, as ``/usr/bin/time -v make train`` prints them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from _common import RESULTS, hardware, slug

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "laptop-run.png"


def record(run: Path, minutes: float | None, peak_mb: float | None, quiet: bool) -> dict[str, Any]:
    """What a run folder says of speed, bits per byte and balance."""
    about = json.loads((run / "run.json").read_text(encoding="utf-8"))
    found = json.loads((run / "eval.json").read_text(encoding="utf-8"))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    worst = np.array([max(step["max_vio"]) for step in steps[19:] if step["stage"] == 0])  # short rows: the first stage
    stages = [f"{part['steps']} x {part['stage']['length']}" for part in about["plan"]]
    return {
        "benchmark": "laptop_run",
        "case": f"make train PRESET={about['config']['preset']}: steps x row length {', '.join(stages)}",
        "impl": "trine",
        "command_minutes": minutes,
        "peak_bytes": None if peak_mb is None else int(peak_mb * 1e6),
        "training_seconds": round(sum(step["seconds"] for step in steps), 1),
        "tokens": steps[-1]["tokens"],
        "tokens_per_second_median": float(np.median([step["tokens_per_s"] for step in steps])),
        "bits_per_byte": found["bits_per_byte"],
        "bits_per_byte_all": found["bits_per_byte_all"],
        "baselines": found["baselines"],
        "max_vio_median": float(np.median(worst)),
        "max_vio_p95": float(np.quantile(worst, 0.95)),
        "max_vio_share_at_most_0.3": float((worst <= 0.3).mean()),
        "steps_with_dead_experts": sum(step["dead_experts"] > 0 for step in steps),
        "quiet": quiet,
        "threads": about["threads"],
        "hardware": about["hardware"]["cpu"],
        "git_commit": about["git_commit"],
        "versions": about["versions"],
        "date": about["started"][:10],
    }


def main() -> None:
    """Write the record beside the others and the overview into docs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--minutes", type=float, help="wall time of the whole command")
    parser.add_argument("--peak-mb", type=float, help="peak resident memory of the whole command, 10^6 bytes")
    parser.add_argument("--busy", action="store_true", help="something else ran on the machine")
    options = parser.parse_args()
    row = record(options.run, options.minutes, options.peak_mb, not options.busy)
    path = RESULTS / f"laptop_run-{slug(hardware())}-{row['date']}.json"
    path.write_text(json.dumps([row], indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(options.run / "plots" / "overview.png", IMAGE)
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
