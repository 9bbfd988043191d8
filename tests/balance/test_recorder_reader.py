from __future__ import annotations

import json
import random
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch

from trine.balance import Recorder, RecorderReader, RecordError, Window
from trine.balance.record_format import SUMMARY

LAYERS, EXPERTS = 2, 5


def window_of(step: int) -> Window:
    loads_LE = torch.arange(LAYERS * EXPERTS).view(LAYERS, EXPERTS) * 10 + step
    zero_L = torch.zeros(LAYERS, dtype=torch.int64)
    bias_LE = torch.linspace(-1, 1, EXPERTS).repeat(LAYERS, 1) * step
    margins = torch.zeros(LAYERS, 5, dtype=torch.float64)
    return Window(loads_LE, bias_LE, zero_L + int(loads_LE.sum(1)[0]), zero_L, zero_L, zero_L, margins)


def write(path: Path, steps: range, keep: int = 20) -> None:
    recorder = Recorder(path, layers=LAYERS, experts=EXPERTS, top_k=1, keep=keep, depth=10_000)
    for step in steps:
        recorder.record(step, window_of(step))
    assert recorder.flush()
    recorder.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose recorder has seen 134 steps and keeps 20 frames a tier."""
    folder = tmp_path_factory.mktemp("run")
    write(folder / "balance.sqlite", range(1, 135))
    return folder


def test_points_cover_the_run_once(run: Path) -> None:
    with RecorderReader(run) as reader:
        points = reader.points()
        assert [tuple(point) for point in points[:12]] == [(1, first, first + 9, 10) for first in range(1, 121, 10)]
        assert [tuple(point) for point in points[12:]] == [(0, step, step, 1) for step in range(121, 135)]
        assert reader.steps().tolist() == [*range(10, 121, 10), *range(121, 135)]
        assert [point.first for point in reader.points(95, 122)] == [91, 101, 111, 121, 122]
        few = reader.points(most=5)
        assert len(few) == 5 and few[0] == points[0] and few[-1] == points[-1]
        assert reader.points(200) == [] and reader.points(1, 3, most=1)[0].first == 1
        for ask in (reader.points, reader.summaries):
            with pytest.raises(ValueError, match="most: found 0, need at least 1"):
                ask(most=0)


def test_one_step_and_the_newest(run: Path) -> None:
    with RecorderReader(run / "balance.sqlite") as reader:
        newest = reader.latest()
        assert newest is not None and newest.last == 134
        assert np.array_equal(newest.loads_LE, window_of(134).loads_LE.numpy())
        assert np.allclose(newest.bias_LE, window_of(134).bias_LE.numpy(), atol=134 * 2 / 65535)
        old = reader.arrays(15)
        assert (old.first, old.last, old.loads_LE[0, 0], old.highest_LE[0, 0]) == (11, 20, 15.5, 20)
        assert reader.arrays(116).steps == 1  # finer than the points, which do not overlap
        for step in (0, 135, 10**9):
            with pytest.raises(RecordError, match=f"has no step {step}$"):
                reader.arrays(step)
        assert (reader.layers, reader.experts, reader.meta["top_k"]) == (2, 5, 1) and not reader.notes


def test_series(run: Path) -> None:
    with RecorderReader(run) as reader:
        one = reader.series(1, 3)
        steps = np.array([(point.first + point.last) / 2 for point in one.points])
        assert np.allclose(one.loads, 80 + steps) and np.allclose(one.bias, 0.5 * steps, atol=0.01)
        assert one.highest[0] == 90 and one.lowest[0] == 81 and one.highest[-1] == one.lowest[-1] == 214
        layer = reader.series(1, first=125, most=4)
        assert layer.loads.shape == (4, EXPERTS) and layer.loads[-1].tolist() == [184, 194, 204, 214, 224]
        assert [point.last for point in layer.points] == [125, 128, 131, 134]
        none = reader.series(0, first=500)
        assert (
            none.points == [] and none.loads.shape == (0, EXPERTS) and reader.series(0, 1, first=500).bias.shape == (0,)
        )
        for bad in ((2, 0), (-1, 0), (0, 5), (0, -1)):
            with pytest.raises(ValueError, match=r"layer, expert: found .* need those of 2 layers of 5 experts"):
                reader.series(*bad)


def test_summaries(run: Path) -> None:
    with RecorderReader(run) as reader:
        points, figures = reader.summaries()
        assert figures.shape == (26, 3, LAYERS, len(SUMMARY)) and points == reader.points()
        tokens = figures[..., SUMMARY.index("tokens")]
        assert tokens[-1].tolist() == [[134 * 5 + 100] * 2] * 3
        assert tokens[0, :, 0].tolist() == [5 * 5.5 + 100, 105, 150]  # mean, least, largest of ten
        step = figures[..., SUMMARY.index("bias_step")]
        assert step[5] == pytest.approx(np.full((3, LAYERS), 0.6))
        assert reader.summaries(first=500)[1].shape == (0, 3, LAYERS, len(SUMMARY))
        assert len(reader.summaries(most=7)[0]) == 7


def test_it_follows_a_file_that_grows_and_one_that_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "balance.sqlite"
    write(path, range(1, 3))
    with RecorderReader(path) as reader:
        first = reader.version()
        assert reader.version() == first and reader.steps().tolist() == [1, 2]
        write(path, range(3, 6))
        second = reader.version()
        assert second != first and reader.steps().tolist() == [1, 2, 3, 4, 5]
        shutil.rmtree(tmp_path)
        with pytest.raises(RecordError, match=r"balance.sqlite: cannot be read \(No such file or directory\)"):
            reader.latest()
        tmp_path.mkdir()
        write(path, range(1, 2))
        latest = reader.latest()
        assert latest is not None and latest.last == 1 and reader.version() not in (first, second)


def test_reading_is_cheap_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "balance.sqlite"
    shutil.copy(run / "balance.sqlite", path)
    before = path.read_bytes()
    with RecorderReader(path) as reader:
        with pytest.raises(RecordError, match="readonly"):
            reader._rows("DELETE FROM frames")
        assert reader.counts()["written"] == 134
    assert path.read_bytes() == before


def test_reading_leaves_nothing_beside_a_file_and_sees_who_writes_again(run: Path, tmp_path: Path) -> None:
    """An empty journal and its index lay beside every finished run that somebody had looked at."""
    path = tmp_path / "balance.sqlite"
    shutil.copy(run / "balance.sqlite", path)
    with RecorderReader(path) as reader:
        assert reader.steps()[-1] == 134
        before = reader.version()
        assert reader.version() == before and [one.name for one in tmp_path.iterdir()] == ["balance.sqlite"]
        recorder = Recorder(path, layers=LAYERS, experts=EXPERTS, top_k=1, keep=20, depth=10_000)
        recorder.record(135, window_of(135))
        assert recorder.flush()
        assert reader.steps()[-1] == 135 and reader.version() != before
        recorder.record(136, window_of(136))
        recorder.close()
        assert reader.steps()[-1] == 136
        write(path, range(137, 140))
        assert reader.steps()[-1] == 139


def test_a_medium_that_cannot_be_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite then cannot make its index of a journal; the file is read alone, and a note says so."""
    shutil.copy(run / "balance.sqlite", tmp_path / "balance.sqlite")
    (tmp_path / "balance.sqlite-wal").touch()
    run = tmp_path
    connect, refused = sqlite3.connect, []

    def strict(name: str, **more: object) -> sqlite3.Connection:
        if "immutable" not in name and not refused:
            refused.append(name)
            raise sqlite3.OperationalError("unable to open database file")
        return connect(name, **more)  # type: ignore[call-overload, no-any-return]

    reader = RecorderReader(run)
    reader.close()
    monkeypatch.setattr("trine.balance.recorder_reader.os.access", lambda *_: False)
    monkeypatch.setattr("trine.balance.recorder_reader.sqlite3.connect", strict)
    assert reader.steps()[-1] == 134 and "cannot be written to" in reader.notes[0]


