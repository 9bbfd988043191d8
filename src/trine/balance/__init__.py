"""Expert load outside the forward pass: a step's router statistics become the next step's bias; measures.

Names load on first use, so that whoever only reads a recorder's file does without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trine.balance.auxiliary_balancing import AuxiliaryBalancing as AuxiliaryBalancing
    from trine.balance.freeze import Freeze as Freeze
    from trine.balance.freeze import Replay as Replay
    from trine.balance.load_quantile import LoadQuantileBalancing as LoadQuantileBalancing
    from trine.balance.metrics import LoadPercentiles as LoadPercentiles
    from trine.balance.metrics import SamplingFloor as SamplingFloor
    from trine.balance.metrics import average_violation as average_violation
    from trine.balance.metrics import coefficient_of_variation as coefficient_of_variation
    from trine.balance.metrics import dead_experts as dead_experts
    from trine.balance.metrics import dead_over_steps as dead_over_steps
    from trine.balance.metrics import effective_experts as effective_experts
    from trine.balance.metrics import entropy as entropy
    from trine.balance.metrics import gini as gini
    from trine.balance.metrics import load_percentiles as load_percentiles
    from trine.balance.metrics import max_violation as max_violation
    from trine.balance.metrics import min_violation as min_violation
    from trine.balance.metrics import quantile_error as quantile_error
    from trine.balance.metrics import rank_overload as rank_overload
    from trine.balance.metrics import sampling_floor as sampling_floor
    from trine.balance.metrics import sampling_floors as sampling_floors
    from trine.balance.metrics import sequence_loads as sequence_loads
    from trine.balance.metrics import sign_flip_rate as sign_flip_rate
    from trine.balance.metrics import silence as silence
    from trine.balance.policies import BalancePolicy as BalancePolicy
    from trine.balance.policies import close_policy as close_policy
    from trine.balance.policies import install_policy as install_policy
    from trine.balance.policies import make_policy as make_policy
    from trine.balance.quantile_balancing import QuantileBalancing as QuantileBalancing
    from trine.balance.rank_check import RankChecked as RankChecked
    from trine.balance.rank_check import RankMismatch as RankMismatch
    from trine.balance.rank_check import bias_hash as bias_hash
    from trine.balance.rank_check import check_same_bias as check_same_bias
    from trine.balance.record_format import RecordError as RecordError
    from trine.balance.recorder import Recorder as Recorder
    from trine.balance.recorder_reader import RecorderReader as RecorderReader
    from trine.balance.service import AsyncBalancing as AsyncBalancing
    from trine.balance.service import ServiceStatus as ServiceStatus
    from trine.balance.service_protocol import ServiceError as ServiceError
    from trine.balance.sign import SignBalancing as SignBalancing
    from trine.balance.stateless_thresholds import StatelessThresholds as StatelessThresholds
    from trine.balance.window import MARGIN_LEVELS as MARGIN_LEVELS
    from trine.balance.window import Window as Window

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
    "close_policy",
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

_HOME = {
    "AuxiliaryBalancing": "auxiliary_balancing",
    "Freeze": "freeze",
    "Replay": "freeze",
    "LoadQuantileBalancing": "load_quantile",
    "LoadPercentiles": "metrics",
    "SamplingFloor": "metrics",
    "average_violation": "metrics",
    "coefficient_of_variation": "metrics",
    "dead_experts": "metrics",
    "dead_over_steps": "metrics",
    "effective_experts": "metrics",
    "entropy": "metrics",
    "gini": "metrics",
    "load_percentiles": "metrics",
    "max_violation": "metrics",
    "min_violation": "metrics",
    "quantile_error": "metrics",
    "rank_overload": "metrics",
    "sampling_floor": "metrics",
    "sampling_floors": "metrics",
    "sequence_loads": "metrics",
    "sign_flip_rate": "metrics",
    "silence": "metrics",
    "BalancePolicy": "policies",
    "close_policy": "policies",
    "install_policy": "policies",
    "make_policy": "policies",
    "QuantileBalancing": "quantile_balancing",
    "RankChecked": "rank_check",
    "RankMismatch": "rank_check",
    "bias_hash": "rank_check",
    "check_same_bias": "rank_check",
    "RecordError": "record_format",
    "Recorder": "recorder",
    "RecorderReader": "recorder_reader",
    "AsyncBalancing": "service",
    "ServiceStatus": "service",
    "ServiceError": "service_protocol",
    "SignBalancing": "sign",
    "StatelessThresholds": "stateless_thresholds",
    "MARGIN_LEVELS": "window",
    "Window": "window",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
