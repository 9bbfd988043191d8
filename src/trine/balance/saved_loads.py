"""Saved loads, from wherever they are: a run's recorder with what the run tells of itself, arrays, or tables."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trine.balance.alerts import Alert
from trine.balance.record_format import FILE_NAME, MARGIN_LEVELS, Array, HostWindow
from trine.balance.recorder_reader import RecorderReader
from trine.config import BalanceConfig

LAST_STEPS = 1000
"""Steps that are read of a recorder's file, the newest single ones."""
TOLD_RULES = ("stale",)
"""Rules that only the run itself can judge: what its controller did is in no load."""
_NUMBER = "whole numbers of at least 0"
_MOST_EXPERTS = 1 << 16  # of a table; a larger number is a slip, and would cost time and memory for nothing
_LONG = ("step", "expert", "load")  # columns of a table with a row an expert; layer may be there
_EXACT = 2**53  # whole numbers below it are exact in fp64

Place = Callable[[int], str]
"""Where a row stands in its file, in words."""


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
        balance: the policy they came about under; None where it is not known.
        told: alerts of `TOLD_RULES` that the run told of; None where it keeps no events.
    """

    source: str
    steps_S: Array
    loads_SLE: Array
    top_k: int = 1
    windows_S: tuple[HostWindow, ...] = ()
    notes: tuple[str, ...] = ()
    balance: BalanceConfig | None = None
    told: tuple[Alert, ...] | None = None

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


def read_loads(path: str | Path, last: int = LAST_STEPS) -> Loads:
    """Read saved loads.

    Args:
        path: a run's folder or its recorder's file; ``.npy`` or ``.npz`` (its array ``loads``, or its only one, and
            ``steps`` if there) with ``[S, L, E]`` or ``[S, E]`` token counts; or ``.csv``: a row a step and a column an
            expert, with or without names, the first of which may be ``step``, or the columns ``step,layer,expert,load``
            in any order of rows, ``layer`` being optional and other columns ignored. What has no row there counts as 0;
            notes say how many, and which layers of the table the layers are if those are not 0, 1, 2 ….
        last: newest steps to read.

    Raises:
        ValueError: no such file, another kind, another shape, a load that is no whole number of at least 0, or numbers
            of steps that are none or do not rise; the message names the file and the place: the row of an array, from
            0, or the line of a table, from 1.
    """
    path = Path(path)
    if last < 1:
        raise ValueError(f"last: found {last}, need at least 1")
    if path.is_dir() and not (path / FILE_NAME).exists():
        what = "this run recorded none (recorder off)" if (path / "run.json").exists() else "it is no run's folder"
        raise ValueError(f"{path}: found no {FILE_NAME} in it, {what}; need a recorded run, .npy, .npz or .csv")
    if path.is_dir() or path.suffix == ".sqlite":
        return _from_recorder(path, last)
    if not path.is_file():
        raise ValueError(f"{path}: no such run or file")
    if not path.stat().st_size:
        raise ValueError(f"{path}: found an empty file, need loads")
    if path.suffix not in (".npy", ".npz", ".csv"):
        raise ValueError(f"{path}: found a file of kind {path.suffix!r}, need a run's folder, .npy, .npz or .csv")
    notes: list[str] = []
    steps_S, loads_SLE = _from_csv(path, notes) if path.suffix == ".csv" else _from_numpy(path)
    return Loads(str(path), steps_S[-last:], loads_SLE[-last:], notes=tuple(notes))


# -- arrays and tables -------------------------------------------------------------------------------------------------


def _row(index: int) -> str:
    return f"row {index}"


def _bad(values: Array, below: int = _EXACT) -> Array:
    """Where values are no whole numbers of at least 0."""
    return ~(np.isfinite(values) & (values >= 0) & (values == np.floor(values)) & (values < below))


def _whole(path: Path, name: str, values_N: Array, place: Place, below: int = _EXACT) -> Array:
    """A column of whole numbers, ``[N]`` int64."""
    for index in np.flatnonzero(_bad(values_N, below)).tolist():
        need = f"{_NUMBER}, below 2**{below.bit_length() - 1}"
        raise ValueError(f"{path}: {name}: found {values_N[index]} at {place(index)}, need {need}")
    return values_N.astype(np.int64)


def _rising(path: Path, steps_S: Array, place: Place) -> Array:
    """Numbers of steps, ``[S]`` int64."""
    found = _whole(path, "steps", steps_S, place)
    for index in (np.flatnonzero(np.diff(found) <= 0) + 1).tolist():
        raise ValueError(
            f"{path}: steps: found {found[index]} at {place(index)} after {found[index - 1]}, need each number larger "
            "than the one before"
        )
    return found


def _counts(path: Path, loads: Array, place: Place = _row) -> Array:
    """``[S, L, E]`` int64."""
    if loads.ndim == 2:
        loads = loads[:, None]
    if loads.ndim != 3 or 0 in loads.shape:
        raise ValueError(f"{path}: loads: found shape {loads.shape}, need [steps, layers, experts] or [steps, experts]")
    if loads.dtype.kind not in "iuf":
        raise ValueError(f"{path}: loads: found values of type {loads.dtype}, need counts of tokens")
    for step, layer, expert in np.argwhere(_bad(loads)).tolist():
        raise ValueError(
            f"{path}: loads: found {loads[step, layer, expert]} at {place(step)}, layer {layer}, expert {expert}, need "
            f"counts of tokens: {_NUMBER}"
        )
    return loads.astype(np.int64)


def _from_numpy(path: Path) -> tuple[Array, Array]:
    steps: Array | None = None
    with path.open("rb") as file:
        begins = file.read(6)
    if begins != b"\x93NUMPY" and not begins.startswith(b"PK"):
        raise ValueError(
            f"{path}: cannot be read: found a file that begins {begins!r}, need one that numpy.save(z) wrote"
        )
    try:
        found = np.load(path, allow_pickle=False)
        if not isinstance(found, np.ndarray):
            with found:
                names = [name for name in found.files if name != "steps"]
                name = "loads" if "loads" in names else names[0] if len(names) == 1 else None
                if name is None:
                    raise ValueError(f"{path}: found arrays {sorted(found.files)}, need one of the name loads")
                steps = found["steps"] if "steps" in found.files else None
                found = found[name]
    except ValueError as error:
        raise error if str(error).startswith(str(path)) else ValueError(f"{path}: cannot be read ({error})") from error
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds for damaged files
        raise ValueError(f"{path}: cannot be read ({error})") from error
    loads_SLE = _counts(path, found)
    if steps is None:
        return np.arange(1, len(loads_SLE) + 1, dtype=np.int64), loads_SLE
    if steps.shape != loads_SLE.shape[:1] or steps.dtype.kind not in "iuf":
        raise ValueError(
            f"{path}: steps: found shape {steps.shape} of {steps.dtype}, need one number for each of the "
            f"{len(loads_SLE)} rows of loads"
        )
    return _rising(path, steps, _row), loads_SLE


def _from_csv(path: Path, notes: list[str]) -> tuple[Array, Array]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin UTF-8 with a mark
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    names = [name.strip().lower() for name in rows[0][1]] if rows else []
    for sign, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and sign in names[0]:
            raise ValueError(f"{path}: line {rows[0][0]}: found {word} between cells, need commas")
    titled = any(name and not _is_number(name) for name in names)
    lines = [number for number, _ in rows[titled:]]
    if not lines:
        raise ValueError(
            f"{path}: found {'names of columns and ' if titled else ''}no row of numbers, need at least one"
        )
    long = titled and set(_LONG) <= set(names)
    strange = [name for name in ("layer", "expert", "load") if name in names] if titled and not long else []
    if strange:
        missing = " and ".join(name for name in _LONG if name not in names)
        raise ValueError(
            f"{path}: line {rows[0][0]}: found the column {strange[0]} and none of the name {missing}: need step, "
            "expert, load, and layer if there are several; or a column an expert"
        )
    chosen = [i for i, name in enumerate(names) if name in (*_LONG, "layer")] if long else list(range(len(names)))
    if long and len(chosen) > len({names[i] for i in chosen}):
        twice = next(names[i] for i in chosen if names.count(names[i]) > 1)
        raise ValueError(f"{path}: line {rows[0][0]}: found the column {twice} twice, need it once")
    if len(chosen) < len(names):
        ignored = ", ".join(name or "one without a name" for i, name in enumerate(names) if i not in chosen)
        notes.append(f"{path}: columns that are not read: {ignored}.")
    values = np.array([_numbers(path, number, row, len(names), chosen) for number, row in rows[titled:]])

    def place(index: int) -> str:
        return f"line {lines[index]}"

    if long:
        return _from_long(path, {names[i]: values[:, at] for at, i in enumerate(chosen)}, place, notes)
    if titled and names[0] in ("step", "steps"):
        return _rising(path, values[:, 0], place), _counts(path, values[:, 1:], place)
    return np.arange(1, len(values) + 1, dtype=np.int64), _counts(path, values, place)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(path: Path, line: int, row: Sequence[str], columns: int, chosen: Sequence[int]) -> list[float]:
    if len(row) != columns:
        raise ValueError(f"{path}: line {line}: found {len(row)} cells, need {columns}, as in the first line")
    cells = [row[i] for i in chosen]
    for cell in cells:
        if not _is_number(cell):
            raise ValueError(f"{path}: line {line}: found {cell!r}, need a number")
    return [float(cell) for cell in cells]


def _from_long(path: Path, columns: Mapping[str, Array], place: Place, notes: list[str]) -> tuple[Array, Array]:
    """One row a step, layer and expert; what is left out is 0."""
    none_N = np.zeros(len(columns["step"]))
    step_N, layer_N, expert_N = (
        _whole(path, name, columns.get(name, none_N), place, below)
        for name, below in (("step", 2**31), ("layer", 2**31), ("expert", _MOST_EXPERTS))
    )
    load_N = _whole(path, "load", columns["load"], place)
    steps_S, index_N = np.unique(step_N, return_inverse=True)
    layers_L, place_N = np.unique(layer_N, return_inverse=True)
    shape = (len(steps_S), len(layers_L), int(expert_N.max()) + 1)
    if math.prod(shape) > 1 << 28:
        found = " x ".join(map(str, shape))
        raise ValueError(f"{path}: found {found} steps x layers x experts, need at most 2**28 in all")
    cell_N = np.ravel_multi_index((index_N, place_N, expert_N), shape)
    _, first_N = np.unique(cell_N, return_index=True)
    for index in np.setdiff1d(np.arange(len(cell_N)), first_N)[:1].tolist():
        raise ValueError(
            f"{path}: found step {step_N[index]}, layer {layer_N[index]}, expert {expert_N[index]} a second time at "
            f"{place(index)}, need each once"
        )
    loads = np.zeros(math.prod(shape), dtype=np.int64)
    loads[cell_N] = load_N
    if layers_L[-1] != len(layers_L) - 1:
        first, shown = len(layers_L) - 1, ", ".join(map(str, layers_L[:8])) + " …" * (len(layers_L) > 8)
        notes.append(f"{path}: its layers {shown} are called 0 to {first} here.")
    if len(cell_N) < len(loads):
        missing = len(loads) - len(cell_N)
        notes.append(f"{path}: {missing} of {len(loads)} experts of steps and layers have no row: counted as 0.")
    return steps_S, loads.reshape(shape)


# -- runs --------------------------------------------------------------------------------------------------------------


def _from_recorder(path: Path, last: int) -> Loads:
    with RecorderReader(path) as reader:
        points = [point for point in reader.points() if point.tier == 0][-last:]
        if not points or not reader.layers:
            raise ValueError(f"{reader.path}: found no single step of an MoE layer, need at least one")
        frames = [reader.arrays(point.last) for point in points]
        top_k = int(reader.meta["top_k"])
        folder, notes = reader.path.parent, list(reader.notes)
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
    return Loads(
        source=str(path),
        steps_S=steps_S,
        loads_SLE=np.stack([one.loads_LE for one in windows]),
        top_k=top_k,
        windows_S=windows,
        balance=_policy(folder / "run.json", notes),
        told=_told(folder / "events.jsonl", int(steps_S[0]), int(steps_S[-1]), notes),
        notes=tuple(notes),
    )


def _policy(path: Path, notes: list[str]) -> BalanceConfig | None:
    """What a run's record says of its balancing; where it cannot be read a note says so."""
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
        return BalanceConfig(**config["balance"]) if "balance" in config else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        notes.append(f"{path}: its balance policy cannot be read ({error}); advice is for a run without one.")
        return None


