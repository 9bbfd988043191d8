"""Write the tables of the KDA README from the newest records: ``python benchmarks/kda_readme.py``.

Each table stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; what was between is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _common import RESULTS

README = Path(__file__).resolve().parents[1] / "src" / "trine" / "ops" / "kda" / "README.md"


def newest(benchmark: str) -> list[dict[str, Any]]:
    """Records of the newest file of a benchmark; empty if there is none."""
    files = sorted(RESULTS.glob(f"{benchmark}-*.json"), key=lambda path: path.stem[-10:])
    return json.loads(files[-1].read_text()) if files else []


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(records: list[dict[str, Any]]) -> str:
    """Where the numbers come from."""
    first = records[0]
    threads = f", {first['threads']} threads" if first.get("threads") else ""
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version)
    busy = "" if all(r.get("quiet") is not False for r in records) else " **The machine was busy: repeat before use.**"
    dates = " and ".join(sorted({r["date"] for r in records}))
    return f"{first['hardware']}{threads}, {dates}, {versions}.{busy}"


def speeds() -> str:
    """Time and memory of each implementation, case by case."""
    records = newest("kda_cpu")
    if not records:
        return "No records yet."
    ours = {r["case"]: r["ms"] for r in records if r["impl"] == "trine"}
    rows = [
        [
            r["case"],
            r["impl"],
            f"{r['ms']:.2f} ({r['median_ms']:.2f})",
            f"{r['ms'] / ours[r['case']]:.1f}",
            "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**20:.0f}",
        ]
        for r in records
    ]
    head = ["case", "implementation", "ms, best (median)", "times trine", "peak MiB"]
    return f"{markdown(head, rows)}\n\n{source(records)}"


def errors() -> str:
    """Worst relative error of outputs, states and gradients, and that of the gate's gradient, by kind of gate."""
    records = newest("kda_errors")
    if not records:
        return "No records yet."
    found = {(r["case"], r["gates"], r["impl"]): r["error"] for r in records}
    plain = [key for key in found if not key[0].endswith("gate gradient")]
    rows = []
    for case, gates, impl in plain:
        gate = found[f"{case} gate gradient", gates, impl]
        rows.append([case.split(" ", 1)[1], gates, impl, f"{found[case, gates, impl]:.1e}", f"{gate:.1e}"])
    head = ["case", "gates", "implementation", "worst but the gate's", "gate's gradient"]
    return f"{markdown(head, rows)}\n\n{source(records)}"


def card() -> str:
    """Time on a CUDA card beside the floor of bytes that must move, and the forward's errors."""
    records = newest("kda")
    if not records:
        return "No records yet."
    timed = [
        [
            r["case"].replace(" K128 V128 bf16", ""),
            r["gates"] or "",
            r["impl"],
            f"{r['ms']:.4f}" if r["ms"] < 0.1 else f"{r['ms']:.3f}",
            f"{r['floor_fraction']:.0%}" if r["floor_fraction"] else "",
            f"{r['peak_bytes'] / 2**30:.2f}" if r["peak_bytes"] else "",
        ]
        for r in records
        if r["ms"] is not None
    ]
    wrong = [
        [r["case"].removeprefix("fwd error "), r["gates"], r["impl"], f"{r['error']:.1e}", (r["note"] or "")[6:]]
        for r in records
        if r["case"].startswith("fwd error")
    ]
    times = markdown(["case", "gates", "implementation", "ms", "of the floor", "peak GiB"], timed)
    errors = markdown(["case", "gates", "implementation", "output", "final state"], wrong)
    return f"{times}\n\nErrors of the forward, relative (Frobenius), against float64:\n\n{errors}\n\n{source(records)}"


def card_errors() -> str:
    """Errors on a card by regime: the kernels', a peer's and the floor of bf16 operands."""
    records = newest("kda_card_errors")
    if not records:
        return "No records yet."
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for r in records:
        rows.setdefault((r["gates"], r["impl"]), {})[r["case"].split()[-1]] = r["error"]
    names = list(next(iter(rows.values())))

    def cell(gates: str, impl: str, name: str) -> str:
        differs = name in ("gate", "A_log", "dt_bias")  # what the text under the table says of them
        if differs and (impl == "bf16 operands" or gates == "saturated"):
            return ""
        return f"{rows[gates, impl][name]:.1e}"

    table = [[gates, impl, *(cell(gates, impl, name) for name in names)] for gates, impl in rows]
    return f"{markdown(['gates', 'implementation', *names], table)}\n\n{source(records)}"


def main() -> None:
    """Replace every table."""
    text = README.read_text()
    for name, table in (("speeds", speeds()), ("errors", errors()), ("card", card()), ("card-errors", card_errors())):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    README.write_text(text)
    print(README)


if __name__ == "__main__":
    main()
