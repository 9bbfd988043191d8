"""The parts of `report.md` that tell of an evaluation: sources, positions, tasks, recall, the guard, a look inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from trine.views import depth_charts, figures_eval
from trine.views.chart import Chart
from trine.views.chart_render import to_matplotlib
from trine.views.probe_view import Probe
from trine.views.run_series import probe_note
from trine.views.tables import Row, evaluation_table, markdown, terminal

if TYPE_CHECKING:
    from rich.table import Table

Record = Mapping[str, Any]

SOURCE_HEADINGS = ("source", "bits per byte", "documents", "bytes")
GUARD_HEADINGS = ("after stage", "before", "after", "change")
RECALL_HEADINGS = ("symbols", "pairs", "distance", "right", "chance", "loss, nats", "gap, nats", "answers")


def evaluation_figures(evaluation: Record, stages: Sequence[int]) -> dict[str, Figure]:
    """Every figure that an evaluation has the numbers for, by the name of its file."""
    drawn: dict[str, Figure] = {}
    if evaluation.get("by_position"):
        drawn["positions"] = figures_eval.loss_by_position(evaluation["by_position"], stages)
    families = (evaluation.get("tasks") or {}).get("families")
    if families:
        drawn["tasks"] = figures_eval.recall_heatmaps(families)
        drawn["gaps"] = figures_eval.recall_heatmaps(families, "gap")
    if evaluation.get("recall"):
        drawn["recall"] = figures_eval.symbol_recall(evaluation["recall"], max(stages))
    return drawn | {name: to_matplotlib(chart) for name, chart in portrait_charts(evaluation).items()}


def portrait_charts(evaluation: Record) -> dict[str, Chart]:
    """The dashboard's figures of a look inside the model, of the look that an evaluation takes; those it has."""
    inside = evaluation.get("portrait") or {}
    mix, alike = inside.get("mix") or [], inside.get("similarity") or {}
    labels = alike.get("labels") or []
    # What a line of probes.jsonl says more is not asked of an evaluation.
    seen = Probe.of({
        "step": 0,
        "depth": {"sites": [row["label"] for row in mix], "weights": [row["weights"] for row in mix]},
        "layers": {
            "labels": labels,
            "cka": alike.get("values"),
            "tokens_alike": [None] * len(labels),
            "next_alike": [None] * (len(labels) - 1),
        },
    })  # fmt: skip
    charts = {"depth_mix": depth_charts.mix_weights(seen), "similarity": depth_charts.similarity(seen)}
    when = probe_note(seen)  # the step is that of the evaluation
    return {
        name: replace(chart, notes=[note for note in chart.notes if note != when])
        for name, chart in charts.items()
        if not chart.empty
    }


def evaluation_sections(evaluation: Record, events: Sequence[Record], plots: Mapping[str, str]) -> list[str]:
    """Sections of Markdown, in order; parts that were not measured are absent.

    Args:
        evaluation: `eval.json`.
        events: `events.jsonl`, where the short guard has written.
        plots: name of a figure -> path of its file.
    """

    def picture(name: str, label: str) -> str:
        return f"\n\n![{label}]({plots[name]})" if name in plots else ""

    sections = []
    sources = source_rows(evaluation)
    if len(sources) > 1:
        sections.append(f"## By source\n\n{markdown(SOURCE_HEADINGS, sources)}")
    guard = guard_rows(events)
    if guard:
        about = next(event for event in events if event.get("kind") == "short_guard")
        sections.append(
            f"## The short context after each stage\n\nThe same text, {about['length']:,} tokens of context, "
            f"{about['unit']}.\n\n{markdown(GUARD_HEADINGS, guard)}"
        )
    if evaluation.get("by_position"):
        sections.append("## Loss by position" + picture("positions", "Loss by position"))
    if evaluation.get("recall"):
        sections.append(
            "## Recall\n\nKeys and values of one symbol. The gap is the loss of the true answer when its evidence "
            "tells of another value, minus its loss with the evidence in place.\n\n"
            f"{markdown(RECALL_HEADINGS, recall_rows(evaluation['recall']))}" + picture("recall", "Recall")
        )
    tasks = evaluation.get("tasks")
    if tasks and tasks["families"]:
        headings, rows = task_rows(tasks["families"])
        out = "".join(f"\n- not measured: {line}" for line in tasks["left_out"])
        sections.append(
            "## Tasks that need evidence from afar\n\nWhole answers right, mean over depths, with the evidence gap in "
            "nats an answer token (loss of the true answer with swapped evidence minus in place).\n\n"
            f"{markdown(headings, rows)}{chr(10) if out else ''}{out}"
            + picture("tasks", "Answers right by depth and length")
            + picture("gaps", "Evidence gap by depth and length")
        )
    inside = picture("depth_mix", "Depth mix") + picture("similarity", "Similarity of layers")
    if inside:
        sections.append("## Inside\n\nOn one batch of held-out text." + inside)
    return sections


