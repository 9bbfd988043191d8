from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trine.config import ModelConfig
from trine.model import Model
from trine.nn import LatentMoE
from trine.train import checkpoint
from trine.train.checkpoint import (
    CheckpointError,
    NewerFormatError,
    list_checkpoints,
    load_model_state,
    newest_valid,
    prune,
    read_state,
    read_tensors,
    save_checkpoint,
    set_aside,
)
from trine.train.errors import RunError

TENSORS = {"model": {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)}, "optimizer": {}}


def save(folder: Path, step: int) -> Path:
    return save_checkpoint(folder, step, TENSORS, {"tokens": 10 * step})


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 123)
    assert path == tmp_path / "checkpoints" / "step-000123"
    assert sorted(p.name for p in path.iterdir()) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    state = read_state(path)
    assert (state["step"], state["tokens"], state["format_version"]) == (123, 1230, 1)
    tensors = read_tensors(path, "model")
    assert torch.equal(tensors["w"], TENSORS["model"]["w"]) and tensors["b"].dtype == torch.bfloat16
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-000123"]


def shorten(path: Path) -> None:
    os.truncate(path / "model.safetensors", 40)


def flip(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


def edit_state(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "tokens": 0}))


DAMAGES = {
    "a shortened file": (shorten, r"model.safetensors is damaged \(40 bytes, need \d+\)"),
    "one flipped bit": (flip, r"model.safetensors is damaged \(its checksum does not fit\)"),
    "a missing file": (
        lambda p: (p / "optimizer.safetensors").unlink(),
        "half-written, optimizer.safetensors is missing",
    ),
    "no state": (lambda p: (p / "state.json").unlink(), "half-written, state.json is missing"),
    "half a state": (lambda p: os.truncate(p / "state.json", 20), "state.json is damaged"),
    "an edited state": (edit_state, r"state.json is damaged \(its checksum does not fit\)"),
    "a state that is a list": (lambda p: (p / "state.json").write_text("[]"), "state.json is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_refused_and_passed_over(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    damage(bad)
    with pytest.raises(CheckpointError) as error:
        read_state(bad)
    assert re.search(message, str(error.value)) and str(bad) in str(error.value) and "\n" not in str(error.value)
    path, state, damaged = newest_valid(tmp_path)
    assert (path, state["step"]) == (good, 1)
    assert [one.path for one in damaged] == [bad]
    assert damaged[0].reason == str(error.value)
    # saving that step again replaces what is damaged
    save(tmp_path, 2)
    assert newest_valid(tmp_path)[0] == bad


def test_a_newer_format_is_refused_by_name_and_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 2)
    newer = save(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(NewerFormatError, match="format_version 2 is newer than 1"):
        read_state(newer)
    with pytest.raises(NewerFormatError, match="step-000002"):
        newest_valid(tmp_path)
    with pytest.raises(NewerFormatError):
        save(tmp_path, 2)
    assert newer.exists()


def test_nothing_there(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "none") == (None, {}, [])
    with pytest.raises(CheckpointError, match="does not exist"):
        read_state(tmp_path / "step-000001")
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors is damaged or missing"):
        read_tensors(tmp_path, "optimizer")


def test_the_newest_are_kept_and_leftovers_swept(tmp_path: Path) -> None:
    for step in (5, 1_000_000, 20):
        save(tmp_path, step)
    (tmp_path / ".writing-step-000021-77").mkdir()
    (tmp_path / "notes").mkdir()
    prune(tmp_path, 2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [20, 1_000_000]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-000020", "step-1000000"]


def test_damaged_checkpoints_do_not_count_and_the_one_just_written_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    shorten(tmp_path / "step-000005")
    (tmp_path / "step-000003" / "state.json").unlink()
    prune(tmp_path, 2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 3, 4, 5]
    prune(tmp_path, 1, tmp_path / "step-000002")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 4, 5]


def test_what_is_set_aside_is_kept_under_another_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for expected in ("step-000002-damaged", "step-000002-damaged-2"):
        shorten(save(tmp_path, 2))
        assert [path.name for path in set_aside(newest_valid(tmp_path)[2])] == [expected]
        assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    prune(tmp_path, 1)
    assert (tmp_path / "step-000002-damaged" / "model.safetensors").stat().st_size == 40


def test_a_valid_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    stamp = (path / "state.json").stat().st_mtime_ns
    save(tmp_path, 3)
    assert (path / "state.json").stat().st_mtime_ns == stamp


def test_a_disk_that_fills_mid_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The kernel refuses to let a file grow, as on a full disk, in the middle of the second file."""
    save(tmp_path, 1)
    tensors = {"model": {"w": torch.ones(10)}, "optimizer": {"m": torch.ones(1_000_000)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(RunError) as error:
            save_checkpoint(tmp_path, 2, tensors, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    text = str(error.value)
    assert text.startswith(f"{tmp_path}/step-000002: cannot be saved (") and "File too large" in text
    assert text.endswith("step-000001 is intact") and error.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert newest_valid(tmp_path)[1]["step"] == 1


def test_no_space_is_one_line_and_says_when_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(RunError) as error:
        save(tmp_path, 1)
    place = tmp_path / "step-000001"
    assert str(error.value) == f"{place}: cannot be saved (No space left on device); there is no earlier checkpoint"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_hash_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("saved", [True, False])
def test_a_latent_norm_is_not_dropped_in_silence(
    tiny_config: Callable[..., ModelConfig], tmp_path: Path, saved: bool
) -> None:
    """radixark/Megatron-LM#94: the model was built without the norm that its checkpoint had, and ran on. Both ways the
    names are told and the model stays as it was."""
    with_norm, without = (Model(tiny_config(latent_norm=one)) for one in (True, False))
    model = without if saved else with_norm
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = (with_norm if saved else without).state_dict()
    path = save_checkpoint(
        tmp_path, 1, {"model": {k: v + torch.ones((), dtype=v.dtype) for k, v in tensors.items()}}, {}
    )
    with pytest.raises(CheckpointError) as error:
        load_model_state(model, path)
    names = sorted(name for name in with_norm.state_dict() if "latent_norm" in name)
    assert len(names) == sum(isinstance(part, LatentMoE) for part in model.modules()) > 0
    expected = f"checkpoint {path}: {'unknown' if saved else 'missing'} tensors: {', '.join(names)}"
    assert str(error.value) == expected
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(RuntimeError, match=f"{'Unexpected' if saved else 'Missing'} key.*latent_norm"):
        model.load_state_dict(tensors)


def test_model_tensors_must_fit_one_by_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)

    def stored(step: int, tensors: dict[str, torch.Tensor]) -> Path:
        return save_checkpoint(tmp_path, step, {"model": tensors}, {})

    path = stored(1, {"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    load_model_state(model, path)
    assert torch.equal(model.weight.detach(), torch.ones(2, 3))
    for step, tensors, message in (
        (2, {"weight": torch.zeros(2, 3)}, "missing tensors: bias"),
        (3, {"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "c": torch.zeros(2)}, "unknown tensors: c"),
        (4, {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"weight: found torch.float32 of shape \(3, 2\)"),
        (5, {"weight": torch.zeros(2, 3).half(), "bias": torch.zeros(2)}, "weight: found torch.float16"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_model_state(model, stored(step, tensors))
    assert torch.equal(model.weight.detach(), torch.ones(2, 3))
