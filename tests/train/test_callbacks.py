from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trine.balance import RecorderReader, Replay
from trine.balance.alerts import Rule
from trine.balance.record_format import FILE_NAME
from trine.ops.router import RouterStats
from trine.train import callbacks as module
from trine.train.callbacks import Callback, RecordBalance, SaveEvery, WriteMetrics, hint_to_record
from trine.train.checkpoint import list_checkpoints
from trine.train.errors import RunError
from trine.train.run_folder import RunFolder
from trine.train.trainer import Trainer


def test_an_empty_callback_does_nothing_and_keeps_nothing(tiny: SimpleNamespace) -> None:
    class Nothing(Callback):
        name = "nothing"

    trainer = Trainer(tiny.model(), tiny.plan(2), tiny.batches, tiny.optimizer(), callbacks=[Nothing()])
    assert trainer.run() is not None and Nothing().state_dict() == {}


def test_without_a_folder_nothing_is_written(tiny: SimpleNamespace) -> None:
    callbacks = [WriteMetrics(), SaveEvery(1)]
    trainer = Trainer(tiny.model(), tiny.plan(2), tiny.batches, tiny.optimizer(), callbacks=callbacks)
    trainer.run()
    assert trainer.save() is None


def test_saving_every_few_steps_leaves_the_last_to_the_trainer(tiny: SimpleNamespace, tmp_path: Path) -> None:
    saved: list[str] = []

    class Note(Callback):
        name = "note"

        def on_save(self, trainer: Trainer, path: Path) -> None:
            saved.append(path.name)

    for every, names in ((2, ["step-000002", "step-000004", "step-000006"]), (0, ["step-000006"])):
        with RunFolder(tmp_path / str(every)) as folder:
            callbacks = [SaveEvery(every), Note()]
            trainer = Trainer(
                *(tiny.model(), tiny.plan(6), tiny.batches, tiny.optimizer()),
                folder=folder,
                callbacks=callbacks,
                keep=9,
            )
            trainer.run()
            assert saved == names == [path.name for _, path in list_checkpoints(folder.checkpoints)]
            saved.clear()


NEVER = Rule("max_vio", "MaxVio", -1.0, -2.0, patience=3)  # every step is bad


def recorded(tiny: SimpleNamespace, folder: RunFolder, steps: int, **more: Any) -> Trainer:
    """A trainer of a six-step plan that records, resumed when there is something to resume, after ``steps`` steps."""
    settings = {"rules": (NEVER,), **more}
    balancer = settings.pop("balancer", None) or tiny.balancer()
    trainer = Trainer(
        *(tiny.model(), tiny.plan(6), tiny.batches, tiny.optimizer()),
        balancer=balancer,
        folder=folder,
        callbacks=[RecordBalance(folder.path, 2, **settings)],
    )
    trainer.resume()
    trainer.run(steps)
    return trainer


def alerts_of(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "balance_alert"]


