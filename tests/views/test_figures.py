"""The figures of a run: what is drawn, where, and that odd records do not break them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from trine.views import figures

EVALUATION = {
    "bits_per_byte": 1.5,
    "baselines": {"gzip": 2.05, "xz": 1.8, "ngram3": 2.65, "ngram_best": 1.87, "xz_primed": 1.41, "other": 9.0},
}


def steps(count: int, layers: int = 4, **more: Any) -> list[dict[str, Any]]:
    """A made-up run of `count` steps of 1000 tokens."""
    return [
        {
            "step": s,
            "stage": 0,
            "tokens": 1000 * s,
            "loss": 5.0 / s,
            "bits_per_byte": 1.5 + 4.0 / s,
            "lr": 0.01 / s,
            "grad_norm": 0.5,
            "tokens_per_s": 7000.0,
            "max_vio": [0.1 * (layer + 1) for layer in range(layers)],
            "dead_experts": 0,
            "seconds": 0.1,
            **more,
        }
        for s in range(1, count + 1)
    ]


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_learning_curve_draws_steps_baselines_and_the_held_out_result() -> None:
    axes = figures.learning_curve(steps(50), EVALUATION).axes[0]
    raw, smooth = axes.lines[:2]
    np.testing.assert_allclose(raw.get_xdata(), 1000.0 * np.arange(1, 51))
    np.testing.assert_allclose(raw.get_ydata(), 1.5 + 4.0 / np.arange(1, 51))
    assert smooth.get_ydata()[-1] == pytest.approx(1.5 + 4.0 * sum(1 / n for n in (48, 49, 50)) / 3)
    levels = sorted(line.get_ydata()[0] for line in axes.lines[3:])
    assert levels == [1.41, 1.8, 1.87, 2.05, 2.65]
    assert sorted(texts(axes)) == [
        "best byte n-gram: 1.870",
        "byte 3-gram: 2.650",
        "gzip -9: 2.050",
        "held out: 1.500",
        "xz -9: 1.800",
        "xz, training files seen: 1.410",
    ]
    low, high = axes.get_ylim()
    assert low < 1.41 and high > 2.65


def test_stages_are_counted_from_one_below_the_legend() -> None:
    lines = [{**line, "stage": int(i >= 20)} for i, line in enumerate(steps(50))]
    axes = figures.learning_curve(lines, EVALUATION).axes[0]
    (label,) = [text for text in axes.texts if text.get_text().strip().startswith("stage")]
    assert label.get_text() == " stage 2" and label.get_position() == (20_000, 0.02)


def test_stages_are_marked_between_their_steps_in_every_plot_over_steps() -> None:
    lines = [{**line, "stage": int(i >= 20) + int(i >= 40)} for i, line in enumerate(steps(50))]
    plots = [figures.expert_load(lines, 16, 2), figures.optimizer(lines), figures.throughput(lines)]
    for axes in (axes for figure in plots for axes in figure.axes):
        marks = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
        assert marks == [lines[20]["step"] - 0.5, lines[40]["step"] - 0.5], axes.get_title()


def test_labels_of_close_levels_do_not_overlap() -> None:
    close = {"bits_per_byte": 1.8, "baselines": {"xz": 1.801, "ngram_best": 1.802, "gzip": 1.803}}
    axes = figures.learning_curve(steps(50), close).axes[0]
    places = sorted(text.xyann[1] for text in axes.texts)
    low, high = axes.get_ylim()
    assert min(np.diff(places)) >= 0.06 * (high - low)


def test_learning_curve_without_evaluation_has_no_levels() -> None:
    axes = figures.learning_curve(steps(5)).axes[0]
    assert len(axes.lines) == 2 and not axes.texts


def test_missing_baselines_are_left_out() -> None:
    axes = figures.learning_curve(steps(5), {"bits_per_byte": 1.5, "baselines": {"xz": None}}).axes[0]
    assert texts(axes) == ["held out: 1.500"]


def test_expert_load_shows_layers_and_the_sampling_floor() -> None:
    axes = figures.expert_load(steps(50), experts=56, top_k=2).axes
    assert len(axes) == 1
    mean, floor = axes[0].lines
    np.testing.assert_allclose(mean.get_ydata(), 0.25)
    np.testing.assert_allclose(floor.get_ydata(), math.sqrt(2 * math.log(56) / (1000 * 2 / 56)))


def test_smoothing_does_not_end_on_the_noise_of_the_last_step() -> None:
    values = np.zeros(200)
    values[-1] = 11.0
    np.testing.assert_allclose(figures.smooth(values)[-6:], 1.0)  # a window of 11 steps, whole to the last
    values = np.zeros(200)
    values[0] = 11.0
    assert figures.smooth(values)[0] == 11.0  # a steep beginning is not flattened
    assert np.isnan(figures.smooth(np.full(3, np.nan))).all()


def below_the_legend(axes: Any, height: float) -> float:
    """How far below the legend's lower edge a height is drawn, in pixels."""
    axes.get_figure(root=True).draw_without_rendering()
    legend = axes.get_legend().get_window_extent()
    return float(legend.y0 - axes.transData.transform((0, height))[1])


