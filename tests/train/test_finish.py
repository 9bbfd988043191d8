from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trine.config import ModelConfig
from trine.data import Shards, folder_source, write_shards
from trine.data.tokenizer import Tokenizer
from trine.model import Model
from trine.train.config import EvalConfig
from trine.train.finish import evaluate, write


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
