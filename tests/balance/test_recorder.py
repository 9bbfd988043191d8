from __future__ import annotations

import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trine.balance import Recorder, RecorderReader, RecordError, Window
from trine.balance import recorder as module
from trine.balance.record_format import Frame, HostWindow
from trine.balance.summary import Summaries

LAYERS, EXPERTS, TOP_K = 3, 7, 2
SIZES = {"layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K}


def window_of(step: int, tokens: int = 700) -> Window:
    """Expert 0 of layer 0 has ``step`` tokens; everything else is a function of the step too."""
    generator = torch.Generator().manual_seed(step)
    loads_LE = torch.randint(1, 300, (LAYERS, EXPERTS), generator=generator)
    loads_LE[0, 0] = step
    count_L = torch.full((LAYERS,), tokens)
    return Window(
        loads_LE=loads_LE,
        bias_LE=torch.randn(LAYERS, EXPERTS, generator=generator) * 0.1,
        tokens_L=count_L,
        dropped_L=count_L * 0 + step % 3,
        saturated_L=count_L * 0 + 7 * step,
        overflow_L=count_L * 0 + 1,
        margins_LQ=torch.linspace(-0.5, 0.5, 15, dtype=torch.float64).view(LAYERS, 5),
    )


def record(path: Path, steps: range, **more: object) -> None:
    recorder = Recorder(path, **{**SIZES, "depth": 100_000, **more})  # type: ignore[arg-type]
    for step in steps:
        recorder.record(step, window_of(step))
    assert recorder.flush() and recorder.counts.written == len(steps) and recorder.counts.failed == 0
    recorder.close()


def rows(path: Path) -> list[tuple[int, int, int, int]]:
    with RecorderReader(path) as reader:
        return reader._rows("SELECT tier, first, last, steps FROM frames ORDER BY tier, first")


def test_a_step_is_kept_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "balance.sqlite"
    record(path, range(1, 4))
    with RecorderReader(path.parent) as reader:
        found, window = reader.arrays(2), window_of(2)
        assert (found.first, found.last, found.steps) == (2, 2, 1)
        assert np.array_equal(found.loads_LE, window.loads_LE.numpy())
        assert np.abs(found.bias_LE - window.bias_LE.numpy()).max() < 1e-5
        assert found.saturated_L.tolist() == [14] * 3 and found.dropped_L.tolist() == [2] * 3
        assert np.allclose(found.margins_LQ, window.margins_LQ.numpy())
        assert found.summary("saturated").tolist() == pytest.approx([14 / 4900] * 3)
        assert found.summary("margin_p95").tolist() == pytest.approx(window.margins_LQ[:, 3].tolist())
        assert found.summary("bias_max").tolist() == pytest.approx(window.bias_LE.amax(1).tolist())
        moved = (window.bias_LE - window_of(1).bias_LE).abs().mean(1)
        assert found.summary("bias_step").tolist() == pytest.approx(moved.tolist(), rel=1e-5)
        assert np.isnan(found.summary("flips")).all() and np.isfinite(reader.arrays(3).summary("flips")).all()
        assert reader.counts()["written"] == 3
    assert not list(path.parent.glob("*-journal"))


def test_tiers_thin_the_past_and_keep_its_peaks(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, range(1, 246), keep=20)
    found = rows(path)
    assert [row[1] for row in found if row[0] == 0] == list(range(226, 246))
    assert [row[1:] for row in found if row[0] == 1] == [(first, first + 9, 10) for first in range(41, 241, 10)]
    assert [row[1:] for row in found if row[0] == 2] == [(first, first + 99, 100) for first in (1, 101)]
    with RecorderReader(path) as reader:
        hundred = reader.arrays(30)
        windows = [window_of(step) for step in range(1, 101)]
        stacked = torch.stack([one.loads_LE for one in windows]).double()
        assert np.allclose(hundred.highest_LE, stacked.amax(0), rtol=2**-10)
        assert np.allclose(hundred.lowest_LE, stacked.amin(0), rtol=2**-10)
        assert np.allclose(hundred.loads_LE, stacked.mean(0), rtol=2**-9)
        assert hundred.saturated_L.tolist() == [7 * 5050] * 3
        peak = max(float(one.bias_LE[1].max()) for one in windows)
        assert hundred.summary("bias_max", 2)[1] == pytest.approx(peak)


def test_a_step_left_out_does_not_shift_the_blocks(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = Recorder(path, **SIZES, depth=1000)
    for step in [*range(1, 8), *range(13, 38), 60]:
        recorder.record(step, window_of(step))
    assert recorder.flush()
    recorder.close()
    assert [row for row in rows(path) if row[0]] == [(1, 1, 7, 7), (1, 13, 20, 8), (1, 21, 30, 10), (1, 31, 37, 7)]


def test_resumed_steps_replace_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, range(1, 128), keep=20)
    recorder = Recorder(path, **SIZES, keep=20, depth=1000)
    recorder.forget_after(115)
    for step in range(116, 145):
        recorder.record(step, replace(window_of(step), loads_LE=window_of(step).loads_LE * 2))
    assert recorder.flush()
    recorder.close()
    found = rows(path)
    assert [row[1] for row in found if row[0] == 0] == list(range(125, 145))
    assert [row[1:3] for row in found if row[0] == 1] == [(first, first + 9) for first in range(1, 141, 10)]
    with RecorderReader(path) as reader:
        both = torch.stack([window_of(step).loads_LE * (1 + (step > 115)) for step in range(111, 121)]).double()
        (mixed,) = [point for point in reader.points() if point.first == 111]
        assert np.allclose(reader.arrays(112).loads_LE, both.mean(0), rtol=2**-10) and mixed.steps == 10
        assert reader.arrays(116 + 20).loads_LE[0, 0] == 2 * 136


@pytest.mark.parametrize("back_to", [20, 100, 119, 120])
def test_a_run_goes_on_from_the_end_of_a_block_that_was_already_made(tmp_path: Path, back_to: int) -> None:
    path = tmp_path / "r"
    record(path, range(1, 123))
    before = [row for row in rows(path) if row[2] <= back_to]
    recorder = Recorder(path, **SIZES, depth=1000)
    recorder.forget_after(back_to)
    for step in range(back_to + 1, 142):
        recorder.record(step, window_of(step))
    assert recorder.flush()
    recorder.close()
    found = rows(path)
    assert [row[1] for row in found if row[0] == 0] == list(range(1, 142))
    assert [row[1:] for row in found if row[0] == 1] == [(first, first + 9, 10) for first in range(1, 141, 10)]
    assert [row for row in found if row[2] <= back_to] == before
    with RecorderReader(path) as reader:
        assert reader.counts()["written"] == 141 - back_to and reader.counts()["failed"] == 0


def test_going_back_to_the_start_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, range(1, 30))
    recorder = Recorder(path, **SIZES)
    recorder.forget_after(0)
    recorder.record(1, window_of(1))
    assert recorder.flush()
    recorder.close()
    assert rows(path) == [(0, 1, 1, 1)]


