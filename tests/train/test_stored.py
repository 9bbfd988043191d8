from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trine.config import ModelConfig, to_dict
from trine.data import DataError, Tokenizer
from trine.model import Model
from trine.train import stored
from trine.train.checkpoint import save_checkpoint
from trine.train.config import TrainConfig, train_to_dict
from trine.train.errors import RunError
from trine.train.run_folder import RunFolder
from trine.train.stored import load_run, program, resume_command, run_path, stored_config


@pytest.fixture
def run(tmp_path: Path, tiny_config: Callable[..., ModelConfig]) -> Path:
    """A run of one untrained model with two checkpoints."""
    path = tmp_path / "runs" / "one"
    shape = tiny_config(vocab_size=260)
    with RunFolder(path) as folder:
        folder.write_json("run.json", {"config": train_to_dict(TrainConfig(seed=5)), "model": to_dict(shape)})
        tokenizer = Tokenizer.train(["abc abd abe"] * 3, 260)
        tokenizer.save(path / "tokenizer.json")
        for step in (1, 2):
            torch.manual_seed(step)
            save_checkpoint(folder.checkpoints, step, {"model": Model(shape).state_dict()}, {})
    return path


def embedding(step: int, shape: ModelConfig) -> torch.Tensor:
    torch.manual_seed(step)
    return Model(shape).embed.weight.detach()


def test_the_newest_model_is_loaded_ready_to_use(run: Path) -> None:
    found = load_run(run)
    assert (found.step, found.path, found.passed_over, found.config.seed) == (2, run, (), 5)
    assert not found.model.training and found.tokenizer.vocab_size == 260
    assert torch.equal(found.model.embed.weight.detach(), embedding(2, found.model.config))


def test_a_step_or_a_checkpoint_can_be_named(run: Path) -> None:
    for found in (load_run(run, step=1), load_run(run / "checkpoints" / "step-000001")):
        assert found.step == 1 and found.path == run
        assert torch.equal(found.model.embed.weight.detach(), embedding(1, found.model.config))


def test_damage_is_passed_over_unless_it_was_asked_for(run: Path) -> None:
    os.truncate(run / "checkpoints" / "step-000002" / "model.safetensors", 99)
    found = load_run(run)
    assert found.step == 1 and len(found.passed_over) == 1 and "model.safetensors is damaged" in found.passed_over[0]
    with pytest.raises(RunError, match=r"model.safetensors is damaged"):
        load_run(run, step=2)
    os.truncate(run / "checkpoints" / "step-000001" / "model.safetensors", 99)
    with pytest.raises(RunError, match=r"step-000002: model.safetensors is damaged"):
        load_run(run)


def test_what_is_missing_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"found no run in .*nowhere"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"step-000007: does not exist"):
        load_run(run, step=7)
    (run / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="tokenizer"):
        load_run(run)
    for path in (run / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(RunError, match="one: has no checkpoint yet"):
        load_run(run)


def test_the_stored_configuration_comes_back(run: Path) -> None:
    assert stored_config(run) == TrainConfig(seed=5)
    record = json.loads((run / "run.json").read_text())
    record["config"]["stages"] = 4
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match=r"run.json: damaged \(stages: found 4, need a list of tables\)"):
        stored_config(run)


def test_which_folder_a_run_gets(run: Path) -> None:
    base = TrainConfig(runs=str(run.parent))
    assert run_path(base) == run.parent / "laptop"
    assert run_path(dataclasses.replace(base, run="mine")) == run.parent / "mine"
    with pytest.raises(RunError, match=r"run: found no run of preset 'laptop' in .*runs/ has one"):
        run_path(dataclasses.replace(base, resume=True))
    run.rename(run.parent / "laptop-3")
    assert run_path(dataclasses.replace(base, resume=True)) == run.parent / "laptop-3"


def test_how_to_go_on() -> None:
    trine = program()
    assert resume_command(TrainConfig(), "laptop-2") == f"{trine} train --run laptop-2 --resume"
    assert resume_command(TrainConfig(runs="x"), "a") == f"{trine} train --run a --runs x --resume"


def test_commands_are_given_so_that_they_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, other = tmp_path / ".venv" / "bin" / "trine", tmp_path / "elsewhere" / "trine"
    for path in (script, other):
        path.parent.mkdir(parents=True)
    monkeypatch.setattr("sys.executable", str(script.with_name("python")))
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == "trine"
    script.touch()
    assert program() == str(script)
    monkeypatch.chdir(tmp_path)
    assert program() == ".venv/bin/trine"
    for path in (script, other):
        path.touch()
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent))  # another installation is the one that the shell finds
    assert program() == ".venv/bin/trine"
    monkeypatch.setattr("sys.argv", [str(other)])
    assert program() == "trine"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == "elsewhere/trine"
    monkeypatch.setattr("sys.argv", ["elsewhere/trine"])
    assert program() == "elsewhere/trine"


def test_a_fault_of_ours_is_not_called_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(values: object) -> TrainConfig:
        raise TypeError("one argument too many")

    monkeypatch.setattr(stored, "train_from_dict", broken)
    with pytest.raises(TypeError, match="one argument too many"):
        stored_config(run)
    record = json.loads((run / "run.json").read_text())
    for value, found in ((3, "int"), (None, "NoneType"), ([], "list")):
        (run / "run.json").write_text(json.dumps({**record, "config": value}))
        with pytest.raises(RunError, match=rf"run.json: damaged \(config: found {found}, need an object\)"):
            stored_config(run)
    (run / "run.json").write_text('{"format_version": 1, "config": ' + "[" * 100_000)
    with pytest.raises(RunError, match=r"run.json: damaged"):
        stored_config(run)


def test_another_tokenizer_is_refused(run: Path) -> None:
    path = run / "tokenizer.json"
    record = json.loads((run / "run.json").read_text())
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    (run / "run.json").write_text(json.dumps({**record, "data": {"tokenizer": before}}))
    assert load_run(run).tokenizer.vocab_size == 260
    Tokenizer.train(["xyz xyw xyv"] * 3, 260).save(path)
    with pytest.raises(DataError, match=r"tokenizer.json: not the one that the run was trained with"):
        load_run(run)
    Tokenizer.train(["abc abd abe"] * 3, 259).save(path)
    with pytest.raises(DataError, match=r"tokenizer.json: found 259 ids, the run's model has 260"):
        load_run(run)
