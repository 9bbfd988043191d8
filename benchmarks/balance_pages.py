"""Put a finished comparison of balancers into docs/balance.md.

    python benchmarks/balance_pages.py [runs/balance-compare]

With a folder: a record in benchmarks/results first. Then the part between ``<!-- compare -->`` and what closes it, and
docs/images/balance-compare.png, from the newest record.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from _common import RESULTS, slug
from curriculum_pages import DOCS, newest, put

from trine.views.balance_compare import HEADINGS, compare_figure, compare_note, compare_rows
from trine.views.figures import save
from trine.views.tables import markdown

BENCHMARK = "balance_compare"


def record(folder: Path) -> dict[str, Any]:
    """The whole comparison; refused while runs of it are missing."""
    found = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    if found["missing"]:
        raise SystemExit(f"{folder}: not done yet: {', '.join(found['missing'])}")
    results = [{key: value for key, value in one.items() if key != "max_vios"} for one in found["results"]]
    return {
        "benchmark": BENCHMARK,
        "case": f"{found['config']['preset']}, {found['config']['tokens']} tokens a run",
        "impl": "trine",
        **{key: found[key] for key in ("config", "balance", "arms", "versions")},
        "results": results,
        "hardware": f"{found['hardware']['cpu']}, {found['hardware']['cores']} cores",
        "date": found["started"][:10],
    }


def page(row: dict[str, Any]) -> str:
    """The part of docs/balance.md."""
    save(compare_figure(row), DOCS / "images" / "balance-compare.png")
    return (
        f"Measured on {row['hardware']}, one thread a run, {row['date']}. {compare_note(row)}\n\n"
        f"{markdown(HEADINGS, compare_rows(row))}\n\n"
        "![MaxVio over steps, and held-out text](images/balance-compare.png)"
    )


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    if options.folder is not None:
        row = record(options.folder)
        path = RESULTS / f"{BENCHMARK}-{slug(row['hardware'])}-{row['date']}.json"
        path.write_text(json.dumps([row], indent=1) + "\n", encoding="utf-8")
        print(path)
    newest_row = newest(BENCHMARK)
    if newest_row is not None:
        put(DOCS / "balance.md", "compare", page(newest_row))


if __name__ == "__main__":
    main()
