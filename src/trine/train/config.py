"""What a training run is: one frozen dataclass, shared by TOML files and the command line. Loads no framework.

Few fields decide the rest: `preset` names the model and the plan made for it. The trajectory (everything that changes
the numbers a run produces) is told apart from what may change when a run is resumed: see `OPERATIONAL`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trine.config import (
    BalanceConfig,
    ModelConfig,
    SourceShare,
    from_dict,
    need_finite,
    need_one_of,
    preset,
    to_dict,
)


def _need(holds: bool, name: str, found: object, needed: str) -> None:
    if not holds:
        raise ValueError(f"{name}: found {found!r}, need {needed}")


_SHARE = re.compile(
    r"(?P<source>[^=@\s]+)(=(?P<weight>[\d.eE+-]+?)(\.\.(?P<end>[\d.eE+-]+))?)?(@(?P<shortest>\d*)-(?P<longest>\d*))?"
)


def parse_share(text: str) -> SourceShare:
    """One part of a mixture from ``SOURCE[=WEIGHT[..END]][@SHORTEST-LONGEST]``, for example ``needles=0.2..0.4@4096-``.

    Raises:
        ValueError: the text cannot be read so, or a value is out of range.
    """
    match = _SHARE.fullmatch(text)
    form = "SOURCE[=WEIGHT[..END]][@SHORTEST-LONGEST], as code=0.4..0.2@4096-"
    _need(match is not None, "mixture", text, form)
    assert match is not None
    try:
        return SourceShare(
            source=match["source"],
            weight=float(match["weight"] or 1.0),
            end=None if match["end"] is None else float(match["end"]),
            shortest=int(match["shortest"] or 0),
            longest=int(match["longest"] or 0),
        )
    except ValueError as error:
        if str(error).startswith("mixture"):
            raise
        raise ValueError(f"mixture: found {text!r}, need {form}") from error


def share_text(share: SourceShare) -> str:
    """What `parse_share` reads back as ``share``."""
    end = "" if share.end is None else f"..{share.end:g}"
    span = f"@{share.shortest}-{share.longest or ''}" if share.shortest or share.longest else ""
    return f"{share.source}={share.weight:g}{end}{span}"


@dataclass(frozen=True)
class Stage:
    """One context length of the curriculum. Tokens a step stay the same when a stage changes the row length; only
    short plans of small models differ (their steps are scarcer than their tokens, docs/laptop-plan.md)."""

    length: int = 128  # tokens of a row: the longest context a token can see
    share: float = 1.0  # of the planned tokens; the shares of all stages add up to 1
    step_tokens: int = 4_096  # tokens an optimizer step; in a short plan steps are scarcer than tokens
    micro_tokens: int = 2_048  # tokens a forward and backward pass; on a CPU each thread takes one of these at a time
    recompute: bool = False  # keep only sublayer inputs for the backward pass: less memory, a quarter more time
    mixture: tuple[SourceShare, ...] = ()  # what share of the tokens comes from where; none takes every document once

    def __post_init__(self) -> None:
        need_finite(self, "stages.")
        _need(self.length >= 2, "stages.length", self.length, "at least 2")
        _need(0 < self.share <= 1, "stages.share", self.share, "more than 0, at most 1")
        fits = self.micro_tokens % self.length == 0 and self.micro_tokens > 0
        _need(fits, "stages.micro_tokens", self.micro_tokens, f"a multiple of the row length {self.length}")
        fits = self.step_tokens % self.micro_tokens == 0 and self.step_tokens > 0
        _need(fits, "stages.step_tokens", self.step_tokens, f"a multiple of micro_tokens = {self.micro_tokens}")


@dataclass(frozen=True)
class Rates:
    """Peak learning rates. Three groups, because a short plan wants embeddings to grow fast and gates to stay calm."""

    muon: float = 1.8e-2  # matrices, each head and each expert alone; the update has root mean square 0.2 x this
    embeddings: float = 2e-2  # AdamW: token embedding and output head
    other: float = 5e-3  # AdamW: norms, gains, depth queries, convolutions, A_log, dt_bias

    def __post_init__(self) -> None:
        need_finite(self, "optimizer.rates.")
        for name in ("muon", "embeddings", "other"):
            _need(getattr(self, name) > 0, f"optimizer.rates.{name}", getattr(self, name), "more than 0")


@dataclass(frozen=True)
class OptimizerConfig:
    """What K3 states (weight decay 0.1, 1 % warm-up, cosine) and, where it is silent, what Kimi K2's recipe used."""

    rates: Rates = field(default_factory=Rates)
    warmup: float = 0.01  # share of the planned tokens with a linearly growing rate
    final: float = 0.0  # fraction of the rate left at the end of the cosine
    weight_decay: float = 0.1  # decoupled; never on norms, gains, biases, depth queries, A_log, dt_bias
    clip: float = 1.0  # largest global gradient norm
    momentum: float = 0.9  # Muon, Nesterov; Kimi K2's recipe has 0.95, docs/laptop-plan.md why not here
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    eps: float = 1e-8  # AdamW
    qk_clip: float = 100.0  # largest attention score a head may reach in a step before it is scaled down; 0 never looks

    def __post_init__(self) -> None:
        need_finite(self, "optimizer.")
        _need(0 <= self.warmup < 1, "optimizer.warmup", self.warmup, "0 to below 1")
        _need(0 <= self.final <= 1, "optimizer.final", self.final, "0 to 1")
        _need(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "0 or more")
        _need(self.clip > 0, "optimizer.clip", self.clip, "more than 0")
        for name in ("momentum", "beta1", "beta2"):
            _need(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "0 to below 1")
        _need(self.eps > 0, "optimizer.eps", self.eps, "more than 0")
        _need(self.qk_clip >= 0, "optimizer.qk_clip", self.qk_clip, "0 (off) or more")


