"""The dashboard in headless Chromium, with every address but this machine's own shut off."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trine.balance.record_format import FILE_NAME
from trine.balance.recorder import Recorder
from trine.balance.window import Window
from trine.views import dash_app
from trine.views.demo import DemoSize, Loads, write_demo

pytestmark = pytest.mark.browser

SIZE = DemoSize(layers=4, experts=32, top_k=2, steps=40, keep=40, tokens=2048, ranks=4)
HOSTILE = "<img src=x onerror=document.title='taken'>"
NAMED = {"button", "link", "slider", "checkbox", "radio", "combobox", "textbox", "searchbox", "spinbutton", "img"}

# WCAG 2.2, 1.4.3: contrast of what is written with the nearest ground that is painted behind it.
CONTRAST = """
() => {
  const part = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => { const f = c.map(part);
    return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2]; };
  const rgb = s => { const m = s.match(/[\\d.]+/g); return m ? m.map(Number) : [0, 0, 0, 0]; };
  const poor = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
    if (!text || ['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(one.tagName)) continue;
    if (!one.checkVisibility({visibilityProperty: true})) continue;
    const style = getComputedStyle(one), svg = one instanceof SVGElement;
    const ink = rgb(svg ? style.fill : style.color);
    let ground = [255, 255, 255];
    for (let at = one; at; at = at.parentElement) {
      const c = rgb(getComputedStyle(at).backgroundColor);
      if (c.length < 4 || c[3] > 0.99) { if (c.length >= 3) { ground = c; break; } }
    }
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
    if (ratio < (size >= 24 ? 3 : 4.5)) poor.push(text.slice(0, 40) + ' ' + ratio.toFixed(2));
  }
  return poor;
}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    write_demo(folder, SIZE, "run", "quantile")
    return folder