def test_a_step_twice_is_refused_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "r", **SIZES)
    with caplog.at_level(logging.WARNING, "trine"):
        for step in (1, 2, 2, 1):
            recorder.record(step, window_of(step))
        assert recorder.flush()
    recorder.close()
    assert (recorder.counts.written, recorder.counts.failed) == (2, 2)
    assert "found step 2 after step 2, need forget_after first" in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"bias_LE": torch.full((LAYERS, EXPERTS), torch.nan)}, "a bias that is not finite"),
        ({"loads_LE": torch.full((LAYERS, EXPERTS), -1)}, "a load of -1"),
        ({"loads_LE": torch.zeros(2, EXPERTS, dtype=torch.int64)}, r"loads \(2, 7\)"),
        ({"margins_LQ": torch.zeros(3, 4, dtype=torch.float64)}, r"margins \(3, 4\)"),
    ],
)
def test_a_window_that_cannot_be_is_counted_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: dict[str, torch.Tensor], words: str
) -> None:
    recorder = Recorder(tmp_path / "r", **SIZES)
    with caplog.at_level(logging.WARNING, "trine"):
        recorder.record(1, replace(window_of(1), **bad))
        recorder.record(2, window_of(2))
        assert recorder.flush()
    recorder.close()
    assert (recorder.counts.written, recorder.counts.failed) == (1, 1)
    assert re.search(words, caplog.text)


def test_a_slow_disk_costs_the_oldest_steps_and_never_waits(tmp_path: Path) -> None:
    gate, entered = threading.Event(), threading.Event()

    def slow(frame: Frame) -> None:
        entered.set()
        assert gate.wait(20)

    recorder = Recorder(tmp_path / "r", **SIZES, depth=4, listeners=[slow])
    recorder.record(1, window_of(1))
    assert entered.wait(20)  # the thread holds step 1 now
    for step in range(2, 12):
        recorder.record(step, window_of(step))
    assert recorder.counts.dropped == 6
    gate.set()
    assert recorder.flush()
    recorder.close()
    assert [row[1] for row in rows(tmp_path / "r") if row[0] == 0] == [1, 8, 9, 10, 11]
    with RecorderReader(tmp_path / "r") as reader:
        assert reader.counts()["dropped"] == 6
        assert np.isnan(reader.arrays(9).summary("flips")).all()  # steps 1 and 8 are no neighbours


