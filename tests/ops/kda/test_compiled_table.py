"""The committed table of compiled kernels describes the kernels and configurations that ship."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "benchmarks" / "results" / "compile-sm90.json"


def test_table_and_shipped_configurations_agree() -> None:
    """By hash, nothing is compiled. `make compile-check ARGS=--write` makes the table anew.

    In a process of its own: here kernels may have been loaded for the interpreter.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "compile_check.py", "--same-triton"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_hot_kernels_spill_nothing_and_fit_the_card() -> None:
    rows = json.loads(TABLE.read_text())
    assert any(row["hot"] for row in rows.values())
    assert [name for name, row in rows.items() if row["hot"] and row["stack_bytes"]] == []
    assert [name for name, row in rows.items() if row["shared_bytes"] > 227 * 1024] == []  # a Hopper block's limit
