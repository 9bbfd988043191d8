"""What a quantile of a batch's scores costs, by how it is found: exact, from a histogram, or from a sample of rows.

    python benchmarks/quantile_cost.py [--threads 0] [--allow-busy] [--dry-run] [--largest 16777216]
    python benchmarks/quantile_cost.py --page

For each expert the threshold that k/E of the tokens reach (k/E = 1/16), of sigmoid scores of a skewed router, on the
CPU. Ways: `sort` and `histogram` (1000 bins) and `sketch` (every n-th row, about a thousand) as stateless routing has
them (`trine.ops.router.stateless.upper_threshold`); `select`, order statistics without a sort, as the exact solver of
Quantile Balancing has them; `signed-log`, Quantile Balancing's histogram of 256 bins around each expert's old bias,
counted and solved. The error is that of the load: root mean square over experts of the tokens let in over the tokens
wanted, minus 1. What chance makes of the next batch's loads is given beside it: an error far below that buys nothing.

--page writes the table into docs/balance.md and the curves into docs/images from the newest record.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _common as common
import torch
from torch import Tensor

from trine.ops.router import RouterStats
from trine.ops.router.grid import find_quantile
from trine.ops.router.quantile import count_required_bias, exact_quantile
from trine.ops.router.stateless import upper_threshold

BENCHMARK = "quantile_cost"
SHARE = 16  # experts over experts a token
TOKENS = (1024, 4096, 16384, 65536)
EXPERTS = (16, 64, 256, 896)
WAYS = ("sort", "select", "histogram", "signed-log", "sketch")
DOCS = Path(__file__).resolve().parents[1] / "docs"


def scores(tokens: int, experts: int) -> Tensor:
    """Sigmoid scores with experts of different popularity, ``[T, E]``."""
    generator = torch.Generator().manual_seed(0)
    offset_E = torch.randn(experts, generator=generator)
    return torch.sigmoid(torch.randn(tokens, experts, generator=generator) + offset_E)


def ways(scores_TE: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Each way to the thresholds, ``[E]``."""
    tokens, experts = scores_TE.shape
    k, every_TE = experts // SHARE, torch.ones_like(scores_TE, dtype=torch.bool)
    wanted = torch.tensor(tokens / SHARE, dtype=torch.float64)
    zero_T, bias_E = torch.zeros(tokens), -upper_threshold(scores_TE[::7], every_TE[::7], wanted / 7).float()
    stats = RouterStats.allocate(1, experts, estimator="signed_log")

    def signed_log() -> Tensor:
        # as in training: bins lie around the bias of the step before, which was found from other tokens
        stats.bias_LE.copy_(bias_E[None])
        stats.zero_()
        counts_EB, edges_2 = stats.histograms_LEB[0], stats.edges_L2[0]
        count_required_bias(scores_TE, zero_T, None, edges_2, counts_EB, stats.grid, stats.anchor_LE[0])
        place_LE, part_LE, _ = find_quantile(stats.histograms_LEB, k)
        required_LE, _ = stats.grid.required(place_LE, part_LE, stats.edges_L2, stats.anchor_LE)
        return -required_LE[0]

    return {
        "sort": lambda: upper_threshold(scores_TE, every_TE, wanted, "exact"),
        "select": lambda: -exact_quantile(-scores_TE, k),
        "histogram": lambda: upper_threshold(scores_TE, every_TE, wanted, "histogram"),
        "signed-log": signed_log,
        "sketch": lambda: upper_threshold(scores_TE, every_TE, wanted, "sketch"),
    }


def load_error(scores_TE: Tensor, threshold_E: Tensor) -> float:
    """Root mean square over experts of tokens let in over tokens wanted, minus 1."""
    share_E = (scores_TE.double() >= threshold_E).double().mean(0) * SHARE
    return float((share_E - 1.0).square().mean().sqrt())


def measure(largest: int, repeats: int, quiet: bool, threads: int, dry_run: bool) -> None:
    """All sizes of at most ``largest`` scores; each is stored when it is done."""
    for experts in EXPERTS:
        for tokens in TOKENS:
            if tokens * experts > largest:
                continue
            scores_TE = scores(tokens, experts)
            found = ways(scores_TE)
            times = common.time_interleaved(found, repeats)
            case, records = f"T{tokens} E{experts} k{experts // SHARE}", []
            for name, call in found.items():
                records.append(
                    common.Record(
                        benchmark=BENCHMARK,
                        case=case,
                        impl=name,
                        ms=times[name].best_ms,
                        median_ms=times[name].median_ms,
                        peak_bytes=common.peak_bytes(call) if tokens == TOKENS[-1] or experts == EXPERTS[-1] else None,
                        error=load_error(scores_TE, call()),
                        quiet=quiet,
                        threads=threads,
                    )
                )
            print(common.table(records), flush=True)
            if not dry_run:
                common.write_records(BENCHMARK, records)


