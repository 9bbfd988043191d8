"""How packed tokens are laid out for the chunked form: tiles of 16 rows, sequences in lockstep.

Every sequence is cut into tiles counted from its own start, so the grid never depends on what follows or stands beside
it. Tiles are ordered by step: step s holds the s-th tile of every sequence that has one, longer sequences first. The
active sequences of a step are then a prefix of those of the step before, and a step's tiles lie side by side in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trine.ops.kda._checks import TILE


@dataclass(frozen=True)
class Layout:
    """Where every token of ``sum(lengths)`` packed rows goes.

    "Slots" number the states: slot ``i < n`` is the state that enters sequence ``members[i]``, slot ``n + c`` the state
    that leaves tile ``c``.

    Attributes:
        members: indices of the non-empty sequences, longest first.
        active: number of sequences in each step; its sum is the number of tiles.
        regular: all member sequences have the same length, a multiple of 16: the layout is a permuted view.
        rows: number of tokens.
        tile_of_row, row_in_tile: place of each token (None when regular).
        enter: slot of the state that enters each tile (None when regular: tile c enters from slot c).
        pads: tile and row of the padding rows (None when there are none).
    """

    members: Tensor
    active: tuple[int, ...]
    regular: bool
    rows: int
    tile_of_row: Tensor | None
    row_in_tile: Tensor | None
    enter: Tensor | None
    pads: tuple[Tensor, Tensor] | None
    all_members: bool

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return sum(self.active)

    @property
    def grid(self) -> tuple[int, ...]:
        """Leading dimensions of tile buffers: (steps, sequences) when regular, else (tiles,)."""
        return (len(self.active), self.active[0]) if self.regular else (self.tiles,)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Leading dimensions under which token-major tensors are viewed: (sequences, steps, 16) or (rows,)."""
        return (self.active[0], len(self.active), TILE) if self.regular else (self.rows,)

    def tiled(self, x: Tensor) -> Tensor:
        """``[rows, H, X]`` -> ``[*grid, H, 16, X]``, padding rows 0; a view when regular."""
        if self.regular:
            return x.view(*self.row_shape, *x.shape[1:]).permute(1, 0, 3, 2, 4)
        assert self.tile_of_row is not None and self.row_in_tile is not None
        out = x.new_zeros(self.tiles, TILE, *x.shape[1:])
        out[self.tile_of_row, self.row_in_tile] = x
        return out.permute(0, 2, 1, 3)

    def by_row(self, x: Tensor) -> Tensor:
        """``[*grid, H, 16, X]`` -> ``[*row_shape, H, X]``; a view when regular."""
        if self.regular:
            return x.permute(1, 0, 3, 2, 4)
        assert self.tile_of_row is not None and self.row_in_tile is not None
        return x.permute(0, 2, 1, 3)[self.tile_of_row, self.row_in_tile]

    def by_step(self, x: Tensor) -> tuple[Tensor, ...]:
        """``[*grid, ...]`` -> one view ``[active, ...]`` for every step."""
        return x.unbind() if self.regular else x.split(self.active)

    def fill_pads_(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Set the padding rows of a tile buffer ``[*grid, H, 16, X]``."""
        if self.pads is not None:
            tile, row = self.pads
            x.permute(0, 2, 1, 3)[tile, row] = value
        return x

    def by_sequence(self, x: Tensor) -> Tensor:
        """``[tiles, X]`` -> ``[sequences, steps, X]`` in the sequences' natural order, zeros where one has no tile."""
        n, steps = self.active[0], len(self.active)
        if self.regular:
            return x.view(steps, n, -1).transpose(0, 1)
        out = x.new_zeros(steps, n, x.shape[-1])
        start = 0
        for step, count in enumerate(self.active):
            out[step, :count] = x[start : start + count]
            start += count
        return out[:, self.members.argsort()].transpose(0, 1)


def make_layout(lengths: Sequence[int], device: torch.device) -> Layout:
    """Lay out packed sequences of the given lengths; at least one must be non-empty."""
    counts = [-(-length // TILE) for length in lengths]
    members = sorted((i for i, c in enumerate(counts) if c), key=lambda i: -counts[i])
    n, steps = len(members), counts[members[0]]
    sizes = {lengths[i] for i in members}
    member_ids = torch.tensor(members, device=device)
    if len(sizes) == 1 and lengths[members[0]] % TILE == 0:
        return Layout(
            members=member_ids,
            active=(n,) * steps,
            regular=True,
            rows=sum(lengths),
            tile_of_row=None,
            row_in_tile=None,
            enter=None,
            pads=None,
            all_members=members == list(range(len(lengths))),
        )
    tiles_of = torch.tensor([counts[i] for i in members])
    active = (tiles_of[None, :] > torch.arange(steps)[:, None]).sum(1)
    start = torch.cumsum(active, 0) - active
    rank = torch.full((len(lengths),), -1)
    rank[member_ids.cpu()] = torch.arange(n)
    length = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), length)
    position = torch.arange(sum(lengths)) - (torch.cumsum(length, 0) - length)[sequence]
    tile = start[position // TILE] + rank[sequence]
    row = position % TILE
    # entering slot of tile (s, r): slot r at step 0, else the slot of tile (s - 1, r)
    step_of = torch.repeat_interleave(torch.arange(steps), active)
    rank_of = torch.arange(int(active.sum())) - start[step_of]
    enter = torch.where(step_of == 0, rank_of, n + start[(step_of - 1).clamp(min=0)] + rank_of)
    filled = torch.zeros(int(active.sum()), TILE, dtype=torch.bool)
    filled[tile, row] = True
    pads = (~filled).nonzero(as_tuple=True)
    return Layout(
        members=member_ids,
        active=tuple(active.tolist()),
        regular=False,
        rows=sum(lengths),
        tile_of_row=tile.to(device),
        row_in_tile=row.to(device),
        enter=enter.to(device),
        pads=(pads[0].to(device), pads[1].to(device)) if len(pads[0]) else None,
        all_members=members == list(range(len(lengths))),
    )
