"""From the name of a source to shards ready to train on, built once and found again."""

from __future__ import annotations

import time
from pathlib import Path

from trine._log import logger
from trine.data._errors import DataError
from trine.data.shards import Shards, write_shards
from trine.data.sources import HELD_OUT_ONE_IN, load_source
from trine.data.tokenizer import Tokenizer


def prepare(
    folder: str | Path, source: str = "stdlib", vocab_size: int = 4096, one_in: int = HELD_OUT_ONE_IN
) -> Shards:
    """Open the shards in ``folder``, or build them there: read the source, learn a vocabulary, tokenise, write.

    An existing folder is used as it is when it holds this source and vocabulary size; a run never sees its data change.

    Args:
        folder: cache folder, for example ``runs/NAME/data``.
        source: ``"stdlib"`` or a folder of text files.
        vocab_size: size of the vocabulary, learnt on the training split only.
        one_in: one document in this many is held out.

    Raises:
        DataError: no data, an unreadable folder, damaged shards, or shards of something else in ``folder``.
    """
    root = Path(folder)
    if (root / "manifest.json").exists():
        shards = Shards.open(root)
        wanted = source if source == "stdlib" else Path(source).resolve().name
        if shards.sources != (wanted,) or shards.tokenizer.vocab_size != vocab_size:
            raise DataError(
                f"shards {root}: hold {', '.join(shards.sources)} with {shards.tokenizer.vocab_size} ids, "
                f"asked for {wanted} with {vocab_size}; name another folder"
            )
        return shards
    began = time.perf_counter()
    corpus = load_source(source, one_in=one_in)
    texts = [document.text for document in corpus.select("train")]
    if not texts:
        raise DataError(f"source {corpus.source}: all {len(corpus.documents)} documents are held out, none to train on")
    tokenizer = Tokenizer.train(texts, vocab_size)
    shards = write_shards(root, [corpus], tokenizer)
    logger.info(
        "data: %d documents, %d tokens, %d dropped, %.1f s",
        len(shards.documents),
        shards.tokens.size,
        len(corpus.dropped),
        time.perf_counter() - began,
    )
    return shards