def main() -> None:
    """See the module's text."""
    parser = common.arguments(__doc__)
    parser.add_argument("--largest", type=int, default=1 << 24, help="most scores of a batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--page", action="store_true", help="write docs/balance.md's part from the newest record")
    args = parser.parse_args()
    if args.page:
        page()
        return
    threads = common.threads(args.threads)
    quiet = common.require_quiet(threads, args.allow_busy)
    measure(args.largest, args.repeats, quiet, threads, args.dry_run)


# --- the page ---


def boundary(times: Mapping[tuple[int, int], Mapping[str, float]]) -> str:
    """One sentence: beyond which size an estimate beats the exact quantile, of milliseconds by (experts, tokens)."""

    def part(way: str, name: str, size: Callable[[int, int], int], unit: str) -> str:
        won = [size(*one) for one, ms in times.items() if ms[way] < ms["select"]]
        lost = [size(*one) for one, ms in times.items() if ms[way] >= ms["select"]]
        if not won or not lost:
            return f"at {'every' if won else 'no'} measured size for {name}"
        if max(lost) >= min(won):
            return f"somewhere from {min(won):,} to {max(lost):,} {unit} for {name}"
        return f"between {max(lost):,} and {min(won):,} {unit} for {name}"

    experts, tokens = max(times, key=math.prod)
    parts = (
        part("signed-log", "the signed-log histogram", lambda e, t: e * t, "experts x tokens"),
        part("sketch", "the sketch, however many the experts", lambda _, t: t, "tokens"),
        part("histogram", "1000 equal bins", lambda e, t: e * t, "experts x tokens"),
    )
    return (
        "The boundary of article B, beyond which an estimate takes less time than the exact quantile (*select*), lies "
        f"{', '.join(parts[:2])}, and {parts[2]}; the largest measured is {experts} experts x {tokens:,} tokens = "
        f"{experts * tokens:,}."
    )


def page() -> None:
    """Table, curves and the boundary from the newest record."""
    from matplotlib.figure import Figure

    from trine.views import figures
    from trine.views.tables import markdown

    path = max(common.RESULTS.glob(f"{BENCHMARK}-*.json"), key=lambda one: one.stem[-10:])
    rows = {(row["case"], row["impl"]): row for row in json.loads(path.read_text())}
    any_row = next(iter(rows.values()))
    sizes = [(e, t) for e in EXPERTS for t in TOKENS if (f"T{t} E{e} k{e // SHARE}", "sort") in rows]

    by_size = {(e, t): {way: rows[f"T{t} E{e} k{e // SHARE}", way]["ms"] for way in WAYS} for e, t in sizes}

    def of(experts: int, tokens: int, way: str) -> dict[str, float]:
        return rows[f"T{tokens} E{experts} k{experts // SHARE}", way]

    heads = ("experts", "tokens", *(f"{way}, ms" for way in WAYS), *(f"{w}, error" for w in WAYS[2:]), "chance")
    body = []
    for experts, tokens in sizes:
        times = [f"{of(experts, tokens, way)['ms']:.3g}" for way in WAYS]
        errors = [f"{100 * of(experts, tokens, way)['error']:.2g} %" for way in WAYS[2:]]
        body.append((str(experts), str(tokens), *times, *errors, f"{100 / math.sqrt(tokens / SHARE):.2g} %"))

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    shown = [e for e in EXPERTS if e >= 64]
    for index, experts in enumerate(shown):
        axes = figure.add_subplot(1, len(shown), index + 1)
        for way, colour in zip(WAYS, figures.LINE_COLOURS, strict=False):
            points = [(t, of(experts, t, way)["ms"]) for e, t in sizes if e == experts]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=way)
        axes.set(xscale="log", yscale="log", title=f"{experts} experts", xlabel="tokens")
        axes.grid(alpha=0.3)
        if index == 0:
            axes.set_ylabel("ms")
            axes.legend(fontsize=7)
    figures.save(figure, DOCS / "images" / "quantile-cost.png")
    state = "" if any_row["quiet"] else "; the machine was busy, so compare columns, not single numbers"
    text = (
        f"{any_row['hardware']}, {any_row['threads']} thread{'s' if any_row['threads'] != 1 else ''}, "
        f"{any_row['date']}{state}. Best of the repeats.\n\n"
        f"{markdown(heads, body)}\n\n{textwrap.fill(boundary(by_size), 120)}\n\n"
        "![Time over tokens](images/quantile-cost.png)"
    )
    replace(DOCS / "balance.md", "quantile-cost", text)


def replace(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of that name."""
    old = path.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if old.count(start) != 1 or old.count(end) != 1:
        raise SystemExit(f"{path}: need {start} and {end} once each")
    before, rest = old.split(start)
    path.write_text(f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
