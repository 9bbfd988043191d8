"""A small corpus with near-copies among the held-out documents, tokenised."""

from __future__ import annotations

import numpy as np
import pytest

from trine.data import Shards, Tokenizer, write_shards
from trine.data.sources import make_corpus


def prose(seed: int, lines: int) -> str:
    """Invented lines; no two seeds share one."""
    draw = np.random.default_rng(seed)
    return "".join(
        f"{seed} says {'abcdefgh'[n % 8] * (n % 5 + 1)} and {n} — so é\n" for n in draw.integers(0, 999, lines)
    )


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Forty documents by themselves and twenty of one family; 1 in 4 held out."""
    texts = [(f"own{i:02d}", prose(i, 5 + i).encode()) for i in range(40)]
    table = prose(1000, 30)
    texts += [(f"table{i:02d}", f"{table}number {i} of the table\n".encode()) for i in range(20)]
    corpus = make_corpus("made", texts, licence="CC0-1.0", one_in=4)
    tokenizer = Tokenizer.train([d.text for d in corpus.select("train")], 320)
    return write_shards(tmp_path_factory.mktemp("shards"), [corpus], tokenizer)
