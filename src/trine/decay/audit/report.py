"""An audit as a table for the terminal, as JSON, as Markdown and as JUnit XML."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.decay.audit.examine import FINDING, NOT_APPLICABLE, NOT_JUDGED, PASSED, Verdict
from trine.decay.audit.runner import Report

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMAT_VERSION = 1
STYLES = {PASSED: "green", FINDING: "bold red", NOT_APPLICABLE: "dim", NOT_JUDGED: "yellow"}


def title(report: Report) -> str:
    """Target, version, device."""
    version = f" {report.version}" if report.version else ""
    where = f" on {report.device}" + (f" ({report.machine})" if report.machine else "")
    return f"{report.name}{version}{where}"


def summary(report: Report) -> str:
    """Counts in words."""
    counts = {kind: sum(v.verdict == kind for v in report.verdicts) for kind in STYLES}
    words = [f"{counts[FINDING]} finding{'' if counts[FINDING] == 1 else 's'}", f"{counts[PASSED]} passed"]
    words += [f"{counts[kind]} {kind}" for kind in (NOT_JUDGED, NOT_APPLICABLE) if counts[kind]]
    return f"{', '.join(words)}; {report.seconds:.1f} s"


def seen(verdict: Verdict) -> str:
    """What a verdict rests on, in one line, with its figure."""
    if verdict.verdict == FINDING and verdict.limit and verdict.value is not None and verdict.value < float("inf"):
        return f"{verdict.text} (limit {verdict.limit:.0e})"
    if verdict.verdict != PASSED:
        return verdict.text
    # A probe that ran out of time says how far it came.
    inputs = verdict.facts.get("cut_short") or f"{verdict.cases} input{'' if verdict.cases == 1 else 's'}"
    if verdict.value is None or verdict.limit is None:
        return f"{inputs}: {verdict.text}" if verdict.text else inputs
    if not verdict.value:
        return f"{inputs}, no difference"
    return f"{inputs}, worst {verdict.value:.1e} (limit {verdict.limit:.0e})"


def as_renderable(report: Report) -> RenderableType:
    """The report for a terminal: one line a probe, then what to run for each finding."""
    from rich.console import Group
    from rich.syntax import Syntax
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title(report), title_justify="left", title_style="bold", box=None, padding=(0, 1), expand=False)
    table.add_column("probe", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what was seen", overflow="fold")
    for v in report.verdicts:
        style = STYLES[v.verdict]
        quiet = "dim" if v.verdict in (NOT_APPLICABLE, NOT_JUDGED) else ""
        table.add_row(Text(v.probe, quiet), Text(v.verdict, style), Text(seen(v), quiet))
    parts: list[RenderableType] = [table, Text(summary(report), "bold red" if report.findings else "bold green")]
    for v in report.findings:
        if v.script:
            parts += [
                Text(f"\n{v.probe}: the smallest input that shows it", "bold"),
                Syntax(v.script, "python", word_wrap=True, background_color="default"),
            ]
    return Group(*parts, Text(""))


def as_dict(reports: Sequence[Report]) -> dict[str, Any]:
    """The audit as plain values."""
    return {
        "format_version": FORMAT_VERSION,
        "tool": "trine audit kda",
        "findings": sum(len(r.findings) for r in reports),
        "targets": [
            {**{k: v for k, v in vars(r).items() if k != "verdicts"}, "verdicts": [v.as_dict() for v in r.verdicts]}
            for r in reports
        ],
    }


def as_markdown(reports: Sequence[Report]) -> str:
    """The audit as a page: a table a target, a program a finding."""
    lines = ["# Audit of Kimi Delta Attention", ""]
    for r in reports:
        versions = ", ".join(f"{name} {v}" for name, v in r.versions.items())
        lines += [f"## {title(r)}", "", f"{r.date}; {versions or 'not loaded'}; {summary(r)}.", ""]
        lines += ["| probe | verdict | what was seen |", "| --- | --- | --- |"]
        for v in r.verdicts:
            mark = f"**{v.verdict}**" if v.verdict == FINDING else v.verdict
            lines.append(f"| {v.probe} | {mark} | {seen(v).replace('|', chr(92) + '|')} |")
        lines.append("")
        for v in r.findings:
            if v.script:
                lines += [
                    f"`{v.probe}`, the smallest input that shows it:",
                    "",
                    "```python",
                    v.script.rstrip(),
                    "```",
                    "",
                ]
    return "\n".join(lines).rstrip() + "\n"


def as_junit(reports: Sequence[Report]) -> str:
    """The audit as JUnit XML: a suite a target, a case a probe; what is not applicable or not judged is skipped."""
    root = ET.Element("testsuites", name="trine audit kda")
    for r in reports:
        skipped = [v for v in r.verdicts if v.verdict in (NOT_APPLICABLE, NOT_JUDGED)]
        suite = ET.SubElement(
            root, "testsuite", name=title(r), tests=str(len(r.verdicts)), failures=str(len(r.findings)), errors="0",
            skipped=str(len(skipped)), time=f"{r.seconds:.3f}",
        )  # fmt: skip
        for v in r.verdicts:
            case = ET.SubElement(suite, "testcase", classname=r.name, name=v.probe, time=f"{v.seconds:.3f}")
            if v.verdict == FINDING:
                ET.SubElement(case, "failure", message=_printable(seen(v))).text = _printable(v.script or v.case)
            elif v.verdict != PASSED:
                ET.SubElement(case, "skipped", message=_printable(f"{v.verdict}: {v.text}"))
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _printable(text: str) -> str:
    """Without the control characters that XML has no place for."""
    return "".join(c for c in text if c in "\n\t" or ord(c) >= 32)


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def save(reports: Sequence[Report], json_file: str = "", markdown: str = "", junit: str = "") -> None:
    """Write those files that have a name.

    Raises:
        OSError: one cannot be written.
    """
    if json_file:
        write(Path(json_file), json.dumps(as_dict(reports), indent=1) + "\n")
    if markdown:
        write(Path(markdown), as_markdown(reports))
    if junit:
        write(Path(junit), as_junit(reports))
