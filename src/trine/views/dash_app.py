"""The dashboard's page: layout, callbacks and addresses. The only file that imports Dash (extra ``dashboard``).

What it shows comes from `dash_state`; here it becomes a page. Nothing is written, and nothing beyond the given runs can
be named: a run is a number of the list made at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from trine.views import dash_guard
from trine.views.balance_charts import share_axes
from trine.views.chart import Chart
from trine.views.chart_render import FORMATS, export
from trine.views.dash_state import PAGES, Runs, View, kind_of, whole
from trine.views.dash_style import CURSOR, PAGE, THEME
from trine.views.plotly_charts import to_plotly

try:
    from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update
except ImportError as _error:
    raise ValueError("dash: is not installed; in the clone: .venv/bin/pip install -e '.[dashboard]'") from _error

_CONFIG: Any = {"displayModeBar": False, "displaylogo": False, "responsive": True, "scrollZoom": False}
_TYPES = {"png": "image/png", "svg": "image/svg+xml", "csv": "text/csv; charset=utf-8"}
_RANKS = (0, 2, 4, 8, 16, 32, 64, 128)


def build(paths: Sequence[str | Path], *, token: str = "", host: str = "127.0.0.1", every: float = 1.0) -> Dash:
    """The application; ``.server`` is its WSGI side.

    Args:
        paths: folders of runs, or folders of such folders; nothing else is ever served.
        token: asked of every visitor; empty asks nobody.
        host: address it will be bound to; on this machine's own, only visits by its names are answered.
        every: seconds after which the page looks for something new.
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
    app.layout = lambda: _layout(runs, every)
    _callbacks(app, runs)
    _addresses(app, runs)
    dash_guard.protect(app.server, token, host)
    return app


# -- layout ----------------------------------------------------------------------------------------------------------


def _layout(runs: Runs, every: float) -> Any:
    """The page as it first shows, figures included, so that nothing has to be asked for again before it does."""
    from flask import has_request_context, request

    runs.refresh()
    asked = urlsplit(request.referrer or "").path if has_request_context() else ""
    dark = has_request_context() and request.cookies.get("trine_theme") == "dark"
    page, theme = _page_of(asked), "dark" if dark else "light"
    second = 1 if len(runs.paths) > 1 and len(runs) == 2 else None
    sides = _sides(runs, 0, second)
    spans = [one for one in map(runs.span, sides) if one is not None]
    span = (min(one[0] for one in spans), max(one[1] for one in spans)) if spans else (1, 1)
    values: dict[str, Any] = {"step": span[1]}
    links, heading, figures = _page(runs, page, sides, values, dark)
    balance = page == "balance"
    stores = [
        dcc.Store(id="theme", data=theme),
        dcc.Store(id="version", data=_versions(runs, 0, second)),
        dcc.Store(id="shape", data=0),
        dcc.Store(id="expert"),
        dcc.Store(id="nothing"),
    ]
    button = html.Button("Light" if dark else "Dark", id="theme-button", **_aria(label="Switch between light and dark"))
    newest = f"newest step {span[1]}" if spans else "no step yet"
    right = html.Div([html.Span(newest, id="live", className="live", role="status"), button], className="right")
    brand, pages = html.Span("Trine", className="brand"), html.Nav(links, id="pages", **_aria(label="Pages"))
    body = [
        html.H1(heading, id="heading"),
        html.Div(_told(runs, sides), id="notes", className="notes"),
        html.Div(_tiles(runs, sides, values) if balance else [], id="tiles"),
        html.Div(figures, id="figures", className="figures"),
        html.Div(_alerts(runs, sides) if balance else [], id="alerts"),
    ]
    # Given its path it does not report it, which would draw everything twice.
    address = dcc.Location(id="address", pathname=asked) if asked else dcc.Location(id="address")
    return html.Div(
        [
            address,
            *stores,
            dcc.Interval(id="tick", interval=max(250, round(every * 1000))),
            html.Header([brand, pages, right]),
            _controls(_run_options(runs), span, second, _layer_options(runs, sides)),
            html.Main(body, id="main", tabIndex="-1"),
        ]
    )


def _aria(**words: str) -> Any:
    """Attributes for whoever cannot see the page."""
    return {f"aria-{name}": text for name, text in words.items()}


def _told(runs: Runs, sides: list[int]) -> list[Any]:
    notes = [note if len(sides) == 1 else f"{runs.runs[one].name}: {note}" for one in sides for note in runs.notes(one)]
    return [html.P(note) for note in dict.fromkeys(notes)]


