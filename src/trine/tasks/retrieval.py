"""Families inside one long document: a pass key, codes by name, words that stand for words, chains of variables."""

from __future__ import annotations

import re
from itertools import pairwise

from trine.tasks._draws import Draws
from trine.tasks.build import WORLDS, Fact, Facts

NOUNS = (
    *("amber", "anvil", "arrow", "badge", "banjo", "beacon", "birch", "bramble", "bridge", "canyon", "cedar", "cobalt"),
    *("comet", "copper", "coral", "dagger", "ember", "falcon", "feather", "garnet", "glacier", "granite", "harbor"),
    *("hazel", "heron", "indigo", "island", "ivory", "jasper", "juniper", "lantern", "lemon", "magnet", "maple"),
    *("marble", "meadow", "nickel", "olive", "onyx", "orchid", "otter", "pebble", "pepper", "pigeon", "quartz"),
    *("raven", "ribbon", "saddle", "salmon", "silver", "spruce", "sulfur", "thistle", "timber", "topaz", "turnip"),
    *("velvet", "violet", "walnut", "willow", "winter", "zephyr"),
)
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


def numbers(draws: Draws, count: int) -> list[str]:
    """Different numbers of five digits."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[str(draws.between(10_000, 99_999))] = None
    return list(found)


def passkey(draws: Draws, items: int, distractors: int) -> Facts:
    """One number between sentences; distractors are numbers of other things."""
    keys = numbers(draws, WORLDS + distractors)
    facts = [Fact(tuple(f"The pass key is {key}." for key in keys[:WORLDS]), True)]
    doors = draws.sample(NOUNS, distractors)
    facts += [
        Fact((f"The {door} locker has number {number}.",)) for door, number in zip(doors, keys[WORLDS:], strict=True)
    ]
    chance = 1 / (1 + distractors) if distractors else 1 / 90_000
    return Facts(tuple(draws.shuffled(facts)), "What is the pass key?", tuple(keys[:WORLDS]), chance)


def solve_passkey(text: str) -> str | None:
    """The number, when exactly one is given."""
    found = set(re.findall(r"The pass key is (\d{5})\.", text))
    return found.pop() if len(found) == 1 else None


def _codes(draws: Draws, asked: int, distractors: int) -> tuple[list[Fact], list[str], list[list[str]]]:
    """Codes of ``asked`` names (evidence) and of others; names asked, and their codes in each world."""
    names = draws.sample(NOUNS, asked + distractors)
    fresh = numbers(draws, asked * WORLDS + distractors)
    worlds = [fresh[w * asked : (w + 1) * asked] for w in range(WORLDS)]
    facts = [
        Fact(tuple(f"The code of {name} is {worlds[w][i]}." for w in range(WORLDS)), True)
        for i, name in enumerate(names[:asked])
    ]
    rest = zip(names[asked:], fresh[asked * WORLDS :], strict=True)
    facts += [Fact((f"The code of {name} is {number}.",)) for name, number in rest]
    return draws.shuffled(facts), names[:asked], worlds


def multi_key(draws: Draws, items: int, distractors: int) -> Facts:
    """One code among those of many names."""
    facts, names, worlds = _codes(draws, 1, distractors)
    return Facts(
        tuple(facts), f"What is the code of {names[0]}?", tuple(world[0] for world in worlds), 1 / (1 + distractors)
    )


def multi_query(draws: Draws, items: int, distractors: int) -> Facts:
    """Several codes at once, in the order asked."""
    facts, names, worlds = _codes(draws, items, distractors)
    question = f"What are the codes of {_listed(names)}, in this order?"
    chance = 1.0
    for i in range(items):
        chance /= items + distractors - i
    return Facts(tuple(facts), question, tuple(", ".join(world) for world in worlds), chance)


def _code_table(text: str) -> dict[str, str] | None:
    """Every name's code; None when a name has two."""
    table: dict[str, str] = {}
    for name, number in re.findall(r"The code of (\w+) is (\d{5})\.", text):
        if table.setdefault(name, number) != number:
            return None
    return table


def solve_multi_key(text: str) -> str | None:
    """The code of the name in the question."""
    asked = re.search(r"What is the code of (\w+)\?", text)
    table = _code_table(text)
    return table.get(asked[1]) if asked and table is not None else None


def solve_multi_query(text: str) -> str | None:
    """The codes of the names in the question, in its order."""
    asked = re.search(r"What are the codes of (.+), in this order\?", text)
    table = _code_table(text)
    if not asked or table is None:
        return None
    names = _unlisted(asked[1])
    return ", ".join(table[name] for name in names) if all(name in table for name in names) else None


