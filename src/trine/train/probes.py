"""A look inside the model while it trains: depth weights, similarity of layers, activation maxima, gates.

Every few steps a short text runs through the model once more, without gradients and in evaluation mode, and one line
goes into ``probes.jsonl``. Training does not notice: no random number is drawn, no statistic of the routers counts, and
the bits of every step are the same with probes and without.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from trine.data import Batch, Shards
from trine.data._files import write_atomically
from trine.evals.portrait import depth_hooks, looking
from trine.model import Model
from trine.nn import KimiDeltaAttention
from trine.ops.kda.gate import log_decay
from trine.train.callbacks import Callback
from trine.train.errors import RunError
from trine.train.metrics import StepRecord

if TYPE_CHECKING:
    from trine.train.trainer import Trainer

FILE_NAME = "probes.jsonl"
FORMAT_VERSION = 1
TOKENS, LENGTH = 256, 128
"""Of the text that is looked at: tokens in all, and of one sequence at most."""
FEW, MOST = 20, 1000
"""Looks of a whole run: about so many at least (a short one is looked at more often), and at most."""
CLOSEST = 20
"""Steps between two looks of a short run: a look at a small model takes up to a tenth of a step."""
SORTED_TOKENS = 64
"""Tokens, evenly spaced, that quantiles over tokens and channels are taken of: sorting is dear."""
LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""Quantiles of log-decays and of the output gates' openness."""
MEMORY_LEVELS = (0.1, 0.5, 0.9)
"""Quantiles of the channels' memory."""
AT_BOUND = 0.995
"""A gate beyond this share of g_min (or nearer to 0 than the rest of it) has a slope under 2 % of its steepest."""
DECADES, BINS_A_DECADE = (-5, 1), 8
"""The histogram of log10(-g): its range, and its bins; the outer two hold what lies beyond as well."""

Record = dict[str, Any]


class ProbeText(NamedTuple):
    """The text that is looked at, always the same of a run."""

    tokens_T: Tensor
    cu_seqlens_N1: Tensor
    source: str  # "held-out text", or "training text" where nothing is held out


def probe_text(shards: Shards, first: Callable[[], Batch]) -> ProbeText:
    """Beginnings of held-out documents; of the batch that ``first`` gives where nothing is held out.

    Args:
        shards: the run's data.
        first: a micro-batch of the run, always the same.
    """
    parts: list[Tensor] = []
    chosen = sorted(shards.select("held_out").tolist(), key=lambda i: (shards.documents[i].near_copy, i))
    for i in chosen:
        room = min(LENGTH, TOKENS - sum(part.numel() for part in parts))
        if room < 2:
            break
        part = torch.from_numpy(shards.stream(i)[:room].astype("int64"))
        if part.numel() >= 2:
            parts.append(part)
    if parts:
        bounds = torch.tensor([0, *(part.numel() for part in parts)]).cumsum(0)
        return ProbeText(torch.cat(parts), bounds.to(torch.int32), "held-out text")
    batch = first()
    end = min(TOKENS, batch.tokens)
    bounds = batch.cu_seqlens_N1[batch.cu_seqlens_N1 < end]
    return ProbeText(batch.tokens_T[:end], torch.cat((bounds, bounds.new_tensor([end]))), "training text")


