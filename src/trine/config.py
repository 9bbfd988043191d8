"""Model configuration: one frozen dataclass and the presets; a part of a data mixture; how experts are balanced. No
framework.

Every default is Kimi K3's (report, arXiv 2607.24653, and its released configuration); a preset states what differs.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

GateKind = Literal["bounded", "softplus"]
ScoreDomain = Literal["sigmoid", "logit"]
ResidualKind = Literal["attn_res", "plain", "chunk", "shallow_to_deep"]

# ln of the largest finite float32 (and bfloat16): decay factors inside one tile must stay below e^88.
MAX_TILE_LOG_RANGE = 88.0
KDA_TILE = 16  # rows of the tiles that `trine.ops.kda` works in, whatever `ModelConfig.tile` says


@dataclass(frozen=True)
class SourceShare:
    """One part of a stage's data mixture: what share of the tokens comes from which documents of which source.

    Raises:
        ValueError: at construction, naming the field, the value found and the value needed.
    """

    source: str  # name of a source in the shards
    weight: float = 1.0  # share of the tokens at the stage's beginning; a mixture's weights are divided by their sum
    end: float | None = None  # the same at the stage's end, linear in between; None keeps `weight`
    shortest: int = 0  # only documents of at least this many tokens
    longest: int = 0  # only documents of at most this many tokens; 0 sets no limit

    def __post_init__(self) -> None:
        where = f"mixture.{self.source or 'source'}"
        need_finite(self, f"{where}.")
        if not self.source:
            raise ValueError(f"{where}: found '', need the name of a source")
        if self.weight < 0 or (self.end is not None and self.end < 0):
            raise ValueError(f"{where}: found weight {self.weight}, end {self.end}, need 0 or more")
        if not (self.weight > 0 or (self.end or 0) > 0):
            raise ValueError(f"{where}: found weight {self.weight}, end {self.end}, need one of them more than 0")
        if self.shortest < 0 or self.longest < 0 or (self.longest and self.longest < self.shortest):
            found = f"shortest {self.shortest}, longest {self.longest}"
            raise ValueError(f"{where}: found {found}, need 0 <= shortest <= longest (longest 0: no limit)")


PolicyName = Literal["qb", "sign", "aux", "load_quantile", "stateless", "freeze", "replay", "none"]

# Dials that a policy reads. One that is set for a policy that does not read it is an error, not a wish unheard.
_DIALS: dict[str, tuple[str, ...]] = {
    "qb": ("estimator", "score_domain", "ema", "adaptive_gain", "batch_rounds", "service", "service_lag"),
    "sign": ("score_domain", "sign_step"),
    "aux": ("score_domain", "aux_weight"),
    "load_quantile": ("score_domain", "load_rate", "load_window", "load_band"),
    "stateless": ("mode", "quantile", "threshold_source", "capacity", "rounds", "ema"),
    "freeze": ("score_domain",),
    "replay": ("score_domain",),
    "none": ("score_domain",),
}


@dataclass(frozen=True)
class BalanceConfig:
    """How training keeps the load of experts even: a policy and its dials (`trine.balance`, README.md there).

    Raises:
        ValueError: at construction, naming the field, the value found and the value needed; also for a dial that the
            chosen policy does not read.
    """

    policy: PolicyName = "qb"  # what moves the routers' bias, or presses on the loss
    estimator: Literal["report", "signed_log"] = "report"  # qb: histogram of required biases
    score_domain: ScoreDomain = "sigmoid"  # what the bias is added to, part of the trained model; not stateless
    ema: float = 0.0  # qb, stateless: share of the old bias (the running thresholds) kept in an update
    adaptive_gain: bool = False  # qb: smaller updates while loads are near what chance leaves
    batch_rounds: int = 1  # qb: updates of the bias within each batch; skewed scores need about 4
    service: str = "off"  # qb: who solves the bias while training goes on: thread, process, or a service's address
    service_lag: int = 1  # qb: steps that the service's bias is old; -1 takes the newest there is
    sign_step: float = 1e-3  # sign: length of each step, in units of the score
    aux_weight: float = 1e-2  # aux: weight of a loss that is 1 when loads are even
    load_rate: float = 0.05  # load_quantile: bias moved for a load of twice the mean
    load_window: int = 4  # load_quantile: steps whose loads are summed for one move
    load_band: float = 3.0  # load_quantile: standard deviations of sampling noise inside which nothing moves
    mode: Literal["drop", "reassign", "dual"] = "dual"  # stateless: what happens beyond an expert's share
    quantile: Literal["exact", "histogram", "sketch"] = "exact"  # stateless: how thresholds are found
    threshold_source: Literal["batch", "running"] = "batch"  # stateless: in training; otherwise always running
    capacity: float = 1.0  # stateless, drop and reassign: most tokens of an expert over its even share
    rounds: int = 3  # stateless: updates in dual, proposals in reassign
    check_every: int = 100  # steps between comparisons of the bias over ranks; 0 never compares

    def __post_init__(self) -> None:
        need_finite(self, "balance.")
        need_one_of("balance.policy", self.policy, _DIALS)
        for name, choices in (
            ("estimator", ("report", "signed_log")),
            ("score_domain", ("sigmoid", "logit")),
            ("mode", ("drop", "reassign", "dual")),
            ("quantile", ("exact", "histogram", "sketch")),
            ("threshold_source", ("batch", "running")),
        ):
            need_one_of(f"balance.{name}", getattr(self, name), choices)
        known = self.service in ("off", "thread", "process") or ":" in self.service or "/" in self.service
        _need(known, "balance.service", self.service, "off, thread, process, unix:PATH or 127.0.0.1:PORT")
        lagging = -1 <= self.service_lag <= 4
        _need(lagging, "balance.service_lag", self.service_lag, "-1 (newest) to 4: older ones are not known to serve")
        alone = self.service == "off" and self.service_lag != 1
        _need(not alone, "balance.service_lag", self.service_lag, "1, as no service is asked for")
        _need(0 <= self.ema < 1, "balance.ema", self.ema, "0 to below 1")
        for name in ("sign_step", "aux_weight", "load_rate", "capacity"):
            _need(getattr(self, name) > 0, f"balance.{name}", getattr(self, name), "more than 0")
        _need(self.load_window >= 1, "balance.load_window", self.load_window, "at least 1")
        _need(self.load_band >= 0, "balance.load_band", self.load_band, "0 or more")
        _need(self.rounds >= 1, "balance.rounds", self.rounds, "at least 1")
        few = isinstance(self.batch_rounds, int) and 1 <= self.batch_rounds <= 100
        _need(few, "balance.batch_rounds", self.batch_rounds, "a whole number from 1 to 100")
        _need(self.check_every >= 0, "balance.check_every", self.check_every, "0 (never) or more")
        read = self.dials()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            unread = f"{field.default!r}, as the policy {self.policy!r} does not read it"
            _need(field.name in read or value == field.default, f"balance.{field.name}", value, unread)
        for mode, name in (("dual", "capacity"), ("drop", "rounds")):
            if self.policy == "stateless" and self.mode == mode:
                default = type(self).__dataclass_fields__[name].default
                value, unread = getattr(self, name), f"{default!r}, as the mode {mode!r} does not read it"
                _need(value == default, f"balance.{name}", value, unread)

    def dials(self) -> dict[str, Any]:
        """The policy and the values that it reads: all that changes what a run computes, and `check_every`."""
        return {name: getattr(self, name) for name in ("policy", *_DIALS[self.policy], "check_every")}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Layer numbers are 0-based everywhere.

    Raises:
        ValueError: at construction, naming the field, the value found and the value needed.
    """

    width: int  # D: model width
    layers: int  # decoder layers, each one attention and one feed-forward
    mla_layers: tuple[int, ...]  # which layers use Gated MLA; all others use KDA
    heads: int  # H, of both attention kinds
    head_dim: int  # K = V: channels of a KDA head; content key and value channels of an MLA head
    q_rank: int  # MLA: rank of the query bottleneck
    kv_rank: int  # MLA: width R of the latent that stands for keys and values
    shared_key_dim: int  # MLA: key channels S shared by all heads (never rotated)
    dense_width: int  # feed-forward width of the first `dense_layers` layers
    experts: int  # E: routed experts a layer
    top_k: int  # k: experts a token
    latent_width: int  # width in which routed experts work
    expert_width: int  # inner width of one expert, routed or shared
    vocab_size: int
    block_layers: int  # decoder layers a depth block (Attention Residuals) or chunk

    dense_layers: int = 1  # the first layers have a dense feed-forward
    shared_experts: int = 2  # full-width experts every token visits, kept as one wide feed-forward
    conv_kernel: int = 4  # taps of the causal depthwise convolution before KDA
    decay_rank: int | None = None  # bottleneck of the decay projection; None = head_dim, as in K3
    g_min: float = -5.0  # lower bound of the log-decay
    tile: int = 16  # rows of the smallest decay tile; tile * |g_min| bounds the exponents inside it
    gate_kind: GateKind = "bounded"  # "softplus" is Kimi Linear's unbounded gate
    situ_beta: float = 4.0  # SiTU-GLU: soft cap of the gate branch
    situ_linear_beta: float = 25.0  # SiTU-GLU: soft cap of the up branch
    output_gates: bool = True  # sigmoid gates on the outputs of KDA and MLA
    latent_norm: bool = True  # RMSNorm on the summed expert outputs, before the up projection
    residual: ResidualKind = "attn_res"
    shallow_layers: tuple[int, ...] = ()  # residual "shallow_to_deep": layers whose attention output is kept ...
    deep_layers: tuple[int, ...] = ()  # ... and layers whose attention input receives it
    norm_eps: float = 1e-5
    mla_norm_eps: float = 1e-6  # K3 builds the two low-rank norms of MLA with another epsilon
    embed_std: float = 1.0  # see `Presets` in the README: 1.0 keeps every norm's epsilon negligible at step 0
    init_std: float | None = None  # of every matrix; None = fan_in ** -0.5
    mtp: bool = False  # one layer more that predicts the token after the next, used in training only
    score_domain: ScoreDomain = "sigmoid"  # what the routers' bias is added to; "logit" is for saturated routers only

    def __post_init__(self) -> None:
        need_finite(self)
        for name in (
            *("width", "layers", "heads", "head_dim", "q_rank", "kv_rank", "dense_width", "experts", "top_k"),
            *("latent_width", "expert_width", "vocab_size", "block_layers", "conv_kernel", "tile"),
        ):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("mla_layers", "shallow_layers", "deep_layers"):
            _check_layer_list(name, getattr(self, name), self.layers)
        _need(0 <= self.dense_layers <= self.layers, "dense_layers", self.dense_layers, f"0 to {self.layers}")
        _need(self.shared_key_dim >= 0, "shared_key_dim", self.shared_key_dim, "at least 0")
        _need(self.shared_experts >= 0, "shared_experts", self.shared_experts, "at least 0")
        _need(self.decay_rank is None or self.decay_rank >= 1, "decay_rank", self.decay_rank, "None or at least 1")
        _need(self.top_k < self.experts, "top_k", self.top_k, f"less than experts = {self.experts}")
        _need(self.g_min < 0, "g_min", self.g_min, "a negative log-decay")
        # A smaller tile cannot help: KDA's own has 16 rows.
        rows = max(self.tile, KDA_TILE)
        span = rows * abs(self.g_min)
        limit = f"tile * |g_min| < {MAX_TILE_LOG_RANGE:g} (the range of float32), found {rows} * {-self.g_min:g}"
        _need(span < MAX_TILE_LOG_RANGE, "g_min", self.g_min, f"{limit} = {span:g}")
        need_one_of("gate_kind", self.gate_kind, ("bounded", "softplus"))
        need_one_of("residual", self.residual, ("attn_res", "plain", "chunk", "shallow_to_deep"))
        need_one_of("score_domain", self.score_domain, ("sigmoid", "logit"))
        if self.residual == "shallow_to_deep":
            _need(bool(self.shallow_layers), "shallow_layers", self.shallow_layers, "at least one layer")
            _need(bool(self.deep_layers), "deep_layers", self.deep_layers, "at least one layer")
            late = max(self.shallow_layers) < min(self.deep_layers)
            _need(
                late, "deep_layers", self.deep_layers, f"layers after the last of shallow_layers {self.shallow_layers}"
            )
        for name in ("situ_beta", "situ_linear_beta", "embed_std"):
            _need(getattr(self, name) > 0, name, getattr(self, name), "a positive number")
        _need(self.init_std is None or self.init_std > 0, "init_std", self.init_std, "None or a positive number")
        for name in ("norm_eps", "mla_norm_eps"):
            _need(getattr(self, name) >= 0, name, getattr(self, name), "zero or more")

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Layers that use Kimi Delta Attention."""
        return tuple(i for i in range(self.layers) if i not in self.mla_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers whose feed-forward is Stable LatentMoE."""
        return tuple(range(self.dense_layers, self.layers))

    @property
    def depth_sources(self) -> int:
        """Sources of the final depth mix: the embedding, the finished blocks and the running partial sum."""
        return (self.layers - 1) // self.block_layers + 2