@pytest.mark.parametrize("tallest", [0.3, 0.9, 1.9, 20.0])
def test_no_spike_of_the_load_is_cut_or_covered(tallest: float) -> None:
    records = [{**one, "load_percentiles": {"p5": 0.5, "p50": 1.0, "p95": 1.6}} for one in steps(120)]
    records[110]["max_vio"] = [0.1, tallest]
    records[110]["load_percentiles"] = {"p5": 0.2, "p50": 1.0, "p95": 2.9}
    top, bottom = figures.expert_load(records, 56, 2).axes
    assert below_the_legend(bottom, tallest) > 0 and below_the_legend(top, 2.9) > 0
    corner = figures.overview(records, EVALUATION, 56, 2).axes[1]
    assert corner.get_title(loc="left") == "MaxVio of the experts"
    assert below_the_legend(corner, tallest) > 0
    assert (corner.get_yscale() == "log") == (tallest == 20.0)


def test_expert_load_draws_percentiles_where_recorded() -> None:
    bands = {"p5": 0.8, "p50": 1.0, "p95": 1.3}
    top, bottom = figures.expert_load(steps(50, load_percentiles=bands), 56, 2).axes
    assert top.get_title(loc="left") == "Load of an expert / mean load"
    assert bottom.get_title(loc="left") == "MaxVio of the experts"
    np.testing.assert_allclose(top.lines[0].get_ydata(), 1.0)


def test_model_without_routed_experts_still_has_an_overview() -> None:
    assert len(figures.overview(steps(3, layers=0), EVALUATION, 56, 2).axes) == 4


def test_optimizer_takes_one_rate_or_one_a_group() -> None:
    one, _ = figures.optimizer(steps(10)).axes
    assert len(one.lines) == 1
    groups = {"muon": 0.01, "embeddings": 0.02, "other": 0.001}
    three, norm = figures.optimizer(steps(10, lr=groups)).axes
    assert [line.get_label() for line in three.lines] == list(groups)
    assert norm.get_yscale() == "linear"


def test_spikes_of_the_gradient_norm_switch_to_a_logarithmic_scale() -> None:
    records = steps(100)
    records[40]["grad_norm"] = 500.0
    assert figures.optimizer(records).axes[1].get_yscale() == "log"


def test_throughput_names_the_median() -> None:
    records = steps(9)
    records[3]["tokens_per_s"] = 100.0
    axes = figures.throughput(records).axes[0]
    assert axes.get_legend().get_texts()[0].get_text() == "median 7 K"


def test_a_step_without_a_loss_leaves_a_gap_not_a_crash() -> None:
    records = steps(60)
    records[30]["bits_per_byte"] = float("nan")
    axes = figures.learning_curve(records, EVALUATION).axes[0]
    assert np.isfinite(axes.get_ylim()).all()
    assert np.isfinite(axes.lines[1].get_ydata()).all()


@pytest.mark.parametrize("draw", [figures.learning_curve, figures.optimizer, figures.throughput])
def test_no_step_is_refused(draw: Any) -> None:
    with pytest.raises(ValueError, match="metrics: found no step, need at least one"):
        draw([])
    with pytest.raises(ValueError, match="found no step"):
        figures.expert_load([], 56, 2)
    with pytest.raises(ValueError, match="found no step"):
        figures.overview([], None, 56, 2)


def test_one_step_is_enough_and_visible() -> None:
    axes = figures.learning_curve(steps(1)).axes[0]
    assert axes.lines[1].get_marker() == "o"


def test_saving_is_whole_or_not_at_all_and_changes_no_settings(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    path = figures.save(figures.overview(steps(30), EVALUATION, 56, 2, "a run"), tmp_path / "overview.png")
    with Image.open(path) as picture:
        assert picture.size == (1320, 840)
        assert len(picture.convert("RGB").getcolors(1_000_000)) > 10
    assert [entry.name for entry in tmp_path.iterdir()] == ["overview.png"]
    assert dict(mpl.rcParams) == before
    with pytest.raises(FileNotFoundError):
        figures.save(figures.throughput(steps(3)), tmp_path / "missing" / "plot.png")


def test_floor_falls_with_the_root_of_the_load() -> None:
    assert figures.sampling_floor(896, 146.0) == pytest.approx(0.305, abs=0.001)
    assert figures.sampling_floor(896, 4 * 146.0) == pytest.approx(0.1526, abs=0.001)


def test_tokens_of_a_step_come_from_the_running_total() -> None:
    records = [{"step": 1, "tokens": 100}, {"step": 2, "tokens": 200}, {"step": 4, "tokens": 600}]
    assert figures.step_tokens(records) == [100, 100, 200]


@pytest.mark.parametrize(
    ("value", "text"),
    [(12_500_000, "12.5 M"), (950, "950"), (4_700, "4.7 K"), (2.7795e12, "2.78 T"), (1.16e9, "1.16 B")],
)
def test_short_counts(value: float, text: str) -> None:
    assert figures.short_count(value) == text
