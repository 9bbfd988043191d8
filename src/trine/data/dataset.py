"""From the names of sources to shards ready to train on, built once and found again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trine._log import logger
from trine.data._errors import DataError
from trine.data.shards import Shards, write_shards
from trine.data.sources import HELD_OUT_ONE_IN, Corpus
from trine.data.store import STORE, load_source, source_identity
from trine.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Recipe:
    """Documents that are made when shards are built, and only then: a generator of tasks, for example.

    Attributes:
        source: name of the source.
        origin: everything that decides what is made (generator, version, sizes, seed); another one is another source.
        make: gives the documents' corpus; its ``source`` and ``origin`` must be these.
    """

    source: str
    origin: Mapping[str, str]
    make: Callable[[], Corpus] = field(compare=False)


SourceLike = str | Path | Corpus | Recipe


def prepare(
    folder: str | Path,
    source: SourceLike | Sequence[SourceLike] = "stdlib",
    vocab_size: int = 4096,
    one_in: int = HELD_OUT_ONE_IN,
    *,
    store: str | Path = STORE,
) -> Shards:
    """Open the shards in ``folder``, or build them there: read the sources, learn a vocabulary, tokenise, write.

    An existing folder is used as it is when it holds these sources and vocabulary size: a run never sees its data
    change.

    Args:
        folder: cache folder, for example ``runs/NAME/data``.
        source: one or more of: ``"stdlib"``, a name in the store, a folder or file of text, a ``Corpus``, a ``Recipe``.
        vocab_size: size of the vocabulary, learnt on the training split of all sources but generated ones.
        one_in: one document in this many is held out of the sources that are given by name.
        store: folder of the store (``trine data add``).

    Raises:
        DataError: no data, an unreadable folder, damaged shards, or shards of something else in ``folder``.
    """
    root = Path(folder)
    wanted = [source] if isinstance(source, SourceLike) else list(source)
    if not wanted or any(isinstance(one, str) and not one for one in wanted):
        raise DataError(f"shards {root}: no source named")
    if (root / "manifest.json").exists():
        shards = Shards.open(root)
        found, asked = _held(shards), (_asked(wanted, store), vocab_size, one_in)
        if not any(isinstance(one, str | Path) for one in wanted):
            found, asked = (*found[:2], 0), (*asked[:2], 0)
        if found != asked:
            raise DataError(
                f"shards {root}: hold source {found[0]}, {found[1]} ids, 1 in {found[2]} held out; "
                f"asked for {asked[0]}, {asked[1]} ids, 1 in {asked[2]}; name another folder"
            )
        return shards
    began = time.perf_counter()
    corpora = [_corpus(one, one_in, store) for one in wanted]
    learnt = [corpus for corpus in corpora if corpus.vocabulary] or corpora
    texts = [document.text for corpus in learnt for document in corpus.select("train")]
    if not texts:
        count, names = sum(len(corpus.documents) for corpus in learnt), ", ".join(corpus.source for corpus in learnt)
        raise DataError(f"source {names}: all {count} documents are held out, none to train on")
    tokenizer = Tokenizer.train(texts, vocab_size)
    shards = write_shards(root, corpora, tokenizer)
    logger.info(
        "data: %d documents, %d tokens, %d dropped, %.1f s",
        len(shards.documents),
        shards.tokens.size,
        sum(len(corpus.dropped) for corpus in corpora),
        time.perf_counter() - began,
    )
    if not shards.select("held_out").size:
        logger.warning("data: none of %d documents is held out (1 in %d)", len(shards.documents), one_in)
    return shards


def _corpus(source: SourceLike, one_in: int, store: str | Path) -> Corpus:
    """Read or make the documents of one source."""
    if isinstance(source, Corpus):
        return source
    if isinstance(source, Recipe):
        made = source.make()
        if made.source != source.source or made.origin != dict(source.origin):
            raise DataError(f"source {source.source}: its recipe made {made.source} from {made.origin}")
        return made
    return load_source(str(source), one_in=one_in, store=store)


def _asked(wanted: Sequence[SourceLike], store: str | Path) -> str:
    """What identifies the sources asked for, without reading their texts."""
    found = []
    for one in wanted:
        if isinstance(one, Corpus | Recipe):
            found.append(_identity(one.source, one.origin, getattr(one, "place", "")))
        else:
            found.append(_identity(*source_identity(str(one), store)))
    return ", ".join(found)


def _held(shards: Shards) -> tuple[str, int, int]:
    """Sources, vocabulary size and held-out rate of shards that ``prepare`` made."""
    places = shards.manifest.get("places", {})
    sources = shards.manifest["sources"]
    rates = [one["held_out_one_in"] for one in sources if one["origin"].get("kind") in _READ]
    found = [_identity(one["name"], one["origin"], places.get(one["name"], "")) for one in sources]
    return ", ".join(found), shards.tokenizer.vocab_size, rates[0] if rates else 0


_STDLIB, _FOLDER = "python standard library", "folder"
_READ = (_STDLIB, _FOLDER, "store")
"""Kinds of sources that are given by name and read from a place."""


def _identity(name: str, origin: Mapping[str, Any], place: str) -> str:
    """What tells a source from others: where it lies, or what it was made from."""
    if origin.get("kind") == _STDLIB:
        return "stdlib"
    if origin.get("kind") == _FOLDER and place:
        return place
    return f"{name} ({', '.join(f'{key} {value}' for key, value in sorted(origin.items()))})" if origin else name