def _need(holds: bool, name: str, found: object, needed: str) -> None:
    if not holds:
        raise ValueError(f"{name}: found {found!r}, need {needed}")


def need_finite(values: Any, prefix: str = "") -> None:
    """Refuse infinities and not-a-number in the fields of a dataclass: comparisons such as ``> 0`` let some through.

    Raises:
        ValueError: naming the field.
    """
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if isinstance(value, float):
            _need(math.isfinite(value), prefix + field.name, value, "a finite number")


def need_one_of(name: str, found: object, choices: Iterable[str]) -> None:
    """Refuse a word that is none of ``choices``.

    Raises:
        ValueError: naming the field, with the nearest choice.
    """
    known = list(choices)
    if found not in known:
        near = difflib.get_close_matches(str(found), known, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name}: found {found!r}, need one of {', '.join(known)}{hint}")


def _check_layer_list(name: str, values: tuple[int, ...], layers: int) -> None:
    _need(isinstance(values, tuple), name, values, "a tuple of 0-based layer numbers")
    _need(len(set(values)) == len(values), name, values, "each layer once")
    for value in values:
        _need(0 <= value < layers, name, value, f"0-based layer numbers from 0 to {layers - 1}")


def _every_fourth_and_last(layers: int) -> tuple[int, ...]:
    """K3's layout: Gated MLA in every fourth layer and in the last."""
    return tuple(i for i in range(layers) if i % 4 == 3 or i == layers - 1)


