"""What a look inside a model says is true, costs training nothing but time, and survives a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trine.balance import install_policy
from trine.config import ModelConfig
from trine.data import Batch
from trine.decay import calibrate_gates
from trine.evals.portrait import portrait
from trine.model import Model
from trine.nn.kda import KimiDeltaAttention
from trine.ops.kda import bounded_gate
from trine.train import probes
from trine.train.callbacks import Callback
from trine.train.config import (
    BalanceConfig,
    EvalConfig,
    OptimizerConfig,
    Rates,
    Stage,
    config_hash,
    train_preset,
)
from trine.train.errors import RunError
from trine.train.loop import train
from trine.train.metrics import StepRecord
from trine.train.probes import FILE_NAME, LEVELS, Probes, ProbeText, interval, look_inside, probe_text, scalars
from trine.train.run_folder import RunFolder
from trine.train.schedule import StageSpan, lay_out
from trine.train.trainer import Trainer

VOCAB = 97
MakeConfig = Callable[..., ModelConfig]


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def text_of(*lengths: int) -> ProbeText:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ProbeText(ids(sum(lengths)), bounds, "held-out text")


def batches(span: StageSpan, step: int) -> Sequence[Batch]:
    bounds = torch.tensor([0, 10, 24], dtype=torch.int32)
    rows = [ids(24, seed=2 * step + half) for half in (1, 2)]
    return [Batch(row, row.roll(-1), torch.ones(24), bounds, torch.zeros(2, dtype=torch.int64)) for row in rows]


def small_run(config: ModelConfig, folder: RunFolder | None, steps: int, every: int, workers: int = 1) -> Trainer:
    torch.manual_seed(3)
    model = Model(config)
    callbacks = [Probes(folder.path, every, text_of(11, 13))] if folder is not None else []
    return Trainer(
        *(model, lay_out([Stage(length=24, step_tokens=48, micro_tokens=24)], 48 * steps), batches),
        OptimizerConfig(rates=Rates(muon=0.02, embeddings=0.02, other=0.01)),
        balancer=install_policy(model, BalanceConfig()),
        folder=folder,
        callbacks=callbacks,
        workers=workers,
    )


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]


class Listen(Callback):
    """Losses, and a number drawn after each step."""

    name = "listen"

    def __init__(self) -> None:
        self.heard: list[float] = []

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        self.heard += [record.loss, record.grad_norm, float(torch.rand(()))]


@pytest.mark.parametrize("workers", [1, 2])
def test_training_has_the_same_bits_with_probes_and_without(
    tiny_config: MakeConfig, tmp_path: Path, workers: int
) -> None:
    states, heard = [], []
    for every in (0, 1):
        with RunFolder(tmp_path / str(every)) as folder:
            trainer = small_run(tiny_config(), folder, 4, every, workers)
            listen = Listen()
            trainer.callbacks.append(listen)
            trainer.run()
            heard.append(listen.heard)
            states.append({**trainer.model.state_dict(), "bias": trainer.router_stats.bias_LE})  # type: ignore[union-attr]
    assert heard[0] == heard[1] and len(heard[0]) == 12
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not (tmp_path / "0" / FILE_NAME).exists()
    assert [line["step"] for line in lines_of(tmp_path / "1")] == list(range(5))


def test_a_look_leaves_the_model_as_it_was(tiny_config: MakeConfig) -> None:
    model = Model(tiny_config()).train()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        look_inside(model, text_of(7, 30))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert int(model.router_stats.loads_LE.sum()) == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hooks_go_when_the_pass_fails(tiny_config: MakeConfig) -> None:
    model = Model(tiny_config()).train()
    with pytest.raises(ValueError, match="tokens_T"):
        look_inside(model, ProbeText(torch.tensor([VOCAB + 5, 1]), torch.tensor([0, 2], dtype=torch.int32), "x"))
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_depth_and_similarity_are_the_portraits(tiny_config: MakeConfig) -> None:
    model = Model(tiny_config(block_layers=2))
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(torch.randn_like(parameter))
    text = text_of(9, 24)
    found, want = look_inside(model, text), portrait(model, text.tokens_T, text.cu_seqlens_N1)
    assert dict(zip(found["depth"]["sites"], found["depth"]["weights"], strict=True)) == {
        row["label"]: pytest.approx(row["weights"], abs=2e-4) for row in want["mix"]
    }
    assert all(sum(row) == pytest.approx(1, abs=1e-3) for row in found["depth"]["weights"])
    assert found["layers"]["labels"] == want["similarity"]["labels"] == ["0", "1", "2", "3", "4", "head"]
    for row, other in zip(found["layers"]["cka"], want["similarity"]["values"], strict=True):
        assert row == pytest.approx(other, abs=2e-4)


def test_gates_are_where_calibrate_finds_them(tiny_config: MakeConfig) -> None:
    assert probes.AT_BOUND == calibrate_gates.AT_BOUND
    model = Model(tiny_config(g_min=-3.0))
    with torch.no_grad():
        for layer in model.layers:
            if isinstance(layer.attention, KimiDeltaAttention):
                layer.attention.dt_bias.normal_(0, 6)
                layer.attention.dt_bias[1] = 40.0  # head 1 forgets all it can
    text = text_of(17, 16)
    found = look_inside(model, text)
    rows = [calibrate_gates.Rows(text.tokens_T, text.tokens_T, text.cu_seqlens_N1)]
    want = calibrate_gates.gates_of_model(model, rows)
    assert [gate["layer"] for gate in found["gates"]] == [0, 1, 2]
    for gate, other in zip(found["gates"], want["layers"], strict=True):
        assert (gate["kind"], gate["g_min"]) == ("bounded", -3.0)
        assert gate["at_g_min"][1] == 1.0 and gate["at_zero"][1] == 0.0
        assert 0 < gate["at_g_min"][0] < 1 and 0 < gate["at_zero"][0] < 1
        for memory, head in zip(gate["memory"], other["heads"], strict=True):
            named = [head["memory"][f"p{p}"] for p in (10, 50, 90)]
            assert memory == pytest.approx(named, rel=1e-3)
        assert sum(gate["histogram"]) == pytest.approx(1, abs=1e-2)
        top = (torch.tensor(3.0).log10() + 5) * 8
        assert gate["histogram"][int(top)] > 0.5  # half the gates are head 1's, at 3
        assert all(later == 0 for later in gate["histogram"][int(top) + 1 :])


def test_quantiles_maxima_and_openness_are_of_what_ran(tiny_config: MakeConfig) -> None:
    model = Model(tiny_config()).eval()
    text = text_of(33)
    caught: dict[str, torch.Tensor] = {}
    layer = model.layers[1]
    hooks = [
        layer.attention_norm.register_forward_hook(lambda m, a, r: caught.update(stream=a[0], x=r)),
        layer.attention.register_forward_hook(lambda m, a, r: caught.update(attention=r[0])),
        layer.feed_forward.register_forward_hook(lambda m, a, r: caught.update(feed_forward=r)),
    ]
    found = look_inside(model, text)
    for hook in hooks:
        hook.remove()
    for part in ("stream", "attention", "feed_forward"):
        peaks = found["activations"][part]
        assert peaks["max"][1] == pytest.approx(float(caught[part].abs().max()), rel=1e-3)
        assert peaks["rms"][1] == pytest.approx(float(caught[part].square().mean().sqrt()), rel=1e-3)
    assert len(found["activations"]["stream"]["max"]) == 6 and len(found["activations"]["attention"]["max"]) == 5
    attention, x_TD = layer.attention, caught["x"]
    with torch.no_grad():
        open_THK = torch.sigmoid(attention.gate_proj(x_TD)).unflatten(-1, (2, 16))
        g_THK = bounded_gate(
            attention.decay_up(attention.decay_down(x_TD)).unflatten(-1, (2, 16)), attention.A_log, attention.dt_bias
        )
    gate = found["openness"][1]
    assert gate["layer"] == 1 and gate["kind"] == "kda" and found["openness"][4]["kind"] == "mla"
    assert gate["mean"] == pytest.approx(open_THK.mean((0, 2)).tolist(), rel=1e-3)
    for head in range(2):
        for values, exact in ((gate["values"], open_THK), (found["gates"][1]["g"], g_THK)):
            want = torch.quantile(exact[:, head].flatten(), torch.tensor(LEVELS), interpolation="nearest")
            assert values[head] == pytest.approx(want.tolist(), rel=2e-2)
    units = torch.nn.functional.normalize(caught["stream"], dim=-1)
    cosines = units @ units.T
    alike = (float(cosines.sum()) - 33) / (33 * 32)
    assert found["layers"]["tokens_alike"][1] == pytest.approx(alike, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "sites"),
    [
        ({"residual": "plain"}, []),
        ({"residual": "chunk", "block_layers": 2}, ["chunk 1", "chunk 2"]),
        ({"gate_kind": "softplus", "output_gates": False}, None),
        ({"dense_layers": 5}, None),
    ],
)
def test_other_structures_say_what_they_lack(tiny_config: MakeConfig, change: dict[str, Any], sites: Any) -> None:
    found = look_inside(Model(tiny_config(**change)), text_of(12))
    if sites is not None:
        assert found["depth"]["sites"] == sites
    if "gate_kind" in change:
        assert found["openness"] == [] and found["gates"][0]["at_g_min"] is None and found["gates"][0]["g_min"] is None
        assert "at_g_min/0" not in scalars(found) and "memory_tokens/0" in scalars(found)
    json.dumps(found, allow_nan=False)


def test_numbers_that_are_not_finite_are_null(tiny_config: MakeConfig) -> None:
    model = Model(tiny_config())
    with torch.no_grad():
        model.layers[2].attention.o_proj.weight[0, 0] = float("nan")
        model.layers[1].attention.decay_up.weight.fill_(float("nan"))
    found = json.loads(json.dumps(look_inside(model, text_of(10)), allow_nan=False))
    assert found["activations"]["attention"]["max"][2] is None
    assert found["gates"][1]["g"][0][-1] is None and sum(found["gates"][1]["histogram"]) == 0
    assert found["layers"]["cka"][0][-1] is None
    assert all(isinstance(value, float) for value in scalars(found).values())


def test_a_model_of_16_bits_is_looked_at_too(tiny_config: MakeConfig) -> None:
    model = Model(tiny_config())
    text = text_of(19, 13)
    full = look_inside(model, text)
    half = look_inside(model.to(torch.bfloat16), text)
    assert half["layers"]["cka"][0] == pytest.approx(full["layers"]["cka"][0], abs=0.05)
    assert half["gates"][2]["memory"][1] == pytest.approx(full["gates"][2]["memory"][1], rel=0.05)
    assert half["openness"][0]["mean"] == pytest.approx(full["openness"][0]["mean"], abs=0.02)


def test_one_token_is_enough(tiny_config: MakeConfig) -> None:
    found = look_inside(Model(tiny_config()), text_of(1))
    assert found["layers"]["cka"][0][0] == 0 and found["tokens"] == 1
    assert found["layers"]["tokens_alike"][0] == pytest.approx(0, abs=1e-5)


def test_the_interval_fits_the_run() -> None:
    assert [interval(0, 10_000), interval(50, 10), interval(50, 70), interval(50, 481)] == [0, 20, 20, 24]
    assert [interval(1, 10), interval(5, 481)] == [1, 5]  # as often as was asked for
    assert [interval(50, 5_000), interval(50, 50_000), interval(50, 1_000_000)] == [50, 50, 1000]


def test_a_resumed_run_goes_on_with_its_file(tiny_config: MakeConfig, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        first = small_run(tiny_config(), folder, 6, 2)
        first.run(4)
        path = tmp_path / "run" / FILE_NAME
        whole = path.read_text()
        path.write_text(whole + '{"step": 9}\n' + "no json\n" + whole[:40])
        second = small_run(tiny_config(), folder, 6, 2)
        second.resume()
        second.run()
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [0, 2, 4, 6]
    assert path.read_text().startswith(whole)


def test_a_model_of_another_kind_is_left_alone(tiny: SimpleNamespace, tmp_path: Path) -> None:
    trainer = Trainer(
        *(tiny.model(), tiny.plan(2), tiny.batches, tiny.optimizer()), callbacks=[Probes(tmp_path, 1, text_of(8))]
    )
    trainer.run()
    assert not (tmp_path / FILE_NAME).exists()


def test_listeners_hear_every_record_and_a_full_disk_is_told(tiny_config: MakeConfig, tmp_path: Path) -> None:
    heard: list[int] = []
    with RunFolder(tmp_path / "run") as folder:
        trainer = small_run(tiny_config(), folder, 3, 1)
        trainer.callbacks = [Probes(folder.path, 1, text_of(8), [lambda record: heard.append(record["step"])])]
        trainer.run()
        assert heard == [0, 1, 2, 3]
        (folder.path / FILE_NAME).unlink()
        (folder.path / FILE_NAME).mkdir()
        with pytest.raises(RunError, match=r"probes.jsonl: cannot be read"):
            small_run(tiny_config(), folder, 3, 1).run()


class Texts:
    """Shards as far as `probe_text` reads them: lengths of held-out documents, and which are near-copies."""

    def __init__(self, *documents: tuple[int, bool]) -> None:
        self.documents = [SimpleNamespace(near_copy=near) for _, near in documents]
        self._lengths = [length for length, _ in documents]

    def select(self, split: str) -> torch.Tensor:
        assert split == "held_out"
        return torch.arange(len(self._lengths))

    def stream(self, i: int) -> Any:
        return torch.arange(i * 1000, i * 1000 + self._lengths[i]).numpy().astype("uint16")


def test_the_text_is_the_beginning_of_held_out_documents() -> None:
    text = probe_text(Texts((500, True), (1, False), (60, False), (900, False), (900, False)), batches)  # type: ignore[arg-type]
    assert text.cu_seqlens_N1.tolist() == [0, 60, 188, 256] and text.source == "held-out text"
    assert text.tokens_T[[0, 60, 188, 255]].tolist() == [2000, 3000, 4000, 4067] and text.tokens_T.dtype == torch.int64


@pytest.mark.parametrize(("bounds", "want"), [([0, 100, 256, 300], [0, 100, 256]), ([0, 300], [0, 256])])
def test_without_held_out_text_the_first_batch_stands_in(bounds: list[int], want: list[int]) -> None:
    tokens = ids(300)
    batch = Batch(
        *(tokens, tokens, torch.ones(300), torch.tensor(bounds, dtype=torch.int32)),
        torch.zeros(len(bounds) - 1, dtype=torch.int64),
    )
    text = probe_text(Texts(), lambda: batch)  # type: ignore[arg-type]
    assert text.cu_seqlens_N1.tolist() == want and torch.equal(text.tokens_T, tokens[:256])
    assert text.source == "training text"


def test_a_whole_run_looks_when_it_is_told_to(tmp_path: Path) -> None:
    stage = Stage(length=64, step_tokens=128, micro_tokens=128)
    plan = replace(train_preset("recall"), stages=(stage,), tokens=3 * 128, runs=str(tmp_path), threads=1)
    losses = []
    for every in (0, 2):
        config = replace(plan, run=str(every), probe_every=every, eval=EvalConfig(run=False), recorder=False)
        folder = train(config).folder
        losses.append([json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()])
        assert (folder / FILE_NAME).exists() == bool(every)
    assert losses[0] == losses[1] and len(losses[0]) == 3
    looks = lines_of(folder)
    assert [line["step"] for line in looks] == [0, 2, 3] and looks[0]["depth"] != looks[2]["depth"]
    assert {line["text"] for line in looks} == {"held-out text"}
    with pytest.raises(ValueError, match="probe_every: found -1, need 0"):
        replace(plan, probe_every=-1)
    assert config_hash(plan) == config_hash(replace(plan, probe_every=7))
