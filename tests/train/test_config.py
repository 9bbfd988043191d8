from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trine.config import PRESETS, SourceShare
from trine.train.config import (
    OPERATIONAL,
    TRAIN_PRESETS,
    Stage,
    TrainConfig,
    config_hash,
    first_difference,
    load_toml,
    train_from_dict,
    train_preset,
    train_to_dict,
)
from trine.train.stored import stored_config


def toml(folder: Path, text: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def test_toml_sets_what_it_names_and_takes_the_rest_from_its_preset(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        """
        preset = "smoke"
        seed = 3
        [model]
        width = 96
        mla_layers = [1, 4]
        output_gates = false
        [optimizer]
        clip = 2
        [optimizer.rates]
        muon = 0.03
        [[stages]]
        length = 64
        share = 0.25
        step_tokens = 512
        micro_tokens = 512
        [[stages]]
        length = 512
        share = 0.75
        step_tokens = 512
        micro_tokens = 512
        recompute = true
        """,
    )
    config, base = load_toml(path), train_preset("smoke")
    assert (config.seed, config.optimizer.clip, config.optimizer.rates.muon) == (3, 2.0, 0.03)
    assert isinstance(config.optimizer.clip, float)
    assert config.optimizer.rates.embeddings == base.optimizer.rates.embeddings
    assert config.tokens == base.tokens and config.data == base.data
    assert [s.length for s in config.stages] == [64, 512] and config.stages[1].recompute
    model = config.model_config()
    assert (model.width, model.mla_layers, model.output_gates) == (96, (1, 4), False)
    assert model.vocab_size == base.data.vocabulary
    assert model.heads == PRESETS["smoke"].heads


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("toknes = 5", "toknes: no such key; did you mean tokens?"),
        ("[optimizer.rates]\nmuonn = 1.0", "optimizer.rates.muonn: no such key; did you mean optimizer.rates.muon?"),
        ("[[stages]]\nlenght = 4", "stages.lenght: no such key; did you mean stages.length?"),
        ("[model]\nwidht = 64", "model.widht: no such field of ModelConfig; did you mean 'width'?"),
        ("[model]\nwidth = 'wide'", "model.width: found 'wide', need a value of type int"),
        ("[model]\ntop_k = 60", "model.top_k: found 60, need less than experts = 18"),
        ("[model]\nvocab_size = 60", "model.vocab_size: found 60, need data.vocabulary to set it"),
        ("seed = 'x'", "seed: found 'x', need a value of type int"),
        ("seed = true", "seed: found True, need a value of type int"),
        ("resume = 1", "resume: found 1, need a value of type bool"),
        ("optimizer = 3", "optimizer: found 3, need a table"),
        ("stages = 3", "stages: found 3, need a list of tables"),
        ("precision = 'fp8'", "precision: found 'fp8', need one of fp32, bf16"),
        ("preset = 'labtop'", "preset: found 'labtop', need one of"),
        ("run = 'a/b'", "run: found 'a/b', need a plain folder name"),
        ("[[stages]]\nshare = 0.5", "stages.share: found 0.5, need shares that add up to 1"),
        ("[[stages]]\nlength = 3000", "stages.micro_tokens: found 2048, need a multiple of the row length 3000"),
        ("[[stages]]\nstep_tokens = 6000", "stages.step_tokens: found 6000, need a multiple of micro_tokens = 2048"),
        ("[optimizer]\nmomentum = 1.0", "optimizer.momentum: found 1.0, need 0 to below 1"),
        ("seed = ", "not a TOML file"),
        ("preset = ['smoke']", "preset: found ['smoke'], need a value of type str"),
        ("preset = {}", "preset: found {}, need a value of type str"),
        pytest.param(f"x = {'[' * 3000}{']' * 3000}", "nested too deeply", id="nested lists"),
        (f"seed = {10**23}", f"seed: found {10**23}, need 0 to 2**63 - 1"),
        ("seed = -1", "seed: found -1, need 0 to 2**63 - 1"),
        ('run = "a\\u0000b"', "run: found"),
        ("device = 'cdua'", "device: found 'cdua', need one of auto, cpu, cuda; did you mean 'cuda'?"),
        ("[optimizer.rates]\nmuon = inf", "optimizer.rates.muon: found inf, need a finite number"),
        ("[optimizer.rates]\nother = nan", "optimizer.rates.other: found nan, need a finite number"),
        pytest.param(
            f"[optimizer.rates]\nother = {10**400}",
            f"optimizer.rates.other: found {10**400}, need a finite number",
            id="10^400",
        ),
        ("[optimizer]\nclip = inf", "optimizer.clip: found inf, need a finite number"),
        ("mtp = inf", "mtp: found inf, need a finite number"),
        ("[[stages]]\nmixture = ['*=1e999']", "mixture.*.weight: found inf, need a finite number"),
        ("[model]\ninit_std = -1", "model.init_std: found -1.0, need None or a positive number"),
        pytest.param("model = ['width=" + "(" * 4000 + "']", "model.width: found", id="nested parentheses"),
    ],
)
def test_a_bad_toml_is_refused_in_one_line_that_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(ValueError) as error:
        load_toml(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_a_missing_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.toml: cannot be read \(No such file or directory\)"):
        load_toml(tmp_path / "nowhere.toml")


def test_shrinking_stages_are_refused() -> None:
    stages = (Stage(length=256, share=0.5), Stage(length=128, share=0.5))
    with pytest.raises(ValueError, match=r"stages.length: found \[256, 128\], need lengths that never shrink"):
        TrainConfig(stages=stages)


def as_toml(values: dict[str, Any]) -> str:
    """Nested values as TOML, tables inside a line; JSON writes the rest alike. Null, which TOML lacks, is left out."""

    def one(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {one(v)}" for key, v in value.items() if v is not None) + "}"
        return "[" + ", ".join(map(one, value)) + "]" if isinstance(value, list) else json.dumps(value)

    return "".join(f"{key} = {one(value)}\n" for key, value in values.items())


MIXTURES = {
    "no mixture": (),
    "a mixture": (SourceShare("*", 0.25, longest=511), SourceShare("a b", 0.75, 0.5, shortest=512)),
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", list(TRAIN_PRESETS))
def test_plans_survive_json_run_records_and_toml(tmp_path: Path, name: str, mixture: str) -> None:
    plan = train_preset(name)
    stages = tuple(dataclasses.replace(stage, mixture=MIXTURES[mixture]) for stage in plan.stages)
    for config in (plan, dataclasses.replace(plan, stages=stages)):
        values = train_to_dict(config)
        assert train_from_dict(json.loads(json.dumps(values))) == config
        (tmp_path / "run.json").write_text(json.dumps({"format_version": 1, "config": values}))
        assert stored_config(tmp_path) == config
        assert load_toml(toml(tmp_path, as_toml(values))) == config
        assert config.preset == name


def test_a_whole_number_is_a_weight(tmp_path: Path) -> None:
    path = toml(tmp_path, "[[stages]]\nmixture = [{source = 'a', weight = 1, end = 2}]")
    assert load_toml(path).stages[0].mixture == (SourceShare("a", 1.0, 2.0),)


def test_a_model_without_a_plan_and_no_model_at_all_are_told_apart() -> None:
    with pytest.raises(ValueError, match=r"'1b' is a model without a training plan \(plans: smoke, laptop, .*\)"):
        train_preset("1b")
    with pytest.raises(ValueError, match=r"found 'lapdog', need one of .*did you mean 'laptop'"):
        train_preset("lapdog")


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ("width=96", "width", 96),
        ("gate_kind=softplus", "gate_kind", "softplus"),
        ("output_gates=False", "output_gates", False),
        ("decay_rank=16", "decay_rank", 16),
        ("decay_rank=None", "decay_rank", None),
        ("norm_eps=1", "norm_eps", 1.0),
        ("mla_layers=(2,)", "mla_layers", (2,)),
    ],
)
def test_a_model_field_is_changed_in_its_own_type(change: str, field: str, value: object) -> None:
    found = getattr(TrainConfig(model=(change,)).model_config(), field)
    assert found == value and type(found) is type(value)