def test_nothing_recorded_yet(tmp_path: Path) -> None:
    Recorder(tmp_path / "r", layers=1, experts=2, top_k=1).close()
    with RecorderReader(tmp_path / "r") as reader:
        assert reader.latest() is None and reader.points() == [] and reader.counts() == {}
        assert reader.summaries()[1].shape[0] == 0 and reader.series(0, 1).loads.shape == (0,)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"balance.sqlite: cannot be read \(No such file"):
        RecorderReader(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(RecordError, match="empty: is empty"):
        RecorderReader(tmp_path / "empty")
    (tmp_path / "noise").write_bytes(random.Random(0).randbytes(5000))
    with pytest.raises(RecordError, match=r"noise: is damaged \(file is not a database\)"):
        RecorderReader(tmp_path / "noise")


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("DROP TABLE meta", "its tables are not those of format_version 1"),
        ("CREATE TABLE more (x)", "its tables are not"),
        ("CREATE TRIGGER t AFTER INSERT ON frames BEGIN DELETE FROM meta; END", "its tables are not"),
        ("DELETE FROM meta WHERE key = 'layers'", "does not say what it holds"),
        ("UPDATE meta SET value = '99999999' WHERE key = 'experts'", "does not say what it holds"),
        ("UPDATE meta SET value = 'true' WHERE key = 'layers'", "does not say what it holds"),
        ("UPDATE meta SET value = '[[[' WHERE key = 'summary'", "does not say what it holds"),
        ("PRAGMA application_id = 5", "not one of Trine's recorder"),
        ("PRAGMA user_version = 3", "format_version 3 is newer than 1"),
        ("PRAGMA user_version = 0", "its tables are not"),
    ],
)
def test_what_a_file_says_of_itself_is_checked(run: Path, tmp_path: Path, statement: str, words: str) -> None:
    path = tmp_path / "r"
    shutil.copy(run / "balance.sqlite", path)
    with sqlite3.connect(path) as database:
        database.execute(statement)
    database.close()
    with pytest.raises(RecordError, match=f"r: .*{words}"):
        RecorderReader(path)


