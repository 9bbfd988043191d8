"""What is installed, and what importing it drags in: no card, no triton and no extra may be needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trine

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("triton", "transformers", "matplotlib", "rich", "tyro", "tokenizers", "PIL")


def python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter; returns stdout and stderr together."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_importing_the_package_and_an_operator_adds_nothing_heavy_to_torch() -> None:
    out = python(
        "import sys, trine; print('torch' in sys.modules)\n"
        "import torch; before = set(sys.modules)\n"
        f"import trine.ops.kda; new = set(sys.modules) - before\n"
        f"print(sorted(set({HEAVY!r}) & new), any(name.startswith('torch._dynamo') for name in new))"
    )
    assert out.split("\n")[:2] == ["False", "[] False"]


# B038 (ByteDance-Seed/AHN#4, vllm-project/vllm-ascend#6695): a package that cannot be imported without a working GPU
# and triton, so that people with a CPU cannot run anything.
BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class NoTriton(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, NoTriton())
import dataclasses
import torch
import trine
from trine.config import preset
from trine.engine import Sampling, generate
from trine.ops import BackendUnavailable
from trine.ops.kda import kda

torch.manual_seed(0)
model = trine.Model(preset("smoke"))
hidden = model(torch.randint(256, (70,)), torch.tensor([0, 30, 30, 70]))
model.logits(hidden).logsumexp(-1).sum().backward()
assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
(done,) = generate(model, [[1, 2, 3]], Sampling(max_tokens=5))
assert len(done.tokens) == 5
q = torch.randn(1, 4, 1, 8)
try:
    kda(q, q, q, q, q[..., 0], backend="triton")
except BackendUnavailable as error:
    print("refused:", error)
print("works")
"""


def test_B038_works_without_triton_and_says_which_path_it_takes() -> None:
    log = "import logging; logging.getLogger('trine').addHandler(logging.StreamHandler())\n"
    lines = python(log + BLOCKED, TRINE_LOG="info").splitlines()
    assert lines[-1] == "works"
    assert lines.count("kda runs on backend 'torch' for cpu tensors") == 1
    assert "refused: kda: backend 'triton' cannot run here: needs CUDA tensors, found cpu" in lines


def test_version_is_told_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == trine.__version__
    assert f"## {trine.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_types_licence_and_notice_travel_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (Path(trine.__file__).parent / "py.typed").exists()
    assert project["tool"]["setuptools"]["package-data"]["trine"] == [
        "py.typed",
        "ops/kda/native.cpp",
        "views/dash.css",
        "views/dash.js",
    ]
    assert project["project"]["license"] == "Apache-2.0"
    for name in project["project"]["license-files"]:
        assert (ROOT / name).is_file()


def test_every_requirement_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    required = {re.split(r"[<>=!; ]", name)[0] for name in project["dependencies"]}
    assert required <= pinned
    tested = {re.split(r"[<>=!; ]", name)[0] for name in project["optional-dependencies"]["dev"]}
    assert tested <= pinned
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines if line and not line.startswith("#"))


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Ask make what it would do, without doing it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)


def test_cpu_machines_take_the_cpu_build_and_fall_back_to_the_index(tmp_path: Path) -> None:
    plan = make("install", "TORCH=cpu", f"VENV={tmp_path}/v").stdout
    assert "'torch==2.13.0+cpu'" in plan
    assert "download.pytorch.org/whl/cpu" in plan
    assert plan.index("+cpu'") < plan.index("'torch==2.13.0' numpy")
    plan = make("install", "TORCH=cuda", f"VENV={tmp_path}/v").stdout
    assert "+cpu" not in plan
    assert "'torch==2.13.0'" in plan


def test_make_refuses_an_unknown_build(tmp_path: Path) -> None:
    done = make("install", "TORCH=tpu", f"VENV={tmp_path}/v")
    assert done.returncode == 2
    assert "TORCH: found 'tpu', need cpu or cuda" in done.stderr


def test_make_refuses_an_old_python_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.4\nexit 1\n')
    old.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", "install", f"PYTHON={old}", f"VENV={tmp_path}/v", "TORCH=cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[0]
        == "trine needs Python 3.11 or newer; found Python 3.10.4. Say which with PYTHON=..."
    )
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize("target", ["install", "train", "test", "test-all", "test-gpu", "bench"])
def test_targets_that_are_promised_exist(target: str, tmp_path: Path) -> None:
    done = make(target, f"VENV={tmp_path}/v", "PRESET=smoke")
    assert done.returncode == 0, done.stderr
    if target == "train":
        assert f"{tmp_path}/v/bin/trine train --preset smoke" in done.stdout


def test_ci_runs_the_tests_and_then_a_training_run() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "set -euo pipefail" in script
    assert script.index("\nmake test\n") < script.index("\nmake train PRESET=smoke\n")