@pytest.fixture
def served(made: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    for name in ("alpha", "beta", "gamma"):
        shutil.copytree(made, tmp_path / "runs" / name)
    paths = [tmp_path / "runs" / "alpha", tmp_path / "runs"]
    server = dash_app.serve(dash_app.build(paths, every=0.25, busy=lambda: False), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.port}", tmp_path / "runs" / "alpha"
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page, what it asked for elsewhere, and what it complained of."""

    def __init__(
        self, browser: Any, address: str, width: int = 1280, height: int = 2600, scheme: str = "light"
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
        )
        self.elsewhere: list[str] = []
        self.errors: list[str] = []
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)

        def only_here(route: Any) -> None:
            if route.request.url.startswith((address, "data:", "blob:")):
                route.continue_()
            else:
                self.elsewhere.append(route.request.url)
                route.abort()

        self.page.route("**/*", only_here)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)

    def wait(self, condition: str) -> None:
        """Until an expression is true. Not Playwright's own way: that needs eval, which the page's policy forbids."""
        for _ in range(300):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"never came true: {condition}; the page says: {self.page.inner_text('body')[:2000]}")

    def goto(self, address: str, figures: int = 1) -> Any:
        self.page.goto(address)
        self.wait(f"document.querySelectorAll('.js-plotly-plot').length >= {figures}")
        return self.page

    def done(self) -> None:
        assert self.elsewhere == [] and self.errors == []
        self.context.close()


def test_it_loads_without_a_network_and_the_slider_moves_by_keys(browser: Any, served: tuple[str, Path]) -> None:
    opened = Opened(browser, served[0])
    page = opened.goto(served[0], 8)
    assert page.title() == "Trine" and page.locator("h1").inner_text() == "Balance: alpha"
    page.locator("#step").focus()
    page.keyboard.press("ArrowLeft")
    opened.wait("document.body.innerText.includes('Load of every expert, step 39')")
    assert page.locator("#step-text").inner_text() == "step 39 of 40"
    assert not page.locator("#follow input").is_checked()  # looking at the past is not following
    page.keyboard.press("Home")
    opened.wait("document.body.innerText.includes('Load of every expert, step 1')")
    opened.done()


def test_a_bad_figure_has_a_mark_besides_its_colour(browser: Any, served: tuple[str, Path]) -> None:
    """A character, not the code of one: whose letters stood on the page when the looks became a file."""
    opened = Opened(browser, served[0])
    page = opened.goto(served[0], 8)
    mark = page.evaluate("""() => {
      const tile = document.createElement('div');
      tile.className = 'tile bad';
      tile.innerHTML = '<div class="value">1</div>';
      document.body.append(tile);
      const content = getComputedStyle(tile.firstChild, '::before').content;
      tile.remove();
      return content;
    }""")
    assert mark == '"\u25b2\u00a0"'
    opened.done()


def test_pressing_the_heatmap_zooms_to_a_layer_and_follows_the_expert(browser: Any, served: tuple[str, Path]) -> None:
    opened = Opened(browser, served[0])
    page = opened.goto(served[0], 8)
    box = page.locator(".figure").first.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 5.5 / 32, box["y"] + box["height"] * 2.5 / 4)  # the third row
    page.wait_for_timeout(300)
    page.mouse.down()
    page.mouse.up()
    opened.wait("document.body.innerText.includes('Load of the experts of layer 3')")  # the first is dense
    opened.wait("document.body.innerText.includes('expert 5')")
    assert page.locator("#layer").inner_text().strip() == "layer 3"
    opened.wait("location.search.includes('layer=3')")
    page.get_by_role("navigation").get_by_text("Gates").click()
    opened.wait("document.body.innerText.includes('Openness of the output gates of the heads of layer 3')")
    assert page.locator("#layer").is_visible() and page.locator("#layer").inner_text().strip() == "layer 3"
    page.locator("#layer").click()
    page.locator(".controls").get_by_text("layer 0", exact=True).first.click()
    opened.wait("document.body.innerText.includes('Log-decay of the heads of layer 0')")
    page.get_by_role("navigation").get_by_text("Balance").click()
    opened.wait("document.querySelectorAll('.js-plotly-plot').length >= 8")
    opened.wait("document.body.innerText.includes('Load by layer')")  # that one has no experts
    opened.wait("document.querySelector('#layer').innerText.trim() === 'layer 0 (not here)'")
    page.get_by_role("navigation").get_by_text("Gates").click()
    opened.wait("document.body.innerText.includes('Log-decay of the heads of layer 0')")
    opened.done()


def test_a_live_run_grows_and_its_alert_fires(browser: Any, served: tuple[str, Path]) -> None:
    address, run = served
    opened = Opened(browser, address)
    page = opened.goto(address, 8)
    loads = Loads(SIZE)
    sizes = {"layers": SIZE.layers, "experts": SIZE.experts, "top_k": SIZE.top_k, "ranks": SIZE.ranks}
    recorder = Recorder(run / FILE_NAME, **sizes, keep=SIZE.keep)
    for step in (41, 42):
        recorder.record(step, Window(**{name: torch.from_numpy(one) for name, one in loads.step(step).items()}))
    recorder.close()
    with open(run / "events.jsonl", "a") as file:
        event = {"kind": "balance_alert", "step": 42, "rule": "max_vio", "begins": True, "count": 1, "text": HOSTILE}
        file.write(json.dumps(event) + "\n")
    opened.wait("document.querySelector('#live').innerText === 'newest step 42'")
    opened.wait("document.body.innerText.includes('Load of every expert, step 42')")
    row = page.locator("table.alertlist tbody tr").first
    opened.wait("document.querySelector('table.alertlist tbody tr').innerText.includes('42')")
    assert "begins, still on" in row.inner_text() and HOSTILE in row.inner_text()
    assert page.title() == "Trine"  # the text was not taken for markup
    shutil.rmtree(run)
    opened.wait("document.body.innerText.includes('does not exist (any more)')")
    opened.done()


def test_two_runs_beside_each_other_and_every_page(browser: Any, served: tuple[str, Path]) -> None:
    opened = Opened(browser, served[0])
    page = opened.goto(served[0], 8)
    page.locator("#run-b").click()
    page.get_by_text("gamma", exact=True).click()
    opened.wait("document.querySelectorAll('.drawing').length === 16")
    assert page.locator("h1").inner_text() == "Balance: alpha beside gamma"
    for name in ("Depth", "Gates", "Training"):
        page.get_by_role("navigation").get_by_text(name).click()
        opened.wait(f"document.querySelector('h1').innerText.startsWith('{name}')")
        opened.wait("document.querySelectorAll('.js-plotly-plot').length > 0")
    assert not page.locator("#layer").is_visible()
    page.go_back()
    opened.wait("document.querySelector('h1').innerText.startsWith('Gates')")
    opened.done()


def test_a_view_survives_a_reload_and_can_be_linked(browser: Any, served: tuple[str, Path]) -> None:
    opened = Opened(browser, served[0])
    page = opened.goto(served[0] + "/?run=gamma&step=11&layer=2", 8)
    opened.wait("document.querySelector('#step-text').innerText === 'step 11 of 40'")
    assert page.locator("h1").inner_text() == "Balance: gamma"
    assert "Load of the experts of layer 2, step 11" in page.inner_text("#figures")
    assert not page.locator("#follow input").is_checked()
    page.locator("#step").focus()
    page.keyboard.press("ArrowRight")
    opened.wait("location.search === '?run=gamma&step=12&layer=2'")
    page.reload()
    opened.wait("document.querySelectorAll('.js-plotly-plot').length >= 8")
    opened.wait("document.body.innerText.includes('Load of the experts of layer 2, step 12')")
    page.get_by_role("navigation").get_by_text("Training").click()
    opened.wait("document.querySelector('h1').innerText === 'Training: gamma'")
    opened.wait("location.pathname + location.search === '/training?run=gamma&step=12&layer=2'")
    page.locator("#follow input").check()
    opened.wait("location.search === '?run=gamma&layer=2'")
    page.go_back()
    opened.wait("document.querySelector('h1').innerText === 'Balance: gamma'")
    opened.done()


def test_a_server_that_is_gone_is_told_and_found_again(browser: Any, served: tuple[str, Path]) -> None:
    opened = Opened(browser, served[0])
    page = opened.goto(served[0], 8)
    refused: list[int] = []

    def refuse(route: Any) -> None:
        refused.append(1)
        route.abort() if len(refused) < 3 else route.fulfill(status=403, body="no")

    page.route("**/figures?*", refuse)
    opened.wait("/^connection lost, last answer \\d\\d:\\d\\d$/.test(document.querySelector('#live').innerText)")
    while len(refused) < 5:
        page.wait_for_timeout(100)
    assert page.locator("#live").inner_text().startswith("connection lost") and page.evaluate(CONTRAST) == []
    page.unroute("**/figures?*")
    opened.wait("document.querySelector('#live').innerText === 'newest step 40'")
    assert len(opened.errors) == len(refused) and opened.elsewhere == []
    opened.context.close()


def test_a_run_that_is_silent_says_since_when_and_the_line_stays_on_the_data(
    browser: Any, served: tuple[str, Path]
) -> None:
    record = json.loads((served[1] / "run.json").read_text())
    (served[1] / "run.json").write_text(json.dumps({**record, "planned_steps": 100}))
    lines = (served[1] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (served[1] / "metrics.jsonl").write_text("".join(lines[:30]))  # the recorder is further on
    (served[1] / "events.jsonl").write_text("")  # of the demo, of steps after that one
    then = time.time() - 245
    os.utime(served[1] / "metrics.jsonl", (then, then))
    opened = Opened(browser, served[0])
    page = opened.goto(served[0] + "/training?run=alpha&step=38", 5)
    opened.wait("document.querySelector('#live').innerText === 'newest step 40, last step 4 min ago'")
    opened.wait("document.querySelector('#step-text').innerText === 'step 38 of 40'")
    edge = "(() => { const at = document.querySelector('.drawing'), axis = at.trine.box._fullLayout.xaxis; return "
    edge += "[parseFloat(at.trine.cursor.style.left) - axis._offset, axis.d2p(30), at.trine.cursor.hidden]; })()"
    left, last, hidden = page.evaluate(edge)
    assert left == pytest.approx(last, abs=0.5) and not hidden
    opened.done()


def test_figures_are_drawn_when_they_come_into_sight(browser: Any, served: tuple[str, Path]) -> None:
    opened = Opened(browser, served[0], height=700)
    page = opened.goto(served[0], 1)
    page.wait_for_timeout(1000)
    assert 1 <= page.locator(".js-plotly-plot").count() < 8
    page.locator("#step").focus()
    page.keyboard.press("Home")
    opened.wait("document.body.innerText.includes('Load of every expert, step 1')")
    page.locator(".drawing").last.scroll_into_view_if_needed()
    opened.wait("[...document.querySelectorAll('.drawing')].pop().querySelector('.js-plotly-plot')")
    assert page.locator("h2").nth(7).inner_text() == "Load of 4 ranks, step 1"
    assert not page.locator(".cursor").nth(4).is_hidden()  # of a figure over steps
    opened.done()


def test_a_cell_is_told_under_the_pointer_and_by_keys(browser: Any, served: tuple[str, Path]) -> None:
    opened = Opened(browser, served[0])
    page = opened.goto(served[0], 8)
    box = page.locator(".figure").first.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 9.5 / 32, box["y"] + box["height"] * 1.5 / 4)
    opened.wait("document.querySelector('.cell').innerText.startsWith('Layer 2, expert 9: load ')")
    page.mouse.move(5, 5)
    opened.wait("document.querySelector('.cell').hidden")
    cells = page.locator(".drawing").first
    cells.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowDown"):
        cells.press(key)
    opened.wait("document.querySelector('.cell').innerText.startsWith('Layer 4, expert 10: load ')")
    cells.press("Escape")
    assert page.locator(".cell").is_hidden()
    cells.press("Enter")
    opened.wait("document.body.innerText.includes('Load of the experts of layer 4')")
    opened.done()


def test_training_has_its_events_as_a_table(browser: Any, served: tuple[str, Path]) -> None:
    with open(served[1] / "events.jsonl", "a") as file:
        file.write(json.dumps({"kind": "non_finite", "step": 31, "tensor": HOSTILE}) + "\n")
    opened = Opened(browser, served[0])
    page = opened.goto(served[0] + "/training", 5)
    assert [one.inner_text() for one in page.locator("#tables h2").all()] == ["Events", "Alerts"]
    row = page.locator("#tables section").first.locator("tbody tr").first.inner_text()
    assert row.split("\t") == ["31", "not finite", "", f"The update was not applied: {HOSTILE} is not finite."]
    assert page.locator("nav a[aria-current=page]").inner_text() == "Training"
    assert page.evaluate(CONTRAST) == [] and page.title() == "Trine"
    opened.done()


def test_figures_are_saved_from_the_page(browser: Any, served: tuple[str, Path], tmp_path: Path) -> None:
    opened = Opened(browser, served[0])
    page = opened.goto(served[0], 8)
    for kind, begins in (("PNG", b"\x89PNG"), ("SVG", b"<?xml"), ("CSV", b"series,step")):
        with page.expect_download() as download:
            page.get_by_role("link", name=re.compile(f"^MaxVio over steps as {kind}")).click()
        download.value.save_as(tmp_path / "saved")
        assert (tmp_path / "saved").read_bytes().startswith(begins)
    opened.done()


PAGES = {"": 8, "depth": 4, "gates": 8, "training": 5}
"""Addresses, and the least number of figures there."""


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_reads_well(browser: Any, served: tuple[str, Path], width: int, scheme: str, name: str) -> None:
    with open(served[1] / "events.jsonl", "a") as file:
        text = "largest load over mean load, less what sampling adds: 4.31 in layers 1, 2 and 3, above 4 for 20 steps"
        event = {"kind": "balance_alert", "step": 40, "rule": "rank_overload", "begins": True, "text": text}
        file.write(json.dumps(event) + "\n")
    opened = Opened(browser, served[0], width=width, height=2600 if width == 1280 else 4800, scheme=scheme)
    page = opened.goto(f"{served[0]}/{name}", PAGES[name])
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CONTRAST) == []
    # sentences are wrapped: no table is wider than its box, and what is in a cell not than the cell
    assert page.evaluate(
        "[...document.querySelectorAll('.tablebox, .tablebox td')].every(one => one.scrollWidth <= one.clientWidth + 1)"
    )
    assert page.locator(".tablebox").count() == {"": 1, "training": 2}.get(name, 0)
    if width == 1280:
        page.locator("#theme-button").click()
        other = "dark" if scheme == "light" else "light"
        opened.wait(f"document.documentElement.dataset.theme === '{other}'")
        page.wait_for_timeout(1500)
        assert page.evaluate(CONTRAST) == []
    opened.done()


@pytest.mark.parametrize("name", PAGES)
def test_everything_has_a_name_and_can_be_reached_by_keys(browser: Any, served: tuple[str, Path], name: str) -> None:
    opened = Opened(browser, served[0])
    page = opened.goto(f"{served[0]}/{name}", PAGES[name])
    nodes = opened.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    shown = [one for one in nodes if not one.get("ignored") and one.get("role", {}).get("value") in NAMED]
    assert len(shown) > 20
    assert [one for one in shown if not one.get("name", {}).get("value", "").strip()] == []
    assert page.evaluate("document.documentElement.lang") == "en"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(one => Number(one.tagName[1]))")
    assert levels.count(1) == 1 and levels[0] == 1 and max(levels) == 2
    assert all(page.locator(one).count() == 1 for one in ("header", "nav", "main", "footer"))
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(
            "(() => { const one = document.activeElement, style = getComputedStyle(one), "
            "box = one.closest('label, .dash-dropdown, [id]') || one; "
            "return [one === document.body ? 'BODY' : one.id || one.name || one.innerText.slice(0, 20), "
            "style.outlineStyle !== 'none' || "
            "style.boxShadow !== 'none' || getComputedStyle(box).outlineStyle !== 'none']; })()"
        ))  # fmt: skip
    reached = [one for one in reached if one[0] != "BODY"]  # past the last it begins again
    names = [one for one, _ in reached]
    assert names[0].startswith("Skip to") and "step" in names and "theme-button" in names and "run-a" in names
    assert ("layer" in names) == (name in ("", "gates")) and ("ranks" in names) == (name == "")
    assert [one for one, seen in reached if not seen] == []
    opened.done()
