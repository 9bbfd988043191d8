"""What figures drawn by Matplotlib share, and that they are written whole."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from trine.views import figures


def test_smoothing_does_not_end_on_the_noise_of_the_last_step() -> None:
    values = np.zeros(200)
    values[-1] = 11.0
    np.testing.assert_allclose(figures.smooth(values)[-6:], 1.0)  # a window of 11 steps, whole to the last
    values = np.zeros(200)
    values[0] = 11.0
    assert figures.smooth(values)[0] == 11.0  # a steep beginning is not flattened
    assert np.isnan(figures.smooth(np.full(3, np.nan))).all()


def test_saving_is_whole_or_not_at_all_and_changes_no_settings(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    lines = [{"step": s, "tokens": 1000 * s, "loss": 5.0 / s, "tokens_per_s": 7000.0} for s in range(1, 31)]
    figure = figures.compare(["a run"], [lines])
    path = figures.save(figure, tmp_path / "curves.png")
    with Image.open(path) as picture:
        assert picture.size == (912, 768)
        assert len(picture.convert("RGB").getcolors(1_000_000) or []) > 10
    assert [entry.name for entry in tmp_path.iterdir()] == ["curves.png"]
    assert dict(mpl.rcParams) == before
    with pytest.raises(FileNotFoundError):
        figures.save(figure, tmp_path / "missing" / "plot.png")


@pytest.mark.parametrize(
    ("value", "text"),
    [(12_500_000, "12.5 M"), (950, "950"), (4_700, "4.7 K"), (2.7795e12, "2.78 T"), (1.16e9, "1.16 B")],
)
def test_short_counts(value: float, text: str) -> None:
    assert figures.short_count(value) == text
