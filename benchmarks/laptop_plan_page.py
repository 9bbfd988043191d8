"""Write docs/laptop-plan.md from the records of the runs that chose the laptop plan.

python benchmarks/laptop_plan_page.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = """# How the laptop plan was chosen

`trine train --preset laptop` has about a quarter of an hour. These short runs decided what it does with it. Each row is
one run with one seed: differences below 0.01 bits per byte say nothing. Held-out text is that of `trine eval`, without
near-copies. MaxVio is that of the worst layer, from step 20 on. Rates are peaks of a cosine that ends at 0.

{table}

What they say:

- **Steps are scarcer than tokens.** For the same number of tokens, 4,096 a step beat 8,192, and 8,192 beat 16,384. Only
  Muon's rate matters as much. Several settings differ between some of these rows, so read the order, not the gaps.
- **Rows of 128 tokens are as good as 256; 512 and 1,024 were worse than 256** in plans this short.
- **The balance bar (MaxVio at most 0.3 in 95 % of the steps from step 20 on) is missed, knowingly.** With 4,096 tokens
  a step, 56 experts and 2 a token, an expert expects 146 tokens. Independent tokens would give about 0.23; those of one
  text are not independent. Larger steps come closer, none of these runs reached it, and they cost bits per byte.
  Smoothing the bias (`ema`) made it worse in all three pairs that differ in nothing else, so at high rates the router
  moves more than its quantiles are uncertain; yet in runs of the plan MaxVio stays near 0.8 when the rates have fallen
  to nothing, so there it is the texts of a step that differ from those of the step before. The lowest median of all,
  0.32, had 32 experts with 4 a token, but longer rows as well. Of four runs of the plan (660, 580, 512 and 512
  steps) the first two had one expert without a token in one step, the others none.
"""


def main() -> None:
    """Read the newest records, sort by result, write the page."""
    files = sorted((ROOT / "benchmarks" / "results").glob("laptop_plan-*.json"))
    records = sorted(json.loads(files[-1].read_text()), key=lambda r: r["bits_per_byte"])
    lines = ["| bits per byte | MaxVio median, 95 % | case | differs in | machine |", "|---:|---|---|---|---|"]
    usual = {"muon": 0.01, "embeddings": 0.02, "other": 0.002, "momentum": 0.95, "ema": 0.0}
    for r in records:
        vio = ", ".join("–" if r[k] is None else f"{r[k]:.2f}" for k in ("max_vio_median", "max_vio_p95"))
        differs = ", ".join(f"{k} {v}" for k, v in r["settings"].items() if usual.get(k) != v) or "nothing"
        lines.append(f"| {r['bits_per_byte']:.3f} | {vio} | {r['case']} | {differs} | {r['hardware']} |")
    note = f"\nUsual settings: {', '.join(f'{k} {v}' for k, v in usual.items())}.\n"
    (ROOT / "docs" / "laptop-plan.md").write_text(TEXT.format(table="\n".join(lines) + "\n" + note))


if __name__ == "__main__":
    main()
