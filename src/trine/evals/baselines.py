"""What ordinary compressors and byte n-grams reach on the held-out text: the numbers a model has to beat.

They depend on the data alone, so they are kept beside the shards, named by the manifest's hash.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trine._log import logger
from trine.data import DataError, Shards
from trine.data._files import write_atomically
from trine.evals.ngrams import HIGHEST_ORDER, ngram_bits

FORMAT_VERSION = 1


def _xz_size(data: bytes, extreme: bool = False) -> int:
    """Bytes of the file that ``xz -9`` (``-9e``) writes.

    The dictionary is no longer than the data: the same size as with the preset's 64 MB, without the 0.7 GB and the
    tenth of a second that the encoder takes for those.
    """
    preset = 9 | (lzma.PRESET_EXTREME if extreme else 0)
    dictionary = min(64 << 20, max(4096, 1 << (len(data) - 1).bit_length() if data else 0))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": dictionary}]
    return len(lzma.compress(data, filters=filters))


def compressor_bits(documents: Sequence[bytes]) -> dict[str, float]:
    """Bits per byte of ``gzip -9`` and ``xz -9``, on the concatenated documents and (``_each``) on each alone.

    Sizes are those of whole files as the two programs write them, headers included (gzip without a name or time).

    Raises:
        DataError: no bytes.
    """
    together = b"".join(documents)
    if not together:
        raise DataError("baselines: no held-out bytes to compress")

    def gzipped(data: bytes) -> int:
        return len(gzip.compress(data, 9, mtime=0))

    per_byte = 8.0 / len(together)
    return {
        "gzip": gzipped(together) * per_byte,
        "gzip_each": sum(map(gzipped, documents)) * per_byte,
        "xz": _xz_size(together) * per_byte,
        "xz_each": sum(map(_xz_size, documents)) * per_byte,
    }


def primed_xz(train: Sequence[bytes], held_out: Sequence[bytes], threads: int = 1) -> float:
    """Bits per byte that ``xz -9e`` adds for held-out text after it has seen the training text.

    This is the length of training and held-out text together, minus the length of the training text: a compressor that
    can look every line up. Two compressions of about a second a megabyte.

    Args:
        train: training documents.
        held_out: held-out documents.
        threads: the compressions run at the same time when at least 2.

    Raises:
        DataError: no held-out bytes.
    """
    seen, new = b"".join(train), b"".join(held_out)
    if not new:
        raise DataError("baselines: no held-out bytes to compress")
    with ThreadPoolExecutor(2 if threads > 1 else 1) as pool:
        without, with_it = pool.map(lambda data: _xz_size(data, extreme=True), [seen, seen + new])
    return 8.0 * (with_it - without) / len(new)


def _summary(documents: Sequence[bytes], bits_by_order: np.ndarray) -> dict[str, Any]:
    """The baselines of one set of documents."""
    total = sum(map(len, documents))
    by_order = (bits_by_order.sum(axis=1) / total).tolist()
    best = int(np.argmin(by_order))
    return {
        **compressor_bits(documents),
        **{f"ngram{order}": value for order, value in enumerate(by_order, start=1)},
        "ngram_best": by_order[best],
        "ngram_best_order": best + 1,
        "documents": len(documents),
        "bytes": total,
    }


def baselines(
    shards: Shards, *, primed: bool = True, cache: str | Path | None = None, threads: int = 1
) -> dict[str, Any]:
    """The baselines of the held-out documents, in bits per byte; computed once for given data and then read back.

    Args:
        shards: the data.
        primed: also ``xz_primed``, which takes most of the time.
        cache: folder for the file ``baselines-<hash>.json``, default the shard folder.
        threads: compressions at the same time for ``xz_primed``.

    Returns:
        ``{"held_out": {...}, "held_out_all": {...}}``: without near-copies, and with them. Each has ``gzip``, ``xz``
        (on the concatenated documents), ``gzip_each``, ``xz_each``, ``ngram1`` to ``ngram8``, ``ngram_best``,
        ``ngram_best_order``, ``documents``, ``bytes``; ``held_out`` also ``xz_primed`` when asked for. ``held_out`` is
        None when every held-out document is a near-copy, and ``held_out_all`` has ``xz_primed`` then.

    Raises:
        DataError: nothing is held out.
    """
    path = Path(cache if cache is not None else shards.folder) / f"baselines-{shards.hash[:16]}.json"
    found = _read(path, shards.hash)
    if found is None:
        found = _compute(shards)
    quoted = found["held_out"] or found["held_out_all"]
    fresh = primed and "xz_primed" not in quoted
    if fresh:
        train, every, honest = _texts(shards)
        quoted["xz_primed"] = primed_xz(train, honest or every, threads)
    if fresh or not path.exists():
        content = {"format_version": FORMAT_VERSION, "data": shards.hash, **found}
        write_atomically(path, json.dumps(content, indent=1).encode())
    return found


def _texts(shards: Shards) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Training documents, all held-out documents, and those that are no near-copies."""

    def text(i: int) -> bytes:
        return shards.tokenizer.decode_bytes(shards.stream(i))

    train = [text(i) for i in shards.select("train").tolist()]
    every = [text(i) for i in shards.select("held_out").tolist()]
    honest = [text(i) for i in shards.select("held_out", near_copy=False).tolist()]
    if not every:
        raise DataError(f"baselines: nothing is held out in {shards.folder}")
    return train, every, honest


def _compute(shards: Shards) -> dict[str, Any]:
    """All baselines but the primed one."""
    train, every, honest = _texts(shards)
    bits = ngram_bits(train, every, HIGHEST_ORDER)
    near = np.array([shards.documents[i].near_copy for i in shards.select("held_out").tolist()])
    return {
        "held_out": _summary(honest, bits[:, ~near]) if honest else None,
        "held_out_all": _summary(every, bits),
    }


def _read(path: Path, data: str) -> dict[str, Any] | None:
    """Baselines kept earlier, or None when there are none for this data."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s: cannot be read (%s); computing the baselines again", path, error)
        path.unlink(missing_ok=True)
        return None
    if not isinstance(kept, dict) or kept.get("format_version") != FORMAT_VERSION or kept.get("data") != data:
        path.unlink(missing_ok=True)
        return None
    return {"held_out": kept["held_out"], "held_out_all": kept["held_out_all"]}
