"""The position-pair form of a tile: exp(G_i - G_j) for every pair of its 16 rows, one value a channel.

A bounded gate lets each causal tile be a plain matrix product (``torch_chunked``). Without a bound the factors exp(G_i)
and exp(-G_j) leave the range of float32, and the decay between two rows has to be formed pair by pair, 16 times the
elementwise work. This file holds that form. Gates of any size need it; for bounded gates it is the baseline
``kda_pairwise``.

The exponents are sums over the rows between i and j, all of one sign, so nothing cancels however large the decays are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trine.ops.kda._checks import TILE, check_inputs

BLOCK = 128  # tiles handled at once; bounds the memory of the pairs to BLOCK * 256 * K values


@cache
def _segments(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[256, 16]``: row (i, j) sums the gates of rows j+1 .. i; zero unless j < i."""
    i, j, row = torch.meshgrid(*(torch.arange(TILE),) * 3, indexing="ij")
    return ((j < row) & (row <= i)).to(dtype).view(TILE * TILE, TILE).to(device)


@cache
def _ends(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[32, 16]``: rows 0-15 sum the gates up to and with a row, rows 16-31 those after it."""
    i, row = torch.meshgrid(*(torch.arange(TILE),) * 2, indexing="ij")
    return torch.cat([row <= i, row > i]).to(dtype).to(device)


def end_decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Decay from the tile's start to each row, and from each row to the tile's end; ``[tiles, 16, K]`` each, <= 1."""
    sums = torch.matmul(_ends(g.dtype, g.device), g).exp_()
    return sums[:, :TILE], sums[:, TILE:]


def _pairs(w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Decays exp(G_i - G_j) and write keys w_j times them, ``[tiles * 16 (i), 16 (j), K]`` each."""
    decay = torch.matmul(_segments(g.dtype, g.device), g).exp_().view(-1, TILE, TILE, g.shape[-1])
    return decay.flatten(0, 1), (decay * w[:, None]).flatten(0, 1)


def _readers(x: Tensor, rows: int) -> Tensor:
    """``[tiles, 32, .]`` (queries, then keys) -> ``[tiles * 16, 2, .]``."""
    return x.view(-1, 2, TILE, rows).transpose(1, 2).reshape(-1, 2, rows)


def pair_products(reads: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """sum_d reads_id w_jd exp(G_i - G_j)_d for j <= i.

    Args:
        reads: ``[tiles, 32, K]``: 16 query rows, then 16 read-key rows.
        w: write keys ``[tiles, 16, K]``.
        g: log-decays ``[tiles, 16, K]``, any size.

    Returns:
        ``[tiles, 32, 16]``; entries above the diagonal are finite and meaningless.
    """
    out = reads.new_empty(reads.shape[0], 2 * TILE, TILE)
    for i in range(0, len(g), BLOCK):
        part = slice(i, i + BLOCK)
        _, keys = _pairs(w[part], g[part])
        products = torch.bmm(_readers(reads[part], g.shape[-1]), keys.mT)
        out[part].view(-1, 2, TILE, TILE).copy_(products.view(-1, TILE, 2, TILE).transpose(1, 2))
    return out


def pair_gradients(dproducts: Tensor, reads: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``reads`` and ``w`` in ``pair_products``; ``dproducts`` is zero on and above the diagonal."""
    dreads, dw = torch.empty_like(reads), torch.empty_like(w)
    for i in range(0, len(g), BLOCK):
        part = slice(i, i + BLOCK)
        decay, keys = _pairs(w[part], g[part])
        d = _readers(dproducts[part], TILE)
        by_row = torch.bmm(d, keys)
        dreads[part].view(-1, 2, TILE, g.shape[-1]).copy_(by_row.view(-1, TILE, 2, g.shape[-1]).transpose(1, 2))
        columns = torch.bmm(d.mT, _readers(reads[part], g.shape[-1])).mul_(decay)
        dw[part] = columns.view(-1, TILE, TILE, g.shape[-1]).sum(1)
    return dreads, dw


def kda_pairwise(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, **keywords: Any
) -> tuple[Tensor, Tensor | None]:
    """:func:`trine.ops.kda.kda` with every tile in the position-pair form: what the bounded gate makes unnecessary.

    Same arguments, results, errors and gradients as ``kda``; a baseline for timing and a check of the factored tiles.
    """
    from trine.ops.kda import _run_torch

    defaults: dict[str, Any] = {"gate_kind": "bounded", "lower_bound": -5.0, "plan": "auto"}
    names = ("A_log", "dt_bias", "gate_kind", "lower_bound", "initial_state", "cu_seqlens", "plan")
    checked: dict[str, Any] = {name: keywords.get(name, defaults.get(name)) for name in names}
    check_inputs(q, k, v, gate, beta, **checked)
    return _run_torch(q, k, v, gate, beta, pairs=True, **keywords)
