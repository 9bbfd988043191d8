"""Put what was measured of the curriculum into docs: the study, and the run of the recall recipe.

    python benchmarks/curriculum_pages.py study runs/study-curriculum
    python benchmarks/curriculum_pages.py recall runs/recall [--minutes 2.4] [--busy]   (or a run of recall_long.toml)
    python benchmarks/curriculum_pages.py pages

The first two write a record into benchmarks/results and then the pages, the last only the pages, from the newest
records: the parts between ``<!-- study -->``, ``<!-- recall -->`` or ``<!-- recall-long -->`` and what closes them in
docs/curriculum.md and docs/evaluation.md, and docs/images/curriculum-study.png.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

from _common import RESULTS, slug

from trine.views import figures
from trine.views.report import duration
from trine.views.study import ARM_WORDS, study_headings, study_note, study_rows
from trine.views.tables import markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGE = DOCS / "images" / "curriculum-study.png"


def study_record(folder: Path) -> dict[str, Any]:
    """The whole study; refused while runs of it are missing."""
    found = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    if found["missing"]:
        raise SystemExit(f"{folder}: not done yet: {', '.join(found['missing'])}")
    machine = found["hardware"]
    cpu = f"{machine['cpu']}, {machine['cores']} cores"
    return {
        "benchmark": "curriculum_study",
        "case": f"{found['config']['preset']}, rows up to {found['config']['longest']}, {found['tokens']} tokens a run",
        "impl": "trine",
        **{key: found[key] for key in ("config", "tokens", "results", "arms", "versions")},
        "hardware": cpu if found["device"] == "cpu" else machine["gpus"][0]["name"],
        "date": found["started"][:10],
    }


def recall_record(run: Path, minutes: float | None, quiet: bool) -> dict[str, Any]:
    """What a finished recall run reached, and how fast."""
    about = json.loads((run / "run.json").read_text(encoding="utf-8"))
    found = json.loads((run / "eval.json").read_text(encoding="utf-8"))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    longest = about["plan"][-1]["stage"]["length"]
    return {
        "benchmark": "recall_run" if longest == 1_024 else "recall_long",
        "case": "recall: steps x row length "
        + ", ".join(f"{part['steps']} x {part['stage']['length']}" for part in about["plan"]),
        "impl": "trine",
        "command_minutes": minutes,
        "training_seconds": round(sum(step["seconds"] for step in steps), 1),
        "recall": found["recall"],
        "short_guard": [one for one in events if one["kind"] == "short_guard"],
        "seed": about["seed"],
        "quiet": quiet,
        "threads": about["threads"],
        "versions": about["versions"],
        "hardware": about["hardware"]["gpus"][0]["name"] if about["hardware"].get("gpus") else about["hardware"]["cpu"],
        "date": about["started"][:10],
    }


def study_page(row: dict[str, Any]) -> str:
    """The part of docs/curriculum.md."""
    figures.save(figures.study(row["arms"], ARM_WORDS), IMAGE)
    return (
        f"Measured on {row['hardware']}, {row['date']}. {study_note(row)}\n\n"
        f"{markdown(study_headings(row), study_rows(row))}\n\n"
        "![Bits per byte by context, and speed](images/curriculum-study.png)"
    )


def recall_page(row: dict[str, Any]) -> str:
    """The part of docs/evaluation.md: accuracy and gap by length, and at exact distances."""
    cells = row["recall"]
    lengths = sorted({cell["length"] for cell in cells})
    table = []
    for length in lengths:
        every = {cell["pairs"]: cell for cell in cells if cell["length"] == length and cell["distance"] is None}
        far = [cell for cell in cells if cell["length"] == length and cell["distance"] is not None]
        table.append(
            (
                f"{length:,}",
                "; ".join(
                    f"{pairs}: {100 * cell['accuracy']:.0f} % ({100 / pairs:.0f})" for pairs, cell in every.items()
                ),
                "; ".join(f"{cell['distance']:,} back: {cell['gap']:.2f}" for cell in far) or "-",
            )
        )
    took = "" if row["command_minutes"] is None else f", {row['command_minutes']:.1f} minutes for the whole command"
    busy = "" if row["quiet"] else " on a busy machine"
    headings = ("symbols", "pairs: right (chance)", "evidence gap at exact distances, nats")
    return (
        f"Seed {row['seed']}, {row['case'].partition(': ')[2]}; {duration(row['training_seconds'])} of training{took} "
        f"({row['hardware']}, {row['threads']} threads{busy}, {row['date']}):\n\n{markdown(headings, table)}"
    )


def put(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of ``name``."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    old = page.read_text(encoding="utf-8")
    if not marks.search(old):
        raise SystemExit(f"{page}: has no marks <!-- {name} --> and <!-- /{name} -->")
    page.write_text(marks.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", old), encoding="utf-8")


def newest(benchmark: str) -> dict[str, Any] | None:
    """The record written last."""
    paths = sorted(RESULTS.glob(f"{benchmark}-*.json"), key=lambda path: path.stem[-10:])
    return dict(json.loads(paths[-1].read_text(encoding="utf-8"))[0]) if paths else None


def pages() -> None:
    """Write the parts for which there is a record."""
    parts = (
        ("curriculum_study", "curriculum.md", "study", study_page),
        ("recall_run", "evaluation.md", "recall", recall_page),
        ("recall_long", "evaluation.md", "recall-long", recall_page),
    )
    for benchmark, page, name, text in parts:
        row = newest(benchmark)
        if row is not None:
            put(DOCS / page, name, text(row))


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("study", "recall", "pages"))
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, help="wall time of the whole command (recall)")
    parser.add_argument("--busy", action="store_true", help="something else ran on the machine (recall)")
    options = parser.parse_args()
    if options.what != "pages":
        if options.folder is None:
            parser.error("need the folder of the study or run")
        study = options.what == "study"
        row = (
            study_record(options.folder) if study else recall_record(options.folder, options.minutes, not options.busy)
        )
        path = RESULTS / f"{row['benchmark']}-{slug(row['hardware'])}-{row.get('date', time.strftime('%Y-%m-%d'))}.json"
        path.write_text(json.dumps([row], indent=1) + "\n", encoding="utf-8")
        print(path)
    pages()


if __name__ == "__main__":
    main()
