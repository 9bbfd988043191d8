from __future__ import annotations

import json
import math

import pytest
import torch

from trine.train.metrics import StepRecord, bits_per_byte, load_figures


def test_loads_by_hand() -> None:
    loads_LE = torch.tensor([[40, 30, 10, 0], [20, 20, 20, 20], [0, 0, 0, 0]])
    max_vio, dead, percentiles = load_figures(loads_LE)
    assert max_vio == [1.0, 0.0, 0.0] and dead == 1
    assert percentiles is not None
    assert percentiles["p50"] == pytest.approx(1.0) and percentiles["p95"] == pytest.approx((1.925 + 1 + 1) / 3)


def test_a_model_without_experts_has_no_figures() -> None:
    assert load_figures(torch.zeros(0, 1)) == ([], 0, None)


def test_bits_per_byte_by_hand() -> None:
    assert bits_per_byte(8 * math.log(2), 4) == pytest.approx(2.0)
    assert bits_per_byte(1.0, 0) is None


def test_what_is_not_finite_is_written_as_null() -> None:
    record = StepRecord(1, 0, 8, math.nan, None, 0.1, math.inf, 5.0, [0.5, math.inf], 0, 0.1, {"p5": math.nan}, False)
    text = json.dumps(record.to_json(), allow_nan=False)
    found = json.loads(text)
    assert found["loss"] is found["grad_norm"] is found["bits_per_byte"] is None
    assert found["max_vio"] == [0.5, None] and found["load_percentiles"] == {"p5": None}
    assert found["lr"] == 0.1 and found["updated"] is False
