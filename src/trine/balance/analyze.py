"""From saved loads: is there imbalance, does it last, is it one of experts or of ranks, and what would have alarmed.

Everything is judged against what chance alone does to loads of that size (`trine.balance.sampling_floor`), so that few
tokens are not taken for a bad router.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trine.balance.alerts import DEFAULT_RULES, Alert, Alerts
from trine.balance.metrics import (
    coefficient_of_variation,
    dead_over_steps,
    load_percentiles,
    max_violation,
    rank_overload,
    sampling_floors,
)
from trine.balance.record_format import MARGIN_LEVELS, Array, HostWindow
from trine.balance.recorder_reader import RecorderReader
from trine.balance.summary import Summaries

LAST_STEPS = 1000
"""Steps that are read of a recorder's file, the newest single ones."""
_FLOORS = 2.0  # a CV of more than so many floors is no chance
_WORTH = 0.2  # MaxVio below this costs nothing worth a word
_RANK_WORTH = 0.1  # overload of the fullest rank that is worth a word
_LASTS = 0.5  # correlation from which on loads count as the same
_FEWEST = 4  # steps from which on it can be said whether something lasts
_LOAD_RULES = ("p95", "dead", "max_vio", "rank_overload")  # rules that loads alone can answer


@dataclass(frozen=True)
class Loads:
    """Loads of successive steps.

    Attributes:
        source: file or folder they came from.
        steps_S: ``[S]`` int64 numbers of the steps, rising.
        loads_SLE: ``[S, L, E]`` int64 tokens of each expert.
        top_k: experts a token; 1 where it is not known (then loads are taken for tokens).
        windows_S: what a recorder kept of each step beside the loads, or nothing.
        notes: what could not be read.
    """

    source: str
    steps_S: Array
    loads_SLE: Array
    top_k: int = 1
    windows_S: tuple[HostWindow, ...] = ()
    notes: tuple[str, ...] = ()

    def windows(self) -> Iterator[HostWindow]:
        """The window of each step; without a recorder's, biases are 0 and nothing else was counted."""
        if self.windows_S:
            yield from self.windows_S
            return
        _, layers, experts = self.loads_SLE.shape
        none_L = np.zeros(layers, dtype=np.int64)
        margins_LQ = np.full((layers, len(MARGIN_LEVELS)), np.nan)
        for loads_LE in self.loads_SLE:
            bias_LE = np.zeros((layers, experts), dtype=np.float32)
            yield HostWindow(loads_LE, bias_LE, loads_LE.sum(-1) // self.top_k, none_L, none_L, none_L, margins_LQ)


@dataclass(frozen=True)
class LayerAnalysis:
    """What the loads of one MoE layer say. Means are over the steps that had tokens.

    Attributes:
        layer: number, from 0.
        cv, cv_floor: coefficient of variation, and what chance gives.
        max_vio, max_vio_floor: MaxVio, and what chance gives.
        p5, p95: percentiles of load over mean load.
        dead: experts without a token in all steps together, where more than 10 were due.
        uneven: CV above twice its floor, and MaxVio above 0.2.
        correlation: of the loads of two steps, by the distance of the steps; chance taken out; 1 is the same loads.
        lasts: ``"lasting"`` (the same experts a quarter of the steps later), ``"drifting"`` (at the next step only),
            ``"changing"`` (not even then), ``"unknown"`` (too few steps) or ``""`` (even).
        hottest: up to three experts of the highest mean load, with load over mean load.
        rank_overload, rank_floor: mean of the fullest rank's load over the ranks' mean, and what chance gives.
        uneven_ranks: its excess over 1 above twice the floor, and above 0.1.
    """

    layer: int
    cv: float
    cv_floor: float
    max_vio: float
    max_vio_floor: float
    p5: float
    p95: float
    dead: int
    uneven: bool
    correlation: Mapping[int, float]
    lasts: str
    hottest: tuple[tuple[int, float], ...]
    rank_overload: float
    rank_floor: float
    uneven_ranks: bool


@dataclass(frozen=True)
class Analysis:
    """The verdict on saved loads; `verdict` says it in sentences."""

    source: str
    steps: int
    first: int
    last: int
    experts: int
    ranks: int
    layers: tuple[LayerAnalysis, ...]
    alerts: tuple[Alert, ...]
    rules: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> list[str]:
        """Plain sentences: imbalance, how long it lasts, where it is, what would have alarmed, what may help."""
        return [*_on_experts(self.layers), *_on_ranks(self), *_on_alerts(self), *self.notes]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        values = asdict(self) | {"alerts": [alert.to_json() for alert in self.alerts], "verdict": self.verdict}
        for layer in values["layers"]:
            layer["correlation"] = {str(lag): value for lag, value in layer["correlation"].items()}
        return values


def read_loads(path: str | Path, last: int = LAST_STEPS) -> Loads:
    """Read saved loads.

    Args:
        path: a run's folder or its recorder's file; ``.npy`` or ``.npz`` (its array ``loads``, or its only one, and
            ``steps`` if there) with ``[S, L, E]`` or ``[S, E]`` token counts; or ``.csv``: a row a step and a column an
            expert, with or without names, or the columns ``step,layer,expert,load``, ``layer`` being optional.
        last: newest steps to read.

    Raises:
        ValueError: no such file, another kind, another shape, or a load that is no whole number of at least 0; the
            message names the file.
    """
    path = Path(path)
    if last < 1:
        raise ValueError(f"last: found {last}, need at least 1")
    if path.is_dir() or path.suffix == ".sqlite":
        return _from_recorder(path, last)
    if not path.is_file():
        raise ValueError(f"{path}: no such run or file")
    if path.suffix not in (".npy", ".npz", ".csv"):
        raise ValueError(f"{path}: found a file of kind {path.suffix!r}, need a run's folder, .npy, .npz or .csv")
    steps_S, loads = _from_csv(path) if path.suffix == ".csv" else _from_numpy(path)
    loads_SLE = _checked(path, loads)
    if steps_S is None:
        steps_S = np.arange(1, len(loads_SLE) + 1, dtype=np.int64)
    elif steps_S.shape != loads_SLE.shape[:1] or (np.diff(steps_S) <= 0).any():
        raise ValueError(f"{path}: steps: found shape {steps_S.shape}, need one rising number for each of the loads")
    return Loads(str(path), steps_S[-last:], loads_SLE[-last:])


def _checked(path: Path, loads: Array) -> Array:
    """``[S, L, E]`` int64."""
    if loads.ndim == 2:
        loads = loads[:, None]
    if loads.ndim != 3 or 0 in loads.shape:
        raise ValueError(f"{path}: loads: found shape {loads.shape}, need [steps, layers, experts] or [steps, experts]")
    if not (np.issubdtype(loads.dtype, np.integer) or np.issubdtype(loads.dtype, np.floating)):
        raise ValueError(f"{path}: loads: found values of type {loads.dtype}, need counts of tokens")
    whole = np.isfinite(loads) & (loads >= 0) & (loads == np.floor(loads)) & (loads < 2**53)
    if not whole.all():
        step, layer, expert = (int(one) for one in np.argwhere(~whole)[0])
        where = f"row {step}, layer {layer}, expert {expert}"
        raise ValueError(
            f"{path}: loads: found {loads[step, layer, expert]} at {where}, need counts of tokens: whole numbers of at "
            "least 0"
        )
    return loads.astype(np.int64)


def _from_numpy(path: Path) -> tuple[Array | None, Array]:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return None, found
        with found:
            names = [name for name in found.files if name != "steps"]
            name = "loads" if "loads" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise ValueError(f"{path}: found arrays {sorted(found.files)}, need one of the name loads")
            steps = found["steps"] if "steps" in found.files else None
            return (None if steps is None else steps.astype(np.int64)), found[name]
    except ValueError as error:
        raise error if str(error).startswith(str(path)) else ValueError(f"{path}: cannot be read ({error})") from error
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds for damaged files
        raise ValueError(f"{path}: cannot be read ({error})") from error


def _from_csv(path: Path) -> tuple[Array | None, Array]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin UTF-8 with a mark
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    names = [name.strip().lower() for name in rows[0]] if rows else []
    titled = any(name and not _is_number(name) for name in names)
    table = [[_number(path, number, cell) for cell in row] for number, row in enumerate(rows[titled:], 1 + titled)]
    if not table or any(len(row) != len(names) for row in table):
        raise ValueError(f"{path}: found {len(table)} rows of different or no length, need at least one, all as long")
    values = np.array(table)
    if titled and {"step", "expert", "load"} <= set(names) <= {"step", "layer", "expert", "load"}:
        return _from_long(path, {name: values[:, names.index(name)] for name in names})
    if titled and names[0] == "step":
        return values[:, 0].astype(np.int64), values[:, 1:]
    return None, values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(path: Path, row: int, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"{path}: row {row}: found {cell!r}, need a number") from None


def _from_long(path: Path, columns: Mapping[str, Array]) -> tuple[Array, Array]:
    """One row a step, layer and expert; what is left out is 0."""
    keys = {name: columns.get(name, np.zeros(len(columns["step"]))) for name in ("step", "layer", "expert")}
    for name, one in keys.items():
        if not (np.isfinite(one) & (one >= 0) & (one == np.floor(one)) & (one < 2**31)).all():
            raise ValueError(f"{path}: {name}: found values that are no whole numbers of at least 0")
    steps_S, step_N = np.unique(keys["step"].astype(np.int64), return_inverse=True)
    layer_N, expert_N = keys["layer"].astype(np.int64), keys["expert"].astype(np.int64)
    shape = (len(steps_S), int(layer_N.max()) + 1, int(expert_N.max()) + 1)
    if math.prod(shape) > 1 << 28:
        raise ValueError(f"{path}: found numbers up to {shape}, need at most 2**28 steps x layers x experts")
    cell_N = np.ravel_multi_index((step_N, layer_N, expert_N), shape)
    if len(np.unique(cell_N)) != len(cell_N):
        raise ValueError(f"{path}: found a step, layer and expert twice, need each once")
    loads = np.zeros(math.prod(shape))
    loads[cell_N] = columns["load"]
    return steps_S, loads.reshape(shape)


def _from_recorder(path: Path, last: int) -> Loads:
    with RecorderReader(path) as reader:
        points = [point for point in reader.points() if point.tier == 0][-last:]
        if not points or not reader.layers:
            raise ValueError(f"{reader.path}: found no single step of an MoE layer, need at least one")
        frames = [reader.arrays(point.last) for point in points]
        top_k = int(reader.meta["top_k"])
        notes = tuple(reader.notes)
    windows = tuple(
        HostWindow(
            # kept to 11 bits: a large load is a whole number again, not the one that was counted
            loads_LE=np.rint(frame.loads_LE).astype(np.int64),
            bias_LE=frame.bias_LE,
            tokens_L=frame.tokens_L,
            dropped_L=frame.dropped_L,
            saturated_L=frame.saturated_L,
            overflow_L=frame.overflow_L,
            margins_LQ=frame.margins_LQ,
        )
        for frame in frames
    )
    steps_S = np.array([frame.last for frame in frames], dtype=np.int64)
    return Loads(str(path), steps_S, np.stack([one.loads_LE for one in windows]), top_k, windows, notes)


def analyze(loads: Loads, ranks: int = 1) -> Analysis:
    """Judge saved loads.

    Args:
        loads: of at least one step.
        ranks: expert-parallel ranks, each with a row of neighbouring experts.

    Raises:
        ValueError: ``ranks`` does not divide the number of experts, or no step has a token.
    """
    _, layers, experts = loads.loads_SLE.shape
    if ranks < 1 or experts % ranks:
        raise ValueError(f"ranks: found {ranks}, need a divisor of the {experts} experts")
    if not loads.loads_SLE.any():
        raise ValueError(f"{loads.source}: found no token in any step, need at least one")
    alerts, rules = _replay(loads, ranks)
    return Analysis(
        source=loads.source,
        steps=len(loads.steps_S),
        first=int(loads.steps_S[0]),
        last=int(loads.steps_S[-1]),
        experts=experts,
        ranks=ranks,
        layers=tuple(_layer(layer, loads.loads_SLE[:, layer], loads.top_k, ranks) for layer in range(layers)),
        alerts=tuple(alerts),
        rules=rules,
        notes=loads.notes,
    )


def _layer(layer: int, loads_SE: Array, top_k: int, ranks: int) -> LayerAnalysis:
    counted_SE = torch.from_numpy(loads_SE[loads_SE.sum(-1) > 0])
    experts = counted_SE.shape[1]
    if not len(counted_SE):  # an idle layer: even, as `trine.balance.metrics` has it
        return LayerAnalysis(layer, 0, 0, 0, 0, 1, 1, 0, False, {}, "", (), 1, 0, False)
    tokens_S = counted_SE.sum(-1) // top_k
    cv_floor_S, vio_floor_S, _ = sampling_floors(tokens_S, top_k, experts)
    percentiles = load_percentiles(counted_SE)
    cv, max_vio = float(coefficient_of_variation(counted_SE).mean()), float(max_violation(counted_SE).mean())
    cv_floor, vio_floor = float(cv_floor_S.mean()), float(vio_floor_S.mean())
    uneven = cv > _FLOORS * cv_floor and max_vio > _WORTH
    relative_SE = (counted_SE.double() / counted_SE.double().mean(-1, keepdim=True)).numpy()
    correlation = _correlation(relative_SE - 1.0, float(cv_floor_S.square().mean()))
    mean_E = relative_SE.mean(0)
    hottest = tuple((int(expert), float(mean_E[expert])) for expert in np.argsort(-mean_E, kind="stable")[:3])
    # a rank's load is the sum of E / ranks experts'; the largest of the ranks' deviations counts
    rank_floor = cv_floor * math.sqrt(ranks / experts * 2.0 * math.log(ranks))
    overload = float(rank_overload(counted_SE, ranks).mean())
    return LayerAnalysis(
        layer=layer,
        cv=cv,
        cv_floor=cv_floor,
        max_vio=max_vio,
        max_vio_floor=vio_floor,
        p5=float(percentiles.p5.mean()),
        p95=float(percentiles.p95.mean()),
        dead=int(dead_over_steps(counted_SE)),
        uneven=uneven,
        correlation=correlation,
        lasts=_lasts(correlation, len(counted_SE)) if uneven else "",
        hottest=hottest,
        rank_overload=overload,
        rank_floor=rank_floor,
        uneven_ranks=overload - 1.0 > max(_FLOORS * rank_floor, _RANK_WORTH),
    )


def _correlation(deviation_SE: Array, noise: float) -> dict[int, float]:
    """Correlation of deviations from the even load, some steps apart, by the distance.

    Chance adds ``noise`` to the variance of each step and nothing to the product of two steps, so it is taken out of
    the denominator. Empty where there is no more than chance.
    """
    steps = len(deviation_SE)
    signal = float((deviation_SE**2).mean()) - noise
    if signal <= noise:
        return {}
    lags = sorted({2**power for power in range(20) if 2**power < steps} | {steps // 4 or 1} & set(range(1, steps)))
    products = {lag: float((deviation_SE[lag:] * deviation_SE[:-lag]).mean()) for lag in lags}
    return {lag: max(-1.0, min(1.0, product / signal)) for lag, product in products.items()}


def _lasts(correlation: Mapping[int, float], steps: int) -> str:
    if steps < _FEWEST or not correlation:
        return "unknown"
    if correlation[steps // 4] >= _LASTS:
        return "lasting"
    return "drifting" if correlation[1] >= _LASTS else "changing"


def _replay(loads: Loads, ranks: int) -> tuple[list[Alert], tuple[str, ...]]:
    """What the default rules would have said, and which of them could be asked."""
    _, layers, experts = loads.loads_SLE.shape
    asked = [rule for rule in DEFAULT_RULES if rule.name not in ("stale", "bias_mismatch")]
    if not loads.windows_S:
        asked = [rule for rule in asked if rule.name in _LOAD_RULES]
    summaries = Summaries(layers, experts, loads.top_k, ranks)
    alerts = Alerts(layers, experts, loads.top_k, ranks, tuple(asked))
    found: list[Alert] = []
    for step, window in zip(loads.steps_S, loads.windows(), strict=True):
        found += alerts.step(summaries.step(int(step), window))
    return found, tuple(rule.name for rule in asked)


def _named(layers: list[LayerAnalysis]) -> str:
    numbers = [str(one.layer) for one in layers]
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:8])}{more}"


_MEANING = {
    "lasting": "the same experts are full or empty throughout: a bias policy can remove it (balance.policy qb)",
    "drifting": "which experts are full changes slowly: a bias solved at every step follows it (balance.policy qb)",
    "changing": "other experts are full at each step: no bias can foresee it; take more tokens a step",
    "unknown": f"too few steps to say whether it lasts: {_FEWEST} are needed",
}


def _on_experts(layers: tuple[LayerAnalysis, ...]) -> list[str]:
    uneven = [one for one in layers if one.uneven]
    lines = []
    if not uneven:
        worst = max(layers, key=lambda one: one.max_vio)
        lines.append(
            f"Experts are even: MaxVio is at most {worst.max_vio:.2f} on average (layer {worst.layer}), where chance "
            f"gives {worst.max_vio_floor:.2f}."
        )
    for kind, meaning in _MEANING.items():
        those = [one for one in uneven if one.lasts == kind]
        if those:
            worst = max(those, key=lambda one: one.max_vio)
            lines.append(
                f"Experts are uneven in {_named(those)}: MaxVio {worst.max_vio:.2f} against {worst.max_vio_floor:.2f} "
                f"by chance, P95 of load over mean {worst.p95:.2f} (layer {worst.layer}); {meaning}."
            )
    dead = [one for one in layers if one.dead]
    if dead:
        lines.append(f"{sum(one.dead for one in dead)} experts got no token in any step, in {_named(dead)}.")
    return lines


def _on_ranks(analysis: Analysis) -> list[str]:
    if analysis.ranks == 1:
        return []
    uneven = [one for one in analysis.layers if one.uneven_ranks]
    worst = max(analysis.layers, key=lambda one: one.rank_overload)
    found = f"the fullest of {analysis.ranks} ranks has {worst.rank_overload:.2f} times the mean (layer {worst.layer})"
    if not uneven:
        return [f"Ranks are even: {found}, where chance gives {1 + worst.rank_floor:.2f}."]
    only = " Experts are even there, so another placement of experts on ranks may be enough."
    return [f"Ranks are uneven in {_named(uneven)}: {found}." + only * (not any(one.uneven for one in uneven))]


def _on_alerts(analysis: Analysis) -> list[str]:
    begun: dict[str, list[Alert]] = {}
    for alert in analysis.alerts:
        if alert.begins:
            begun.setdefault(alert.rule, []).append(alert)
    if not begun:
        return [f"No alert would have begun ({', '.join(analysis.rules)})."]
    return [
        f"Alert {rule} would have begun at step {', '.join(str(alert.step) for alert in those[:5])}"
        f"{' and later' if len(those) > 5 else ''}: {those[0].text}."
        for rule, those in begun.items()
    ]
