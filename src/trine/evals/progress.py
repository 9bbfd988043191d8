"""A bar for evaluations that take a while; nothing where nobody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Tick = Callable[[int], None]


@contextmanager
def meter(console: Console | None, label: str, tokens: int) -> Iterator[Tick]:
    """A bar over ``tokens`` tokens for as long as the block runs; call what it gives with the tokens just done.

    Args:
        console: where to draw; None, or one that is no terminal, draws nothing.
        label: what is measured.
        tokens: how many there are.
    """
    if console is None or not console.is_terminal:
        yield lambda done: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:28}"), BarColumn(20), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=max(1, tokens))
        yield lambda done: bar.advance(task, done)
