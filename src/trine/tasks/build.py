"""From facts to a task of a given length: where each fact lies, in which document, with how much filler around."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trine.tasks import filler
from trine.tasks._draws import Draws
from trine.tasks.task import Segment, TaskDocument

Units = Callable[[str], int]
"""How long a text is: ``len`` counts characters; ``lambda text: len(tokenizer.encode(text))`` counts tokens."""

Style = Literal["prose", "documents", "repository"]

WORLDS = 4  # a task's evidence is written for so many answers
_PAD_WORD = " so"


@dataclass(frozen=True)
class Fact:
    """Something a text says. ``texts`` has one entry a world, or one for all; ``path`` names the file it belongs in."""

    texts: tuple[str, ...]
    evidence: bool = False
    path: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything but the filler: what a family draws.

    Attributes:
        facts: in the order of the text.
        question: the question.
        answers: the answer in each world.
        chance: see `trine.tasks.Task`.
    """

    facts: tuple[Fact, ...]
    question: str
    answers: tuple[str, ...]
    chance: float

    def fingerprint(self) -> list[str]:
        """What decides which split these facts belong to: the question, and the evidence as world 0 tells it."""
        return [self.question, *sorted(fact.texts[0] for fact in self.facts if fact.evidence)]


@dataclass(frozen=True)
class _Form:
    between: str  # what separates pieces of a document
    header: str  # first line of a document
    pieces: int  # pieces of filler a document; 0 makes one document of everything
    pad: str  # what padding begins with
    make: Callable[[Draws], str]


_FORMS: dict[Style, _Form] = {
    "prose": _Form(" ", "", 0, "", filler.sentence),
    "documents": _Form(" ", "[{name}]\n", 8, "", filler.sentence),
    "repository": _Form("\n\n\n", "# file: {name}\n", 6, "\n#", filler.function),
}

_FOLDERS = ("core", "tools", "parse", "store", "views", "common")
_STEMS = ("base", "helpers", "rows", "nodes", "lines", "graph", "queue", "shapes", "names", "paths", "times", "checks")


def assemble(
    facts: Facts,
    style: Style,
    draws: Draws,
    *,
    length: int,
    units: Units,
    depth: float | None,
    haystack: Sequence[str] | None,
    render: Callable[[tuple[TaskDocument, ...]], str],
) -> tuple[TaskDocument, ...]:
    """Lay facts and filler out in documents so that ``units(render(documents))`` is ``length``.

    The length is met exactly wherever single dots and short words can meet it, as they can in characters and in all
    byte-level vocabularies tried; else the result is the longest found below it.

    Args:
        facts: what the text says.
        style: one text, several documents, or files of a repository.
        draws: where the choices come from.
        length: units wanted.
        units: see `Units`.
        depth: 0 puts the evidence at the beginning, 1 right before the question; None scatters it.
        haystack: text pieces to use instead of made ones, from a random one on, again from the first after the last.
        render: the whole text of documents, question and answer.

    Raises:
        ValueError: ``length`` is too small for the facts alone.
    """
    form = _FORMS[style]
    places = _fractions(facts.facts, draws.fork("places"), depth)
    more = _Filler(form, draws.fork("filler"), haystack)
    plan = _Layout(form, facts.facts, places, draws)

    def total(pieces: int, pad: str = "") -> int:
        return units(render(plan.documents(more.first(pieces), pad)))

    least = total(0)
    if least > length:
        raise ValueError(f"length: found {length}, need at least {least} for the facts of this task")
    pieces, reached = _most(total, least, length)
    return plan.documents(more.first(pieces), _padding(total, pieces, reached, length, form.pad))


def _fractions(facts: Sequence[Fact], draws: Draws, depth: float | None) -> list[float]:
    """Where each fact lies, as a fraction of the filler; facts of a kind keep their order."""
    if depth is None:
        return sorted(draws.uniform() for _ in facts)
    others = iter(sorted(draws.uniform() for fact in facts if not fact.evidence))
    return [depth if fact.evidence else next(others) for fact in facts]


class _Filler:
    """As many pieces of filler as asked for; asking again gives the same ones."""

    def __init__(self, form: _Form, draws: Draws, haystack: Sequence[str] | None) -> None:
        self._make, self._draws, self._made = form.make, draws, list[str]()
        self._haystack = haystack
        self._start = draws.below(len(haystack)) if haystack else 0

    def first(self, count: int) -> list[str]:
        """The first ``count`` pieces; a larger count begins with the same ones."""
        while len(self._made) < count:
            if self._haystack is None:
                self._made.append(self._make(self._draws))
            else:
                self._made.append(self._haystack[(self._start + len(self._made)) % len(self._haystack)])
        return self._made[:count]


