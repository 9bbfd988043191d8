"""Any way to compute a sequence gives the same result: packed, alone, in pieces, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from trine.decay.audit.inputs import Case, Loss, Result
from trine.decay.audit.lab import LIMITS, PASS, Lab, Measure, Misshapen, error
from trine.decay.audit.probes._probe import Probe, no_carrying, no_packing

AFTER = ("contract", "determinism")
VALUES = ("definition", "scale", "gate-formula", "beta-rounding", "gate-rounding")


# Packed rows --------------------------------------------------------------------------------------------------------


def _alone(lab: Lab, case: Case) -> Measure:
    """Every document of a packed row beside the same document alone; an empty one passes its state through."""
    x, bounds = lab.draw(case), case.bounds
    packed = lab.run(x)
    worst = PASS
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        given = x["initial_state"][n : n + 1] if "initial_state" in x.tensors else None
        what = f"document {n} of lengths {case.lengths}"
        if start == end:
            if packed.state is None:
                continue
            want = torch.zeros_like(packed.state[n : n + 1]) if given is None else given
            if not torch.equal(packed.state[n : n + 1], want.to(packed.state.dtype)):
                return Measure(False, text=f"{what} is empty, yet its final state is not the initial one")
            continue
        part = x.rows(start, end, given)
        alone = lab.run(part)
        state = None if packed.state is None else packed.state[n : n + 1]
        found = Result(packed.out[:, start:end], state)
        here = lab.compare(part, found, alone, lab.operands(case))
        if here.ratio >= worst.ratio:
            worst = replace(here, text=f"{what}: {here.text} beside the same document alone")
    return worst


def _document_cases(lab: Lab) -> Sequence[Case]:
    few = [(5, 17, 1, 40), (1, 1, 33)]
    more = [(1,), (16, 16), (1, 64, 1), (63, 65, 129), (1,) * 40, (300, 2, 31)]
    return [Case(lengths=n, packed=True, seed=len(n)) for n in (few if lab.quick else few + more)]


DOCUMENTS = Probe(
    "documents",
    "packed documents, ragged and of one token, equal the same documents alone",
    _document_cases,
    _alone,
    no_packing,
    (*AFTER, "neighbours", "lengths"),
)


def _empty_cases(lab: Lab) -> Sequence[Case]:
    few = [(0, 9, 20), (9, 0, 20), (9, 20, 0)]
    more = [(0, 0, 17), (17, 0, 0, 33), (0, 1, 0, 1, 0), (128, 128, 0), (128, 0, 128), (64, 0, 0, 0, 64, 0)]
    return [Case(lengths=n, packed=True, gates="slow") for n in (few if lab.quick else few + more)]


EMPTY = Probe(
    "empty-documents",
    "empty documents in every position pass their state through and disturb nobody",
    _empty_cases,
    _alone,
    no_packing,
    (*AFTER, "neighbours", "lengths", "documents"),
)


ALL_EMPTY = Probe(
    "all-empty",
    "a batch of empty documents returns the initial states",
    lambda lab: [Case(lengths=n, packed=True) for n in ((0,), (0, 0, 0))],
    _alone,
    no_packing,
    (*AFTER, "neighbours", "lengths", "empty-documents"),
)


# Pieces -------------------------------------------------------------------------------------------------------------


def _split_cases(lab: Lab) -> Sequence[Case]:
    few = [Case(lengths=(48,), at=16, gates="slow"), Case(lengths=(40,), at=33)]
    more = [
        Case(lengths=(n, n), at=t, gates=g) for n, t in ((256, 64), (130, 1), (130, 129)) for g in ("mixed", "slow")
    ]
    return few if lab.quick else few + more


def _split(lab: Lab, case: Case) -> Measure:
    multiple, tokens = lab.target.multiple, case.tokens
    cut = -(-case.at // multiple) * multiple
    if not 0 < cut < tokens:
        cut, tokens = multiple, max(tokens, 2 * multiple)
        case = replace(case, lengths=(tokens,) * len(case.lengths))
    if not case.state:
        return PASS
    x, precision = lab.draw(case), lab.operands(case)
    loss = Loss() if lab.has_gradients else None
    whole = lab.run(x, loss)
    if not all(bool(g.isfinite().all()) for g in whole.grads.values()):
        # Said by the probes of gradients; here the values remain.
        loss, whole = None, lab.run(x)
    measure = lab.compare(x, whole, lab.expect(x, loss), precision, loss, only=("initial_state",))
    if not measure.ok:
        return replace(measure, text=f"{measure.text} beside the definition")
    leaves = {n: t.detach().clone().requires_grad_(loss is not None) for n, t in x.tensors.items()}
    y = x.with_(**leaves)
    with torch.set_grad_enabled(loss is not None):
        first, between = lab.call(y.rows(0, cut, leaves["initial_state"]))
        second, final = lab.call(y.rows(cut, tokens, between))
        joined = torch.cat([first, second], 1)
        grads = {} if loss is None else lab.gradients(loss(joined, final, None), leaves)
    found = Result(joined.detach(), None if final is None else final.detach(), grads)
    names = ["output", "final state", *(n for n in grads if n not in ("A_log", "dt_bias"))]
    measure = lab.compare(x, found, whole, precision, loss, only=names)
    return replace(measure, text=f"{tokens} tokens cut at {cut}: {measure.text} beside the whole")


SPLIT = Probe(
    "split",
    "a sequence in pieces equals the whole, gradients included",
    _split_cases,
    _split,
    no_carrying,
    ("contract", "definition", "state-layout", "lengths"),
)


# Token by token -----------------------------------------------------------------------------------------------------


def _decode_cases(lab: Lab) -> Sequence[Case]:
    few = [Case(lengths=(24,), at=16, gates="slow"), Case(lengths=(12,), at=0)]
    more = [Case(lengths=(t + 20,) * 2, at=t, gates=g) for t in (1, 15, 64, 130) for g in ("mixed", "zero")]
    return few if lab.quick else few + more


def _no_decode(lab: Lab) -> str | None:
    if lab.target.multiple > 1:
        return f"takes multiples of {lab.target.multiple} tokens only and offers no decode step"
    return no_carrying(lab)


def _decode(lab: Lab, case: Case) -> Measure:
    at, tokens = min(case.at, case.tokens - 1), case.tokens
    if not case.state:
        return PASS
    x = lab.draw(case)
    whole, state, parts = lab.run(x), x["initial_state"].clone(), []
    with torch.no_grad():
        if at:
            begun = lab.run(x.rows(0, at, state))
            assert begun.state is not None
            parts, state = [begun.out], begun.state
        for t in range(at, tokens):
            out, state = lab.step(x, t, state)
            parts.append(out.unsqueeze(1))
    measure = lab.compare(x, Result(torch.cat(parts, 1), state), whole, lab.operands(case))
    return replace(measure, text=f"{at} tokens at once and {tokens - at} one by one: {measure.text} beside the whole")


DECODE = Probe(
    "decode",
    "token by token equals all at once",
    _decode_cases,
    _decode,
    _no_decode,
    ("contract", *VALUES, "state-layout", "lengths", "split"),
    strict=True,
)


def _drift(lab: Lab, case: Case) -> Measure:
    """Token by token over a long text: the last tenth and the final state beside the run at once."""
    x, tokens = lab.draw(case), case.tokens
    whole, state = lab.run(x), x["initial_state"].clone()
    if whole.state is None:
        raise Misshapen("no final state was returned")
    tenth, outs = max(tokens // 10, 1), []
    with torch.no_grad():
        for t in range(tokens):
            out, state = lab.step(x, t, state)
            if t < tenth or t >= tokens - tenth:
                outs.append(out)
    begin = error(torch.stack(outs[:tenth], 1), whole.out[:, :tenth], "output")
    end = error(torch.stack(outs[-tenth:], 1), whole.out[:, -tenth:], "output")
    final = error(state, whole.state, "final state")
    limit = LIMITS[lab.operands(case)]
    text = f"over {tokens} tokens: first tenth {begin:.1e}, last tenth {end:.1e}, final state {final:.1e}"
    return Measure(max(end, final) <= limit, max(end, final), limit, text)


def _drift_cases(lab: Lab) -> Sequence[Case]:
    slow_path = lab.target.step is None
    tokens = 300 if lab.quick else 2000 if slow_path else 20000
    return [Case(lengths=(tokens,), gates="still", heads=2)]


DRIFT = Probe(
    "decode-drift",
    "token by token does not drift away over a long text",
    _drift_cases,
    _drift,
    _no_decode,
    ("contract", *VALUES, "state-layout", "lengths", "split", "decode"),
    shrinks=False,
    strict=True,
)