def _layer_options(runs: Runs, sides: list[int]) -> list[dict[str, Any]]:
    sizes = runs.data(sides[0]).sizes if sides else None
    layers = [{"value": i, "label": f"layer {i}"} for i in range(sizes[0] if sizes else 0)]
    return [{"value": -1, "label": "all layers"}, *layers]


def _page(
    runs: Runs, page: str, sides: list[int], values: dict[str, Any], dark: bool
) -> tuple[list[Any], str, list[Any]]:
    """Links to the pages, the heading, and the figures of one page."""
    links: list[Any] = []
    for name, title in PAGES.items():
        href = "/" if name == "balance" else f"/{name}"
        if name == page:
            links.append(html.A(title, href=href, **_aria(current="page")))
        else:
            links.append(dcc.Link(title, href=href))
    charts = _all_charts(runs, page, sides, values, {"step", "time"})
    names = [runs.runs[one].name for one in sides]
    figures = []
    for key in dict.fromkeys(one.key for side in charts for one in side):
        there = [(number, one) for number, side in zip(sides, charts, strict=True) for one in side if one.key == key]
        view = _view(runs, there[0][0], values)
        figures.append(_figure(page, [one for _, one in there], [number for number, _ in there], names, view, dark))
    return links, f"{PAGES[page]}: {' beside '.join(names)}" if names else PAGES[page], figures


def _controls(options: list[dict[str, Any]], span: tuple[int, int], second: int | None, layers: list[Any]) -> Any:
    def labelled(text: str, control: Any, name: str = "") -> Any:
        label = html.Label(text, htmlFor=control.id, id=f"{control.id}-label")
        return html.Div([label, control], className=f"control {name}")

    def choice(text: str, name: str, values: dict[str, str]) -> Any:
        radio = dcc.RadioItems(values, next(iter(values)), id=name, className="choices", inline=True)
        return html.Fieldset([html.Legend(text), radio], className="control balance-only")

    step = dcc.Input(id="step", type="range", min=span[0], max=span[1], step=1, value=span[1], debounce=0.05)
    said = html.Output(f"step {span[1]} of {span[1]}", id="step-text", htmlFor="step", className="stepvalue")
    ranks = [{"value": one, "label": str(one) if one else "as recorded"} for one in _RANKS]
    return html.Div(
        [
            labelled("Run", dcc.Dropdown(options, 0, id="run-a", clearable=False), "run"),
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
                    dcc.Checklist({"on": "follow"}, ["on"], id="follow", className="choices", inline=True),
                ],
                className="control",
            ),
            choice("Heatmap", "what", {"load": "load", "bias": "bias", "saturation": "saturation"}),
            choice("Experts by", "order", {"number": "number", "value": "value"}),
            labelled("Layer", dcc.Dropdown(layers, -1, id="layer", clearable=False), "layer balance-only"),
            labelled("Ranks", dcc.Dropdown(ranks, 0, id="ranks", clearable=False), "layer balance-only"),
        ],
        className="controls",
        role="region",
        **_aria(label="What is shown"),
    )  # fmt: skip


def _run_options(runs: Runs) -> list[dict[str, Any]]:
    names = [one.name for one in runs.runs]
    return [
        {"value": i, "label": name if names.count(name) == 1 else f"{name} ({i + 1})"} for i, name in enumerate(names)
    ]


def _versions(runs: Runs, first: Any, second: Any) -> list[str]:
    return [runs.version(first), runs.version(second) if second is not None else ""]


def _figure(page: str, charts: list[Chart], sides: list[int], names: list[str], view: View, dark: bool) -> Any:
    """One figure, of one run or of two side by side."""
    chart = charts[0]
    parts = []
    for side, (number, one) in enumerate(zip(sides, charts, strict=True)):
        name = {"key": one.key, "side": side}
        head = html.Div(
            [
                html.H2(one.title, id={"type": "title", **name}),
                html.Div(_links(page, one, number, view), id={"type": "save", **name}, className="save"),
            ],
            className="figurehead",
        )
        graph = dcc.Graph(
            id={"type": "figure", **name}, figure=_plot(page, one, view, dark), config=_CONFIG, responsive=True,
            style={"height": f"{round(290 * one.height)}px"},
        )  # fmt: skip
        who = [html.P(names[side], className="who")] if len(sides) > 1 else []
        caption = html.Figcaption(_caption(one), id={"type": "caption", **name})
        parts.append(html.Div([head, *who, graph, caption]))
    time = " overtime" if kind_of(page, chart.key) == "time" else ""
    if len(parts) > 1:
        return html.Figure(html.Div(parts, className="pairrow"), className=f"figure pair{time}")
    return html.Figure(parts, className=f"figure{' wide' if chart.wide else ''}{time}")


