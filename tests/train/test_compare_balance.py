from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from trine._balance_verbs import main
from trine.config import BalanceConfig
from trine.data import Batch, DataError
from trine.model import Model
from trine.ops.router.auxiliary import auxiliary_loss, relative_loads
from trine.train import compare_balance, machine
from trine.train.compare_balance import interference, run_compare, steps_to_balance, summarise, wire_bytes
from trine.train.compare_config import ARMS, CompareConfig, arm_balance
from trine.train.config import TRAIN_PRESETS, DataConfig, EvalConfig, TrainConfig
from trine.train.errors import RunError
from trine.views.balance_compare import compare_note, compare_rows, compare_table, write_compare

MODEL = ("layers=2", "mla_layers=(1,)", "width=32", "heads=2", "head_dim=16", "dense_width=64", "experts=4")


def test_arms_differ_in_their_policy_alone() -> None:
    assert len(ARMS) == 8 and arm_balance("qb") == BalanceConfig()
    assert {arm_balance(arm).policy for arm in ARMS} == {"qb", "sign", "load_quantile", "aux", "stateless", "freeze"}
    with pytest.raises(ValueError, match="arm: found 'best'"):
        arm_balance("best")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ("qb", "bias")}, "arms: found 'bias', need one of"),
        ({"tokens": 0}, "tokens: found 0, need at least 1"),
        ({"seeds": 0}, "seeds: found 0, need at least 1"),
        ({"seed": (3,)}, r"seed: found \(3,\), need numbers from 0 to 2"),
        ({"jobs": -1}, "jobs: found -1, need 0"),
    ],
)
def test_bad_values_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompareConfig(**change)


def test_balance_is_reached_when_it_lasts() -> None:
    assert steps_to_balance([1.0, 0.1, 1.0, *[0.2] * 10], 0.1) == 4
    assert steps_to_balance([0.2] * 10, 0.1) == 1
    assert steps_to_balance([0.2] * 9 + [0.21] + [0.2] * 9, 0.1) is None


def result(arm: str, seed: int, loss: float, reached: int | None = 5) -> dict[str, Any]:
    return {
        "arm": arm, "seed": seed, "steps": 50, "loss": loss, "bits_per_byte": 2.0, "floor": 0.1, "max_vio": 0.2,
        "max_vio_p95": 0.3, "dead": 0.0, "steps_to_balance": reached, "tokens_per_s": 10.0, "cosine": 0.1 * seed,
        "wire_bytes": 100, "max_vios": [1.0, float(seed)],
    }  # fmt: skip


def test_a_difference_counts_beyond_two_standard_errors_of_the_pairs() -> None:
    qb = [result("qb", seed, loss) for seed, loss in enumerate((1.0, 2.0, 3.0))]
    near = [result("aux", seed, loss) for seed, loss in enumerate((1.1, 1.9, 3.1))]
    far = [result("none", seed, loss, None) for seed, loss in enumerate((1.5, 2.6, 3.4))]
    arms = summarise(qb + near + far)
    # pairs 0.5, 0.6, 0.4: mean 0.5, deviation 0.1, standard error 0.1 / sqrt 3; spread of the losses themselves is 1
    assert arms["none"]["loss"]["difference"] == pytest.approx(0.5)
    assert arms["none"]["loss"]["error"] == pytest.approx(0.1 / 3**0.5)
    assert arms["none"]["loss"]["counts"] and not arms["aux"]["loss"]["counts"]
    assert not arms["qb"]["loss"]["counts"] and not arms["none"]["bits_per_byte"]["counts"]
    assert arms["none"]["steps_to_balance"]["mean"] == 50 and arms["none"]["never_balanced"] == 3
    assert arms["qb"]["max_vio_by_step"] == [1.0, 1.0]  # medians over seeds of 1, 1, 1 and 0, 1, 2
    single = summarise([result("qb", 0, 1.0), result("aux", 0, 2.0)])
    assert single["aux"]["loss"]["difference"] == 1.0 and not single["aux"]["loss"]["counts"]


def batch(seed: int, tokens: int = 48) -> Batch:
    ids = torch.randint(257, (tokens + 1,), generator=torch.Generator().manual_seed(seed))
    return Batch(
        tokens_T=ids[:-1],
        targets_T=ids[1:],
        weights_T=torch.ones(tokens),
        cu_seqlens_N1=torch.tensor([0, tokens], dtype=torch.int32),
        source_N=torch.zeros(1, dtype=torch.int64),
    )


