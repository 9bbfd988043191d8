"""Which estimator of the quantile balances best, on made-up routers; and what Quantile Balancing costs.

Parts:
  sim     tokens x ~ N(0, 1)^64, logits x W / 8 * scale + offset, fresh tokens every step (16384, 256 experts, 8 a
          token), W and the offsets drawn once (drift: both move by 0.05 N(0, 1) a step). Settings: base (scale 1,
          offsets of standard deviation 1), skew (offsets 3), sat (scale 12, offsets 6), drift (as base). Methods: exact
          order statistics, the report's 1000 bins, signed-log 256 bins, the last with adaptive gain; on scores and on
          logits.
  async   absolute biases that arrive 0 to 4 steps late (8192 tokens, 128 experts, 4 a token; base and drift).
  solve   92 layers x 896 experts x 256 bins.
  step    what counting and solving add to a training step of the laptop preset, as a share of its passes alone: best
          repeats on one thread, no optimizer. `recorder_cpu.py` times the whole step, which takes longer.

One process per ``--seeds`` and ``--settings``: records of the same day are merged.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass

import _common as common

SETTINGS = {"base": (1.0, 1.0), "skew": (1.0, 3.0), "sat": (12.0, 6.0), "drift": (1.0, 1.0)}
METHODS = (
    "exact",
    "report 1000",
    "signed-log 256",
    "signed-log 256, adaptive gain",
    "signed-log 256, adaptive gain, 4 rounds",
)
STEPS = 40
SHOWN = (0, 1, 5, 20, 39)


@dataclass(frozen=True)
class Outcome(common.Record):
    """What one run of the simulation showed."""

    seed: int | None = None
    max_violation: list[float] | None = None  # at each step
    cv: list[float] | None = None
    dead: list[int] | None = None
    cv_floor: float | None = None
    max_violation_floor: float | None = None


def main() -> None:
    """See the module's text."""
    parser = common.arguments(__doc__)
    parser.add_argument("--part", choices=("sim", "async", "solve", "step"), required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(5)))
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--domains", nargs="*", default=["sigmoid", "logit"])
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    args = parser.parse_args()
    threads = common.threads(args.threads)
    if args.part == "sim":
        cases = [(seed, setting, domain) for seed in args.seeds for setting in args.settings for domain in args.domains]
        for seed, setting, domain in cases:
            keep([simulate(setting, domain, method, seed) for method in args.methods], args.dry_run)
    elif args.part == "async":
        for seed in args.seeds:
            keep([late(setting, lag, seed) for setting in ("base", "drift") for lag in range(5)], args.dry_run)
    else:
        quiet = common.require_quiet(threads, args.allow_busy)
        keep(solve(threads, quiet) if args.part == "solve" else step(threads, quiet), args.dry_run)


