from __future__ import annotations

import numpy as np
import pytest
import torch

from trine import balance
from trine.balance.record_format import SUMMARY, HostWindow
from trine.balance.summary import Summaries


def window(loads: list[list[int]], bias: list[list[float]] | None = None, **more: object) -> HostWindow:
    loads_LE = np.array(loads, dtype=np.int64)
    count_L = loads_LE.sum(1) // 2
    values = {
        "loads_LE": loads_LE,
        "bias_LE": np.array(bias if bias is not None else loads_LE * 0, dtype=np.float32),
        "tokens_L": count_L,
        "dropped_L": count_L * 0,
        "saturated_L": count_L * 2,
        "overflow_L": count_L,
        "margins_LQ": np.arange(5 * len(loads), dtype=np.float64).reshape(-1, 5),
    }
    return HostWindow(**{**values, **more})


def test_every_figure_is_the_metric_of_that_name() -> None:
    loads = [[10, 20, 30, 40], [25, 25, 25, 25]]
    frame = Summaries(2, 4, 2, ranks=2).step(7, window(loads, [[0.1, -0.2, 0.0, 0.3], [1, 1, 1, 1]]))
    loads_LE = torch.tensor(loads)
    expected = {
        "max_vio": balance.max_violation(loads_LE),
        "cv": balance.coefficient_of_variation(loads_LE),
        "p5": balance.load_percentiles(loads_LE).p5,
        "p99": balance.load_percentiles(loads_LE).p99,
        "effective": balance.effective_experts(loads_LE),
        "entropy": balance.entropy(loads_LE),
        "quantile_error": [0.3, 0.0],
        "rank_overload": [1.4, 1.0],
        "bias_min": [-0.2, 1],
        "bias_max": [0.3, 1],
        "tokens": [50, 50],
        "dropped": [0, 0],
        "saturated": [0.5, 0.5],
        "overflow": [0.25, 0.25],
        "margin_p1": [0, 5],
        "margin_p99": [4, 9],
        "dead": [0, 0],
    }
    for name, values in expected.items():
        assert frame.summary(name).tolist() == pytest.approx(list(map(float, values)), rel=1e-6), name
    assert np.isnan(frame.summary("bias_step")).all() and np.isnan(frame.summary("flips")).all()
    assert (frame.first, frame.last, frame.steps) == (7, 7, 1) and frame.summary_KLM.shape == (1, 2, len(SUMMARY))


def test_steps_know_the_ones_before() -> None:
    summaries = Summaries(1, 4, 2)
    biases = [[0.0, 0, 0, 0], [1, 1, 1, 0], [0, 2, 0, 0], [1, 1, 0, 0]]
    found = [summaries.step(i, window([[6, 6, 6, 0]], [bias])) for i, bias in enumerate(biases, 1)]
    assert [frame.summary("bias_step")[0] for frame in found[1:]] == pytest.approx([0.75, 0.75, 0.5])
    assert [frame.summary("flips")[0] for frame in found[2:]] == pytest.approx([2 / 3, 1.0])
    # 4.5 tokens a step were due to the last expert: more than ten after three steps
    assert [frame.summary("dead")[0] for frame in found] == [0, 0, 1, 1]
    summaries.restart()
    again = summaries.step(9, window([[6, 6, 6, 0]]))
    assert np.isnan(again.summary("bias_step")[0]) and again.summary("dead")[0] == 0


def test_an_idle_layer_and_no_layer() -> None:
    frame = Summaries(1, 3, 1).step(1, window([[0, 0, 0]]))
    assert frame.summary("max_vio")[0] == frame.summary("saturated")[0] == frame.summary("quantile_error")[0] == 0
    empty = HostWindow(
        *(np.zeros((0, 3), dtype=kind) for kind in (np.int64, np.float32)),
        *[np.zeros(0, np.int64)] * 4,
        np.zeros((0, 5)),
    )
    assert Summaries(0, 3, 1).step(1, empty).summary_KLM.shape == (1, 0, len(SUMMARY))


@pytest.mark.parametrize(("sizes", "words"), [((-1, 3, 1), "layers"), ((1, 3, 0), "top_k"), ((1, 3, 1, 2), "ranks")])
def test_sizes_are_checked(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Summaries(*sizes)