def test_interference_is_the_cosine_of_the_two_gradients() -> None:
    torch.manual_seed(0)
    model = Model(TrainConfig(preset="smoke", model=MODEL, data=DataConfig(vocabulary=257)).model_config()).double()
    batches = [batch(0), batch(1, 30)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = interference(model, batches)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.router_stats.counts.any() and all(p.grad is None for p in model.parameters())

    # by hand: both losses as means over all tokens, differentiated apart
    model.train()
    scores: list[torch.Tensor] = []
    moe = model.layers[1].feed_forward
    main = torch.zeros(())
    for one in batches:
        loss, _ = model.loss(one)
        main = main + loss
    relative_E = relative_loads(model.router_stats.loads_LE.long())[0]
    model.router_stats.zero_()
    real = moe._route

    def route(*args: Any) -> Any:
        routing = real(*args)
        scores.append(routing.scores_TE)
        return routing

    moe._route = route  # type: ignore[method-assign]
    for one in batches:
        model.loss(one)
    aux = sum(auxiliary_loss(one, relative_E).sum() for one in scores)
    flat = []
    for value in (main, aux):
        grads = torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)
        flat.append(torch.cat([grad.flatten() for grad in grads]))
    assert found == pytest.approx(float(torch.nn.functional.cosine_similarity(*flat, dim=0)), abs=1e-6)


def test_bytes_on_the_wire_are_those_of_what_is_reduced() -> None:
    model = Model(TrainConfig(preset="smoke", model=MODEL, data=DataConfig(vocabulary=257)).model_config())
    # one MoE layer of 4 experts: 1,000 bins and a load each, five counters, four bytes a number
    counters = model.router_stats.counters_LF.numel()
    assert wire_bytes("sign", model) == wire_bytes("aux", model) == 4 * (4 + counters)
    assert wire_bytes("qb", model) == wire_bytes("stateless", model) == 4 * (4 * 1_000 + 4 + counters)
    assert wire_bytes("qb-signed-log", model) == 4 * (4 * 256 + 4 + counters)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompareConfig:
    settings = {"allocator": False, "flush_denormal": False, "threads": 1}
    monkeypatch.setattr(machine, "prepare_machine", lambda threads: settings)
    monkeypatch.setattr(machine, "busy_warning", lambda: None)
    folder, draw = tmp_path / "texts", random.Random(0)
    folder.mkdir()
    for number in range(24):
        lines = [f"value_{draw.randrange(50)} = {draw.choice('abcdef') * 3} + {draw.randrange(99)}" for _ in range(60)]
        (folder / f"program_{number:02d}.py").write_text("\n".join(lines) + "\n")
    base = TRAIN_PRESETS["smoke"].stages[0]
    stage = base.__class__(length=128, step_tokens=512, micro_tokens=512)
    plan = TrainConfig(
        preset="smoke",
        model=MODEL,
        stages=(stage,),
        data=DataConfig(source=str(folder), held_out_one_in=4, vocabulary=300),
        eval=EvalConfig(run=False),
    )
    monkeypatch.setitem(TRAIN_PRESETS, "smoke", plan)
    return CompareConfig(folder=str(tmp_path / "cmp"), seeds=1, tokens=1_024, jobs=1, device="cpu")


def test_a_comparison_runs_what_is_missing_and_is_put_together(
    small: CompareConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--folder", small.folder, "--seeds", "1", "--tokens", "1024", "--jobs", "1", "--device", "cpu"]
    assert main([*words, "--arms", "qb", "aux", "qb-logit"]) == 0
    said = capsys.readouterr().out
    assert "qb-logit" in said and "Not done yet" in said and "**" not in said
    with monkeypatch.context() as patch:
        patch.setattr(compare_balance, "_one_run", None)  # nothing is run again
        found = run_compare(CompareConfig(**{**vars(small), "arms": ("qb", "aux")}))
    assert list(found["arms"]) == ["qb", "qb-logit", "aux"] and len(found["missing"]) == 5
    rows = found["results"]
    assert [one["steps"] for one in rows] == [2, 2, 2] and len({one["loss"] for one in rows}) == 3
    assert all(-1 <= one["cosine"] <= 1 and len(one["max_vios"]) == 2 for one in rows)
    page = write_compare(found, Path(small.folder)).read_text()
    assert "| Quantile Balancing (QB) |" in page and (Path(small.folder) / "compare.png").stat().st_size > 10_000
    assert len(compare_rows(found)) == 3 and "1 seed:" in compare_note(found) and compare_table(found).row_count == 3
    with pytest.raises(RunError, match="holds a comparison with tokens 1024, found 2048; need another --folder"):
        run_compare(CompareConfig(**{**vars(small), "tokens": 2_048}))
    assert json.loads((Path(small.folder) / "compare.json").read_text())["format_version"] == 1


def test_a_source_that_is_none_leaves_nothing_that_refuses_the_right_one(small: CompareConfig) -> None:
    wrong = CompareConfig(**{**vars(small), "source": "no-such-source"})
    folder = Path(small.folder)
    with pytest.raises(DataError):
        run_compare(wrong)
    assert not folder.exists()
    folder.mkdir()
    (folder / "mine.txt").write_text("kept")
    with pytest.raises(DataError):
        run_compare(wrong)
    assert (folder / "mine.txt").exists() and not (folder / "plan.json").exists()


def test_the_command_of_one_run_is_that_run(small: CompareConfig) -> None:
    job = compare_balance._job(small, "aux", 0, 1)
    from trine._options import parse

    assert job.words[1:5] == ["-m", "trine.cli", "balance", "compare"]
    parsed = parse("balance compare", CompareConfig, job.words[5:])
    assert parsed == CompareConfig(**{**vars(small), "arms": ("aux",), "seed": (0,), "threads": 1})