class _Layout:
    """Turns a number of filler pieces into documents, always in the same way."""

    def __init__(self, form: _Form, facts: Sequence[Fact], places: Sequence[float], draws: Draws) -> None:
        self._form, self._facts, self._places, self._draws = form, facts, places, draws

    def documents(self, pieces: Sequence[str], pad: str) -> tuple[TaskDocument, ...]:
        """The facts at their places among ``pieces``; ``pad`` ends the last document."""
        order = sorted(range(len(self._facts)), key=lambda i: (self._places[i], i))
        done: list[list[Fact | str]] = [[]]
        held = fillers = 0  # facts and fillers in the last document
        at = 0
        for i in [*order, None]:
            until = len(pieces) if i is None else round(self._places[i] * len(pieces))
            while at < until:
                if self._form.pieces and fillers >= self._form.pieces:
                    done.append([])
                    held = fillers = 0
                done[-1].append(pieces[at])
                at, fillers = at + 1, fillers + 1
            if i is not None:
                if self._form.pieces and held:
                    done.append([])
                    held = fillers = 0
                done[-1].append(self._facts[i])
                held += 1
        names = self._draws.fork("names")
        taken: set[str] = {fact.path for fact in self._facts if fact.path}
        last = len(done) - 1
        return tuple(self._document(one, names, taken, pad if n == last else "") for n, one in enumerate(done))

    def _document(self, parts: Sequence[Fact | str], names: Draws, taken: set[str], pad: str) -> TaskDocument:
        form = self._form
        if not form.pieces:
            name = ""
        else:
            name = next((part.path for part in parts if isinstance(part, Fact) and part.path), "")
            while not name or (name in taken and not any(isinstance(p, Fact) and p.path == name for p in parts)):
                name = _name(form, names)
            taken.add(name)
        segments: list[Segment] = []
        plain: list[str] = []
        for n, part in enumerate(parts):
            end = "" if n == len(parts) - 1 else form.between
            if isinstance(part, str):
                plain.append(part + end)
                continue
            if plain:
                segments.append(Segment(("".join(plain),)))
                plain = []
            kind: Literal["evidence", "distractor"] = "evidence" if part.evidence else "distractor"
            segments.append(Segment(tuple(text + end for text in part.texts), kind))
        plain.append(pad)
        if "".join(plain):
            segments.append(Segment(("".join(plain),)))
        return TaskDocument(name, form.header.format(name=name), tuple(segments))


def _name(form: _Form, draws: Draws) -> str:
    if form.make is filler.function:
        return f"{draws.choice(_FOLDERS)}/{draws.choice(_STEMS)}_{draws.between(100, 99_999)}.py"
    return f"note {draws.between(1_000, 9_999_999)}"


def _most(total: Callable[[int], int], least: int, length: int) -> tuple[int, int]:
    """The largest number of filler pieces that fits, and the units reached with it; few calls for long texts."""
    low, low_units = 0, least
    high, high_units = None, 0
    guess = 1
    while high is None or high - low > 1:
        found = total(guess)
        if found <= length:
            low, low_units = guess, found
        else:
            high, high_units = guess, found
        if high is None:
            slope = max(1.0, (low_units - least) / low)
            guess = max(low + 1, min(4 * low + 16, int(low + (length - low_units) / slope)))
        else:
            share = (length - low_units) / max(1, high_units - low_units)
            guess = min(high - 1, max(low + 1, low + int(share * (high - low))))
    return low, low_units


def _padding(total: Callable[[int, str], int], pieces: int, reached: int, length: int, begin: str) -> str:
    """Words and dots that fill what is left."""
    left = length - reached
    if not left:
        return ""
    probe = total(pieces, begin + 8 * _PAD_WORD)
    head = total(pieces, begin) - reached if begin else 0
    each = max(1, round((probe - reached - head) / 8))
    words = max(0, (left - head) // each)
    pad = (begin if head <= left else "") + words * _PAD_WORD
    while words and total(pieces, pad) > length:
        words -= 1
        pad = pad.removesuffix(_PAD_WORD)
    while total(pieces, pad) < length:
        longer = next((pad + end for end in (".", " a", "-", " .") if total(pieces, pad + end) <= length), None)
        if longer is None:
            break
        pad = longer
    return pad
