"""Families over many documents: a sum over all pages, the latest of many notices, the one contradiction."""

from __future__ import annotations

import re

from trine.tasks._draws import Draws
from trine.tasks.build import WORLDS, Fact, Facts
from trine.tasks.retrieval import NOUNS

_TOWNS = (
    *("Aldermoor", "Brackwell", "Calderby", "Dunholm", "Eastmere", "Farrowby", "Glenhollow", "Hartwick", "Ivelston"),
    *("Kestrow", "Langmere", "Marlow Heath", "Northby", "Oakhaven", "Penrow", "Quarley", "Ravensea", "Stonebeck"),
    *("Thornleigh", "Ulverdale", "Westmarsh", "Yarrowfield"),
)


def count(draws: Draws, items: int, distractors: int) -> Facts:
    """A stock book in pages, one a document: how many are there on all pages together?"""
    mine, *others = draws.sample(NOUNS, 1 + max(1, distractors // max(1, items)))
    pages = [draws.between(2, 30) for _ in range(items)]
    worlds = [pages]
    while len(worlds) < WORLDS:
        other = list(pages)
        other[draws.below(items)] += draws.between(1, 30)
        if sum(other) not in map(sum, worlds):
            worlds.append(other)
    facts = [Fact(tuple(_page(mine, i, items, worlds[w][i]) for w in range(WORLDS)), True) for i in range(items)]
    facts += [
        Fact((_page(others[i // items % len(others)], i % items, items, draws.between(2, 30)),))
        for i in range(distractors)
    ]
    question = f"How many crates of {mine} do all {items} pages of the stock book list together?"
    # A guess knows at best the range of the sum.
    return Facts(tuple(draws.shuffled(facts)), question, tuple(str(sum(w)) for w in worlds), 1 / (28 * items + 1))


def _page(name: str, page: int, pages: int, crates: int) -> str:
    return f"Page {page + 1} of {pages} of the stock book lists {crates} crates of {name}."


def solve_count(text: str) -> str | None:
    """The sum, when every page is there once."""
    asked = re.search(r"How many crates of (\w+) do all (\d+) pages", text)
    if not asked:
        return None
    found = dict(re.findall(rf"Page (\d+) of {asked[2]} of the stock book lists (\d+) crates of {asked[1]}\.", text))
    complete = sorted(map(int, found)) == list(range(1, int(asked[2]) + 1))
    return str(sum(map(int, found.values()))) if complete else None


def latest(draws: Draws, items: int, distractors: int) -> Facts:
    """Numbered notices in any order, each sets a price: what holds after the last one?"""
    mine, *others = draws.sample(NOUNS, 1 + max(1, distractors))
    prices: dict[int, None] = {}
    while len(prices) < items - 1 + WORLDS:
        prices[draws.between(100, 999)] = None
    every = list(prices)
    final = every[:WORLDS]
    facts = [Fact(tuple(_notice(items, mine, price) for price in final), True)]
    facts += [Fact((_notice(n + 1, mine, price),)) for n, price in enumerate(every[WORLDS:])]
    facts += [Fact((_notice(items, others[i], draws.between(100, 999)),)) for i in range(distractors)]
    question = f"What is the price of {mine} after notice {items}, the last one?"
    return Facts(tuple(draws.shuffled(facts)), question, tuple(map(str, final)), 1 / items)


def _notice(number: int, name: str, price: int) -> str:
    return f"Notice {number}: the price of {name} is now {price}."


def solve_latest(text: str) -> str | None:
    """What the notice named in the question sets."""
    asked = re.search(r"What is the price of (\w+) after notice (\d+), the last one\?", text)
    if not asked:
        return None
    found = set(re.findall(rf"Notice {asked[2]}: the price of {asked[1]} is now (\d+)\.", text))
    return found.pop() if len(found) == 1 else None


def contradiction(draws: Draws, items: int, distractors: int) -> Facts:
    """Two records a town, in different documents; those of one town do not agree."""
    towns = draws.sample(_TOWNS, min(len(_TOWNS), items + WORLDS - 1))
    if len(towns) < items + WORLDS - 1:
        raise ValueError(f"contradiction: found {items} items, need at most {len(_TOWNS) - WORLDS + 1}")
    odd, rest = towns[:WORLDS], towns[WORLDS:]
    first, second = draws.sample(range(1801, 1990), 2)
    facts = [Fact(tuple(_record(town, year) for town in odd), True) for year in (first, second)]
    for town in rest:
        year = draws.between(1801, 1989)
        facts += 2 * [Fact((_record(town, year),))]
    return Facts(
        tuple(draws.shuffled(facts)),
        "About the bridge of which town do two records disagree?",
        tuple(odd),
        1 / items,
    )


def _record(town: str, year: int) -> str:
    return f"The bridge of {town} was opened in {year}."


def solve_contradiction(text: str) -> str | None:
    """The one town with two years."""
    years: dict[str, set[str]] = {}
    for town, year in re.findall(r"The bridge of ([A-Z][\w ]+?) was opened in (\d{4})\.", text):
        years.setdefault(town, set()).add(year)
    odd = [town for town, found in years.items() if len(found) > 1]
    return odd[0] if len(odd) == 1 else None
