"""Near-copies: who is tied to whom."""

from __future__ import annotations

from trine.data.families import near_copy_families


def _lines(tag: str, count: int) -> list[str]:
    return [f"{tag}: this is line number {i} and no other" for i in range(count)]


def test_a_document_that_quotes_another_is_tied_to_it_and_chains_join() -> None:
    a, b, c, d = _lines("a", 30), _lines("b", 30), _lines("c", 30), _lines("d", 30)
    texts = ["\n".join(part) for part in (a + b, d, b + c, c, a[:3] + _lines("e", 30))]
    found = near_copy_families(texts)
    assert found.first == [0, 1, 0, 0, 4]
    assert found.size == [3, 1, 3, 3, 1]


def test_the_share_is_taken_of_the_smaller_document_at_the_stated_place() -> None:
    common, rest = _lines("common", 9), _lines("rest", 21)
    long = "\n".join(common + _lines("long", 500))
    assert near_copy_families([long, "\n".join(common + rest)], tied_at=0.29).size == [2, 2]
    assert near_copy_families([long, "\n".join(common + rest)], tied_at=0.33).size == [1, 1]


def test_short_lines_and_little_text_tie_nothing() -> None:
    keywords = "\n".join(["return None", "else:", "pass", "try:"] * 50)
    licence = "Licensed to everybody under the usual terms.\n"
    texts = [keywords + "\n" + _lines("a", 1)[0], keywords + "\n" + _lines("b", 1)[0], licence, licence + "x" * 20]
    assert near_copy_families(texts).size == [1, 1, 1, 1]


def test_indentation_does_not_hide_a_copy_and_repeats_count_once() -> None:
    a = _lines("a", 20)
    assert near_copy_families(["\n".join(a), "\n".join("    " + line for line in a)]).size == [2, 2]
    once = [*_lines("x", 4), *_lines("y", 20)]
    assert near_copy_families(["\n".join(_lines("x", 4) * 50), "\n".join(once)], least_shared=500).size == [1, 1]


def test_boilerplate_in_very_many_documents_ties_nothing() -> None:
    header = "\n".join(_lines("header", 10))
    texts = [header + "\n" + f"only document {i:04d} says this" for i in range(300)]
    assert set(near_copy_families(texts).size) == {1}
    assert set(near_copy_families(texts[:200]).size) == {200}


def test_nothing_and_one() -> None:
    assert near_copy_families([]).first == []
    assert near_copy_families(["text"]).size == [1]
