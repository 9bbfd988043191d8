"""Fits with a known optimum, files of every layout, runs end to end, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trine import cli
from trine.data import Shards
from trine.decay.calibrate_gates import mean_loss
from trine.decay.migrate import softplus_to_bounded, split_held_out
from trine.decay.migrate_fit import fit_bounded, softplus_decay
from trine.decay.migrate_recover import Recovery, recover
from trine.ops.kda import bounded_gate
from trine.ops.kda.gate import log_decay
from trine.train.config import DataConfig, EvalConfig, Stage, TrainConfig
from trine.train.loop import train
from trine.train.stored import load_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- fits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("g_min", [-5.0, -1.7])
def test_a_bounded_teacher_is_found_again(g_min: float) -> None:
    u, A_log, bias = normal(400, 3, 5), 0.7 * normal(3, seed=1), 2 * normal(3, 5, seed=2) - 1
    g = bounded_gate(u, A_log, bias, g_min)
    fit = fit_bounded(u, g, g_min)
    found_A, found_bias, factor = fit.parameters()
    torch.testing.assert_close(found_A, A_log, rtol=0, atol=1e-6)
    torch.testing.assert_close(found_bias, bias, rtol=0, atol=1e-5)
    torch.testing.assert_close(factor, torch.ones(3, 5, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(fit.decay(u, g_min), g, rtol=0, atol=1e-6)


def test_a_slow_softplus_teacher_has_a_known_limit() -> None:
    """Far down both curves are exponentials: slope 1 and a bias of b + A - ln |g_min|."""
    u, A_log, bias = normal(600, 2, 4), torch.tensor([0.0, 1.0]).double(), normal(2, 4, seed=3) - 14
    fit = fit_bounded(u, softplus_decay(u, A_log, bias), -5.0)
    found_A, found_bias, factor = fit.parameters()
    torch.testing.assert_close(found_A, torch.zeros(2).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(found_bias, bias + A_log[:, None] - math.log(5), rtol=0, atol=2e-3)
    torch.testing.assert_close(factor, torch.ones(2, 4).double(), rtol=0, atol=1e-4)


def test_nothing_near_the_fit_is_better() -> None:
    u, A_log, bias = 1.5 * normal(300, 1, 6), torch.tensor([0.8]).double(), normal(1, 6, seed=4)
    g = softplus_decay(u, A_log, bias)
    fit = fit_bounded(u, g, -5.0)

    def cost(slope: float, shift: float) -> torch.Tensor:
        s = torch.sigmoid(fit.slope_HK * slope * u + fit.shift_HK + shift)
        return ((-5.0 * s).exp() - g.exp()).square().sum(0)

    best = cost(1, 0)
    for slope, shift in ((1.01, 0), (0.99, 0), (1, 0.01), (1, -0.01), (1.02, 0.01), (0.7, -0.5), (1.5, 1)):
        assert (cost(slope, shift) >= best).all(), (slope, shift)


def test_a_channel_whose_input_never_moves_keeps_its_decay() -> None:
    u = torch.full((20, 1, 2), 0.3, dtype=torch.float64)
    g = softplus_decay(u, torch.zeros(1), torch.tensor([[-2.0, -5.0]]))
    fit = fit_bounded(u, g, -5.0)
    torch.testing.assert_close(fit.decay(u, -5.0), g, rtol=1e-6, atol=0)


def test_fits_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"g_min: found 0\.5"):
        fit_bounded(normal(4, 1, 1), -normal(4, 1, 1).abs(), 0.5)
    with pytest.raises(ValueError, match="found 1 token, need at least 2"):
        fit_bounded(normal(1, 1, 1), -normal(1, 1, 1).abs(), -5.0)


# -- files -------------------------------------------------------------------------------------------------------------

HEADS, CHANNELS, WIDTH = 3, 8, 20


def softplus_file(path: Path, layout: str, bias: float = -3.0, metadata: dict[str, str] | None = None) -> Path:
    """Two gated layers and something else, in a foreign layout."""
    tensors: dict[str, torch.Tensor] = {"model.embed_tokens.weight": normal(7, WIDTH).float()}
    for i in (0, 3):
        attention, down, up, norm = {
            "kimi": ("self_attn", "f_a_proj.weight", "f_b_proj.weight", "input_layernorm.weight"),
            "fla": ("attn", "f_proj.0.weight", "f_proj.1.weight", "attn_norm.weight"),
        }[layout]
        at = f"model.layers.{i}.{attention}."
        A_log = 0.5 * normal(HEADS, seed=i)
        tensors |= {
            at + "A_log": (A_log.view(1, 1, HEADS, 1) if layout == "kimi" else A_log).float().contiguous(),
            at + "dt_bias": (normal(HEADS * CHANNELS, seed=i + 1) + bias).float(),
            at + down: (normal(6, WIDTH, seed=i + 2) * WIDTH**-0.5).bfloat16(),
            at + up: (normal(HEADS * CHANNELS, 6, seed=i + 3) * 6**-0.5).bfloat16(),
            at + "o_norm.weight": torch.ones(CHANNELS),
            f"model.layers.{i}.{norm}": torch.rand(WIDTH, generator=torch.Generator().manual_seed(i)) + 0.5,
        }
    save_file(tensors, path, metadata)
    return path


def decays(path: Path, at: str, x: torch.Tensor, kind: str) -> torch.Tensor:
    t = load_file(path)
    down, up = ("f_a_proj", "f_b_proj") if "self_attn" in at else ("f_proj.0", "f_proj.1")
    u = (x @ t[f"{at}.{down}.weight"].double().T @ t[f"{at}.{up}.weight"].double().T).view(-1, HEADS, CHANNELS)
    return log_decay(u, t[f"{at}.A_log"].flatten().double(), t[f"{at}.dt_bias"].double(), kind, -5.0)


@pytest.mark.parametrize("layout", ["kimi", "fla"])
def test_a_file_keeps_its_layout_and_nearly_its_decays(tmp_path: Path, layout: str) -> None:
    source = softplus_file(tmp_path / "a.safetensors", layout)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "linear_attn_config": {"num_heads": 3}}))
    attention = {"kimi": "self_attn", "fla": "attn"}[layout]
    x = {f"model.layers.{i}.{attention}": normal(500, WIDTH, seed=9 + i) for i in (0, 3)}
    save_file({name: one.float() for name, one in x.items()}, tmp_path / "x.safetensors")
    content = source.read_bytes()
    (tmp_path / "new").mkdir()
    out = tmp_path / "new" / "b.safetensors"
    report = softplus_to_bounded(source, out, inputs=tmp_path / "x.safetensors")
    assert source.read_bytes() == content
    before, after = load_file(source), load_file(out)
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {n: (t.shape, t.dtype) for n, t in after.items()}
    changed = {name.rpartition(f"{attention}.")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"A_log", "dt_bias", "f_b_proj.weight" if layout == "kimi" else "f_proj.1.weight"}
    for (name, one), layer in zip(x.items(), report["layers"], strict=True):
        old, new = decays(source, name, one, "softplus"), decays(out, name, one, "bounded")
        gap = (old.exp() - new.exp()).abs()
        assert layer["name"] == name
        assert float(gap.quantile(0.99)) == pytest.approx(layer["decay_error"]["p99"], rel=0.3, abs=2e-3)
        assert float(gap.max()) < 0.2
        # the old numbers in the new formula are something else altogether
        assert float((old.exp() - decays(source, name, one, "bounded").exp()).abs().quantile(0.99)) > 0.1
    assert report["verdict"] == "safe"
    assert report["notes"] == ["nothing in or beside the file names its gates; they were taken as softplus"]
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "gate_kind": "bounded", "g_min": "-5.0"}
    config = json.loads((out.parent / "config.json").read_text())
    assert config["linear_attn_config"] == {"num_heads": 3, "gate_lower_bound": -5.0, "safe_gate": True}
    assert sorted(p.name for p in out.parent.iterdir()) == [
        "b.safetensors",
        "b.safetensors.migration.json",
        "config.json",
    ]
    with pytest.raises(ValueError, match=r"b\.safetensors: its gates are bounded already \(g_min -5\)"):
        softplus_to_bounded(out, tmp_path / "c.safetensors")


def test_sampled_inputs_prove_nothing_and_strong_gates_are_not_safe(tmp_path: Path) -> None:
    slow = softplus_file(tmp_path / "slow.safetensors", "kimi", bias=-6.0)
    report = softplus_to_bounded(slow, tmp_path / "slow-bounded.safetensors")
    assert (report["verdict"], report["inputs"]) == ("unproven", "sampled")
    strong = softplus_file(tmp_path / "strong.safetensors", "kimi", bias=1.0)
    report = softplus_to_bounded(strong, tmp_path / "strong-bounded.safetensors", g_min=-0.5)
    assert report["verdict"] == "not safe"
    assert "were beyond the new bound" in report["reasons"][0]


def spoil(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(path)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path)


A = "model.layers.3.self_attn."


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (A + "dt_bias", torch.zeros(5), f"{A}dt_bias: found shape (5,), need [H * K] = [24]"),
        (A + "A_log", torch.ones(2), f"{A}A_log: found shape (2,), need [H] = [3]"),
        (A + "f_b_proj.weight", torch.zeros(24, 7), f"{A}f_b_proj.weight: found shape (24, 7), need [24, 6]"),
        (A + "f_a_proj.weight", torch.zeros(6), f"{A}f_a_proj.weight: found shape (6,), need two dimensions"),
        (A + "f_a_proj.weight", None, f"has {A}A_log but no {A}f_a_proj.weight"),
        (A + "A_log", torch.full((3,), math.nan), f"{A}A_log: found values that are not finite"),
        (A + "A_log", torch.ones(3, dtype=torch.int64), f"{A}A_log: found torch.int64, need floating-point numbers"),
        (A + "A_log", torch.ones(0), f"{A}A_log: found shape (0,), need at least one head"),
        (A + "f_b_proj.weight", torch.ones(0, 6), f"{A}f_b_proj.weight: found shape (0, 6), need at least one head"),
        ("model.layers.3.input_layernorm.weight", torch.ones(3), "input_layernorm.weight: found shape (3,), need [20]"),
    ],
)
def test_gates_that_do_not_fit_are_named(tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    source = softplus_file(tmp_path / "a.safetensors", "kimi")
    spoil(source, name, tensor)
    with pytest.raises(ValueError) as error:
        softplus_to_bounded(source, tmp_path / "b.safetensors")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("metadata", "config", "message"),
    [
        ({"gate_kind": "sideways"}, None, "gate_kind in its metadata: found 'sideways', need bounded or softplus"),
        ({"gate_kind": "bounded", "g_min": "deep"}, None, "g_min in its metadata: found 'deep', need a number"),
        (None, "[1, 2]", "config.json: is damaged (found a list, need a table)"),
        (None, "{nope", "config.json: is damaged (Expecting property name"),
    ],
)
def test_what_a_file_says_of_its_gates_in_no_known_way_is_refused(
    tmp_path: Path, metadata: dict[str, str] | None, config: str | None, message: str
) -> None:
    source = softplus_file(tmp_path / "a.safetensors", "kimi")
    if metadata is not None:
        save_file(load_file(source), source, metadata)
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(ValueError) as error:
        softplus_to_bounded(source, tmp_path / "b.safetensors")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(("name", "least"), [("tokens", 32), ("length", 2)])
def test_too_little_text_is_told_before_anything_is_read(tmp_path: Path, name: str, least: int) -> None:
    with pytest.raises(ValueError, match=f"{name}: found {least - 1}, need at least {least}"):
        softplus_to_bounded(tmp_path / "absent", tmp_path / "out", **{name: least - 1})  # type: ignore[arg-type]


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    source = softplus_file(tmp_path / "a.safetensors", "fla")
    out = tmp_path / "b.safetensors"

    def refused(message: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(ValueError) as error:
            softplus_to_bounded(*arguments, **options)
        assert message in str(error.value)

    save_file({"a": torch.ones(1)}, tmp_path / "none.safetensors")
    refused("none.safetensors: has no decay gate", tmp_path / "none.safetensors", out)
    (tmp_path / "text.safetensors").write_text("no such thing")
    refused("text.safetensors: is no safetensors file", tmp_path / "text.safetensors", out)
    refused("gone.safetensors: does not exist", tmp_path / "gone.safetensors", out)
    refused("a.safetensors: exists already", source, source)
    refused("there is no folder", source, tmp_path / "x" / "y.safetensors")
    refused("g_min: found -6", source, out, g_min=-6.0)
    refused("only a run has data", source, out, recovery=Recovery(0.02))
    save_file({"model.layers.0.attn": torch.ones(9, 3)}, tmp_path / "x.safetensors")
    refused("model.layers.0.attn: found shape (9, 3), need [T, 20]", source, out, inputs=tmp_path / "x.safetensors")
    save_file({"model.layers.0.attn": torch.ones(9, 20)}, tmp_path / "x.safetensors")
    refused("has no tensor model.layers.3.attn", source, out, inputs=tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text('{"gate_lower_bound": -5}')
    refused("its gates are bounded already (g_min -5)", source, out)
    assert not out.exists() and not list(tmp_path.glob(".*"))


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def softplus_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with softplus gates after a few steps on a folder of text."""
    root = tmp_path_factory.mktemp("run")
    (root / "text").mkdir()
    words = ["decay", "gate", "tile", "bound", "state", "token", "head", "channel", "range", "memory"]
    for i in range(24):
        order = torch.randperm(len(words), generator=torch.Generator().manual_seed(i)).tolist()
        text = "".join(f"{words[j]} of {words[order[j - 1]]} number {i * j}\n" for j in order * 6)
        (root / "text" / f"{i}.txt").write_text(text)
    shape = ("layers=2", "mla_layers=(1,)", "width=32", "heads=2", "head_dim=16", "experts=4", "dense_width=64")
    config = TrainConfig(
        preset="smoke",
        model=("gate_kind=softplus", *shape),
        run="soft",
        runs=str(root),
        tokens=40 * 512,
        stages=(Stage(length=64, step_tokens=512, micro_tokens=512),),
        data=DataConfig(source=str(root / "text"), held_out_one_in=4, vocabulary=300),
        eval=EvalConfig(run=False),
        device="cpu",
        threads=1,
        checkpoint_every=0,
        keep=1,
    )
    return train(config).folder


