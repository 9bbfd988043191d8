"""What the README says is run, counted or looked up here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trine.config import PRESETS
from trine.model import info

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def in_words(count: int) -> str:
    """A count with three digits and a unit, as the table has it: 4.71 M."""
    size, unit = next(((s, u) for s, u in ((10**12, "T"), (10**9, "B")) if count >= s), (10**6, "M"))
    value = count / size
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def preset_row(name: str) -> str:
    """The row of the table of presets, counted."""
    config, facts = PRESETS[name], info(PRESETS[name])
    cells = [
        name,
        f"{config.width:,}",
        f"{len(config.kda_layers)} + {len(config.mla_layers)}",
        f"{config.heads} × {config.head_dim}",
        f"{config.experts}, {config.top_k}",
        in_words(facts["total"]),
        in_words(facts["active"]),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_operator_runs_in_ten_lines() -> None:
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("name", PRESETS)
def test_row_of_a_preset_is_what_counting_gives(name: str) -> None:
    assert preset_row(name) in README.splitlines()


def test_first_commands_are_the_two_that_do_everything() -> None:
    assert blocks("")[0] == "make train\nmake test\n"


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
