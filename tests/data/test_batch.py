"""The batch: parts that do not fit are refused by name; padding is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trine.data import Batch


def _batch(**changes: object) -> Batch:
    fields: dict[str, object] = {
        "tokens_T": torch.tensor([1, 2, 3, 0, 0]),
        "targets_T": torch.tensor([2, 3, 4, -100, -100]),
        "weights_T": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]),
        "cu_seqlens_N1": torch.tensor([0, 3, 5], dtype=torch.int32),
        "source_N": torch.tensor([0, -1]),
    }
    return Batch(**{**fields, **changes})  # type: ignore[arg-type]


def test_counts_and_padding() -> None:
    batch = _batch(supervised_bytes=9)
    assert (batch.tokens, batch.sequences, batch.bytes) == (5, 2, 9)
    assert batch.mask_T is not None
    assert batch.mask_T.tolist() == [True, True, True, False, False]
    assert _batch(source_N=torch.tensor([0, 0])).mask_T is None


def test_to_moves_every_tensor_and_keeps_the_rest() -> None:
    batch = _batch(document_N=torch.tensor([4, -1]), supervised_bytes=7)
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    assert moved.tokens_T.device.type == moved.document_N.device.type == "meta"  # type: ignore[union-attr]
    assert moved.supervised_bytes == 7 and moved.images is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_T": torch.zeros(0, dtype=torch.int64)}, "tokens_T: found shape"),
        ({"tokens_T": torch.zeros(1, 5, dtype=torch.int64)}, "tokens_T: found shape"),
        ({"targets_T": torch.zeros(4, dtype=torch.int64)}, "targets_T: found shape"),
        ({"weights_T": torch.ones(5, dtype=torch.float64)}, "weights_T: found dtype torch.float64, need torch.float32"),
        ({"tokens_T": torch.zeros(5, dtype=torch.int32)}, "tokens_T: found dtype torch.int32, need torch.int64"),
        ({"cu_seqlens_N1": torch.tensor([0])}, "cu_seqlens_N1: found shape"),
        ({"source_N": torch.tensor([0])}, r"source_N: found shape \(1,\), need \[2\]"),
        ({"document_N": torch.tensor([0, 1, 2])}, "document_N: found shape"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _batch(**change)
    with pytest.raises(ValueError, match=message):
        replace(_batch(), **change)  # type: ignore[arg-type]