def interval(every: int, steps: int) -> int:
    """Steps from one look to the next: ``every``, less in a short run, more in a very long one; 0 is off."""
    if every <= 0:
        return 0
    return max(min(every, max(CLOSEST, steps // FEW)), -(-steps // MOST))


class Probes(Callback):
    """Looks at the untrained model, at every ``every``-th step and at the last; only the first rank does.

    Args:
        folder: of the run; ``probes.jsonl`` in it is appended to.
        every: steps, see `interval`.
        text: what is looked at.
        listeners: called with each record.

    Raises:
        RunError: the file cannot be written.
    """

    name = "probes"

    def __init__(
        self, folder: Path, every: int, text: ProbeText, listeners: Sequence[Callable[[Record], None]] = ()
    ) -> None:
        self.path, self.every, self.text, self.listeners = folder / FILE_NAME, every, text, tuple(listeners)
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._on = not ready or torch.distributed.get_rank() == 0

    def on_start(self, trainer: Trainer) -> None:
        """Drop what will be seen again; look at the untrained model."""
        self._on = self._on and isinstance(trainer.model, Model) and interval(self.every, trainer.plan.steps) > 0
        if self._on:
            self._forget_after(trainer.step)
            if trainer.step == 0:
                self._look(trainer, 0)

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Look, when it is time."""
        if self._on:
            last = trainer.plan.steps
            if record.step % interval(self.every, last) == 0 or record.step == last:
                self._look(trainer, record.step)

    def on_rollback(self, trainer: Trainer) -> None:
        """Drop the looks of the steps that were taken back."""
        if self._on:
            self._forget_after(trainer.step)

    def _look(self, trainer: Trainer, step: int) -> None:
        record = {"format_version": FORMAT_VERSION, "step": step, **look_inside(trainer.model, self.text)}
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror})") from error
        for listener in self.listeners:
            listener(record)

    def _forget_after(self, step: int) -> None:
        """Keep the lines up to ``step``; a torn or foreign line goes."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read ({error.strerror})") from error
        kept = [line for line in lines if (found := _step_of(line)) is not None and found <= step]
        if len(kept) < len(lines):
            try:
                write_atomically(self.path, "".join(line + "\n" for line in kept).encode())
            except ValueError as error:
                raise RunError(str(error)) from error


def _step_of(line: str) -> int | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None


@torch.no_grad()
def look_inside(model: Model, text: ProbeText) -> Record:
    """Everything that is looked at, of one pass over ``text``, JSON-ready; numbers that are not finite are None.

    Args:
        model: put into evaluation mode for the time.
        text: tokens and bounds of sequences; brought to the model's device.

    Returns:
        ``text``, ``tokens``, ``length`` (of the longest sequence), ``seconds``, and

        - ``depth``: ``sites`` and the ``weights`` each gives its depth sources, mean over tokens: the softmax of
          Attention Residuals (arXiv 2603.15031, section 3; K3 report, arXiv 2607.24653, Eq. 8-10);
        - ``layers``: ``labels`` ("0" … and "head") of what the layers' attentions and the head read; ``cka``, linear
          centred kernel alignment (Kornblith et al., arXiv 1905.00414) of each with each; ``tokens_alike``, mean cosine
          of two tokens of one layer (1: depth has made all tokens one); ``next_alike``, mean cosine of a token with
          itself one label later;
        - ``activations``: for ``stream`` (what is read, a label each), ``attention`` and ``feed_forward`` (what is
          written, a layer each) the largest magnitude ``max`` and the root mean square ``rms``;
        - ``gates``: of each KDA layer ``g`` at `LEVELS` for each head, ``memory`` at `MEMORY_LEVELS` over the channels
          of each head (1 / mean |g| tokens, after which a state has faded to 1/e), the shares of gates ``at_g_min`` and
          ``at_zero`` (`AT_BOUND`; None for gates without a bound), and the ``histogram`` of log10(-g), shares;
        - ``openness``: of each output gate its values at `LEVELS` and their ``mean``, for each head.
    """
    began = time.perf_counter()
    device = model.embed.weight.device
    tokens_T, bounds_N1 = text.tokens_T.to(device), text.cu_seqlens_N1.to(device)
    eye = _Eye()
    hooks = eye.watch(model)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)  # so short a text is many short operations, in which threads only wait for each other
    try:
        with looking(model, hooks):
            model(tokens_T, bounds_N1)
            found = eye.record()
    finally:
        torch.set_num_threads(threads)
    return {
        "text": text.source,
        "tokens": tokens_T.numel(),
        "length": int(text.cu_seqlens_N1.diff().max()),
        **found,
        "seconds": round(time.perf_counter() - began, 4),
    }


class _Eye:
    """What the hooks of one pass see."""

    def __init__(self) -> None:
        self.sites: dict[str, Tensor] = {}
        self.labels: list[str] = []
        self.grams: list[Tensor] = []  # centred, [T, T] fp64
        self.units: list[Tensor] = []  # directions of tokens, [T, D]; two at a time
        self.tokens_alike: list[Tensor] = []
        self.next_alike: list[Tensor] = []
        self.peaks: dict[str, list[tuple[Tensor, Tensor]]] = {"stream": [], "attention": [], "feed_forward": []}
        self.gates: list[Record] = []
        self.openness: list[Record] = []

    def watch(self, model: Model) -> list[Any]:
        """Hang the hooks; whoever calls takes them off again."""
        hooks = depth_hooks(model, self.sites.__setitem__)
        for i, layer in enumerate(model.layers):
            attention = layer.attention
            hooks.append(layer.attention_norm.register_forward_pre_hook(self._read(str(i))))
            hooks.append(attention.register_forward_hook(self._written("attention")))
            hooks.append(layer.feed_forward.register_forward_hook(self._written("feed_forward")))
            if isinstance(attention, KimiDeltaAttention):
                hooks.append(attention.decay_up.register_forward_hook(self._gate(i, attention)))
            if attention.gate_proj is not None:
                hooks.append(attention.gate_proj.register_forward_hook(self._open(i, attention)))
        hooks.append(model.norm.register_forward_pre_hook(self._read("head")))
        return hooks

    def _read(self, label: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x_TD = arguments[0].float()
            self.labels.append(label)
            self.peaks["stream"].append(_peak(x_TD))
            middle_TD = (x_TD - x_TD.mean(0)).double()
            self.grams.append(middle_TD @ middle_TD.T)
            unit_TD = x_TD / x_TD.norm(dim=-1, keepdim=True).clamp_min(1e-30)
            count = len(unit_TD)
            self.tokens_alike.append((unit_TD.sum(0).square().sum() - count) / max(1, count * (count - 1)))
            if self.units:
                self.next_alike.append((self.units.pop() * unit_TD).sum(-1).mean())
            self.units.append(unit_TD)

        return hook

    def _written(self, part: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
            self.peaks[part].append(_peak((result[0] if isinstance(result, tuple) else result).float()))

        return hook

    def _gate(self, layer: int, attention: KimiDeltaAttention) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], result: Tensor) -> None:
            gate_THK = result.unflatten(-1, (attention.heads, attention.head_dim))
            g_THK = log_decay(gate_THK, attention.A_log, attention.dt_bias, attention.gate_kind, attention.g_min)
            bound = attention.g_min if attention.gate_kind == "bounded" else None
            self.gates.append({"layer": layer, "kind": attention.gate_kind, "g_min": bound, **_decays(g_THK, bound)})

        return hook

    def _open(self, layer: int, attention: Any) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], result: Tensor) -> None:
            open_THK = torch.sigmoid(result.float()).unflatten(-1, (attention.heads, attention.head_dim))
            kind = "kda" if isinstance(attention, KimiDeltaAttention) else "mla"
            values = {"values": _quantiles(_some(open_THK), LEVELS), "mean": open_THK.mean((0, 2))}
            self.openness.append({"layer": layer, "kind": kind, **values})

        return hook

    def record(self) -> Record:
        """What was seen, JSON-ready."""
        flat_LN = torch.stack([gram.flatten() for gram in self.grams])
        # A gram of zeros (all tokens alike) is like nothing, as `trine.evals.portrait.cka` has it.
        norm_L = flat_LN.norm(dim=1)
        safe_L = torch.where(norm_L == 0, 1.0, norm_L)
        unit_LN = flat_LN / safe_L[:, None]
        found: Record = {
            "levels": list(LEVELS),
            "memory_levels": list(MEMORY_LEVELS),
            "decades": [*DECADES, BINS_A_DECADE],
            "depth": {"sites": list(self.sites), "weights": list(self.sites.values())},
            "layers": {
                "labels": self.labels,
                "cka": unit_LN @ unit_LN.T,
                "tokens_alike": self.tokens_alike,
                "next_alike": self.next_alike,
            },
            "activations": {
                part: {"max": [high for high, _ in peaks], "rms": [rms for _, rms in peaks]}
                for part, peaks in self.peaks.items()
            },
            "gates": self.gates,
            "openness": self.openness,
        }
        plain: Record = _plain(found)
        return plain