def multi_value(draws: Draws, items: int, distractors: int) -> Facts:
    """All codes of one name, in the order of the text; distractors are codes of another."""
    mine, other = draws.sample(NOUNS, 2)
    fresh = numbers(draws, items * WORLDS + distractors)
    worlds = [fresh[w * items : (w + 1) * items] for w in range(WORLDS)]
    facts = [
        Fact(tuple(f"One of the codes of {mine} is {worlds[w][i]}." for w in range(WORLDS)), True) for i in range(items)
    ]
    # Put between the others at random, without changing the order of the evidence: the answer follows it.
    for number in fresh[items * WORLDS :]:
        facts.insert(draws.below(len(facts) + 1), Fact((f"One of the codes of {other} is {number}.",)))
    chance = 1.0
    for i in range(items):
        chance /= items + distractors - i
    question = f"What are the {items} codes of {mine}, in the order of the text?"
    return Facts(tuple(facts), question, tuple(", ".join(world) for world in worlds), chance)


def solve_multi_value(text: str) -> str | None:
    """The codes of the name in the question, when there are as many as it says."""
    asked = re.search(r"What are the (\d+) codes of (\w+), in the order of the text\?", text)
    if not asked:
        return None
    found = re.findall(rf"One of the codes of {asked[2]} is (\d{{5}})\.", text)
    return ", ".join(found) if len(found) == int(asked[1]) else None


def recall(draws: Draws, items: int, distractors: int) -> Facts:
    """Words that stand for words; several are asked for."""
    names = draws.sample(NOUNS, items + distractors)
    left = [noun for noun in NOUNS if noun not in names]
    pool = draws.sample(left, min(len(left), items * WORLDS + distractors))
    need = items * WORLDS + distractors
    if len(pool) < need:
        raise ValueError(f"recall: {items} items and {distractors} distractors need {need + len(names)} words")
    worlds = [pool[w * items : (w + 1) * items] for w in range(WORLDS)]
    facts = [
        Fact(tuple(f"{name} -> {worlds[w][i]};" for w in range(WORLDS)), True) for i, name in enumerate(names[:items])
    ]
    facts += [Fact((f"{a} -> {b};",)) for a, b in zip(names[items:], pool[items * WORLDS :], strict=True)]
    asked = draws.shuffled(range(items))
    question = f"What do {_listed([names[i] for i in asked])} stand for, in this order?"
    chance = 1.0
    for i in range(items):
        chance /= items + distractors - i
    answers = tuple(", ".join(world[i] for i in asked) for world in worlds)
    return Facts(tuple(draws.shuffled(facts)), question, answers, chance)


def solve_recall_words(text: str) -> str | None:
    """What the words in the question stand for."""
    asked = re.search(r"What do (.+) stand for, in this order\?", text)
    table = dict(re.findall(r"(\w+) -> (\w+);", text))
    if not asked:
        return None
    names = _unlisted(asked[1])
    return ", ".join(table[name] for name in names) if all(name in table for name in names) else None


def variables(draws: Draws, items: int, distractors: int) -> Facts:
    """A chain of assignments: the first variable gets a number, each next one the value of the one before."""
    names: dict[str, None] = {}
    while len(names) < (1 + distractors) * items:
        letters = draws.sample(_LETTERS, 2)
        names[f"{letters[0]}{draws.between(10, 99)}{letters[1]}"] = None
    values = numbers(draws, WORLDS + distractors)
    every = list(names)
    chains = [every[i * items : (i + 1) * items] for i in range(1 + distractors)]
    facts = _chain(chains[0], values[:WORLDS], True)
    for chain, value in zip(chains[1:], values[WORLDS:], strict=True):
        at = 0
        for fact in _chain(chain, [value], False):  # its own order is kept, too
            at = draws.between(at, len(facts))
            facts.insert(at, fact)
            at += 1
    question = f"What is the value of variable {chains[0][-1]}?"
    return Facts(tuple(facts), question, tuple(values[:WORLDS]), 1 / (1 + distractors))


def _chain(names: list[str], values: list[str], evidence: bool) -> list[Fact]:
    first = Fact(tuple(f"Variable {names[0]} is set to {value}." for value in values), evidence)
    rest = pairwise(names)
    return [first, *(Fact((f"Variable {b} takes the value of variable {a}.",), evidence) for a, b in rest)]


def solve_variables(text: str) -> str | None:
    """Follow the chain back to a number."""
    asked = re.search(r"What is the value of variable (\w+)\?", text)
    values = dict(re.findall(r"Variable (\w+) is set to (\d{5})\.", text))
    origin = dict(re.findall(r"Variable (\w+) takes the value of variable (\w+)\.", text))
    name = asked[1] if asked else ""
    for _ in range(len(origin) + 1):
        if name in values:
            return values[name]
        name = origin.get(name, "")
    return None


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _unlisted(text: str) -> list[str]:
    return re.split(r", | and ", text)
