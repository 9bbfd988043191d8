"""What `import trine` and `trine --help` cost. Budgets: 0.2 s on top of `import torch`, and 0.5 s for the help.

    python benchmarks/import_time.py [--allow-busy] [--dry-run]

Every entry runs in a process of its own, in turn, and the best of the repeats counts: start-up is made of disk reads
and of one thread's work, so whatever disturbs it only adds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from _common import Record, require_quiet, table, time_interleaved, write_records

ENTRIES = {
    "python": [sys.executable, "-c", "pass"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import torch, trine": [sys.executable, "-c", "import torch, trine"],
    "import trine.ops.kda": [sys.executable, "-c", "import trine.ops.kda"],
    "trine --help": [sys.executable, "-m", "trine.cli", "--help"],
    "trine train --help": [sys.executable, "-m", "trine.cli", "train", "--help"],
}


def main() -> None:
    """Time all entries and print, or keep, the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allow-busy", action="store_true", help="keep numbers of a busy machine, marked as such")
    parser.add_argument("--dry-run", action="store_true", help="print only")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    quiet = require_quiet(1, options.allow_busy)

    def call(command: list[str]) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    timings = time_interleaved({name: lambda c=c: call(c) for name, c in ENTRIES.items()}, options.repeats)
    records = [
        Record("import_time", case, "trine" if "trine" in case else case.split()[-1], timing.best_ms,
               median_ms=timing.median_ms, quiet=quiet, threads=1)
        for case, timing in timings.items()
    ]  # fmt: skip
    print(table(records))
    torch_alone = timings["import torch"].best_ms
    for case in ("import torch, trine", "import trine.ops.kda"):
        print(f"{case}: {timings[case].best_ms - torch_alone:+.0f} ms on top of torch (budget 200)")
    print(f"trine --help: {timings['trine --help'].best_ms:.0f} ms (budget 500)")
    if not options.dry_run:
        print(write_records("import_time", records, packages=("tyro",)))


if __name__ == "__main__":
    main()
