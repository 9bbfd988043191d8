"""Every example runs, and what it claims to show is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kda_in_your_block_learns_to_look_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("kda_in_your_block").main() > 0.8
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("decoding differs from the parallel form by")
    assert float(last.split(";")[0].split()[-1]) < 1e-4


def test_attn_res_in_a_small_transformer_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("attn_res_in_a_small_transformer").main() < 4.2
    last = capsys.readouterr().out.splitlines()[-1]
    weights = [float(word.strip(",")) for word in last.split(":")[1].split("(")[0].split()]
    assert len(weights) == 7
    assert sum(weights) == pytest.approx(1.0, abs=0.05)


def test_every_example_explains_itself_and_is_offered_in_the_readme() -> None:
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    paths = sorted(EXAMPLES.glob("*.py"))
    assert len(paths) >= 3
    for path in paths:
        assert path.read_text(encoding="utf-8").startswith('"""'), path.name
        assert f"(examples/{path.name})" in readme, path.name
