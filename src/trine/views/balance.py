"""Tables about the load of experts, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from trine.balance.analyze import Analysis
    from trine.balance.stress import Recovery, Timing


def analysis_table(analysis: Analysis) -> Table:
    """One row a layer: what is found, and in brackets what chance gives; all but the hottest experts in 80 columns."""
    from rich.table import Table

    steps = f"step{'s' if analysis.steps > 1 else ''} {analysis.first}"
    steps += f" to {analysis.last}" if analysis.steps > 1 else ""
    table = Table(title=f"{analysis.source}: {steps}, {analysis.experts} experts", box=None, padding=(0, 1, 0, 0))
    several = analysis.ranks > 1
    table.add_column("layer", justify="right", min_width=5)
    table.add_column("uneven", min_width=8)
    for heading, width in (
        ("MaxVio (chance)", 11),
        ("CV (chance)", 11),
        ("P5 to P95", 12),
        ("dead", 4),
        ("next step", 5),
    ):
        table.add_column(heading, justify="right", min_width=width)
    if several:
        table.add_column(f"fullest of {analysis.ranks} ranks", justify="right", min_width=11)
    table.add_column("hottest", no_wrap=True)
    for one in analysis.layers:
        row = [
            str(one.layer),
            (one.lasts or "yes") if one.uneven else "no",
            f"{one.max_vio:.2f} ({one.max_vio_floor:.2f})",
            f"{one.cv:.2f} ({one.cv_floor:.2f})",
            f"{one.p5:.2f} to {one.p95:.2f}",
            str(one.dead),
            f"{one.correlation[1]:.2f}" if 1 in one.correlation else "-",
        ]
        if several:
            row.append(f"{one.rank_overload:.2f} ({1 + one.rank_floor:.2f})")
        row.append(", ".join(f"{expert} ({load:.2f})" for expert, load in one.hottest))
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
    """One row a policy and forced imbalance: MaxVio on the way, and when it was gone."""
    from rich.table import Table

    table = Table(title=title)
    shown = [0, 1, 2, 5, 10, 20, 40, 80]
    longest = max((len(one.path) for one in recoveries), default=1)
    shown = [step for step in shown if step < longest]
    table.add_column("policy", min_width=max((len(one.policy) for one in recoveries), default=0))
    for column in ("MaxVio", *(f"after {step}" for step in shown), "by chance", "steps to twice that"):
        table.add_column(column, justify="right")
    for one in recoveries:
        path = [f"{one.path[step]:.2f}" if step < len(one.path) else "-" for step in shown]
        steps = f"not in {len(one.path) - 1}" if one.steps is None else str(one.steps)
        table.add_row(one.policy, f"{one.max_violation:g}", *path, f"{one.floor:.2f}", steps)
    return table