def test_frames_that_are_damaged_are_left_out_with_a_note(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    shutil.copy(run / "balance.sqlite", path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE frames SET arrays = zeroblob(900), summary = x'00' WHERE tier = 0 AND first = 130")
        database.execute("UPDATE frames SET arrays = 'text' WHERE tier = 0 AND first = 131")
        database.execute("UPDATE frames SET steps = 'x' WHERE tier = 0 AND first = 132")
        database.execute("UPDATE frames SET last = 2 WHERE tier = 0 AND first = 133")
    database.close()
    with RecorderReader(path) as reader:
        series = reader.series(0, 0, first=128)
        assert [point.last for point in series.points] == [128, 129, 134]
        assert [point.last for point in reader.summaries(128)[0]] == [128, 129, 131, 134]
        notes = "\n".join(reader.notes)
        assert "steps 130 to 130 are left out: the frame is damaged (its checksum does not fit)" in notes
        assert "steps 131 to 131 are left out: the frame is damaged (found a str, need bytes)" in notes
        assert "a frame is damaged (its step is no number)" in notes
        with pytest.raises(RecordError, match="r: steps 130 to 130: the frame is damaged"):
            reader.arrays(130)


def test_columns_of_another_version_are_found_by_name(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    shutil.copy(run / "balance.sqlite", path)
    names = ["unknown" if name == "cv" else name for name in SUMMARY]
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = ? WHERE key = 'summary'", (json.dumps(names),))
    database.close()
    with RecorderReader(path) as reader, RecorderReader(run) as whole:
        found, same = reader.latest(), whole.latest()
        assert found is not None and same is not None and np.isnan(found.summary("cv")).all()
        assert np.array_equal(found.summary("p95"), same.summary("p95"))


def ask_everything(path: Path) -> bool:
    """Every question a page asks; True when the file answered, False when it said why not."""
    try:
        with RecorderReader(path) as reader:
            for question in (
                reader.version,
                reader.counts,
                reader.points,
                reader.latest,
                lambda: reader.arrays(120),
                lambda: reader.arrays(12),
                lambda: reader.summaries(most=9),
                lambda: reader.series(1, 4, most=9),
                lambda: reader.series(0, first=130),
            ):
                try:
                    question()
                except RecordError as error:
                    assert str(path) in str(error) and len(str(error)) < 500
            return True
    except RecordError as error:
        assert str(path) in str(error)
        return False


def test_corrupt_files_never_do_more_than_say_so(run: Path, tmp_path: Path) -> None:
    """200 files: bytes changed, cut short, pages swapped, a journal of noise beside them."""
    whole = (run / "balance.sqlite").read_bytes()
    draw = random.Random(7)
    path, answered = tmp_path / "r", 0
    for number in range(200):
        data = bytearray(whole)
        kind = number % 5
        if kind == 0:
            del data[draw.randrange(len(data)) :]
        elif kind == 1:
            for _ in range(draw.choice((1, 5, 200))):
                data[draw.randrange(len(data))] = draw.randrange(256)
        elif kind == 2:  # where pages say what is in them
            for _ in range(3):
                page = 8192 * draw.randrange(len(data) // 8192)
                data[page + draw.randrange(100)] = draw.randrange(256)
        elif kind == 3:
            one, two = (8192 * draw.randrange(len(data) // 8192) for _ in range(2))
            data[one : one + 8192], data[two : two + 8192] = data[two : two + 8192], data[one : one + 8192]
        path.write_bytes(data)
        if kind == 4:
            Path(f"{path}-wal").write_bytes(whole[:32] + draw.randbytes(draw.randrange(40_000)))
        answered += ask_everything(path)
        for extra in ("-wal", "-shm"):
            Path(f"{path}{extra}").unlink(missing_ok=True)
    assert 60 < answered < 200, answered
