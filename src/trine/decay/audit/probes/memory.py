"""What a call does to memory: its inputs, what lies around them, what was left there, and how it is addressed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from trine.decay.audit.inputs import Case, Inputs, Loss, Result
from trine.decay.audit.lab import PASS, Declined, Lab, Measure, error, poisoned, same_bits
from trine.decay.audit.probes._probe import Probe, no_packing

ROWS = ("q", "k", "v", "gate", "beta")
POISON = 1e30


def _pairs(a: Result, b: Result) -> list[tuple[str, Tensor | None, Tensor | None]]:
    named = [("the output", a.out, b.out), ("the final state", a.state, b.state)]
    return [*named, *((f"the gradient of {n}", g, b.grads[n]) for n, g in a.grads.items())]


# Inputs -------------------------------------------------------------------------------------------------------------


def _mutation(lab: Lab, case: Case) -> Measure:
    x = lab.draw(case)
    before = {n: t.clone() for n, t in x.tensors.items()}
    with torch.no_grad():
        lab.call(x)
    for name, t in x.tensors.items():
        if not same_bits(t, before[name]):
            return Measure(False, text=f"the call writes into its argument {name}")
    if lab.takes("initial_state") and lab.has_state and lab.target.step is not None and case.state:
        state = x["initial_state"].clone()
        lab.step(x, 0, state)
        if not same_bits(state, before["initial_state"]):
            return Measure(False, text="the decode step writes into the state it is given")
    return PASS


MUTATION = Probe(
    "mutation",
    "arguments are left as they were",
    lambda lab: [Case(), Case(lengths=(33, 33))],
    _mutation,
    after=("contract",),
)


# Stale memory -------------------------------------------------------------------------------------------------------


def _guarded(t: Tensor) -> Tensor:
    """The same values in the middle of memory full of NaN."""
    room = 4096
    buffer = torch.full((t.numel() + 2 * room,), math.nan, dtype=t.dtype, device=t.device)
    inner = buffer[room : room + t.numel()].view(t.shape)
    inner.copy_(t)
    return inner


def _stale(lab: Lab, case: Case) -> Measure:
    x = lab.draw(case)
    if case.what == "kept":
        with torch.no_grad():
            out, state = lab.call(lab.draw(case))
            first = Result(out.clone(), None if state is None else state.clone())
            lab.call(lab.draw(Case(**{**vars(case), "seed": case.seed + 1})))
        for what, now, then in (("output", out, first.out), ("final state", state, first.state)):
            if not same_bits(now, then):
                return Measure(False, text=f"the next call overwrites the {what} of the one before")
        return _difference(first, lab.run(x), "after another call")
    loss = Loss() if lab.has_gradients else None
    clean = lab.run(x, loss)
    if case.what == "around":
        with torch.no_grad():
            out, state = lab.call(x.with_(**{n: _guarded(t) for n, t in x.tensors.items()}))
        found = Result(out.clone(), None if state is None else state.clone())
        return _difference(Result(clean.out, clean.state), found, "with NaN before and after every argument in memory")
    for value in (math.nan,) if lab.quick else (math.nan, POISON):
        with poisoned(value):
            found = lab.run(x, loss)
        measure = _difference(clean, found, f"when memory is handed out full of {value:g}")
        if not measure.ok:
            return measure
    return PASS


def _difference(a: Result, b: Result, when: str) -> Measure:
    for what, p, q in _pairs(a, b):
        if not same_bits(p, q):
            return Measure(False, text=f"{what} changes {when}")
    return PASS


def _stale_cases(lab: Lab) -> Sequence[Case]:
    cases = [Case(lengths=(37,), what=w) for w in ("kept", "fill", "around")]
    if no_packing(lab) is None:
        cases.append(Case(lengths=(5, 0, 18), packed=True, what="fill"))
    if not lab.quick:
        cases += [Case(lengths=(130, 130), groups=2, what=w) for w in ("kept", "fill", "around")]
        cases.append(Case(lengths=(100,), key_dim=60, value_dim=36, what="around"))
    return cases


STALE = Probe(
    "stale-memory",
    "nothing is read from memory left by others, before, after or around the arguments",
    _stale_cases,
    _stale,
    after=("contract", "determinism"),
)


# Views --------------------------------------------------------------------------------------------------------------


def _viewed(name: str, t: Tensor, how: str) -> Tensor:
    """The same values at other strides."""
    if how == "wider":  # a slice of wider rows
        room = t.new_full((*t.shape[:-1], t.shape[-1] + 5), 7.0)
        room[..., 2:-3] = t
        return room[..., 2:-3]
    if how == "heads-first":  # [B, H, T, X] in memory
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "every-other":  # no two values side by side
        room = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), 7.0)
        room[..., ::2] = t
        return room[..., ::2]
    return t[:, :1].expand_as(t) if name in ROWS else t  # "expanded": one token for all


def _views(lab: Lab, case: Case) -> Measure:
    x = lab.draw(case)
    if case.what == "expanded":
        x = x.with_(**{n: x[n][:, :1].expand_as(x[n]).contiguous() for n in ROWS})
    plain = lab.run(x)
    views = {n: _viewed(n, t, case.what) for n, t in x.tensors.items() if n not in ("A_log", "dt_bias")}
    try:
        with torch.no_grad():
            out, state = lab.call(x.with_(**views))
    except Declined as reason:
        return Measure(True, text=f"refuses {case.what} views: {reason}")
    found = Result(out.clone(), None if state is None else state.clone())
    measure = lab.compare(x, found, plain, lab.operands(case))
    return Measure(
        measure.ok, measure.value, measure.limit, f"{case.what} views: {measure.text} beside contiguous ones"
    )


VIEWS = Probe(
    "views",
    "non-contiguous and expanded arguments give the values of contiguous ones",
    lambda lab: [
        Case(lengths=(34, 34), gates="slow", what=w) for w in ("wider", "heads-first", "every-other", "expanded")
    ],
    _views,
    after=("contract", "determinism"),
)


# 32-bit offsets -----------------------------------------------------------------------------------------------------


def _far(t: Tensor) -> Tensor:
    """The same values with rows so far apart in memory that the last one's offset needs more than 31 bits.

    On a CPU the pages in between are never touched, so they take no memory.
    """
    batch, tokens = t.shape[:2]
    inner = t[0, 0].numel()
    stride = 2**31 // (tokens - 1) + inner
    storage = torch.empty((tokens - 1) * stride + batch * tokens * inner, dtype=t.dtype, device=t.device)
    strides = (inner, stride, *t[0, 0].contiguous().stride())
    out = storage.as_strided(t.shape, strides)
    out.copy_(t)
    return out


def _offsets(lab: Lab, case: Case) -> Measure:
    if case.what == "real":
        return _large(lab, case)
    x = lab.draw(case)
    plain = lab.run(x)
    try:
        far = x.with_(**{case.what: _far(x[case.what])})
    except RuntimeError:
        return Measure(True, text="not enough memory to lay rows 2^31 elements apart")
    try:
        with torch.no_grad():
            out, state = lab.call(far)
    except Declined as reason:
        if "memory" in str(reason).lower():
            return Measure(True, text="not enough memory to lay rows 2^31 elements apart")
        return Measure(True, text=f"refuses rows far apart: {reason}")
    found = Result(out.clone(), None if state is None else state.clone())
    measure = lab.compare(x, found, plain, lab.operands(case))
    text = f"{case.what} with rows more than 2^31 elements apart in memory: {measure.text}"
    return Measure(measure.ok, measure.value, measure.limit, text)


def _large(lab: Lab, case: Case) -> Measure:
    """Tensors of more than 2^31 elements, on a card with the memory for them: rows beside the same row alone."""
    one = lab.draw(case)
    batch = 2**31 // one["q"].numel() + 2
    repeated = {n: one[n].repeat(batch, *([1] * (one[n].ndim - 1))) for n in ROWS}
    big = Inputs(one.form, {**one.tensors, **repeated}, None, one.lower_bound)
    big.tensors.pop("initial_state", None)
    one.tensors.pop("initial_state", None)
    with torch.no_grad():
        alone, _ = lab.call(one)
        out, _ = lab.call(big)
    value = max(error(out[n : n + 1], alone, "output") for n in (0, batch // 2, batch - 1))
    limit = 1e-3
    return Measure(
        value <= limit, value, limit, f"a batch of {batch} equal rows, 2^31 elements: rows differ by {value:.1e}"
    )


def _offset_cases(lab: Lab) -> Sequence[Case]:
    cases = [Case(lengths=(3,), what=n, state=False) for n in (("v", "gate") if lab.quick else ROWS)]
    if lab.device != "cpu" and not lab.quick and torch.cuda.mem_get_info()[0] > 90 * 2**30:
        cases.append(Case(lengths=(64,), heads=64, key_dim=128, value_dim=128, what="real", state=False))
    return cases


OFFSETS = Probe(
    "offsets",
    "addresses beyond 2^31 elements are reached",
    _offset_cases,
    _offsets,
    after=("contract", "determinism", "views"),
)


# Convolution window -------------------------------------------------------------------------------------------------


def _conv(lab: Lab, case: Case) -> Measure:
    """The short convolution in pieces beside the whole, and the whole beside its definition."""
    conv = lab.target.conv
    assert conv is not None
    noise, width = torch.Generator().manual_seed(case.seed), 4
    x = torch.randn(1, sum(case.lengths), 6, generator=noise).to(lab.device)
    weight = torch.randn(6, width, generator=noise).to(lab.device)
    padded = F.pad(x.double().cpu().mT, (width - 1, 0))
    want = F.silu(F.conv1d(padded, weight.double().cpu().unsqueeze(1), groups=6)).mT
    parts, window, start = [], None, 0
    with torch.no_grad():
        for length in case.lengths:
            y, window = conv(x[:, start : start + length], weight, window)
            parts.append(y)
            start += length
    value = error(torch.cat(parts, 1), want, "output")
    return Measure(value <= 1e-5, value, 1e-5, f"pieces of {case.lengths} tokens are off by {value:.1e}")


CONV = Probe(
    "conv-window",
    "the short convolution carries its window from piece to piece",
    lambda lab: [Case(lengths=n) for n in ((9,), (5, 4), (1, 2, 1, 3, 1), (3, 1, 40))],
    _conv,
    lambda lab: None if lab.target.conv is not None else "offers no short convolution",
)
