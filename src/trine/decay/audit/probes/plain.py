"""Is it Kimi Delta Attention at all: results of the right kind, the right layout, the right values, at any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from trine.decay.audit.inputs import Case, Fault, Inputs, Loss, Result, define
from trine.decay.audit.lab import LIMITS, PASS, Declined, Lab, Measure, error, same_bits
from trine.decay.audit.probes._probe import Probe, no_carrying

# Misreadings of the definition that a wrong result is compared with, and the probe that reports each.
MISREADINGS: tuple[tuple[str, Fault, str], ...] = (
    ("scale", Fault(scale=True), "the output lacks the factor K^-1/2"),
    (
        "gate-formula",
        Fault(clamp=True),
        "the gate is a softplus clamped at the bound, not the scaled logistic function",
    ),
    ("beta-rounding", Fault(beta=True), "beta passes through bfloat16"),
    ("gate-rounding", Fault(gate="input"), "the gate's input passes through bfloat16"),
    ("gate-rounding", Fault(gate="decay"), "the log-decay passes through bfloat16"),
    ("definition", Fault(early=True), "the value is predicted from the state before its decay"),
    ("definition", Fault(norm=True), "q and k are not normalised"),
    ("definition", Fault(heads=True), "value head h reads key head h % H, not h // (HV / H)"),
)


def _plain(lab: Lab) -> list[Case]:
    few = [Case(), Case(groups=2, seed=1)]
    more = [Case(lengths=(128, 128), gates=g, dtype=d, seed=2) for g in ("fast", "slow") for d in lab.target.dtypes]
    return few if lab.quick else few + more


# Contract -----------------------------------------------------------------------------------------------------------


def _contract_cases(lab: Lab) -> Sequence[Case]:
    return [Case(dtype=dtype, state=False) for dtype in lab.target.dtypes[: 1 if lab.quick else None]]


def _contract(lab: Lab, case: Case) -> Measure:
    x = lab.draw(case)
    found = lab.run(x)
    lab.has_state = found.state is not None
    for what, value in (("output", found.out), ("final state", found.state)):
        if value is not None and not bool(torch.isfinite(value).all()):
            bad = int((~torch.isfinite(value)).sum())
            return Measure(False, text=f"{bad} of {value.numel()} values of the {what} are not finite on plain inputs")
    if found.out.dtype != x["v"].dtype:
        return Measure(False, text=f"the output is {found.out.dtype}, need v's {x['v'].dtype}")
    if lab.has_gradients:
        try:
            lab.run(x, Loss())
        except Declined as reason:
            lab.has_gradients = False
            if "carry no gradient" not in str(reason):
                return Measure(False, text=f"the backward pass raised {reason}")
    return PASS


CONTRACT = Probe("contract", "callable, with results of the right kind", _contract_cases, _contract)


# Determinism --------------------------------------------------------------------------------------------------------


def _determinism(lab: Lab, case: Case) -> Measure:
    x = lab.draw(case)
    loss = Loss() if lab.has_gradients else None
    first = lab.run(x, loss)
    for _ in range(2):
        again = lab.run(x, loss)
        pairs = [("the output", first.out, again.out), ("the final state", first.state, again.state)]
        pairs += [(f"the gradient of {n}", g, again.grads[n]) for n, g in first.grads.items()]
        for what, a, b in pairs:
            if not same_bits(a, b):
                return Measure(False, text=f"{what} differs between two equal calls")
    return PASS


DETERMINISM = Probe(
    "determinism",
    "equal calls give equal bits",
    lambda lab: [Case(lengths=(40, 40))] if lab.quick else [Case(), Case(lengths=(200, 200), seed=2)],
    _determinism,
    after=("contract",),
)


# State layout -------------------------------------------------------------------------------------------------------


def _layout_missing(lab: Lab) -> str | None:
    if lab.fit(Case()).key_dim == lab.fit(Case()).value_dim:
        return "supports K = V only, where layouts cannot be told apart by shape"
    return no_carrying(lab)


def _state_layout(lab: Lab, case: Case) -> Measure:
    if case.key_dim == case.value_dim or not case.state:
        return PASS
    plain, x = replace(lab, state_in="KV", state_out="KV"), lab.draw(case)
    shapes = {"KV": x["initial_state"].shape}
    turned = x["initial_state"].mT.contiguous()
    best, layout, as_documented = float("inf"), ("KV", "KV"), float("inf")
    for given in ("KV", "memory", "shape"):
        handed = x["initial_state"] if given != "shape" else turned
        try:
            found = plain.run(x.with_(initial_state=handed)).state
        except Declined:
            continue
        assert found is not None
        # A target that reads [K, V]-shaped memory as [V, K] starts from another state.
        start = turned.reshape(shapes["KV"]) if given == "memory" else x["initial_state"]
        if given == "memory":
            found = plain.run(x.with_(initial_state=start)).state
            assert found is not None
        want = define(x).state
        assert want is not None
        for returned in ("KV", "memory", "shape"):
            n, h, a, b = found.shape
            turned_back = found.mT if returned == "shape" else found.reshape(n, h, b, a).mT
            have = found if returned == "KV" else turned_back
            if have.shape != want.shape:
                continue
            value = error(have, want, "final state")
            if (given, returned) == ("KV", "KV"):
                as_documented = value
            if value < best:
                best, layout = value, (given, returned)
    if layout != ("KV", "KV") and best < 0.3 * as_documented:
        lab.state_in, lab.state_out = layout
        how = {"KV": "[K, V]", "memory": "[K, V] by shape but [V, K] in memory", "shape": "[V, K]"}
        return Measure(
            False, text=f"initial states are read as {how[layout[0]]}, final ones returned as {how[layout[1]]}"
        )
    try:
        plain.call(x.with_(initial_state=turned))
    except Declined:
        return PASS
    return Measure(False, text=f"an initial state of shape {tuple(turned.shape)} is taken for {tuple(shapes['KV'])}")


STATE_LAYOUT = Probe(
    "state-layout",
    "states are [N, HV, K, V] in and out, and a transposed one is refused",
    lambda lab: [Case(lengths=(lab.target.multiple * 3 % 64 or 64,), gates="slow")],
    _state_layout,
    _layout_missing,
    ("contract",),
)


# Definition, and the misreadings it is told apart from --------------------------------------------------------------


def _diagnose(lab: Lab, case: Case) -> tuple[str, Fault, str, Measure]:
    """The probe that answers for this target's difference from the definition, the misreading, and the difference."""
    known = lab.shared.setdefault("diagnosis", {})
    if case not in known:
        known[case] = _search(lab, case)
    return known[case]


