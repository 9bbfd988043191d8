"""Which lower bound g_min fits which tile, number format and anchor, what it costs, and where a model's gates live.

`sweep` answers the first, `gates_of` the second, `recommend` puts both into words; everything is JSON-ready. How the
range is judged: `trine.decay.calibrate_range`; how the error is measured: `trine.decay.calibrate_error`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trine._log import logger
from trine.data import Shards
from trine.data._files import write_atomically
from trine.decay.calibrate_error import errors
from trine.decay.calibrate_gates import file_kind, gates_of_file, gates_of_model, held_out_rows, read_file
from trine.decay.calibrate_range import ANCHORS, CAUSAL, Setting, evaluate, judge, largest_bound
from trine.train.stored import load_run

FORMAT_VERSION = 1

# What an article that is often copied has the wrong way round.
NOTE = (
    "A larger |g_min| costs numerical range: the exponents inside a tile grow with tile x |g_min|. All it buys is "
    "faster forgetting (a channel remembers at least 1/|g_min| tokens); the longest memory has no limit at any g_min. "
    "Texts that say a small |g_min| brings too little numerical benefit have it inverted."
)


@dataclass(frozen=True)
class Grid:
    """What `sweep` runs over: every combination.

    Raises:
        ValueError: an empty axis, or a value out of range.
    """

    g_min: tuple[float, ...] = (-1.0, -2.0, -2.5, -5.0, -5.5, -8.0, -10.0)
    tile: tuple[int, ...] = (16, 32, 64)
    format: tuple[str, ...] = ("fp16", "bf16", "tf32")
    anchor: tuple[str, ...] = tuple(ANCHORS)
    head_dim: tuple[int, ...] = (64, 128)
    length: tuple[int, ...] = (256, 1024)  # of the sequences that the error is measured on

    def __post_init__(self) -> None:
        for name in ("g_min", "tile", "format", "anchor", "head_dim", "length"):
            if not getattr(self, name):
                raise ValueError(f"{name}: found no value, need at least one")
        if min(self.length) < 1:
            raise ValueError(f"length: found {min(self.length)}, need at least 1 token")
        for _ in self.settings():
            pass

    def settings(self) -> Iterable[Setting]:
        """All points except for the sequence length, on which the range does not depend."""
        for g_min in self.g_min:
            for tile in self.tile:
                for head_dim in self.head_dim:
                    for anchor in self.anchor:
                        for name in self.format:
                            yield Setting(g_min, tile, name, anchor, head_dim)


def sweep(grid: Grid | None = None, *, measure: bool = True, check: bool = True) -> dict[str, Any]:
    """Judge every point of the grid.

    Args:
        grid: None takes the default one, about half a minute on one core.
        measure: also measure the error of the range-safe points at each sequence length.
        check: also ask the numbers themselves (`evaluate`) and list every disagreement with the closed form.

    Returns:
        ``note``, ``grid``, ``points`` (setting, verdict, ``error`` by length: [outputs, state]), ``limits`` (largest
        safe |g_min|), ``memory`` (what a bound can forget and must do to remember), ``brute_force``.
    """
    grid = grid or Grid()
    points: list[dict[str, Any]] = []
    disagreements = []
    for setting in grid.settings():
        verdict = judge(setting)
        points.append({**asdict(setting), **asdict(verdict), "error": {}})
        if check:
            found = evaluate(setting)
            if found.safe != verdict.safe:
                disagreements.append({**asdict(setting), "closed_form": verdict.safe, "evaluated": asdict(found)})
    if measure:
        _measure(points, grid.length)
    return {
        "format_version": FORMAT_VERSION,
        "note": NOTE,
        "grid": {name: list(values) for name, values in asdict(grid).items()},
        "anchors": {name: ANCHORS[name] for name in grid.anchor},
        "points": points,
        "limits": [
            {"tile": c, "format": f, "anchor": a, "head_dim": k, "largest": largest_bound(c, f, a, k)}
            for c in grid.tile for a in grid.anchor for f in grid.format for k in grid.head_dim
        ],
        "memory": [memory(g, grid.length) for g in grid.g_min],
        "brute_force": {"checked": len(points) if check else 0, "disagreements": disagreements},
        "gates": None,
    }  # fmt: skip


def _measure(points: list[dict[str, Any]], lengths: Sequence[int]) -> None:
    """Fill in ``error`` of the safe points; formats and anchors of a tile run side by side."""
    groups: dict[tuple[float, int, int], list[dict[str, Any]]] = {}
    for point in points:
        if point["safe"]:
            groups.setdefault((point["g_min"], point["head_dim"], point["tile"]), []).append(point)
    for (g_min, head_dim, tile), together in sorted(groups.items()):
        ways = [(point["format"], point["anchor"]) for point in together]
        for length in lengths:
            for point, found in zip(together, errors(g_min, tile, head_dim, length, ways), strict=True):
                point["error"][str(length)] = list(found)


def memory(g_min: float, lengths: Sequence[int]) -> dict[str, Any]:
    """How long channels of a bound remember, in tokens until 1/e is left of a state.

    Returns:
        ``shortest``: 1/|g_min|, of a saturated channel; ``left_after_one``: share of the state a saturated channel
        keeps after one token; ``logit``: by sequence length, the gate's logit exp(A_log) (x + dt_bias) that makes a
        channel's memory that long: a larger |g_min| asks for a lower one.
    """

    def logit(length: int) -> float | None:
        share = 1 / (length * -g_min)
        return math.log(share / (1 - share)) if share < 1 else None  # shorter than the bound's shortest memory

    return {
        "g_min": g_min,
        "shortest": -1 / g_min,
        "left_after_one": math.exp(g_min),
        "logit": {str(length): logit(length) for length in lengths},
    }  # fmt: skip


def gates_of(
    path: str | Path, *, kind: str | None = None, g_min: float | None = None, tokens: int = 8192, length: int = 1024
) -> dict[str, Any]:
    """Where the gates of a run, a checkpoint or a safetensors file live.

    Args:
        path: a run's folder or one of its checkpoints (its own held-out text goes through the model), or a safetensors
            file (gate inputs are sampled).
        kind: of a file's gates, when neither its metadata nor a ``config.json`` beside it says.
        g_min: the same for the bound.
        tokens: of held-out text, or sampled (an eighth of it).
        length: longest sequence.

    Returns:
        ``kind``, ``g_min``, ``inputs``, ``length`` and ``layers``: `trine.decay.calibrate_gates.summarise` of each.

    Raises:
        ValueError: no gates, shapes that do not fit, an unknown kind.
        trine.train.errors.RunError: no run or a damaged one.
    """
    path = Path(path)
    if path.is_dir():
        run = load_run(path)
        rows = held_out_rows(Shards.open(run.path / "data"), tokens, length)
        return {"source": str(path), "step": run.step, **gates_of_model(run.model, rows)}
    file = read_file(path)
    told, bound = file_kind(file)
    kind = kind or told
    if kind not in ("bounded", "softplus"):
        raise ValueError(f"{path}: nothing says whether its gates are bounded, need --gate-kind bounded or softplus")
    bound = g_min if bound is None else bound
    return {"source": str(path), "step": None, **gates_of_file(file, kind, bound, length, max(1, tokens // 8))}


def recommend(result: Mapping[str, Any]) -> list[str]:
    """What follows from a sweep, and from a model's gates when the result holds them; one sentence each."""
    grid = result["grid"]
    k = max(grid["head_dim"])
    lines = []
    for name in grid["format"]:
        best = [
            (limit["tile"], limit["largest"], limit["anchor"])
            for limit in result["limits"]
            if limit["format"] == name and limit["head_dim"] == k and limit["largest"] is not None
            and limit["anchor"] in CAUSAL
        ]  # fmt: skip
        if best:
            tops = []
            for tile in sorted({tile for tile, _, _ in best}):
                bound, anchor = max((largest, anchor) for t, largest, anchor in best if t == tile)
                tops.append(f"{tile} rows up to |g_min| = {bound:g} ({anchor})")
            lines.append(f"{name}, K = {k}, causal anchors: {'; '.join(tops)}.")
    gates = result.get("gates")
    if gates is not None:
        lines += _recommend_for(gates)
    return lines