def _told(path: Path, first: int, last: int, notes: list[str]) -> tuple[Alert, ...] | None:
    """Alerts of `TOLD_RULES` in a run's events, of these steps; and one from before that was still on."""
    if not path.is_file():
        return None
    before: dict[str, Alert] = {}
    found: dict[tuple[str, int, bool], Alert] = {}  # a step that was repeated after a rollback tells it twice
    unread = 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        notes.append(f"{path}: cannot be read ({error.strerror}).")
        return None
    for line in lines:
        try:
            event = json.loads(line)
            if event.get("kind") != "balance_alert" or event.get("rule") not in TOLD_RULES:
                continue
            alert = _alert(event)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            unread += 1
            continue
        if alert.step < first:
            before[alert.rule] = alert
        elif alert.step <= last:
            found[alert.rule, alert.step, alert.begins] = alert
    if unread:
        notes.append(f"{path}: {unread} of its lines cannot be read.")
    on = [alert for alert in before.values() if alert.begins]
    return tuple(sorted((*on, *found.values()), key=lambda alert: alert.step))


def _alert(event: Mapping[str, Any]) -> Alert:
    value = event["value"]
    return Alert(
        step=int(event["step"]),
        rule=str(event["rule"]),
        begins=bool(event["begins"]),
        layers=tuple(int(layer) for layer in event["layers"]),
        count=int(event["count"]),
        value=math.nan if value is None else float(value),
        level=float(event["level"]),
        text=str(event["text"]),
    )
