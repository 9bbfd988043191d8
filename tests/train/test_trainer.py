from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trine.train import checkpoint
from trine.train.callbacks import Callback, SaveEvery, WriteMetrics
from trine.train.checkpoint import CheckpointError, list_checkpoints
from trine.train.errors import Interrupted, NumericStop, RunError
from trine.train.metrics import StepRecord
from trine.train.run_folder import RunFolder
from trine.train.trainer import Trainer


class Collect(Callback):
    """Every record, and a counter that is saved."""

    name = "collect"

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.seen = 0

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        self.records.append(record)
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.fixture
def make(tiny: SimpleNamespace, tmp_path: Path) -> Iterator[Any]:
    """Trainers of the tiny model in one folder; each call gives the folder up for the next."""
    folders: list[RunFolder] = []

    def build(steps: int = 12, *, saved: bool = False, **settings: Any) -> Trainer:
        while folders:
            folders.pop().close()
        if saved:
            folders.append(RunFolder(tmp_path / "run"))
        model = settings.pop("model", None) or tiny.model(settings.pop("seed", 0))
        settings.setdefault("optimizer", tiny.optimizer())
        settings.setdefault("balancer", tiny.balancer())
        batches = settings.pop("batches", tiny.batches)
        return Trainer(model, tiny.plan(steps), batches, folder=folders[-1] if saved else None, **settings)

    yield build
    while folders:
        folders.pop().close()


def events(trainer: Trainer) -> list[dict[str, Any]]:
    assert trainer.folder is not None
    return [json.loads(line) for line in (trainer.folder.path / "events.jsonl").read_text().splitlines()]


def same(one: Trainer, other: Trainer) -> None:
    """Equal to the last bit: weights, router bias and statistics, optimizer state, random numbers."""
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    for name, value in one.router_stats.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(value, other.router_stats.state_dict()[name]), name  # type: ignore[union-attr]
    mine, others = one.optimizers.state_tensors(), other.optimizers.state_tensors()
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        assert torch.equal(value, others[name]), name


def test_the_loss_falls_and_every_figure_is_there(make: Any) -> None:
    collect = Collect()
    trainer = make(60, callbacks=[collect])
    last = trainer.run()
    first = collect.records[0]
    assert last == collect.records[-1] and [r.step for r in collect.records] == list(range(1, 61))
    assert last.loss < 0.5 * first.loss
    assert first.bits_per_byte == pytest.approx(first.loss / math.log(2) / 3)
    assert (first.tokens, last.tokens, first.stage) == (48, 48 * 60, 0)
    assert first.lr == pytest.approx(0.02 / 12) and last.lr < 1e-4
    assert len(first.max_vio) == 1 and first.max_vio[0] > 0 and 0 <= first.dead_experts < 4
    assert all(r.updated and r.seconds > 0 and r.tokens_per_s > 0 for r in collect.records)


@pytest.mark.parametrize("cut", [1, 3, 7, 11])
def test_resumed_equals_uninterrupted_to_the_last_bit(make: Any, cut: int) -> None:
    """B022, B023, B024: samples, rates, router bias and optimizer continue as if nothing had happened."""
    straight_seen = Collect()
    straight = make(12, callbacks=[straight_seen])
    straight.run()
    make(12, saved=True, callbacks=[Collect()]).run(cut)
    torch.manual_seed(99)
    resumed_seen = Collect()
    resumed = make(12, saved=True, seed=5, callbacks=[resumed_seen])
    assert resumed.resume().name == f"step-{cut:06d}"
    resumed.run()
    same(straight, resumed)
    for before, after in zip(straight_seen.records[cut:], resumed_seen.records, strict=True):
        assert (before.loss, before.lr, before.grad_norm) == (after.loss, after.lr, after.grad_norm)
        assert (before.max_vio, before.tokens) == (after.max_vio, after.tokens)
    assert resumed_seen.seen == 12


def test_random_numbers_continue(make: Any) -> None:
    make(4, saved=True).run(2)
    need = torch.rand(3)
    torch.manual_seed(7)
    make(4, saved=True).resume()
    assert torch.equal(torch.rand(3), need)


def test_one_step_is_one_function_of_its_number(make: Any, tiny: SimpleNamespace) -> None:
    asked: list[int] = []

    def batches(span: Any, step: int) -> Sequence[Any]:
        asked.append(step)
        return tiny.batches(span, step)

    make(6, saved=True, batches=batches).run(4)
    again = make(6, saved=True, batches=batches)
    again.resume()
    again.run()
    assert asked == [0, 1, 2, 3, 4, 5]


