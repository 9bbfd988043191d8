"""What a probe is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trine.decay.audit.inputs import Case
from trine.decay.audit.lab import Lab, Measure


@dataclass(frozen=True)
class Probe:
    """One question put to a target.

    Attributes:
        name: short and stable, for selection and reports.
        question: what it asks, in one line.
        cases: the inputs it tries on this target, small ones first.
        check: the verdict on one of them; an ordinary error of the target counts as a finding.
        missing: why the question cannot be put to this target, or None.
        after: probes whose finding would show here again; then this one is not judged.
        shrinks: a failing input may be made smaller.
        strict: a fault that has been told apart stands in its way all the same.
    """

    name: str
    question: str
    cases: Callable[[Lab], Sequence[Case]]
    check: Callable[[Lab, Case], Measure]
    missing: Callable[[Lab], str | None] = lambda lab: None
    after: tuple[str, ...] = ()
    shrinks: bool = True
    strict: bool = False


def no_gradients(lab: Lab) -> str | None:
    """Reason of a target without gradients."""
    return None if lab.has_gradients else "has no gradients"


def no_packing(lab: Lab) -> str | None:
    """Reason of a target that takes no packed rows."""
    return None if lab.takes("cu_seqlens") else "takes no packed rows (cu_seqlens)"


def no_carrying(lab: Lab) -> str | None:
    """Reason of a target through which no state can be carried."""
    if not lab.takes("initial_state"):
        return "takes no initial state"
    return None if lab.has_state else "returns no final state"
