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


def test_every_example_says_how_it_is_run() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert f"python examples/{path.name}" in path.read_text(), path.name
