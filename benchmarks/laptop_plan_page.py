"""Write docs/laptop-plan.md from the records of the runs that chose the laptop plan.

python benchmarks/laptop_plan_page.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = """# How the laptop plan was chosen

`trine train --preset laptop` has about a quarter of an hour. These runs decided what it does with it. Each row is one
run with one seed: differences below 0.01 bits per byte say nothing. Held-out text is that of `trine eval`, without
near-copies. MaxVio is the load of the busiest expert over the mean, less 1, of the worst layer, from step 20 on in rows
of the first stage. The bars are 1.526 bits per byte (15 % below the best n-gram) and MaxVio of at most 0.3 in 95 % of
those steps.

## Experts and stages

Steps of 4,096 tokens; with four stages (128, 1,024, 4,096 and 16,384 tokens: 80, 10, 6 and 4 % of the tokens) 4,096,
8,192 and 16,384 in the later ones. *spread*: the rows of a step come from all parts of the data (`spread_order`).

{experts}

What they say:

- **With steps so small, how many experts can be balanced is decided by the texts.** An expert that takes a share p of
  the tokens has a load that differs from step to step by about sqrt((1 - p) / p) over the root of the number of
  independent texts in a step, whatever bias was solved on the step before: tokens of one text go the same way. 56
  experts with 2 a token (p 0.04) cannot come near 0.3; from p 0.4 on most steps do. Larger steps would do it too, and
  cost far more bits (below).
- **Rows from all parts of the data** made steps more alike: at the same model, steps 21 to 61, MaxVio fell from a
  median of 0.25 and a 95 % point of 0.42 to 0.20 and 0.33.
- **It costs no bits.** Many small experts with many a token were the best that was tried: 20 experts of width 32
  with 8 a token wrote better than 16 of width 64 with 4, which have the same work a token, and through four stages as
  well as 56 with 2 did in one of short rows (1.502).
- **The four stages cost about 0.01** against one stage of short rows for the same number of tokens, and are faster than
  they look, as the long rows are few.
- The plan takes 18 experts with 8 a token: between the rows with 16 and 20, with more room below 0.3. Its run on two
  cores: {run}.

## Steps, rows and rates

Runs of 56 experts with 2 a token, before rows were spread. Rates are peaks of a cosine that ends at 0.

{rates}

- **Steps are scarcer than tokens.** For the same number of tokens, 4,096 a step beat 8,192, and 8,192 beat 16,384. Only
  Muon's rate matters as much. Several settings differ between some of these rows, so read the order, not the gaps.
- **Rows of 128 tokens are as good as 256; 512 and 1,024 were worse than 256** in plans this short.
- Smoothing the bias (`ema`) made balance worse in all three pairs that differ in nothing else: at high rates the router
  moves more in a step than its quantiles are uncertain.
"""


def main() -> None:
    """Read the newest records, sort by result, write the page."""
    files = sorted((ROOT / "benchmarks" / "results").glob("laptop_plan-*.json"))
    records = sorted(json.loads(files[-1].read_text()), key=lambda r: r["bits_per_byte"])
    experts = [
        "| bits per byte | MaxVio median, 95 % | at most 0.3 | experts, a token, width | plan | size, steps | tok/s |",
        "|---:|---|---:|---|---|---|---:|",
    ]
    rates = ["| bits per byte | MaxVio median, 95 % | case | differs in | machine |", "|---:|---|---|---|---|"]
    usual = {"muon": 0.01, "embeddings": 0.02, "other": 0.002, "momentum": 0.95, "ema": 0.0}
    for r in records:
        vio = ", ".join("–" if r[k] is None else f"{r[k]:.2f}" for k in ("max_vio_median", "max_vio_p95"))
        if "experts" in r["settings"]:
            one = dict(r["settings"])
            model = ", ".join(str(one.pop(k)) for k in ("experts", "top_k", "expert_width"))
            plan = ", ".join([r["case"], *(f"{k} {v}" for k, v in one.items())])
            share = f"{100 * r['max_vio_share']:.0f} %"
            size = f"{r['tokens'] / 1e6:.2f} M, {r['steps']}"
            speed = f"{r['tokens_per_second']:,}"
            experts.append(f"| {r['bits_per_byte']:.3f} | {vio} | {share} | {model} | {plan} | {size} | {speed} |")
            continue
        differs = ", ".join(f"{k} {v}" for k, v in r["settings"].items() if usual.get(k) != v) or "nothing"
        rates.append(f"| {r['bits_per_byte']:.3f} | {vio} | {r['case']} | {differs} | {r['hardware']} |")
    machine = next(r["hardware"] for r in records if "experts" in r["settings"])
    experts.append(f"\nMachine: {machine}.")
    rates.append(f"\nUsual settings: {', '.join(f'{k} {v}' for k, v in usual.items())}.")
    (run,) = json.loads(sorted((ROOT / "benchmarks" / "results").glob("laptop_run-*.json"))[-1].read_text())
    share = f"{100 * run['max_vio_share_at_most_0.3']:.0f} %"
    found = (
        f"{run['bits_per_byte']:.3f} bits per byte, MaxVio {run['max_vio_median']:.2f} in the median and at most 0.3\n"
        f"  in {share} of the steps, {run['command_minutes']:.1f} minutes for `make train`, {run['date']}"
    )
    page = TEXT.format(experts="\n".join(experts), rates="\n".join(rates), run=found)
    (ROOT / "docs" / "laptop-plan.md").write_text(page)


if __name__ == "__main__":
    main()