def _peak(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    return x_TD.abs().amax(), x_TD.square().mean().sqrt()


def _decays(g_THK: Tensor, bound: float | None) -> Record:
    """Where one layer's log-decays are, head by head."""
    g_HN = _by_head(g_THK)
    memory_HK = 1 / (-g_THK).mean(0).clamp_min(1e-12)
    shares: dict[str, Tensor | None] = {"at_g_min": None, "at_zero": None}
    if bound is not None:
        shares = {
            "at_g_min": (g_HN <= AT_BOUND * bound).float().mean(1),
            "at_zero": (g_HN >= (1 - AT_BOUND) * bound).float().mean(1),
        }
    low, high = DECADES
    size_N = -g_THK.flatten()
    known_N = size_N[torch.isfinite(size_N) & (size_N >= 0)]
    places_N = ((known_N.log10() - low) * BINS_A_DECADE).floor()
    bins = (high - low) * BINS_A_DECADE
    counts_B = torch.bincount(places_N.clamp(0, bins - 1).long(), minlength=bins)
    return {
        "g": _quantiles(_some(g_THK), LEVELS),
        "memory": _quantiles(memory_HK, MEMORY_LEVELS),
        **shares,
        "histogram": counts_B / max(1, size_N.numel()),
    }


def _by_head(x_THK: Tensor) -> Tensor:
    """``[H, T * K]``."""
    return x_THK.transpose(0, 1).flatten(1)


def _some(x_THK: Tensor) -> Tensor:
    """``[H, N]`` of `SORTED_TOKENS` tokens or a few more."""
    return _by_head(x_THK[:: max(1, len(x_THK) // SORTED_TOKENS)])


def _quantiles(x_HN: Tensor, levels: Sequence[float]) -> Tensor:
    """``[H, levels]``, nearest rank; NaN sorts last, so a row that has one ends with it."""
    ordered_HN = x_HN.sort(dim=1).values
    places = [round(level * (x_HN.shape[1] - 1)) for level in levels]
    return ordered_HN[:, places]


def _plain(value: Any) -> Any:
    """Lists of numbers with four digits; None for what is not finite."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        if value and isinstance(value[0], Tensor) and value[0].ndim == 0:
            return _plain(torch.stack(value).tolist())
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def scalars(record: Record) -> dict[str, float]:
    """The figures of a look that are worth a curve each, by name; their number grows with layers, not with heads."""
    found: dict[str, float | None] = {}
    layers = record["layers"]
    for label, alike in zip(layers["labels"], layers["tokens_alike"], strict=True):
        found[f"tokens_alike/{label}"] = alike
    for (label, _), alike in zip(pairwise(layers["labels"]), layers["next_alike"], strict=True):
        found[f"next_alike/{label}"] = alike
    for part, peaks in record["activations"].items():
        known = [one for one in peaks["max"] if one is not None]
        found[f"activation_max/{part}"] = max(known, default=None)
    for gate in record["gates"]:
        middle = [row[len(MEMORY_LEVELS) // 2] for row in gate["memory"]]
        found[f"memory_tokens/{gate['layer']}"] = _mean(middle)
        for name in ("at_g_min", "at_zero"):
            found[f"{name}/{gate['layer']}"] = _mean(gate[name] or [])
    for gate in record["openness"]:
        found[f"openness/{gate['layer']}"] = _mean(gate["mean"])
    return {name: value for name, value in found.items() if value is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return float(f"{sum(known) / len(known):.4g}") if known and len(known) == len(values) else None
