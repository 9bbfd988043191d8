"""The tables of a calibration: rows once, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[str, ...]


def limit_rows(result: Mapping[str, Any], head_dim: int | None = None) -> tuple[Row, list[Row]]:
    """Headings and rows of the largest safe |g_min|: a row a tile and anchor, a column a number format."""
    grid = result["grid"]
    k = head_dim or max(grid["head_dim"])
    found = {(one["tile"], one["anchor"], one["format"]): one["largest"] for one in result["limits"]
             if one["head_dim"] == k}  # fmt: skip
    rows = [
        (str(tile), anchor, *(_bound(found[tile, anchor, name]) for name in grid["format"]))
        for tile in grid["tile"]
        for anchor in grid["anchor"]
    ]
    return ("tile", "anchor", *grid["format"]), rows


def point_rows(result: Mapping[str, Any], g_min: float, head_dim: int | None = None) -> tuple[Row, list[Row]]:
    """Headings and rows of one bound: verdict and error of the outputs at the longest sequence."""
    grid = result["grid"]
    k, longest = head_dim or max(grid["head_dim"]), str(max(grid["length"]))
    found = {(p["tile"], p["anchor"], p["format"]): p for p in result["points"]
             if p["g_min"] == g_min and p["head_dim"] == k}  # fmt: skip
    rows = []
    for tile in grid["tile"]:
        for anchor in grid["anchor"]:
            points = [found[tile, anchor, name] for name in grid["format"]]
            spread = f"e^{points[0]['lowest']:.4g} to e^{points[0]['highest']:.4g}"
            notes = [] if points[0]["causal"] else ["not causal"]
            notes += ["mask by select"] if points[0]["upper_overflows"] else []
            rows.append((str(tile), anchor, spread, *(_verdict(p, longest) for p in points), ", ".join(notes)))
    return ("tile", "anchor", "query factor", *grid["format"], ""), rows


def memory_rows(result: Mapping[str, Any]) -> tuple[Row, list[Row]]:
    """Headings and rows of what each bound can forget, and the logit that a long memory asks of it."""
    lengths = [str(length) for length in result["grid"]["length"]]
    rows = [
        (f"{m['g_min']:g}", f"{m['shortest']:.3g}", f"{m['left_after_one']:.2%}",
         *("–" if m["logit"][n] is None else f"{m['logit'][n]:.2f}" for n in lengths))
        for m in result["memory"]
    ]  # fmt: skip
    return ("g_min", "shortest memory", "left after a token", *(f"logit for {n} tokens" for n in lengths)), rows


def gate_rows(gates: Mapping[str, Any]) -> tuple[Row, list[Row]]:
    """Headings and rows of where gates live: a row a layer, then its heads."""
    rows = []
    for layer in gates["layers"]:
        rows.append((str(layer["layer"]), "all", *_memory(layer), f"{layer['strongest']:.3g}"))
        rows += [("", str(head["head"]), *_memory(head), "") for head in layer["heads"]]
    return (
        ("layer", "head", "memory p1", "median", "p99", "at the bound", "never forget", "strongest gate"),
        rows,
    )


def tables(result: Mapping[str, Any], g_min: float) -> list[Table]:
    """All tables of a result for the terminal; of the points, those of ``g_min``."""
    grid = result["grid"]
    shape = f"K = {max(grid['head_dim'])}"
    made = [
        _table(f"largest range-safe |g_min|, {shape}", *limit_rows(result)),
        _table(
            f"g_min = {g_min:g}, {shape}: error of the outputs over {max(grid['length'])} tokens, or why not",
            *point_rows(result, g_min),
        ),
        _table("memory, in tokens until 1/e is left of a state", *memory_rows(result)),
    ]
    if result.get("gates") is not None:
        made.append(_table(f"where the gates live ({result['gates']['inputs']})", *gate_rows(result["gates"])))
    return made


def markdown(headings: Row, rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _table(title: str, headings: Row, rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    return table


def _bound(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _verdict(point: Mapping[str, Any], length: str) -> str:
    if not point["safe"]:
        return "overflows" if "overflows" in point["reason"] else "underflows"
    error = point["error"].get(length)
    return "safe" if error is None else f"{error[0]:.1e}"


def _memory(one: Mapping[str, Any]) -> Row:
    m = one["memory"]
    share = (f"{one[name]} of {one['channels']}" for name in ("at_bound", "never_forget"))
    return (_tokens(m["p1"]), _tokens(m["p50"]), _tokens(m["p99"]), *share)


def _tokens(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def check_line(result: Mapping[str, Any]) -> str:
    """How the closed form and the evaluated tiles agree, in a sentence."""
    found = result["brute_force"]
    wrong = len(found["disagreements"])
    told = f"{wrong or 'no'} disagreement{'s' * (wrong != 1)}"
    return f"{found['checked']} settings were also evaluated at saturated gates: {told}."
