"""Range of the decay factors inside one tile: a closed form, and the same question put to the numbers themselves.

A tile of C rows forms exp(G_i - G_j) (G the running sum of the log-decays) as a product of two factors around an
anchor R: the query side exp(G_i - R), the key side exp(R - G_j). Both are stored in the operands' number format, so
both must be normal numbers of it: too large is infinity, too small loses digits and then everything. Only the product
is bounded by 1 (K3 report, arXiv 2607.24653, section 2.1, and the README of ``trine.ops.kda``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Anchor = Literal["start", "first_row", "fixed_15", "half_span", "centred", "mid_row"]
FormatName = Literal["fp16", "bf16", "tf32", "fp32"]

ANCHORS: dict[str, str] = {
    "start": "before the tile's first row",
    "first_row": "the first row",
    "fixed_15": "15 below the first row, whatever g_min is",
    "half_span": "half the possible span below the first row",
    "centred": "half the possible span below the tile's start (trine)",
    "mid_row": "the middle row: depends on gates that queries before it must not see",
}
CAUSAL = frozenset(ANCHORS) - {"mid_row"}


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format of matrix operands; products are accumulated in float32 in all of them."""

    name: str
    mantissa: int  # stored bits
    max_exponent: int  # of two, of the largest numbers

    @property
    def smallest(self) -> float:
        """Smallest normal number."""
        return 2.0 ** (1 - self.max_exponent)

    @property
    def overflow(self) -> float:
        """The least number that rounds to infinity."""
        return (2.0 - 2.0 ** -(self.mantissa + 1)) * 2.0**self.max_exponent

    @property
    def unit(self) -> float:
        """Largest relative error of rounding to nearest."""
        return 2.0 ** -(self.mantissa + 1)

    def round(self, x: Tensor) -> Tensor:
        """``x`` (float32) rounded to nearest, ties to even, and kept as float32."""
        if self.name == "fp16":
            return x.half().float()
        if self.name == "bf16":
            return x.bfloat16().float()
        if self.name == "fp32":
            return x
        bits = x.contiguous().view(torch.int32)
        rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
        return torch.where(x.isfinite(), rounded.view(torch.float32), x)


