"""The probes, in the order in which they are asked: each question once, each fault named by one of them."""

from __future__ import annotations

from trine.decay.audit.probes._probe import Probe
from trine.decay.audit.probes.card import CLIFF, DIAGONAL
from trine.decay.audit.probes.causal import APPEND, CAUSALITY, NEIGHBOURS
from trine.decay.audit.probes.documents import ALL_EMPTY, DECODE, DOCUMENTS, DRIFT, EMPTY, SPLIT
from trine.decay.audit.probes.memory import CONV, MUTATION, OFFSETS, STALE, VIEWS
from trine.decay.audit.probes.numeric import GATE_GRADIENT, GRADIENTS, PARALLEL, RANGE, SLOW_CHANNEL, ZERO_DECAY
from trine.decay.audit.probes.plain import (
    BETA_ROUNDING,
    CONTRACT,
    DEFINITION,
    DETERMINISM,
    GATE_FORMULA,
    GATE_ROUNDING,
    LENGTHS,
    SCALE,
    STATE_LAYOUT,
)

PROBES: tuple[Probe, ...] = (
    CONTRACT,
    STATE_LAYOUT,
    DETERMINISM,
    MUTATION,
    DEFINITION,
    SCALE,
    GATE_FORMULA,
    BETA_ROUNDING,
    GATE_ROUNDING,
    LENGTHS,
    CAUSALITY,
    APPEND,
    RANGE,
    PARALLEL,
    SLOW_CHANNEL,
    ZERO_DECAY,
    GRADIENTS,
    GATE_GRADIENT,
    NEIGHBOURS,
    DOCUMENTS,
    EMPTY,
    ALL_EMPTY,
    SPLIT,
    DECODE,
    DRIFT,
    STALE,
    VIEWS,
    OFFSETS,
    CONV,
    DIAGONAL,
    CLIFF,
)

__all__ = ["PROBES", "Probe"]
