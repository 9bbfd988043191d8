"""What a task is: documents with the evidence marked, a question, an answer, and other worlds with other answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trine.tasks._draws import Draws
from trine.tasks._splits import Split

Kind = Literal["filler", "distractor", "evidence"]

QUESTION = "\n\nQuestion: "
ANSWER = "\nAnswer:"


@dataclass(frozen=True)
class Span:
    """Characters ``start`` to ``end - 1`` of a rendered text."""

    start: int
    end: int


@dataclass(frozen=True)
class Segment:
    """A stretch of a document.

    Attributes:
        texts: what it says in each world; a single text says the same in all of them.
        kind: evidence is what the answer needs, a distractor has its form but not its matter, filler has neither.
    """

    texts: tuple[str, ...]
    kind: Kind = "filler"

    def text(self, world: int) -> str:
        """What it says in a world."""
        return self.texts[world if len(self.texts) > 1 else 0]


@dataclass(frozen=True)
class TaskDocument:
    """One document of a task.

    Attributes:
        name: its name, empty where a task has only one.
        header: the line it begins with.
        segments: its text, piece by piece.
    """

    name: str
    header: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Rendered:
    """A task as text.

    Attributes:
        text: documents, question and answer; what a model may be trained on.
        documents: where each document lies, header included.
        evidence: where each piece of evidence lies.
        question: where the question lies.
        answer: where the answer lies, without the space before it.
    """

    text: str
    documents: tuple[Span, ...]
    evidence: tuple[Span, ...]
    question: Span
    answer: Span

    @property
    def prompt(self) -> str:
        """Everything before the answer and its space: what a model is asked with."""
        return self.text[: self.answer.start - 1]

    @property
    def completion(self) -> str:
        """The answer with the space before it: what should follow `prompt`."""
        return self.text[self.answer.start - 1 : self.answer.end]

    @property
    def distance(self) -> int:
        """Characters from the end of the earliest evidence to the answer; 0 without evidence."""
        return self.answer.start - min((span.end for span in self.evidence), default=self.answer.start)


@dataclass(frozen=True)
class Task:
    """A question about documents whose answer needs evidence at known places.

    Attributes:
        family: name of its family in `trine.tasks.FAMILIES`.
        seed: what it was made from, together with ``split``.
        split: "train", "evaluation" or "held_out"; the same facts are never in two of them.
        documents: what is read before the question.
        question: the question.
        answers: the answer in each world.
        chance: how often a guess among the possible answers that the text offers is right.
        world: which world the documents tell of.
    """

    family: str
    seed: int
    split: Split
    documents: tuple[TaskDocument, ...]
    question: str
    answers: tuple[str, ...]
    chance: float
    world: int = 0

    @property
    def answer(self) -> str:
        """The answer in the present world."""
        return self.answers[self.world]

    def render(self, answer: str | None = None) -> Rendered:
        """The task as text, ending with its answer (or with ``answer``, to see what a model thinks of another)."""
        parts: list[str] = []
        documents, evidence = [], []
        at = 0

        def put(text: str) -> Span:
            nonlocal at
            parts.append(text)
            at += len(text)
            return Span(at - len(text), at)

        for i, document in enumerate(self.documents):
            if i:
                put("\n\n")
            begin = put(document.header).start
            for segment in document.segments:
                span = put(segment.text(self.world))
                if segment.kind == "evidence":
                    text = segment.text(self.world)
                    evidence.append(Span(span.start, span.end - (len(text) - len(text.rstrip()))))
            documents.append(Span(begin, at))
        put(QUESTION)
        question = put(self.question)
        put(ANSWER + " ")
        final = put(self.answer if answer is None else answer)
        return Rendered("".join(parts), tuple(documents), tuple(evidence), question, final)

    def without_evidence(self) -> Task:
        """The same task with every piece of evidence cut out: nothing in the text settles its answer any more."""
        return replace(
            self,
            documents=tuple(
                replace(document, segments=tuple(one for one in document.segments if one.kind != "evidence"))
                for document in self.documents
            ),
        )

    def swap_evidence(self, seed: int = 0) -> Task:
        """The same task told in another world: evidence and answer differ, nothing else does."""
        others = [world for world in range(len(self.answers)) if world != self.world]
        return replace(self, world=Draws(f"swap/{self.family}/{self.seed}/{self.split}/{seed}").choice(others))
