from __future__ import annotations

from pathlib import Path

import pytest

from trine.data import Recipe, prepare
from trine.train.config import DataConfig, parse_tasks
from trine.train.run_data import sources_of


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tasks:20x300", (20, 300, ())),
        ("tasks:1x64:passkey", (1, 64, ("passkey",))),
        ("tasks:5x64:a+b", (5, 64, ("a", "b"))),
    ],
)
def test_tasks_are_named_in_one_word(text: str, found: tuple[int, int, tuple[str, ...]]) -> None:
    assert parse_tasks(text) == found


@pytest.mark.parametrize("text", ["tasks:", "tasks:0x5", "tasks:5", "tasks:5x0", "tasks:5x5:", "tasks:-1x5"])
def test_what_names_no_tasks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"data\.more: found 'tasks:"):
        DataConfig(more=(text,))


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match=r"data\.more: found the task family 'nothing', need some of "):
        sources_of(DataConfig(more=("tasks:3x300:nothing",)))


def test_tasks_are_a_source_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.py").write_text(f"value_{number} = {number} + {number * 7}\n" * 20)
    sources = sources_of(DataConfig(source=str(folder), more=("tasks:24x500",)))
    assert isinstance(sources[1], Recipe)
    shards = prepare(tmp_path / "data", sources, 262, 4)
    assert shards.sources == ("texts", "tasks-500")
    assert sum(document.source == "tasks-500" for document in shards.documents) == 24
    again = prepare(tmp_path / "data", sources_of(DataConfig(source=str(folder), more=("tasks:24x500",))), 262, 4)
    assert again.hash == shards.hash
