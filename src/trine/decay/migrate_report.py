"""The report of a migration for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[str, ...]

HEADINGS = (
    *("layer", "decay error p50", "p99", "max", "memory off by p50", "p95", "beyond the bound", "variance explained"),
    "output error",
)


def drift_rows(report: Mapping[str, Any]) -> list[Row]:
    """One row a layer, under `HEADINGS`."""
    rows = []
    for layer in report["layers"]:
        decay, memory = layer["decay_error"], layer["memory_factor"]
        output = layer["output_error"]
        rows.append(
            (
                str(layer["layer"]),
                *(f"{decay[name]:.2g}" for name in ("p50", "p99", "max")),
                *(f"x {memory[name]:.3f}" for name in ("p50", "p95")),
                f"{layer['beyond']:.2%}",
                f"{layer['fit']:.2%}",
                "not measured" if output is None else f"{output:.2%}",
            )
        )
    return rows


def drift_table(report: Mapping[str, Any]) -> Table:
    """`drift_rows` for the terminal."""
    from rich.table import Table

    title = f"g_min = {report['g_min']:g}, gate inputs: {report['inputs']}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in drift_rows(report):
        table.add_row(*row)
    return table


def lines(report: Mapping[str, Any]) -> list[str]:
    """What stands under the table: losses, verdict, why a checkpoint is another one now."""
    said = []
    loss = report["loss"]
    if loss is not None:
        said.append(
            f"loss on held-out text, nats a token: {loss['before']:.4f} with softplus gates; {loss['swapped']:.4f} "
            f"with the old numbers in the new formula; {loss['fitted']:.4f} fitted"
            + ("" if loss["recovered"] is None else f"; {loss['recovered']:.4f} after recovery")
        )
    said += report.get("notes", [])
    said.append(f"verdict: {report['verdict']}")
    said += [f"  {reason}" for reason in report["reasons"]]
    said.append(report["why"])
    return said
