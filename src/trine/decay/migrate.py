"""Softplus gates to bounded ones: a run or a safetensors file in, a new one out, and a report of what changed.

The source is only read. The result appears whole under its name or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from trine._log import logger
from trine.config import MAX_TILE_LOG_RANGE, to_dict
from trine.data import Shards
from trine.decay.calibrate_gates import (
    GateFile,
    Rows,
    file_kind,
    held_out_rows,
    layer_inputs,
    mean_loss,
    read_file,
    sampled_inputs,
)
from trine.decay.migrate_drift import WHY_NOT_THE_SAME, Limits, decay_drift, output_errors, verdict
from trine.decay.migrate_fit import Fit, fit_bounded, softplus_decay
from trine.decay.migrate_layout import GateTensors, find_gates, read_gate
from trine.decay.migrate_recover import Recovery, recover
from trine.model import Model
from trine.ops.kda import TILE
from trine.train.checkpoint import save_checkpoint
from trine.train.config import config_hash, train_from_dict, train_to_dict
from trine.train.machine import versions
from trine.train.run_folder import read_json
from trine.train.schedule import lay_out
from trine.train.stored import StoredRun, load_run

FORMAT_VERSION = 1
REPORT = "migration.json"

Say = Callable[[str], None]


def softplus_to_bounded(
    source: str | Path,
    out: str | Path,
    *,
    g_min: float = -5.0,
    tokens: int = 8192,
    length: int = 1024,
    inputs: str | Path | None = None,
    recovery: Recovery | None = None,
    limits: Limits | None = None,
    workers: int = 1,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Write a copy of ``source`` whose gates are bounded.

    Args:
        source: a run's folder, one of its checkpoints, or a safetensors file of a layout that
            `trine.decay.migrate_layout` knows.
        out: the new run's folder, or the new file; must not exist.
        g_min: lower bound of the new gates.
        tokens: of held-out text that goes through the model; half of it is fitted on, and decides whether
            recovery helps; all that is reported is of the other half. With sampled inputs an eighth of it.
        length: longest sequence of these.
        inputs: for a file: safetensors with what each gate's layer is given, ``[T, D]`` after its norm, under the name
            of the attention (``model.layers.3.self_attn``); without it inputs are sampled.
        recovery: short training afterwards; needs a run.
        limits: what is called safe.
        workers: threads of the recovery.
        say: told what happens, a line at a time.

    Returns:
        The report, which also lies in the result: ``verdict``, ``reasons``, ``layers`` (decay and output drift),
        ``loss`` (``before``, ``swapped``: the old numbers in the new formula, ``fitted``, ``recovered``; None for
        files), ``recovery``, ``why``.

    Raises:
        ValueError: no gates, gates that are bounded already, shapes that do not fit, ``out`` exists, a bound without
            room in the operator's tile, too few tokens.
        trine.train.errors.RunError: no run, a damaged one, or a full disk.
    """
    source, out = Path(source), Path(out)
    if not -MAX_TILE_LOG_RANGE / TILE < g_min < 0:
        raise ValueError(f"g_min: found {g_min:g}, need more than {-MAX_TILE_LOG_RANGE / TILE:g} and less than 0")
    for name, count, least in (("tokens", tokens, 32), ("length", length, 2)):
        if count < least:
            raise ValueError(f"{name}: found {count}, need at least {least}")
    if os.path.lexists(out):
        raise ValueError(f"{out}: exists already; nothing is overwritten, choose another name")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: cannot be written, there is no folder {out.absolute().parent}")
    recovery, limits = recovery or Recovery(), limits or Limits()
    if source.is_dir():
        if inputs is not None:
            raise ValueError("inputs: found a file, need none for a run: its own held-out text is used")
        return _migrate_run(source, out, g_min, tokens, length, recovery, limits, workers, say)
    if recovery.tokens:
        raise ValueError(
            f"recovery tokens: found {recovery.tokens:g}, need 0 for a file: only a run has data to train on"
        )
    return _migrate_file(source, out, g_min, max(2, tokens // 8), inputs, limits, say)


# -- runs --------------------------------------------------------------------------------------------------------------


def _migrate_run(
    source: Path, out: Path, g_min: float, tokens: int, length: int, recovery: Recovery, limits: Limits, workers: int,
    say: Say,
) -> dict[str, Any]:  # fmt: skip
    run = load_run(source)
    old = run.model
    if not old.config.kda_layers:
        raise ValueError(f"{source}: has no decay gate: every layer is MLA")
    if old.config.gate_kind != "softplus":
        raise ValueError(f"{source}: its gates are {old.config.gate_kind} already (g_min {old.config.g_min:g})")
    shards = Shards.open(run.path / "data")
    fitted, judged = split_held_out(shards, tokens, length)
    inputs, judge_inputs = layer_inputs(old, fitted), layer_inputs(old, judged)
    counts = " and ".join(str(sum(row.tokens_T.numel() for row in rows)) for rows in (fitted, judged))
    say(f"gates of {len(inputs)} layers on {counts} tokens of held-out text, to fit and to judge")

    new = bounded_twin(old, g_min)
    before, swapped = mean_loss(old, judged), mean_loss(new, judged)
    tensors = dict(old.state_dict())
    layers = []
    for names in find_gates(tensors, str(source)):
        if not names.prefix.startswith("layers."):
            continue
        gate = read_gate(names, tensors, str(source))
        fit, drift = fit_and_judge(gate, inputs[names.layer], judge_inputs[names.layer], g_min)
        _put(new.state_dict(), gate, fit)
        layers.append(drift)
    for layer, error in output_errors(old, new, judge_inputs, judged).items():
        next(one for one in layers if one["layer"] == layer)["output_error"] = error
    loss: dict[str, float | None] = {"before": before, "swapped": swapped, "fitted": mean_loss(new, judged)}
    report = _report(source, out, "held-out text", g_min, layers, limits)
    report["loss"] = {**loss, "recovered": None}
    report["verdict"], report["reasons"] = verdict(report, limits)
    seen = lay_out(run.config.stages, run.config.tokens).tokens_before(run.step)
    report["recovery"] = {**dataclasses.asdict(recovery), "parts": []}
    if recovery.tokens:
        parts = recover(new, run.config, shards, seen, recovery, lambda model: mean_loss(model, fitted), say, workers)
        report["recovery"]["parts"] = parts
        report["loss"]["recovered"] = mean_loss(new, judged)
    _write_run(run, new, out, report)
    return report


def split_held_out(shards: Shards, tokens: int, length: int) -> tuple[list[Rows], list[Rows]]:
    """Held-out text to fit on and to judge by: other documents, as long as there is more than one row of them."""
    rows = held_out_rows(shards, tokens, length, per_pass=max(1, min(4096, tokens // 4)))
    return (rows[::2], rows[1::2]) if len(rows) > 1 else (rows, rows)


def bounded_twin(old: Model, g_min: float) -> Model:
    """The same numbers in the new formula."""
    new = Model(dataclasses.replace(old.config, gate_kind="bounded", g_min=g_min))
    new.to(old.embed.weight.dtype)
    new.load_state_dict(old.state_dict())
    return new.eval()


def _write_run(run: StoredRun, model: Model, out: Path, report: Mapping[str, Any]) -> None:
    """The new run's folder: record, tokenizer, data (linked where the disk allows it) and one checkpoint."""
    record = read_json(run.path / "run.json")
    changes = [one for one in run.config.model if one.partition("=")[0] not in ("gate_kind", "g_min")]
    changes += ["gate_kind=bounded", f"g_min={model.config.g_min!r}"]
    config = train_from_dict({**train_to_dict(run.config), "model": changes, "run": out.name})
    record |= {
        "config": train_to_dict(config),
        "model": to_dict(model.config),
        "config_hash": config_hash(config),
        "migrated": {key: report[key] for key in ("source", "g_min", "verdict", "date", "versions")},
    }
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        _write_json(temporary / "run.json", record)
        _write_json(temporary / REPORT, report)
        shutil.copyfile(run.path / "tokenizer.json", temporary / "tokenizer.json")
        shutil.copytree(run.path / "data", temporary / "data", copy_function=_link_or_copy)
        state = {"tokens": lay_out(config.stages, config.tokens).tokens_before(run.step), "migrated": True}
        save_checkpoint(temporary / "checkpoints", run.step, {"model": model.state_dict()}, state)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info("wrote %s", out)


def _link_or_copy(source: str, target: str) -> str:
    """Files of data are never written again, so the new run may share them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


# -- files -------------------------------------------------------------------------------------------------------------


def _migrate_file(
    source: Path, out: Path, g_min: float, tokens: int, inputs: str | Path | None, limits: Limits, say: Say
) -> dict[str, Any]:
    file = read_file(source)
    kind, bound = file_kind(file)
    if kind == "bounded":
        told = "" if bound is None else f" (g_min {bound:g})"
        raise ValueError(f"{source}: its gates are bounded already{told}")
    given = None if inputs is None else _read_inputs(Path(inputs), file)
    say(f"gates of {len(file.gates)} layers, {file.gates[0].names.layout} layout, "
        f"{'given' if given is not None else 'sampled'} inputs")  # fmt: skip
    try:
        tensors = load_file(source)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{source}: cannot be read ({error})") from error
    layers = []
    for gate in file.gates:
        x_TD = given[gate.names.prefix] if given is not None else sampled_inputs(gate, tokens)
        half = x_TD.shape[0] // 2
        fit, drift = fit_and_judge(gate, x_TD[:half], x_TD[half:], g_min)
        _put(tensors, gate, fit)
        layers.append({**drift, "name": gate.names.prefix.removesuffix(".")})
    report = _report(source, out, "sampled" if given is None else str(inputs), g_min, layers, limits)
    report["verdict"], report["reasons"] = verdict(report, limits)
    notes = [] if kind == "softplus" else ["nothing in or beside the file names its gates; they were taken as softplus"]
    config = _bounded_config(source, out, g_min, notes)
    report["notes"] = notes
    metadata = {**file.metadata, "format": "pt", "gate_kind": "bounded", "g_min": repr(g_min)}
    beside = out.with_name(out.name + "." + REPORT)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        if config is not None:
            _write_json(out.absolute().parent / "config.json", config)
        _write_json(beside, report)
        os.replace(temporary, out)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{out}: cannot be written ({error})") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return report


def _bounded_config(source: Path, out: Path, g_min: float, notes: list[str]) -> dict[str, Any] | None:
    """The ``config.json`` beside the source with the new gate in it, to be written beside ``out``; None when there is
    none, or another one is there already (which ``notes`` then say)."""
    path, target = source.absolute().parent / "config.json", out.absolute().parent / "config.json"
    if not path.is_file():
        return None
    if target.exists():
        notes.append(f"{target}: was left as it is; it needs gate_lower_bound = {g_min:g} for the new file")
        return None
    config = dict(json.loads(path.read_text(encoding="utf-8")))
    place = config.get("linear_attn_config")
    settings = {"gate_lower_bound": g_min, "safe_gate": True}
    if isinstance(place, dict):
        config["linear_attn_config"] = {**place, **settings}
    else:
        config |= settings
    return config


def _read_inputs(path: Path, file: GateFile) -> dict[str, Tensor]:
    """Layer inputs by the gate's prefix, from a safetensors file.

    Raises:
        ValueError: no such file, a layer without inputs, or a wrong shape.
    """
    found = {}
    try:
        with safe_open(path, framework="pt") as store:
            have = set(store.keys())
            for gate in file.gates:
                name = gate.names.prefix.removesuffix(".")
                if name not in have:
                    raise ValueError(f"{path}: has no tensor {name}, need the inputs of every gated layer")
                x_TD = store.get_tensor(name)
                width = gate.down_RD.shape[1]
                if x_TD.ndim != 2 or x_TD.shape[1] != width or x_TD.shape[0] < 4:
                    raise ValueError(
                        f"{path}: {name}: found shape {tuple(x_TD.shape)}, need [T, {width}], T at least 4"
                    )
                found[gate.names.prefix] = x_TD
    except FileNotFoundError as error:
        raise ValueError(f"{path}: does not exist") from error
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: is no safetensors file ({error})") from error
    return found


# -- both --------------------------------------------------------------------------------------------------------------


def fit_and_judge(gate: GateTensors, fit_TD: Tensor, judge_TD: Tensor, g_min: float) -> tuple[Fit, dict[str, Any]]:
    """Fit one layer's gates on some inputs and measure their drift on others."""

    def old(u_THK: Tensor) -> Tensor:
        return softplus_decay(u_THK, gate.A_log_H, gate.dt_bias_HK)

    u_THK, judge_THK = gate.inputs(fit_TD), gate.inputs(judge_TD)
    fit = fit_bounded(u_THK, old(u_THK), g_min)
    return fit, decay_drift(gate.names.layer, old(judge_THK), fit.decay(judge_THK, g_min), g_min)


def _put(tensors: Mapping[str, Tensor], gate: GateTensors, fit: Fit) -> None:
    """Write a fit into a checkpoint's own tensors, in their own shapes and dtypes."""
    A_log_H, dt_bias_HK, factor_HK = fit.parameters()
    names = gate.names
    with torch.no_grad():
        A_log = tensors[names.A_log].view(-1)
        A_log[: A_log_H.numel()].copy_(A_log_H)
        tensors[names.dt_bias].view(-1).copy_(dt_bias_HK.flatten())
        up = tensors[names.up]
        up.copy_(gate.up_HKR.reshape(up.shape) * factor_HK.reshape(-1, 1))


def _report(
    source: Path, out: Path, inputs: str, g_min: float, layers: list[dict[str, Any]], limits: Limits
) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "source": str(source),
        "out": str(out),
        "g_min": g_min,
        "inputs": inputs,
        "verdict": None,
        "reasons": [],
        "limits": dataclasses.asdict(limits),
        "layers": layers,
        "loss": None,
        "recovery": None,
        "why": WHY_NOT_THE_SAME,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
