"""Where a model's decay gates live: held-out text through the model, or sampled inputs when there is only a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trine.data import DataError, Shards
from trine.decay.migrate_layout import GateTensors, find_gates, gate_tensor_names, read_gate
from trine.model import Model
from trine.ops.cross_entropy import token_losses
from trine.ops.kda.gate import log_decay

# A gate beyond this share of g_min has a slope of less than 2 % of its steepest: it hardly learns from where it is.
AT_BOUND = 0.995
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass(frozen=True)
class Rows:
    """Packed held-out text for a pass through a model: as in `trine.data.Batch`, without weights."""

    tokens_T: Tensor
    targets_T: Tensor
    cu_seqlens_N1: Tensor


def held_out_rows(shards: Shards, tokens: int, length: int, per_pass: int = 4096) -> list[Rows]:
    """Beginnings of held-out documents, near-copies last, up to a budget.

    Args:
        shards: the data.
        tokens: how many in all, at most (at least one sequence is taken).
        length: longest sequence.
        per_pass: tokens of one pass, at most (one sequence may be longer).

    Raises:
        DataError: nothing is held out.
    """
    chosen = shards.select("held_out").tolist()
    if not chosen:
        raise DataError(f"{shards.folder}: holds no held-out document, need one to see gates at work")
    chosen.sort(key=lambda i: (shards.documents[i].near_copy, i))
    end = shards.tokenizer.eod_id
    rows: list[Rows] = []
    parts: list[np.ndarray] = []
    taken = 0

    def close() -> None:
        if parts:
            bounds = np.cumsum([0] + [part.size - 1 for part in parts])
            tokens_T, targets_T = (
                torch.from_numpy(np.concatenate([part[s] for part in parts])) for s in (slice(-1), slice(1, None))
            )
            rows.append(Rows(tokens_T, targets_T, torch.from_numpy(bounds.astype(np.int32))))
            parts.clear()

    for i in chosen:
        room = min(length, tokens - taken)
        if room < 2:
            break
        part = np.append(shards.stream(i)[: room + 1].astype(np.int64), end)[: room + 1]
        if parts and sum(p.size - 1 for p in parts) + part.size - 1 > per_pass:
            close()
        parts.append(part)
        taken += part.size - 1
    close()
    return rows


def layer_inputs(model: Model, rows: Sequence[Rows]) -> dict[int, Tensor]:
    """What the attention of each KDA layer is given: normed inputs ``[T, D]`` of all rows, by layer number."""
    caught: dict[int, list[Tensor]] = {i: [] for i in model.config.kda_layers}

    def watch(layer: int) -> Callable[..., None]:
        return lambda module, arguments: caught[layer].append(arguments[0].detach())

    hooks = [model.layers[i].attention.register_forward_pre_hook(watch(i)) for i in caught]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for row in rows:
                model(row.tokens_T, row.cu_seqlens_N1)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    return {i: torch.cat(parts) for i, parts in caught.items()}


def mean_loss(model: Model, rows: Sequence[Rows]) -> float:
    """Nats a token of held-out rows."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        with torch.no_grad():
            for row in rows:
                nll_T = token_losses(model(row.tokens_T, row.cu_seqlens_N1), model.head.weight, row.targets_T)
                total, count = total + float(nll_T.double().sum()), count + nll_T.numel()
    finally:
        model.train(was_training)
    return total / count


@dataclass(frozen=True)
class GateFile:
    """The gates of a safetensors file."""

    path: Path
    metadata: dict[str, str]
    gates: list[GateTensors]


def read_file(path: Path) -> GateFile:
    """Read the gates of a safetensors file, and only those.

    Raises:
        ValueError: no safetensors file, no gates in it, or shapes that do not fit.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = find_gates(file.keys(), str(path))
            have = set(file.keys())
            gates = []
            for one in names:
                wanted = {name: file.get_tensor(name) for name in gate_tensor_names(one) if name in have}
                gates.append(read_gate(one, wanted, str(path)))
            return GateFile(path, dict(file.metadata() or {}), gates)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: does not exist") from error
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: is no safetensors file ({error})") from error


def file_kind(file: GateFile) -> tuple[str | None, float | None]:
    """(gate kind, bound) that the file's metadata or a ``config.json`` beside it state; None where they are silent."""
    kind = file.metadata.get("gate_kind")
    if kind is not None:
        told = file.metadata.get("g_min")
        if kind not in ("bounded", "softplus"):
            raise ValueError(f"{file.path}: gate_kind in its metadata: found {kind!r}, need bounded or softplus")
        try:
            return kind, None if told is None else float(told)
        except ValueError as error:
            raise ValueError(f"{file.path}: g_min in its metadata: found {told!r}, need a number") from error
    config = file.path.parent / "config.json"
    if not config.is_file():
        return None, None
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config}: is damaged ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{config}: is damaged (found a {type(values).__name__}, need a table)")
    for place in _tables(values):
        bound = place.get("gate_lower_bound", place.get("lower_bound"))
        if place.get("safe_gate") is False:
            return "softplus", None
        if isinstance(bound, int | float):
            return "bounded", float(bound)
    return None, None


