"""Bounds of packed sequences: what is not one is named."""

from __future__ import annotations

import pytest
import torch

from trine.ops._sequences import check_cu_seqlens


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("values", [[0, 5], [0, 0, 5, 5], [0, 2, 5]])
def test_good_bounds(values: list[int], dtype: torch.dtype) -> None:
    check_cu_seqlens(torch.tensor(values, dtype=dtype), 1, 5)


@pytest.mark.parametrize(
    ("cu_seqlens", "batch", "message"),
    [
        (torch.tensor([0.0, 5.0]), 1, "cu_seqlens: found dtype torch.float32, need int32 or int64"),
        (torch.tensor([0]), 1, "cu_seqlens: found shape (1,), need [N+1] with N >= 1"),
        (torch.tensor([[0, 5]]), 1, "cu_seqlens: found shape (1, 2), need [N+1] with N >= 1"),
        (torch.tensor([0, 5]), 2, "cu_seqlens: packed sequences need batch size 1, found 2"),
        (torch.tensor([1, 5]), 1, "cu_seqlens: found first value 1, need 0"),
        (
            torch.tensor([0, 4, 3, 5]),
            1,
            "cu_seqlens: found a decrease from 4 to 3 at index 2, need non-decreasing values",
        ),
        (torch.tensor([0, 4]), 1, "cu_seqlens: found last value 4, need the number of tokens, 5"),
        (torch.tensor([0, 6]), 1, "cu_seqlens: found last value 6, need the number of tokens, 5"),
    ],
)
def test_bad_bounds_are_named(cu_seqlens: torch.Tensor, batch: int, message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_cu_seqlens(cu_seqlens, batch, 5)
    assert str(error.value) == message
