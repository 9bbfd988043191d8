"""Choosing an implementation: automatic choice runs, an explicit one that cannot says why."""

from __future__ import annotations

import logging

import pytest

from trine.ops import BackendUnavailable
from trine.ops._backend import pick


def test_auto_takes_the_first_that_can_run_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    reasons = {"triton": "needs a CUDA card, found cpu tensors", "torch": None, "reference": None}
    with caplog.at_level(logging.INFO, logger="trine"):
        assert [pick("test_operator", "auto", "cpu", reasons) for _ in range(3)] == ["torch"] * 3
    assert [r.getMessage() for r in caplog.records] == ["test_operator runs on backend 'torch' for cpu tensors"]


def test_an_explicit_choice_is_kept_or_refused() -> None:
    reasons = {"triton": "needs a CUDA card, found cpu tensors", "torch": None}
    assert pick("op", "torch", "cpu", reasons) == "torch"
    with pytest.raises(BackendUnavailable) as error:
        pick("op", "triton", "cpu", reasons)
    assert str(error.value) == "op: backend 'triton' cannot run here: needs a CUDA card, found cpu tensors"
    with pytest.raises(ValueError) as wrong:
        pick("op", "cuda", "cpu", reasons)
    assert str(wrong.value) == "backend: found 'cuda', need one of ['auto', 'triton', 'torch'] for op"
    with pytest.raises(BackendUnavailable, match="op: no backend can run: triton: no"):
        pick("op", "auto", "cpu", {"triton": "no"})
