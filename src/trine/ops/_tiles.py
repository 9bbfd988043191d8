"""How much a portable operator works on at a time: what stays in the cache of a CPU, large pieces on a card.

On a CPU the passes over a tile after the first should come from the cache, and a call costs next to nothing. On a card
every call costs a launch, some 5 us of the host's time, in which the card itself moves tens of megabytes; so a tile
there is as large as scratch memory may be, and most calls of an operator are one tile. The sizes depend on the kind of
device and on widths, never on the number of tokens or the data: a tile's place decides its shape.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CACHE = 1 << 16  # elements of a tile on a CPU; 256 KiB in float32
CARD = 1 << 24  # elements of a tile on a card; 64 MiB in float32, an operator holds a few such buffers


def on_card(device: torch.device) -> bool:
    """Whether operations on ``device`` are launches, to be few and large."""
    return device.type != "cpu"


def tile_rows(width: int, device: torch.device) -> int:
    """Rows of ``width`` elements each that are worked on at a time, at least 1."""
    return max(1, (CARD if on_card(device) else CACHE) // max(width, 1))


def row_tiles(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover ``rows`` rows of ``width`` elements, each of `tile_rows` rows but for the last."""
    step = tile_rows(width, device)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
