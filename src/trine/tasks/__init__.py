"""Generated tasks whose answer needs evidence from afar: seed -> documents, question, answer, evidence spans.

Training data, evaluation and environments are thin users of the same tasks. Nothing here tokenises or needs a
framework. ``make("multi_key", seed=0, length=4_000, depth=0.2)`` gives a `Task`; ``task.render()`` its text.
"""

from __future__ import annotations

from trine.tasks._splits import SEEDS, SPLITS, Split, split_of, stream_number
from trine.tasks.families import FAMILIES, Family, make, solve
from trine.tasks.symbols import RecallRow, recall_row, solve_recall
from trine.tasks.task import Rendered, Segment, Span, Task, TaskDocument

__all__ = [
    "FAMILIES",
    "SEEDS",
    "SPLITS",
    "Family",
    "RecallRow",
    "Rendered",
    "Segment",
    "Span",
    "Split",
    "Task",
    "TaskDocument",
    "make",
    "recall_row",
    "solve",
    "solve_recall",
    "split_of",
    "stream_number",
]
