"""Range, error and gates: the closed form against evaluated tiles, the emulation against float64, known gates."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trine.decay import calibrate, calibrate_report
from trine.decay.calibrate_error import draw, errors, exact, rounded
from trine.decay.calibrate_gates import summarise
from trine.decay.calibrate_range import (
    ANCHORS,
    FORMATS,
    Setting,
    anchor_of,
    evaluate,
    exponents,
    judge,
    largest_bound,
    saturated_gates,
)
from trine.views import figures, figures_decay

# The committed grid: every combination is judged in closed form and by evaluating the tiles themselves.
GRID = calibrate.Grid(
    g_min=(-0.3, -1.0, -2.5, -2.7, -5.0, -5.3, -5.5, -11.0, -40.0),
    tile=(1, 2, 7, 16, 32, 64),
    format=tuple(FORMATS),
    head_dim=(32, 128),
    length=(64,),
)


def test_closed_form_and_evaluated_tiles_never_disagree() -> None:
    result = calibrate.sweep(GRID, measure=False)
    assert result["brute_force"] == {"checked": 9 * 6 * 4 * 6 * 2, "disagreements": []}
    safe = sum(point["safe"] for point in result["points"])
    assert 0.2 < safe / len(result["points"]) < 0.8  # the grid has plenty of both


def test_verdicts_flip_where_the_closed_form_says() -> None:
    for tile, name, anchor in itertools.product((16, 32, 64), FORMATS, ANCHORS):
        bound = largest_bound(tile, name, anchor, 128)
        if bound is None:
            assert anchor == "fixed_15" and name == "fp16"  # e^15 alone is too much for it
            continue
        for g_min, safe in ((-bound, True), (-bound - 0.002, False)):
            setting = Setting(g_min, tile, name, anchor, 128)
            assert judge(setting).safe is safe, setting
            # the evaluation resolves about 1e-4 of the exponent, so it is asked a little to either side
            apart = Setting(g_min * (0.999 if safe else 1.001), tile, name, anchor, 128)
            assert evaluate(apart).safe is safe, apart


@pytest.mark.parametrize(
    ("g_min", "tile", "name", "anchor", "safe"),
    [
        (-5.0, 16, "bf16", "start", True),  # e^80
        (-5.6, 16, "bf16", "start", False),
        (-5.0, 32, "bf16", "start", False),
        (-5.0, 32, "bf16", "half_span", True),  # 31 steps of 5, halved: e^77.5
        (-5.0, 32, "bf16", "fixed_15", False),
        (-5.0, 16, "bf16", "fixed_15", True),
        (-5.0, 64, "tf32", "half_span", False),
        (-2.5, 64, "tf32", "half_span", True),
        (-5.0, 16, "fp16", "centred", False),
        (-1.0, 16, "fp16", "mid_row", False),  # it keeps 4.85 for a unit key's and the scale's small components
        (-0.5, 16, "fp16", "mid_row", True),
    ],
)
def test_known_cases(g_min: float, tile: int, name: str, anchor: str, safe: bool) -> None:
    assert judge(Setting(g_min, tile, name, anchor, 128)).safe is safe


def test_only_the_middle_row_is_not_causal_and_large_spans_need_a_select() -> None:
    verdicts = {anchor: judge(Setting(-5.0, 16, "bf16", anchor, 64)) for anchor in ANCHORS}
    assert [anchor for anchor, verdict in verdicts.items() if not verdict.causal] == ["mid_row"]
    assert not verdicts["start"].upper_overflows  # 15 steps: e^75
    assert judge(Setting(-5.0, 32, "bf16", "half_span", 64)).upper_overflows


def test_a_larger_bound_never_makes_an_unsafe_setting_safe() -> None:
    bounds = [0.5 * i for i in range(1, 40)]
    for tile, name, anchor in itertools.product((8, 16, 64), FORMATS, ANCHORS):
        safe = [judge(Setting(-bound, tile, name, anchor, 64)).safe for bound in bounds]
        assert safe == sorted(safe, reverse=True)


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("tile", [1, 2, 5, 16])
def test_no_gates_leave_the_exponents_of_the_closed_form(anchor: str, tile: int) -> None:
    low, high = exponents(Setting(-3.0, tile, "bf16", anchor, 64))
    random = torch.Generator().manual_seed(tile)
    gates = torch.cat([saturated_gates(tile, -3.0), -3 * torch.rand(200, tile, generator=random, dtype=torch.float64)])
    G = gates.cumsum(-1).unsqueeze(-1)
    apart = G - anchor_of(anchor, G, -3.0)
    assert low - 1e-9 <= float(apart.min()) and float(apart.max()) <= high + 1e-9
    reached = max(-float(apart.min()), float(apart.max()))
    assert reached == pytest.approx(max(-low, high))  # and some gates do reach them


def test_formats_round_as_their_types_do() -> None:
    x = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, -1.0, 3.4e38, math.inf, 1e-39])
    tf32 = FORMATS["tf32"].round(x)
    assert tf32[:3].tolist() == [1.0, 1 + 2**-9, -1.0]  # ties to even
    assert tf32[3] <= torch.finfo(torch.float32).max and tf32[4] == math.inf
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        info, form = torch.finfo(dtype), FORMATS[name]
        assert form.smallest == info.smallest_normal
        assert form.unit == info.eps / 2
        assert info.max < form.overflow < info.max * (1 + info.eps)


def test_emulation_is_the_operator_when_nothing_is_rounded() -> None:
    sample = draw(-5.0, 24, 50)  # 50 tokens are no whole number of tiles
    out, state = exact(sample)
    for tile in (1, 16):
        found, states = rounded(sample, tile, [("fp32", "centred"), ("fp32", "start")], -5.0)
        assert found.shape == (2, 50, 24)
        torch.testing.assert_close(found.double(), out.expand(2, -1, -1), rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(states.double(), state.expand(2, -1, -1), rtol=2e-5, atol=2e-6)


def test_error_follows_the_mantissa_and_not_the_anchor() -> None:
    ways = [("bf16", "start"), ("bf16", "centred"), ("tf32", "start"), ("tf32", "centred"), ("fp32", "centred")]
    (b1, _), (b2, s2), (t1, _), (t2, _), (f, _) = errors(-5.0, 16, 64, 200, ways)
    assert 5e-4 < b2 < 1e-2 and 5e-4 < s2 < 1e-2
    assert b1 == pytest.approx(b2, rel=0.3)
    assert t1 == pytest.approx(t2, rel=0.3)
    assert 5 < b2 / t2 < 12
    assert f < 1e-5


def test_memory_of_a_bound() -> None:
    found = calibrate.memory(-5.0, (1024,))
    assert found["shortest"] == 0.2
    assert found["left_after_one"] == pytest.approx(math.exp(-5))
    logit = found["logit"]["1024"]
    assert 1 / (5 / (1 + math.exp(-logit))) == pytest.approx(1024)
    assert calibrate.memory(-0.5, (1,))["logit"]["1"] is None


def test_channels_at_the_bound_and_channels_that_never_forget_are_counted_by_head() -> None:
    g = torch.full((10, 2, 4), -0.5)
    g[:, 0, 1] = -4.99
    g[:6, 1, 2] = -5.0
    g[:4, 1, 3] = -5.0  # less than half its tokens
    g[:, 1, 0] = -1e-3
    found = summarise(3, g, -5.0, 100)
    assert (found["at_bound"], found["never_forget"], found["channels"]) == (2, 1, 8)
    assert [head["at_bound"] for head in found["heads"]] == [1, 1]
    assert [head["never_forget"] for head in found["heads"]] == [0, 1]
    assert found["heads"][1]["memory"]["p99"] == pytest.approx(1000, rel=1e-4)
    assert found["strongest"] == -5.0
    assert summarise(3, g, None, 100)["at_bound"] == 0


def kda_file(path: Path, bias: float, metadata: dict[str, str] | None = None) -> Path:
    """Two layers in Kimi-Linear's layout, 2 heads of 8 channels, width 12; A_log padded as K3's release has it."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for i in (0, 2):
        at = f"model.layers.{i}.self_attn."
        tensors |= {
            at + "A_log": torch.zeros(5),
            at + "dt_bias": torch.full((16,), bias),
            at + "f_a_proj.weight": torch.randn(4, 12, generator=random) * 0.1,
            at + "f_b_proj.weight": torch.randn(16, 4, generator=random) * 0.1,
            at + "o_norm.weight": torch.ones(8),
        }
    save_file(tensors, path, metadata)
    return path


