from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from trine.config import ModelConfig
from trine.data import Shards, folder_source, write_shards
from trine.data.generated import open_recall
from trine.data.tokenizer import Tokenizer
from trine.model import Model
from trine.train import finish
from trine.train.config import EvalConfig
from trine.train.finish import evaluate, recall_cases, short_measure, store_evaluation, write


def shards_of(folder: Path, near_copies: bool) -> Shards:
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number in range(24):
        body = "\n".join(f"line {i} of the common text that every file holds" for i in range(20)) if near_copies else ""
        own = "\n".join(f"value {number * 1000 + i * 37} stands on its own line here" for i in range(20))
        (texts / f"{number}.txt").write_text(f"{own}\n{body}\n")
    corpus = folder_source(texts, one_in=3)
    return write_shards(folder / "data", [corpus], Tokenizer.train([d.text for d in corpus.documents], 270))


@pytest.mark.parametrize("near_copies", [False, True])
def test_the_table_has_model_and_yardsticks_on_the_same_bytes(
    tmp_path: Path, tiny_config: Callable[..., ModelConfig], near_copies: bool
) -> None:
    shards = shards_of(tmp_path, near_copies)
    model = Model(tiny_config(vocab_size=270))
    found = evaluate(model, shards, EvalConfig(context=64, primed=False))
    assert 1 < found["bits_per_byte"] < 20
    assert {"gzip", "xz", "ngram3", "ngram_best"} <= set(found["baselines"]) and "xz_primed" not in found["baselines"]
    if near_copies:
        assert found["bits_per_byte"] == found["bits_per_byte_all"] and found["baselines"] == found["baselines_all"]
    assert found["held_out"]["bytes_all"] == found["baselines_all"]["bytes"]


def test_a_sample_is_a_function_of_its_seed(tmp_path: Path, tiny_config: Callable[..., ModelConfig]) -> None:
    tokenizer = shards_of(tmp_path, False).tokenizer
    torch.manual_seed(1)
    model = Model(tiny_config(vocab_size=270))
    one, same, other = (write(model, tokenizer, "value ", 12, seed) for seed in (3, 3, 4))
    assert one == same != other and one.startswith("value ") and len(one) > len("value ")


def test_everything_is_measured_up_to_the_longest_stage(
    tmp_path: Path, tiny_config: Callable[..., ModelConfig]
) -> None:
    shards = shards_of(tmp_path, False)
    model = Model(tiny_config(vocab_size=270))
    config = EvalConfig(context=64, primed=False, task_tokens=40_000)
    found = evaluate(model, shards, config, stages=[64, 256])
    assert found["by_position"]["edges"][-1] == 256
    (source,) = found["by_source"]
    assert found["by_source"][source]["bits_per_byte"] == found["bits_per_byte"]
    cells = found["tasks"]["families"]["passkey"]
    assert {cell["length"] for cell in cells} == {256} and all(cell["chance"] < 1e-4 for cell in cells)
    assert any("passkey at 64 tokens" in line for line in found["tasks"]["left_out"])
    assert found["portrait"]["similarity"]["labels"] == ["0", "1", "2", "3", "4", "head"]
    assert "recall" not in found
    none = evaluate(model, shards, EvalConfig(context=64, primed=False, task_tokens=0), stages=[64])
    assert "tasks" not in none and none["by_position"]["length"] == 64
    assert evaluate(model, shards, config).keys() & {"tasks", "by_position"} == set()
    path = store_evaluation(tmp_path, 7, found)
    stored = json.loads(path.read_text())
    assert (stored["step"], stored["format_version"]) == (7, 1)
    assert stored["tasks"]["families"]["passkey"] == cells


def test_a_recall_run_is_measured_by_recall(
    tmp_path: Path, tiny_config: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finish, "evaluate_recall", partial(finish.evaluate_recall, rows=8))
    shards = open_recall(tmp_path / "data")
    model = Model(tiny_config(vocab_size=257))
    found = evaluate(model, shards, EvalConfig(), stages=[32])
    assert found["baselines"] == {} and "tasks" not in found
    cases = [(cell["length"], cell["pairs"], cell["distance"]) for cell in found["recall"]]
    assert cases == recall_cases([32])
    for cell in found["recall"]:
        assert cell["accuracy"] < 0.2 and abs(cell["gap"]) < 0.5 and cell["chance"] == 1 / cell["pairs"]


def test_recall_is_tested_to_four_times_each_trained_length_and_beyond_the_stage_before() -> None:
    cases = recall_cases([64, 256, 1024])
    anywhere = [case[:2] for case in cases if case[2] is None]
    assert anywhere == [(64, 4), (64, 8), (256, 4), (256, 16), (1024, 4), (1024, 16), (4096, 4), (4096, 16)]
    exact = [(length, distance) for length, _, distance in cases if distance is not None]
    assert exact == [(256, 96), (256, 240), (1024, 384), (1024, 960), (4096, 1536), (4096, 3840)]
    for before, (_, near), (_, far) in zip((64, 256, 1024), exact[::2], exact[1::2], strict=True):
        assert before < near < far


def test_the_guard_measures_the_same_text_again(tmp_path: Path, tiny_config: Callable[..., ModelConfig]) -> None:
    shards = shards_of(tmp_path, False)
    torch.manual_seed(3)
    model = Model(tiny_config(vocab_size=270))
    measure, unit = short_measure(shards, 32)
    first = measure(model)
    assert unit == "bits per byte" and first == measure(model) and 1 < first < 30
    recall, unit = short_measure(open_recall(tmp_path / "recall"), 32)
    assert unit == "nats an answer"
    assert recall(Model(tiny_config(vocab_size=257))) == pytest.approx(math.log(257), abs=1.0)