def test_a_listener_that_fails_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def bad(frame: Frame) -> None:
        raise RuntimeError("no")

    recorder = Recorder(tmp_path / "r", **SIZES, listeners=[bad, lambda frame: seen.append(frame.last)])
    with caplog.at_level(logging.WARNING, "trine"):
        for step in (1, 2, 3):
            recorder.record(step, window_of(step))
        assert recorder.flush()
    recorder.close()
    assert seen == [1, 2, 3] and recorder.counts.written == 3 and caplog.text.count("RuntimeError: no") == 1


def test_a_full_disk_is_counted_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = threading.Event()
    full.set()
    insert = Recorder._insert

    def limited(self: Recorder, database: sqlite3.Connection, tier: int, frame: Frame) -> None:
        insert(self, database, tier, frame)
        if full.is_set() and frame.last == 2:
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Recorder, "_insert", limited)
    recorder = Recorder(tmp_path / "r", **SIZES)
    with caplog.at_level(logging.WARNING, "trine"):
        for step in (1, 2, 3):
            recorder.record(step, window_of(step))
        assert recorder.flush()
    recorder.close()
    assert (recorder.counts.written, recorder.counts.failed) == (2, 1) and "disk is full" in caplog.text
    assert [row[1] for row in rows(tmp_path / "r")] == [1, 3]  # the transaction of step 2 left nothing


@pytest.mark.parametrize("busy", [False, True])
def test_failed_steps_are_counted_in_the_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    """Also the newest one, whose transaction is taken back; where the count cannot be written either, at the end."""
    insert, keep = Recorder._insert, Recorder._write_counts
    closing = threading.Event()

    def limited(self: Recorder, database: sqlite3.Connection, tier: int, frame: Frame) -> None:
        insert(self, database, tier, frame)
        if frame.last >= 2:
            raise sqlite3.OperationalError("database or disk is full")

    def counts(self: Recorder, database: sqlite3.Connection, values: dict[str, int]) -> None:
        keep(self, database, values)
        if busy and values["failed"] and not closing.is_set():
            raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(Recorder, "_insert", limited)
    monkeypatch.setattr(Recorder, "_write_counts", counts)
    recorder = Recorder(tmp_path / "r", **SIZES)
    for step in (1, 2, 3):
        recorder.record(step, window_of(step))
    assert recorder.flush()
    with RecorderReader(tmp_path / "r") as reader:
        assert (reader.counts()["written"], reader.counts()["failed"]) == (1, 0 if busy else 2)
        closing.set()
        recorder.close()
        assert (reader.counts()["written"], reader.counts()["failed"]) == (1, 2)


def test_killed_at_any_time_it_can_be_read_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "r"
    code = (
        "import sys, torch; from trine.balance import Recorder, Window\n"
        f"r = Recorder({str(path)!r}, layers=3, experts=7, top_k=2, keep=20, depth=50)\n"
        "z = torch.zeros(3, dtype=torch.int64)\n"
        "for step in range(1, 10**9):\n"
        "    w = Window(torch.full((3, 7), step), torch.randn(3, 7), z + 1, z, z, z, torch.zeros(3, 5).double())\n"
        "    r.record(step, w); r.flush()\n"
        "    if step == 45: print('go', flush=True)\n"
    )
    job = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None and job.stdout.readline() == "go\n"
        with RecorderReader(path) as reader:  # while it is written
            latest = reader.latest()
            assert latest is not None and latest.last >= 45 and latest.loads_LE[0, 0] == latest.last
            before = reader.version()  # after it: a step that came in between would be the change that is waited for
            end = time.monotonic() + 20
            while reader.version() == before and time.monotonic() < end:
                time.sleep(0.005)
            newer = reader.latest()
            assert newer is not None and newer.last > latest.last
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    with RecorderReader(path) as reader:
        last = int(reader.steps()[-1])
        assert last > 45 and reader.arrays(last).loads_LE[2, 6] == last
    record(path, range(last + 1, last + 3), keep=20)
    with RecorderReader(path) as reader:
        assert reader.steps()[-3:].tolist() == [last, last + 1, last + 2]


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, range(1, 3))
    for change in ({"layers": 4}, {"experts": 8}, {"top_k": 1}):
        (name,) = change
        with pytest.raises(RecordError, match=f"r: found {name} {SIZES[name]}, this model has {change[name]}"):
            Recorder(path, **{**SIZES, **change})
    record(path, range(3, 5))  # its own goes on