def _recommend_for(gates: Mapping[str, Any]) -> list[str]:
    layers = gates["layers"]
    channels = sum(layer["channels"] for layer in layers)
    stuck = sum(layer["at_bound"] for layer in layers)
    forever = sum(layer["never_forget"] for layer in layers)
    strongest = min(layer["strongest"] for layer in layers)
    usual = min(layer["g"]["p1"] for layer in layers)
    where = "on sampled inputs, so as a guess" if gates["inputs"] == "sampled" else "on held-out text"
    lines = [
        f"{forever} of {channels} channels remember longer than {gates['length']} tokens; the strongest gate seen is "
        f"{strongest:.3g}, and 99 % are above {usual:.3g} in every layer ({where})."
    ]
    if gates["kind"] != "bounded":
        lines.append(
            f"These gates have no bound. A bounded gate needs |g_min| above {-strongest:.3g} to reach all of them; "
            "`trine migrate softplus-to-bounded` says what a smaller one would change."
        )
        return lines
    bound = -gates["g_min"]
    if stuck > 0.05 * channels:
        lines.append(
            f"{stuck} of {channels} channels sit at the bound: they want to forget faster than g_min = {-bound:g} lets "
            "them. At e^g_min a state is all but gone, so this seldom matters; raise |g_min| only where the tile has "
            "room."
        )
    elif -strongest < bound / 2:
        lines.append(
            f"No gate comes near half of g_min = {-bound:g}: a model trained anew with g_min = {-bound / 2:g} would "
            "have twice the range inside a tile. Do not change g_min of trained weights: every decay would change."
        )
    else:
        lines.append(f"{stuck} of {channels} channels sit at the bound; keep g_min = {-bound:g}.")
    return lines


def calibrate(
    grid: Grid | None = None,
    source: str | Path | None = None,
    *,
    kind: str | None = None,
    g_min: float | None = None,
    tokens: int = 8192,
    length: int = 1024,
) -> dict[str, Any]:
    """Sweep, gates of a model, recommendation: what ``trine calibrate`` prints and writes.

    Args:
        grid: see `sweep`.
        source: see `gates_of`; None only sweeps.
        kind, g_min, tokens, length: see `gates_of`.

    Returns:
        `sweep`'s result with ``gates`` filled in and ``recommendation``, a list of sentences.
    """
    gates = None if source is None else gates_of(source, kind=kind, g_min=g_min, tokens=tokens, length=length)
    result = {**sweep(grid), "gates": gates}
    return {**result, "recommendation": recommend(result)}


def save_json(result: Mapping[str, Any], path: Path) -> None:
    """Write a result whole, or not at all.

    Raises:
        DataError: the folder is missing or not writable.
    """
    write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
    logger.info("wrote %s", path)
