"""Peak memory of one training step of the laptop model by row length, each in a process of its own.

    python benchmarks/memory_cpu.py [--lengths 4096 8192 16384 32768] [--dry-run]

Every length is measured with the same setting, sublayers recomputed, on random tokens; then the ratio between 16K and
4K, and the peak at 32K, are printed beside their bars. `peak_bytes` is the largest resident size of the process, `base`
that of the same process before its first step (Python, torch, the model). The time of the long step is in `ms`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

LENGTHS = (4_096, 8_192, 16_384, 32_768)
WARM_TOKENS = 1_024
RATIO_BAR, PEAK_BAR = 4.4, 4e9  # 16K over 4K; bytes at 32K


def child(length: int, recompute: bool, threads: int) -> None:
    """Train a step of a short row, which allocates the optimizers' state, and one of `length` tokens; print as JSON."""
    from trine.train import machine

    machine.prepare_machine(threads)
    import time

    import torch

    from trine.balance import QuantileBalancing
    from trine.config import preset
    from trine.data import Batch
    from trine.model import Model
    from trine.train.config import Stage
    from trine.train.schedule import lay_out
    from trine.train.trainer import Trainer

    torch.manual_seed(0)
    config = preset("laptop")

    def row(tokens: int) -> Batch:
        ids = torch.randint(config.vocab_size, (tokens + 1,))
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        return Batch(ids[:-1], ids[1:], torch.ones(tokens), bounds, torch.zeros(1, dtype=torch.int64))

    short = Stage(length=WARM_TOKENS, share=0.5, step_tokens=length, micro_tokens=length, recompute=recompute)
    long = Stage(length=length, share=0.5, step_tokens=length, micro_tokens=length, recompute=recompute)
    rows = (row(WARM_TOKENS), row(length))
    trainer = Trainer(
        *(Model(config), lay_out((short, long), 2 * length), lambda span, step: [rows[span.index]]),
        balancer=QuantileBalancing(config.top_k),
    )
    base = machine.peak_memory_bytes()
    trainer.train_step()
    began = time.perf_counter()
    trainer.train_step()
    seconds = time.perf_counter() - began
    print(json.dumps({"length": length, "base": base, "peak_bytes": machine.peak_memory_bytes(), "seconds": seconds}))


def main() -> int:
    """Measure, print, write records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--no-recompute", action="store_true", help="keep all activations, for comparison")
    parser.add_argument("--threads", type=int, default=0, help="0 chooses")
    parser.add_argument("--dry-run", action="store_true", help="write no records")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, not given.no_recompute, given.threads)
        return 0
    import _common as common

    records, peaks = [], {}
    for length in given.lengths:
        command = [sys.executable, __file__, "--child", str(length), "--threads", str(given.threads)]
        command += ["--no-recompute"] if given.no_recompute else []
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        peaks[length] = found["peak_bytes"]
        print(
            f"{length:>7} tokens  peak {found['peak_bytes'] / 1e9:.2f} GB (base {found['base'] / 1e9:.2f})  "
            f"{found['seconds']:.2f} s a step",
            flush=True,
        )
        how = "all kept" if given.no_recompute else "sublayers recomputed"
        records.append(
            common.Record(
                benchmark="memory-cpu",
                case=f"step laptop T{length}, {how}",
                impl="trine",
                ms=1e3 * found["seconds"],
                peak_bytes=found["peak_bytes"],
                note=f"base {found['base']} bytes",
            )
        )
    if {4_096, 16_384} <= peaks.keys():
        ratio = peaks[16_384] / peaks[4_096]
        print(f"16K over 4K: {ratio:.2f} (bar {RATIO_BAR})")
    if 32_768 in peaks:
        print(f"32K: {peaks[32_768] / 1e9:.2f} GB (bar {PEAK_BAR / 1e9:.0f})")
    if not given.dry_run:
        print(common.write_records("memory-cpu", records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
