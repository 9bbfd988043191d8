"""What `trine audit kda` does once its options are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trine._options import Audit

CLEAN, FOUND = 0, 1


def run(options: Audit) -> int:
    """Audit, print and write; returns the exit code: 1 when anything was found.

    Raises:
        ValueError: an unknown probe, no card where one is asked for, or a file whose folder does not exist.
        OSError: a report cannot be written.
    """
    from rich.console import Console

    from trine.decay.audit.adaptors import expand, own
    from trine.decay.audit.examine import FINDING, Verdict
    from trine.decay.audit.report import as_renderable, save
    from trine.decay.audit.runner import audit

    console = Console()
    device = options.device
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device: found {device!r}, need cpu, cuda or cuda:NUMBER")
    kind = device.partition(":")[0]
    if options.list:
        _list(console, kind)
        return CLEAN
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"device: found no card for {device!r}, need cpu here")
    # A long audit should not end in a file that cannot be written.
    for option in ("json", "markdown", "junit"):
        name = getattr(options, option)
        if name and not Path(name).resolve().parent.is_dir():
            raise ValueError(f"{option}: found no folder {Path(name).parent}, need an existing one")
        if name and Path(name).is_dir():
            raise ValueError(f"{option}: found the folder {name}, need the name of a file")
    asked = options.target or tuple(own(kind))
    targets = list(dict.fromkeys(t for name in asked for t in expand(name, kind)))
    progress = Console(stderr=True, soft_wrap=True)

    def tell(target: str, verdict: Verdict) -> None:
        # A terminal shows a spinner and what was found; a log shows how far it is, line by line.
        found = verdict.verdict == FINDING
        if found or not progress.is_terminal:
            line = f"{target}: {verdict.probe}: {verdict.verdict} ({verdict.seconds:.1f} s)"
            progress.print(line, style="red" if found else "", markup=False, highlight=False)
            progress.file.flush()

    with progress.status(f"auditing {', '.join(targets)}"):
        reports = audit(
            targets, device=device, quick=options.quick, probes=options.probes, timeout=options.timeout or None,
            budget=options.budget or None, jobs=options.jobs, on_verdict=tell,
        )  # fmt: skip
    for report in reports:
        console.print(as_renderable(report))
    save(reports, options.json, options.markdown, options.junit)
    return FOUND if any(r.findings for r in reports) else CLEAN


def _list(console: object, kind: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from trine.decay.audit.adaptors import ADAPTORS, names
    from trine.decay.audit.probes import PROBES

    assert isinstance(console, Console)
    here = names(kind)
    targets = Table("target", f"runs here on {kind}", box=None, padding=(0, 1))
    for name in ADAPTORS:
        targets.add_row(name, "yes" if name in here else "no")
    probes = Table("probe", "question", box=None, padding=(0, 1))
    for probe in PROBES:
        probes.add_row(probe.name, probe.question)
    console.print(targets)
    console.print(probes)
