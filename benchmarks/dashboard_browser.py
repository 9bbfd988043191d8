"""How fast the dashboard is in headless Chromium, and what its server takes, on the synthesised run of 92 x 896 x 2000.

    python benchmarks/dashboard_browser.py [--demo runs/demo] [--allow-busy] [--dry-run]

Times are of the page's own clock, from the event (navigation, the slider, the request that found a new step) until the
frame after the figures changed was drawn. The demo is synthesised first where it is not there (minutes).
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import Record, arguments, require_quiet, table, write_records

CLICK = """
async ([step, wanted]) => {
  const bar = document.getElementById('step');
  const seen = plot => {
    const image = plot.querySelector('.imagelayer image');
    const drawn = image || plot.querySelector('.scatterlayer path, .points path');
    return drawn.getAttribute(image ? 'href' : 'd');
  };
  const plots = [...document.querySelectorAll('.js-plotly-plot')].filter((one, i) => wanted.includes(i));
  const before = plots.map(seen);
  const begun = performance.now();
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(bar, step);
  bar.dispatchEvent(new Event('input', {bubbles: true}));
  bar.dispatchEvent(new Event('change', {bubbles: true}));
  while (plots.some((one, i) => seen(one) === before[i]) && performance.now() - begun < 20000) {
    await new Promise(done => setTimeout(done, 4));
  }
  await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
  return performance.now() - begun;
}
"""
"""Moves the slider as a hand would; milliseconds until the figures of these places show something else."""

LIVE = """
async ([newest]) => {
  const limit = performance.now() + 60000;
  const title = 'Load of every expert, step ' + newest;
  const plot = document.querySelectorAll('.js-plotly-plot')[1];
  const line = () => plot.querySelector('.scatterlayer path').getAttribute('d');
  const before = line(), told = () => document.querySelector('h2').innerText.startsWith(title);
  while ((!told() || line() === before) && performance.now() < limit) {
    await new Promise(done => setTimeout(done, 4));
  }
  await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
  const now = performance.now();
  const asked = performance.getEntriesByType('resource').filter(
    one => one.name.includes('/figures') && one.encodedBodySize > 1000).pop();
  performance.clearResourceTimings();
  return [now - asked.startTime, performance.timeOrigin + now];
}
"""
"""Waits for a step; milliseconds from the request that found it until the two figures in sight show it."""

DRAWN = """
() => {
  const plots = [...document.querySelectorAll('.js-plotly-plot')];
  return plots.length > 0 && ![...document.querySelectorAll('.drawing')].some(
    one => one.trine.stale && one.getBoundingClientRect().top < innerHeight);
}
"""


def memory(pid: int, name: str) -> int:
    """A figure of a process's memory, bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def processor_seconds(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def browser_seconds() -> float:
    """CPU seconds of this process's browser so far, all its processes together."""
    children: dict[int, list[int]] = {}
    for found in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(found.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(found.parent.name))
        except OSError:
            continue  # it ended
    total, waiting = 0.0, list(children.get(os.getpid(), []))
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            if "chrom" in Path(f"/proc/{pid}/comm").read_text():
                total += processor_seconds(pid)
        except OSError:
            continue
    return total


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """The dashboard in a process of its own, and its address."""
    line = [sys.executable, "-m", "trine.cli", "dash", str(folder), "--port", "0"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    if found is None:
        raise SystemExit("trine dash did not start")
    return process, found.group(0)


def first_paints(browser: Any, address: str, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds until something is painted, and until every figure of the Balance page is drawn."""
    painted, complete = [], []
    for _ in range(repeats):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        page.goto(address, wait_until="commit")
        while not page.evaluate(DRAWN):
            time.sleep(0.01)
        complete.append(page.evaluate("new Promise(done => requestAnimationFrame(() => done(performance.now())))"))
        painted.append(
            page.evaluate("performance.getEntriesByName('first-contentful-paint').map(one => one.startTime)[0]")
        )
        context.close()
    return painted, complete


def live_updates(page: Any, folder: Path, steps: int) -> tuple[list[float], list[float]]:
    """Writes steps with the real recorder; milliseconds from the request that found one, and from its being written."""
    import torch

    from trine.balance.record_format import FILE_NAME
    from trine.balance.recorder import Recorder
    from trine.balance.window import Window
    from trine.views.demo import Loads, demo_sizes

    size, _ = demo_sizes()["demo-quantile"]
    sizes = {"layers": size.layers, "experts": size.experts, "top_k": size.top_k, "ranks": size.ranks}
    recorder, loads = Recorder(folder / FILE_NAME, **sizes, keep=size.keep), Loads(size)
    updates, waits = [], []
    for step in range(size.steps + 1, size.steps + 1 + steps):
        recorder.record(step, Window(**{name: torch.from_numpy(one) for name, one in loads.step(step).items()}))
        recorder.flush()
        written = time.time() * 1000
        update, drawn = page.evaluate(LIVE, [step])
        updates.append(update)
        waits.append(drawn - written)
        time.sleep(0.3)
    recorder.close()
    return updates, waits


def main() -> None:
    """Measure, print, record."""
    parser = arguments(__doc__)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="folder of the synthesised runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="live updates")
    options = parser.parse_args()
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "trine.views.demo", str(options.demo)], check=True)
    print(f"demo: {time.perf_counter() - begun:.1f} s (0 when it was there)")
    quiet = require_quiet(options.threads or os.cpu_count() or 1, options.allow_busy)
    from playwright.sync_api import sync_playwright

    records: list[Record] = []

    def note(case: str, times: list[float], **more: Any) -> None:
        median = statistics.median(times) if times else None
        print(f"{case}: median {median or 0:.0f} ms, worst {max(times):.0f} ms of {len(times)}", flush=True)
        best = min(times) if times else None
        records.append(Record("dashboard", case, "trine", best, median_ms=median, quiet=quiet, **more))

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(shutil.copytree(options.demo / "demo-quantile", Path(scratch) / "demo-quantile"))
        process, address = start(folder)
        try:
            at_start = memory(process.pid, "VmRSS")
            chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            painted, complete = first_paints(browser, address, options.repeats)
            note("first paint", painted)
            note("every figure in sight drawn", complete)
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            page.goto(address)
            while not page.evaluate(DRAWN):
                time.sleep(0.05)
            time.sleep(1.5)
            steps = [str(step) for step in range(1990, 390, -79)]
            note("slider step, figures in sight", [page.evaluate(CLICK, [step, [0, 1]]) for step in steps])
            page.set_viewport_size({"width": 1280, "height": 2600})
            time.sleep(2.0)
            note("slider step, all figures in sight", [page.evaluate(CLICK, [one, [0, 1, 6, 7]]) for one in steps])
            page.set_viewport_size({"width": 1280, "height": 900})
            page.locator("#follow input").check()
            time.sleep(2.0)
            cpu, shown, wall = processor_seconds(process.pid), browser_seconds(), time.perf_counter()
            updates, waits = live_updates(page, folder, options.updates)
            cpu, wall = processor_seconds(process.pid) - cpu, time.perf_counter() - wall
            shown = browser_seconds() - shown
            note("live update, from the request that finds a step", updates)
            note("live update, from the step's being on disk", waits)
            print(
                f"a live update: {cpu / options.updates:.3f} s of the server's and {shown / options.updates:.3f} s of "
                f"the browser's processor time, one a {wall / options.updates:.2f} s"
            )
            idle, wall = processor_seconds(process.pid), time.perf_counter()
            time.sleep(10.0)
            idle = (processor_seconds(process.pid) - idle) / (time.perf_counter() - wall)
            print(f"server while nothing is new, a page open: {idle:.2%} of a core")
            peak = memory(process.pid, "VmHWM")
            records.append(Record("dashboard", "server memory, peak", "trine", quiet=quiet, peak_bytes=peak))
            print(
                f"server memory: {at_start / 1e6:.0f} MB at the start, {memory(process.pid, 'VmHWM') / 1e6:.0f} MB peak"
            )
            browser.close()
        finally:
            process.terminate()
            process.wait()
    print(table(records))
    if not options.dry_run:
        print(write_records("dashboard", records, packages=("dash", "plotly")))


if __name__ == "__main__":
    main()
