"""Inputs at which the arithmetic itself is at risk: range, conditioning, cancellation."""

from __future__ import annotations

from collections.abc import Sequence

from trine.decay.audit.inputs import Case, Loss
from trine.decay.audit.lab import Lab, Measure
from trine.decay.audit.probes._probe import Probe, no_gradients

AFTER = ("contract", "definition")


def _values(lab: Lab, case: Case) -> Measure:
    """Outputs and states beside the definition; gradients have to be finite, and are judged by their own probes."""
    x, loss = lab.draw(case), Loss() if lab.has_gradients else None
    found = lab.run(x, loss)
    measure = lab.against_definition(x, case, found=found, only=("output", "final state"))
    if measure.ok:
        for name, grad in found.grads.items():
            if not bool(grad.isfinite().all()):
                return Measure(False, float("inf"), measure.limit, f"the gradient of {name} is not finite")
    return measure


# Range --------------------------------------------------------------------------------------------------------------


def _range_cases(lab: Lab) -> Sequence[Case]:
    bounds = lab.target.lower_bounds
    if lab.quick:
        few = [(64, "bound"), (64, "saturated"), (64, "swing")]
        return [Case(lengths=(n,), gates=g, lower_bound=b) for b in bounds[:1] for n, g in few]
    return [
        Case(lengths=(n,), gates=g, lower_bound=b, dtype=d)
        for d in lab.target.dtypes
        for b in bounds
        for n in (64, 128)
        for g in ("bound", "saturated", "swing")
    ]


RANGE = Probe(
    "range",
    "gates at their bound for a whole tile: nothing overflows",
    _range_cases,
    _values,
    after=AFTER,
)


# Conditioning -------------------------------------------------------------------------------------------------------


def _parallel_cases(lab: Lab) -> Sequence[Case]:
    if lab.quick:
        return [Case(lengths=(n,), keys=k, gates="slow", beta="one") for n, k in ((64, "identical"), (64, "near"))]
    return [
        Case(lengths=(n,), keys=k, gates=g, beta="one", dtype=d)
        for d in lab.target.dtypes
        for n in (64, 256)
        for k in ("identical", "near")
        for g in ("slow", "still")
    ]


PARALLEL = Probe(
    "parallel-keys",
    "identical and nearly parallel keys with beta 1 and slow decay",
    _parallel_cases,
    _values,
    after=AFTER,
)


def _channel_cases(lab: Lab) -> Sequence[Case]:
    lengths = (64,) if lab.quick else (64, 128, 320)
    return [Case(lengths=(n,), gates=g) for n in lengths for g in ("slow-channel", "still-channel")]


SLOW_CHANNEL = Probe(
    "slow-channel",
    "one channel that keeps its memory among channels that lose it at once",
    _channel_cases,
    _values,
    after=(*AFTER, "range"),
)


def _zero_cases(lab: Lab) -> Sequence[Case]:
    lengths = (64,) if lab.quick else (64, 192)
    return [Case(lengths=(n,), gates=g) for n in lengths for g in ("zero", "rare-zero", "alternate")]


ZERO_DECAY = Probe("zero-decay", "log-decays of exactly 0", _zero_cases, _values, after=AFTER)


# Gradients ----------------------------------------------------------------------------------------------------------


def _gradient_cases(lab: Lab) -> Sequence[Case]:
    few = [Case(state=False), Case(state=False, groups=2, gates="slow")]
    more = [
        Case(state=False, lengths=(n,), gates=g, keys=k, groups=u, dtype=d)
        for d in lab.target.dtypes
        for n, u in ((64, 1), (128, 2))
        for g, k in (("mixed", "random"), ("saturated", "random"), ("slow", "near"), ("still-channel", "random"))
    ]
    return few if lab.quick else few + more


def _gradients(lab: Lab, case: Case) -> Measure:
    x = lab.draw(case)
    return lab.against_definition(x, case, Loss(), only=("q", "k", "v", "beta"))


GRADIENTS = Probe(
    "gradients",
    "gradients of q, k, v and beta beside float64 and the floor of their operands",
    _gradient_cases,
    _gradients,
    no_gradients,
    (*AFTER, "beta-rounding"),
)


def _gate_cases(lab: Lab) -> Sequence[Case]:
    few = [Case(state=False, gates=g) for g in ("saturated", "mixed", "slow-channel")]
    more = [
        Case(state=False, lengths=(n,), gates=g, groups=u, dtype=d)
        for d in lab.target.dtypes
        for n, u in ((64, 1), (128, 2))
        for g in ("saturated", "mixed", "fast", "slow", "slow-channel")
    ]
    return few if lab.quick else few + more


def _gate_gradient(lab: Lab, case: Case) -> Measure:
    x = lab.draw(case)
    return lab.against_definition(x, case, Loss(), only=("gate", "A_log", "dt_bias"))


GATE_GRADIENT = Probe(
    "gate-gradient",
    "gradients of the gate, where terms of the diagonal have to cancel",
    _gate_cases,
    _gate_gradient,
    no_gradients,
    (*AFTER, "gate-rounding", "range", "slow-channel", "gradients"),
)
