"""Text without facts: sentences and functions between which evidence lies. No digit ever stands in a sentence."""

from __future__ import annotations

from trine.tasks._draws import Draws

_QUALITIES = (
    *("quiet", "narrow", "pale", "heavy", "distant", "crooked", "warm", "dusty", "slow", "bright", "hollow", "rough"),
    *("plain", "damp", "faded", "gentle", "steep", "wide", "sudden", "patient"),
)
_THINGS = (
    *("lamp", "fence", "kettle", "ladder", "window", "basket", "wheel", "curtain", "bucket", "chimney", "carpet"),
    *("gate", "blanket", "shelf", "rope", "mirror", "barrel", "stair", "table", "roof", "drawer", "cushion"),
)
_DEEDS = (
    *("leans against", "stands beside", "was left near", "casts a shadow on", "rests behind", "was moved toward"),
    *("lies under", "was painted like", "creaks beside", "hides", "reaches past", "was bought with"),
)
_TIMES = (
    *("in the morning", "before the rain", "all afternoon", "without a sound", "as it always has", "since the autumn"),
    *("while nobody looks", "near the end of the week", "once more", "for no clear reason", "until dusk", "again"),
)

_VERBS = ("merge", "split", "order", "trim", "collect", "reduce", "expand", "filter", "balance", "rotate", "join")
_OBJECTS = ("rows", "nodes", "lines", "edges", "parts", "words", "cells", "items", "slices", "blocks", "pages")
_BODIES = (
    "    seen = []\n    for one in {o}:\n        if one not in seen:\n            seen.append(one)\n    return seen",
    "    if not {o}:\n        return None\n    return max({o}, key=len)",
    "    total = zero\n    for one in {o}:\n        total = total + weight(one)\n    return total",
    "    left = list({o})\n    while left and not left[-1]:\n        left.pop()\n    return left",
    "    return [step(one) for one in {o} if one is not None]",
    "    done = {{}}\n    for one in {o}:\n        done.setdefault(key(one), []).append(one)\n    return done",
)
_ADVERBS = ("quickly", "twice", "late", "early", "inside", "outside", "safely", "again", "first", "alone")


def sentence(draws: Draws) -> str:
    """A sentence that says nothing anyone will ask for."""
    one, other = draws.choice(_THINGS), draws.choice(_THINGS)
    return (
        f"The {draws.choice(_QUALITIES)} {one} {draws.choice(_DEEDS)} the {draws.choice(_QUALITIES)} {other} "
        f"{draws.choice(_TIMES)}."
    )


def function(draws: Draws) -> str:
    """A small Python function without any constant."""
    subject = draws.choice(_OBJECTS)
    name = f"{draws.choice(_VERBS)}_{subject}_{draws.choice(_ADVERBS)}"
    return f"def {name}({subject}):\n{draws.choice(_BODIES).format(o=subject)}"


def words() -> frozenset[str]:
    """Every word that `sentence` can use."""
    phrases = (*_QUALITIES, *_THINGS, *_DEEDS, *_TIMES, "the")
    return frozenset(word for phrase in phrases for word in phrase.split())
