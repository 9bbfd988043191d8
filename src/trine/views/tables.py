"""The tables of a run and of a preset: rows once, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[str, ...]

# The yardsticks a reader is shown, in the order of `eval.json`'s names, and what they are.
YARDSTICKS = {
    "gzip": "gzip -9",
    "ngram3": "byte 3-gram",
    "ngram_best": "best byte n-gram of order up to 8",
    "xz": "xz -9",
    "xz_primed": "xz -9e that has read the training files",
}

PARTS = {
    "embedding": "token embedding",
    "head": "output head",
    "kda": "Kimi Delta Attention",
    "mla": "Gated MLA",
    "dense": "dense feed-forward",
    "experts": "routed experts",
    "shared": "shared experts",
    "latent": "latent projections and norm",
    "router": "routers",
    "depth_queries": "depth queries and gains",
    "norms": "other norms",
}

EVALUATION_HEADINGS = ("", "bits per byte", "the model is")
MODEL_HEADINGS = ("part", "parameters", "share")


def evaluation_rows(evaluation: Mapping[str, Any]) -> list[Row]:
    """The model beside each yardstick, both on the held-out files without near-copies; the model's own row first."""
    model = evaluation["bits_per_byte"]
    rows: list[Row] = [("this model", _bits(model), "")]
    for name, label in YARDSTICKS.items():
        level = (evaluation.get("baselines") or {}).get(name)
        if level is None:
            continue
        order = evaluation["baselines"].get("ngram_best_order") if name == "ngram_best" else None
        difference = "" if model is None else better_or_worse(model, level)
        rows.append((f"{label} (order {order})" if order else label, _bits(level), difference))
    return rows


def better_or_worse(model: float, level: float) -> str:
    """How the model's bits compare with a yardstick's, in words."""
    share = 100 * (1 - model / level)
    return f"{share:.1f} % better" if share >= 0 else f"{-share:.1f} % worse"


def model_rows(facts: Mapping[str, Any]) -> list[Row]:
    """Parameters a part, then total and active; parts a model does not have are left out."""
    total = facts["total"]
    rows: list[Row] = [
        (PARTS.get(part, part), f"{count:,}", f"{100 * count / total:.1f} %")
        for part, count in facts["parts"].items()
        if count
    ]
    rows.append(("total", f"{total:,}", "100 %"))
    rows.append(("used by one token", f"{facts['active']:,}", f"{100 * facts['active'] / total:.1f} %"))
    return rows


def memory_line(facts: Mapping[str, Any]) -> str:
    """What a sequence carries, in one sentence."""
    state, latent = facts["kda_state_bytes"], facts["latent_bytes_per_token"]
    return f"A sequence carries {size(state)} of KDA state whatever its length, and {size(latent)} of latents a token."


def size(count: float) -> str:
    """Bytes as a person reads them: 27648 as "27.0 KiB"."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count:.0f} bytes"


def markdown(headings: Sequence[str], rows: Sequence[Row]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = [_line(headings), _line(["---", *["---:"] * (len(headings) - 1)])]
    return "\n".join([*lines, *(_line([escape(cell) for cell in row]) for row in rows)])


def terminal(headings: Sequence[str], rows: Sequence[Row], caption: str = "") -> Table:
    """The same table for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption or None, caption_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def evaluation_table(evaluation: Mapping[str, Any]) -> Table:
    """What `trine eval` shows."""
    return terminal(EVALUATION_HEADINGS, evaluation_rows(evaluation), evaluation_note(evaluation))


def evaluation_note(evaluation: Mapping[str, Any]) -> str:
    """Which bytes were scored, and the number with the near-copies in."""
    about = evaluation.get("held_out") or {}
    note = "Held-out files without near-copies of training files"
    if "documents" in about:
        note = f"{about['documents']} held-out files, {about['bytes']:,} bytes, without near-copies of training files"
    everything = evaluation.get("bits_per_byte_all")
    return note + ("." if everything is None else f"; with them the model reaches {everything:.3f}.")


def model_table(name: str, facts: Mapping[str, Any], planned: tuple[int, int] | None = None) -> Table:
    """What `trine info` shows; ``planned`` is (vocabulary, parameters) of the training plan, where it has others."""
    note = memory_line(facts)
    if "vocabulary" in facts:
        note = f"The vocabulary has {facts['vocabulary']:,} ids. {note}"
    if planned is not None:
        note += f" The training plan {name} learns {planned[0]:,} ids, which makes {planned[1]:,} parameters."
    return terminal((name, *MODEL_HEADINGS[1:]), model_rows(facts), note)


def escape(text: str) -> str:
    """Text that Markdown shows as it is, inside a table cell."""
    for sign in ("\\", "|", "`", "*", "_", "<"):
        text = text.replace(sign, f"\\{sign}" if sign != "<" else "&lt;")
    return text.replace("\n", " ")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
