"""The dashboard's page: layout, controls and addresses. The only file that imports Dash (extra ``dashboard``).

Dash makes the page and its controls; `dash.js` asks `/figures` for what they choose and draws it, `dash_answer`
says what that is. Nothing is written, and nothing beyond the given runs can be named: a run is a number of the list
made at the start.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from trine.views import dash_guard
from trine.views.chart_render import FORMATS, export
from trine.views.dash_answer import Asked, Machine, answer, cell, linked, run_options, view_of
from trine.views.dash_state import PAGES, Runs, View, whole
from trine.views.dash_style import PAGE, THEME

try:
    from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html
except ImportError as _error:
    raise ValueError("dash: is not installed; in the clone: .venv/bin/pip install -e '.[dashboard]'") from _error

_TYPES = {"png": "image/png", "svg": "image/svg+xml", "csv": "text/csv; charset=utf-8"}
_RANKS = (0, 2, 4, 8, 16, 32, 64, 128)
_NEW_RUNS = 5.0
"""Seconds between two looks for runs that appeared."""


def build(
    paths: Sequence[str | Path],
    *,
    token: str = "",
    host: str = "127.0.0.1",
    every: float = 0.25,
    busy: Callable[[], bool] | None = None,
) -> Dash:
    """The application; ``.server`` is its WSGI side.

    Args:
        paths: folders of runs, or folders of such folders; nothing else is ever served.
        token: asked of every visitor; empty asks nobody.
        host: address it will be bound to; on this machine's own, only visits by its names are answered.
        every: seconds after which the page looks for something new.
        busy: whether something else needs the machine, so that the page looks less often; asks the machine by default.
    """
    runs = Runs(paths)
    app = Dash(
        "trine",
        title="Trine",
        update_title=None,  # type: ignore[arg-type]
        index_string=PAGE,
        include_assets_files=False,
        suppress_callback_exceptions=True,
        serve_locally=True,
    )
    app.layout = lambda: _layout(runs)
    _callbacks(app, max(250, round(every * 1000)))
    _addresses(app, runs, busy or Machine().busy)
    dash_guard.protect(app.server, token, host)
    return app


# -- layout ----------------------------------------------------------------------------------------------------------


def _layout(runs: Runs) -> Any:
    """The page with its controls; the figures come into ``figures`` by the script, and Dash knows nothing of them."""
    from flask import has_request_context, request

    # The page's own address comes with the question for its controls; what it chooses is checked like any other.
    from_page = urlsplit(request.referrer or "") if has_request_context() else urlsplit("")
    asked = from_page.path
    words = dict(parse_qsl(from_page.query))
    page = asked.strip("/") if asked.strip("/") in PAGES else "balance"
    dark = has_request_context() and request.cookies.get("trine_theme") == "dark"
    sides, view = linked(runs, words), View.of(words)
    spans = [one for side in sides if (one := runs.span(side, page)) is not None]
    span = (min(one[0] for one in spans), max(one[1] for one in spans)) if spans else (1, 1)
    button = html.Button("Light" if dark else "Dark", id="theme-button", **_aria(label="Switch between light and dark"))
    right = html.Div([html.Span("", id="live", className="live", role="status"), button], className="right")
    links = [dcc.Link(title, href="/" if name == "balance" else f"/{name}") for name, title in PAGES.items()]
    brand, pages = html.Span("Trine", className="brand"), html.Nav(links, id="pages", **_aria(label="Pages"))
    body = [
        html.H1("", id="heading"),
        html.Div(id="notes", className="notes"),
        html.Div(id="tiles"),
        html.Div(id="figures", className="figures"),
        html.Div(id="tables"),
    ]
    # Given its path it does not report it, which would draw everything twice.
    # Without refresh: the script writes what is chosen into the address, which is no reason to load it anew.
    given = {"pathname": asked} if asked else {}
    address = dcc.Location(id="address", refresh=False, **given)
    return html.Div(
        [
            address,
            dcc.Store(id="theme", data="dark" if dark else "light"),
            dcc.Store(id="watching"),
            html.Header([brand, pages, right]),
            _controls(runs, page, sides, span, view),
            html.Main(body, id="main", tabIndex="-1"),
        ]
    )


def _aria(**words: str) -> Any:
    """Attributes for whoever cannot see the page."""
    return {f"aria-{name}": text for name, text in words.items()}


def _controls(runs: Runs, page: str, sides: tuple[int, ...], span: tuple[int, int], view: View) -> Any:
    def labelled(text: str, control: Any, name: str = "") -> Any:
        label = html.Label(text, htmlFor=control.id, id=f"{control.id}-label")
        return html.Div([label, control], className=f"control {name}")

    def choice(text: str, name: str, values: dict[str, str]) -> Any:
        radio = dcc.RadioItems(values, next(iter(values)), id=name, className="choices", inline=True)
        return html.Fieldset([html.Legend(text), radio], className="control balance-only")

    at = span[1] if view.step is None else min(max(view.step, span[0]), span[1])
    step = dcc.Input(id="step", type="range", min=span[0], max=span[1], step=1, value=at)
    said = html.Output("", id="step-text", htmlFor="step", className="stepvalue")
    options, second = run_options(runs), sides[1] if len(sides) > 1 else None
    named = dict(runs.layers(sides[0], page)) if sides and view.layer is not None else {}
    layer = view.layer if view.layer in named else -1
    layers = [{"value": -1, "label": "all layers"}]
    layers += [{"value": layer, "label": named[layer]}] if layer in named else []
    ranks = [{"value": one, "label": str(one) if one else "the run's"} for one in _RANKS]
    return html.Div(
        [
            labelled("Run", dcc.Dropdown(options, sides[0] if sides else 0, id="run-a", clearable=False), "run"),
            labelled("Beside it", dcc.Dropdown(options, second, id="run-b", placeholder="no other run"), "run"),
            html.Div(
                [
                    html.Label("Step", htmlFor="step"),
                    html.Div([step, said], className="steprow"),
                ],
                className="control step",
            ),
            html.Fieldset(
                [
                    html.Legend("Live"),
                    dcc.Checklist(
                        {"on": "follow"}, ["on"] if view.step is None else [],
                        id="follow", className="choices", inline=True,
                    ),
                ],
                className="control",
            ),
            choice("Heatmap", "what", {"load": "load", "bias": "bias", "saturation": "saturation"}),
            choice("Experts by", "order", {"number": "number", "value": "value"}),
            labelled("Layer", dcc.Dropdown(layers, layer, id="layer", clearable=False), "layer with-layers"),
            labelled("Ranks", dcc.Dropdown(ranks, 0, id="ranks", clearable=False), "layer balance-only"),
        ],
        className="controls",
        role="region",
        **_aria(label="What is shown"),
    )  # fmt: skip


# -- callbacks -------------------------------------------------------------------------------------------------------


def _callbacks(app: Any, every: int) -> None:
    """Two: the theme, and whatever else is chosen; both run in the page."""
    app.clientside_callback(
        THEME,
        [Output("theme", "data"), Output("theme-button", "children")],
        Input("theme-button", "n_clicks"),
        State("theme", "data"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        ClientsideFunction("trine", "choose"),
        Output("follow", "value"),
        Input("address", "pathname"),
        Input("run-a", "value"),
        Input("run-b", "value"),
        Input("step", "value"),
        Input("follow", "value"),
        Input("layer", "value"),
        Input("what", "value"),
        Input("order", "value"),
        Input("ranks", "value"),
        Input("theme", "data"),
    )
    app.clientside_callback(
        f"function(main) {{ window.trine.watch({every}); return true; }}",
        Output("watching", "data"),
        Input("main", "id"),
    )


# -- addresses -------------------------------------------------------------------------------------------------------


def _addresses(app: Any, runs: Runs, busy: Callable[[], bool]) -> None:
    from flask import Response, request

    looked = [-math.inf]
    turn = threading.Lock()

    def look(now: bool = False) -> None:
        """For runs that came or went, now and then."""
        with turn:
            if now or time.monotonic() - looked[0] > _NEW_RUNS:
                looked[0] = time.monotonic()
                runs.refresh()

    @app.server.get("/figures")
    def figures() -> Any:
        look(now="seen" not in request.args)
        text = answer(runs, Asked.of(runs, request.args), busy())
        return Response(status=204) if text is None else Response(text, content_type="application/json")

    @app.server.get("/cell")
    def told() -> Any:
        row, column = whole(request.args.get("row")), whole(request.args.get("column"))
        text = "" if None in (row, column) else cell(runs, Asked.of(runs, request.args), row, column)  # type: ignore[arg-type]
        return Response(text, content_type="text/plain; charset=utf-8")

    @app.server.get("/export/<key>.<kind>")
    def exported(key: str, kind: str) -> Any:
        asked = request.args
        page, number = asked.get("page", "balance"), whole(asked.get("runs"))
        if kind not in FORMATS or page not in PAGES or number is None or runs.run(number) is None:
            return dash_guard.sentence("There is no such figure.", 404)
        view, run = view_of(runs, number, asked, page), runs.runs[number].name
        chart = next((one for one in runs.charts(page, number, view) if one.key == key), None)
        if chart is None or chart.empty:
            return dash_guard.sentence(f"There is nothing to save: {chart.empty if chart else 'no such figure.'}", 404)
        name = f"{_cleaned(run)}-{chart.key}{'' if view.step is None else f'-step-{view.step}'}.{kind}"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(export(chart, kind, run), mimetype=None, content_type=_TYPES[kind], headers=headers)  # type: ignore[arg-type]

    @app.server.get("/metrics")
    def metrics() -> Any:
        from trine.views.prometheus_page import CONTENT_TYPE, metrics_text

        look()  # there may be no page open that does
        return Response(metrics_text(runs.runs), content_type=CONTENT_TYPE)


def _cleaned(name: str) -> str:
    """A run's name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "run"


def serve(app: Any, host: str, port: int) -> Any:
    """A server of the application, bound but not started: ``serve_forever`` and ``shutdown`` do that.

    Raises:
        ValueError: the address cannot be had.
    """
    return dash_guard.bind(app.server, host, port)