def _tables(value: Any) -> list[Mapping[str, Any]]:
    """A table of JSON and those inside it."""
    if not isinstance(value, Mapping):
        return []
    return [value, *(table for inner in value.values() for table in _tables(inner))]


def sampled_inputs(gate: GateTensors, tokens: int, seed: int = 0) -> Tensor:
    """Stand-ins for normed layer inputs ``[T, D]``: independent normal numbers of unit RMS times the norm's gain.

    Real inputs have correlated channels; what is found with these is a guess, and callers say so.
    """
    random = torch.Generator().manual_seed(seed + gate.names.layer)
    x_TD = torch.randn(tokens, gate.down_RD.shape[1], generator=random, dtype=torch.float64)
    x_TD = x_TD / x_TD.square().mean(-1, keepdim=True).sqrt()
    return x_TD if gate.gain_D is None else x_TD * gate.gain_D


def summarise(layer: int, g_THK: Tensor, g_min: float | None, length: int) -> dict[str, Any]:
    """Where one layer's log-decays live, JSON-ready, whole and head by head.

    Args:
        layer: its number.
        g_THK: log-decays of T tokens.
        g_min: the gate's bound, None for one without.
        length: tokens of the longest sequence; a channel that forgets less than 1/e of its state in it remembers all.

    A channel's memory is 1 / mean |g| tokens: after so many its state has faded to 1/e. A channel is *at the bound*
    when half its gates are beyond 99.5 % of g_min, *never forgets* when its memory is longer than the sequence.
    """
    rate_HK = -g_THK.double().mean(0)
    memory_HK = 1 / rate_HK.clamp_min(1e-12)
    at_bound_HK = torch.zeros_like(rate_HK, dtype=torch.bool)
    if g_min is not None:
        at_bound_HK = (g_THK <= AT_BOUND * g_min).double().mean(0) > 0.5
    forever_HK = memory_HK > length
    points = torch.tensor(QUANTILES, dtype=torch.float64)

    def quantiles(x: Tensor) -> dict[str, float]:
        return dict(zip((f"p{100 * q:g}" for q in QUANTILES), _quantile(x, points).tolist(), strict=True))

    heads = [
        {
            "head": h,
            "memory": quantiles(memory_HK[h]),
            "at_bound": int(at_bound_HK[h].sum()),
            "never_forget": int(forever_HK[h].sum()),
            "channels": rate_HK.shape[1],
        }
        for h in range(rate_HK.shape[0])
    ]
    return {
        "layer": layer,
        "tokens": g_THK.shape[0],
        "channels": rate_HK.numel(),
        "g": quantiles(g_THK.double().flatten()),
        "strongest": float(g_THK.min()),
        "memory": quantiles(memory_HK.flatten()),
        "at_bound": int(at_bound_HK.sum()),
        "never_forget": int(forever_HK.sum()),
        "heads": heads,
    }


def _quantile(x: Tensor, points: Tensor) -> Tensor:
    """Like `torch.quantile`, which refuses more than 16 million numbers; nearest rank."""
    ordered = x.flatten().sort().values
    return ordered[(points * (ordered.numel() - 1)).round().long()]


def gates_of_model(model: Model, rows: Sequence[Rows]) -> dict[str, Any]:
    """Where the gates of a model live on given text, JSON-ready: `summarise` of each KDA layer."""
    length = max(int(row.cu_seqlens_N1.diff().max()) for row in rows)
    bound = model.config.g_min if model.config.gate_kind == "bounded" else None
    layers = []
    for i, x_TD in layer_inputs(model, rows).items():
        attention = model.layers[i].attention
        with torch.no_grad():
            u = attention.decay_up(attention.decay_down(x_TD)).unflatten(-1, (attention.heads, attention.head_dim))
            g = log_decay(u, attention.A_log, attention.dt_bias, attention.gate_kind, attention.g_min)
        layers.append(summarise(i, g, bound, length))
    return {"kind": model.config.gate_kind, "g_min": bound, "inputs": "held-out text", "length": length,
            "layers": layers}  # fmt: skip


def gates_of_file(file: GateFile, kind: str, g_min: float | None, length: int, tokens: int = 512) -> dict[str, Any]:
    """The same from a file's tensors alone, with sampled inputs.

    Raises:
        ValueError: ``kind`` is bounded and no bound is known.
    """
    if kind == "bounded" and g_min is None:
        raise ValueError(f"{file.path}: holds bounded gates, need --g-min to know their bound")
    bound = g_min if kind == "bounded" else None
    layers = []
    for gate in file.gates:
        u = gate.inputs(sampled_inputs(gate, tokens))
        g = log_decay(u, gate.A_log_H, gate.dt_bias_HK, kind, math.nan if bound is None else bound)
        layers.append(summarise(gate.names.layer, g, bound, length))
    return {"kind": kind, "g_min": bound, "inputs": "sampled", "length": length, "layers": layers}
