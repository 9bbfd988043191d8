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
        held = _held(shards)
        wanted = (source if source == "stdlib" else str(Path(source).resolve()), vocab_size, one_in)
        if held != wanted:
            raise DataError(
                f"shards {root}: hold source {held[0]}, {held[1]} ids, 1 in {held[2]} held out; "
                f"asked for {wanted[0]}, {wanted[1]} ids, 1 in {wanted[2]}; name another folder"
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
    if not shards.select("held_out").size:
        logger.warning("data: none of %d documents is held out (1 in %d)", len(shards.documents), one_in)
    return shards


def _held(shards: Shards) -> tuple[str, int, int]:
    """Source, vocabulary size and held-out rate of shards that ``prepare`` made."""
    if len(shards.sources) != 1:
        return ", ".join(shards.sources), shards.tokenizer.vocab_size, 0
    name = shards.sources[0]
    described = shards.manifest["sources"][0]
    from_folder = described["origin"].get("kind") == "folder"
    place = shards.manifest.get("places", {}).get(name, name) if from_folder else name
    return place, shards.tokenizer.vocab_size, described["held_out_one_in"]
