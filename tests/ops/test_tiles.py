"""Sizes of tiles by device."""

from __future__ import annotations

import torch

from trine.ops._tiles import CARD, on_card, row_tiles, tile_rows

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_tile_fits_the_cache_of_a_cpu_and_is_large_on_anything_else() -> None:
    assert not on_card(CPU) and on_card(META) and on_card(torch.device("cuda", 1))
    assert [tile_rows(width, CPU) for width in (0, 1, 64, 768, 1 << 20)] == [65536, 65536, 1024, 85, 1]
    assert [tile_rows(width, META) for width in (1, 768, 1 << 30)] == [CARD, CARD // 768, 1]


def test_tiles_cover_the_rows_once_and_a_step_is_one_tile_on_a_card() -> None:
    parts = list(row_tiles(200, 768, CPU))
    assert parts == [slice(0, 85), slice(85, 170), slice(170, 200)]
    assert list(row_tiles(8192, 768, META)) == [slice(0, 8192)]
    assert list(row_tiles(0, 768, CPU)) == []
