"""The curriculum study on one page: a table with a column an arm, a picture, and what was run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.data._files import write_atomically
from trine.views import figures
from trine.views.report import duration
from trine.views.tables import Row, markdown, terminal

if TYPE_CHECKING:
    from rich.table import Table

ARM_WORDS = {
    "staged-mixture": "staged with mixtures",
    "staged": "staged",
    "longest": "longest from the start",
}


def study_headings(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Of the study's table: what is measured, and a column an arm."""
    return ("", *(ARM_WORDS.get(arm, arm) for arm in found["arms"]))


def study_rows(found: Mapping[str, Any]) -> list[Row]:
    """One row a measurement: mean over the seeds, with the standard deviation where there are several."""
    bits, recall = _columns(found)
    arms = list(found["arms"].values())

    return [
        *((f"bits/byte, context {int(n):,}", *(_number(v["bits_by_context"].get(n), 3) for v in arms)) for n in bits),
        *((f"recall (chance), {int(n):,} tokens", *(_recall(v, n) for v in arms)) for n in recall),
        *((f"evidence gap, {int(n):,} tokens", *(_number(v["gap_by_length"].get(n), 3) for v in arms)) for n in recall),
        ("training loss", *(_number(v["loss"], 3) for v in arms)),
        ("tokens/s", *(_number(v["tokens_per_s"], 0) for v in arms)),
        ("time of a run", *(duration(v["seconds"]["mean"]) for v in arms)),
    ]


def study_table(found: Mapping[str, Any]) -> Table:
    """What `trine study curriculum` shows at the end."""
    return terminal(study_headings(found), study_rows(found), study_note(found))


def write_study(found: Mapping[str, Any], folder: Path) -> Path:
    """Write ``study.md`` and ``study.png`` into ``folder`` from what ``study.json`` holds; returns the page."""
    figures.save(figures.study(found["arms"], ARM_WORDS), folder / "study.png")
    hardware = found["hardware"]
    where = hardware["gpus"][0]["name"] if hardware.get("gpus") else f"{hardware['cpu']}, {hardware['cores']} cores"
    lines = [
        "# Curriculum study",
        study_note(found),
        markdown(study_headings(found), study_rows(found)),
        "![Bits per byte by context, and speed](study.png)",
        f"Run on {where}, torch {found['versions'].get('torch', '?')}, begun {found['started']}. Every run is a folder "
        "beside this page; `study.json` holds all results.",
    ]
    path = folder / "study.md"
    write_atomically(path, ("\n\n".join(lines) + "\n").encode())
    return path


def study_note(found: Mapping[str, Any]) -> str:
    """One paragraph: what was run, what the numbers are, and what is not done yet."""
    seeds = max(arm["seeds"] for arm in found["arms"].values())
    longest = found["config"]["longest"]
    missing = found.get("missing", ())
    unfinished = f" **Not done yet: {', '.join(missing)}.**" if missing else ""
    return (
        f"Preset {found['config']['preset']}, {found['tokens']:,} tokens a run in steps of {longest:,}, {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}: mean (standard deviation). Bits per byte of held-out files, read with "
        "contexts of several lengths. Evidence gap: nats an answer token between a task with its evidence swapped and "
        f"in place.{unfinished}"
    )


def _columns(found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    arms = found["arms"].values()
    bits, recall = (
        {name for arm in arms for name in arm.get(key, {})} for key in ("bits_by_context", "recall_by_length")
    )
    return sorted(bits, key=int), sorted(recall, key=int)


def _number(value: Mapping[str, Any] | None, digits: int) -> str:
    if value is None:
        return "-"
    deviation = "" if value["deviation"] is None else f" ({value['deviation']:,.{digits}f})"
    return f"{value['mean']:,.{digits}f}{deviation}"


def _recall(values: Mapping[str, Any], length: str) -> str:
    """Share of right answer tokens, its deviation over seeds, and chance, in percent."""
    recall = values["recall_by_length"].get(length)
    if recall is None:
        return "-"
    deviation = "" if recall["deviation"] is None else f" ± {100 * recall['deviation']:.1f}"
    return f"{100 * recall['mean']:.1f}{deviation} % ({100 * values['chance_by_length'][length]['mean']:.1f})"