def keep(records: list[common.Record], dry_run: bool) -> None:
    """Print, and store unless told not to."""
    for record in records:
        if isinstance(record, Outcome) and record.max_violation and record.cv and record.dead:
            path = " ".join(f"{record.max_violation[s]:6.3f}" for s in SHOWN if s < len(record.max_violation))
            cv = sum(record.cv[-10:]) / 10
            print(f"{record.case:28s} {record.impl:32s} {path}  cv {cv:.4f}  dead {record.dead[-1]}", flush=True)
        else:
            print(common.table([record]))
    if dry_run:
        return
    folder = os.open(common.RESULTS, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # several processes add to one file
        common.write_records("balance-estimators", records)
    finally:
        os.close(folder)


def router(setting: str, seed: int, tokens: int, experts: int) -> Iterator[object]:
    """Logits of each step, ``[tokens, experts]``."""
    import torch

    scale, spread = SETTINGS[setting]
    draw = torch.Generator().manual_seed(1000 + seed)
    weight = torch.randn(64, experts, generator=draw)
    offset = spread * torch.randn(experts, generator=draw)
    for _ in range(STEPS):
        yield torch.randn(tokens, 64, generator=draw) @ weight / 8 * scale + offset
        if setting == "drift":
            weight += 0.05 * torch.randn(64, experts, generator=draw)
            offset += 0.05 * torch.randn(experts, generator=draw)


def simulate(setting: str, domain: str, method: str, seed: int, tokens: int = 16384, experts: int = 256, k: int = 8):
    """One router under one method, 40 steps; loads are those of the bias solved from earlier steps only."""
    import torch

    from trine.balance import QuantileBalancing
    from trine.balance.quantile_balancing import load_gain
    from trine.ops.router import RouterStats, route, solve_bias

    estimator = "signed_log" if method.startswith("signed-log") else "report"
    rounds = 4 if method.endswith("4 rounds") else 1
    stats = RouterStats.allocate(1, experts, estimator=estimator, score_domain=domain, batch_rounds=rounds)
    policy = QuantileBalancing(k, adaptive_gain="adaptive" in method)
    policy.warn = lambda *_: None  # that scores saturate is the point
    windows = []
    for logits_TE in router(setting, seed, tokens, experts):
        exact = method.startswith("exact")
        layer = None if exact else stats.layer(0)
        routing = route(logits_TE, stats.bias_LE[0], k, stats=layer, score_domain=domain)
        if not exact:
            windows.append(policy.step(stats).loads_LE)
            continue
        loads_LE = torch.bincount(routing.ids_TK.reshape(-1), minlength=experts)[None]
        windows.append(loads_LE)
        values_TE = routing.scores_TE if domain == "sigmoid" else logits_TE
        solved_E = solve_bias(values_TE, stats.bias_LE[0], k, score_domain=domain)
        gain = float(load_gain(loads_LE)) if "adaptive" in method else 1.0
        stats.bias_LE[0] += gain * (solved_E - stats.bias_LE[0])
    return outcome(f"{setting} {domain} seed {seed}", method, seed, windows, tokens, k)


def late(setting: str, lag: int, seed: int, tokens: int = 8192, experts: int = 128, k: int = 4) -> Outcome:
    """Absolute biases of the report's estimator that are adopted ``lag`` steps after the one they would have been."""
    from trine.balance import QuantileBalancing, Window
    from trine.ops.router import RouterStats, route

    stats, solver = RouterStats.allocate(1, experts), RouterStats.allocate(1, experts)
    policy, pending, windows = QuantileBalancing(k), [], []
    for logits_TE in router(setting, seed, tokens, experts):
        route(logits_TE, stats.bias_LE[0], k, stats=stats.layer(0))
        windows.append(Window.of(stats).loads_LE)
        policy.solve_(solver.load_state_dict(stats.state_dict()))
        pending.append(solver.bias_LE.clone())
        if len(pending) > lag:
            stats.bias_LE.copy_(pending.pop(0))
        stats.zero_()
    return outcome(f"async {setting} seed {seed}", f"lag {lag}", seed, windows, tokens, k)


def outcome(case: str, method: str, seed: int, windows: list, tokens: int, k: int) -> Outcome:
    """The record of a run's loads."""
    import torch

    from trine.balance import coefficient_of_variation, max_violation, sampling_floor

    loads_SE = torch.cat(windows)
    floor = sampling_floor(tokens, k, loads_SE.shape[1])
    return Outcome(
        *("balance-estimators", case, method),
        seed=seed,
        max_violation=[round(float(v), 4) for v in max_violation(loads_SE)],
        cv=[round(float(v), 5) for v in coefficient_of_variation(loads_SE)],
        dead=(loads_SE == 0).sum(1).tolist(),
        cv_floor=floor.cv,
        max_violation_floor=floor.max_violation,
    )


def solve(threads: int, quiet: bool) -> list[common.Record]:
    """All layers of a model of 92 x 896 solved at once."""
    import torch

    from trine.ops.router import RouterStats

    layers, experts, entries = 92, 896, {}
    for name, estimator, bins in (("signed-log", "signed_log", 256), ("report", "report", 256)):
        stats = RouterStats.allocate(layers, experts, bins, estimator=estimator)
        stats.histograms_LEB.copy_(torch.randint(0, 40, (1, experts, bins), dtype=torch.int32).expand(layers, -1, -1))
        stats.histograms_LEB[:, :, -2] += 20_000 - stats.histograms_LEB.sum(2, dtype=torch.int32)
        entries[name] = lambda stats=stats: stats.solve_(16)
    timings = common.time_interleaved(entries, 9)
    return [
        common.Record(
            *("balance-estimators", f"solve {layers}x{experts}x256", name, timing.best_ms),
            median_ms=timing.median_ms,
            quiet=quiet,
            threads=threads,
        )
        for name, timing in timings.items()
    ]


def step(threads: int, quiet: bool) -> list[common.Record]:
    """What one optimizer step of the laptop preset pays: counting in every pass, and the solve; beside its passes.

    Passes run one on a thread, as in training on a CPU, so everything is timed on one thread; the step's passes and
    counts are shared by ``threads`` of them, its solve is not. A whole step of training is longer (docs/balance.md):
    its passes slow each other down, its optimizer takes time, and here best repeats are compared. So the share is the
    highest there is.
    """
    import torch

    from trine.balance import QuantileBalancing
    from trine.config import preset
    from trine.data import Batch
    from trine.model import Model
    from trine.ops.router import RouterStats, route

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config, rows, tokens = preset("laptop"), 2, 2048
    model = Model(config).train()
    bounds = torch.arange(0, tokens + 1, 128, dtype=torch.int32)
    ids = torch.randint(config.vocab_size, (tokens + 1,))
    sources = torch.zeros(len(bounds) - 1, dtype=torch.int64)
    batch = Batch(ids[:-1], ids[1:], torch.ones(tokens), bounds, sources)
    layers, logits_TE = model.router_stats.layers, torch.randn(tokens, config.experts)

    def whole() -> None:
        model.zero_grad()
        model.router_stats.zero_()
        model.loss(batch)[0].backward()

    counted = {"report": ("report", 1), "signed-log": ("signed_log", 1), "signed-log, 4 rounds": ("signed_log", 4)}
    entries = {"pass": whole, "no counts": lambda: route(logits_TE, torch.zeros(config.experts), config.top_k)}
    for name, (estimator, rounds) in counted.items():
        stats, policy = (
            RouterStats.allocate(layers, config.experts, estimator=estimator, batch_rounds=rounds),
            QuantileBalancing(config.top_k),
        )

        def count(stats: RouterStats = stats) -> None:
            route(logits_TE, stats.bias_LE[0], config.top_k, stats=stats.layer(0))

        def solved(stats: RouterStats = stats, policy: QuantileBalancing = policy) -> None:
            for index in range(stats.layers):
                stats.layer(index).counters_F[:2] += tokens
                stats.loads_LE[index] += tokens * config.top_k // config.experts
                stats.histograms_LEB[index, :, stats.bins // 2] += tokens
            policy.step(stats)

        entries |= {f"counted, {name}": count, f"solved, {name}": solved}
    for value in (*entries.values(), *entries.values()):
        value()
    for name in counted:  # the bias stays 0 while its counts are timed
        entries[f"counted, {name}"].__defaults__[0].bias_LE.zero_()
        entries[f"counted, {name}"].__defaults__[0].zero_()
    timings = common.time_interleaved(entries, 15)
    best = {name: timing.best_ms for name, timing in timings.items()}
    found = []
    for name in counted:
        counting = rows * layers * (best[f"counted, {name}"] - best["no counts"]) / threads
        ms = counting + best[f"solved, {name}"]
        share = ms / (rows * best["pass"] / threads + ms)
        solving = best[f"solved, {name}"]
        note = f"{100 * share:.2f} % of a step's passes: counts {counting:.2f} ms, solve {solving:.2f} ms"
        found.append(
            common.Record(
                *("balance-estimators", "step of the laptop preset", name, ms),
                floor_fraction=round(share, 5),
                quiet=quiet,
                threads=threads,
                note=note,
            )
        )
    return found


if __name__ == "__main__":
    main()
