"""The comparison of balancers on one page: a table with a row an arm, a picture, and what was run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from trine.data._files import write_atomically
from trine.views.figures import GREY, INK, LINE_COLOURS, STYLE, save
from trine.views.tables import Row, markdown, terminal

if TYPE_CHECKING:
    from rich.table import Table

ARM_WORDS = {
    "qb": "Quantile Balancing (QB)",
    "qb-signed-log": "QB, signed-log, adaptive gain",
    "qb-logit": "QB, signed-log, on logits",
    "sign": "sign of the load, 1e-3",
    "load-quantile": "load quantiles",
    "aux": "auxiliary loss, 1e-2",
    "stateless": "stateless thresholds, dual",
    "none": "none (bias 0)",
}
HEADINGS = (
    "policy",
    "loss",
    "bits/byte",
    "MaxVio",
    "its 95 %",
    "steps to balance",
    "steps with a dead expert",
    "tokens/s",
    "cosine",
    "KB a step",
)
BRIEF = ("policy", "loss", "bits", "MaxVio", "95 %", "even", "dead", "tok/s", "cos", "KB")


def compare_rows(found: Mapping[str, Any], brief: bool = False) -> list[Row]:
    """One row an arm: mean over seeds, and (difference from the first arm) where it counts; ``brief`` has a * there."""

    def cell(value: Mapping[str, Any], digits: int) -> str:
        mean = f"{value['mean']:,.{digits}f}"
        if not value["counts"]:
            return mean
        return f"{mean}*" if brief else f"{mean} ({value['difference']:+,.{digits}f})"

    rows: list[Row] = []
    for arm, values in found["arms"].items():
        never = values["never_balanced"]
        balanced = "never" if never == values["seeds"] else cell(values["steps_to_balance"], 0)
        some = f", {never} never" if 0 < never < values["seeds"] else ""
        rows.append(
            (
                arm if brief else ARM_WORDS.get(arm, arm),
                cell(values["loss"], 3),
                cell(values["bits_per_byte"], 3),
                cell(values["max_vio"], 2),
                cell(values["max_vio_p95"], 2),
                balanced + some,
                f"{100 * values['dead']['mean']:.0f} %",
                cell(values["tokens_per_s"], 0),
                f"{values['cosine']['mean']:+.2f}",
                f"{values['wire_bytes'] / 1e3:,.1f}",
            )
        )
    return rows


def compare_table(found: Mapping[str, Any]) -> Table:
    """What `trine balance compare` shows at the end."""
    return terminal(BRIEF, compare_rows(found, brief=True), compare_note(found, brief=True))


def compare_note(found: Mapping[str, Any], brief: bool = False) -> str:
    """One paragraph: what was run and what the numbers are."""
    arms = found["arms"]
    seeds = max((arm["seeds"] for arm in arms.values()), default=0)
    floor = next((arm["floor"] for arm in arms.values()), 0.0)
    missing = found.get("missing", ())
    strong = "" if brief else "**"  # a terminal shows no Markdown
    unfinished = f" {strong}Not done yet: {', '.join(missing)}.{strong}" if missing else ""
    differs = (
        "with * the difference from the first row is more than two standard errors of the paired differences"
        if brief
        else "in brackets the difference from the first row, where it is more than two standard errors of the paired "
        "differences"
    )
    return (
        f"Preset {found['config']['preset']}, {found['config']['tokens']:,} tokens a run, {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}: means over seeds; {differs}. Loss: last 20 steps. MaxVio: median "
        f"over steps from the 20th on, of the worst layer; chance gives {floor:.2f}. Steps to balance: until MaxVio "
        "stays within twice that for ten steps; a run that never gets there counts with all its steps. Cosine: between "
        f"the gradients of the loss and of an auxiliary loss, in the trained model. KB a step: what each rank puts "
        f"into the all-reduce.{unfinished}"
    )


def compare_figure(found: Mapping[str, Any]) -> Figure:
    """MaxVio over steps of every arm beside what chance gives, and the loss at the end with its standard error.

    Raises:
        ValueError: no arm.
    """
    arms = found["arms"]
    if not arms:
        raise ValueError("arms: found none, need at least one")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 5.0), dpi=120, layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
        for index, (arm, values) in enumerate(arms.items()):
            colour = LINE_COLOURS[index % len(LINE_COLOURS)]
            style = ("-", "--", ":")[index // len(LINE_COLOURS) % 3]
            shown = _smooth(values["max_vio_by_step"], 5)
            steps = range(1, len(shown) + 1)
            left.plot(steps, shown, color=colour, linestyle=style, linewidth=1.4, label=ARM_WORDS.get(arm, arm))
            loss = values["bits_per_byte"]
            right.errorbar(
                loss["mean"],
                index,
                xerr=loss["deviation"] or 0.0,
                color=colour,
                marker="o",
                capsize=3,
                linestyle="none",
            )
        floor = next(iter(arms.values()))["floor"]
        left.axhline(floor, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
        left.annotate("chance", (0.995, floor), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=GREY)
        left.set_yscale("log")
        left.set_xlabel("step")
        left.set_title("MaxVio of the worst layer, median over seeds")
        figure.legend(*left.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
        right.set_yticks(range(len(arms)), list(arms), fontsize=8)
        right.invert_yaxis()
        right.set_title("Held-out bits per byte")
        right.set_xlabel("mean and deviation over seeds")
    return figure


def _smooth(values: list[float], width: int) -> list[float]:
    """Running mean over the last ``width`` steps."""
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
        for i in range(len(values))
    ]


def write_compare(found: Mapping[str, Any], folder: Path) -> Path:
    """Write ``compare.md`` and ``compare.png`` into ``folder`` from what ``compare.json`` holds; returns the page."""
    save(compare_figure(found), folder / "compare.png")
    lines = [
        "# Balancers compared",
        compare_note(found),
        markdown(HEADINGS, compare_rows(found)),
        "![MaxVio over steps, and held-out text](compare.png)",
        f"Run on {found['hardware']['cpu']}, torch {found['versions'].get('torch', '?')}, begun {found['started']}. "
        "Every run is a folder beside this page; `compare.json` holds all results.",
    ]
    path = folder / "compare.md"
    write_atomically(path, ("\n\n".join(lines) + "\n").encode())
    return path
