"""The Depth page: what each sublayer reads of the ones before, how alike the layers are, how large activations get."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trine.views.chart import Axis, Band, Chart, Colour, Heatmap, Line, nothing
from trine.views.probe_view import Probe
from trine.views.run_series import Array, chart_over_steps, mean, probe_note, probe_page, steps_of, thin_ticks
from trine.views.run_view import RunView

TITLES = {
    "depth-weights": "Which depth sources each sublayer reads",
    "depth-reading": "Where depth reads, over steps",
    "depth-similarity": "How alike the layers' inputs are",
    "depth-homogeneity": "Does depth make everything alike?",
    "depth-activations": "Largest activations by layer",
    "depth-maxima": "Largest activation over steps",
}
_PARTS: tuple[tuple[str, str, Colour], ...] = (
    ("stream", "read by a sublayer", "blue"),
    ("attention", "written by attention", "orange"),
    ("feed_forward", "written by the feed-forward", "green"),
)


def charts(run: RunView, step: int | None = None) -> list[Chart]:
    """All figures of the page.

    Args:
        run: the run.
        step: what was seen last at or before it; None takes the newest.
    """
    return probe_page(
        run,
        step,
        TITLES,
        lambda probes, now: [
            mix_weights(now),
            reading(probes, run, step),
            similarity(now),
            homogeneity(probes, run, step),
            activations(now, probes[0]),
            maxima(probes, run, step),
        ],
    )


def mix_weights(probe: Probe) -> Chart:
    """Weight of each depth source at each site, mean over tokens: the softmax of Attention Residuals (K3 report,
    arXiv 2607.24653, Eq. 8-10)."""
    key = "depth-weights"
    if not probe.sites:
        return nothing(
            key, TITLES[key], _missing(probe, "depth", "This model has no depth mixes: its residual is a sum.")
        )
    most = max(len(row) for row in probe.weights)
    weights_RS = np.full((len(probe.sites), most), np.nan, dtype=np.float32)
    for i, row in enumerate(probe.weights):
        weights_RS[i, : len(row)] = row
    names = ["embedding", *(str(i) for i in range(1, most))]
    return Chart(
        key,
        TITLES[key],
        x=Axis("source", ticks=thin_ticks(names, most=12)),
        y=Axis("reading sublayer", ticks=thin_ticks(probe.sites), down=True),
        heatmap=Heatmap(weights_RS, "weight, mean over tokens", 0.0, 1.0, beyond=(False, False)),
        notes=[
            probe_note(probe),
            "Sources: the embedding, then finished blocks, last the running sum. Blank: not there yet at this depth.",
        ],
        height=_tall(len(probe.sites)),
    )


def reading(probes: Sequence[Probe], run: RunView, step: int | None) -> Chart:
    """Weight on the embedding, on the newest source and on those between, mean over all sites, over steps."""
    key = "depth-reading"
    x = steps_of(probes)
    shares_3S = np.full((3, len(probes)), np.nan)
    for i, probe in enumerate(probes):
        rows = [row for row in probe.weights if len(row) > 1]
        if rows:
            first, last = (mean(np.array([row[at] for row in rows])) for at in (0, -1))
            shares_3S[:, i] = first, last, 1 - first - last
    if np.isnan(shares_3S).all():
        return nothing(key, TITLES[key], "This model has no depth mixes: its residual is a sum.")
    names: tuple[tuple[str, Colour], ...] = (
        ("the embedding", "blue"), ("the newest source", "orange"), ("those between", "green")
    )  # fmt: skip
    lines = [Line(name, x, row, colour) for (name, colour), row in zip(names, shares_3S, strict=True)]
    note = "Mean over all sublayers that have a choice. Queries begin at zero: every source has the same weight."
    axis = Axis("share of the weight", low=0, high=1)
    return chart_over_steps(key, TITLES[key], run, step, axis, lines, notes=[note])


def similarity(probe: Probe) -> Chart:
    """Linear centred kernel alignment (Kornblith et al., arXiv 1905.00414) of each layer's input with each other's."""
    key = "depth-similarity"
    if not probe.labels:
        return nothing(key, TITLES[key], _missing(probe, "layers", "The likeness of layers was not recorded."))
    ticks = thin_ticks(probe.labels, most=16)
    notes = [probe_note(probe), "1: one is the other, turned and scaled. The last row is what the head reads."]
    return Chart(
        key,
        TITLES[key],
        x=Axis("input of layer", ticks=ticks),
        y=Axis("input of layer", ticks=ticks, down=True),
        heatmap=Heatmap(probe.cka, "alignment (CKA)", 0.0, 1.0, beyond=(False, False)),
        notes=notes,
        height=1.2,
    )


def homogeneity(probes: Sequence[Probe], run: RunView, step: int | None) -> Chart:
    """Over steps: how alike two layers are, a layer and the next, and two tokens of one layer."""
    key = "depth-homogeneity"
    x = steps_of(probes)
    pairs = np.array([mean(one.cka[~np.eye(len(one.cka), dtype=bool)]) for one in probes])
    after = np.array([mean(one.next_alike) for one in probes])
    head = np.array([float(one.tokens_alike[-1]) if one.tokens_alike.size else np.nan for one in probes])
    low, high = (
        np.array([pick(one.tokens_alike) if np.isfinite(one.tokens_alike).any() else np.nan for one in probes])
        for pick in (np.nanmin, np.nanmax)
    )
    if all(np.isnan(one).all() for one in (pairs, after, head)):
        return nothing(key, TITLES[key], _missing(probes[-1], "layers", "The likeness of layers was not recorded."))
    return chart_over_steps(
        key,
        TITLES[key],
        run,
        step,
        Axis("likeness"),
        bands=[Band("two tokens, least and most of any layer", x, low, high, "red", 0.15)],
        lines=[
            Line("two layers: CKA, mean of all pairs", x, pairs, "blue"),
            Line("a token and itself one layer on: cosine", x, after, "orange"),
            Line("two tokens, as the head reads them: cosine", x, head, "red"),
        ],
        notes=["Curves that climb to 1 mean that layers do the same, or that all tokens become one."],
    )


def activations(now: Probe, first: Probe) -> Chart:
    """Largest magnitude of what sublayers read and write, layer by layer, beside the first look."""
    key = "depth-activations"
    if not now.peaks:
        return nothing(key, TITLES[key], _missing(now, "activations", "Activations were not recorded."))
    lines = []
    for part, name, colour in _PARTS:
        largest = now.peaks[part].largest
        lines.append(Line(name, np.arange(len(largest)), largest, colour))
        if first is not now and part in first.peaks:
            before = first.peaks[part].largest
            lines.append(Line(f"{name}, step {first.step:,}", np.arange(len(before)), before, colour, "dot", 1.0))
    labels = now.labels or tuple(str(i) for i in range(len(now.peaks["stream"].largest)))
    return Chart(
        key,
        TITLES[key],
        x=Axis("layer", ticks=thin_ticks(labels, most=16)),
        y=Axis("largest magnitude", log=True),
        lines=lines,
        notes=[probe_note(now), "What is read is the mix or sum before its norm."],
    )


def maxima(probes: Sequence[Probe], run: RunView, step: int | None) -> Chart:
    """Largest magnitude of any layer over steps, and the largest root mean square."""
    key = "depth-maxima"
    x = steps_of(probes)
    lines = []
    for part, name, colour in _PARTS:
        for dash, kind in (("solid", "largest"), ("dot", "rms")) if part == "stream" else (("solid", "largest"),):
            y = np.array([_most(getattr(one.peaks[part], kind)) if part in one.peaks else np.nan for one in probes])
            if np.isfinite(y).any():
                said = name if kind == "largest" else f"{name}: root mean square"
                lines.append(Line(said, x, y, colour, dash))  # type: ignore[arg-type]
    if not lines:
        return nothing(key, TITLES[key], _missing(probes[-1], "activations", "Activations were not recorded."))
    axis = Axis("largest magnitude", log=True)
    note = (
        "Of all layers the largest. A value that leaves its root mean square far behind is an outlier channel or token."
    )
    return chart_over_steps(key, TITLES[key], run, step, axis, lines, notes=[note])


def _most(values: Array) -> float:
    return float(np.nanmax(values)) if np.isfinite(values).any() else float("nan")


def _missing(probe: Probe, part: str, otherwise: str) -> str:
    if part in probe.lacks:
        return f"The line of step {probe.step:,} in probes.jsonl is damaged: its part {part} cannot be read."
    return otherwise


def _tall(rows: int) -> float:
    return min(2.2, 0.8 + rows / 40)
