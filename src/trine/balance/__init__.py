"""Expert load outside the forward pass: a step's router statistics become the next step's bias; measures."""

from __future__ import annotations

from trine.balance.auxiliary_balancing import AuxiliaryBalancing
from trine.balance.freeze import Freeze, Replay
from trine.balance.load_quantile import LoadQuantileBalancing
from trine.balance.metrics import (
    LoadPercentiles,
    SamplingFloor,
    average_violation,
    coefficient_of_variation,
    dead_experts,
    dead_over_steps,
    effective_experts,
    entropy,
    gini,
    load_percentiles,
    max_violation,
    min_violation,
    quantile_error,
    rank_overload,
    sampling_floor,
    sampling_floors,
    sequence_loads,
    sign_flip_rate,
    silence,
)
from trine.balance.policies import BalancePolicy, install_policy, make_policy
from trine.balance.quantile_balancing import QuantileBalancing
from trine.balance.rank_check import RankChecked, RankMismatch, bias_hash, check_same_bias
from trine.balance.record_format import RecordError
from trine.balance.recorder import Recorder
from trine.balance.recorder_reader import RecorderReader
from trine.balance.service import AsyncBalancing, ServiceStatus
from trine.balance.service_protocol import ServiceError
from trine.balance.sign import SignBalancing
from trine.balance.stateless_thresholds import StatelessThresholds
from trine.balance.window import MARGIN_LEVELS, Window

__all__ = [
    "MARGIN_LEVELS",
    "AsyncBalancing",
    "AuxiliaryBalancing",
    "BalancePolicy",
    "Freeze",
    "LoadPercentiles",
    "LoadQuantileBalancing",
    "QuantileBalancing",
    "RankChecked",
    "RankMismatch",
    "RecordError",
    "Recorder",
    "RecorderReader",
    "Replay",
    "SamplingFloor",
    "ServiceError",
    "ServiceStatus",
    "SignBalancing",
    "StatelessThresholds",
    "Window",
    "average_violation",
    "bias_hash",
    "check_same_bias",
    "coefficient_of_variation",
    "dead_experts",
    "dead_over_steps",
    "effective_experts",
    "entropy",
    "gini",
    "install_policy",
    "load_percentiles",
    "make_policy",
    "max_violation",
    "min_violation",
    "quantile_error",
    "rank_overload",
    "sampling_floor",
    "sampling_floors",
    "sequence_loads",
    "sign_flip_rate",
    "silence",
]
