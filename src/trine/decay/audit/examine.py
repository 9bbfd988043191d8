"""Putting the probes to one target, in this process: verdicts, and the smallest input that shows each finding."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trine.decay.audit.inputs import Case
from trine.decay.audit.lab import STICKY, Declined, Lab, Lost, Measure, Misshapen
from trine.decay.audit.probes import PROBES, Probe
from trine.decay.audit.target import one_line

PASSED, FINDING, NOT_APPLICABLE, NOT_JUDGED = "pass", "finding", "not applicable", "not judged"


@dataclass
class Verdict:
    """What one probe says of one target.

    Attributes:
        probe, question: which.
        verdict: "pass", "finding", "not applicable" or "not judged".
        text: what was seen, or why the question was not put.
        value, limit: the figure nearest its limit, or beyond it.
        case: the smallest failing input, as text; script: a program that shows it.
        cases: inputs tried; seconds: time taken.
    """

    probe: str
    question: str
    verdict: str
    text: str = ""
    value: float | None = None
    limit: float | None = None
    case: str = ""
    script: str = ""
    cases: int = 0
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; infinities as text."""
        out = asdict(self)
        for name in ("value", "limit"):
            if out[name] is not None and not abs(out[name]) < float("inf"):
                out[name] = str(out[name])
        return out


def select(names: Sequence[str] = ()) -> tuple[Probe, ...]:
    """Probes by name, all for none.

    Raises:
        ValueError: an unknown name.
    """
    known = {p.name: p for p in PROBES}
    for name in names:
        if name not in known:
            raise ValueError(f"probes: found {name!r}, need names among {', '.join(known)}")
    return tuple(p for p in PROBES if not names or p.name in names)


def attempt(lab: Lab, probe: Probe, case: Case) -> Measure:
    """One check; an error that the target raises is a finding."""
    lab.beat(case)
    try:
        measure = probe.check(lab, case)
        lab.settle()
    except (Declined, Misshapen) as seen:
        return Measure(False, text=f"raised {seen}" if isinstance(seen, Declined) else str(seen))
    except Exception as seen:
        if isinstance(seen, Lost) or STICKY.search(str(seen)):
            lab.lost = True
            text = str(seen) if isinstance(seen, Lost) else f"{type(seen).__name__}: {one_line(seen)}"
            return Measure(False, text=f"took the device down: {text}")
        # Results of a kind that nobody foresaw break the comparison, not the call.
        return Measure(False, text=f"raised {type(seen).__name__} where its result was compared: {one_line(seen)}")
    return measure


def examine(
    lab: Lab,
    probes: Sequence[Probe] = PROBES,
    done: Sequence[Verdict] = (),
    shrink_seconds: float = 4.0,
    spec: str = "",
    begin: Callable[[Probe], None] = lambda probe: None,
) -> Iterator[Verdict]:
    """Verdicts of the probes in order.

    Args:
        lab: the target; what is learnt of it stays there.
        probes: which.
        done: verdicts already known, for probes that depend on them.
        shrink_seconds: time for making a failing input smaller.
        spec: how a script names the target.
        begin: called with each probe before its first case.

    The device may be lost on the way (``lab.lost``): then the verdict that says so is the last one, since nothing that
    this process computes afterwards tells anything.
    """
    found = {v.probe for v in done if v.verdict == FINDING}
    for probe in probes:
        start = time.perf_counter()
        begin(probe)
        verdict = _verdict(lab, probe, found, shrink_seconds, spec or lab.target.name)
        verdict.seconds = round(time.perf_counter() - start, 3)
        if verdict.verdict == FINDING:
            found.add(probe.name)
        yield verdict
        if lab.lost:
            return


def _verdict(lab: Lab, probe: Probe, found: set[str], shrink_seconds: float, spec: str) -> Verdict:
    reason = probe.missing(lab)
    if reason is not None:
        return Verdict(probe.name, probe.question, NOT_APPLICABLE, f"the target {reason}")
    for name in probe.after:
        if name in found and ((probe.strict and name != "state-layout") or not _told_apart(lab, name)):
            return Verdict(probe.name, probe.question, NOT_JUDGED, f"its inputs already differ: see {name}")
    worst, tried, start, short = Measure(True), 0, time.perf_counter(), ""
    cases = list(dict.fromkeys(lab.fit(c) for c in probe.cases(lab)))
    for case in cases:
        if tried and lab.patience and time.perf_counter() - start > lab.patience:
            short = f"{tried} of {len(cases)} inputs in {lab.patience:.0f} s"
            break
        tried += 1
        measure = attempt(lab, probe, case)
        if not measure.ok:
            case, measure = (case, measure) if lab.lost else shrink(lab, probe, case, measure, shrink_seconds)
            return Verdict(
                probe.name, probe.question, FINDING, measure.text, measure.value, measure.limit, str(case),
                script(spec, probe.name, case, measure, lab.device), tried, facts=dict(measure.facts),
            )  # fmt: skip
        if measure.ratio >= worst.ratio:
            worst = measure if measure.text or not worst.text else worst
    facts = dict(worst.facts) | ({"cut_short": short} if short else {})
    return Verdict(probe.name, probe.question, PASSED, worst.text, worst.value, worst.limit, cases=tried, facts=facts)


