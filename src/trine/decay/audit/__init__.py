"""Audit of any implementation of Kimi Delta Attention: `trine audit kda`.

``Target`` is the adaptor, ``examine`` puts the probes to a target in this process, ``audit`` in processes of their own.
Probes, limits and how to read a report: docs/audit.md.
"""

from __future__ import annotations

from trine.decay.audit.examine import Verdict, examine, replay, select
from trine.decay.audit.inputs import Case
from trine.decay.audit.lab import Lab
from trine.decay.audit.probes import PROBES, Probe
from trine.decay.audit.runner import Report, audit
from trine.decay.audit.target import Target, TargetError, load

__all__ = [
    "PROBES",
    "Case",
    "Lab",
    "Probe",
    "Report",
    "Target",
    "TargetError",
    "Verdict",
    "audit",
    "examine",
    "load",
    "replay",
    "select",
]
