"""Documents that come as records of a table: JSON Lines, and the rows of a Hugging Face data set."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trine.data._errors import DataError
from trine.data.sources import HELD_OUT_ONE_IN, LARGEST_FILE, Corpus, Dropped, make_corpus

LARGEST_LINE = LARGEST_FILE
"""Bytes of the longest line, and so of the largest record, of a JSON Lines file."""

Named = tuple[list[tuple[str, bytes]], list[Dropped]]


def record_text(record: Mapping[str, Any], column: str, name: str, kept: list[tuple[str, bytes]]) -> Dropped | None:
    """Add the text of one record to ``kept``, or say why it has none."""
    text = record.get(column)
    if not isinstance(text, str):
        found = "nothing" if text is None else type(text).__name__
        return Dropped(name, f"{column!r} holds {found}, need text")
    try:
        kept.append((name, text.encode()))
    except UnicodeEncodeError as error:
        return Dropped(name, f"not valid Unicode at character {error.start}")
    return None


def read_json_lines(name: str, path: Path, column: str = "text") -> Named:
    """One document a line: an object whose ``column`` holds its text. ``.gz`` files are unpacked.

    Returns:
        (name, content) pairs, named ``FILE:LINE``, and the lines that hold none.

    Raises:
        DataError: the file cannot be read, is a damaged gzip file, or has a line of more than `LARGEST_LINE` bytes.
    """
    kept: list[tuple[str, bytes]] = []
    dropped: list[Dropped] = []
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            # A line is never read whole before its length is known: a file of zeros has one that fills any memory.
            for number, line in enumerate(iter(lambda: file.readline(LARGEST_LINE + 1), b""), 1):
                if len(line.rstrip(b"\n")) > LARGEST_LINE:
                    raise DataError(
                        f"JSON Lines file {path}: line {number} is enormous (more than {LARGEST_LINE} bytes); "
                        "need a record a line"
                    )
                if not line.strip():
                    continue
                place = f"{name}:{number}"
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    dropped.append(Dropped(place, f"is not JSON ({str(error).split(':')[0]})"))
                    continue
                if isinstance(record, dict):
                    wrong = record_text(record, column, place, kept)
                    dropped += [wrong] if wrong else []
                else:
                    dropped.append(Dropped(place, f"holds {type(record).__name__}, need an object"))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"JSON Lines file {path}: cannot be read ({reason})") from error
    return kept, dropped


def dataset_source(
    dataset: Iterable[Mapping[str, Any]],
    name: str,
    *,
    column: str = "text",
    licence: str = "unknown",
    limit: int | None = None,
    one_in: int = HELD_OUT_ONE_IN,
) -> Corpus:
    """The rows of a Hugging Face ``datasets.Dataset`` or ``IterableDataset``, or of anything that yields mappings.

    The object is only iterated over, so nothing of that library is needed here.

    Args:
        dataset: one split, for example ``load_dataset(...)["train"]``.
        name: name of the source.
        column: the column that holds the text.
        licence: SPDX identifier.
        limit: rows to take at most; None takes all.
        one_in: one document in this many is held out.

    Raises:
        DataError: several splits at once, no such column, or no text.
    """
    if isinstance(dataset, Mapping):
        raise DataError(f"source {name}: found the splits {', '.join(map(str, dataset))}, need one of them")
    columns = getattr(dataset, "column_names", None)
    if columns is not None and column not in columns:
        raise DataError(f"source {name}: no column {column!r}, the data set has {', '.join(columns)}")
    kept: list[tuple[str, bytes]] = []
    dropped: list[Dropped] = []
    for number, record in enumerate(dataset):
        if limit is not None and number >= limit:
            break
        wrong = record_text(record, column, f"{number:09d}", kept)
        dropped += [wrong] if wrong else []
    origin = {"kind": "data set", "column": column, "limit": str(limit)}
    fingerprint = getattr(dataset, "_fingerprint", None)
    if fingerprint:
        origin["fingerprint"] = str(fingerprint)
    return make_corpus(name, kept, licence=licence, dropped=dropped, origin=origin, one_in=one_in)