def test_a_run_is_migrated_and_is_a_run_again(softplus_run: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in softplus_run.rglob("*") if p.is_file()}
    said: list[str] = []
    out = tmp_path / "bounded"
    report = softplus_to_bounded(
        softplus_run, out, tokens=2048, length=128, recovery=Recovery(tokens=0.1, gates_first=0.5), say=said.append
    )
    assert {p: p.read_bytes() for p in softplus_run.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["bounded"]
    new, old = load_run(out), load_run(softplus_run)
    assert (new.model.config.gate_kind, new.model.config.g_min, new.step) == ("bounded", -5.0, old.step)
    assert new.config.model_config() == new.model.config
    assert {n: t.shape for n, t in new.model.state_dict().items()} == {
        n: t.shape for n, t in old.model.state_dict().items()
    }
    _, rows = split_held_out(Shards.open(out / "data"), 2048, 128)
    loss = report["loss"]
    assert mean_loss(old.model, rows) == pytest.approx(loss["before"], rel=1e-6)
    assert mean_loss(new.model, rows) == pytest.approx(loss["recovered"], rel=1e-6)
    assert abs(loss["fitted"] - loss["before"]) < 0.02 * abs(loss["swapped"] - loss["before"])
    assert [(part["part"], part["steps"]) for part in report["recovery"]["parts"]] == [("gates", 2), ("all", 2)]
    (layer,) = report["layers"]
    assert layer["layer"] == 0 and layer["output_error"] < 0.05 and layer["fit"] > 0.99
    assert report["verdict"] == "safe"
    assert json.loads((out / "migration.json").read_text()) == report
    assert json.loads((out / "run.json").read_text())["migrated"]["verdict"] == "safe"
    with pytest.raises(ValueError, match="its gates are bounded already"):
        softplus_to_bounded(out, tmp_path / "again")
    with pytest.raises(ValueError, match="need one step of 512"):
        softplus_to_bounded(softplus_run, tmp_path / "again", recovery=Recovery(tokens=0.01))
    assert [p.name for p in tmp_path.iterdir()] == ["bounded"]


def test_a_bound_that_gates_go_beyond_is_not_safe(softplus_run: Path, tmp_path: Path) -> None:
    report = softplus_to_bounded(softplus_run, tmp_path / "tight", g_min=-0.02, tokens=1024, length=128)
    assert report["verdict"] == "not safe"
    assert report["layers"][0]["beyond"] > 0.1


def test_gates_alone_are_trained_first_and_what_does_not_help_is_undone(softplus_run: Path) -> None:
    run = load_run(softplus_run)
    shards = Shards.open(softplus_run / "data")
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}

    def changed() -> set[str]:
        return {name for name, tensor in run.model.state_dict().items() if not torch.equal(tensor, before[name])}

    losses = iter((3.0, 3.0, 3.1))  # before, after the gates (no better), after everything (worse)
    parts = recover(run.model, run.config, shards, 40 * 512, Recovery(0.1), lambda _: next(losses))
    assert [(part["part"], part["steps"], part["kept"]) for part in parts] == [("gates", 2, False), ("all", 2, False)]
    assert changed() == set()
    losses = iter((3.0, 2.9))
    (part,) = recover(run.model, run.config, shards, 40 * 512, Recovery(0.05, 1.0), lambda _: next(losses))
    assert (part["before"], part["after"], part["kept"], part["tokens"]) == (3.0, 2.9, True, 1024)
    gate = "layers.0.attention."
    assert changed() == {gate + name for name in ("A_log", "dt_bias", "decay_down.weight", "decay_up.weight")}


def test_the_command_line(softplus_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "new")
    arguments = ["migrate", "softplus-to-bounded", str(softplus_run), out, "--tokens", "1024", "--length", "128"]
    try:
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        assert "verdict: safe" in text and "keeps its layout" in text and f"wrote {out}" in text
        assert cli.main(arguments) == 1
        assert (
            capsys.readouterr().err
            == f"trine migrate: {out}: exists already; nothing is overwritten, choose another name\n"
        )
        code = cli.main(
            ["calibrate", out, "--tile", "16", "--length", "64", "--head-dim", "32", "--out", str(tmp_path / "cal")]
        )
        text = capsys.readouterr().out
        assert code == 0 and "no disagreements" in text and "held-out text" in text
        assert {p.name for p in (tmp_path / "cal").iterdir()} == {"calibration.json", "limits.png", "gates.png"}
    finally:
        torch.set_flush_denormal(False)
