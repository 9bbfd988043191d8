"""Choosing launch parameters: only correct ones, and a table that can be written again."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as the tests of the kernels, which may share this process

from trine.ops import BackendUnavailable
from trine.ops.kda import triton_tune as tuning
from trine.ops.kda.triton_config import choose, segment_length
from trine.ops.kda.triton_table import CARD, FORWARD, SEGMENTS

A, B, C = (64, 4, 3, 2), (32, 4, 3, 2), (128, 8, 2, 2)
TIMES = {A: 1.0, B: 0.5, C: 0.985}


def trials(*wrong: tuple[int, ...]) -> list[tuning.Trial]:
    return tuning.fastest([A, B, C], lambda row: "wrong" if row in wrong else None, TIMES.__getitem__)


def test_the_fastest_correct_candidate_is_chosen() -> None:
    assert tuning.chosen(trials(), A) == B
    assert [t.row for t in trials(B)] == [C, A, B] and trials(B)[-1].refused == "wrong"


def test_a_wrong_candidate_is_refused_however_fast() -> None:
    assert tuning.chosen(trials(B), A) == A  # C gains less than is worth a change
    assert tuning.chosen(trials(B, A), A) == C
    with pytest.raises(ValueError, match="no candidate is correct here"):
        tuning.chosen(trials(A, B, C), A)


def test_the_committed_table_is_what_would_be_written() -> None:
    assert tuning.TABLE.read_text() == tuning.render(CARD, FORWARD, SEGMENTS)


def test_candidates_begin_with_the_committed_row_and_repeat_none() -> None:
    for kind, width in FORWARD:
        rows = tuning.candidates(kind, width)
        assert rows[0] == FORWARD[kind, width] and len(rows) == len(set(rows)) > 8


def test_the_table_decides() -> None:
    config = choose(96, 128, 128, torch.bfloat16, torch.bfloat16, True, "auto")
    assert (config.value_block, config.scan.num_warps, config.scan.num_stages) == FORWARD["16-bit", 128][:3]
    assert choose(96, 200, 20, torch.float32, torch.float32, True, "auto").value_block == FORWARD["fp32", 256][0]
    assert [segment_length(h, 128, 128) for h in (1, 2, 3, 5, 8, 9, 16, 17, 21, 25, 40, 41, 96)] == [
        2048, 2048, 1024, 5056, 5056, 1184, 1184, 1376, 1664, 2048, 2048, 0, 0,
    ]  # fmt: skip


def test_a_machine_without_a_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="tune kda: needs a CUDA card, found none"):
        tuning.tune(print)


def test_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from trine.cli import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "kda"]) == 1
    assert capsys.readouterr().err == "trine tune: tune kda: needs a CUDA card, found none\n"