PRESETS: dict[str, ModelConfig] = {
    # Trained in a minute, for tests and for continuous integration.
    "smoke": ModelConfig(
        width=64,
        layers=5,
        mla_layers=_every_fourth_and_last(5),
        heads=2,
        head_dim=32,
        q_rank=32,
        kv_rank=32,
        shared_key_dim=16,
        dense_width=256,
        experts=16,
        top_k=2,
        latent_width=32,
        expert_width=32,
        vocab_size=256,
        block_layers=1,
    ),
    # Trained in a quarter of an hour on two cores. Few experts, many of them chosen: in steps of 4,096 tokens more
    # could not be balanced, because one step's texts differ from the next's (docs/laptop-plan.md).
    "laptop": ModelConfig(
        width=128,
        layers=5,
        mla_layers=_every_fourth_and_last(5),
        heads=4,
        head_dim=32,
        q_rank=64,
        kv_rank=32,
        shared_key_dim=16,
        dense_width=512,
        experts=18,
        top_k=8,
        latent_width=64,
        expert_width=32,
        vocab_size=4096,
        block_layers=1,
    ),
    "130m": ModelConfig(
        width=768,
        layers=12,
        mla_layers=_every_fourth_and_last(12),
        heads=10,
        head_dim=128,
        q_rank=192,
        kv_rank=256,
        shared_key_dim=64,
        dense_width=3072,
        experts=64,
        top_k=4,
        latent_width=384,
        expert_width=320,
        vocab_size=32768,
        block_layers=2,
    ),
    "400m": ModelConfig(
        width=1024,
        layers=24,
        mla_layers=_every_fourth_and_last(24),
        heads=14,
        head_dim=128,
        q_rank=256,
        kv_rank=256,
        shared_key_dim=64,
        dense_width=4096,
        experts=64,
        top_k=4,
        latent_width=512,
        expert_width=448,
        vocab_size=32768,
        block_layers=3,
    ),
    "1b": ModelConfig(
        width=1792,
        layers=24,
        mla_layers=_every_fourth_and_last(24),
        heads=24,
        head_dim=128,
        q_rank=384,
        kv_rank=256,
        shared_key_dim=64,
        dense_width=8448,
        experts=64,
        top_k=4,
        latent_width=896,
        expert_width=768,
        vocab_size=32768,
        block_layers=3,
    ),
    "k3": ModelConfig(
        width=7168,
        layers=93,
        mla_layers=_every_fourth_and_last(93),
        heads=96,
        head_dim=128,
        q_rank=1536,
        kv_rank=512,
        shared_key_dim=64,
        dense_width=33792,
        experts=896,
        top_k=16,
        latent_width=3584,
        expert_width=3072,
        vocab_size=163840,
        block_layers=12,
        embed_std=0.02,
        init_std=0.02,
    ),
}


def preset(name: str) -> ModelConfig:
    """Return the preset ``name``.

    Raises:
        ValueError: unknown name; the message suggests the nearest one.
    """
    need_one_of("preset", name, PRESETS)
    return PRESETS[name]


def to_dict(config: ModelConfig) -> dict[str, object]:
    """The configuration as JSON-ready values; `from_dict` reads it back."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


def from_dict(values: dict[str, object]) -> ModelConfig:
    """Build a configuration from `to_dict`'s values.

    Raises:
        ValueError: a key that is no field (with the nearest name), a field that is missing, or a bad value.
    """
    fields = {f.name: f for f in dataclasses.fields(ModelConfig)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            raise ValueError(f"{key}: no such field of ModelConfig" + (f"; did you mean {near[0]!r}?" if near else ""))
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in values:
            raise ValueError(f"{name}: missing from the model configuration")
    return ModelConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})  # type: ignore[arg-type]
