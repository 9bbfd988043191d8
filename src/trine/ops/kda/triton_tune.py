"""``trine tune kda``: choose the forward kernels' launch parameters on the card at hand, correct ones only.

Every candidate is first held to float64 (packed documents, fast and slow gates, fresh memory full of NaN, twice for the
same bits); the fastest that passes is kept. The result is the source of ``triton_table.py``: a table in the repository,
so that nothing is searched for at run time and a call's bits do not depend on what was measured that day.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from trine.ops import BackendUnavailable
from trine.ops.kda import kda
from trine.ops.kda.triton_config import Config, make_config
from trine.ops.kda.triton_prepare import make_problem, prepare
from trine.ops.kda.triton_scan import scan
from trine.ops.kda.triton_table import CARD, FORWARD, SEGMENTS

TABLE = Path(__file__).with_name("triton_table.py")
LIMITS = {"16-bit": 5e-3, "fp32": 2e-5}  # relative errors of output and state against float64
GAIN = 0.98  # a candidate replaces what is committed only if it takes less than this share of its time
Row = tuple[int, int, int, int]


class Trial(NamedTuple):
    """One candidate: milliseconds, or why it was refused."""

    row: Row
    ms: float | None
    refused: str | None


def render(card: str, forward: dict[tuple[str, int], Row], segments: Iterable[tuple[int, int]]) -> str:
    """The source of ``triton_table.py`` for these choices."""
    head, rows, tail = TABLE.read_text().split("\n\n", 1)[0], [], []
    rows += [f'CARD = "{card}"', ""]
    rows += [
        "# (operands, K padded): value channels a program of the scan, its warps and stages, warps of the first kernel."
    ]
    rows += ["FORWARD: dict[tuple[str, int], tuple[int, int, int, int]] = {"]
    rows += [f'    ("{kind}", {width}): {row},' for (kind, width), row in forward.items()]
    tail += ["}", ""]
    tail += ["# Value heads up to: tokens a segment. More heads than the last walk every sequence from end to end."]
    tail += ["SEGMENTS: tuple[tuple[int, int], ...] = (", *(f"    {pair}," for pair in segments), ")"]
    return head + "\n\n" + "\n".join(rows + tail) + "\n"


def fastest(rows: Iterable[Row], check: Callable[[Row], str | None], time: Callable[[Row], float]) -> list[Trial]:
    """Check, then time every row; best first, refused ones last."""
    trials = []
    for row in rows:
        refused = check(row)
        trials.append(Trial(row, None if refused else time(row), refused))
    return sorted(trials, key=lambda trial: math.inf if trial.ms is None else trial.ms)


def chosen(trials: list[Trial], committed: Row) -> Row:
    """The row to keep: the committed one unless it was refused or another is clearly faster.

    Raises:
        ValueError: every candidate was refused.
    """
    best = trials[0]
    if best.ms is None:
        raise ValueError(f"no candidate is correct here; the first was refused because {best.refused}")
    now = next((trial.ms for trial in trials if trial.row == committed), None)
    return committed if now is not None and best.ms > GAIN * now else best.row


def candidates(kind: str, width: int) -> list[Row]:
    """The committed row and its neighbours."""
    committed = FORWARD[kind, width]
    blocks = (32, 64, 128) if kind == "16-bit" else (16, 32, 64)
    warps, stages = (4, 8), (2, 3, 4) if kind == "16-bit" else (1, 2)
    rows = [(block, w, s, committed[3]) for block, w, s in product(blocks, warps, stages)]
    rows += [(*committed[:3], prepare_warps) for prepare_warps in (1, 2, 4, 8)]
    return [committed, *dict.fromkeys(row for row in rows if row != committed)]


def tune(say: Callable[[str], None], write: bool = False) -> str:
    """Tune on this card and return the source of the table; ``say`` gets a line a candidate.

    Args:
        say: where lines go.
        write: replace ``triton_table.py`` in this installation.

    Raises:
        BackendUnavailable: no CUDA card, or no triton.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable("tune kda: needs a CUDA card, found none")
    forward: dict[tuple[str, int], Row] = {}
    for kind, width in FORWARD:
        trials = fastest(
            candidates(kind, width),
            lambda row, kind=kind, width=width: check(kind, width, row),  # type: ignore[misc]
            lambda row, kind=kind, width=width: forward_ms(kind, width, row, 96, 0),  # type: ignore[misc]
        )
        for trial in trials:
            say(
                f"{kind} K{width} {trial.row}: {f'{trial.ms:.4f} ms' if trial.ms else 'refused: ' + str(trial.refused)}"
            )
        forward[kind, width] = chosen(trials, FORWARD[kind, width])
        say(f"{kind} K{width}: {forward[kind, width]}")
    segments = []
    for limit, committed in SEGMENTS:
        lengths = [*sorted({512, 1024, 2048, 4096, committed}), 0]
        times = {n: forward_ms("16-bit", 128, forward["16-bit", 128], limit, n) for n in lengths}
        say(f"{limit} heads: " + ", ".join(f"{n or 'serial'} {ms:.4f} ms" for n, ms in times.items()))
        best = min(times, key=lambda n: times[n])
        best = committed if times[best] > GAIN * times[committed] else best
        if best:
            segments.append((limit, best))
    text = render(torch.cuda.get_device_name(), forward, segments)
    if write:
        handle, temporary = tempfile.mkstemp(dir=TABLE.parent, prefix=TABLE.name, suffix=".tmp")
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, TABLE)
        say(f"wrote {TABLE}; `make compile-check ARGS=--write` then makes the table of compiled kernels anew")
    elif text != render(CARD, FORWARD, SEGMENTS):
        say("the choices differ from the committed ones; --write keeps them")
    return text