FORMATS = {one.name: one for one in (NumberFormat("fp16", 10, 15), NumberFormat("bf16", 7, 127),
                                     NumberFormat("tf32", 10, 127), NumberFormat("fp32", 23, 127))}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One point of the grid.

    Raises:
        ValueError: a field out of range, by name.
    """

    g_min: float  # lower bound of the log-decay
    tile: int  # rows C
    format: str  # of the factors, a name in `FORMATS`
    anchor: str  # a name in `ANCHORS`
    head_dim: int  # K: components of a unit key are between K^-1/2 (all alike) and 1 (one alone)

    def __post_init__(self) -> None:
        if not -math.inf < self.g_min < 0:
            raise ValueError(f"g_min: found {self.g_min}, need a negative log-decay")
        if self.tile < 1:
            raise ValueError(f"tile: found {self.tile}, need at least 1 row")
        if self.head_dim < 1:
            raise ValueError(f"head_dim: found {self.head_dim}, need at least 1")
        if self.format not in FORMATS:
            raise ValueError(f"format: found {self.format!r}, need one of {', '.join(FORMATS)}")
        if self.anchor not in ANCHORS:
            raise ValueError(f"anchor: found {self.anchor!r}, need one of {', '.join(ANCHORS)}")


@dataclass(frozen=True)
class Verdict:
    """What the closed form says of a setting."""

    safe: bool  # every factor is a normal number for every gate in [g_min, 0]
    reason: str  # "" when safe
    lowest: float  # exponent of the smallest query-side factor; the largest key-side factor has its negative
    highest: float  # exponent of the largest query-side factor
    causal: bool  # earlier outputs keep every bit when later gates change
    upper_overflows: bool  # entries above the diagonal may be infinite: remove them by select, never by times zero


def exponents(setting: Setting) -> tuple[float, float]:
    """Smallest and largest G_i - R over all rows and all gates in [g_min, 0], in natural logarithms."""
    c, bound = setting.tile, -setting.g_min
    before = c // 2  # rows above the middle row
    return {
        "start": (-c * bound, 0.0),
        "first_row": (-(c - 1) * bound, 0.0),
        "fixed_15": (15 - (c - 1) * bound, 15.0),
        "half_span": (-(c - 1) * bound / 2, (c - 1) * bound / 2),
        "centred": (-c * bound / 2, c * bound / 2),
        "mid_row": (-(c - 1 - before) * bound, before * bound),
    }[setting.anchor]


def judge(setting: Setting) -> Verdict:
    """Whether every factor of a tile is a normal number of the format, in closed form.

    A query of unit norm is scaled by K^-1/2, so its components lie between K^-1 and K^-1/2 where it counts; those of a
    key between K^-1/2 and 1. Smaller components than these may vanish: what they add does.
    """
    low, high = exponents(setting)
    form = FORMATS[setting.format]
    spread = math.log(setting.head_dim) / 2
    top, bottom = math.log(form.overflow), math.log(form.smallest * (1 - form.unit / 2))
    reasons = []
    if -low >= top:
        reasons.append(f"key factor e^{-low:.4g} overflows (limit e^{top:.4g})")
    if high - spread >= top:
        reasons.append(f"query factor e^{high - spread:.4g} overflows (limit e^{top:.4g})")
    if low - 2 * spread < bottom:
        reasons.append(f"query factor e^{low - 2 * spread:.4g} underflows (limit e^{bottom:.4g})")
    if -high - spread < bottom:
        reasons.append(f"key factor e^{-high - spread:.4g} underflows (limit e^{bottom:.4g})")
    upper = (setting.tile - 1) * -setting.g_min
    return Verdict(
        safe=not reasons,
        reason="; ".join(reasons),
        lowest=low,
        highest=high,
        causal=setting.anchor in CAUSAL,
        upper_overflows=upper >= math.log(FORMATS["fp32"].overflow),
    )


def largest_bound(tile: int, format: str, anchor: str, head_dim: int) -> float | None:
    """The largest |g_min| for which `judge` says safe, rounded down to three decimals; None when none is."""
    low, high = 0, 200_000  # thousandths; a tile of one row is safe at any bound

    def safe(thousandths: int) -> bool:
        return judge(Setting(-thousandths / 1000, tile, format, anchor, head_dim)).safe

    # Every exponent grows with |g_min| except that `fixed_15` also has a constant part: safe from 0 upwards or never.
    if not safe(1):
        return None
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if safe(middle) else (low, middle)
    return low / 1000


@dataclass(frozen=True)
class Evaluation:
    """What the numbers themselves say of a setting."""

    safe: bool
    finite: bool  # no factor is infinite
    normal: bool  # none is below the smallest normal number
    error: float  # largest |product - exact| / sum |terms| on and below the diagonal; inf when it is no number


def saturated_gates(tile: int, g_min: float) -> Tensor:
    """Gates ``[patterns, tile]`` in float64 with every value 0 or ``g_min``: constant, and switched at some row."""
    row = torch.arange(tile)
    cuts = sorted({0, 1, tile // 2, tile // 2 + 1, tile - 1})
    on = torch.stack([row >= cut for cut in cuts] + [row < cut for cut in cuts] + [row % 2 == 0]).unique(dim=0)
    return torch.where(on, torch.tensor(g_min, dtype=torch.float64), torch.zeros((), dtype=torch.float64))


def anchor_of(name: str, G: Tensor, g_min: float) -> Tensor:
    """The anchor R of tiles with running sums ``G [..., C, K]``, as ``[..., 1, K]``."""
    c = G.shape[-2]
    first = G[..., :1, :]
    if name == "start":
        return torch.zeros_like(first)
    if name == "centred":
        return torch.full_like(first, c * g_min / 2)
    if name == "mid_row":
        return G[..., c // 2 : c // 2 + 1, :]
    return first + {"first_row": 0.0, "fixed_15": -15.0, "half_span": (c - 1) * g_min / 2}[name]


def evaluate(setting: Setting) -> Evaluation:
    """Form the factors and products of whole tiles in the setting's format at saturated gates: no formula involved.

    Queries and keys have unit norm: all components alike in size with mixed signs, or one alone. Running sums, exp and
    accumulation are float32, as kernels have them; the exact products are float64.
    """
    c, k, form = setting.tile, setting.head_dim, FORMATS[setting.format]
    gates = saturated_gates(c, setting.g_min)  # [P, C], the same in all channels
    G = gates.float().cumsum(-1).unsqueeze(-1)
    R = anchor_of(setting.anchor, G, setting.g_min)
    grow, shrink = (G - R).exp(), (R - G).exp()  # [P, C, 1]
    exact_G = gates.cumsum(-1)
    decay = (exact_G.unsqueeze(-1) - exact_G.unsqueeze(-2)).exp()  # [P, C, C], of use on and below the diagonal
    lower = torch.ones(c, c, dtype=torch.bool).tril()
    finite = normal = True
    worst = 0.0
    even = torch.where(torch.arange(k) % 3 == 0, -1.0, 1.0) * k**-0.5
    for vector in (even, torch.ones(1)):  # the components that are not zero
        query, key = form.round(vector * k**-0.5 * grow), form.round(vector * shrink)  # [P, C, K]
        for factor in (query, key):
            finite &= bool(factor.isfinite().all())
            normal &= bool((factor.abs() >= form.smallest).all())
        # All terms have one sign, so the exact product is the sum of their sizes. Decays below float32's range are
        # zero for every purpose.
        size = decay * k**-0.5
        error = (query @ key.mT - size).abs() / size.clamp_min(1e-30)
        worst = max(worst, float(torch.where(lower, error, 0.0).nan_to_num(nan=math.inf).max()))
    # Two roundings, then float32's own errors in exponents of up to a hundred.
    within = worst <= 2.1 * form.unit + 1e-3
    return Evaluation(finite and normal and within, finite, normal, worst)