def test_a_save_inside_an_accumulation_window_is_the_state_at_its_beginning(make: Any, tiny: SimpleNamespace) -> None:
    """B024: router statistics of a half-finished window are neither lost nor counted twice."""
    straight = make(6)
    straight.run()
    trainer = make(6, saved=True)
    inside = []
    true_loss = trainer.model.loss

    def loss(batch: Any) -> Any:
        result = true_loss(batch)
        if trainer.step == 3 and trainer.router_stats.loads_LE.sum() > 24 * 2:  # the window's second micro-batch
            inside.append(trainer.save())
        return result

    trainer.model.loss = loss
    trainer.run(4)
    assert [path.name for path in inside] == ["step-000003"]
    fresh = make(6, saved=True)
    fresh.load(inside[0])
    assert int(fresh.router_stats.loads_LE.sum()) == int(fresh.router_stats.histograms_LEB.sum()) == 0
    fresh.run()
    same(straight, fresh)


def test_accumulation_equals_one_batch_whatever_the_token_counts(make: Any, tiny: SimpleNamespace) -> None:
    """B027: two rows with 10 and 90 supervised tokens, together and as two micro-batches."""
    rows = [tiny.batch(1, 90, supervised=10), tiny.batch(2, 90)]
    whole = type(rows[0])(
        *(torch.cat([getattr(r, f) for r in rows]) for f in ("tokens_T", "targets_T", "weights_T")),
        torch.tensor([0, 90, 180], dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
    )
    one, two = make(batches=lambda *_: [whole]), make(batches=lambda *_: rows)
    seen: list[dict[str, Tensor]] = []
    for trainer in (one, two):
        trainer.optimizers.step = lambda trainer=trainer: seen.append(
            {k: v.clone() for k, v in trainer.optimizers.gradients().items()}
        )
    records = [one.train_step(), two.train_step()]
    assert records[0].loss == pytest.approx(records[1].loss, rel=1e-6)
    assert records[0].grad_norm == pytest.approx(records[1].grad_norm, rel=1e-5)
    for name, gradient in seen[0].items():
        assert float((gradient - seen[1][name]).norm()) <= 1e-5 * float(gradient.norm()) + 1e-9, name


def test_a_micro_batch_without_targets_changes_nothing(make: Any, tiny: SimpleNamespace) -> None:
    """B026: each label of one micro-batch ignored."""
    full = [tiny.batch(i) for i in range(3)]
    with_empty = [full[0], tiny.batch(9, supervised=0), *full[1:]]
    trainers = [make(batches=lambda *_, rows=rows: rows, balancer=None) for rows in (full, with_empty)]
    records = [trainer.train_step() for trainer in trainers]
    assert records[0].loss == records[1].loss and records[0].grad_norm == records[1].grad_norm
    for (name, a), b in zip(trainers[0].model.named_parameters(), trainers[1].model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_step_without_any_target_changes_nothing(make: Any, tiny: SimpleNamespace) -> None:
    """B026: 0/0 for the whole step; no update, no decay, no momentum, no bias."""

    def batches(span: Any, step: int) -> Sequence[Any]:
        return [tiny.batch(step, supervised=0 if step == 2 else None)]

    trainer = make(saved=True, batches=batches)
    trainer.train_step(), trainer.train_step()
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    state = {k: v.clone() for k, v in trainer.optimizers.state_tensors().items()}
    bias = trainer.router_stats.bias_LE.clone()
    record = trainer.train_step()
    assert (record.loss, record.updated, record.step) == (0.0, False, 3) and trainer.non_finite_in_row == 0
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    assert all(torch.equal(v, state[k]) for k, v in trainer.optimizers.state_tensors().items())
    assert torch.equal(trainer.router_stats.bias_LE, bias) and int(trainer.router_stats.loads_LE.sum()) == 0
    assert events(trainer)[-1]["kind"] == "no_supervised_token"
    assert trainer.train_step().updated


class Poison(torch.autograd.Function):
    """The identity, whose gradient is not-a-number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.nan


def poison(trainer: Trainer, steps: Sequence[int], what: str) -> None:
    """Make the loss, or only the gradient, of some steps not-a-number."""
    true_loss = trainer.model.loss

    def loss(batch: Any) -> tuple[Tensor, Tensor]:
        loss_sum, weight = true_loss(batch)
        if trainer.step not in steps:
            return loss_sum, weight
        return (loss_sum * math.nan if what == "loss" else Poison.apply(loss_sum)), weight

    trainer.model.loss = loss


@pytest.mark.parametrize(
    ("what", "tensor"), [("loss", "loss of micro-batch 0"), ("gradient", "gradient of embed.weight")]
)
def test_a_non_finite_step_is_not_applied_and_named(make: Any, what: str, tensor: str) -> None:
    trainer = make(saved=True)
    poison(trainer, [1], what)
    trainer.train_step()
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    state = {k: v.clone() for k, v in trainer.optimizers.state_tensors().items()}
    record = trainer.train_step()
    assert not record.updated and trainer.non_finite_in_row == 1
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    assert all(torch.equal(v, state[k]) for k, v in trainer.optimizers.state_tensors().items())
    assert int(trainer.router_stats.loads_LE.sum()) == 0
    event = events(trainer)[-1]
    assert (event["kind"], event["step"]) == ("non_finite", 2)
    assert event["tensor"] == tensor or (what == "gradient" and event["tensor"].startswith("gradient of "))
    assert json.loads(json.dumps(record.to_json(), allow_nan=False))["step"] == 2
    assert trainer.train_step().updated and trainer.non_finite_in_row == 0


def test_a_broken_parameter_is_named_first(make: Any) -> None:
    trainer = make(saved=True)
    with torch.no_grad():
        trainer.model.attention.o_proj.bias[3] = math.inf
    trainer.train_step()
    assert events(trainer)[-1]["tensor"] == "parameter attention.o_proj.bias"


def test_three_in_a_row_stop_the_run_with_code_three(make: Any) -> None:
    trainer = make(saved=True)
    poison(trainer, [1, 2, 5, 6, 7], "loss")
    with pytest.raises(NumericStop, match="step 8: loss or gradient not finite 3 steps in a row") as error:
        trainer.run()
    assert error.value.exit_code == 3 and trainer.step == 8
    stored = [step for step, _ in list_checkpoints(trainer.folder.checkpoints)]  # type: ignore[union-attr]
    assert stored == [8]
    again = make(saved=True)
    again.resume()
    assert again.non_finite_in_row == 3
    assert all(bool(torch.isfinite(p).all()) for p in again.model.parameters())
    again.run()
    assert again.step == 12


def break_update(trainer: Trainer, step: int) -> None:
    """Let the update of one step (from 1) leave a parameter that is not a number."""
    true_step = trainer.optimizers.step

    def update() -> None:
        true_step()
        if trainer.step + 1 == step:
            with torch.no_grad():
                trainer.model.head.weight[2, 1] = math.nan

    trainer.optimizers.step = update  # type: ignore[method-assign]


BROKEN = "an earlier update made parameter head.weight not finite, so this state is not saved; "


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("every", "stops_at"), [(1, 4), (3, 6)])
def test_an_update_that_breaks_the_model_leaves_the_last_good_checkpoint(
    make: Any, every: int, stops_at: int, background: bool
) -> None:
    trainer = make(saved=True, callbacks=[SaveEvery(every)], keep=1, background=background)
    break_update(trainer, 4)
    with pytest.raises(NumericStop) as error:
        trainer.run()
    assert str(error.value) == f"step {stops_at}: {BROKEN}the last good checkpoint is step-000003"
    assert error.value.exit_code == 3
    checkpoints = trainer.folder.checkpoints
    assert [path.name for path in checkpoints.iterdir()] == ["step-000003"]
    assert events(trainer)[-1]["tensor"] == "parameter head.weight"
    again = make(saved=True)
    again.resume()
    again.run()
    assert again.step == 12 and all(bool(torch.isfinite(p).all()) for p in again.model.parameters())


def test_a_model_that_is_broken_at_once_is_not_saved_and_the_message_says_so(make: Any) -> None:
    trainer = make(saved=True)
    break_update(trainer, 1)
    with pytest.raises(NumericStop) as error:
        trainer.run()
    what = "step 4: loss or gradient not finite 3 steps in a row; "
    assert str(error.value) == f"{what}{BROKEN}there is no good checkpoint"
    assert list_checkpoints(trainer.folder.checkpoints) == []


def test_an_optimizer_that_is_broken_is_not_saved_either(make: Any) -> None:
    trainer = make(3, saved=True)
    trainer.run(2)
    next(iter(trainer.optimizers.state_tensors().values())).view(-1)[0] = math.inf
    with pytest.raises(NumericStop, match=r"made optimizer state .* not finite.*the last good checkpoint is step-0000"):
        trainer.save()


def test_clipping_bounds_the_update_and_the_record_shows_the_norm_before(make: Any, tiny: SimpleNamespace) -> None:
    trainer = make(optimizer=tiny.optimizer(clip=1e-3))
    seen: list[float] = []
    true_step = trainer.optimizers.step

    def step() -> None:
        seen.append(float(trainer.optimizers.grad_norm()))
        true_step()

    trainer.optimizers.step = step
    record = trainer.train_step()
    assert record.grad_norm > 0.1 and seen[0] == pytest.approx(1e-3, rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_last_whole_step(make: Any, tiny: SimpleNamespace, number: int) -> None:
    straight = make(8)
    straight.run()
    handler = signal.getsignal(number)
    trainer = make(8, saved=True)
    true_loss, calls = trainer.model.loss, []

    def loss(batch: Any) -> Any:
        calls.append(0)
        if len(calls) == 7:  # the first micro-batch of the fourth step
            os.kill(os.getpid(), number)
        return true_loss(batch)

    trainer.model.loss = loss
    with pytest.raises(Interrupted, match="interrupted; step 3 of 8 is saved") as error:
        trainer.run()
    assert error.value.exit_code == 130 and len(calls) == 7
    assert signal.getsignal(number) == handler
    assert events(trainer)[-1] == {**events(trainer)[-1], "kind": "interrupted", "step": 3, "signal": number}
    again = make(8, saved=True)
    again.resume()
    again.run()
    same(straight, again)


def test_a_second_signal_is_not_held_back(make: Any) -> None:
    trainer = make(8)
    true_loss = trainer.model.loss

    def loss(batch: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        while trainer._signal is None:  # two signals at once may arrive as one
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)  # the handler interrupts this
        return true_loss(batch)

    trainer.model.loss = loss
    # A shell starts what runs in its background with SIGINT ignored, and then there would be no handler to fall to.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_saving_keeps_the_newest_and_metrics_have_no_step_twice(make: Any) -> None:
    trainer = make(12, saved=True, callbacks=[WriteMetrics(), SaveEvery(2)], keep=2)
    poison(trainer, [], "loss")
    trainer.run(7)
    folder = trainer.folder
    assert folder is not None
    assert [step for step, _ in list_checkpoints(folder.checkpoints)] == [6, 7]
    checkpoint.shutil.rmtree(folder.checkpoints / "step-000007")  # as if the process had died after step 7
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "los')
    again = make(12, saved=True, callbacks=[WriteMetrics(), SaveEvery(2)])
    assert again.resume().name == "step-000006"
    again.run()
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    assert set(json.loads(lines[0])) == {
        *("step", "stage", "tokens", "loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_s", "max_vio"),
        *("dead_experts", "seconds", "load_percentiles", "updated", "mtp_loss", "clipped_heads"),
    }


def test_resume_passes_over_damage_with_an_event_and_refuses_when_nothing_is_left(make: Any) -> None:
    trainer = make(12, saved=True, callbacks=[SaveEvery(3)], keep=5)
    trainer.run(8)
    checkpoints = trainer.folder.checkpoints
    os.truncate(checkpoints / "step-000008" / "optimizer.safetensors", 100)
    again = make(12, saved=True)
    assert again.resume().name == "step-000006" and again.step == 6
    event = events(again)[-1]
    assert event["kind"] == "damaged_checkpoint" and event["path"] == "step-000008"
    assert "optimizer.safetensors is damaged" in event["reason"] and event["renamed"] == "step-000008-damaged"
    with pytest.raises(CheckpointError, match=r"step-000008-damaged: optimizer.safetensors is damaged"):
        again.load(checkpoints / "step-000008-damaged")
    for _, path in list_checkpoints(checkpoints):
        (path / "state.json").write_text("{")
    with pytest.raises(RunError, match="no valid checkpoint"):
        make(12, saved=True).resume()


def test_damaged_checkpoints_never_push_out_good_ones(make: Any) -> None:
    """Steps 4, 6 and 8 are there, 6 and 8 damaged; resumed with one kept, and stopped before step 8 comes again."""
    trainer = make(12, saved=True, callbacks=[SaveEvery(2)], keep=3)
    trainer.run(8)
    checkpoints = trainer.folder.checkpoints
    for name in ("step-000006", "step-000008"):
        os.truncate(checkpoints / name / "model.safetensors", 100)
    again = make(12, saved=True, callbacks=[SaveEvery(1)], keep=1)
    assert again.resume().name == "step-000004"
    again.train_step()
    again.save()
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["step-000005", "step-000006-damaged", "step-000008-damaged"]
    assert checkpoint.newest_valid(checkpoints)[1]["step"] == 5


def test_resume_without_a_checkpoint_begins_at_the_beginning(make: Any) -> None:
    trainer = make(saved=True)
    assert trainer.resume() is None and trainer.step == 0
    with pytest.raises(ValueError, match="folder: found None"):
        make().resume()


def test_the_cosine_is_never_stretched(make: Any) -> None:
    """B023: a resumed run with another planned total is refused."""
    make(12, saved=True).run(4)
    with pytest.raises(RunError, match="planned_steps: found 12, this run has 20"):
        make(20, saved=True).resume()


def test_a_checkpoint_of_other_data_is_refused(make: Any) -> None:
    make(saved=True, identity={"data": "aaa"}).run(1)
    with pytest.raises(RunError, match="data: found aaa, this run has bbb"):
        make(saved=True, identity={"data": "bbb"}).resume()


def test_a_full_disk_ends_the_run_with_code_one_and_the_old_checkpoint(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(12, saved=True, callbacks=[SaveEvery(3)])
    true_flush = checkpoint._flush

    def flush(path: Path) -> None:
        if trainer.step == 6:
            raise OSError(28, "No space left on device")
        true_flush(path)

    monkeypatch.setattr(checkpoint, "_flush", flush)
    with pytest.raises(RunError, match=r"cannot be saved \(No space left on device\); step-000003 is intact") as error:
        trainer.run()
    assert error.value.exit_code == 1
    again = make(12, saved=True)
    assert again.resume().name == "step-000003"


def test_callbacks_are_called_in_order_and_need_names(make: Any, tiny: SimpleNamespace) -> None:
    calls: list[str] = []

    class Note(Callback):
        name = "note"

        def on_start(self, trainer: Trainer) -> None:
            calls.append("start")

        def on_stage(self, trainer: Trainer, span: Any) -> None:
            calls.append(f"stage {span.index}")

        def on_step(self, trainer: Trainer, record: StepRecord) -> None:
            calls.append(f"step {record.step}")

        def on_save(self, trainer: Trainer, path: Path) -> None:
            calls.append(f"save {path.name}")

        def on_end(self, trainer: Trainer) -> None:
            calls.append("end")

    make(2, saved=True, callbacks=[Note()]).run()
    assert calls == ["start", "stage 0", "step 1", "step 2", "save step-000002", "end"]
    with pytest.raises(ValueError, match="need each name once"):
        make(callbacks=[Note(), Note()])


def test_training_in_bf16_resumes_to_the_last_bit(make: Any, tiny: SimpleNamespace) -> None:
    def model() -> Any:
        return tiny.model(dtype=torch.bfloat16)

    straight = make(6, model=model())
    straight.run()
    make(6, saved=True, model=model()).run(3)
    again = make(6, saved=True, model=model())
    again.resume()
    again.run()
    same(straight, again)
    assert again.model.moe.expert_up.dtype == torch.bfloat16


def test_the_stage_sets_recompute(make: Any) -> None:
    trainer = make()
    trainer.model.recompute = True
    trainer.train_step()
    assert trainer.model.recompute is False


def test_a_worker_thread_may_train(make: Any) -> None:
    import threading

    trainer, errors = make(3), []

    def work() -> None:
        try:
            trainer.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors and trainer.step == 3


def test_router_statistics_of_another_shape_are_refused(make: Any, tiny: SimpleNamespace) -> None:
    make(4, saved=True).run(1)
    other = tiny.model()
    other.router_stats = type(other.router_stats).allocate(1, 4, bins=60)
    other.moe.stats = other.router_stats.layer(0)
    with pytest.raises(CheckpointError, match=r"step-000001: histograms_LEB: found shape \(1, 4, 50\)"):
        make(4, saved=True, model=other).resume()


def test_a_model_without_experts_trains(make: Any, tiny: SimpleNamespace) -> None:
    model = tiny.model()
    del model.router_stats
    model.moe.forward = torch.zeros_like
    trainer = make(4, saved=True, model=model)
    record = trainer.run()
    assert (record.max_vio, record.dead_experts, record.load_percentiles) == ([], 0, None)
    model = tiny.model(seed=3)
    del model.router_stats
    model.moe.forward = torch.zeros_like
    again = make(4, saved=True, model=model)
    assert again.resume().name == "step-000004"