def test_every_step_is_recorded_with_the_bias_it_was_routed_with(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        trainer = recorded(tiny, folder, 6)
    with RecorderReader(tmp_path) as reader:
        assert reader.steps().tolist() == [1, 2, 3, 4, 5, 6] and (reader.layers, reader.experts) == (1, 4)
        first, last = reader.arrays(1), reader.arrays(6)
        assert (first.bias_LE == 0).all() and last.bias_LE.any() and first.loads_LE.sum() == 48 * 2
        assert trainer.window is not None
        assert last.loads_LE.tolist() == trainer.window.loads_LE.tolist() and last.tokens_L.tolist() == [48]
    (alert,) = alerts_of(tmp_path)
    assert (alert["step"], alert["rule"], alert["begins"], alert["layers"]) == (3, "max_vio", True, [0])


def test_alerts_are_lines_of_the_log_once_each(
    tiny: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning where one begins, and a plain line where it ends; a step between says nothing."""
    ends = Rule("stale", "age of the bias", 0.5, 0.5)
    late = iter([1, 1, 0, 0, 0, 0])
    balancer = tiny.balancer()
    balancer.status = lambda: SimpleNamespace(missed=next(late))
    with RunFolder(tmp_path) as folder, caplog.at_level(logging.INFO, "trine"):
        recorded(tiny, folder, 6, balancer=balancer, rules=(NEVER, replace(ends, calm=2)))
    lines = [(one.levelname, one.getMessage()) for one in caplog.records if one.getMessage().startswith("balance: ")]
    assert [(level, text.split(": ", 2)[1]) for level, text in lines] == [
        ("WARNING", "step 1"),
        ("WARNING", "step 3"),
        ("INFO", "step 4"),
    ]
    assert lines[0][1] == "balance: step 1: age of the bias: 1 in layer 0, above 0.5"
    assert lines[1][1].startswith("balance: step 3: MaxVio: ") and lines[1][1].endswith("above -1 for 3 steps")
    assert lines[2][1] == "balance: step 4: age of the bias: 0 in layer 0, at or below 0.5 again for 2 steps"
    assert [one["text"] for one in alerts_of(tmp_path)] == [text.split(": ", 2)[2] for _, text in lines]


def test_a_resumed_run_replaces_steps_and_alerts_go_on(tiny: SimpleNamespace, tmp_path: Path) -> None:
    """The alert of the third step in a row needs the two that the first process saw."""
    with RunFolder(tmp_path) as folder:
        recorded(tiny, folder, 2)
        with RecorderReader(tmp_path) as reader:
            before = reader.arrays(2).loads_LE
        recorded(tiny, folder, 2)
        assert [one["step"] for one in alerts_of(tmp_path)] == [3]
    with RecorderReader(tmp_path) as reader:
        assert reader.steps().tolist() == [1, 2, 3, 4] and reader.arrays(2).loads_LE.tolist() == before.tolist()


def test_a_rollback_takes_steps_back(tiny: SimpleNamespace, tmp_path: Path) -> None:
    class BackOnce(Callback):
        name = "back"
        done = False

        def on_step(self, trainer: Trainer, record: Any) -> None:
            if record.step == 4 and not self.done:
                self.done = True
                trainer.roll_back([4])

    with RunFolder(tmp_path) as folder:
        trainer = Trainer(
            *(tiny.model(), tiny.plan(6), tiny.batches, tiny.optimizer()),
            balancer=tiny.balancer(),
            folder=folder,
            callbacks=[RecordBalance(tmp_path, 2, rules=(NEVER,)), BackOnce(), SaveEvery(2)],
        )
        trainer.run()
    with RecorderReader(tmp_path) as reader:
        assert reader.steps().tolist() == [1, 2, 3, 4, 5, 6]
        assert reader.counts()["written"] == 4 + 4  # four steps, then 3 to 6 again
        assert reader.counts()["failed"] == 0


def test_replayed_steps_are_not_recorded(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        recorded(tiny, folder, 3, balancer=Replay())
    with RecorderReader(tmp_path) as reader:
        assert reader.steps().tolist() == []


@pytest.mark.parametrize("kind", ["noise", "other", "newer"])
def test_a_file_that_cannot_be_gone_on_with_is_renamed(
    tiny: SimpleNamespace, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE_NAME
    if kind == "noise":
        path.write_bytes(b"noise" * 1000)
    else:
        module.Recorder(path, layers=3 if kind == "other" else 1, experts=4, top_k=2).close()
    if kind == "newer":
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 2")
        database.close()
    before = path.read_bytes()
    with RunFolder(tmp_path) as folder, caplog.at_level(logging.WARNING, "trine"):
        recorded(tiny, folder, 2)
    assert (tmp_path / f"{FILE_NAME}.old-1").read_bytes() == before and "a new one is begun" in caplog.text
    with RecorderReader(tmp_path) as reader:
        assert reader.steps().tolist() == [1, 2]
    assert '"recorder_set_aside"' in (tmp_path / "events.jsonl").read_text()


def test_recording_changes_no_number(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        with_it = recorded(tiny, folder, 6).model.state_dict()
    plain = Trainer(*(tiny.model(), tiny.plan(6), tiny.batches, tiny.optimizer()), balancer=tiny.balancer())
    plain.run()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, with_it[name]), name


def test_an_alert_reaches_the_webhook_and_prometheus(
    tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    shown: list[tuple[int, dict[str, list[int]], dict[str, int]]] = []
    made: list[object] = []

    class Hook:
        def __init__(self, url: str) -> None:
            made.append(url)

        def send(self, message: dict[str, Any]) -> None:
            sent.append(message)

        def close(self) -> None:
            made.append("hook closed")

    class Page:
        layers: Sequence[int] = ()

        def __init__(self, port: int) -> None:
            made.append(port)

        def update(self, frame: Any, active: dict[str, list[int]], fates: dict[str, int]) -> None:
            shown.append((frame.last, active, fates))
            assert tuple(self.layers) == moe_layers

        def close(self) -> None:
            made.append("page closed")

    monkeypatch.setattr(module, "Webhook", Hook)
    monkeypatch.setattr(module, "Prometheus", Page)
    moe_layers = tuple(range(3, 3 + tiny.model().router_stats.layers))
    monkeypatch.setattr(type(tiny.model()), "config", SimpleNamespace(dense_layers=3), raising=False)
    with RunFolder(tmp_path / "name") as folder:
        recorded(tiny, folder, 4, webhook="http://x", prometheus=9)
    assert made == ["http://x", 9, "hook closed", "page closed"]
    assert [(one["run"], one["step"], one["rule"]) for one in sent] == [("name", 3, "max_vio")]
    assert [one[:2] for one in shown] == [(1, {}), (2, {}), (3, {"max_vio": [0]}), (4, {"max_vio": [0]})]
    assert shown[3][2] == {"written": 3, "dropped": 0, "failed": 0}


def test_what_cannot_be_reached_is_an_error_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="webhook: found an address that begins with 'file', need http"):
        RecordBalance(tmp_path, 2, webhook="file:///etc/passwd")


def test_many_experts_without_a_recorder_earn_a_hint(
    tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tiny.model(), tiny.plan(2), tiny.batches, tiny.optimizer())
    with caplog.at_level(logging.WARNING, "trine"):
        assert not hint_to_record(trainer)
        monkeypatch.setattr(module, "WATCHED_EXPERTS", 3)
        trainer.callbacks.append(RecordBalance(tmp_path, 2))
        assert not hint_to_record(trainer)
        trainer.callbacks.clear()
        trainer.run()
    assert caplog.text.count("4 experts a layer and no recorder: averages hide dead and crowded experts") == 1


@pytest.mark.parametrize(("experts", "hints"), [(128, 0), (129, 1)])
def test_the_hint_begins_above_128_experts(experts: int, hints: int, caplog: pytest.LogCaptureFixture) -> None:
    trainer: Any = SimpleNamespace(router_stats=RouterStats.allocate(2, experts, 3), callbacks=[])
    assert hint_to_record(trainer) == bool(hints)
    assert caplog.text.count(f"{experts} experts a layer and no recorder") == hints
    trainer.router_stats = RouterStats.allocate(0, experts, 3)
    assert not hint_to_record(trainer), "no MoE layer"


def test_a_late_controller_is_an_alert(tiny: SimpleNamespace, tmp_path: Path) -> None:
    """A served policy says how many steps in a row brought no new bias; one that is solved here says nothing."""

    class Served:
        def __init__(self) -> None:
            self.inner, self.missed = tiny.balancer(), 0

        def step(self, stats: Any) -> Any:
            self.missed += 3
            return self.inner.step(stats)

        def status(self) -> SimpleNamespace:
            return SimpleNamespace(missed=self.missed)

        def state_dict(self) -> dict[str, Any]:
            return {}

    stale = next(rule for rule in module.DEFAULT_RULES if rule.name == "stale")
    with RunFolder(tmp_path) as folder:
        recorded(tiny, folder, 4, balancer=Served(), rules=(stale,))
    (alert,) = alerts_of(tmp_path)
    # judged in the recorder's thread, which may see the count of a later step
    assert alert["rule"] == "stale" and alert["value"] in (6.0, 9.0, 12.0) and alert["step"] <= 2
