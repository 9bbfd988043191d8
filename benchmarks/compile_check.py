"""Compile every shipped kernel configuration for Hopper without a GPU, and keep a table of what the assembler says.

    python benchmarks/compile_check.py            compare the committed table with the shipped configurations
    python benchmarks/compile_check.py --same-triton   the same as if the table's Triton were the installed one
    python benchmarks/compile_check.py --write    compile what changed and write the table (--jobs N, --only TEXT)

A row is keyed by a hash of the kernel's source, its configuration and the Triton version. It lists registers a
thread, bytes of stack (spills), shared memory and instructions. Exit code 1 when a hot kernel spills or the table is
out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.runtime.jit import JITFunction

from trine.ops.kda import triton_backward, triton_decode, triton_prepare, triton_scan
from trine.ops.kda.triton_config import choose, refined, segment_length
from trine.ops.kda.triton_launch import Kernel, Variant

TABLE = Path(__file__).resolve().parent / "results" / "compile-sm90.json"
SHARED = 232_448  # bytes of shared memory that a program may have on Hopper
Entry = tuple[Kernel, Variant, bool]


def entries() -> dict[str, Entry]:
    """Name -> (kernel, variant, hot). A hot kernel is on the path of a measured case and must not spill."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    found: dict[str, Entry] = {}
    for heads, key, value, dtype, plan, hot in (
        (96, 128, 128, bf16, "auto", True),
        (64, 128, 128, bf16, "auto", True),
        (16, 128, 128, bf16, "auto", True),
        (96, 128, 128, bf16, "auto,bf16", True),
        (16, 128, 128, bf16, "auto,bf16", True),
        (96, 64, 64, bf16, "auto", True),
        (96, 60, 100, bf16, "auto", False),
        (96, 256, 256, bf16, "auto", False),
        (96, 128, 128, fp16, "auto", False),
        (16, 128, 128, fp32, "auto", False),
        (16, 64, 64, fp32, "auto", False),
        (16, 256, 256, fp32, "auto", False),
    ):
        config = choose(heads, key, value, dtype, dtype, True, plan)
        if plan == "auto,bf16":  # as save="factors" makes and reads them
            config = refined(config)
        align = 8 if key % 8 == 0 and value % 8 == 0 else 4
        name = f"H{heads} K{key} V{value} {str(dtype)[6:]} {plan}"
        segmented = config.segment > 0
        for index in (None, torch.int32):
            kind = "" if index is None else " packed"
            single = triton_prepare._single_warp() if config.single_warp and align == 8 else None
            make = triton_prepare.prepare_variant if single is None else triton_prepare.single_warp_variant
            found[f"prepare {name}{kind}"] = (
                single or triton_prepare.PREPARE,
                make(config, (dtype,) * 4, index, key, align, True, True, True, True),
                hot,
            )
            shape = (config, dtype, dtype, index, key, value, align)
            for cut in (False, True) if segmented else (False,):
                label = f"scan{' segment' if cut else ''} {name}{kind}"
                for carried in (False, True):
                    found[label + (" carried" if carried else "")] = (
                        triton_scan.SCAN,
                        triton_scan.scan_variant(*shape, cut, True, carried, carried),
                        hot,
                    )
            if segmented:
                found[f"transition {name}{kind}"] = (
                    triton_scan.SCAN,
                    triton_scan.scan_variant(*shape, True, False, False, False),
                    hot,
                )
                found[f"combine {name}{kind}"] = (
                    triton_scan.COMBINE,
                    triton_scan.combine_variant(config, index, value),
                    hot,
                )
    for state in (fp32, bf16):
        for index in (None, torch.int32):
            found[f"decode K128 V128 bf16 state {str(state)[6:]}{'' if index is None else ' pool'}"] = (
                triton_decode.DECODE,
                triton_decode.decode_variant((bf16,) * 5, state, index, 128, 128, 8, 0, True, True, True, True),
                True,
            )
    found |= backward_entries()
    return found


def backward_entries() -> dict[str, Entry]:
    """The backward's own kernels and its form of the first one: serial and cut into segments, bare and carried.

    Hot are the unpacked forms, whose times are measured; the packed form of the pairs spills.
    """
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    kernels = {
        "scan": triton_backward.SCAN,
        "segments": triton_backward.SEGMENTS,
        "join": triton_backward.JOIN,
        "pairs": triton_backward.PAIRS,
        "gradient": triton_backward.GRADIENT,
        "finish": triton_backward.FINISH,
    }
    found: dict[str, Entry] = {}
    for heads, key, value, dtype, hot in (
        (96, 128, 128, bf16, True),
        (32, 128, 128, bf16, True),
        (96, 64, 64, bf16, True),
        (96, 60, 100, bf16, False),
        (16, 256, 256, bf16, False),
        (32, 128, 128, fp16, False),
        (16, 128, 128, fp32, False),
        (16, 64, 64, fp32, False),
    ):
        config = triton_backward.choose_backward(dtype, key, value, heads)
        align = 8 if key % 8 == 0 and value % 8 == 0 else 4
        segment = segment_length(heads, key, value)
        for index, carried in ((None, False), (torch.int32, True)):
            name = f"H{heads} K{key} V{value} {str(dtype)[6:]}" + (" packed carried" if carried else "")
            flags = (True, True, True, True, carried, carried, False)
            # A segmented forward pass under autograd leaves its cuts; the rest is what a backward called alone needs.
            for kept in (True, False) if segment else (False,):
                form = triton_backward._Form(
                    (dtype,) * 7, index, key, value, *flags, segment, dtype != fp32, kept, True
                )
                for kind, variant in zip(kernels, triton_backward.variants(config, form), strict=True):
                    if kind in ("segments", "join"):
                        if segment:
                            label = f"{name} kept" if kept else name
                            found[f"backward {kind} {label}"] = (kernels[kind], variant, hot)
                    elif not kept:
                        found[f"backward {kind} {name}"] = (kernels[kind], variant, hot)
            chosen = triton_backward.factor_config(heads, key, value, dtype, dtype, True, True)
            single = triton_prepare._single_warp() if chosen.single_warp and align == 8 else None
            make = triton_prepare.prepare_variant if single is None else triton_prepare.single_warp_variant
            found[f"backward prepare {name}"] = (
                single or triton_prepare.PREPARE,
                make(chosen, (dtype,) * 4, index, key, align, True, True, True, True),
                hot,
            )
    return found