def evaluation_tables(evaluation: Record) -> list[Table]:
    """What a terminal shows of an evaluation; nothing of none."""
    tables = []
    if evaluation.get("baselines"):
        tables.append(evaluation_table(evaluation))
    sources = source_rows(evaluation)
    if len(sources) > 1:
        tables.append(terminal(SOURCE_HEADINGS, sources))
    if evaluation.get("recall"):
        tables.append(terminal(RECALL_HEADINGS, recall_rows(evaluation["recall"])))
    families = (evaluation.get("tasks") or {}).get("families")
    if families:
        caption = "whole answers right, mean over depths; evidence gap in nats a token"
        tables.append(terminal(*task_rows(families), caption))
    return tables


def source_rows(evaluation: Record) -> list[Row]:
    """A row a source."""
    return [
        (name, f"{one['bits_per_byte']:.3f}", f"{one['documents']:,}", f"{one['bytes']:,}")
        for name, one in (evaluation.get("by_source") or {}).items()
    ]


def guard_rows(events: Sequence[Record]) -> list[Row]:
    """What the short guard measured, newest word on each stage; a stage that made it worse is marked."""
    found = {event["stage"]: event for event in events if event.get("kind") == "short_guard"}
    return [
        (
            str(stage + 1),
            "" if one["before"] is None else f"{one['before']:.4f}",
            f"{one['after']:.4f}",
            "" if one["change"] is None else f"{100 * one['change']:+.1f} %{' (worse)' if one['worse'] else ''}",
        )
        for stage, one in sorted(found.items())
    ]


def recall_rows(cells: Sequence[Record]) -> list[Row]:
    """A row a case of symbol-level recall."""
    return [
        (
            f"{cell['length']:,}",
            str(cell["pairs"]),
            "any" if cell["distance"] is None else f"{cell['distance']:,}",
            f"{100 * cell['accuracy']:.1f} %",
            f"{100 * cell['chance']:.1f} %",
            f"{cell['loss']:.3f}",
            f"{cell['gap']:.2f}",
            str(cell["count"]),
        )
        for cell in cells
    ]


def task_rows(families: Mapping[str, Sequence[Record]]) -> tuple[Row, list[Row]]:
    """Headings and rows: for each family its chance, and for each length answers right and gap."""
    lengths = sorted({cell["length"] for cells in families.values() for cell in cells})
    rows: list[Row] = []
    for name, cells in families.items():
        row = [name, f"{100 * max(cell['chance'] for cell in cells):.1f} %"]
        for length in lengths:
            mine = [cell for cell in cells if cell["length"] == length]
            if mine:
                right, gap = (fmean(cell[key] for cell in mine) for key in ("accuracy", "gap"))
                row.append(f"{100 * right:.0f} %, {gap:.2f}")
            else:
                row.append("-")
        rows.append(tuple(row))
    return ("family", "chance", *(f"{figures_eval.length_label(length)} tokens" for length in lengths)), rows
