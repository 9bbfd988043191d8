"""Joining the tiles of a chunk: the products between its tiles, the inverse over all its rows, and back.

A tile's factors are anchored at its own start. Between tiles s < t the decay from row j of s to the end of s, then
across the tiles between, then from the start of t to row i: each part is <= 1, so nothing leaves the range whatever the
distance. "End factors" carry the first two parts. They start as those of each tile and are moved forward tile by tile;
moved past the last tile they are the factors that write to the state.

Shapes: N = chunks * heads, m tiles a chunk, C = 16 m rows. With m = 1 there is nothing to join.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops.kda._checks import TILE


def tiles_in_chunk(key_dim: int, value_dim: int) -> int:
    """Tiles of 16 rows a chunk, from the size of the state only, so that it never changes with the tokens.

    A chunk writes one state. Wide states are dear to write and read, narrow ones cheap against the products between
    tiles.
    """
    state = key_dim * value_dim
    return 1 if state <= 40 * 40 else 2 if state <= 96 * 96 else 4


def diagonal_blocks(x: Tensor, m: int) -> Tensor:
    """View ``[N, m, r, 16]`` of the blocks on the diagonal of ``[N, m * r, m * 16]``."""
    n, rows, columns = x.shape
    blocks = x.view(n, m, rows // m, m, columns // m)
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def join(
    reads: Tensor, end: Tensor, decay: Tensor, P_tiles: Tensor, A_tiles: Tensor, unshift: float
) -> tuple[Tensor, Tensor, Tensor]:
    """From tiles to chunks.

    Args:
        reads: [q~; k~] ``[N, m, 32, K]``, times c.
        end: end factors ``[N, C, K]``; moved in place to the end of the chunk.
        decay: of each tile ``[N, m, K]``.
        P_tiles, A_tiles: P and (I + M)^-1 of each tile ``[N * m, 16, 16]``.
        unshift: 1 / c.

    Returns:
        P and A of the chunk ``[N, C, C]``, and ``reads`` moved back to the chunk's start ``[N, m, 32, K]``.
    """
    n, m, _, _ = reads.shape
    P, A = reads.new_zeros(2, n, m * TILE, m * TILE)
    diagonal_blocks(P, m).copy_(P_tiles.view(n, m, TILE, TILE))
    diagonal_blocks(A, m).copy_(A_tiles.view(n, m, TILE, TILE))
    from_start = torch.empty_like(reads)
    from_start[:, 0] = reads[:, 0]
    before = decay[:, 0]
    for t in range(1, m):
        done = t * TILE
        if t > 1:
            end[:, : done - TILE].mul_(decay[:, t - 1, None])
        block = torch.bmm(reads[:, t], end[:, :done].mT).mul_(unshift)
        P[:, done : done + TILE, :done] = block[:, :TILE]
        solved = torch.bmm(block[:, TILE:], A[:, :done, :done])
        A[:, done : done + TILE, :done] = torch.bmm(A[:, done : done + TILE, done : done + TILE], solved).neg_()
        torch.mul(reads[:, t], before[:, None], out=from_start[:, t])
        before = before * decay[:, t]
    end[:, :-TILE].mul_(decay[:, m - 1, None])
    return P, A, from_start


def join_backward(
    reads: Tensor, end: Tensor, decay: Tensor, d_products: Tensor, d_reads: Tensor, d_end: Tensor, unshift: float
) -> None:
    """Gradients of the factors of each tile from those of the chunk, in place.

    Args:
        reads, decay, unshift: as in ``join``.
        end: end factors of each tile ``[N, C, K]``; overwritten.
        d_products: gradients of [P; M] tile by tile ``[N, m * 32, C]``.
        d_reads: gradient of ``reads`` moved to the chunk's start ``[N, m, 32, K]``; becomes that of ``reads`` but for
            what comes from the tiles' own products.
        d_end: gradient of the end factors at the chunk's end ``[N, C, K]``; becomes that at each tile's end.
    """
    m = reads.shape[1]
    before = decay[:, 0]
    for t in range(1, m):
        done = t * TILE
        if t > 1:
            end[:, : done - TILE].mul_(decay[:, t - 1, None])
        inside = torch.bmm(d_products[:, 2 * done : 2 * done + 2 * TILE, :done], end[:, :done])
        d_reads[:, t].mul_(before[:, None]).add_(inside, alpha=unshift)
        before = before * decay[:, t]
    for t in range(m - 1, 0, -1):
        done = t * TILE
        inside = torch.bmm(d_products[:, 2 * done : 2 * done + 2 * TILE, :done].mT, reads[:, t])
        d_end[:, :done].mul_(decay[:, t, None]).add_(inside, alpha=unshift)