def source(function: Any) -> str:
    """A kernel's source and that of the kernels it calls."""
    texts, queue, seen = [], [function], set()
    while queue:
        one = queue.pop()
        if one.fn.__qualname__ in seen:
            continue
        seen.add(one.fn.__qualname__)
        texts.append(one.src)
        names = sorted(one.fn.__code__.co_names)
        queue += [o for o in map(one.fn.__globals__.get, names) if isinstance(o, JITFunction)]
    return "\n".join(sorted(texts))


def fingerprint(kernel: Kernel, variant: Variant, version: str) -> str:
    """Hash of what decides the machine code; `version` is Triton's."""
    parts = (source(kernel.function), variant.types, variant.constants, asdict(variant.options), version)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def measure(name: str) -> tuple[str, dict[str, Any]]:
    """Compile one entry and read its resources."""
    kernel, variant, hot = entries()[name]
    start = time.perf_counter()
    compiled = kernel.compile(variant)
    seconds = time.perf_counter() - start
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()

        def ask(option: str) -> str:
            return subprocess.run([tool, option, binary.name], capture_output=True, text=True, check=True).stdout

        usage = re.search(r"REG:(\d+) STACK:(\d+)", ask("-res-usage"))
        assert usage is not None
        instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s", ask("-sass"), re.MULTILINE))
    return name, {
        "kernel": kernel.name,
        "fingerprint": fingerprint(kernel, variant, triton.__version__),
        "triton": triton.__version__,
        "registers": int(usage.group(1)),
        "stack_bytes": int(usage.group(2)),
        "shared_bytes": compiled.metadata.shared,
        "instructions": instructions,
        "warps": variant.options.num_warps,
        "hot": hot,
        "seconds": round(seconds, 1),
    }


def differences(same_triton: bool) -> list[str]:
    """What the committed table lacks, has too much of, or describes in another version; empty when up to date.

    With `same_triton` rows of another Triton are compared as if it were installed: sources and configurations.
    """
    rows = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    shipped = {}
    for name, (kernel, variant, _) in entries().items():
        version = rows[name]["triton"] if same_triton and name in rows else triton.__version__
        shipped[name] = fingerprint(kernel, variant, version)
    found = [f"missing: {name}" for name in shipped if name not in rows]
    found += [f"not shipped: {name}" for name in rows if name not in shipped]
    found += [f"changed: {n}" for n, h in shipped.items() if n in rows and rows[n]["fingerprint"] != h]
    found += [f"spills: {n}" for n in shipped if n in rows and rows[n]["hot"] and rows[n]["stack_bytes"]]
    found += [f"does not fit: {n}" for n in shipped if n in rows and rows[n]["shared_bytes"] > SHARED]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="compile what changed and write the table")
    parser.add_argument("--only", default="", help="compile only names that contain this text; nothing is written")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--same-triton", action="store_true", help="compare as if the table's Triton were installed")
    options = parser.parse_args()
    if options.write or options.only:
        names, rows = [name for name in entries() if options.only in name], {}
        if not names:
            raise SystemExit(f"--only: found no configuration whose name has {options.only!r} in it")
        if not options.only:
            old = json.loads(TABLE.read_text()) if TABLE.exists() else {}
            current = {name: fingerprint(k, v, triton.__version__) for name, (k, v, _) in entries().items()}
            rows = {n: r for n, r in old.items() if r["fingerprint"] == current.get(n)}
            rows = {n: r | {"hot": entries()[n][2]} for n, r in rows.items()}
            names = [name for name in names if name not in rows]
        with ProcessPoolExecutor(options.jobs) as pool:
            for name, row in pool.map(measure, names):
                rows[name] = row
                spilled = f"  SPILLS {row['stack_bytes']} B" if row["stack_bytes"] else ""
                print(
                    f"{name:52s} {row['registers']:4d} registers {row['shared_bytes']:7d} B shared "
                    f"{row['instructions']:6d} instructions {row['seconds']:6.1f} s{spilled}",
                    flush=True,
                )
        if options.only:
            return 0
        temporary = TABLE.with_suffix(".tmp")
        ordered = {name: rows[name] for name in entries()}
        temporary.write_text(json.dumps(ordered, indent=1) + "\n")
        os.replace(temporary, TABLE)
    problems = differences(options.same_triton)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{TABLE.name}: its {len(entries())} configurations are those that ship")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
