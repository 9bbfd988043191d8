from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from trine.train import progress
from trine.train.metrics import StepRecord
from trine.train.progress import ShowProgress, progress_line
from trine.train.trainer import Trainer


def record(**changes: object) -> StepRecord:
    base = StepRecord(
        step=1,
        stage=0,
        tokens=48,
        loss=2.5,
        bits_per_byte=1.234,
        lr=0.1,
        grad_norm=1.0,
        tokens_per_s=7000.4,
        max_vio=[0.1, 0.25],
        dead_experts=3,
        seconds=0.1,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_line_says_it_all() -> None:
    line = progress_line(record(), 125.4)
    assert line == "loss 2.500  1.234 bits/byte  7,000 tokens/s  MaxVio 0.25  dead 3  2 min 05 s left"


@pytest.mark.parametrize(
    ("change", "absent", "present"),
    [
        ({"bits_per_byte": None}, "bits/byte", "loss"),
        ({"max_vio": []}, "MaxVio", "loss"),
        ({"updated": False}, "nothing", "[no update]"),
    ],
)
def test_what_is_unknown_is_left_out(change: dict[str, object], absent: str, present: str) -> None:
    line = progress_line(record(**change), 5)
    assert absent not in line and present in line and line.split("left")[0].endswith("5 s ")


def run(tiny: SimpleNamespace, console: Console, steps: int = 4) -> None:
    trainer = Trainer(tiny.model(), tiny.plan(steps), tiny.batches, tiny.optimizer(), callbacks=[ShowProgress(console)])
    trainer.run()


def test_a_log_gets_plain_lines_first_and_last(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    run(tiny, Console(file=file, force_terminal=False, width=200))
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/4", "step 4/4"]
    assert "\x1b" not in file.getvalue()
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    file = io.StringIO()
    run(tiny, Console(file=file, force_terminal=False, width=200))
    assert len(file.getvalue().splitlines()) == 4


def test_a_terminal_gets_one_live_line(tiny: SimpleNamespace) -> None:
    file = io.StringIO()
    run(tiny, Console(file=file, force_terminal=True, width=160))
    text = file.getvalue()
    assert "4/4" in text and "tokens/s" in text and "MaxVio" in text and "0 s left" in text
