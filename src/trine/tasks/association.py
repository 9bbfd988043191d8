"""Needles that share no word with their question: the answer needs what the words mean, as in NoLiMa (2502.05167)."""

from __future__ import annotations

import re

from trine.tasks._draws import Draws
from trine.tasks.build import WORLDS, Fact, Facts

NAMES = (
    *("Adele", "Bruno", "Carmen", "Dimitri", "Elena", "Felix", "Greta", "Hassan", "Ingrid", "Jonas", "Keiko", "Lars"),
    *("Mireille", "Nadia", "Otto", "Priya", "Quentin", "Rosa", "Stefan", "Tamara", "Umberto", "Valeria", "Wendel"),
    *("Xenia", "Yusuf", "Zora", "Anselm", "Bettina", "Conrad", "Dorothea", "Emil", "Fatima", "Gustav", "Henrietta"),
)

# (what the text says of a person, how the question asks for it)
RELATIONS = (
    ("keeps a cello under the bed", "Who owns a stringed instrument?"),
    ("spent August beside the Eiffel Tower", "Who has been to the capital of France?"),
    ("is allergic to milk and butter", "Who must avoid dairy?"),
    ("raises three beagles", "Who has dogs?"),
    ("set a bone for the neighbours' boy last week", "Who has medical skill?"),
    ("grows tulips and dahlias", "Who cultivates flowers?"),
    ("crossed the Sahara on a camel", "Who travelled through a desert?"),
    ("can speak with anyone in Lisbon", "Who knows Portuguese?"),
    ("repairs watches in a little shop", "Who works on devices that tell time?"),
    ("never eats meat or fish", "Who is a vegetarian?"),
    ("learned to steer a sloop as a child", "Who is able to sail boats?"),
    ("climbed the Matterhorn twice", "Who reached an alpine summit?"),
    ("bakes rye loaves every Sunday", "Who makes bread?"),
    ("watches Saturn through a telescope", "Who is fond of astronomy?"),
    ("was born in Kyoto", "Who comes from Japan?"),
    ("lost both front teeth at hockey", "Who needs a dentist?"),
    ("shears forty merinos each spring", "Who has sheep?"),
    ("argues cases before the court", "Who is a lawyer?"),
    ("swims a mile before breakfast", "Who takes exercise in water?"),
    ("saw the opening night of Hamlet", "Who went to the theatre?"),
    ("collects stamps with misprints", "Who is a philatelist?"),
    ("throws clay pots", "Who makes ceramics?"),
    ("knits mittens from alpaca yarn", "Who produces garments?"),
    ("teaches fractions to ten-year-olds", "Who gives lessons in mathematics?"),
)


def association(draws: Draws, items: int, distractors: int) -> Facts:
    """One person fits the question; distractors are other persons with other ways."""
    mine, *others = draws.sample(RELATIONS, 1 + distractors)
    people = draws.sample(NAMES, WORLDS + distractors)
    facts = [Fact(tuple(f"{name} {mine[0]}." for name in people[:WORLDS]), True)]
    facts += [Fact((f"{name} {says}.",)) for name, (says, _) in zip(people[WORLDS:], others, strict=True)]
    return Facts(tuple(draws.shuffled(facts)), mine[1], tuple(people[:WORLDS]), 1 / (1 + distractors))


def solve_association(text: str) -> str | None:
    """The person the question means; the solver has the table of meanings, a model has to know them."""
    _, mark, question = text.rpartition("Question: ")
    says = next((says for says, asks in RELATIONS if mark and question.startswith(asks)), None)
    if says is None:
        return None
    found = set(re.findall(rf"([A-Z]\w+) {re.escape(says)}\.", text))
    return found.pop() if len(found) == 1 else None
