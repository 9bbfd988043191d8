"""Packed rows as the model sees them, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trine.data import Batch, MixtureReport, Shards

END = "⏎"  # how the end-of-document token is shown
CUT = "⋯"
SHOWN = 400
"""Characters of one sequence that are shown unless told otherwise: half from its beginning, half from its end."""


def rows_view(batches: Sequence[Batch], shards: Shards, shown: int = SHOWN) -> RenderableType:
    """Micro-batches, sequence by sequence: where each comes from, which part of its document it is, and its text.

    The text is that of the inputs and, at last, the last target. Tokens whose target has no weight are dim, those that
    weigh other than 1 are underlined; end-of-document tokens are shown as ``⏎``.

    Args:
        batches: micro-batches of a plan over ``shards``.
        shards: the shards.
        shown: characters of a sequence that are shown at most.
    """
    parts: list[RenderableType] = []
    for m, batch in enumerate(batches):
        pads = sum(int(n) for n in _lengths(batch, padding=True))
        title = f"micro-batch {m}: {batch.tokens} tokens, {len(_lengths(batch))} sequences, {pads} padding"
        parts.append(Rule(Text(title), align="left"))
        for n in range(batch.sequences):
            if int(batch.source_N[n]) >= 0:
                parts += _sequence(batch, n, shards, shown)
    return Group(*parts)


def _lengths(batch: Batch, padding: bool = False) -> list[int]:
    """Lengths of the sequences, or of the padding."""
    bounds = batch.cu_seqlens_N1.tolist()
    sources = batch.source_N.tolist()
    return [b - a for (a, b), source in zip(pairwise(bounds), sources, strict=True) if (source < 0) == padding]


def _sequence(batch: Batch, n: int, shards: Shards, shown: int) -> list[RenderableType]:
    assert batch.document_N is not None and batch.start_N is not None
    a, b = int(batch.cu_seqlens_N1[n]), int(batch.cu_seqlens_N1[n + 1])
    document, start = int(batch.document_N[n]), int(batch.start_N[n])
    entry = shards.documents[document]
    weights = batch.weights_T[a:b].tolist()
    where = "whole" if start == 0 and b - a == entry.tokens + 1 else f"targets {start + 1} to {start + b - a}"
    weight = "" if set(weights) == {1.0} else f", {sum(w > 0 for w in weights)} weighted, sum {sum(weights):g}"
    head = Text(f"[{a}:{b}] ", style="bold")
    head.append(f"{shards.sources[int(batch.source_N[n])]}: {entry.name}", style="cyan")
    head.append(f"  {where} of {entry.tokens + 1}{weight}", style="dim")
    ids = [*batch.tokens_T[a:b].tolist(), int(batch.targets_T[b - 1])]
    return [head, _text(ids, [None, *weights], shards, shown)]


def _text(ids: Sequence[int], weights: Sequence[float | None], shards: Shards, shown: int) -> Text:
    """Tokens as text, styled by their weight as targets; ``None`` for the first, which is none."""
    line = Text()
    styles = ["" if w is None or w == 1 else "dim" if w == 0 else "underline" for w in weights]
    eod = shards.tokenizer.eod_id
    # Neighbours of one style are decoded together: a character can take several tokens.
    for (end, style), group in groupby(zip(ids, styles, strict=True), key=lambda one: (one[0] == eod, one[1])):
        tokens = [token for token, _ in group]
        if end:
            line.append(END * len(tokens), style="bold magenta")
        else:
            line.append(shards.tokenizer.decode(tokens), style=style)
    if len(line) <= shown:
        return line
    half = max(1, shown // 2)
    return line[:half] + Text(f" {CUT} ", style="bold magenta") + line[-half:]


def mixture_table(report: MixtureReport) -> Table:
    """What a stage holds, part by part."""
    table = Table(title=f"{report.bins} rows, {report.supervised_tokens} targets, {report.padding_share:.1%} padding")
    for column in ("source", "tokens", "documents", "share", "rows", "targets", "cut", "epochs"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for part in report.parts:
        limit = f"{part.shortest or ''}–{part.longest or ''}" if part.shortest or part.longest else "any"
        cells = (part.documents, f"{part.share:.1%}", part.rows, part.supervised_tokens, part.cut_documents)
        table.add_row(part.source, limit, *map(str, cells), f"{part.epochs_in_all:.2f}")
    return table
