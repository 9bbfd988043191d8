"""Does anything reach where it must not: from later tokens to earlier ones, from one document to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from trine.decay.audit.inputs import Case, Inputs, Loss, Result
from trine.decay.audit.lab import PASS, Lab, Measure, difference, same_bits
from trine.decay.audit.probes._probe import Probe, no_packing

ROWS = ("q", "k", "v", "gate", "beta")


def edited(x: Inputs, other: Inputs, rows: slice, what: str) -> Inputs:
    """``x`` with ``rows`` of the gate, or with ``what`` "all" of everything, taken from ``other``."""
    new = {name: x[name].clone() for name in (ROWS if what == "all" else ("gate",))}
    for name, t in new.items():
        t[:, rows] = other[name][:, rows]
    return x.with_(**new)


def changed(name: str, a: Tensor, b: Tensor) -> Measure | None:
    """A finding if two tensors differ in any bit."""
    if same_bits(a, b):
        return None
    count = int((a != b).sum())
    return Measure(
        False,
        difference(a, b),
        0.0,
        f"changed {count} of {a.numel()} values of {name}, by up to {difference(a, b):.1e}",
    )


# Later tokens -------------------------------------------------------------------------------------------------------


def _causality_cases(lab: Lab) -> Sequence[Case]:
    few = [Case(lengths=(22,), at=21, what="gate"), Case(at=40, what="gate", gates="fast")]
    few += [Case(at=t, what="all") for t in (8, 17)]
    more = [Case(at=t, what="gate", gates=g, seed=t) for t in (1, 15, 16, 31, 33, 63) for g in ("mixed", "slow")]
    more += [Case(lengths=(200, 200), at=t, what=w) for t in (70, 130, 199) for w in ("gate", "all")]
    return few if lab.quick else few + more


def _causality(lab: Lab, case: Case) -> Measure:
    t = case.at
    if not 0 < t < case.tokens:
        return PASS
    x = lab.draw(case)
    y = edited(x, lab.draw(replace(case, seed=case.seed + 1000)), slice(t, None), case.what)
    loss = Loss(before=t) if lab.has_gradients else None
    a, b = lab.run(x, loss), lab.run(y, loss)
    edit = f"editing {'the gate' if case.what == 'gate' else 'everything'} from token {t} on"
    return _same_before(a, b, t, edit)


def _same_before(a: Result, b: Result, t: int, edit: str, parameters: bool = True) -> Measure:
    found = changed(f"the output before it ({t} tokens)", a.out[:, :t], b.out[:, :t])
    # Gradients that are not numbers are a finding of the probes of values; here they would say nothing.
    numbers = all(bool(g.isfinite().all()) for r in (a, b) for g in r.grads.values())
    for name, grad in a.grads.items() if numbers else ():
        if found is not None:
            break
        other = b.grads[name]
        if name in ROWS:
            found = changed(f"the gradient of {name} before it", grad[:, :t], other[:, :t])
            later = max(float(g[:, t:].abs().sum()) for g in (grad, other))
            if found is None and later:
                return Measure(False, later, 0.0, f"a loss on {t} tokens has gradients of {name} after them")
        elif parameters or name == "initial_state":
            found = changed(f"the gradient of {name}", grad, other)
    return PASS if found is None else replace(found, text=f"{edit} {found.text}")


CAUSALITY = Probe(
    "causality",
    "no later token moves an earlier output or gradient by one bit",
    _causality_cases,
    _causality,
    after=("contract", "determinism"),
)


# Appended tokens ----------------------------------------------------------------------------------------------------


def _append_cases(lab: Lab) -> Sequence[Case]:
    few = [(22, 1), (40, 24), (64, 130)]
    more = [(1, 1), (16, 16), (63, 1), (100, 1000), (129, 400), (500, 1600)]
    return [Case(lengths=(n,), more=m, seed=n) for n, m in (few if lab.quick else few + more)]


def _append(lab: Lab, case: Case) -> Measure:
    t = case.tokens
    longer = lab.fit(replace(case, lengths=(t + max(case.more, 1),)))
    x = lab.draw(longer)
    # States at the end differ, so the loss is on the outputs alone. Sums over tokens (A_log, dt_bias) may group anew.
    loss = Loss(before=t) if lab.has_gradients else None
    a, b = lab.run(x.rows(0, t, x.tensors.get("initial_state")), loss), lab.run(x, loss)
    return _same_before(a, b, t, f"appending {longer.tokens - t} tokens to {t}", parameters=False)


APPEND = Probe(
    "append",
    "appended tokens move no earlier output or gradient by one bit",
    _append_cases,
    _append,
    after=("contract", "determinism", "causality", "lengths"),
)


# Other documents ----------------------------------------------------------------------------------------------------


def _neighbour_cases(lab: Lab) -> Sequence[Case]:
    few = [Case(lengths=(7, 1, 20, 5), packed=True, at=n, what="all", gates="slow") for n in (0, 2)]
    more = [Case(lengths=(17, 1, 41, 5, 64), packed=True, at=n, what=w) for n in range(5) for w in ("gate", "all")]
    return few if lab.quick else few + more


def _neighbours(lab: Lab, case: Case) -> Measure:
    n = case.at
    if not 0 <= n < len(case.lengths) or not case.lengths[n] or len(case.lengths) < 2:
        return PASS
    x, bounds = lab.draw(case), case.bounds
    y = edited(x, lab.draw(replace(case, seed=case.seed + 1000)), slice(bounds[n], bounds[n + 1]), case.what)
    loss = Loss() if lab.has_gradients else None
    a, b = lab.run(x, loss), lab.run(y, loss)
    found = None
    for m in range(len(case.lengths)):
        if m == n:
            continue
        rows = slice(bounds[m], bounds[m + 1])
        pairs = [("the output", a.out[:, rows], b.out[:, rows])]
        pairs += [(f"the gradient of {w}", a.grads[w][:, rows], b.grads[w][:, rows]) for w in ROWS if w in a.grads]
        if a.state is not None and b.state is not None:
            pairs.append(("the final state", a.state[m], b.state[m]))
        if "initial_state" in a.grads:
            pairs.append(
                ("the gradient of the initial state", a.grads["initial_state"][m], b.grads["initial_state"][m])
            )
        for what, p, q in pairs:
            found = changed(f"{what} of document {m}", p, q) if found is None else found
    return PASS if found is None else replace(found, text=f"editing document {n} of {case.lengths} {found.text}")


NEIGHBOURS = Probe(
    "neighbours",
    "no document moves another's results by one bit",
    _neighbour_cases,
    _neighbours,
    no_packing,
    ("contract", "determinism"),
)
