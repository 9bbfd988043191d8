"""How packed tokens are laid out for the chunked form: tiles of 16 rows, chunks of a few tiles, sequences in lockstep.

Every sequence is cut into chunks counted from its own start, so the grid never depends on what follows or stands beside
it. Chunks are ordered by step: step s holds the s-th chunk of every sequence that has one, longer sequences first. The
active sequences of a step are then a prefix of those of the step before, and a step's chunks lie side by side in
memory.
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

    "Slots" number the states between chunks: slot ``i < n`` is the state that enters sequence ``members[i]``, slot
    ``n + c`` the state that leaves chunk ``c``.

    Attributes:
        split: tiles in a chunk.
        members: indices of the non-empty sequences, longest first.
        in_order: the members are all sequences, in their own order.
        active: number of sequences in each step; its sum is the number of chunks.
        rows: number of tokens.
        place: chunk, tile and row of each token; None when all members have the same length, a multiple of the chunk,
            and the layout is a permuted view ("regular").
        enter: slot of the state that enters each chunk (None when regular: chunk c enters from slot c).
        pads: chunk, tile and row of the padding rows (None when there are none).
    """

    split: int
    members: Tensor
    in_order: bool
    active: tuple[int, ...]
    rows: int
    place: tuple[Tensor, Tensor, Tensor] | None = None
    enter: Tensor | None = None
    pads: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return sum(self.active)

    @property
    def grid(self) -> tuple[int, ...]:
        """Leading dimensions of chunk buffers: (steps, sequences) when regular, else (chunks,)."""
        return (len(self.active), self.active[0]) if self.place is None else (self.chunks,)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Leading dimensions under which token-major tensors are viewed: (sequences, steps, split, 16) or (rows,)."""
        if self.place is None:
            return self.active[0], len(self.active), self.split, TILE
        return (self.rows,)

    def tiled(self, x: Tensor) -> Tensor:
        """``[rows, H, X]`` -> ``[*grid, H, split, 16, X]``, padding rows 0; a view when regular."""
        if self.place is None:
            return x.view(*self.row_shape, *x.shape[1:]).permute(1, 0, 4, 2, 3, 5)
        out = x.new_zeros(self.chunks, self.split, TILE, *x.shape[1:])
        out[self.place] = x
        return out.permute(0, 3, 1, 2, 4)

    def by_row(self, x: Tensor) -> Tensor:
        """``[*grid, H, split, 16, X]`` -> ``[*row_shape, H, X]``; a view when regular."""
        if self.place is None:
            return x.permute(1, 0, 3, 4, 2, 5)
        return x.permute(0, 2, 3, 1, 4)[self.place]

    def by_step(self, x: Tensor) -> tuple[Tensor, ...]:
        """``[*grid, ...]`` -> one view ``[active, ...]`` for every step."""
        return x.unbind() if self.place is None else x.split(self.active)

    def fill_pads_(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Set the padding rows of a chunk buffer ``[*grid, H, split, 16, X]``."""
        if self.pads is not None:
            x.permute(0, 2, 3, 1, 4)[self.pads] = value
        return x

    def by_sequence(self, x: Tensor) -> Tensor:
        """``[chunks, X]`` -> ``[sequences, steps, X]``, sequences in their own order, zeros where one has no chunk."""
        n, steps = self.active[0], len(self.active)
        if self.place is None:
            return x.view(steps, n, -1).transpose(0, 1)
        out = x.new_zeros(steps, n, x.shape[-1])
        start = 0
        for step, count in enumerate(self.active):
            out[step, :count] = x[start : start + count]
            start += count
        return out[:, self.members.argsort()].transpose(0, 1)


def make_layout(lengths: Sequence[int], split: int, device: torch.device) -> Layout:
    """Lay out packed sequences of the given lengths, at least one of them non-empty, in chunks of ``split`` tiles."""
    size = split * TILE
    counts = [-(-length // size) for length in lengths]
    members = sorted((i for i, c in enumerate(counts) if c), key=lambda i: -counts[i])
    n, steps = len(members), counts[members[0]]
    sizes = {lengths[i] for i in members}
    member_ids = torch.tensor(members, device=device)
    in_order = members == list(range(len(lengths)))
    if len(sizes) == 1 and lengths[members[0]] % size == 0:
        return Layout(split, member_ids, in_order, (n,) * steps, sum(lengths))
    chunks_of = torch.tensor([counts[i] for i in members])
    active = (chunks_of[None, :] > torch.arange(steps)[:, None]).sum(1)
    start = torch.cumsum(active, 0) - active
    rank = torch.full((len(lengths),), -1)
    rank[member_ids.cpu()] = torch.arange(n)
    length = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), length)
    position = torch.arange(sum(lengths)) - (torch.cumsum(length, 0) - length)[sequence]
    chunk = start[position // size] + rank[sequence]
    place = (chunk, position % size // TILE, position % TILE)
    # The state that enters chunk (s, r) stands in slot r at step 0, else in the slot of chunk (s - 1, r).
    step_of = torch.repeat_interleave(torch.arange(steps), active)
    rank_of = torch.arange(int(active.sum())) - start[step_of]
    enter = torch.where(step_of == 0, rank_of, n + start[(step_of - 1).clamp(min=0)] + rank_of)
    filled = torch.zeros(int(active.sum()), split, TILE, dtype=torch.bool)
    filled[place] = True
    pads = (~filled).nonzero(as_tuple=True)
    return Layout(
        split,
        member_ids,
        in_order,
        tuple(active.tolist()),
        sum(lengths),
        place=(place[0].to(device), place[1].to(device), place[2].to(device)),
        enter=enter.to(device),
        pads=(pads[0].to(device), pads[1].to(device), pads[2].to(device)) if len(pads[0]) else None,
    )
