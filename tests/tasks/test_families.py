"""Every family: the evidence settles the answer, nothing else does, and it lies where it was asked to lie."""

from __future__ import annotations

import re

import pytest

from trine.tasks import FAMILIES, SPLITS, Task, make, solve
from trine.tasks.association import RELATIONS
from trine.tasks.filler import words

STOP = {"a", "the", "of", "to", "in", "on", "is", "was", "has", "and", "or", "with", "who", "that", "at", "be", "by"}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_evidence_settles_the_answer_and_nothing_else_does(family: str, split: str) -> None:
    for seed in range(6):
        task = make(family, seed, split, length=2_500 + 37 * seed)  # type: ignore[arg-type]
        assert solve(family, task.render().prompt) == task.answer
        assert solve(family, task.without_evidence().render().prompt) is None
        swapped = task.swap_evidence(seed)
        assert swapped.answer != task.answer
        assert solve(family, swapped.render().prompt) == swapped.answer
        # Told with the old answer, the swapped text contradicts it: what the evidence gap is measured on.
        assert swapped.render(task.answer).completion == task.render().completion


@pytest.mark.parametrize("family", FAMILIES)
def test_each_single_piece_of_evidence_is_needed(family: str) -> None:
    """Cut any one piece: the answer is open."""
    task = make(family, 3, length=3_000)
    spans = task.render().evidence
    assert spans
    text = task.render().prompt
    for span in spans:
        assert solve(family, text[: span.start] + text[span.end :]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_spans_point_at_what_they_name(family: str) -> None:
    task = make(family, 1, "evaluation", length=2_400)
    shown = task.render()
    assert shown.text == shown.prompt + shown.completion
    assert shown.text[shown.answer.start : shown.answer.end] == task.answer
    assert shown.text[shown.question.start : shown.question.end] == task.question
    assert shown.completion == f" {task.answer}"
    for span in shown.evidence:
        piece = shown.text[span.start : span.end]
        assert piece == piece.strip() and piece
        assert any(d.start <= span.start and span.end <= d.end for d in shown.documents)
    assert "".join(shown.text[d.start : d.end] for d in shown.documents).count("Question:") == 0
    several = FAMILIES[family].style != "prose"
    assert (len(shown.documents) > 1) == several
    assert len({document.name for document in task.documents}) == len(task.documents)
    assert 0 < task.chance <= 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_length_in_characters_is_exact(family: str) -> None:
    for length in (1_973, 4_096, 20_001):
        assert len(make(family, 5, length=length).render().text) == length


def test_length_in_other_units_is_exact_where_words_can_meet_it() -> None:
    def units(text: str) -> int:
        return len(re.findall(r"\w+|[^\w\s]", text))

    for family in FAMILIES:
        assert units(make(family, 2, length=900, units=units).render().text) == 900
    found = len(make("passkey", 2, length=999, units=lambda text: len(text) // 2).render().text)
    assert found // 2 == 999


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_depth_places_the_evidence(family: str, depth: float) -> None:
    shown = make(family, 4, length=24_000, depth=depth).render()
    for span in shown.evidence:
        assert abs(span.start / shown.question.start - depth) < 0.12


def test_a_task_is_a_function_of_its_arguments() -> None:
    assert make("latest", 7, length=1_500) == make("latest", 7, length=1_500)
    assert make("latest", 7, length=1_500) != make("latest", 8, length=1_500)
    near, far = (make("multi_key", 7, length=length) for length in (1_500, 6_000))
    assert (near.question, near.answers) == (far.question, far.answers)  # the length changes the filler alone


@pytest.mark.parametrize("family", FAMILIES)
def test_swapping_changes_evidence_alone(family: str) -> None:
    task = make(family, 9, length=2_500)
    swapped = task.swap_evidence(1)

    def rest(one: Task) -> list[str]:
        return [
            segment.text(one.world)
            for document in one.documents
            for segment in document.segments
            if segment.kind != "evidence"
        ]

    assert rest(task) == rest(swapped)
    assert task.question == swapped.question
    assert task.swap_evidence(2).world in range(1, len(task.answers))
    assert {task.swap_evidence(seed).world for seed in range(20)} == set(range(1, len(task.answers)))


def test_more_items_and_distractors() -> None:
    for family in FAMILIES:
        task = make(family, 0, length=9_000, items=5, distractors=8)
        assert solve(family, task.render().prompt) == task.answer
        assert solve(family, task.without_evidence().render().prompt) is None
    kinds = [s.kind for d in make("multi_key", 0, length=3_000, distractors=9).documents for s in d.segments]
    assert (kinds.count("distractor"), kinds.count("evidence")) == (9, 1)


def test_needles_share_no_word_with_their_questions() -> None:
    def stems(text: str) -> set[str]:
        return {word[:5] for word in re.findall(r"[a-z]+", text.lower()) if word not in STOP}

    for says, asks in RELATIONS:
        assert not stems(says) & stems(asks), (says, asks)
        assert not {word for word in re.findall(r"[a-z]+", asks.lower()) if word not in STOP} & words()


def test_filler_holds_no_digit_and_a_haystack_may_be_ones_own() -> None:
    task = make("passkey", 0, length=5_000)
    assert set(re.findall(r"\d+", task.render().prompt)) == {task.answer}
    lines = [f"Line {i} of a real book." for i in range(40)]
    own = make("passkey", 0, length=5_000, haystack=lines)
    assert own.answer == task.answer and "Line 7 of a real book." in own.render().text
    with pytest.raises(ValueError, match="haystack: holds text of the form of family 'passkey'"):
        make("passkey", 0, length=5_000, haystack=["The pass key is 12345."])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "passkeys"}, r"family: found 'passkeys', need one of passkey, .*; did you mean 'passkey'\?"),
        ({"seed": -1}, "seed: found -1, need 0 to"),
        ({"split": "test"}, "split: found 'test', need one of train, evaluation, held_out"),
        ({"length": 40}, r"length: found 40, need at least \d+ for the facts"),
        ({"depth": 1.5}, "depth: found 1.5, need 0 to 1"),
        ({"items": 0}, "passkey: found 0 items and 0 distractors"),
        ({"haystack": [""]}, "haystack: found no text in it"),
        ({"family": "contradiction", "items": 30}, "contradiction: found 30 items, need at most 19"),
        ({"family": "recall", "items": 20}, "recall: 20 items and 4 distractors need 108 words"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**{"family": "passkey", "seed": 0, **arguments})  # type: ignore[arg-type]
