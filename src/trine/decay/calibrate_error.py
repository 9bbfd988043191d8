"""Error of the chunked form when the operands of its products are rounded, tile by tile as kernels do it.

Emulated on the CPU: both factors of the tile products, the inverse, the state and the written values are rounded to the
format before each product; running sums, exp, the inverse's solution, accumulation and the state itself are float32.
The yardstick is `trine.ops.kda` in float64 with decays formed pair by pair, which knows no anchor and no range.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trine.decay.calibrate_range import FORMATS, anchor_of
from trine.ops.kda import kda


@dataclass(frozen=True)
class Sample:
    """One sequence of one head, float32: q, k, v, g ``[T, K]`` (V = K), beta ``[T, 1]``; q and k have unit norm."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def draw(g_min: float, head_dim: int, length: int, seed: int = 0) -> Sample:
    """A sequence whose channels are saturated at ``g_min`` (a quarter), as slow as the sequence is long (a quarter), or
    wander between (half): g_min * sigmoid(N(-2, 3^2))."""
    random = torch.Generator().manual_seed(seed)
    q, k, v, z = (torch.randn(length, head_dim, generator=random) for _ in range(4))
    g = g_min * torch.sigmoid(3 * z - 2)
    kind = torch.arange(head_dim) % 4
    g[:, kind == 0] = g_min
    g[:, kind == 1] = max(-1.0 / length, g_min)
    beta = torch.sigmoid(torch.randn(length, 1, generator=random))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return Sample(q, k, v, g, beta)


def exact(sample: Sample) -> tuple[Tensor, Tensor]:
    """Outputs ``[T, V]`` and final state ``[K, V]`` in float64."""
    q, k, v, g, beta = (x.double()[None, :, None] for x in (sample.q, sample.k, sample.v, sample.g, sample.beta))
    out, state = kda(
        q, k, v, g, beta[..., 0], gate_kind="log_decay", qk_norm=False, beta_is_logit=False, output_final_state=True,
        backend="torch",
    )  # fmt: skip
    assert state is not None
    return out[0, :, 0], state[0, 0]


def rounded(sample: Sample, tile: int, ways: Sequence[tuple[str, str]], g_min: float) -> tuple[Tensor, Tensor]:
    """Outputs ``[W, T, V]`` and final states ``[W, K, V]`` of the chunked form in W ways at once.

    Args:
        sample: the sequence; tokens are padded to whole tiles.
        tile: rows C.
        ways: (format, anchor) pairs.
        g_min: the bound that fixed anchors are placed by.
    """
    length, channels = sample.q.shape
    count = -(-length // tile)

    def tiled(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, count * tile - length)).view(count, tile, -1)

    q, k, v = tiled(sample.q) * channels**-0.5, tiled(sample.k), tiled(sample.v)
    write = k * tiled(sample.beta)
    G = tiled(sample.g).cumsum(1)
    parts: list[list[Tensor]] = [[] for _ in range(5)]
    for form_name, anchor in ways:
        form = FORMATS[form_name]
        R = anchor_of(anchor, G, g_min)
        grow, shrink = (G - R).exp(), (R - G).exp()
        key_side = form.round(write * shrink)
        P = (form.round(q * grow) @ key_side.mT).tril()
        M = (form.round(k * grow) @ key_side.mT).tril(-1)
        # Unit lower triangular: what stands above the diagonal is never read, so infinities there do no harm.
        A = torch.linalg.solve_triangular(M, torch.eye(tile).expand_as(M), upper=False, unitriangular=True)
        start, end = G.exp(), (G[:, -1:] - G).exp()
        made = (P, A, q * start, k * start, write * end)
        for into, one in zip(parts, made, strict=True):
            into.append(form.round(one))
    P, A, from_q, from_k, into_state = (torch.stack(part, 1) for part in parts)  # [n, W, ...]
    decay = G[:, -1].exp().unsqueeze(-1)  # [n, K, 1]
    names = [name for name, _ in ways]

    def each(x: Tensor) -> Tensor:
        return torch.stack([FORMATS[name].round(x[i]) for i, name in enumerate(names)])

    state = torch.zeros(len(ways), channels, channels)
    outs = []
    for n in range(count):
        operand = each(state)
        y = each(A[n] @ each(v[n] - from_k[n] @ operand))
        outs.append(from_q[n] @ operand + P[n] @ y)
        state = state * decay[n] + into_state[n].mT @ y
    return torch.cat(outs, 1)[:, :length], state


@functools.lru_cache(maxsize=64)
def _exact_of(g_min: float, head_dim: int, length: int) -> tuple[Sample, Tensor, Tensor]:
    sample = draw(g_min, head_dim, length)
    return sample, *exact(sample)


def errors(
    g_min: float, tile: int, head_dim: int, length: int, ways: Sequence[tuple[str, str]]
) -> list[tuple[float, float]]:
    """Relative error (Frobenius norm) of outputs and of the final state for each (format, anchor) of ``ways``."""
    sample, out_TV, state_KV = _exact_of(g_min, head_dim, length)
    found, states = rounded(sample, tile, ways, g_min)

    def relative(x: Tensor, y: Tensor) -> float:
        return float((x.double() - y).norm() / y.norm())

    return [(relative(found[i], out_TV), relative(states[i], state_KV)) for i in range(len(ways))]
