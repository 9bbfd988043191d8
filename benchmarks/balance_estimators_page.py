"""Write the part "Estimators" of docs/balance.md from the newest records of balance_estimators.py.

python benchmarks/balance_estimators_page.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- estimators: begin -->\n", "<!-- estimators: end -->\n"
SHOWN = (1, 5, 20, 39)
SETTLED = 20  # step from which on the worst is looked for
ROUNDS = "signed-log 256, adaptive gain, 4 rounds"
LAST = 10  # steps that the coefficient of variation is averaged over
TEXT = """## Estimators

Made-up routers, {steps} steps of 16,384 fresh tokens, 256 experts, 8 a token, up to {seeds} seeds; loads of a step are
those of the bias solved on the one before. Floors of independent tokens under perfect balance: coefficient of variation
{cv_floor:.4f}, MaxVio {floor:.3f}. *base*: logits of standard deviation 1 with offsets of standard deviation 1; *skew*:
offsets 3; *sat*: deviation 12, offsets 6, so that most sigmoid scores are 0 or 1 in fp32; *drift*: base, and the router
moves 5 % a step. Means over seeds; CV (± its standard deviation over seeds) over the last {last} steps, dead experts in
the worst seed's last step. `benchmarks/balance_estimators.py` made the records, this page is written from them.

{table}

- On skewed scores the report's equal bins are too coarse; the signed-log histogram does what exact order statistics do.
- On saturated scores nothing balances: scores that are equal in fp32 cannot be parted by a bias. There the equal bins,
  by their own noise, come nearer to even loads than exact solutions do, and leave more experts dead.
- On logits every estimator balances every router, the saturated ones too, and within a few steps.
- The adaptive gain takes most of the excess over the floor away from a router that stands still, and changes nothing
  for one that moves.
- Four rounds within each batch (`balance.batch_rounds`) are what skewed scores need: within twice the floor by the
  fifth step, {rounds} in the worst seed, where no single update is. The first step is worse, and later ones leave that
  mark again, {later} at worst, but less than with one update ({once}). A router that moves gains a little, one on
  logits nothing; on saturated scores loads swing and more experts die.

Late biases were recorded for the report's estimator on scores with 8,192 tokens, 128 experts and 4 a token, and for
nothing else; the absolute bias is adopted so many steps late. MaxVio of the last step, mean and worst of the seeds, and
the worst of any seed and step from the {settled}th on (floor {late_floor:.3f}):

{late}

- A router that stands still loses next to nothing by a lag: {base}.
- One that drifts loses balance by it: {drift}.

"""


def main() -> None:
    """Read the newest records; put the part between its marks, or at the end."""
    records = json.loads(sorted((ROOT / "benchmarks" / "results").glob("balance-estimators-*.json"))[-1].read_text())
    runs: dict[tuple[str, str, str], list[dict]] = {}
    for record in records:
        if record.get("seed") is not None:
            setting, domain = record["case"].split()[:2]
            runs.setdefault((setting, domain, record["impl"]), []).append(record)
    rows = [
        f"| router | biases on | method | MaxVio at step {', '.join(map(str, SHOWN))} | CV | dead | seeds |",
        "|---|---|---|---|---|---:|---:|",
    ]
    for setting in ("base", "skew", "sat", "drift"):
        for domain in ("sigmoid", "logit"):
            for (one, other, method), found in runs.items():
                if (one, other) != (setting, domain):
                    continue
                path = ", ".join(f"{statistics.mean(r['max_violation'][s] for r in found):.2f}" for s in SHOWN)
                cvs = [statistics.mean(r["cv"][-LAST:]) for r in found]
                spread = statistics.stdev(cvs) if len(cvs) > 1 else 0.0
                words = {"sigmoid": "scores", "logit": "logits"}[domain]
                dead = max(r["dead"][-1] for r in found)
                rows.append(
                    f"| {setting} | {words} | {method} | {path} | {statistics.mean(cvs):.4f} ± {spread:.4f} | {dead} "
                    f"| {len(found)} |"
                )
    late = [f"| lag | base: last step | base: from step {SETTLED} | drift: last step | drift: from step {SETTLED} |"]
    late.append("|---:|---|---:|---|---:|")
    worst: dict[tuple[str, str], float] = {}
    lags = sorted({impl for case, _, impl in runs if case == "async"})
    for lag in lags:
        cells = []
        for setting in ("base", "drift"):
            last = [r["max_violation"][-1] for r in runs["async", setting, lag]]
            cells.append(f"{statistics.mean(last):.2f}, {max(last):.2f}")
            worst[setting, lag] = max(max(r["max_violation"][SETTLED:]) for r in runs["async", setting, lag])
            cells.append(f"{worst[setting, lag]:.2f}")
        late.append(f"| {lag.removeprefix('lag ')} | {' | '.join(cells)} |")
    told = {
        setting: "the worst is " + ", ".join(f"{worst[setting, lag]:.2f} at {lag}" for lag in ("lag 0", *lags[-2:]))
        for setting in ("base", "drift")
    }
    some = runs["base", "sigmoid", "exact"]
    several, single = (runs["skew", "sigmoid", one] for one in (ROUNDS, ROUNDS.removesuffix(", 4 rounds")))
    part = TEXT.format(
        steps=len(some[0]["cv"]),
        seeds=max(map(len, runs.values())),
        cv_floor=some[0]["cv_floor"],
        floor=some[0]["max_violation_floor"],
        last=LAST,
        table="\n".join(rows),
        late_floor=runs["async", "base", "lag 0"][0]["max_violation_floor"],
        late="\n".join(late),
        settled=SETTLED,
        rounds=f"{max(r['max_violation'][5] for r in several):.2f}",
        later=f"{max(max(r['max_violation'][5:]) for r in several):.2f}",
        once=f"{max(max(r['max_violation'][5:]) for r in single):.2f}",
        **told,
    )
    page = ROOT / "docs" / "balance.md"
    text = page.read_text()
    before, after = text.rstrip() + "\n\n", ""
    if BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
    page.write_text(before + BEGIN + part + END + after)


if __name__ == "__main__":
    main()