def _caption(chart: Chart) -> list[Any]:
    hidden = {"position": "absolute", "width": "1px", "height": "1px", "overflow": "hidden", "clipPath": "inset(50%)"}
    return [*(html.P(note) for note in chart.notes), html.Span(chart.description, style=hidden)]


def _links(page: str, chart: Chart, number: int, view: View) -> list[Any]:
    if chart.empty:
        return []
    asked = {"page": page, "run": number, "what": view.what, "order": view.order, "ranks": view.ranks}
    asked |= {name: one for name in ("step", "layer", "expert") if (one := getattr(view, name)) is not None}
    links = []
    for kind in FORMATS:
        label = f"{chart.title} as {kind.upper()}"
        href = f"/export/{chart.key}.{kind}?{urlencode(asked)}"
        links.append(html.A(kind.upper(), href=href, download=f"{chart.key}.{kind}", **_aria(label=label)))
    return links


def _plot(page: str, chart: Chart, view: View, dark: bool) -> dict[str, Any]:
    drawn = to_plotly(chart, dark)
    if kind_of(page, chart.key) == "time" and not chart.empty and view.step is not None:
        line = {"color": "#8a93a0", "width": 1.5}
        cursor = {"type": "line", "name": "cursor", "x0": view.step, "x1": view.step, "y0": 0, "y1": 1, "yref": "paper"}
        drawn["layout"]["shapes"].insert(0, cursor | {"line": line, "layer": "below"})
    return drawn


def _tiles(runs: Runs, sides: list[int], values: dict[str, Any]) -> list[Any]:
    found = []
    for number in sides:
        tiles = []
        for what, value, beside, bad in runs.tiles(number, _view(runs, number, values)):
            words = [html.Dt(what), html.Dd(value, className="value"), html.Dd(beside, className="beside")]
            tiles.append(html.Div(words, className=f"tile{' bad' if bad else ''}"))
        if tiles:
            who = [html.P(runs.runs[number].name, className="who")] if len(sides) > 1 else []
            found.append(html.Div([*who, html.Dl(tiles, className="tiles", style={"margin": "4px 0 12px"})]))
    return [html.Div(found, className="pairrow")] if len(found) > 1 else found


def _alerts(runs: Runs, sides: list[int]) -> list[Any]:
    found = []
    for number in sides:
        rows = []
        for step, rule, begins, text, still in runs.alerts(number):
            state = "begins, still on" if still else "begins" if begins else "ends"
            look = "on" if begins else "off"
            cells = [
                html.Td(f"{step}", className="number"),
                html.Td(rule),
                html.Td(state, className=look),
                html.Td(text),
            ]
            rows.append(html.Tr(cells))
        name = runs.runs[number].name
        head = html.H2("Alerts" if len(sides) == 1 else f"Alerts of {name}")
        if not rows:
            found.append(html.Section([head, html.P("None so far.")], className="alerts"))
            continue
        columns = html.Tr([html.Th(one, scope="col") for one in ("Step", "Rule", "State", "What")])
        table = html.Table([html.Thead(columns), html.Tbody(rows)], className="alertlist")
        box = html.Div(table, className="tablebox", tabIndex="0", role="region", **_aria(label=f"Alerts of {name}"))
        found.append(html.Section([head, box], className="alerts"))
    return found


# -- callbacks -------------------------------------------------------------------------------------------------------


def _page_of(path: str | None) -> str:
    name = (path or "/").strip("/") or "balance"
    return name if name in PAGES else "balance"


def _sides(runs: Runs, first: Any, second: Any) -> list[int]:
    found = [one for one in (whole(first), whole(second)) if one is not None and one < len(runs)]
    return list(dict.fromkeys(found)) if found else ([0] if len(runs) else [])


def _view(runs: Runs, number: int, values: dict[str, Any]) -> View:
    """What is looked at; of a run that ends earlier its last step."""
    view = View.of(values)
    span = runs.span(number)
    step = None if span is None or view.step is None else min(max(view.step, span[0]), span[1])
    return View(step, view.layer, view.what, view.order, view.ranks, view.expert)