def test_gates_of_a_file(tmp_path: Path) -> None:
    file = kda_file(tmp_path / "a.safetensors", 20.0)
    with pytest.raises(ValueError, match="need --gate-kind"):
        calibrate.gates_of(file)
    (tmp_path / "config.json").write_text(json.dumps({"linear_attn_config": {"gate_lower_bound": -4.0}}))
    gates = calibrate.gates_of(file, g_min=-5.0)  # the file's own word goes first
    assert (gates["kind"], gates["g_min"], gates["inputs"]) == ("bounded", -4.0, "sampled")
    assert [layer["layer"] for layer in gates["layers"]] == [0, 2]
    assert [layer["at_bound"] for layer in gates["layers"]] == [16, 16]
    assert gates["layers"][0]["memory"]["p50"] == pytest.approx(0.25)
    result = {**calibrate.sweep(calibrate.Grid(g_min=(-5.0,), tile=(16,), length=(64,)), measure=False), "gates": gates}
    assert any("32 of 32 channels sit at the bound" in line for line in calibrate.recommend(result))
    assert len(calibrate_report.gate_rows(gates)[1]) == 2 * 3


def test_the_note_and_tables_and_pictures_of_a_small_sweep(tmp_path: Path) -> None:
    grid = calibrate.Grid(g_min=(-2.5, -5.0), tile=(16, 64), head_dim=(32,), length=(64,))
    result = calibrate.calibrate(
        grid, kda_file(tmp_path / "a.safetensors", -4.0, {"gate_kind": "softplus"}), tokens=256
    )
    json.loads(json.dumps(result))
    assert "larger |g_min| costs numerical range" in result["note"]
    headings, rows = calibrate_report.point_rows(result, -5.0)
    assert headings[3:6] == ("fp16", "bf16", "tf32") and len(rows) == 2 * 6
    by_anchor = {(row[0], row[1]): row for row in rows}
    assert by_anchor["16", "start"][4].endswith("e-03")
    assert by_anchor["64", "start"][4] == "overflows"
    assert by_anchor["16", "mid_row"][-1] == "not causal"
    assert len(calibrate_report.tables(result, -5.0)) == 4
    assert calibrate_report.check_line(result).endswith("no disagreements.")
    assert any("no bound" in line for line in result["recommendation"])
    assert figures.save(figures_decay.decay_limits(result), tmp_path / "limits.png").stat().st_size > 10_000
    assert figures.save(figures_decay.gate_memory(result["gates"]), tmp_path / "gates.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"g_min": (1.0,)}, "g_min: found 1.0, need a negative"),
        ({"tile": (0,)}, "tile: found 0"),
        ({"format": ("fp8",)}, "format: found 'fp8', need one of fp16, bf16, tf32, fp32"),
        ({"anchor": ("last",)}, "anchor: found 'last'"),
        ({"head_dim": ()}, "head_dim: found no value"),
        ({"length": (0,)}, "length: found 0"),
    ],
)
def test_grids_that_cannot_be(change: dict[str, tuple[object, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        calibrate.Grid(**change)  # type: ignore[arg-type]
