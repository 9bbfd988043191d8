"""Figures of an evaluation draw what they are given, and refuse nothing to draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trine.views import figures_eval


def cells(seed: int = 0, lengths: tuple[int, ...] = (512, 2048), chance: float = 0.25) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    return [
        {"length": n, "depth": d, "accuracy": draw.random(), "token_accuracy": 1.0, "gap": 3 * draw.random(),
         "chance": chance, "loss": 1.0, "count": 4}
        for n in lengths for d in (0.0, 0.5, 1.0)
    ]  # fmt: skip


POSITIONS = {
    "length": 100,
    "edges": [0, 16, 32, 64, 100],
    "loss": [4.0, 3.5, 3.3, None],
    "tokens": [160, 140, 90, 0],
    "documents": [10, 9, 4, 0],
    "matched": [None, 4.1, 3.4, None],
}


def numbers(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_positions_show_their_bins_and_leave_gaps() -> None:
    figure = figures_eval.loss_by_position(POSITIONS, [32, 32, 4096])
    (axes,) = figure.axes
    curve = next(line for line in axes.lines if line.get_label() == "tokens of this bin")
    assert curve.get_ydata().tolist() == [4.0, 3.5, 3.3]
    assert curve.get_xdata().tolist() == pytest.approx([(8 * 16) ** 0.5, (16 * 32) ** 0.5, (32 * 64) ** 0.5])
    assert numbers(axes).count("trained length ") == 1  # 4 096 lies outside, 32 twice is one
    assert {"10", "9", "4"} <= set(numbers(axes)) and "0" not in numbers(axes)


def test_a_map_a_family_with_its_chance() -> None:
    families = {"passkey": cells(1, chance=1 / 90_000), "latest": cells(2), "count": cells(3, (512,))}
    figure = figures_eval.recall_heatmaps(families)
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    assert titles == ["passkey  (chance 0 %)", "latest  (chance 25 %)", "count  (chance 25 %)"]
    assert len(numbers(figure.axes[0])) == 6 and len(numbers(figure.axes[2])) == 3
    assert numbers(figure.axes[1])[0] == f"{100 * families['latest'][0]['accuracy']:.0f}"
    gap = figures_eval.recall_heatmaps(families, "gap")
    assert gap.axes[0].get_title(loc="left") == "passkey"
    assert numbers(gap.axes[0])[0] == f"{families['passkey'][0]['gap']:.1f}"
    with pytest.raises(ValueError, match="families: found none"):
        figures_eval.recall_heatmaps({})


def test_symbol_recall_has_a_line_a_number_of_pairs() -> None:
    found = [
        {"length": n, "pairs": p, "distance": None, "accuracy": 0.9, "chance": 1 / p, "gap": 2.0}
        for n in (64, 256) for p in (4, 16)
    ]  # fmt: skip
    found += [
        {"length": 256, "pairs": 4, "distance": d, "accuracy": 0.9, "chance": 0.25, "gap": 1.5} for d in (240, 96)
    ]
    figure = figures_eval.symbol_recall(found, 64)
    left, right = figure.axes
    assert [line.get_label() for line in left.lines if not line.get_label().startswith("_")] == ["4 pairs", "16 pairs"]
    assert right.lines[0].get_xdata().tolist() == [96, 240]
    with pytest.raises(ValueError, match="recall: found no case"):
        figures_eval.symbol_recall([], 64)
