from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trine.balance.record_format import FILE_NAME
from trine.views.dash_answer import Asked, answer, cell
from trine.views.dash_state import Runs, View


def fuzzed(data: bytes, random: np.random.Generator) -> bytes:
    """A recorder's file with some of it overwritten, cut out, doubled or cut off."""
    kind, at = int(random.integers(5)), int(random.integers(len(data)))
    size = int(random.integers(1, 4096))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + size :]
    if kind == 2:
        return data[:at] + data[at : at + size] + data[at:]
    found = bytearray(data)
    for place in random.integers(0, len(data) if kind == 3 else 8192, size=int(random.integers(1, 30))).tolist():
        found[place] = int(random.integers(256))
    return bytes(found)


def survive(made: Path, folder: Path, first: int, count: int) -> None:
    folder.mkdir()
    (folder / "run.json").write_text((made / "run.json").read_text())
    data = (made / FILE_NAME).read_bytes()
    for seed in range(first, first + count):
        random = np.random.default_rng(seed)
        for left in folder.glob(f"{FILE_NAME}*"):
            left.unlink()
        (folder / FILE_NAME).write_bytes(fuzzed(data, random))
        runs = Runs([folder])
        assert runs.version(0)
        layer = int(random.integers(-1, 4))
        view = View(step=int(random.integers(70)), layer=layer if layer >= 0 else None)
        charts = runs.charts("balance", 0, view)
        assert charts and all(one.key != "problem" for one in charts), (seed, [one.empty for one in charts])
        words = {"step": str(view.step), **({} if view.layer is None else {"layer": str(view.layer)})}
        asked = Asked.of(runs, words)
        assert answer(runs, asked)
        cell(runs, asked, 1, 1)
        runs.run(0).close()  # type: ignore[union-attr]


def test_fifty_fuzzed_files_leave_the_page_standing(made: Path, tmp_path: Path) -> None:
    survive(made, tmp_path / "fuzzed", 0, 50)


@pytest.mark.slow
def test_a_thousand_fuzzed_files_leave_the_page_standing(made: Path, tmp_path: Path) -> None:
    survive(made, tmp_path / "fuzzed", 50, 950)