def _told_apart(lab: Lab, name: str) -> bool:
    """A finding that the lab has taken into account, so that later probes see past it."""
    # A transposed state is turned around, and one that is merely not refused stands in nobody's way.
    return name == "state-layout" or (name == "definition" and (lab.fault.early or lab.fault.heads))


# The smallest failing input -----------------------------------------------------------------------------------------


def shrink(lab: Lab, probe: Probe, case: Case, measure: Measure, seconds: float) -> tuple[Case, Measure]:
    """Smaller cases that still fail in the same way, greedily until the time is up."""
    if not probe.shrinks:
        return case, measure
    end, quiet = time.perf_counter() + seconds, replace(lab, fault=lab.fault)
    quiet.has_gradients = lab.has_gradients
    again = True
    while again:
        again = False
        for smaller in _smaller(case):
            if time.perf_counter() > end:
                return case, measure
            smaller = lab.fit(smaller)
            if smaller == case:
                continue
            quiet.shared = {}
            tried = attempt(quiet, probe, smaller)
            if quiet.lost:
                lab.lost = True
                return case, measure
            if not tried.ok and tried.text.startswith("raised") == measure.text.startswith("raised"):
                case, measure, again = smaller, tried, True
                break
    return case, measure


def _smaller(case: Case) -> Iterator[Case]:
    if len(case.lengths) > 1:
        for n in range(len(case.lengths)):
            at = case.at - (1 if case.packed and n < case.at else 0)
            yield replace(case, lengths=case.lengths[:n] + case.lengths[n + 1 :], at=at)
    for name in ("heads", "groups"):
        if getattr(case, name) > 1:
            yield replace(case, **{name: 1})  # type: ignore[arg-type]
    if case.state:
        yield replace(case, state=False)
    for n in (case.tokens // 2, case.tokens - case.tokens // 4, case.tokens - 1):
        if not case.packed and 0 < n < case.tokens:
            yield replace(case, lengths=(n,) * len(case.lengths), at=min(case.at, max(n - 1, 0)))
    if case.packed:
        for i, length in enumerate(case.lengths):
            for n in (length // 2, length - 1):
                if 0 < n < length:
                    yield replace(case, lengths=(*case.lengths[:i], n, *case.lengths[i + 1 :]))
    if case.more > 1:
        yield replace(case, more=case.more // 2)
        yield replace(case, more=case.more - 1)
    for name in ("key_dim", "value_dim"):
        if getattr(case, name) > 2:
            yield replace(case, **{name: getattr(case, name) // 2})  # type: ignore[arg-type]


SCRIPT = '''\
"""{probe}: {text}"""

from trine.decay.audit import Case, replay

replay(
    {spec!r},
    {probe!r},
    {case},
    device={device!r},
)
'''


def script(spec: str, probe: str, case: Case, measure: Measure, device: str) -> str:
    """A program that shows a finding."""
    text = measure.text.replace('"""', "'''").replace("\\", "/")
    return SCRIPT.format(spec=spec, probe=probe, case=case, text=text, device=device)


def replay(spec: str, probe: str, case: Case, device: str = "cpu") -> None:
    """Put one probe to one target on one input again and print what is seen; what a finding's script calls.

    Args:
        spec: the target, as on the command line.
        probe: its name.
        case: the input.
        device: where.

    Raises:
        TargetError: the target cannot be loaded.
        SystemExit: with code 1 when the finding shows.
    """
    from trine.decay.audit.target import load

    lab = Lab(load(spec), device)
    (chosen,) = select([probe])
    measure = attempt(lab, chosen, case)
    figure = "" if measure.value is None else f" ({measure.value:.3e}, limit {measure.limit:.0e})"
    sys.stdout.write(f"{probe}: {FINDING if not measure.ok else PASSED}: {measure.text}{figure}\n{case}\n")
    raise SystemExit(0 if measure.ok else 1)