def _search(lab: Lab, case: Case) -> tuple[str, Fault, str, Measure]:
    x, found = lab.draw(case), None
    found = lab.run(x)
    base = replace(lab, fault=Fault(), shared={})
    measure = base.against_definition(x, case, found=found)
    if measure.ok:
        return "", Fault(), "", measure
    precision = lab.operands(case)
    for name, fault, what in MISREADINGS:
        if not lab.raw and (fault.clamp or fault.norm or fault.gate == "input"):
            continue
        if precision != "fp32" and (fault.beta or fault.gate):
            continue
        if replace(lab, fault=fault, shared={}).against_definition(x, case, found=found).ok:
            return name, fault, what, measure
    return "definition", Fault(), "", measure


def _definition(lab: Lab, case: Case) -> Measure:
    name, fault, what, measure = _diagnose(lab, case)
    if name == "definition" and fault != Fault():
        lab.fault = fault
        return replace(measure, text=f"{measure.text}: {what}")
    if name and name != "definition":
        return Measure(True, text=f"but for what {name} says")
    return measure


def _reports(probe: str) -> Probe:
    """The probe of one misreading: a finding when it explains the difference from the definition."""

    def check(lab: Lab, case: Case) -> Measure:
        name, fault, what, measure = _diagnose(lab, case)
        if name == probe:
            lab.fault = fault
            return replace(measure, text=f"{measure.text}; explained exactly: {what}")
        extra = _SINGLE.get(probe)
        return extra(lab, case) if extra is not None else PASS

    questions = {
        "scale": "the output carries K^-1/2",
        "gate-formula": "the bounded gate is the scaled logistic function",
        "beta-rounding": "beta keeps its float32 value",
        "gate-rounding": "the gate keeps its float32 value",
    }
    raw_only = probe == "gate-formula"
    return Probe(
        probe,
        questions[probe],
        _plain,
        check,
        (lambda lab: None if lab.raw else "takes log-decays, so the gate's formula is the caller's")
        if raw_only
        else (lambda lab: None),
        ("contract", "definition"),
    )


def _state(result: Result) -> torch.Tensor:
    assert result.state is not None
    return result.state


def _step_rounds(fault: Fault, what: str, only_beta: bool) -> Callable[[Lab, Case], Measure]:
    """Whether the decode step rounds beta or the gate: one token says it, before products of operands blur it."""

    def check(lab: Lab, case: Case) -> Measure:
        if lab.target.step is None or not lab.carries:
            return PASS
        one = lab.draw(replace(case, lengths=(1,), gates="fast" if not only_beta else "bound"))
        _, state = lab.step(one, 0, one["initial_state"].clone())
        # The step may follow the definition where the run at once does not.
        off = [error(state, _state(define(one, fault=f)), "final state") for f in (Fault(), lab.fault, fault)]
        value, otherwise = min(off[:2]), off[2]
        explained = value > LIMITS["fp32"] and otherwise < 0.2 * value
        return Measure(not explained, value, LIMITS["fp32"], f"{what} in the decode step") if explained else PASS

    return check


_SINGLE: dict[str, Callable[[Lab, Case], Measure]] = {
    "beta-rounding": _step_rounds(Fault(beta=True), "beta passes through bfloat16", True),
    "gate-rounding": _step_rounds(Fault(gate="decay"), "the log-decay passes through bfloat16", False),
}

DEFINITION = Probe("definition", "values of plain inputs", _plain, _definition, after=("contract",))
SCALE = _reports("scale")
GATE_FORMULA = _reports("gate-formula")
BETA_ROUNDING = _reports("beta-rounding")
GATE_ROUNDING = _reports("gate-rounding")


# Lengths ------------------------------------------------------------------------------------------------------------


def _length_cases(lab: Lab) -> Sequence[Case]:
    every = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129)
    return [Case(lengths=(n, n), seed=n) for n in ((1, 17, 33, 70) if lab.quick else every)]


def _lengths(lab: Lab, case: Case) -> Measure:
    x: Inputs = lab.draw(case)
    return lab.against_definition(x, case, Loss() if lab.has_gradients else None, ("output", "final state", "v"))


LENGTHS = Probe(
    "lengths",
    "values at lengths that fill no tile, the final state above all",
    _length_cases,
    _lengths,
    lambda lab: f"takes multiples of {lab.target.multiple} tokens only" if lab.target.multiple > 1 else None,
    ("contract", "definition"),
)
