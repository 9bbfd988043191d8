"""What only a card shows: launches that exist for the diagonal alone, and times that hang on the slowest channel.

Reading a profile and judging times are plain functions; only :func:`profiled` and :func:`timed` need the card.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from trine.decay.audit.inputs import Case, Inputs
from trine.decay.audit.lab import Declined, Lab, Measure
from trine.decay.audit.probes._probe import Probe

# The slowest channel's log-decay, from fast to none. Known cliffs stand at -0.15.
SLOWEST = (-2.0, -1.2, -0.6, -0.4, -0.3, -0.25, -0.2, -0.18, -0.15, -0.1, -0.03, -0.005)
# The slowest time may be this many times the fastest.
CLIFF_RATIO = 1.5


def only_in(unbounded: Mapping[str, float], bounded: Mapping[str, float]) -> list[tuple[str, float]]:
    """Launches of ``unbounded`` that ``bounded`` lacks, with their share of its time, largest first.

    Args:
        unbounded, bounded: microseconds by kernel name.
    """
    total = sum(unbounded.values())
    extra = [(name, time / total) for name, time in unbounded.items() if name not in bounded and total > 0]
    return sorted(extra, key=lambda item: -item[1])


def diagonal_text(unbounded: Mapping[str, float], bounded: Mapping[str, float]) -> tuple[str, dict[str, Any]]:
    """What the two profiles say, in words and figures."""
    extra, instead = only_in(unbounded, bounded), only_in(bounded, unbounded)
    facts = {
        "bounded_us": dict(bounded),
        "unbounded_us": dict(unbounded),
        "only_unbounded": dict(extra),
        "only_bounded": dict(instead),
    }
    if not unbounded or not bounded:
        return "the profiler saw no launches", facts
    times = f"bounded {sum(bounded.values()) / 1e3:.3f} ms, unbounded {sum(unbounded.values()) / 1e3:.3f} ms"
    if not extra:
        return f"{times}; the same launches", facts
    text = f"{times}; {_share(extra)} of it in launches that only gates without a bound need: {_named(extra)}"
    # What bounded gates launch in their place belongs to a fair account.
    return text + (f"; bounded gates launch instead: {_named(instead)}" if instead else ""), facts


def _share(launches: Sequence[tuple[str, float]]) -> str:
    return f"{sum(share for _, share in launches):.0%}"


def _named(launches: Sequence[tuple[str, float]]) -> str:
    """The largest six that have half a percent or more, names of templates cut short."""
    shown = [one for one in launches[:6] if one[1] >= 0.005]
    said = [f"{name if len(name) <= 60 else name[:57] + '...'} ({share:.0%})" for name, share in shown]
    return ", ".join([*said, f"{len(launches) - len(said)} smaller"] if len(launches) > len(said) else said)


def judge_cliff(times: Sequence[tuple[float, float]]) -> Measure:
    """A finding where the time jumps with the slowest channel's log-decay.

    Args:
        times: pairs (log-decay of the slowest channel, milliseconds), from fast decay to slow.
    """
    fastest, slowest = min(t for _, t in times), max(t for _, t in times)
    ratio = slowest / fastest
    facts = {"ms_by_slowest_decay": {f"{g:g}": t for g, t in times}}
    if ratio <= CLIFF_RATIO:
        return Measure(
            True, ratio, CLIFF_RATIO, f"{fastest:.3f} to {slowest:.3f} ms whatever the slowest channel", facts
        )
    jumps = [(b[1] / a[1], a, b) for a, b in itertools.pairwise(times)]
    jump, before, after = max(jumps, key=lambda j: j[0])
    text = (
        f"{slowest / fastest:.1f} times slower with a slow channel: {before[1]:.3f} ms at g = {before[0]:g}, "
        f"{after[1]:.3f} ms at g = {after[0]:g} ({jump:.1f} times)"
    )
    return Measure(False, ratio, CLIFF_RATIO, text, facts)


def profiled(call: Callable[[], Any], runs: int = 3) -> dict[str, float]:
    """Microseconds a call by the name of each kernel; of each operator where there is no card."""
    card = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA] if card else [activity.CPU]) as record:
        for _ in range(runs):
            call()
        if card:
            torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in record.key_averages():
        time = event.self_device_time_total if card else event.self_cpu_time_total
        if time > 0:
            found[event.key] = found.get(event.key, 0.0) + time / runs
    return found


def timed(call: Callable[[], Any], runs: int = 12) -> float:
    """Median milliseconds of a call on the card, after two calls that warm it up."""
    times = []
    for n in range(runs + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if n >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def with_slowest(x: Inputs, g: float) -> Inputs:
    """Channel 0 of every head at the log-decay ``g``, the others fast; A_log and dt_bias 0."""
    gate = x["gate"].clone()
    zero = {n: torch.zeros_like(x[n]) for n in ("A_log", "dt_bias") if n in x.tensors}
    share = g / x.lower_bound
    gate[..., 0] = math.log(share / (1 - share)) if x.form == "raw" else g
    return x.with_(gate=gate, **zero)


def _on_card(lab: Lab) -> str | None:
    return None if lab.device.startswith("cuda") else "runs on a CPU here; this is measured on a card"


def _large(lab: Lab) -> list[Case]:
    return [Case(lengths=(8192,), heads=16, key_dim=128, value_dim=128, gates="fast", state=False)]


def _diagonal_cases(lab: Lab) -> list[Case]:
    (forward,) = _large(lab)
    return [forward, replace(forward, what="and backward")] if lab.has_gradients else [forward]


def _diagonal(lab: Lab, case: Case) -> Measure:
    """The forward pass, or both passes; the report of both has the text of the forward pass in front."""
    x, unbounded = lab.draw(case), lab.target.unbounded
    if unbounded is None:
        return Measure(True, text="offers bounded gates only: there is nothing to compare")

    def call(run: Callable[..., Any] | None = None) -> None:
        if not case.what:
            with torch.no_grad():
                lab.call(x, run)
            return
        leaves = {n: t.detach().requires_grad_() for n, t in x.tensors.items()}
        with torch.enable_grad():
            out, _ = lab.call(x.with_(**leaves), run)
            lab.gradients(out.float().sum(), leaves)

    call()
    bounded = profiled(call)
    try:
        call(unbounded)
    except Declined as reason:
        return Measure(True, text=f"refuses gates without a bound, so nothing exists for the diagonal alone: {reason}")
    text, facts = diagonal_text(profiled(lambda: call(unbounded)), bounded)
    said = lab.shared.setdefault("diagonal", [])
    said.append(f"forward {case.what}: {text}".replace(" :", ":"))
    return Measure(True, text=" | ".join(said), facts={**facts, "passes": f"forward {case.what}".strip()})


DIAGONAL = Probe(
    "diagonal-launches",
    "which launches gates without a bound need for the diagonal alone, and their share (never a finding)",
    _diagonal_cases,
    _diagonal,
    _on_card,
    ("contract",),
    shrinks=False,
)


def _cliff(lab: Lab, case: Case) -> Measure:
    x, times = lab.draw(case), []
    with torch.no_grad():
        timed(lambda: lab.call(x))  # the card's clock rises first
        for g in SLOWEST:
            y = with_slowest(x, g)
            times.append((g, timed(lambda y=y: lab.call(y))))  # type: ignore[misc]
    return judge_cliff(times)


CLIFF = Probe(
    "decay-cliff",
    "the time does not hang on the slowest channel",
    _large,
    _cliff,
    _on_card,
    ("contract",),
    shrinks=False,
)