def test_foreign_newer_and_damaged_files_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database at all\n" * 100)
    with pytest.raises(RecordError, match=r"text: is damaged \(file is not a database\)"):
        Recorder(text, **SIZES)
    other = tmp_path / "other"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE mine (x)")
    with pytest.raises(RecordError, match="other: is an SQLite file, but not one of Trine's recorder"):
        Recorder(other, **SIZES)
    newer = tmp_path / "newer"
    record(newer, range(1, 3))
    with sqlite3.connect(newer) as database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(RecordError, match="newer: format_version 2 is newer than 1, the newest that is read"):
        Recorder(newer, **SIZES)
    with pytest.raises(RecordError, match="format_version 2 is newer"):
        RecorderReader(newer)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"keep": 19}, "keep: found 19, need at least 20"),
        ({"depth": 0}, "depth: found 0"),
        ({"top_k": 8}, "top_k: found 8, need 1 to 7"),
        ({"ranks": 2}, "ranks: found 2, need a divisor of the 7"),
        ({"experts": 0}, "layers, experts: found 3, 0"),
        ({"layers": 1 << 22}, "need at most 16777216"),
    ],
)
def test_bad_arguments(tmp_path: Path, bad: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recorder(tmp_path / "r", **{**SIZES, **bad})
    assert not (tmp_path / "r").exists()


def test_closed_is_closed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r", **SIZES)
    with pytest.raises(ValueError, match="step: found 0, need 1 or more"):
        recorder.record(0, window_of(1))
    recorder.close()
    recorder.close()
    with pytest.raises(ValueError, match="recorder is closed"):
        recorder.record(1, window_of(1))
    assert not recorder._thread.is_alive() and not (tmp_path / "r-wal").exists()


def test_size_of_a_long_run_grows_with_its_logarithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a million steps follow from the rule; here that it holds over four tiers, and that pages are reused."""
    monkeypatch.setattr(module, "_PAGE", 1024)
    frame = Summaries(LAYERS, EXPERTS, TOP_K).step(1, HostWindow.of(window_of(1)))
    sizes = []
    recorder = Recorder(tmp_path / "r", **SIZES, keep=20)
    for step in range(1, 1002):
        recorder._write(replace(frame, first=step, last=step))
        if step in (300, 1001):
            recorder._connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            sizes.append((tmp_path / "r").stat().st_size)
    recorder._connection().close()
    recorder.close()
    counts = {tier: len([row for row in rows(tmp_path / "r") if row[0] == tier]) for tier in range(4)}
    assert counts == {0: 20, 1: 20, 2: 10, 3: 1}
    assert sizes[1] < 1.4 * sizes[0]


def test_a_window_survives_the_way_through_one_buffer() -> None:
    window = window_of(5)
    strided = replace(window, loads_LE=window.loads_LE.t().contiguous().t())
    staged = module._Staged(5, strided)
    staged.buffer, staged.arrived = module._flat(strided), SimpleNamespace(synchronize=lambda: None)
    found = staged.read()
    staged.buffer.zero_()  # the buffer is filled again while the step is being written
    for name in window.__dataclass_fields__:
        want = getattr(window, name).numpy()
        assert np.array_equal(getattr(found, name), want) and getattr(found, name).dtype == want.dtype, name


@pytest.mark.gpu
def test_windows_of_a_card_arrive_while_it_works_on(tmp_path: Path) -> None:
    """One copy a step on a side stream; the window's memory is free for others at once, and buffers are used again."""
    recorder = Recorder(tmp_path / "r", **SIZES, depth=64)
    busy = torch.randn(2048, 2048, device="cuda")
    for step in range(1, 41):
        busy = torch.tanh(busy @ busy)
        host = window_of(step)
        window = Window(**{name: getattr(host, name).cuda(non_blocking=True) for name in host.__dataclass_fields__})
        recorder.record(step, window)
        del window
        torch.empty(1 << 20, dtype=torch.int32, device="cuda").fill_(-1)
    assert recorder.flush(60)
    recorder.close()
    assert recorder.counts.written == 40 and len(recorder._staging._free) <= 40
    with RecorderReader(tmp_path / "r") as reader:
        for step in range(1, 41):
            assert np.array_equal(reader.arrays(step).loads_LE, window_of(step).loads_LE.numpy()), step
