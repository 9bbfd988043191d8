"""Least squares: the bounded gate that comes closest to a softplus gate on given gate inputs, channel by channel.

A channel's softplus gate is g(u) = -exp(A) softplus(u + b) (Kimi Linear, arXiv 2510.26692); the bounded one is
g_min sigmoid(a u + c) (K3 report, arXiv 2607.24653, Eq. 5, with a the product of exp(A_log) and a factor on the
channel's row of the decay projection). Slope a > 0 and shift c are found by Levenberg and Marquardt's method on the
decays exp(g): where a channel is slow that is least squares on g itself, and where it forgets all at once, a gate of
-8 or of -5 makes no difference and must not pull the fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trine.ops.kda.gate import log_decay

_ITERATIONS = 80
_CHUNK = 4_000_000  # numbers of one working array


@dataclass(frozen=True)
class Fit:
    """Bounded gates g_min sigmoid(slope u + shift); float64."""

    slope_HK: Tensor
    shift_HK: Tensor

    def decay(self, u_THK: Tensor, g_min: float) -> Tensor:
        """Log-decays of gate inputs ``[T, H, K]``."""
        return g_min * torch.sigmoid(self.slope_HK * u_THK + self.shift_HK)

    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        """``A_log [H]``, ``dt_bias [H, K]`` and the factor ``[H, K]`` of the rows of the decay projection.

        A head has one slope; its channels' own go into their rows. exp(A_log) is their geometric mean, so a model whose
        slopes agree inside heads keeps its projection.
        """
        A_log_H = self.slope_HK.log().mean(-1)
        rate_H1 = A_log_H.exp()[:, None]
        return A_log_H, self.shift_HK / rate_H1, self.slope_HK / rate_H1


def softplus_decay(u_THK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor) -> Tensor:
    """Log-decays of the softplus gate, float64."""
    return log_decay(u_THK.double(), A_log_H.double(), dt_bias_HK.double(), "softplus", 0.0)


def fit_bounded(u_THK: Tensor, g_THK: Tensor, g_min: float) -> Fit:
    """The slope and shift of every channel that bring exp(g_min sigmoid(slope u + shift)) closest to exp(g).

    Args:
        u_THK: gate inputs, bias not added, float64.
        g_THK: log-decays to be met at them, of any gate that falls with u.
        g_min: the bound.

    Raises:
        ValueError: fewer than two tokens, or a bound that is not negative.
    """
    if not -math.inf < g_min < 0:
        raise ValueError(f"g_min: found {g_min}, need a negative log-decay")
    if u_THK.shape[0] < 2:
        raise ValueError(f"inputs: found {u_THK.shape[0]} token, need at least 2 to fit a slope and a shift")
    t, h, k = u_THK.shape
    u, g = (x.double().reshape(t, h * k) for x in (u_THK, g_THK))
    step = max(1, _CHUNK // t)
    pieces = [_fit_channels(u[:, i : i + step], g[:, i : i + step], g_min) for i in range(0, h * k, step)]
    log_slope, shift = (torch.cat(parts).view(h, k) for parts in zip(*pieces, strict=True))
    return Fit(log_slope.exp(), shift)


def _fit_channels(u: Tensor, g: Tensor, g_min: float) -> tuple[Tensor, Tensor]:
    """Log slope and shift of C channels from ``[T, C]``."""
    target = torch.expm1(g)
    log_slope, shift = _best_start(u, g, target, g_min)
    damping = torch.full_like(shift, 1e-3)
    cost, pieces = _cost(u, target, log_slope, shift, g_min)
    for _ in range(_ITERATIONS):
        residual, by_z = pieces
        by_slope = by_z * u * log_slope.exp()
        h11, h12, h22 = by_slope.square().sum(0), (by_slope * by_z).sum(0), by_z.square().sum(0)
        r1, r2 = (by_slope * residual).sum(0), (by_z * residual).sum(0)
        d11, d22 = h11 * (1 + damping) + 1e-300, h22 * (1 + damping) + 1e-300
        determinant = (d11 * d22 - h12.square()).clamp_min(1e-300)
        move1 = ((h12 * r2 - d22 * r1) / determinant).clamp(-1, 1)  # a slope changes by less than a factor of e a step
        move2 = ((h12 * r1 - d11 * r2) / determinant).clamp(-4, 4)
        new_cost, new_pieces = _cost(u, target, log_slope + move1, shift + move2, g_min)
        better = new_cost <= cost
        log_slope, shift = (torch.where(better, x + m, x) for x, m in ((log_slope, move1), (shift, move2)))
        damping = torch.where(better, damping * 0.2, damping * 5).clamp(1e-12, 1e12)
        moved = torch.where(better, move1.abs() + move2.abs(), torch.zeros_like(move1))
        cost = torch.where(better, new_cost, cost)
        pieces = tuple(torch.where(better, new, old) for new, old in zip(new_pieces, pieces, strict=True))
        if bool(((moved < 1e-12) & (better | (damping > 1e9))).all()):
            break
    return log_slope, shift


def _cost(
    u: Tensor, target: Tensor, log_slope: Tensor, shift: Tensor, g_min: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sum of squares ``[C]``, the residuals and their slopes in the logit ``[T, C]``."""
    s = torch.sigmoid(log_slope.exp() * u + shift)
    reached = torch.expm1(g_min * s)
    residual = reached - target
    return residual.square().sum(0), (residual, (reached + 1) * g_min * s * (1 - s))


def _best_start(u: Tensor, g: Tensor, target: Tensor, g_min: float) -> tuple[Tensor, Tensor]:
    """The best of several beginnings: lines through two points of the logit of g / g_min, and slope 1 in the tail.

    Where a softplus gate is slow it is exp(A + u + b), and the bounded one is |g_min| exp(a u + c): slope 1 is then
    exact.
    """
    order = u.argsort(0)
    last = u.shape[0] - 1

    def at(share: float) -> tuple[Tensor, Tensor]:
        row = order[round(share * last)].unsqueeze(0)
        share_of_bound = (g.gather(0, row) / g_min).clamp(1e-12, 0.98)
        return u.gather(0, row)[0], torch.logit(share_of_bound)[0]

    starts = []
    for low, high in ((0.05, 0.95), (0.5, 0.99), (0.25, 0.75)):
        (u0, z0), (u1, z1) = at(low), at(high)
        slope = ((z1 - z0) / (u1 - u0).clamp_min(1e-9)).clamp(1e-3, 1e3)
        starts.append((slope.log(), z1 - slope * u1))
    u1, z1 = at(0.9)
    starts.append((torch.zeros_like(u1), z1 - u1))
    costs = torch.stack([_cost(u, target, *start, g_min)[0] for start in starts])
    best = costs.argmin(0, keepdim=True)
    log_slope, shift = (torch.stack(parts).gather(0, best)[0] for parts in zip(*starts, strict=True))
    return log_slope, shift
