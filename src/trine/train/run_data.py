"""The sources of a run's data by name: the standard library, folders, and generated tasks."""

from __future__ import annotations

import functools

from trine.data import Recipe
from trine.data.generated import task_corpus
from trine.tasks import FAMILIES
from trine.train.config import DataConfig, parse_tasks

CHARACTERS_A_TOKEN = 4  # of generated text under a vocabulary learned from code


def sources_of(config: DataConfig) -> list[str | Recipe]:
    """What `trine.data.prepare` is to read: the first source, then the others in the order given.

    Raises:
        ValueError: an unknown task family.
    """
    return [config.source, *(_tasks(one) if one.startswith("tasks:") else one for one in config.more)]


def _tasks(text: str) -> Recipe:
    count, length, families = parse_tasks(text)
    unknown = [name for name in families if name not in FAMILIES]
    if unknown:
        raise ValueError(f"data.more: found the task family {unknown[0]!r}, need some of {', '.join(FAMILIES)}")
    name, characters = f"tasks-{length}", CHARACTERS_A_TOKEN * length
    origin = {
        "kind": "generated",
        "families": ",".join(families or FAMILIES),
        "length": str(characters),
        "seed": str(length),
    }
    make = functools.partial(
        task_corpus, name, count=count, length=characters, families=families, seed=int(origin["seed"])
    )
    return Recipe(name, origin, make)