def parse_tasks(text: str) -> tuple[int, int, tuple[str, ...]]:
    """Documents, tokens a document (about) and families of ``tasks:COUNTxTOKENS[:family+family]``; none means all.

    Raises:
        ValueError: the text cannot be read so.
    """
    match = re.fullmatch(r"tasks:([1-9]\d*)x([1-9]\d*)(?::([^:]+))?", text)
    _need(match is not None, "data.more", text, "tasks:COUNTxTOKENS or tasks:COUNTxTOKENS:family+family")
    assert match is not None
    return int(match[1]), int(match[2]), tuple(match[3].split("+")) if match[3] else ()


@dataclass(frozen=True)
class DataConfig:
    """What is read."""

    source: str = "stdlib"  # "stdlib", the running interpreter's own library, or a folder of text files
    more: tuple[str, ...] = ()  # further sources for mixtures: folders, and tasks:COUNTxTOKENS[:family+family]
    held_out_one_in: int = 20  # one document in this many is kept for evaluation
    vocabulary: int = 0  # tokens of the vocabulary learned from it; 0 takes the model preset's

    def __post_init__(self) -> None:
        _need(bool(self.source), "data.source", self.source, "'stdlib' or a folder")
        for one in (self.source, *self.more):
            _need("\0" not in one, "data.source", one, "a path without the character of code 0")
        for one in self.more:
            if one.startswith("tasks:"):
                parse_tasks(one)
        _need(self.held_out_one_in >= 2, "data.held_out_one_in", self.held_out_one_in, "at least 2")
        _need(self.vocabulary >= 0, "data.vocabulary", self.vocabulary, "0 (the preset's) or more")


@dataclass(frozen=True)
class EvalConfig:
    """What is measured at the end of a run."""

    run: bool = True  # evaluate, and write a sample, when the plan is done
    context: int = 2_048  # tokens of context a held-out document is read with
    primed: bool = True  # also measure xz that has seen the training text, the slowest yardstick
    lengths: tuple[int, ...] = ()  # tokens of the tasks that are asked; none takes the lengths of the stages
    task_tokens: int = 65_536  # tokens that the tasks may take in all; 0 asks none
    sample_tokens: int = 200  # length of the sample the run writes at the end; 0 writes none
    prompt: str = "def "  # what the sample begins with

    def __post_init__(self) -> None:
        _need(self.context >= 2, "eval.context", self.context, "at least 2")
        _need(self.sample_tokens >= 0, "eval.sample_tokens", self.sample_tokens, "0 or more")
        _need(all(length >= 2 for length in self.lengths), "eval.lengths", self.lengths, "at least 2 each")
        _need(self.task_tokens >= 0, "eval.task_tokens", self.task_tokens, "0 (no tasks) or more")


