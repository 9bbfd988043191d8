"""Looks inside the model of the demo run, for the pages Depth and Gates. Nothing in them was measured, and no torch.

What they show is made up to look like training: depth mixes that begin even and learn to read the embedding and what is
near, an outlier that grows in one layer, memories that spread, heads that reach their bound, output gates that open
and shut.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trine.data._files import write_atomically
from trine.views.probe_view import FILE_NAME, FORMAT_VERSION, Array

LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
MEMORY_LEVELS = (0.1, 0.5, 0.9)
DECADES = (-5, 1, 8)
G_MIN = -5.0
LOOKS, HEADS, CHANNELS = 13, 6, 96
_BLOCKS = 8


def write(folder: Path, steps: int, seed: int) -> None:
    """Write ``probes.jsonl`` of a demo run whose ``run.json`` says how many layers it has."""
    layers = int(json.loads((folder / "run.json").read_text(encoding="utf-8"))["model"]["layers"])
    look = _Looks(layers, np.random.default_rng(seed))
    lines = []
    for step in sorted({round(steps * i / (LOOKS - 1)) for i in range(LOOKS)}):
        record = {"format_version": FORMAT_VERSION, "step": step, **look.at(step / max(1, steps))}
        lines.append(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
    write_atomically(folder / FILE_NAME, "".join(lines).encode())


class _Looks:
    def __init__(self, layers: int, random: np.random.Generator) -> None:
        self.layers, self.random = layers, random
        self.mla = {i for i in range(layers) if i % 4 == 3 or i == layers - 1}
        self.kda = [i for i in range(layers) if i not in self.mla]
        self.block = max(1, -(-layers // _BLOCKS))
        self.centre_LH = random.normal(-4.5, 1.2, (layers, HEADS))  # of a gate's input, before training
        self.drift_LH = random.normal(0.4, 1.8, (layers, HEADS)) + np.linspace(0.8, -0.8, layers)[:, None]
        self.open_LH = random.normal(0.3, 1.3, (layers, HEADS)) + np.linspace(0.6, -0.6, layers)[:, None]
        self.taste_SN = random.normal(0, 0.6, (2 * layers + 1, _BLOCKS + 2))
        self.growth_L = random.uniform(0.9, 1.1, layers + 1)

    def at(self, part: float) -> dict[str, Any]:
        """The look at this part of the run, 0 to 1."""
        learnt = 1 - np.exp(-5 * part)
        found = {
            "text": "made-up text",
            "tokens": 256,
            "length": 128,
            "levels": list(LEVELS),
            "memory_levels": list(MEMORY_LEVELS),
            "decades": list(DECADES),
            "depth": self._depth(learnt),
            "layers": self._layers(part, learnt),
            "activations": self._activations(part, learnt),
            "gates": [self._gate(layer, learnt) for layer in self.kda],
            "openness": [self._open(layer, learnt) for layer in range(self.layers)],
        }
        plain: dict[str, Any] = _plain(found)
        return plain

    def _depth(self, learnt: float) -> dict[str, Any]:
        sites, weights = [], []
        for place in range(1, 2 * self.layers + 1):  # the first attention has nothing to choose from
            layer, second = divmod(place, 2)
            head = layer == self.layers
            sites.append("head" if head else f"{layer} {'feed-forward' if second else 'attention'}")
            finished = 1 + (layer if second or head else layer - 1) // self.block
            sources = min(finished + 1, _BLOCKS + 2)
            near_S = np.exp(-0.7 * np.arange(sources)[::-1]) * 3 + 1.2 * (np.arange(sources) == 0)
            score_S = learnt * (near_S + self.taste_SN[place, :sources])
            weights.append(np.exp(score_S) / np.exp(score_S).sum())
        return {"sites": sites, "weights": weights}

    def _layers(self, part: float, learnt: float) -> dict[str, Any]:
        count = self.layers + 1
        apart_LL = np.abs(np.subtract.outer(np.arange(count), np.arange(count))) / count
        boundary_LL = 0.06 * np.abs(np.subtract.outer(np.arange(count) // self.block, np.arange(count) // self.block))
        cka_LL = np.exp(-(1.2 + 1.6 * learnt) * apart_LL - learnt * boundary_LL)
        alike_L = 0.02 + 0.25 * learnt * (1 - np.exp(-3 * np.arange(count) / count)) + 0.02 * self.growth_L
        return {
            "labels": [*(str(i) for i in range(self.layers)), "head"],
            "cka": cka_LL,
            "tokens_alike": alike_L,
            "next_alike": np.clip(0.97 - 0.12 * learnt * self.random.uniform(0.5, 1, self.layers), 0, 1),
        }

    def _activations(self, part: float, learnt: float) -> dict[str, Any]:
        place_L = np.linspace(0, 1, self.layers + 1)
        rms_L = (0.8 + 1.5 * learnt * place_L) * self.growth_L
        found: dict[str, Any] = {}
        for name, count, scale in (
            ("stream", self.layers + 1, 4.5),
            ("attention", self.layers, 3.0),
            ("feed_forward", self.layers, 4.0),
        ):
            size_L = scale / 4 * rms_L[:count]
            high_L = size_L * (4.2 + self.random.gamma(2.0, 0.4, count))
            if name == "feed_forward" and part > 0.55:
                high_L[int(0.7 * self.layers)] *= 1 + 40 * (part - 0.55)  # an outlier grows
            found[name] = {"max": high_L, "rms": size_L}
        return found

    def _gate(self, layer: int, learnt: float) -> dict[str, Any]:
        centre_H1 = (self.centre_LH[layer] + learnt * self.drift_LH[layer])[:, None]
        if layer == self.kda[len(self.kda) // 3]:
            centre_H1[:2] += 12 * learnt  # two heads end at their bound
        noise_HN = self.random.normal(0, 1.1 + 0.5 * learnt, (HEADS, CHANNELS))
        share_HN = 1 / (1 + np.exp(-(centre_H1 + noise_HN)))
        g_HN = G_MIN * share_HN
        places_N = ((np.log10(-g_HN.ravel()) - DECADES[0]) * DECADES[2]).astype(int)
        bins = (DECADES[1] - DECADES[0]) * DECADES[2]
        counts_B = np.bincount(np.clip(places_N, 0, bins - 1), minlength=bins)
        channels_HK = -g_HN.reshape(HEADS, -1, 6).mean(-1)  # a channel's mean over some tokens
        return {
            "layer": layer,
            "kind": "bounded",
            "g_min": G_MIN,
            "g": _quantiles(g_HN, LEVELS),
            "memory": _quantiles(1 / channels_HK, MEMORY_LEVELS),
            "at_g_min": (share_HN >= 0.995).mean(1),
            "at_zero": (share_HN <= 0.005).mean(1),
            "histogram": counts_B / g_HN.size,
        }

    def _open(self, layer: int, learnt: float) -> dict[str, Any]:
        noise_HN = self.random.normal(0, 0.4 + 1.2 * learnt, (HEADS, CHANNELS))
        open_HN = 1 / (1 + np.exp(-(learnt * self.open_LH[layer][:, None] + noise_HN)))
        kind = "mla" if layer in self.mla else "kda"
        return {"layer": layer, "kind": kind, "values": _quantiles(open_HN, LEVELS), "mean": open_HN.mean(1)}


def _quantiles(x_HN: Any, levels: tuple[float, ...]) -> Array:
    found: Array = np.quantile(x_HN, levels, axis=1).T
    return found


def _plain(value: Any) -> Any:
    """JSON-ready, numbers with four digits."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
