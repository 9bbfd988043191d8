"""Pictures of the dashboard for the docs: docs/images/dashboard-*.png, of the synthesised runs, in headless Chromium.

python benchmarks/dashboard_shots.py [--demo runs/demo] [--out docs/images]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from dashboard_browser import CLICK, DRAWN, start


def opened(browser: Any, address: str, width: int, height: int, scheme: str = "light") -> Any:
    """A page with all its figures drawn."""
    page = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
    ).new_page()
    page.goto(address)
    settle(page)
    return page


def settle(page: Any) -> None:
    """Wait until every figure is drawn and nothing is under way."""
    page.wait_for_timeout(800)
    while not page.evaluate(DRAWN):
        page.wait_for_timeout(100)
    page.wait_for_timeout(1200)


def main() -> None:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    subprocess.run([sys.executable, "-m", "trine.views.demo", str(options.demo)], check=True)
    options.out.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    def save(page: Any, name: str, full: bool = False) -> None:
        path = options.out / f"dashboard-{name}.png"
        page.screenshot(path=path, full_page=full)
        print(path)

    process, address = start(options.demo)
    try:
        with sync_playwright() as playwright:
            chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = opened(browser, address, 1280, 1180)
            choose(page, "run-a", "demo-quantile")
            page.evaluate(CLICK, ["1470", [0, 1]])
            settle(page)
            save(page, "balance")
            page.evaluate(CLICK, ["820", [0, 1]])
            choose(page, "layer", "layer 37")
            # figures out of sight are not drawn
            page.set_viewport_size({"width": 1280, "height": 2700})
            settle(page)
            save(page, "layer", full=True)
            for name in ("Depth", "Gates", "Training"):
                page.get_by_role("navigation").get_by_text(name).click()
                while not page.locator("h1").inner_text().startswith(name):
                    page.wait_for_timeout(100)
                page.set_viewport_size({"width": 1280, "height": 1500 if name == "Training" else 1800})
                settle(page)
                save(page, name.lower(), full=True)
            page = opened(browser, address, 1440, 1250, "dark")
            choose(page, "run-a", "demo-quantile")
            choose(page, "run-b", "demo-sign")
            page.evaluate(CLICK, ["320", [0, 1]])
            settle(page)
            save(page, "compare-dark")
            page = opened(browser, address, 390, 844)
            choose(page, "run-a", "demo-quantile")
            page.locator(".figure").first.scroll_into_view_if_needed()
            page.wait_for_timeout(800)
            save(page, "phone")
            browser.close()
    finally:
        process.terminate()
        process.wait()


def choose(page: Any, control: str, text: str) -> None:
    """Pick an entry of a list, as a hand would."""
    page.locator(f"#{control}").click()
    search = page.locator("input.dash-dropdown-search")
    if search.count():
        search.first.fill(text)
    page.locator(".dash-dropdown-content, .dash-options-list").get_by_text(text, exact=True).first.click()
    settle(page)


if __name__ == "__main__":
    main()