def test_a_model_change_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.width: found 'width', need NAME=VALUE"):
        TrainConfig(model=("width",))


def test_hash_and_difference_see_the_trajectory_and_nothing_else() -> None:
    base = TrainConfig()
    for name, value in {"threads": 7, "run": "x", "keep": 9, "checkpoint_every": 1, "resume": True}.items():
        other = dataclasses.replace(base, **{name: value})
        assert name in OPERATIONAL
        assert config_hash(other) == config_hash(base) and first_difference(other, base) is None
    other = dataclasses.replace(base, tokens=base.tokens * 2)
    assert config_hash(other) != config_hash(base)
    assert first_difference(other, base) == f"tokens: found {2 * base.tokens}, the stored run has {base.tokens}"
    assert first_difference(TrainConfig(model=("width=96",)), base) == ("model.width: found 96, the stored run has 128")
    rates = dataclasses.replace(base.optimizer.rates, muon=0.5)
    other = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, rates=rates))
    assert str(first_difference(other, base)).startswith("optimizer.rates.muon: found 0.5")
    stages = (Stage(length=256),)
    assert str(first_difference(TrainConfig(stages=stages), base)).startswith("stages.0.length: found 256")


def test_configuration_loads_no_framework() -> None:
    code = "import sys, trine.train.config, trine.train.schedule, trine.train.machine; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
