from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from trine.train.callbacks import Callback, SaveEvery, WriteMetrics
from trine.train.checkpoint import list_checkpoints
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
