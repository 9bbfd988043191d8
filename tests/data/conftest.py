"""Small synthetic corpora: words from a fixed generator, so that every test sees the same text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trine.data import Corpus, Shards, Tokenizer, write_shards
from trine.data.sources import make_corpus

SYLLABLES = ["ka", "ro", "min", "tel", "su", "va", "é", "ling", "x1", "(a)", "qo", "ber"]


def words(seed: int, count: int) -> str:
    """``count`` invented words with line ends, no two seeds alike."""
    draw = np.random.default_rng(seed)
    made = ["".join(SYLLABLES[i] for i in draw.integers(0, len(SYLLABLES), draw.integers(1, 5))) for _ in range(count)]
    return "".join(word + ("\n    " if i % 7 == 6 else " ") for i, word in enumerate(made))


@pytest.fixture(scope="session", name="words")
def _words() -> Callable[[int, int], str]:
    """``words`` for tests, which cannot import from here."""
    return words


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Sixty documents of 1 to 400 words, a quarter of them held out."""
    sizes = np.random.default_rng(0).integers(1, 400, 60)
    texts = [(f"doc{i:02d}", words(i, int(size)).encode()) for i, size in enumerate(sizes)]
    return make_corpus("made", texts, licence="CC0-1.0", one_in=4)


@pytest.fixture(scope="session")
def tokenizer(corpus: Corpus) -> Tokenizer:
    """512 ids learnt on the training split."""
    return Tokenizer.train([d.text for d in corpus.select("train")], 512)


@pytest.fixture(scope="session")
def shards(corpus: Corpus, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """The corpus, written and opened; read-only."""
    return write_shards(tmp_path_factory.mktemp("shards"), [corpus], tokenizer)


@pytest.fixture
def new_shards(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> Callable[[], Path]:
    """Writes a fresh copy that a test may damage, and says where."""

    def make() -> Path:
        return write_shards(tmp_path / "shards", [corpus], tokenizer).folder

    return make
