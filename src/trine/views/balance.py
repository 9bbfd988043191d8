"""Tables about the load of experts, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from trine.balance.analyze import Analysis
    from trine.balance.stress import Recovery, Timing


def analysis_table(analysis: Analysis) -> Table:
    """One row a layer: what is found, and in brackets what chance gives. Cells that find no room take two lines."""
    steps = f"step{'s' if analysis.steps > 1 else ''} {analysis.first}"
    steps += f" to {analysis.last}" if analysis.steps > 1 else ""
    ranks = [f"fullest of {analysis.ranks} ranks"] if analysis.ranks > 1 else []
    headings = ["layer", "uneven", "MaxVio (chance)", "CV (chance)", "P5 to P95", "dead", "next step", *ranks]
    table = _table(f"{analysis.source}: {steps}, {analysis.experts} experts")
    rows = []
    for one in analysis.layers:
        row = [
            str(one.layer),
            (one.lasts or "yes") if one.uneven else "no",
            f"{one.max_vio:.2f} ({one.max_vio_floor:.2f})",
            f"{one.cv:.2f} ({one.cv_floor:.2f})",
            f"{one.p5:.2f} {one.p95:.2f}",
            str(one.dead),
            f"{one.correlation[1]:.2f}" if 1 in one.correlation else "-",
        ]
        if ranks:
            row.append(f"{one.rank_overload:.2f} ({1 + one.rank_floor:.2f})")
        row.append("{}:{:.2f}".format(*one.hottest[0]) if one.hottest else "-")
        rows.append(row)
    for i, heading in enumerate([*headings, "hottest, its load"]):
        words = [word for text in (heading, *(row[i] for row in rows)) for word in text.split()]
        table.add_column(
            heading,
            justify="left" if heading in ("uneven", "hottest, its load") else "right",
            min_width=max(map(len, words)),  # else the fold goes through numbers
            max_width=max(*(len(word) for word in heading.split()), *(len(row[i]) for row in rows)),
            overflow="fold",
        )
    for one, row in zip(analysis.layers, rows, strict=True):
        table.add_row(*row, style="yellow" if one.uneven or one.uneven_ranks or one.dead else None)
    return table


def timing_table(timings: Sequence[Timing], title: str) -> Table:
    """One row a forced load."""
    from rich.table import Table

    table = Table(title=title)
    for column in ("MaxVio asked for", "found", "ms", "times even", "us a token and expert"):
        table.add_column(column, justify="right")
    for one in timings:
        numbers = (f"{one.found:.3f}", f"{one.milliseconds:.3f}", f"{one.relative:.3f}", f"{one.per_token_k:.3f}")
        table.add_row(f"{one.max_violation:g}", *numbers)
    return table


def recovery_table(recoveries: Sequence[Recovery], title: str) -> Table:
    """One row a policy and forced imbalance: when it was gone, and MaxVio on the way; in 80 columns."""
    table = _table(title)
    longest = max((len(one.path) for one in recoveries), default=1)
    shown = [step for step in (0, 1, 2, 5, 10, 20, 40, 80) if step < longest]
    table.add_column("policy", no_wrap=True)
    rows = []
    for one in recoveries:
        path = [f"{one.path[step]:.2f}" if step < len(one.path) else "-" for step in shown]
        steps = f"not in {len(one.path) - 1}" if one.steps is None else str(one.steps)
        rows.append((one.policy, f"{one.max_violation:g}", steps, f"{one.floor:.2f}", *path))
    for i, heading in enumerate(("MaxVio", "steps to twice chance", "chance", *(f"after {step}" for step in shown)), 1):
        words = [max(heading.split(), key=len), *(row[i] for row in rows)]
        table.add_column(heading, justify="right", width=max(map(len, words)), overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _table(title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    return Table(title=Text(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