def draw(kind: str, width: int, tokens: int, heads: int, regime: str) -> dict[str, Tensor]:
    """Raw inputs on the card with K = V = ``width``."""
    make = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=make, device="cuda")

    wide = (1, tokens, heads, width)
    gate = 0.1 * normal(*wide) - 4 if regime == "slow" else normal(*wide)
    data = {"q": normal(*wide), "k": normal(*wide), "v": normal(*wide), "gate": gate, "beta": normal(1, tokens, heads)}
    return {name: x.to(torch.float32 if kind == "fp32" else torch.bfloat16) for name, x in data.items()}


def launch(
    data: dict[str, Tensor], config: Config, bounds: Tensor | None = None, error: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The forward pass under a configuration that need not be the committed one."""
    problem = make_problem(
        **data, a_log=None, dt_bias=None, lower_bound=-5.0, qk_norm=True, beta_is_logit=True, beta_max=1.0,
        scale=data["q"].shape[-1] ** -0.5, cu_seqlens=bounds, config=config, error=error,
    )  # fmt: skip
    return scan(problem, prepare(problem), None, bounds is not None, data["v"].dtype)[:2]


def configure(data: dict[str, Tensor], row: Row, segment: int) -> Config:
    """The configuration of a candidate for these inputs."""
    width, dtype = data["q"].shape[-1], data["q"].dtype
    return make_config(width, width, dtype, dtype, True, "", segment, row)


def check(kind: str, width: int, row: Row) -> str | None:
    """Why a candidate is refused, or None: wrong, not repeatable, or too large for the card."""
    lengths = torch.tensor([0, 0, 1, 34, 166, 166, 300], dtype=torch.int32, device="cuda")
    for regime, segment in (("fast", 0), ("slow", 64)):
        data = draw(kind, width, 300, 4, regime)
        exact = {name: x.double() for name, x in data.items()}
        options: dict[str, Any] = {"cu_seqlens": lengths, "output_final_state": True, "backend": "torch"}
        wanted, wanted_final = kda(*exact.values(), **options)
        error = torch.zeros(2, dtype=torch.int32, device="cuda")
        config = configure(data, row, segment)
        try:
            with _poisoned():
                (out, final), (again, _) = (launch(data, config, lengths, error) for _ in range(2))
        except OutOfResources as problem:
            return f"it does not fit: {problem}"
        assert final is not None and wanted_final is not None
        for name, found, truth in (("output", out, wanted), ("state", final, wanted_final)):
            gap = ((found.double() - truth).norm() / truth.norm()).item()
            if not gap <= LIMITS[kind]:
                return f"the {name}'s error with {regime} gates is {gap:.1e}, allowed {LIMITS[kind]:.0e}"
        if not torch.equal(out, again):
            return f"two runs with {regime} gates differ"
    return None


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fresh memory holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def forward_ms(kind: str, width: int, row: Row, heads: int, segment: int) -> float:
    """Median milliseconds of a CUDA-graph replay; few heads are given the long sequences they are used for."""
    tokens = 65536 if heads <= 8 else 8192 if kind == "16-bit" else 2048
    data = draw(kind, width, tokens, heads, "slow")
    config = configure(data, row, segment)
    launch(data, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(data, config)
    samples = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
    return statistics.median(samples[2:])
