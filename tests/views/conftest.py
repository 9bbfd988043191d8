"""Runs for the tests of pages: synthesised ones, and ones with looks inside their model."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from dash_page import SIZE

from trine.config import ModelConfig
from trine.model import Model
from trine.train.probes import ProbeText, look_inside
from trine.views.demo import write_demo

Line = dict[str, Any]
SMALL: dict[str, Any] = {
    "width": 48,
    "layers": 4,
    "mla_layers": (3,),
    "heads": 2,
    "head_dim": 16,
    "q_rank": 24,
    "kv_rank": 16,
    "shared_key_dim": 8,
    "dense_width": 64,
    "experts": 4,
    "top_k": 2,
    "latent_width": 16,
    "expert_width": 24,
    "vocab_size": 61,
    "block_layers": 2,
}


@pytest.fixture(scope="session")
def looked() -> Callable[..., Line]:
    """A look inside a small model, as a line of ``probes.jsonl``; keywords change the model's configuration."""
    known: dict[str, Line] = {}

    def look(step: int, **changes: Any) -> Line:
        key = repr(sorted(changes.items()))
        if key not in known:
            torch.manual_seed(5)
            model = Model(ModelConfig(**{**SMALL, **changes}))
            bounds = torch.tensor([0, 9, 24], dtype=torch.int32)
            known[key] = look_inside(model, ProbeText(torch.arange(24) % 61, bounds, "held-out text"))
        return {"format_version": 1, "step": step, **copy.deepcopy(known[key])}

    return look


@pytest.fixture
def run_with(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run's folder: lines of its files, and fields of ``run.json``."""

    def write(
        name: str = "run",
        *,
        probes: Sequence[Line | str] = (),
        metrics: Sequence[Line | str] = (),
        events: Sequence[Line | str] = (),
        **record: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"format_version": 1, "planned_steps": 40, **record}))
        for file, lines in (("probes", probes), ("metrics", metrics), ("events", events)):
            if lines:
                text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
                (folder / f"{file}.jsonl").write_text(text)
        return folder

    return write


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthesised run; to be read only."""
    folder = tmp_path_factory.mktemp("runs") / "good"
    write_demo(folder, SIZE, "good", "quantile")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(made, tmp_path / "good"))