def _all_charts(runs: Runs, page: str, sides: list[int], values: dict[str, Any], kinds: set[str]) -> list[list[Chart]]:
    """Figures of every side; those of one key have one y axis."""
    found = [runs.charts(page, one, _view(runs, one, values), lambda kind: kind in kinds) for one in sides]
    if len(found) == 2:
        by_key = [{one.key: one for one in side} for side in found]
        for key in by_key[0].keys() & by_key[1].keys():
            for side, one in zip(by_key, share_axes([by_key[0][key], by_key[1][key]]), strict=True):
                side[key] = one
        found = [list(side.values()) for side in by_key]
    return found


_CHOICES = ("step", "layer", "what", "order", "ranks", "expert")
_STATES = [State("step", "value"), State("layer", "value"), State("what", "value"), State("order", "value")]
_STATES += [State("ranks", "value"), State("expert", "data")]


def _callbacks(app: Any, runs: Runs) -> None:
    app.clientside_callback(
        THEME,
        [Output("theme", "data"), Output("theme-button", "children")],
        Input("theme-button", "n_clicks"),
        State("theme", "data"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        "function(step, most) { return 'step ' + step + ' of ' + most; }",
        Output("step-text", "children"),
        Input("step", "value"),
        Input("step", "max"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        "function(step, most) { return Number(step) < Number(most) ? [] : window.dash_clientside.no_update; }",
        Output("follow", "value"),
        Input("step", "value"),
        State("step", "max"),
        prevent_initial_call=True,
    )
    app.clientside_callback(CURSOR, Output("nothing", "data"), Input("step", "value"), prevent_initial_call=True)
    _watching(app, runs)
    _drawing(app, runs)

    @app.callback(
        Output("layer", "value"),
        Output("expert", "data"),
        Input({"type": "figure", "key": "heat", "side": ALL}, "clickData"),
        Input({"type": "figure", "key": "layer", "side": ALL}, "clickData"),
        State("layer", "value"),
        State("what", "value"),
        State("order", "value"),
        prevent_initial_call=True,
    )
    def pressed(heat: Any, bars: Any, layer: Any, what: Any, order: Any) -> Any:
        which = ctx.triggered_id or {}
        try:
            point = ctx.triggered[0]["value"]["points"][0]
            x, y = round(float(point["x"])), round(float(point["y"]))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            return no_update, no_update
        if which.get("key") == "heat":
            return y, x if what != "saturation" and order == "number" else no_update
        if whole(layer) is None:
            return x, no_update
        return no_update, x if order == "number" else no_update


def _watching(app: Any, runs: Runs) -> None:
    @app.callback(
        Output("version", "data"),
        Output("step", "min"),
        Output("step", "max"),
        Output("step", "value"),
        Output("run-a", "options"),
        Output("run-b", "options"),
        Output("layer", "options"),
        Output("live", "children"),
        Input("tick", "n_intervals"),
        Input("run-a", "value"),
        Input("run-b", "value"),
        Input("follow", "value"),
        State("version", "data"),
        State("step", "value"),
        State("step", "max"),
        State("run-a", "options"),
        State("layer", "options"),
        prevent_initial_call=True,
    )
    def watch(
        ticks: Any, first: Any, second: Any, follow: Any, before: Any, step: Any, most: Any, known: Any, layers: Any
    ) -> Any:
        fresh = _run_options(runs) if (ticks or 0) % 5 == 0 and runs.refresh() else None
        sides = _sides(runs, first, second)
        now = _versions(runs, *(*sides, None, None)[:2])
        if now == before and fresh is None and ctx.triggered_id == "tick":
            return (no_update,) * 8
        spans = [one for one in (runs.span(side) for side in sides) if one is not None]
        low, high = (min(one[0] for one in spans), max(one[1] for one in spans)) if spans else (1, 1)
        at = whole(step)
        moved = high if follow or at is None else min(max(at, low), high)
        options = _layer_options(runs, sides)
        return (
            now if now != before else no_update,
            low,
            high if high != whole(most) else no_update,
            moved if moved != at else no_update,
            no_update if fresh is None else fresh,
            no_update if fresh is None else fresh,
            options if len(options) != len(layers or ()) else no_update,
            f"newest step {high}" if spans else "no step yet",
        )  # fmt: skip


def _drawing(app: Any, runs: Runs) -> None:
    @app.callback(
        Output("pages", "children"),
        Output("heading", "children"),
        Output("figures", "children"),
        Input("address", "pathname"),
        Input("run-a", "value"),
        Input("run-b", "value"),
        Input("theme", "data"),
        Input("shape", "data"),
        *_STATES,
        prevent_initial_call=True,
    )
    def draw(path: Any, first: Any, second: Any, theme: Any, _shape: Any, *choices: Any) -> Any:
        values = dict(zip(_CHOICES, choices, strict=True))
        return _page(runs, _page_of(path), _sides(runs, first, second), values, theme == "dark")

    @app.callback(
        Output({"type": "figure", "key": ALL, "side": ALL}, "figure"),
        Output({"type": "title", "key": ALL, "side": ALL}, "children"),
        Output({"type": "save", "key": ALL, "side": ALL}, "children"),
        Output({"type": "caption", "key": ALL, "side": ALL}, "children"),
        Output("shape", "data"),
        Input("version", "data"),
        *(Input(one.component_id, one.component_property) for one in _STATES),
        State("address", "pathname"),
        State("run-a", "value"),
        State("run-b", "value"),
        State("theme", "data"),
        State("shape", "data"),
        prevent_initial_call=True,
    )
    def update(_version: Any, *rest: Any) -> Any:
        choices, (path, first, second, theme, shape) = rest[: len(_CHOICES)], rest[len(_CHOICES) :]
        page, sides = _page_of(path), _sides(runs, first, second)
        values = dict(zip(_CHOICES, choices, strict=True))
        touched = {one["prop_id"].split(".")[0] for one in ctx.triggered}
        kinds = {"step", "time"}
        if touched <= {"step", "what", "order", "ranks"}:
            kinds = {"step"}
        elif touched == {"expert"}:
            kinds = {"time"}
        charts = _all_charts(runs, page, sides, values, kinds)
        drawn = {(one.key, i): (one, sides[i]) for i, side in enumerate(charts) for one in side}
        places = [(one["id"]["key"], one["id"]["side"]) for one in ctx.outputs_list[0]]
        wanted = {place for place in places if kind_of(page, place[0]) in kinds}
        if wanted != set(drawn):
            # other figures than those on the page: it is laid out again
            none = [no_update] * len(places)
            return none, none, none, none, (shape or 0) + 1
        columns: list[list[Any]] = [[], [], [], []]
        for place in places:
            if place not in drawn:
                for column in columns:
                    column.append(no_update)
                continue
            one, number = drawn[place]
            view = _view(runs, number, values)
            made = (_plot(page, one, view, theme == "dark"), one.title, _links(page, one, number, view), _caption(one))
            for column, value in zip(columns, made, strict=True):
                column.append(value)
        return *columns, no_update

    @app.callback(
        Output("notes", "children"),
        Output("tiles", "children"),
        Output("alerts", "children"),
        Input("version", "data"),
        Input("step", "value"),
        Input("layer", "value"),
        Input("address", "pathname"),
        Input("run-a", "value"),
        Input("run-b", "value"),
        prevent_initial_call=True,
    )
    def words(_version: Any, step: Any, layer: Any, path: Any, first: Any, second: Any) -> Any:
        sides = _sides(runs, first, second)
        told = _told(runs, sides)
        if _page_of(path) != "balance":
            return told, [], []
        only_step = {one["prop_id"].split(".")[0] for one in ctx.triggered} == {"step"}
        tiles = _tiles(runs, sides, {"step": step, "layer": layer})
        return told, tiles, no_update if only_step else _alerts(runs, sides)


# -- addresses -------------------------------------------------------------------------------------------------------


def _addresses(app: Any, runs: Runs) -> None:
    from flask import Response, request

    @app.server.get("/export/<key>.<kind>")
    def exported(key: str, kind: str) -> Any:
        asked = request.args
        page, number = asked.get("page", "balance"), whole(asked.get("run"))
        if kind not in FORMATS or page not in PAGES or number is None or runs.run(number) is None:
            return dash_guard.sentence("There is no such figure.", 404)
        view = _view(runs, number, dict(asked.items()))
        chart = next((one for one in runs.charts(page, number, view) if one.key == key), None)
        if chart is None or chart.empty:
            return dash_guard.sentence(f"There is nothing to save: {chart.empty if chart else 'no such figure.'}", 404)
        name = f"{chart.key}{'' if view.step is None else f'-step-{view.step}'}.{kind}"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(export(chart, kind), mimetype=None, content_type=_TYPES[kind], headers=headers)  # type: ignore[arg-type]

    @app.server.get("/metrics")
    def metrics() -> Any:
        from trine.views.prometheus_page import metrics_text

        return Response(metrics_text(runs.runs[:20]), content_type="text/plain; version=0.0.4; charset=utf-8")


def serve(app: Any, host: str, port: int) -> Any:
    """A server of the application, bound but not started: ``serve_forever`` and ``shutdown`` do that.

    Raises:
        ValueError: the address cannot be had.
    """
    return dash_guard.bind(app.server, host, port)
