"""Where the gates of a checkpoint are: names and shapes of the layouts we know, and nothing about what they compute.

| layout | a layer's gate |
|---|---|
| trine | ``layers.I.attention.{A_log, dt_bias, decay_down.weight, decay_up.weight}``, norm ``attention_norm`` |
| Kimi, K3 | ``…layers.I.self_attn.{A_log, dt_bias, f_a_proj.weight, f_b_proj.weight}``, norm ``input_layernorm`` |
| fla | ``…layers.I.attn.{A_log, dt_bias, f_proj.0.weight, f_proj.1.weight}``, norm ``attn_norm`` |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_LAYOUTS = (
    ("trine", "attention", "decay_down.weight", "decay_up.weight", "attention_norm.weight"),
    ("kimi-linear", "self_attn", "f_a_proj.weight", "f_b_proj.weight", "input_layernorm.weight"),
    ("fla", "attn", "f_proj.0.weight", "f_proj.1.weight", "attn_norm.weight"),
)


@dataclass(frozen=True)
class GateNames:
    """Full tensor names of one layer's gate."""

    layout: str
    layer: int
    prefix: str  # of the attention, with its last dot
    A_log: str
    dt_bias: str
    down: str
    up: str
    norm: str  # gain of the norm before the attention; may be absent
    output_gain: str  # of the head norm, whose length is the head dimension in foreign layouts; may be absent


@dataclass(frozen=True)
class GateTensors:
    """One layer's gate, float64: the gate's input is ``x_TD @ down.T @ up.T``, H heads of K channels."""

    names: GateNames
    A_log_H: Tensor
    dt_bias_HK: Tensor
    down_RD: Tensor
    up_HKR: Tensor
    gain_D: Tensor | None  # of the norm before the attention

    def inputs(self, x_TD: Tensor) -> Tensor:
        """Gate inputs ``[T, H, K]``, bias not added, from normed layer inputs."""
        return torch.einsum("tr,hkr->thk", x_TD.double() @ self.down_RD.T, self.up_HKR)


def find_gates(names: Iterable[str], what: str) -> list[GateNames]:
    """The gates among a checkpoint's tensor names, by layer.

    Args:
        names: all tensor names.
        what: how messages call the checkpoint.

    Raises:
        ValueError: no gate, or one of which a part is missing; names it.
    """
    have = set(names)
    found = []
    for layout, attention, down, up, norm in _LAYOUTS:
        pattern = re.compile(rf"((?:.*\.)?layers\.(\d+)\.){attention}\.A_log")
        for name in sorted(have):
            match = pattern.fullmatch(name)
            if match is None:
                continue
            prefix = name.removesuffix("A_log")
            gain = "output_gain" if layout == "trine" else "o_norm.weight"
            one = GateNames(
                *(layout, int(match[2]), prefix, name, prefix + "dt_bias", prefix + down, prefix + up),
                *(match[1] + norm, prefix + gain),
            )
            for part in (one.dt_bias, one.down, one.up):
                if part not in have:
                    raise ValueError(f"{what}: has {name} but no {part}")
            found.append(one)
    if not found:
        raise ValueError(
            f"{what}: has no decay gate (looked for layers.I.attention.A_log, .self_attn.A_log and .attn.A_log)"
        )
    return sorted(found, key=lambda one: (one.prefix.split("layers.")[0], one.layer))


def read_gate(names: GateNames, tensors: Mapping[str, Tensor], what: str) -> GateTensors:
    """One layer's gate with its shapes checked.

    Args:
        names: from `find_gates`.
        tensors: at least the gate's tensors.
        what: how messages call the checkpoint.

    Raises:
        ValueError: shapes that do not fit together, naming the tensor.
    """
    A_log, dt_bias, down, up = (tensors[n] for n in (names.A_log, names.dt_bias, names.down, names.up))

    def refuse(name: str, tensor: Tensor, needed: str) -> ValueError:
        return ValueError(f"{what}: {name}: found shape {tuple(tensor.shape)}, need {needed}")

    for name, tensor in ((names.down, down), (names.up, up)):
        if tensor.ndim != 2:
            raise refuse(name, tensor, "two dimensions")
    for name, tensor in ((names.A_log, A_log), (names.dt_bias, dt_bias), (names.down, down), (names.up, up)):
        if not tensor.is_floating_point():
            raise ValueError(f"{what}: {name}: found {tensor.dtype}, need floating-point numbers")
        if not tensor.numel():
            raise refuse(name, tensor, "at least one head, channel and rank")
    inner = up.shape[0]
    gain = tensors.get(names.output_gain)
    if dt_bias.ndim == 2:
        channels = dt_bias.shape[1]
    elif gain is not None and gain.ndim == 1:
        channels = gain.shape[0]
    else:
        channels = max(1, inner // max(1, A_log.numel()))
    heads = inner // channels
    if dt_bias.numel() != inner or dt_bias.ndim not in (1, 2):
        raise refuse(names.dt_bias, dt_bias, f"[H * K] = [{inner}], the rows of {names.up}")
    # K3's release pads A_log to 128 entries; zeros behind the heads are no heads.
    padded = A_log.ndim == 1 and A_log.numel() > heads and not A_log[heads:].any()
    if heads * channels != inner or not (A_log.numel() == heads or padded):
        raise refuse(names.A_log, A_log, f"[H] = [{heads}] ({inner} rows of {names.up} in heads of {channels})")
    if up.shape[1] != down.shape[0]:
        raise refuse(names.up, up, f"[{inner}, {down.shape[0]}], the rows of {names.down}")
    before = tensors.get(names.norm)
    if before is not None and before.shape != (down.shape[1],):
        raise refuse(names.norm, before, f"[{down.shape[1]}], the columns of {names.down}")
    for name, tensor in ((names.A_log, A_log), (names.dt_bias, dt_bias), (names.down, down), (names.up, up)):
        if not tensor.isfinite().all():
            raise ValueError(f"{what}: {name}: found values that are not finite")
    return GateTensors(
        names,
        A_log.flatten()[:heads].double(),
        dt_bias.reshape(heads, channels).double(),
        down.double(),
        up.double().view(heads, channels, -1),
        None if before is None else before.double(),
    )


def gate_tensor_names(names: GateNames) -> tuple[str, ...]:
    """Every tensor that `read_gate` can use."""
    return (names.A_log, names.dt_bias, names.down, names.up, names.norm, names.output_gain)