# Plans whose name is not that of their model.
PLAN_MODELS = {"recall": "smoke"}


@dataclass(frozen=True)
class TrainConfig:
    """A whole training run. `train_preset` gives the plans that come with Trine; here the defaults of their fields.

    Raises:
        ValueError: at construction, naming the field, the value found and the value needed.
    """

    preset: str = "laptop"  # the plan and its model: smoke, laptop, recall; or a model alone: 130m, 400m, 1b, k3
    model: tuple[str, ...] = ()  # fields of the model changed from the preset, as "width=96" (TOML: a table)
    run: str = ""  # name of the run's folder; empty takes the preset's name and the first free number
    runs: str = "runs"  # folder that holds all runs
    resume: bool = False  # go on with the run from its newest valid checkpoint
    seed: int = 0  # of initialisation and of the order of the data
    tokens: int = 2_097_152  # planned total: the cosine ends here
    stages: tuple[Stage, ...] = (Stage(),)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    mtp: float = 0.0  # weight of the loss of one layer that predicts the token after the next; 0 builds no such layer
    on_spike: Literal["continue", "rollback"] = (
        "continue"  # rollback: back to the last checkpoint, without those batches
    )
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    precision: Literal["fp32", "bf16"] = "fp32"  # of matrix products; what must stay fp32 does (docs/precision.md)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes a card when torch sees one
    threads: int = 0  # CPU threads; 0 chooses
    checkpoint_every: int = 50  # steps; 0 saves only at the end
    keep: int = 2  # newest checkpoints that are kept
    background_save: bool = True  # write checkpoints while training goes on; costs a copy of the model's state
    tensorboard: bool = False  # also write the metrics for TensorBoard (extra `log`)
    recorder: bool = True  # keep load and bias of every expert at every step in RUN/balance.sqlite, and watch them
    prometheus: int = 0  # port of 127.0.0.1 that serves the experts' figures (extra `dashboard`); 0 serves nothing
    probe_every: int = 50  # steps between two looks inside the model (fewer in a short run), RUN/probes.jsonl; 0: none
    allow_repeats: bool = False  # let a source be read more than 4 times

    def __post_init__(self) -> None:
        preset(PLAN_MODELS.get(self.preset, self.preset))
        need_finite(self)
        _need(self.run not in (".", "..") and not set("/\0") & set(self.run), "run", self.run, "a plain folder name")
        _need(bool(self.runs) and "\0" not in self.runs, "runs", self.runs, "a folder")
        _need(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2**63 - 1")
        _need(0 < self.tokens < 2**63, "tokens", self.tokens, "more than 0, less than 2**63")
        _need(bool(self.stages), "stages", self.stages, "at least one")
        shares = sum(stage.share for stage in self.stages)
        _need(abs(shares - 1) < 1e-6, "stages.share", round(shares, 6), "shares that add up to 1")
        lengths = [stage.length for stage in self.stages]
        _need(lengths == sorted(lengths), "stages.length", lengths, "lengths that never shrink")
        sizes = [stage.step_tokens for stage in self.stages]
        model = PLAN_MODELS.get(self.preset, self.preset)
        constant = len(set(sizes)) == 1 or model in ("smoke", "laptop")
        _need(constant, "stages.step_tokens", sizes, f"one number for all stages of {model!r}")
        _need(self.mtp >= 0, "mtp", self.mtp, "0 (no such layer) or more")
        need_one_of("on_spike", self.on_spike, ("continue", "rollback"))
        need_one_of("precision", self.precision, ("fp32", "bf16"))
        need_one_of("device", self.device, ("auto", "cpu", "cuda"))
        _need(self.threads >= 0, "threads", self.threads, "0 (choose) or more")
        _need(self.checkpoint_every >= 0, "checkpoint_every", self.checkpoint_every, "0 or more")
        _need(self.keep >= 1, "keep", self.keep, "at least 1")
        _need(self.probe_every >= 0, "probe_every", self.probe_every, "0 (none) or more")
        _need(0 <= self.prometheus < 65536, "prometheus", self.prometheus, "a port, or 0 (none)")
        _need(self.recorder or not self.prometheus, "prometheus", self.prometheus, "0 without the recorder")
        self.model_config()

    def model_config(self) -> ModelConfig:
        """The preset's model with this run's changes."""
        base = preset(PLAN_MODELS.get(self.preset, self.preset))
        try:
            changes = dict(_model_change(one) for one in self.model)
            for name, instead in (("vocab_size", "data.vocabulary"), ("score_domain", "balance.score_domain")):
                _need(name not in changes, name, changes.get(name), f"{instead} to set it")
            vocab_size = self.data.vocabulary or base.vocab_size
            own = {"vocab_size": vocab_size, "mtp": self.mtp > 0, "score_domain": self.balance.score_domain}
            return from_dict({**to_dict(base), **own, **changes})
        except ValueError as error:
            raise ValueError(f"model.{error}") from error


# Fields that may differ when a run is resumed: none of them changes what a step computes beyond rounding.
OPERATIONAL = frozenset(
    {
        *("run", "runs", "resume", "eval", "device", "threads", "checkpoint_every", "keep"),
        *("background_save", "tensorboard", "recorder", "prometheus", "probe_every", "allow_repeats"),
    }
)

# Fields that came later, and the value with which a run computes what it did before they came: left out of the
# trajectory then, so that a run keeps its hash.
_LATER = {
    "mixture": [],
    "more": [],
    "qk_clip": 0.0,
    "mtp": 0.0,
    "model.mtp": False,
    "on_spike": "continue",
    "model.score_domain": "sigmoid",
    "balance.policy": "qb",
    "balance.estimator": "report",
    "balance.score_domain": "sigmoid",
    "balance.ema": 0.0,
    "balance.service": "off",
    "balance.service_lag": 1,
    "balance.adaptive_gain": False,
    "balance.batch_rounds": 1,
}


def _typed(kind: Any, value: Any, name: str) -> Any:
    """``value`` when it is a ``kind``; whole numbers serve as floats, but booleans are no numbers."""
    if isinstance(kind, types.UnionType) and value is not None:
        # "number or nothing": a value that is given is a number
        (kind,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        _need(abs(value) < 2**1023, name, value, "a finite number")  # a larger whole number is no float
        return float(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    _need(fits, name, value, f"a value of type {getattr(kind, '__name__', kind)}")
    return value


def _model_change(text: str) -> tuple[str, Any]:
    """``"width=96"`` as (name, value), with the value checked against the type of that field of `ModelConfig`."""
    name, equals, value = text.partition("=")
    _need(bool(equals), name, text, "NAME=VALUE")
    hints = typing.get_type_hints(ModelConfig)
    if name not in hints:
        return name, value  # the configuration has the better message
    kind = hints[name]
    if typing.get_origin(kind) is Literal:
        return name, value
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # the last two: too deeply nested
        parsed = value
    if kind == tuple[int, ...]:
        fits = isinstance(parsed, tuple | list) and all(type(one) is int for one in parsed)
        _need(fits, name, value, "layer numbers, as (1,3)")
        return name, tuple(parsed)
    if isinstance(kind, types.UnionType):
        if parsed is None:
            return name, None
        (kind,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
    return name, _typed(kind, parsed, name)


EVERYTHING = "*"  # as a part's source: every source that no other part of the mixture names


def default_mixture(stage: int, length: int) -> tuple[SourceShare, ...]:
    """Which documents a stage of the curriculum draws from, by their length in tokens.

    K3's weights are not public; these are this project's proposal: everything in the first stage (number 0), then 40,
    50 and 65 % of the tokens from documents that fill a row (from the fourth stage on, a quarter of one), the rest from
    shorter ones, so that what was learned of them is kept.
    """
    if stage == 0:
        return ()
    share = (0.4, 0.5, 0.65)[min(stage, 3) - 1]
    border = length if stage < 3 else length // 4
    return (
        SourceShare(EVERYTHING, weight=round(1 - share, 2), longest=border - 1),
        SourceShare(EVERYTHING, weight=share, shortest=border),
    )


# K3's four stages in its ratios 1 : 8 : 32 : 128, sixty-four times shorter (K3 report, section 3.3). Most of the tokens
# are short: in so short a plan steps are scarce, and long rows need large ones.
CURRICULUM = (
    Stage(length=128, share=0.80, step_tokens=4_096, micro_tokens=2_048),
    Stage(length=1_024, share=0.10, step_tokens=4_096, micro_tokens=2_048, mixture=default_mixture(1, 1_024)),
    Stage(length=4_096, share=0.06, step_tokens=8_192, micro_tokens=4_096, mixture=default_mixture(2, 4_096)),
    Stage(length=16_384, share=0.04, step_tokens=16_384, micro_tokens=16_384, mixture=default_mixture(3, 16_384)),
)

TRAIN_PRESETS: dict[str, TrainConfig] = {
    # Half a minute of training on two cores: enough to see the loss fall and every part at work.
    "smoke": TrainConfig(
        preset="smoke",
        tokens=286_720,
        stages=(Stage(length=128, step_tokens=4_096, micro_tokens=4_096),),
        optimizer=OptimizerConfig(warmup=0.04),
        data=DataConfig(vocabulary=512),
        eval=EvalConfig(context=512, primed=False, task_tokens=16_384, sample_tokens=120),
        checkpoint_every=0,
        keep=1,
    ),
    # The main job: twelve minutes of training on two quiet cores.
    "laptop": TrainConfig(stages=CURRICULUM),
    # Recall of single symbols over longer and longer rows: small steps and low rates (docs/evaluation.md).
    "recall": TrainConfig(
        preset="recall",
        model=("layers=2", "mla_layers=(1,)"),  # one layer to carry a key to its value, one to look it up
        tokens=1_515_520,
        # Rows of 32 first: so every seed tried has learned by step 500. Beginning with 64 takes longer, and some seeds
        # do not get there at all.
        stages=(
            Stage(length=32, share=0.24, step_tokens=2_048, micro_tokens=2_048),
            Stage(length=64, share=0.44, step_tokens=2_048, micro_tokens=2_048),
            Stage(length=256, share=0.19, step_tokens=2_048, micro_tokens=2_048),
            Stage(length=1_024, share=0.13, step_tokens=2_048, micro_tokens=2_048),
        ),
        optimizer=OptimizerConfig(
            rates=Rates(muon=3e-3, embeddings=1e-3, other=1e-3), warmup=0.02, final=0.3, momentum=0.95
        ),
        data=DataConfig(source="tasks:recall", vocabulary=257),
        eval=EvalConfig(sample_tokens=0),
        checkpoint_every=200,
    ),
}


def train_preset(name: str) -> TrainConfig:
    """The training plan that comes with the model preset ``name``.

    Raises:
        ValueError: no such plan; for a model that has none the message says how to write one.
    """
    if name in TRAIN_PRESETS:
        return TRAIN_PRESETS[name]
    preset(name)  # an unknown model has its own message
    have = ", ".join(TRAIN_PRESETS)
    raise ValueError(f"preset: {name!r} is a model without a training plan (plans: {have}); write one in a TOML file")


def train_to_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as JSON-ready values, of ``balance`` what its policy reads; `train_from_dict` reads it back."""
    values = dataclasses.asdict(config) | {"balance": config.balance.dials()}
    return typing.cast(dict[str, Any], json.loads(json.dumps(values)))


def train_from_dict(values: Mapping[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """Build a configuration from nested plain values (JSON, TOML).

    Args:
        values: fields to set; tables for nested dataclasses, a list of tables for ``stages``.
        base: where all other fields come from; None takes the plan that ``values["preset"]`` names, or the default.

    Raises:
        ValueError: an unknown key (with the nearest name), a value of the wrong type, or one out of range.
    """
    if base is None:
        name = _typed(str, values.get("preset", "laptop"), "preset")
        base = TRAIN_PRESETS[name] if name in TRAIN_PRESETS else TrainConfig(preset=name)
    return typing.cast(TrainConfig, _merge(base, values, ""))


def load_toml(path: str | Path) -> TrainConfig:
    """Read a run from a TOML file; its ``preset`` names the plan that every key it does not set comes from.

    Raises:
        ValueError: the file is missing, no TOML, or has a bad key or value; the message names the file and the key.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file ({error})") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply") from error
    try:
        return train_from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _merge(base: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """``base`` (a dataclass) with the fields in ``values``; ``prefix`` is where we are, for messages."""
    hints = typing.get_type_hints(type(base))
    changes = {}
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            raise ValueError(f"{prefix}{key}: no such key" + (f"; did you mean {prefix}{near[0]!s}?" if near else ""))
        changes[key] = _convert(hints[key], value, prefix + key, getattr(base, key))
    return dataclasses.replace(base, **changes)


def _convert(kind: Any, value: Any, name: str, current: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        _need(isinstance(value, Mapping), name, value, "a table")
        return _merge(current, value, name + ".")
    if kind == tuple[SourceShare, ...]:
        _need(isinstance(value, list | tuple), name, value, "a list of tables")
        return tuple(_share(one, name) for one in value)
    if kind == tuple[Stage, ...]:
        _need(isinstance(value, list | tuple), name, value, "a list of tables")
        return tuple(_merge(Stage(), _typed(Mapping, one, name), f"{name}.") for one in value)
    if name == "model" and isinstance(value, Mapping):
        return tuple(f"{key}={tuple(one) if isinstance(one, list) else one}" for key, one in value.items())
    if kind == tuple[int, ...]:
        fits = isinstance(value, list | tuple) and all(type(one) is int for one in value)
        _need(fits, name, value, "a list of whole numbers")
        return tuple(value)
    if kind == tuple[str, ...]:
        fits = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
        _need(fits, name, value, "a table, or a list of NAME=VALUE" if name == "model" else "a list of texts")
        return tuple(value)
    if typing.get_origin(kind) is Literal:
        need_one_of(name, value, typing.get_args(kind))
        return value
    return _typed(kind, value, name)


def _share(value: Any, name: str) -> SourceShare:
    """A part of a mixture from a table, or from the text that `parse_share` reads."""
    if isinstance(value, str):
        return parse_share(value)
    table = _typed(Mapping, value, name)
    _need("source" in table, f"{name}.source", None, "the name of a source")
    first = SourceShare(_typed(str, table["source"], f"{name}.source"))
    return typing.cast(SourceShare, _merge(first, table, f"{name}."))


def trajectory(config: TrainConfig) -> dict[str, Any]:
    """The fields that decide what a run computes, with the model spelled out, flat: dotted name to value."""
    flat: dict[str, Any] = {f"model.{key}": value for key, value in to_dict(config.model_config()).items()}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                for index, one in enumerate(value):
                    walk(one, f"{prefix}{key}.{index}.")
            else:
                flat[prefix + key] = value

    rest = {key: value for key, value in train_to_dict(config).items() if key not in OPERATIONAL | {"model", "preset"}}
    del rest["balance"]["check_every"]  # how often ranks are compared changes no number
    walk(rest, "")
    return {key: value for key, value in flat.items() if not _says_nothing(key, value)}


def _says_nothing(key: str, value: Any) -> bool:
    last = key.rpartition(".")[2]
    name = key if key in _LATER or key.startswith(("model.", "balance.")) else last
    return name in _LATER and bool(value == _LATER[name])


def config_hash(config: TrainConfig) -> str:
    """SHA-256 of `trajectory`, hexadecimal: runs with the same hash, data and machine compute the same numbers."""
    return hashlib.sha256(json.dumps(trajectory(config), sort_keys=True).encode()).hexdigest()


def first_difference(wanted: TrainConfig, stored: TrainConfig) -> str | None:
    """One line naming the first field of the trajectory in which two configurations differ, or None."""
    here, there = trajectory(wanted), trajectory(stored)
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key):
            found, has = (values.get(key, _LATER.get(key)) for values in (here, there))
            return f"{key}: found {found!r}, the stored run has {has!r}"
    return None
