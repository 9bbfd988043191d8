"""How much an open dashboard slows the training run that it shows, on the same machine.

    python benchmarks/dashboard_beside.py [--preset smoke] [--steps 40] [--rounds 6] [--allow-busy] [--dry-run]

One run trains with all cores while a page in headless Chromium is closed and open by turns, following the run; a block
of either kind is --steps steps. Steps in which the page is being opened or closed belong to neither. Times are those of
the steps (``seconds`` of metrics.jsonl): evaluation, checkpoints and looks inside the model are not in them, and the
run is set to have none while this measures. The bar is 3 % of the mean; the median of the steps hides an update that
falls into one step of ten, so both are told.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import Record, arguments, require_quiet, table, write_records
from dashboard_browser import DRAWN, browser_seconds, processor_seconds, start

_SETTLE = 6.0
"""Seconds after the figures are drawn in which a browser still tidies up."""


def train(folder: Path, preset: str, steps: int, threads: int) -> subprocess.Popen[bytes]:
    """The training run, in a process of its own; it is stopped when enough is measured."""
    from trine.train.config import train_preset

    tokens = train_preset(preset).stages[0].step_tokens * steps
    line = [sys.executable, "-m", "trine.cli", "train", "--preset", preset, "--tokens", str(tokens)]
    line += ["--runs", str(folder), "--run", "beside", "--allow-repeats", "--threads", str(threads)]
    line += ["--checkpoint-every", "0", "--probe-every", "0", "--eval.no-run"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL)


def seconds_of(folder: Path) -> list[float]:
    """Time of each step so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [float(json.loads(line)["seconds"]) for line in lines]


def block(folder: Path, training: subprocess.Popen[bytes], steps: int) -> list[float]:
    """Times of the next whole steps."""
    first = len(seconds_of(folder)) + 1  # the one under way began before
    while len(found := seconds_of(folder)) < first + steps:
        if training.poll() is not None:
            raise SystemExit("training ended before enough was measured")
        time.sleep(0.2)
    return found[first : first + steps]


def main() -> None:
    """Measure, print, record."""
    parser = arguments(__doc__)
    parser.add_argument("--preset", default="smoke", help="plan of the run; only its first stage is trained")
    parser.add_argument("--steps", type=int, default=40, help="of a block")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each kind")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped too
    cores = options.threads or len(os.sched_getaffinity(0))
    quiet = require_quiet(cores, options.allow_busy)
    from playwright.sync_api import sync_playwright

    times: dict[str, list[float]] = {"closed": [], "open": []}
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch) / "beside"
        training = train(Path(scratch), options.preset, 4 * options.steps * (options.rounds + 2) + 200, cores)
        dashboard = None
        try:
            while len(seconds_of(folder)) < 3:  # the first steps warm up
                if training.poll() is not None:
                    raise SystemExit("training did not start")
                time.sleep(0.5)
            dashboard, address = start(folder)
            chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            used = {"server": 0.0, "browser": 0.0, "time": 0.0}
            for number in range(options.rounds):
                times["closed"] += block(folder, training, options.steps)
                context = opened(browser, address)
                before = processor_seconds(dashboard.pid), browser_seconds(), time.perf_counter()
                times["open"] += block(folder, training, options.steps)
                after = processor_seconds(dashboard.pid), browser_seconds(), time.perf_counter()
                for name, was, now in zip(used, before, after, strict=True):
                    used[name] += now - was
                context.close()
                time.sleep(_SETTLE / 2)
                medians = [1e3 * statistics.median(times[kind]) for kind in times]
                print(f"round {number + 1}: medians so far {medians[0]:.0f} and {medians[1]:.0f} ms", flush=True)
            browser.close()
        finally:
            for process in (dashboard, training):
                if process is not None:
                    process.terminate()
                    process.wait()
    share = {name: used[name] / used["time"] for name in ("server", "browser")}
    note = f"page: {share['server']:.1%} of a core in the server, {share['browser']:.1%} in the browser"
    records = [
        Record(
            "dashboard_beside", f"step of {options.preset}, page {kind}", "trine", 1e3 * statistics.mean(found),
            median_ms=1e3 * statistics.median(found), quiet=quiet, threads=cores, note=note if kind == "open" else None,
        )
        for kind, found in times.items()
    ]  # fmt: skip
    print(table(records), "the first time is the mean", note, sep="\n")
    for name, of in (("mean", statistics.mean), ("median", statistics.median)):
        print(f"{name}: an open page slows a step by {of(times['open']) / of(times['closed']) - 1:+.1%}")
    if not options.dry_run:
        print(write_records("dashboard_beside", records, packages=("dash", "plotly")))


def opened(browser: Any, address: str) -> Any:
    """A page that follows the run, its figures drawn, and settled."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    begun = time.perf_counter()
    page.goto(address, timeout=120_000)  # every core has other work
    while not page.evaluate(DRAWN):
        time.sleep(0.1)
    print(f"opened and drawn in {time.perf_counter() - begun:.1f} s", flush=True)
    time.sleep(_SETTLE)
    return context


if __name__ == "__main__":
    main()
