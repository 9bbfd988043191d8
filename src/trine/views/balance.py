"""Tables about the load of experts, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from trine.balance.analyze import Analysis
    from trine.balance.stress import Recovery, Timing

_WORDS = {"": "even", "lasting": "uneven, lasting", "drifting": "uneven, drifting", "changing": "uneven, changing"}


def analysis_table(analysis: Analysis) -> Table:
    """One row a layer: what is found beside what chance gives."""
    from rich.table import Table

    steps = f"step{'s' if analysis.steps > 1 else ''} {analysis.first}"
    steps += f" to {analysis.last}" if analysis.steps > 1 else ""
    table = Table(title=f"{analysis.source}: {steps}, {analysis.experts} experts")
    several = analysis.ranks > 1
    for column in ("layer", "experts", "MaxVio", "by chance", "CV", "by chance", "P5", "P95", "dead", "same next step"):
        table.add_column(column, justify="left" if column == "experts" else "right")
    table.add_column("hottest")
    if several:
        table.add_column(f"fullest of {analysis.ranks} ranks", justify="right")
        table.add_column("by chance", justify="right")
    for one in analysis.layers:
        same = f"{one.correlation[1]:.2f}" if 1 in one.correlation else "-"
        hottest = ", ".join(f"{expert} ({load:.2f})" for expert, load in one.hottest)
        state = _WORDS.get(one.lasts, "uneven") if one.uneven else "even"
        numbers = [one.max_vio, one.max_vio_floor, one.cv, one.cv_floor, one.p5, one.p95]
        row = [str(one.layer), state, *(f"{number:.3f}" for number in numbers), str(one.dead), same, hottest]
        if several:
            row += [f"{one.rank_overload:.3f}", f"{1 + one.rank_floor:.3f}"]
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
    table.add_column("policy")
    for column in ("MaxVio", *(f"after {step}" for step in shown), "by chance", "steps to twice that"):
        table.add_column(column, justify="right")
    for one in recoveries:
        path = [f"{one.path[step]:.2f}" if step < len(one.path) else "-" for step in shown]
        steps = f"not in {len(one.path) - 1}" if one.steps is None else str(one.steps)
        table.add_row(one.policy, f"{one.max_violation:g}", *path, f"{one.floor:.2f}", steps)
    return table
