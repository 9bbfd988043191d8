"""Families in a small repository: what a function returns through an import, and a constant after all its changes."""

from __future__ import annotations

import re

from trine.tasks._draws import Draws
from trine.tasks.build import WORLDS, Fact, Facts
from trine.tasks.retrieval import NOUNS, numbers

_CONSTANTS = ("LIMIT", "TIMEOUT", "CAPACITY", "RETRIES", "OFFSET", "THRESHOLD", "WIDTH", "BUDGET")


def definition(draws: Draws, items: int, distractors: int) -> Facts:
    """Modules that define the same constant; one file imports it from one of them and returns it."""
    constant = draws.choice(_CONSTANTS)
    modules = draws.sample(NOUNS, 1 + distractors)
    users = draws.sample(NOUNS, 1 + distractors)
    values = numbers(draws, WORLDS + distractors)
    facts = [
        Fact(tuple(f"{constant} = {value}" for value in values[:WORLDS]), True, f"settings/{modules[0]}.py"),
        Fact((_user(constant, modules[0], users[0]),), True, f"app/{users[0]}.py"),
    ]
    for module, user, value in zip(modules[1:], users[1:], values[WORLDS:], strict=True):
        facts.append(Fact((f"{constant} = {value}",), path=f"settings/{module}.py"))
        facts.append(Fact((_user(constant, module, user),), path=f"app/{user}.py"))
    question = f"What does start_{users[0]}() in app/{users[0]}.py return?"
    return Facts(tuple(draws.shuffled(facts)), question, tuple(values[:WORLDS]), 1 / (1 + distractors))


def _user(constant: str, module: str, user: str) -> str:
    return f"from settings.{module} import {constant}\n\n\ndef start_{user}():\n    return {constant}"


def _files(text: str) -> dict[str, str]:
    """Text of each file by its path."""
    parts = re.split(r"^# file: (\S+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def solve_definition(text: str) -> str | None:
    """Read the function, follow its import, read the constant."""
    asked = re.search(r"What does start_(\w+)\(\) in (\S+) return\?", text)
    files = _files(text)
    if not asked:
        return None
    user = files.get(asked[2], "")
    imported = re.search(r"^from settings\.(\w+) import (\w+)$", user, flags=re.MULTILINE)
    if not imported or f"def start_{asked[1]}():\n    return {imported[2]}" not in user:
        return None
    found = re.search(rf"^{imported[2]} = (\d+)$", files.get(f"settings/{imported[1]}.py", ""), flags=re.MULTILINE)
    return found[1] if found else None


def constant(draws: Draws, items: int, distractors: int) -> Facts:
    """A constant and numbered patches that change it, in any order; distractors are patches of other constants."""
    mine, *others = draws.sample(_CONSTANTS, 1 + min(len(_CONSTANTS) - 1, max(1, distractors)))
    module = draws.choice(NOUNS)
    path = f"settings/{module}.py"
    fresh = numbers(draws, items + WORLDS + distractors)
    final, steps = fresh[:WORLDS], fresh[WORLDS : WORLDS + items]
    facts = [Fact((f"{mine} = {steps[0]}",), path=path)]
    for n in range(1, items):
        facts.append(Fact((_patch(path, mine, steps[n - 1], steps[n]),), path=_patch_path(n, mine)))
    last = tuple(_patch(path, mine, steps[-1], value) for value in final)
    facts.append(Fact(last, True, _patch_path(items, mine)))
    for n, value in enumerate(fresh[WORLDS + items :]):
        other = others[n % len(others)]
        number = 1 + n // len(others)
        text = _patch(path, other, str(draws.between(10_000, 99_999)), value)
        facts.append(Fact((text,), path=_patch_path(number, other)))
    question = f"What is {mine} in {path} after all {items} patches to it?"
    return Facts(tuple(draws.shuffled(facts)), question, tuple(final), 1 / (items + 1))


def _patch(path: str, name: str, old: str, new: str) -> str:
    return f"# {path}\n-{name} = {old}\n+{name} = {new}"


def _patch_path(number: int, name: str) -> str:
    return f"patches/{name.lower()}_{number}.diff"


def solve_constant(text: str) -> str | None:
    """What the last patch sets."""
    asked = re.search(r"What is (\w+) in (\S+) after all (\d+) patches to it\?", text)
    if not asked:
        return None
    patch = _files(text).get(_patch_path(int(asked[3]), asked[1]), "")
    found = re.search(rf"^# {re.escape(asked[2])}\n-{asked[1]} = \d+\n\+{asked[1]} = (\d+)$", patch, flags=re.MULTILINE)
    return found[1] if found else None
