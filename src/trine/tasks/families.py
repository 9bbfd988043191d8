"""The families by name, and `make`, which every user of them calls."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trine.tasks import aggregation, association, repository, retrieval
from trine.tasks._draws import Draws
from trine.tasks._splits import Split, draw_for, stream_number
from trine.tasks.build import Facts, Style, Units, assemble
from trine.tasks.task import Task, TaskDocument


@dataclass(frozen=True)
class Family:
    """A kind of task.

    Attributes:
        name: its name.
        about: what it asks of a reader, in a line.
        style: how its text is laid out.
        draw: (draws, items, distractors) -> everything but the filler.
        solve: text up to the question mark (or beyond) -> answer, or None where the text does not settle it. Exact,
            from the text alone.
        items: pieces of evidence, or of what they are chosen from, by default.
        distractors: facts of the same form that do not matter, by default.
    """

    name: str
    about: str
    style: Style
    draw: Callable[[Draws, int, int], Facts]
    solve: Callable[[str], str | None]
    items: int
    distractors: int


_P: Style = "prose"
_D: Style = "documents"
_R: Style = "repository"

_ALL = (
    Family("passkey", "one number in a long text", _P, retrieval.passkey, retrieval.solve_passkey, 1, 0),
    Family("multi_key", "one code among many", _P, retrieval.multi_key, retrieval.solve_multi_key, 1, 5),
    Family("multi_value", "all codes of a name", _P, retrieval.multi_value, retrieval.solve_multi_value, 3, 3),
    Family("multi_query", "codes of several names", _P, retrieval.multi_query, retrieval.solve_multi_query, 3, 3),
    Family("recall", "words that stand for words", _P, retrieval.recall, retrieval.solve_recall_words, 2, 4),
    Family("variables", "a chain of assignments", _P, retrieval.variables, retrieval.solve_variables, 3, 1),
    Family("count", "a sum over all documents", _D, aggregation.count, aggregation.solve_count, 4, 4),
    Family("latest", "the last of many notices", _D, aggregation.latest, aggregation.solve_latest, 4, 2),
    Family("contradiction", "two that disagree", _D, aggregation.contradiction, aggregation.solve_contradiction, 3, 0),
    Family("definition", "behind an import", _R, repository.definition, repository.solve_definition, 2, 2),
    Family("constant", "after all its patches", _R, repository.constant, repository.solve_constant, 2, 2),
    Family("association", "no word in common", _P, association.association, association.solve_association, 1, 4),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""Every family by name."""


def family_named(name: str) -> Family:
    """The family ``name``.

    Raises:
        ValueError: there is none; the message suggests the nearest.
    """
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"family: found {name!r}, need one of {', '.join(FAMILIES)}{hint}")
    return FAMILIES[name]


def make(
    family: str,
    seed: int,
    split: Split = "train",
    *,
    length: int = 2_048,
    units: Units = len,
    depth: float | None = None,
    items: int | None = None,
    distractors: int | None = None,
    haystack: Sequence[str] | None = None,
) -> Task:
    """Make a task: a pure function of its arguments.

    Args:
        family: a name in `FAMILIES`.
        seed: 0 to 2^56 - 1.
        split: "train", "evaluation" or "held_out". Seeds of different splits have different streams behind them, and
            a hash of question and evidence lets every set of facts into one split only.
        length: units of the whole text, question and answer included (see `assemble` on how exact it is).
        units: how units are counted, characters by default.
        depth: where the evidence lies, 0 (beginning) to 1 (right before the question); None scatters it.
        items: see `Family`.
        distractors: see `Family`.
        haystack: sentences (or functions) of your own to hide the evidence in.

    Raises:
        ValueError: an unknown family or split, an argument out of range, a length too small for the facts, or a
            haystack that itself answers the question.
    """
    kind = family_named(family)
    items = kind.items if items is None else items
    distractors = kind.distractors if distractors is None else distractors
    if items < 1 or distractors < 0:
        raise ValueError(f"{family}: found {items} items and {distractors} distractors, need at least 1 and 0")
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth: found {depth}, need 0 to 1, or None")
    if haystack is not None and not any(haystack):
        raise ValueError("haystack: found no text in it")
    key = f"{family}/{stream_number(seed, split)}/{items}/{distractors}"
    facts = draw_for(key, split, lambda draws: kind.draw(draws, items, distractors), Facts.fingerprint)

    def task_of(documents: tuple[TaskDocument, ...]) -> Task:
        return Task(family, seed, split, documents, facts.question, facts.answers, facts.chance)

    documents = assemble(
        facts,
        kind.style,
        Draws(f"{key}/layout"),
        length=length,
        units=units,
        depth=depth,
        haystack=haystack,
        render=lambda documents: task_of(documents).render().text,
    )
    task = task_of(documents)
    if haystack is not None and kind.solve(task.render().prompt) != task.answer:
        raise ValueError(f"haystack: holds text of the form of family {family!r}, so that the answer is not settled")
    return task


def solve(family: str, text: str) -> str | None:
    """The answer that a task's prompt settles, derived from the text alone; None where it settles none."""
    return family_named(family).solve(text)
