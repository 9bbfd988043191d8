from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from trine.config import SourceShare
from trine.train.config import (
    OptimizerConfig,
    Stage,
    TrainConfig,
    config_hash,
    default_mixture,
    load_toml,
    parse_share,
    share_text,
    train_from_dict,
    train_preset,
    train_to_dict,
    trajectory,
)
from trine.train.schedule import lay_out
from trine.train.stored import stored_config


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("code", SourceShare("code")),
        ("code=0.4", SourceShare("code", 0.4)),
        ("code=0.4..0.2", SourceShare("code", 0.4, 0.2)),
        ("*=1@4096-", SourceShare("*", shortest=4_096)),
        ("a-b.c=0..1@-512", SourceShare("a-b.c", 0.0, 1.0, longest=512)),
        ("x=1e-3@7-9", SourceShare("x", 0.001, shortest=7, longest=9)),
    ],
)
def test_a_part_of_a_mixture_is_one_word(text: str, share: SourceShare) -> None:
    assert parse_share(text) == share
    assert parse_share(share_text(share)) == share


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mixture: found '', need SOURCE"),
        ("=3", "mixture: found '=3', need SOURCE"),
        ("a=", "mixture: found 'a=', need SOURCE"),
        ("a=1.2.3", "mixture: found 'a=1.2.3', need SOURCE"),
        ("a@9-7", "mixture.a: found shortest 9, longest 7"),
        ("a=0", "mixture.a: found weight 0.0"),
    ],
)
def test_what_is_no_part_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_share(text)
    assert str(error.value).startswith(message)


def test_toml_takes_tables_and_words(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        """
        preset = "smoke"
        mtp = 0.3
        on_spike = "rollback"
        [data]
        more = ["some/folder"]
        [[stages]]
        length = 64
        share = 0.5
        step_tokens = 512
        micro_tokens = 512
        [[stages]]
        length = 512
        share = 0.5
        step_tokens = 1024
        micro_tokens = 512
        mixture = ["stdlib=0.6@-256", {source = "stdlib", weight = 0.4, end = 0.5, shortest = 257}]
        """
    )
    config = load_toml(path)
    assert config.stages[1].mixture == (
        SourceShare("stdlib", 0.6, longest=256),
        SourceShare("stdlib", 0.4, 0.5, shortest=257),
    )
    assert config.model_config().mtp and config.on_spike == "rollback" and config.data.more == ("some/folder",)
    assert train_from_dict(json.loads(json.dumps(train_to_dict(config)))) == config


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mixture = 3", "stages.mixture: found 3, need a list of tables"),
        ("mixture = [{weight = 1.0}]", "stages.mixture.source: found None, need the name of a source"),
        (
            "mixture = [{source = 'a', wieght = 1.0}]",
            "stages.mixture.wieght: no such key; did you mean stages.mixture.weight?",
        ),
        ("mixture = [{source = 'a', shortest = 'x'}]", "stages.mixture.shortest: found 'x', need a value of type int"),
        ("mixture = ['a=b']", "mixture: found 'a=b', need SOURCE"),
    ],
)
def test_a_bad_mixture_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f"[[stages]]\n{line}\n")
    with pytest.raises(ValueError) as error:
        load_toml(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_tokens_a_step_stay_the_same_but_for_small_models() -> None:
    stages = (Stage(share=0.5, step_tokens=4_096), Stage(share=0.5, step_tokens=8_192))
    assert TrainConfig(preset="laptop", stages=stages).stages == stages
    with pytest.raises(
        ValueError, match=r"stages.step_tokens: found \[4096, 8192\], need one number for all stages of '130m'"
    ):
        TrainConfig(preset="130m", stages=stages)


def test_the_laptop_plan_has_four_stages_in_the_ratios_of_k3() -> None:
    config = train_preset("laptop")
    lengths = [stage.length for stage in config.stages]
    assert [length // lengths[0] for length in lengths] == [1, 8, 32, 128]
    plan = lay_out(config.stages, config.tokens)
    assert abs(plan.tokens - config.tokens) < 0.02 * config.tokens and [span.steps for span in plan] == [410, 51, 15, 5]
    for index, stage in enumerate(config.stages):
        assert stage.mixture == default_mixture(index, stage.length)


def test_the_full_size_plan_has_the_lengths_of_k3_and_one_size_of_step() -> None:
    config = load_toml(Path(__file__).parents[2] / "examples" / "full_size.toml")
    assert [stage.length for stage in config.stages] == [8_192, 65_536, 262_144, 1_048_576]
    plan = lay_out(config.stages, config.tokens)
    assert abs(plan.tokens - config.tokens) <= 4 * 1_048_576
    assert {span.stage.step_tokens for span in plan} == {1_048_576}
    for before, stage in itertools.pairwise(config.stages):
        assert sum(part.weight for part in stage.mixture) == pytest.approx(1)
        kept = sum(part.weight for part in stage.mixture if 0 < part.longest < stage.length)
        assert 0.35 <= kept <= 0.6  # a short share stays
        assert stage.recompute and before.length < stage.length


def test_default_mixtures_keep_a_short_share_and_grow() -> None:
    assert default_mixture(0, 128) == ()
    shares = [default_mixture(stage, 1_024) for stage in (1, 2, 3, 4)]
    assert [[part.weight for part in parts] for parts in shares] == [[0.6, 0.4], [0.5, 0.5], [0.35, 0.65], [0.35, 0.65]]
    assert [parts[1].shortest for parts in shares] == [1_024, 1_024, 256, 256]
    assert all(parts[0].longest == parts[1].shortest - 1 for parts in shares)


def test_new_fields_that_change_nothing_keep_the_hash() -> None:
    """A run recorded before there were mixtures, QK-clip, MTP and rollbacks can be resumed."""
    quiet = TrainConfig(optimizer=OptimizerConfig(qk_clip=0.0))
    fields = trajectory(quiet)
    assert not {"optimizer.qk_clip", "mtp", "model.mtp", "on_spike", "data.more", "stages.0.mixture"} & fields.keys()
    for change in (
        {"mtp": 0.3},
        {"on_spike": "rollback"},
        {"optimizer": OptimizerConfig(qk_clip=50.0)},
        {"stages": (Stage(mixture=(SourceShare("a"),)),)},
    ):
        assert config_hash(dataclasses.replace(quiet, **change)) != config_hash(quiet)  # type: ignore[arg-type]
    for change in ({"tensorboard": True}, {"background_save": False}, {"allow_repeats": True}):
        assert config_hash(dataclasses.replace(quiet, **change)) == config_hash(quiet)  # type: ignore[arg-type]


def test_a_run_without_qk_clip_in_its_record_had_none(tmp_path: Path) -> None:
    values = train_to_dict(TrainConfig())
    del values["optimizer"]["qk_clip"]
    (tmp_path / "run.json").write_text(json.dumps({"format_version": 1, "config": values}))
    assert stored_config(tmp_path).optimizer.qk_clip == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp": -0.1}, "mtp: found -0.1, need 0"),
        ({"on_spike": "panic"}, "on_spike: found 'panic', need one of continue, rollback"),
    ],
)
def test_bad_values_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer.qk_clip: found -1.0, need 0 \(off\) or more"):
        OptimizerConfig(qk_clip=-1.0)
