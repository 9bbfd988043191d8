"""The data side on the CPU: tokenising, the packing plan of many tokens, and the wait for a step's batches.

    python benchmarks/data_cpu.py [--tokens 100000000] [--threads 0] [--allow-busy] [--dry-run]

- `tokenise`: the training split of the standard library with a vocabulary learnt from it, cold (every word is new) and
  warm. `library` is `tokenizers`' own batch call on all cores. The note has megabytes a second.
- `plan`: a packing plan, and a mixture plan of two parts over three stages, of synthetic documents whose lengths are
  log-normal, on one core. `--tokens` is their sum.
- `loader`: the wait for one step's micro-batches, of the laptop plan's sizes and of long rows; the note has tokens a
  second.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _common as common
import numpy as np

from trine.config import SourceShare
from trine.data import MixturePlan, PackingPlan, Tokenizer, stdlib_source
from trine.data.shards import Shards


def synthetic(tokens: int, seed: int = 0) -> Shards:
    """Shards as far as a plan looks at them: two sources, log-normal lengths (median 600, a tail to a million)."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(6.4, 1.4, tokens // 800), 2, 1 << 20).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    train = np.arange(lengths.size)
    fake: Any = SimpleNamespace(
        hash="synthetic",
        folder=Path("synthetic"),
        sources=("a", "b"),
        source_of=(train % 2).astype(np.int64),
        offsets=offsets,
        documents=range(lengths.size),
        select=lambda split: train,
        tokens=np.zeros(int(offsets[-1]), dtype=np.uint16),
        tokenizer=SimpleNamespace(eod_id=0),
        byte_lengths=np.ones(16, dtype=np.int64),
        weights=None,
        target_weights=lambda *_: 1.0,
    )
    fake.stream = lambda d: fake.tokens[offsets[d] : offsets[d + 1]]
    return fake


def seconds(call: Any) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def tokenising(quiet: bool, count: int) -> list[common.Record]:
    """Cold, warm and the library, on the same texts."""
    texts = [document.text for document in stdlib_source().select("train")]
    size = sum(len(text.encode()) for text in texts) / 1e6
    trained = Tokenizer.train(texts, 4096).to_json()
    found: dict[str, list[float]] = {"trine cold": [], "trine warm": [], "tokenizers": []}
    for _ in range(3):
        ours = Tokenizer(type(Tokenizer.train(["x"], 257)._inner).from_str(trained))
        found["trine cold"].append(seconds(lambda ours=ours: ours.encode_batch(texts)))
        found["trine warm"].append(seconds(lambda ours=ours: ours.encode_batch(texts)))
    found["tokenizers"].append(seconds(lambda: ours._inner.encode_batch_fast(texts, add_special_tokens=False)))
    return [
        common.Record(
            *("data_cpu", f"tokenise stdlib {size:.1f} MB", name),
            ms=min(times) * 1e3,
            median_ms=float(np.median(times)) * 1e3,
            quiet=quiet,
            threads=count,
            note=f"{size / min(times):.2f} MB/s",
        )
        for name, times in found.items()
    ]


def plans(tokens: int, quiet: bool) -> list[common.Record]:
    """Plans of synthetic documents; one core."""
    shards = synthetic(tokens)
    found: list[common.Record] = []

    def record(case: str, taken: float, note: str) -> None:
        found.append(common.Record("data_cpu", case, "trine", ms=taken * 1e3, quiet=quiet, threads=1, note=note))

    for length in (128, 8192, 65536):
        sizes = {"row_length": length, "tokens_per_step": 1 << 17, "micro_batch_tokens": 1 << 17}
        made: list[Any] = []
        taken = seconds(lambda s=sizes, m=made: m.append(PackingPlan(shards, **s).report()))
        report = made[0]
        note = f"{report.documents} documents, {report.bins} bins, {report.padding_share:.2%} padding"
        record(f"plan {tokens} tokens rows {length}", taken, note)
    mixture = (SourceShare("a", 0.7, end=0.4), SourceShare("b", 0.3, end=0.6))
    before: list[MixturePlan] = []
    step = 1 << 18
    for stage, (length, share) in enumerate([(8192, 0.5), (65536, 0.25), (1 << 18, 0.1)]):
        taken = seconds(
            lambda length=length, share=share, stage=stage: before.append(
                MixturePlan(
                    *(shards, mixture),
                    row_length=length,
                    tokens_per_step=step,
                    micro_batch_tokens=step,
                    steps=max(1, int(tokens * share / step)),
                    stage=stage,
                    before=tuple(before),
                )
            )
        )
        report = before[-1].report()
        note = f"{report.supervised_tokens} targets, {report.padding_share:.2%} padding"
        record(f"mixture stage {stage} rows {length} of {tokens} tokens", taken, note)
    return found


def loader(tokens: int, quiet: bool) -> list[common.Record]:
    """Time to get the batches of a step, averaged over steps."""
    shards = synthetic(min(tokens, 20_000_000))
    found = []
    for case, length, micro, step in (("laptop", 128, 2048, 4096), ("long rows", 16384, 16384, 16384)):
        sizes = {"row_length": length, "tokens_per_step": step, "micro_batch_tokens": micro, "steps": 200}
        plan = MixturePlan(shards, (SourceShare("a", 0.5), SourceShare("b", 0.5)), **sizes)
        times = [seconds(lambda i=i, plan=plan: plan.micro_batches(i)) for i in range(100)]
        note = f"{step / np.median(times) / 1e6:.2f} M tokens/s"
        median = float(np.median(times)) * 1e3
        found.append(
            common.Record(
                *("data_cpu", f"loader {case} rows {length} step {step}", "trine"),
                ms=min(times) * 1e3,
                median_ms=median,
                quiet=quiet,
                threads=1,
                note=note,
            )
        )
    return found


def main() -> None:
    """Measure, print, record."""
    parser = common.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    options = parser.parse_args()
    count = common.threads(options.threads)
    quiet = common.require_quiet(count, options.allow_busy)
    records = [*tokenising(quiet, count), *plans(options.tokens, quiet), *loader(options.tokens, quiet)]
    print(common.table(records))
    for record in records:
        print(f"{record.case} [{record.impl}]: {record.note}")
    if not options.dry_run:
        print(common.write_records("data_cpu", records, packages=("tokenizers",)))


if __name__ == "__main__":
    main()
