"""Error words: what kernels found wrong is raised once, by name, wherever it happened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import trine
from trine.ops import _errors

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    _errors._words.clear()
    yield
    _errors._words.clear()


def test_nothing_to_report_where_no_kernel_has_run() -> None:
    trine.check_errors()
    trine.check_errors("cuda")
    assert _errors._words == {}


@pytest.mark.parametrize(("word", "text"), [(_errors.CU_SEQLENS, "cu_seqlens"), (_errors.STATE_INDICES, "state_ind")])
def test_a_word_is_raised_once(word: int, text: str) -> None:
    _errors.error_words(CPU)[word] = 1
    trine.check_errors("cuda")
    with pytest.raises(ValueError, match=rf"^{text}.*: values on cpu "):
        trine.check_errors()
    trine.check_errors()
    assert _errors.error_words(CPU).tolist() == [0, 0]


def test_both_words_are_told_together() -> None:
    with torch.inference_mode():
        _errors.error_words(CPU)[:] = 1
    with pytest.raises(ValueError, match=r"cu_seqlens: .*; state_indices: "):
        trine.check_errors(CPU)
